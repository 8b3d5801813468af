"""A server that speaks as much of the Hub's API as an upload needs, and fails where a test says so."""

import base64
import hashlib
import json
import re
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


OWNER = "me"


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


class FakeHub:
    """Repositories, and what was asked of them.

    Attributes:
        files: By repository and branch, by path the contents.
        commits: By repository the messages of its commits.
        requests: How often each stage was asked for: create, preupload, lfs, commit.
        faults: By stage (and repository) what it answers: a status or "cut", and how many times; see `fail`.
        private: By repository whether it was made private.
        tokens: Those that came with requests.
    """

    def __init__(self):
        self.files: dict[tuple[str, str], dict[str, bytes]] = {}
        self.commits: dict[str, list[str]] = {}
        self.requests: Counter[str] = Counter()
        self.private: dict[str, bool] = {}
        self.tokens: set[str] = set()
        self.faults: dict[tuple[str, str], tuple[int | str, int]] = {}
        self.stored: dict[str, bytes] = {}
        self.at_once: Counter[str] = Counter()
        self.most_at_once = 0
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def fail(self, stage: str, repository: str, how: int | str, times: int):
        self.faults[stage, repository] = (how, times)

    def fault(self, stage: str, repository: str) -> int | str | None:
        with self.lock:
            self.requests[stage] += 1
            how, left = self.faults.get((stage, repository), (None, 0))
            if left:
                self.faults[stage, repository] = (how, left - 1)
            return how if left else None

    def content(self, repository: str, branch: str = "main") -> dict[str, bytes]:
        return self.files.get((f"{OWNER}/{repository}", branch), {})


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, content, status: int = 200, **headers: str):
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def failed(self, stage: str, repository: str) -> bool:
        how = self.hub.fault(stage, repository.split("/")[-1])
        if how == "cut":
            self.close_connection = True
            self.connection.shutdown(2)
        elif how is not None:
            self.answer({"error": f"{stage} says {how}"}, how, **({"Retry_After": "0"} if how == 429 else {}))
        return how is not None

    def read(self) -> bytes:
        if "Authorization" in self.headers:
            self.hub.tokens.add(self.headers["Authorization"].removeprefix("Bearer "))
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def do_PUT(self):
        content, repository = self.read(), self.path.split("/")[2]
        if not self.failed("lfs", repository):
            self.hub.stored[hashlib.sha256(content).hexdigest()] = content
            self.answer({})

    def do_GET(self):
        self.read()
        if match := re.match(r"/api/models/([^/]+/[^/?]+)/tree/([^/?]+)", self.path):
            files = self.hub.files.get((match[1], match[2]), {})
            self.answer([{"type": "file", "path": p, "size": len(c), "oid": git_oid(c)} for p, c in files.items()])
        elif match := re.match(r"/api/models/([^/]+/[^/?]+)(?:/revision/([^/?]+))?", self.path):
            files = self.hub.files.get((match[1], match[2] or "main"), {})
            self.answer({"id": match[1], "sha": "0" * 40, "siblings": [{"rfilename": path} for path in files]})
        else:
            self.answer({"error": self.path}, 404)

    def do_POST(self):
        body = self.read()
        if self.path == "/api/repos/create":
            self.create(json.loads(body))
        elif self.path == "/api/validate-yaml":
            self.answer({"warnings": [], "errors": []})
        elif match := re.match(r"/api/models/([^/]+/[^/]+)/preupload/([^/?]+)", self.path):
            self.preupload(match[1], match[2], json.loads(body))
        elif match := re.match(r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self.path):
            self.lfs(match[1], json.loads(body))
        elif match := re.match(r"/api/models/([^/]+/[^/]+)/commit/([^/?]+)", self.path):
            self.commit(match[1], match[2], [json.loads(line) for line in body.splitlines()])
        else:
            self.answer({"error": self.path}, 404)

    def create(self, wanted):
        repository = f"{wanted.get('organization') or OWNER}/{wanted['name']}"
        if self.failed("create", repository):
            return
        self.hub.private.setdefault(repository, wanted.get("private") or wanted.get("visibility") == "private")
        self.hub.commits.setdefault(repository, [])
        self.answer({"url": f"{self.hub.url}/{repository}", "name": repository, "id": repository})

    def preupload(self, repository, branch, wanted):
        if self.failed("preupload", repository):
            return
        there = self.hub.files.get((repository, branch), {})
        files = []
        for file in wanted["files"]:
            is_lfs = file["path"].endswith((".safetensors", ".pt", ".pth"))
            content = there.get(file["path"])
            oid = content and (hashlib.sha256(content).hexdigest() if is_lfs else git_oid(content))
            mode = "lfs" if is_lfs else "regular"
            files.append({"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        self.answer({"files": files})

    def lfs(self, repository, wanted):
        objects = []
        for one in wanted["objects"]:
            upload = {"upload": {"href": f"{self.hub.url}/lfs/{repository.split('/')[-1]}/{one['oid']}"}}
            known = one["oid"] in self.hub.stored
            objects.append({**one, **({} if known else {"actions": upload})})
        self.answer({"transfer": "basic", "objects": objects})

    def commit(self, repository, branch, lines):
        hub = self.hub
        with hub.lock:
            hub.at_once[repository] += 1
            hub.most_at_once = max(hub.most_at_once, hub.at_once[repository])
        how = hub.faults.get(("commit", repository.split("/")[-1]), (None, 0))
        # A connection that is cut may have brought the commit already: the worst case.
        if how[0] != "cut" and self.failed("commit", repository):
            hub.at_once[repository] -= 1
            return
        files = hub.files.setdefault((repository, branch), {})
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                hub.commits[repository].append(value["summary"])
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.stored[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        hub.at_once[repository] -= 1
        if how[0] != "cut" or not self.failed("commit", repository):
            url = f"{hub.url}/{repository}/commit/{len(hub.commits[repository]):040d}"
            self.answer({"commitUrl": url, "commitOid": "0" * 40, "pullRequestUrl": None})
