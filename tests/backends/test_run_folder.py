"""A run and its folder: kills while a checkpoint is written, damaged checkpoints, full disks, two runs in one."""

import errno
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny
import torch
from transformers import TrainerCallback

from hacpo_trl.backends.manifest import MANIFEST, faults, newest_complete
from hacpo_trl.backends.run_folder import NoCheckpointError, RunFolderError, lock, resolve_checkpoint
from hacpo_trl.embedded import conv_dataset
from hacpo_trl.files import INCOMPLETE


# Two updates a step, a checkpoint after each: the second lies within a step.
SETTINGS = {"max_steps": 5, "save_strategy": "steps", "save_steps": 1, "logging_steps": 2}
# Held-out prompts, before training and on the way.
SETTINGS |= {"eval_dataset": conv_dataset("test", 4), "eval_on_start": True, "eval_strategy": "steps", "eval_steps": 4}

WRITES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate", "shutil.rmtree", "shutil.move"}


def logs_of(trainer) -> list[dict]:
    """What was logged, without what is a time."""
    timed = ("time/", "train_runtime", "eval_runtime")
    return [
        {k: v for k, v in log.items() if not k.startswith(timed) and "per_second" not in k}
        for log in trainer.state.log_history
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing has happened to."""
    trainer = tiny.trainer(tmp_path_factory.mktemp("runs") / "whole", **SETTINGS)
    trainer.train()
    return trainer


@pytest.fixture
def copied(whole, tmp_path):
    """Its folder as it was after the third update."""
    folder = shutil.copytree(whole.args.output_dir, tmp_path / "copied")
    for later in ("checkpoint-4", "checkpoint-5"):
        shutil.rmtree(folder / later)
    return folder


def assert_continues_like(whole, folder):
    resumed = tiny.trainer(folder, **SETTINGS)
    resumed.train(resume_from_checkpoint=True)
    for name in ("qwen", "llama"):
        assert torch.equal(tiny.parameters(whole, name), tiny.parameters(resumed, name))
    assert logs_of(resumed) == logs_of(whole)
    assert sum("eval_reward" in log for log in logs_of(whole)) == 3, "before training, on the way, at the end"
    assert not (Path(folder) / INCOMPLETE).exists()


# ---- kills ----------------------------------------------------------------------------------------------------------
class KilledAtEveryFileEvent(TrainerCallback):
    """After the third update a process saves it, and is killed at its k-th change to a file: for every k."""

    def __init__(self, trainer, folder):
        self.trainer, self.folder, self.left = trainer, folder, []

    def on_step_end(self, args, state, control, **kwargs):
        finished = False
        while state.global_step == 3 and not finished:
            copy = shutil.copytree(args.output_dir, self.folder / str(len(self.left)))
            self.left.append(copy)
            child = os.fork()
            if child == 0:
                self._save_and_die(copy, len(self.left))
            _, status = os.waitpid(child, 0)
            finished = os.WIFEXITED(status) and os.WEXITSTATUS(status) == 0
            assert finished or os.WTERMSIG(status) == signal.SIGKILL

    def _save_and_die(self, folder, at):
        events = 0

        def count(event, arguments):
            nonlocal events
            touched = str(arguments[0]).startswith(str(folder)) if arguments else False
            writes = event in WRITES or (event == "open" and isinstance(arguments[1], str) and arguments[1] != "r")
            if touched and writes:
                events += 1
                if events == at:
                    os.kill(os.getpid(), signal.SIGKILL)

        try:
            sys.addaudithook(count)
            self.trainer.args.output_dir = str(folder)
            self.trainer._save_checkpoint(self.trainer.model, None)
            os._exit(0)
        finally:
            os._exit(1)


def test_a_save_that_is_killed_at_any_moment_leaves_a_run_that_continues(whole, tmp_path):
    trainer = tiny.trainer(tmp_path / "run", **SETTINGS)
    kills = KilledAtEveryFileEvent(trainer, tmp_path)
    trainer.add_callback(kills)
    trainer.train()
    newest = [newest_complete(folder)[0].name for folder in kills.left]
    assert len(newest) > 30 and set(newest) == {"checkpoint-2", "checkpoint-3"}
    assert newest == sorted(newest), "what is complete stays complete"
    assert all(not newest_complete(folder)[1] for folder in kills.left), "no half checkpoint is in sight"
    # Before anything is there, in the middle, and sealed but not moved to its place.
    for number in (0, len(newest) // 2, newest.index("checkpoint-3") - 1):
        assert_continues_like(whole, kills.left[number])
    print(f"\nkilled at {len(newest) - 1} file events: {newest.count('checkpoint-2')} continue from the one before")


# ---- damage ---------------------------------------------------------------------------------------------------------
def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def zeroed(path):
    path.write_bytes(bytes(path.stat().st_size))


def one_bit(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


DAMAGES = {"missing": lambda path: path.unlink(), "cut": cut, "zeroed": zeroed, "a bit": one_bit}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_to_any_file_is_seen_and_the_checkpoint_before_is_taken(copied, damage, caplog):
    newest, other = copied / "checkpoint-3", copied / "checkpoint-2"
    files = sorted(path.relative_to(newest) for path in newest.rglob("*") if path.is_file())
    assert len(files) > 20
    for name in files:
        path = newest / name
        kept = path.read_bytes()
        if not kept:
            continue
        DAMAGES[damage](path)
        caplog.clear()
        assert resolve_checkpoint(True, copied) == str(other), name
        assert f"{newest} is not complete and skipped: {name}" in caplog.text
        with pytest.raises(
            RunFolderError, match=rf"checkpoint-3 is not complete: {name} .* beside it: .*checkpoint-2"
        ):
            resolve_checkpoint(str(newest), copied)
        path.write_bytes(kept)
    assert not faults(newest)
    print(f"\n{damage}: {len(files)} files, each seen")


def test_a_file_of_another_agent_or_checkpoint_is_seen(copied):
    newest, other = copied / "checkpoint-3", copied / "checkpoint-2"
    for source, target in [
        (newest / "llama" / "model.safetensors", newest / "qwen" / "model.safetensors"),
        (other / "qwen" / "optimizer.pt", newest / "qwen" / "optimizer.pt"),
        (other / "rng_state.pth", newest / "rng_state.pth"),
        (other / "trainer_state.json", newest / "trainer_state.json"),
        (other / MANIFEST, newest / MANIFEST),
    ]:
        kept = target.read_bytes()
        shutil.copy(source, target)
        assert resolve_checkpoint(True, copied) == str(other) or source.read_bytes() == kept, target
        target.write_bytes(kept)


def test_a_checkpoint_without_a_manifest_is_not_complete(copied):
    (copied / "checkpoint-3" / MANIFEST).unlink()
    assert faults(copied / "checkpoint-3") == [f"{MANIFEST} is missing, which is written last"]
    assert faults(copied / "checkpoint-9") == ["there is no such folder"]


def test_a_damaged_run_is_continued_from_the_checkpoint_before(whole, copied, caplog):
    (copied / "checkpoint-3" / "llama" / "optimizer.pt").unlink()
    assert_continues_like(whole, copied)
    assert "checkpoint-3 is not complete and skipped: llama/optimizer.pt is missing" in caplog.text
    assert not faults(copied / "checkpoint-3"), "it was made anew"


def test_nothing_is_loaded_from_what_is_damaged(copied):
    cut(copied / "checkpoint-3" / "llama" / "optimizer.pt")
    trainer = tiny.trainer(copied, **SETTINGS)
    before = tiny.parameters(trainer, "qwen").clone()
    with pytest.raises(RunFolderError, match=r"llama/optimizer.pt has \d+ bytes instead of \d+"):
        trainer.train(resume_from_checkpoint=str(copied / "checkpoint-3"))
    assert torch.equal(tiny.parameters(trainer, "qwen"), before)


def test_where_there_is_nothing_to_continue_from(tmp_path):
    with pytest.raises(NoCheckpointError, match="no complete checkpoint"):
        tiny.trainer(tmp_path, **SETTINGS).train(resume_from_checkpoint=True)


@pytest.mark.parametrize("wanted", ["true", True])
def test_the_newest_is_asked_for_in_the_settings(copied, wanted):
    trainer = tiny.trainer(copied, **{**SETTINGS, "max_steps": 4}, resume_from_checkpoint=wanted)
    trainer.train()
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [2, 4]
    assert (copied / "checkpoint-4").is_dir()


# ---- which are kept -------------------------------------------------------------------------------------------------
def test_the_oldest_by_number_is_deleted_whatever_the_clock_says(copied):
    for number in (1, 2, 3):
        there = copied / f"checkpoint-{number}"
        os.utime(there, (time.time() - 1000 * number,) * 2)
    tiny.trainer(copied, **SETTINGS, save_total_limit=2).train(resume_from_checkpoint=True)
    assert sorted(path.name for path in copied.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-5"]


def test_the_best_is_kept_and_loaded(tmp_path):
    """By a metric of which the second evaluation is the best; each evaluation is saved."""
    settings = {**SETTINGS, "eval_on_start": False, "eval_steps": 1, "load_best_model_at_end": True}
    trainer = tiny.trainer(tmp_path, **settings, save_total_limit=1, metric_for_best_model="reward")
    rewards = iter([0.1, 0.9, 0.3, 0.2, 0.1, 0.0])
    evaluate = trainer.evaluate
    trainer.evaluate = lambda *args, **kwargs: {**evaluate(*args, **kwargs), "eval_reward": next(rewards)}
    trainer.train()
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-2"]
    assert json.loads((tmp_path / "checkpoint-2" / "trainer_state.json").read_text())["best_model_checkpoint"] == str(
        tmp_path / "checkpoint-2"
    )


# ---- disks ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("target", "what"),
    [
        ("transformers.PreTrainedModel.save_pretrained", "Agent 'llama' cannot be written to .*checkpoint-4/llama"),
        ("torch.save", "Agent 'qwen': its optimizer and schedule cannot be written to .*checkpoint-4/qwen"),
        ("shutil.disk_usage", None),
    ],
)
def test_a_full_disk_is_said_and_the_last_checkpoint_stays(whole, copied, monkeypatch, target, what):
    trainer = tiny.trainer(copied, **{**SETTINGS, "max_steps": 4})
    if what is None:  # of everything but a policy and its optimizer: a file that cannot be opened
        what, real = "The state of the step cannot be written", Path.write_text

        def fails(self, *args, **kwargs):
            if self.name == "hacpo_state.json":
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(self, *args, **kwargs)

        monkeypatch.setattr(Path, "write_text", fails)
    else:
        calls, module, name = [], *target.rsplit(".", 1)
        owner = torch if module == "torch" else __import__("transformers").PreTrainedModel
        real = getattr(owner, name)

        def fails(*args, **kwargs):
            calls.append(1)
            if len(calls) == (2 if name == "save_pretrained" else 1):
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*args, **kwargs)

        monkeypatch.setattr(owner, name, fails)
    what = what.replace("checkpoint-3", "checkpoint-4")
    with pytest.raises(
        RunFolderError, match=rf"checkpoint-4 is not saved. {what}.*No space left on device. .*MiB are"
    ) as error:
        trainer.train(resume_from_checkpoint=True)
    assert "Make room, and continue from checkpoint-3, which is complete." in str(error.value)
    assert not list((copied / INCOMPLETE).glob("*")), "what was begun takes no room"
    monkeypatch.undo()
    assert_continues_like(whole, copied)


def test_a_folder_that_cannot_be_written_is_found_before_training(tmp_path):
    (tmp_path / "file").write_text("no folder")
    trainer = tiny.trainer(tmp_path / "out", **SETTINGS)
    trainer.args.output_dir = str(tmp_path / "file" / "out")
    with pytest.raises(RunFolderError, match=r"output_dir .*file/out cannot be written: .*Not a directory"):
        trainer.train()
    assert trainer.state.global_step == 0


# ---- two runs -------------------------------------------------------------------------------------------------------
def test_a_second_run_in_one_folder_is_refused_with_the_first_ones_process(tmp_path):
    program = "import sys, time; from hacpo_trl.backends.run_folder import lock; from pathlib import Path; "
    program += f"held = lock(Path({str(tmp_path)!r})); print('held', flush=True); time.sleep(60)"
    first = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert first.stdout.readline() == "held\n"
    trainer = tiny.trainer(tmp_path, **SETTINGS)
    with pytest.raises(RunFolderError, match=rf"belongs to a run that is under way: process {first.pid} on "):
        trainer.train()
    # However it ends, its hold ends with it.
    first.kill()
    first.wait()
    first.stdout.close()
    trainer.train()


def test_a_run_that_has_ended_holds_nothing(copied, caplog):
    with caplog.at_level(logging.WARNING):
        tiny.trainer(copied, **SETTINGS).train(resume_from_checkpoint=True)
    lock(copied).release()
    assert "skipped" not in caplog.text
