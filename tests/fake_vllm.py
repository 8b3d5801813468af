"""A vLLM server that is none: it records what it is asked, takes part in weight transfers over gloo, and can be told
to fail in all the ways that servers do."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlparse

import torch

from hacpo_trl.generation.vllm_servers.transfer import GlooGroup


class FakeServer:
    """Serves one agent, in a thread of this process.

    Args:
        tokenizer: What it tokenizes with.
        model: The path that it says it serves.
        vocab_size: Size of its model's vocabulary.

    Attributes:
        requests: What it was asked: pairs of path and body.
        weights: What it was sent, by name, in its dtype.
        version: Its weight version.
        answers: Token ids of the answers it gives in turn; each is `(ids, log-probabilities)`.
        before: By path, what is done before a request is answered; an exception is answered with status 500.
        missing: Paths that it does not have.
        keys: What authorizations it was sent.
    """

    def __init__(self, tokenizer, model: str, vocab_size: int):
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.served = {"id": model, "root": model, "max_model_len": 64}
        self.info = {
            "model_config": {
                "dtype": "torch.float32",
                "logprobs_mode": "processed_logprobs",
                "generation_config": "vllm",
            },
            "weight_transfer_config": {"backend": "hacpo_gloo"},
            "lora_config": None,
        }
        self.requests: list[tuple[str, dict]] = []
        self.answers = [([5, 6, 1], [-0.5, -1.0, -1.5])]
        self.before = {}
        self.missing: set[str] = set()
        self.keys: set[str | None] = set()
        self.restart()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def restart(self):
        """Forgets everything that a server loses when it is started anew."""
        self.version, self.weights, self.group, self.updating = "default", {}, None, False

    def close(self):
        self._http.shutdown()
        self._http.server_close()

    def asked(self, path: str) -> list[dict]:
        return [body for asked, body in self.requests if asked == path]

    # ---- what is answered -------------------------------------------------------------------------------------------
    def answer(self, path: str, body: dict) -> dict:
        if path in self.before:
            self.before[path](body)
        name = path.strip("/").replace("/", "_").replace("-", "_")
        return getattr(self, f"_{name}")(body)

    def _health(self, body):
        return {}

    def _v1_models(self, body):
        return {"data": [self.served]}

    def _server_info(self, body):
        return {"vllm_config": self.info}

    def _get_world_size(self, body):
        return {"world_size": 1}

    def _weight_info(self, body):
        return {"weight_version": self.version}

    def _tokenize(self, body):
        return {"tokens": self.tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]}

    def _update_weight_version(self, body):
        self.version = body["new_version"]
        return {}

    def _init_weight_transfer_engine(self, body):
        info = body["init_info"]
        self.group = GlooGroup(
            info["master_address"], info["master_port"], info["name"], 1, info["world_size"], info["timeout"]
        )
        return {}

    def _start_weight_update(self, body):
        if self.updating:
            raise RuntimeError("a weight update is already active")
        self.updating = True
        return {}

    def _update_weights(self, body):
        if not self.updating:
            raise RuntimeError("start_weight_update must be called before")
        update = body["update_info"]
        if set(update) != {"names", "dtype_names", "shapes"}:
            raise ValueError("Invalid update_info")
        for name, dtype, shape in zip(update["names"], update["dtype_names"], update["shapes"], strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype))
            self.group.broadcast([(name, tensor)])
            assert name not in self.weights or self.version.startswith("updating"), "sent outside of an update"
            self.weights[name] = tensor
        return {}

    def _finish_weight_update(self, body):
        if not self.updating:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update")
        self.updating = False
        self.version = body.get("weight_version", self.version)
        return {}

    def _reset_prefix_cache(self, body):
        return {"success": True}

    def _v1_load_lora_adapter(self, body):
        return {}

    def _v1_completions(self, body):
        for token_id in body.get("logit_bias", {}):
            if int(token_id) >= self.vocab_size:
                raise IndexError("out of vocabulary")
        prompts = body["prompt"] if isinstance(body["prompt"][0], list) else [body["prompt"]]
        choices = []
        for i, prompt in enumerate(prompts):
            for j in range(body.get("n", 1)):
                ids, logps = self.answers[(i * body.get("n", 1) + j) % len(self.answers)]
                tokens = [f"token_id:{token_id}" for token_id in ids]
                logprobs = {
                    "tokens": tokens,
                    "token_logprobs": logps,
                    "top_logprobs": [{token: logp} for token, logp in zip(tokens, logps, strict=True)],
                }
                choices.append({"prompt_token_ids": prompt, "token_ids": ids, "logprobs": logprobs})
        return {"choices": choices}

    def _handler(self):
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def _respond(self, body):
                path = urlparse(self.path).path
                fake.requests.append((path, body))
                fake.keys.add(self.headers.get("authorization"))
                try:
                    status, content = (404, {}) if path in fake.missing else (200, fake.answer(path, body))
                except IndexError as error:
                    status, content = 400, {"error": str(error)}
                except BaseException as error:
                    if path == "/update_weights":
                        # As vLLM does: an update that fails is over.
                        fake.updating = False
                    status, content = 500, {"error": repr(error)}
                payload = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def do_GET(self):
                self._respond({})

            def do_POST(self):
                self._respond(json.loads(self.rfile.read(int(self.headers["content-length"] or 0)) or "{}"))

            def log_message(self, *args):
                pass

        return Handler
