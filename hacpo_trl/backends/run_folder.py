"""A run and its output folder: one run at a time, checkpoints that are whole or not there, which of them is continued.

Nothing here knows of policies; what is in a checkpoint is in `checkpoints.py` and `step_checkpoints.py`.
"""

import contextlib
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from accelerate.utils import broadcast_object_list, gather_object
from filelock import FileLock, Timeout
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from transformers.utils import logging

from ..files import INCOMPLETE, LOCK, UPLOADS
from .checkpoints import Checkpoints, SaveError
from .manifest import checkpoints, faults, newest_complete, put_in_place, seal, staging, tidy


logger = logging.get_logger(__name__)


class RunFolderError(RuntimeError):
    """The output folder cannot be written, or is another run's; or a checkpoint in it cannot be continued."""


class NoCheckpointError(RunFolderError):
    """There is nothing to continue from."""


def list_of(faults_found: list[str], most: int = 3) -> str:
    more = len(faults_found) - most
    return "; ".join(faults_found[:most]) + (f"; and {more} more" if more > 0 else "")


def resolve_checkpoint(wanted: str | bool | None, output_dir: str | os.PathLike) -> str | None:
    """The checkpoint to continue from, as `resume_from_checkpoint` says; whole, whatever else.

    Args:
        wanted: A checkpoint's folder; True for the newest complete one in `output_dir`; None or False for none.
        output_dir: Where the run's checkpoints are.

    Raises:
        RunFolderError: The checkpoint is damaged, or there is none.
    """
    if wanted is None or wanted is False:
        return None
    if wanted is True:
        newest, skipped = newest_complete(Path(output_dir))
        for path, wrong in skipped.items():
            logger.warning(f"{path} is not complete and skipped: {list_of(wrong)}.")
        if newest is None:
            raise NoCheckpointError(f"There is no complete checkpoint in {output_dir} to continue from.")
        if skipped:
            logger.warning(f"The run is continued from {newest}.")
        return str(newest)
    if wrong := faults(Path(wanted)):
        others = [str(path) for path in checkpoints(Path(wanted).parent) if path != Path(wanted) and not faults(path)]
        hint = f" Complete ones beside it: {', '.join(others)}." if others else ""
        raise RunFolderError(f"The checkpoint {wanted} is not complete: {list_of(wrong)}.{hint}")
    return wanted


def lock(folder: Path) -> FileLock:
    """Makes the folder and takes it for this process, until the lock is released or the process ends.

    Raises:
        RunFolderError: It cannot be written, or another run has it.
    """
    held, owner = FileLock(folder / LOCK, timeout=0), folder / f"{LOCK}.owner"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        held.acquire()
        owner.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    except Timeout:
        by = owner.read_text(encoding="utf-8") if owner.is_file() else "another process"
        raise RunFolderError(
            f"output_dir {folder} belongs to a run that is under way: {by}. Give this one another output_dir."
        ) from None
    except OSError as error:
        raise RunFolderError(f"output_dir {folder} cannot be written: {error}.") from error
    return held


class RunFolder(Checkpoints):
    """The part of `MultiPolicyTrainer` that decides when and where checkpoints are written, and which one is read."""

    # Whether what is saved goes beside its place for now.
    _is_staging = False

    @contextlib.contextmanager
    def _of_this_run(self) -> Iterator[None]:
        """Holds the output folder, cleared of what a killed run has left, as long as the block lasts."""
        folder = Path(self.args.output_dir)
        with contextlib.ExitStack() as stack:
            with self._failing_together():
                if self.args.should_save:
                    stack.enter_context(lock(folder))
                    tidy(folder)
                    shutil.rmtree(folder / UPLOADS, ignore_errors=True)
            yield

    def _resolve(self, wanted: str | bool | None) -> str | None:
        """As `resolve_checkpoint`, read by one process."""
        found = None
        with self._failing_together():
            if self.args.process_index == 0:
                found = resolve_checkpoint(wanted, self.args.output_dir)
        return broadcast_object_list([found])[0]

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        """Raises in every process what was raised in one, for which the others would wait. Collective."""
        failure = None
        try:
            yield
        except Exception as error:
            failure = error
        failures = [error for error in gather_object([failure]) if error is not None]
        if failures:
            raise failure or failures[0]

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, INCOMPLETE) if self._is_staging else folder

    def _save_checkpoint(self, model, trial):
        """As Trainer's, beside its place; it gets there when all processes have written all of it."""
        folder = Path(self._get_output_dir(trial))
        final = folder / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        self._is_staging = True
        try:
            super()._save_checkpoint(model, trial)
            self._finish(final)
        except (SaveError, OSError) as error:
            # Room first: for what is said now to be written into a log.
            shutil.rmtree(staging(final), ignore_errors=True)
            raise RunFolderError(self._cannot_write(final, error)) from error
        finally:
            self._is_staging = False
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(final))
        if self.args.should_save:
            # By number: the clock of a file system may step back.
            best, limit = self.state.best_model_checkpoint, self.args.save_total_limit
            rotate_checkpoints(str(folder), limit, best, use_mtime=False)

    def _finish(self, final: Path):
        staged = staging(final)
        best = final.with_name(f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}")
        if self.state.best_global_step and (best == final or best.exists()):
            self.state.best_model_checkpoint = str(best)
        if self.args.should_save:
            self.state.save_to_json(str(staged / TRAINER_STATE_NAME))
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            seal(staged)
            put_in_place(final)
        self.accelerator.wait_for_everyone()
        # Where machines share no file system, each has a part of its own.
        if self.accelerator.is_local_main_process and staged.exists():
            seal(staged)
            put_in_place(final)
        self.accelerator.wait_for_everyone()

    def _cannot_write(self, final: Path, error: Exception) -> str:
        free = shutil.disk_usage(final.parent).free / 2**20
        last, _ = newest_complete(final.parent)
        remedy = f"continue from {last.name}, which is complete" if last else "start anew; there is no earlier one"
        return f"{final.name} is not saved. {error}. On that disk {free:,.0f} MiB are free. Make room, and {remedy}."

    def _push_from_checkpoint(self, checkpoint_folder: str):
        """Not before it is in its place, see `_save_checkpoint`."""
