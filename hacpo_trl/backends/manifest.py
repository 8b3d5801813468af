"""Folders that are there whole or not at all: written beside their place, sealed by a manifest, and moved last.

output_dir/
├── .incomplete/checkpoint-40/   while it is written; what a kill leaves here, the next run clears away
└── checkpoint-40/
    ├── ...
    └── MANIFEST                 every other file's size and SHA-256, written when all of them were
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from ..files import INCOMPLETE, MANIFEST


# Hashing lets go of the interpreter's lock, so that threads share the work of large checkpoints.
THREADS = 8


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)


def _digest(path: Path) -> tuple[int, str]:
    """A file's size and SHA-256. What was read is on the disk: older checkpoints are deleted for its sake."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def seal(folder: Path):
    """Writes the manifest of a folder that is complete."""
    files = _files(folder)
    with ThreadPoolExecutor(THREADS) as pool:
        entries = {
            path.relative_to(folder).as_posix(): {"size": size, "sha256": digest}
            for path, (size, digest) in zip(files, pool.map(_digest, files), strict=True)
        }
    temporary = folder / f"{MANIFEST}.writing"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump({"files": entries}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(folder / MANIFEST)


def faults(folder: Path) -> list[str]:
    """What is wrong with a sealed folder, a line each; none if it is as it was sealed."""
    manifest = folder / MANIFEST
    if not folder.is_dir():
        return ["there is no such folder"]
    if not manifest.is_file():
        return [f"{MANIFEST} is missing, which is written last"]
    try:
        entries = json.loads(manifest.read_text(encoding="utf-8"))["files"]
        wanted = {folder / name: (entry["size"], entry["sha256"]) for name, entry in entries.items()}
    except (ValueError, LookupError, TypeError, AttributeError, OSError):
        return [f"{MANIFEST} cannot be read"]

    def fault(path: Path) -> str | None:
        size, digest = wanted[path]
        try:
            if (found := path.stat().st_size) != size:
                return f"has {found} bytes instead of {size}"
            return None if _digest(path)[1] == digest else "has other content than was written"
        except FileNotFoundError:
            return "is missing"
        except OSError as error:
            return f"cannot be read ({error})"

    with ThreadPoolExecutor(THREADS) as pool:
        found = zip(wanted, pool.map(fault, wanted), strict=True)
        return [f"{path.relative_to(folder).as_posix()} {text}" for path, text in found if text]


def checkpoints(output_dir: Path) -> Iterator[Path]:
    """The checkpoints in a folder, complete or not, the newest (by number) first."""
    numbers = {}
    for path in output_dir.iterdir() if output_dir.is_dir() else ():
        if (match := re.fullmatch(rf"{PREFIX_CHECKPOINT_DIR}-(\d+)", path.name)) and path.is_dir():
            numbers[path] = int(match[1])
    yield from sorted(numbers, key=lambda path: numbers[path], reverse=True)


def newest_complete(output_dir: Path) -> tuple[Path | None, dict[Path, list[str]]]:
    """The newest complete checkpoint of a folder, and what is wrong with those that are newer."""
    skipped: dict[Path, list[str]] = {}
    for path in checkpoints(output_dir):
        if not (wrong := faults(path)):
            return path, skipped
        skipped[path] = wrong
    return None, skipped


def staging(final: Path) -> Path:
    """Where the folder is written that will be `final`."""
    return final.parent / INCOMPLETE / final.name


def put_in_place(final: Path):
    """Moves a folder that is sealed from `staging(final)` to its place, also where there is an older one."""
    staged, aside = staging(final), staging(final).with_suffix(".replaced")
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    staged.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(aside, ignore_errors=True)
    with contextlib.suppress(OSError):  # others may be writing there
        staged.parent.rmdir()


def move_files(source: Path, target: Path):
    """Moves a folder's files into another one, each over the one of its name; a file is never there in part."""
    for path in _files(source):
        moved = target / path.relative_to(source)
        moved.parent.mkdir(parents=True, exist_ok=True)
        path.replace(moved)
    shutil.rmtree(source)


def tidy(output_dir: Path):
    """Clears away what a killed run has left: folders that were sealed get their place, the others are deleted."""
    for staged in checkpoints(output_dir / INCOMPLETE):
        if not faults(staged) and not (output_dir / staged.name).exists():
            put_in_place(output_dir / staged.name)
    shutil.rmtree(output_dir / INCOMPLETE, ignore_errors=True)


def _sync_folder(folder: Path):
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
