"""Uploads to the Hub that never end or harm what they belong to.

Each repository has a queue and a thread of its own: uploads to it are made in their order, one at a time. One that
fails is warned about at once and, where another try may help, tried again after pauses that grow; in the end it is
said what was not uploaded, and how to do it by hand. What is uploaded is a copy, of hard links where the disk allows
it: a folder may change or be deleted meanwhile.
"""

import contextlib
import logging
import os
import queue
import shlex
import shutil
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from huggingface_hub import CommitInfo, HfApi


logger = logging.getLogger(__name__)

# Seconds before each further try; the Hub may ask for longer, up to a limit.
PAUSES = (2.0, 10.0, 60.0)
LONGEST_PAUSE = 300.0
# Answers that are no refusal: a limit on requests, a time limit, a fault of the server.
TRY_AGAIN = (408, 429)
HTTP_LIBRARIES = ("httpx", "httpx2", "httpcore", "requests", "urllib3")


@dataclass
class Upload:
    """A folder on its way to a repository.

    Attributes:
        agent: Whose it is, for messages.
        repository: The repository's id; without an owner it is the token's.
        source: The folder.
        message: Of the commit.
        path_in_repo: Where it goes to, the repository's root if None. What was there before is replaced.
        revision: The branch, `main` if None.
        token: The token; the one that is logged in if None.
        private: Whether a repository that has to be made is private.
        future: The commit, or None if it could not be made.
    """

    agent: str
    repository: str
    source: Path
    message: str
    path_in_repo: str | None = None
    revision: str | None = None
    token: str | None = None
    private: bool | None = None
    future: Future[CommitInfo | None] = field(default_factory=Future)

    def __str__(self) -> str:
        where = f" {self.path_in_repo}" if self.path_in_repo else " ." if self.revision else ""
        branch = f" --revision {shlex.quote(self.revision)}" if self.revision else ""
        return f"hf upload {shlex.quote(self.repository)} {shlex.quote(str(self.source))}{where}{branch}"


def copy_of(folder: Path, target: Path, ignore: Sequence[str] = ()) -> Path:
    """Copies a folder's files by hard links, or by content where links cannot be made.

    Args:
        folder: The folder.
        target: Where the copy is made.
        ignore: Patterns of names; neither such a file is copied nor what is in such a folder.
    """
    for path in sorted(folder.rglob("*")):
        relative = path.relative_to(folder)
        if path.is_dir() or any(fnmatch(part, pattern) for part in relative.parts for pattern in ignore):
            continue
        copy = target / relative
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, copy)
        except OSError:
            shutil.copy2(path, copy)
    return target


def may_help(error: Exception) -> bool:
    """Whether an upload that failed so is worth another try."""
    response = getattr(error, "response", None)
    if response is None:
        # A connection that was refused, cut or too slow: an error of the system, or of the HTTP library, whichever the
        # installed version of the Hub's uses.
        library = type(error).__module__.split(".")[0]
        return isinstance(error, (ConnectionError, TimeoutError)) or library in HTTP_LIBRARIES
    return response.status_code >= 500 or response.status_code in TRY_AGAIN


def pause_before(error: Exception, planned: float) -> float:
    """Seconds until the next try: what is planned, or what the Hub asks for if that is more."""
    asked = getattr(getattr(error, "response", None), "headers", {}).get("Retry-After", "")
    return min(max(planned, float(asked) if asked.replace(".", "", 1).isdigit() else 0.0), LONGEST_PAUSE)


class Uploads:
    """The queues of a run's repositories.

    Args:
        folder: Where the copies lie until they are uploaded.

    Attributes:
        failed: What could not be uploaded, with the reason, by repository and place in it; a later upload to the same
            place that succeeds takes its entry away.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.failed: dict[tuple[str, str | None], tuple[Upload, str]] = {}
        self._queues: dict[str, queue.Queue[tuple[Upload, Path]]] = {}
        # The full names of repositories that are there.
        self._made: dict[str, str] = {}
        self._under_way: list[Upload] = []
        self._count = 0

    @property
    def pending(self) -> bool:
        return any(not upload.future.done() for upload in self._under_way)

    def add(self, upload: Upload, ignore: Sequence[str] = ()) -> Future[CommitInfo | None]:
        """Copies a folder and queues it. The result is None where it cannot be uploaded; it never raises."""
        self._count += 1
        try:
            copy = copy_of(upload.source, self.folder / str(self._count), ignore)
        except OSError as error:
            self._give_up(upload, error)
            upload.future.set_result(None)
            return upload.future
        if upload.repository not in self._queues:
            self._queues[upload.repository] = queue.Queue()
            threading.Thread(target=self._work, args=(upload.repository,), daemon=True).start()
        self._under_way = [one for one in self._under_way if not one.future.done()] + [upload]
        self._queues[upload.repository].put((upload, copy))
        return upload.future

    def wait(self, seconds: float | None = None) -> list[Upload]:
        """Waits until all are done, or for so long; returns those that are not."""
        deadline = None if seconds is None else time.monotonic() + seconds
        for upload in self._under_way:
            with contextlib.suppress(TimeoutError):
                upload.future.result(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return [upload for upload in self._under_way if not upload.future.done()]

    def _work(self, repository: str):
        while True:
            upload, copy = self._queues[repository].get()
            commit = None
            try:
                commit = self._push(upload, copy)
                self.failed.pop((repository, upload.path_in_repo), None)
            except Exception as error:
                self._give_up(upload, error)
            shutil.rmtree(copy, ignore_errors=True)
            with contextlib.suppress(OSError):  # others are in it
                self.folder.rmdir()
            upload.future.set_result(commit)

    def _push(self, upload: Upload, copy: Path) -> CommitInfo:
        for pause in PAUSES:
            try:
                return self._try(upload, copy)
            except Exception as error:
                if not may_help(error):
                    raise
                pause = pause_before(error, pause)
                logger.warning(f"{self._what(upload)}: {_short(error)} It is tried again in {pause:g} s.")
                time.sleep(pause)
        return self._try(upload, copy)

    def _try(self, upload: Upload, copy: Path) -> CommitInfo:
        api = HfApi(token=upload.token)
        if upload.repository not in self._made:
            url = api.create_repo(upload.repository, private=upload.private, exist_ok=True)
            self._made[upload.repository] = url.repo_id
        return api.upload_folder(
            repo_id=self._made[upload.repository],
            folder_path=copy,
            path_in_repo=upload.path_in_repo,
            commit_message=upload.message,
            revision=upload.revision,
            # Of an earlier checkpoint in the same place nothing may stay.
            delete_patterns="*" if upload.path_in_repo else None,
        )

    def _give_up(self, upload: Upload, error: Exception):
        self.failed[upload.repository, upload.path_in_repo] = (upload, _short(error))
        logger.warning(f"{self._what(upload)}: {_short(error)} Training goes on.")

    @staticmethod
    def _what(upload: Upload) -> str:
        return f"Agent '{upload.agent}': {upload.source} could not be pushed to {upload.repository}"


def _short(error: Exception) -> str:
    """An error's first line, without what a request is known by."""
    first = str(error).strip().split("\n")[0] or type(error).__name__
    return f"{first.split(' (Request ID')[0].rstrip('.')}."
