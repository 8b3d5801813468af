"""Runs that are told to stop: they finish their update, save, and say where to continue. Sick runs end before it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import tiny
import torch
from test_run_folder import SETTINGS, assert_continues_like
from transformers import TrainerCallback

from hacpo_trl.backends.finite import NonFiniteError
from hacpo_trl.backends.manifest import faults, newest_complete
from hacpo_trl.backends.stopping import TrainingStopped


class At(TrainerCallback):
    """Does something in the middle of an update, counted from 1."""

    def __init__(self, update, act):
        self.update, self.act = update, act

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        if state.global_step == self.update - 1:
            self.act()


class Before(At):
    """The same before its first forward pass."""

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        pass

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.update - 1:
            self.act()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    trainer = tiny.trainer(tmp_path_factory.mktemp("runs") / "whole", **SETTINGS)
    trainer.train()
    return trainer


# ---- in one process -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 0), (signal.SIGUSR1, 0)], ids=lambda v: str(int(v))
)
def test_the_update_in_hand_is_finished_and_saved(whole, tmp_path, capfd, number, status):
    """Also where checkpoints are far apart."""
    trainer = tiny.trainer(tmp_path, **{**SETTINGS, "save_steps": 100})
    trainer.add_callback(At(3, lambda: os.kill(os.getpid(), number)))
    before = signal.getsignal(number)
    with pytest.raises(TrainingStopped) as stopped:
        trainer.train()
    assert stopped.value.code == status and stopped.value.checkpoint == str(tmp_path / "checkpoint-3")
    assert signal.getsignal(number) == before and not faults(tmp_path / "checkpoint-3")
    said = capfd.readouterr().err
    assert f"{signal.Signals(number).name}: stopping after this update. Once more ends it at once." in said
    assert f"after update 3 of 5, saved in {tmp_path}/checkpoint-3. --resume, or" in said
    assert_continues_like(whole, tmp_path)


def test_a_run_that_nobody_stops_has_the_handlers_of_before(tmp_path):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]
    tiny.trainer(tmp_path, max_steps=1).train()
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def test_the_best_policies_are_not_loaded_into_a_run_that_goes_on(tmp_path):
    settings = {**SETTINGS, "eval_on_start": False, "eval_steps": 1, "load_best_model_at_end": True}
    trainer = tiny.trainer(tmp_path, **settings, save_total_limit=1, metric_for_best_model="reward")
    evaluate, rewards = trainer.evaluate, iter([0.9, 0.1, 0.1])
    trainer.evaluate = lambda *args, **kwargs: {**evaluate(*args, **kwargs), "eval_reward": next(rewards)}
    trainer.add_callback(At(3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    with pytest.raises(TrainingStopped):
        trainer.train()
    assert newest_complete(tmp_path)[0].name == "checkpoint-3"


# ---- numbers that are none ------------------------------------------------------------------------------------------
def spoil(trainer, name):
    with torch.no_grad():
        next(trainer.agents[name].policy.parameters())[0] = torch.nan


def test_an_update_without_a_finite_gradient_is_not_made(tmp_path):
    # Two updates a step: the second one's rows are there when the policy is spoilt.
    trainer = tiny.trainer(tmp_path, **SETTINGS)
    trainer.add_callback(Before(4, lambda: spoil(trainer, "llama")))
    steps = []
    with pytest.raises(NonFiniteError) as error:
        trainer.add_callback(Before(4, lambda: steps.append(tiny.parameters(trainer, "qwen").clone())))
        trainer.train()
    assert (error.value.agents, error.value.update) == (("llama",), 4)
    assert "Agent 'llama': norm of the gradient nan, loss nan" in str(error.value)
    assert torch.equal(tiny.parameters(trainer, "qwen"), steps[-1]), "no agent is updated"
    assert newest_complete(tmp_path)[0].name == "checkpoint-3" and not list(tmp_path.glob("checkpoint-4"))
    assert "nan" not in str(trainer.state.log_history)
    (path,) = (tmp_path / "non_finite").iterdir()
    assert path.name == "update-4-llama-process-0.jsonl" and str(path) in str(error.value)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == trainer.plan.rows_per_update and {row["source"] for row in rows} == {"qwen", "llama"}
    assert all(row["completion"] and row["micro_batch_loss"] == "nan" for row in rows)


def test_a_loss_that_is_not_finite_is_enough(tmp_path, monkeypatch):
    """Where clipping hides it: the gradient of this loss is 0."""
    trainer = tiny.trainer(tmp_path, **SETTINGS)
    loss = trainer._loss
    added = {"qwen": torch.inf, "llama": 0.0}
    monkeypatch.setattr(trainer, "_loss", lambda name, *rest: loss(name, *rest) * 0 + added[name])
    with pytest.raises(NonFiniteError, match=r"Agent 'qwen': norm of the gradient 0\.0, loss inf"):
        trainer.train()


# ---- whole programs -------------------------------------------------------------------------------------------------
TASK = """
import os
import signal
import time
from datasets import Dataset

def copies(script_args, training_args):
    prompts = [f"{letter}=" for letter in "abcdefghijklmnop"] * 4
    return Dataset.from_dict({"prompt": prompts}), None, lengths

def lengths(completions, **kwargs):
    open("answered", "a").write("x")
    time.sleep(0.2)
    return [float(len(completion)) for completion in completions]
"""


class Program:
    """`hacpo train` in a session of its own, whose processes are known."""

    def __init__(self, folder: Path, cache: Path, *options: str, task: str = TASK):
        (folder / "my_copies.py").write_text(task)
        command = [sys.executable, "-m", "hacpo_trl", "train", *options, "--task", "my_copies:copies"]
        command += ["--max_steps", "400", "--logging_steps", "1", "--output_dir", "run", "--report_to", "none"]
        self.folder, self.output = folder, folder / "output.txt"
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HACPO_TRL_CACHE": str(cache), "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )
        deadline = time.monotonic() + 120
        while not (folder / "answered").is_file() or len((folder / "answered").read_text()) < 6:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()[-4000:]
            time.sleep(0.05)
        of_it = psutil.Process(self.process.pid)
        self.all = [of_it, *of_it.children(recursive=True)]

    def named(self, part: str) -> psutil.Process:
        return next(process for process in self.all if part in " ".join(process.cmdline()))

    def seconds_until_all_are_gone(self, limit: float = 60) -> float:
        """The first process is this one's child: to be waited for."""
        began = time.monotonic()
        while time.monotonic() - began < limit:
            self.process.poll()
            if not any(process.is_running() and process.status() != psutil.STATUS_ZOMBIE for process in self.all):
                return time.monotonic() - began
            time.sleep(0.05)
        raise AssertionError(f"still there: {[process.cmdline() for process in self.all if process.is_running()]}")


def terminal(number):
    """As a terminal does: to the whole group."""
    return lambda program: os.killpg(program.process.pid, number)


def alone(number, part="hacpo_trl train"):
    return lambda program: program.named(part).send_signal(number)


TWO = ("--num_processes", "2", "--main_process_port", "0", "--per_device_train_batch_size", "32")


@pytest.mark.parametrize(
    ("options", "send", "status", "stopped_by"),
    [
        ((), [alone(signal.SIGTERM)], 0, "SIGTERM"),
        ((), [terminal(signal.SIGINT)], 130, "SIGINT"),
        ((), [terminal(signal.SIGINT)] * 2, -signal.SIGINT, None),
        pytest.param(TWO, [alone(signal.SIGTERM)], 0, "SIGTERM", marks=pytest.mark.distributed),
        pytest.param(TWO, [terminal(signal.SIGINT)], 130, "SIGINT", marks=pytest.mark.distributed),
        pytest.param(TWO, [alone(signal.SIGINT)] * 2, 130, None, marks=pytest.mark.distributed),
        # One rank alone is told: all stop together.
        pytest.param(TWO, [alone(signal.SIGUSR1, "-m hacpo_trl.train")], 0, "SIGUSR1", marks=pytest.mark.distributed),
        pytest.param(TWO, [alone(signal.SIGKILL, "accelerate_launch")], 137, "SIGTERM", marks=pytest.mark.distributed),
        pytest.param(TWO, [alone(signal.SIGKILL)], -signal.SIGKILL, "SIGTERM", marks=pytest.mark.distributed),
    ],
    ids=["term", "ctrl-c", "twice", "2 term", "2 ctrl-c", "2 twice", "2 one rank", "2 launcher", "2 program"],
)
def test_signals_to_a_program(tmp_path, policies_folder, options, send, status, stopped_by):
    program = Program(tmp_path, policies_folder, *options)
    for act in send:
        act(program)
        time.sleep(0.2 if len(send) > 1 else 0)
    seconds = program.seconds_until_all_are_gone()
    found, said = program.process.wait(), program.output.read_text()
    newest, skipped = newest_complete(tmp_path / "run")
    print(f"\n{found}, gone after {seconds:.1f} s, {newest and newest.name}; {said.strip().splitlines()[-1][-200:]}")
    assert found == status
    assert "Traceback" not in said and not skipped
    if stopped_by is None:
        assert "saved in" not in said
    else:
        assert f"Stopped by {stopped_by} after update" in said and f"saved in run/{newest.name}" in said
    assert seconds < 20


# ---- a process that hangs -------------------------------------------------------------------------------------------
HANGING = """
def lengths(completions, **kwargs):
    open("answered", "a").write("x")
    if os.environ["LOCAL_RANK"] == "1" and len(open("answered").read()) > 8:
        # Else it would be half a minute until torch's launcher kills it.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        time.sleep(600)
    return [float(len(completion)) for completion in completions]
"""


@pytest.mark.distributed
def test_a_process_that_hangs_ends_the_run_within_the_limit(tmp_path, policies_folder):
    program = Program(
        tmp_path, policies_folder, *TWO, "--ddp_timeout", "8", task=TASK.split("def lengths")[0] + HANGING
    )
    seconds = program.seconds_until_all_are_gone(90)
    said = program.output.read_text()
    assert program.process.wait() not in (0, 130) and "Traceback" not in said
    assert "error: Process 0 has waited for another one for longer than ddp_timeout=8 s in update " in said
    assert seconds < 30
