"""Kills `hacpo train`, again and again, and sees whether it continues as if nothing had happened.

    python tests/kills.py FOLDER --moments random --kills 60 --processes 2
    python tests/kills.py FOLDER --moments saving --config zero3_cpu --processes 2

`random`: a run is killed at some moment from its start to its end, with all of its processes. `saving`: while a
checkpoint is saved, one process is killed at its k-th change to a file, for every k and every process, and the others
with it. Then the run is continued by `--resume`, and its policies and its log are compared with those of a run that
nothing has happened to. What is killed is forked from this program, which has imported everything, or it would take an
hour.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env
from launching import free_port
from safetensors.torch import load_file

from hacpo_trl.backends.manifest import newest_complete
from hacpo_trl.backends.run_folder import RunFolder
from hacpo_trl.commands.main import main as hacpo


REPOSITORY = Path(__file__).resolve().parent.parent
# Updates of a run that is killed at random, and of one that is killed while it saves the watched checkpoint.
UPDATES = {"random": 40, "saving": 8}
SAVE_STEPS, WATCHED = 2, 6
WRITES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.link", "os.truncate"}


def environment(config: str, processes: int) -> dict[str, str]:
    """What Accelerate's launcher sets in all processes of a run."""
    if processes == 1:
        return {}
    path = REPOSITORY / "configs" / "accelerate" / f"{config}.yaml"
    options = ["--config_file", str(path), "--num_processes", str(processes), "program.py"]
    args, defaults, _ = _validate_launch_command(launch_command_parser().parse_args(options))
    args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
    env = prepare_deepspeed_cmd_env(args)[1] if args.use_deepspeed else prepare_multi_gpu_env(args)
    own = {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
    return {key: value for key, value in env.items() if os.environ.get(key) != value} | own


def die_at(event_number: int, folder: Path):
    """Has this process killed at a change to a file, counted from when the watched checkpoint is begun."""
    save, events, watching = RunFolder._save_checkpoint, 0, False

    def count(event, arguments):
        nonlocal events
        if not watching or not arguments or not str(arguments[0]).startswith(str(folder)):
            return
        if event in WRITES or (event == "open" and isinstance(arguments[1], str) and arguments[1] != "r"):
            events += 1
            if events == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    def watched(trainer, *args):
        nonlocal watching
        watching = trainer.state.global_step == WATCHED
        save(trainer, *args)
        watching = False

    sys.addaudithook(count)
    RunFolder._save_checkpoint = watched


def start(
    folder: Path, updates: int, env: dict[str, str], processes: int, resume: bool, killed: tuple[int, int] = (-1, 0)
) -> list[int]:
    """Forks the processes of a run; `killed` are a process and the change to a file that it is killed at."""
    port, pids = str(free_port()), []
    for rank in range(processes):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        status = 1
        try:
            with open(folder.with_suffix(f".{rank}.log"), "a") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
            if processes > 1:
                os.environ |= {**env, "MASTER_PORT": port, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank == killed[0]:
                die_at(killed[1], folder)
            hacpo(
                [
                    *("train", "--output_dir", str(folder), "--max_steps", str(updates), "--logging_steps", "1"),
                    *(
                        "--save_strategy",
                        "steps",
                        "--save_steps",
                        str(SAVE_STEPS),
                        "--save_total_limit",
                        "3",
                        "--test_size",
                        "16",
                    ),
                    *(["--resume"] if resume else []),
                ]
            )
            status = 0
        except SystemExit as error:
            status = error.code if isinstance(error.code, int) else int(error.code is not None)
        finally:
            os._exit(status)
    return pids


def wait(pids: list[int], seconds: float) -> bool:
    """Waits for processes and kills all when one is killed, or when time is up; whether they ended by themselves."""
    left, deadline, well = set(pids), time.monotonic() + seconds, True
    while left:
        for pid in sorted(left):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                left.discard(pid)
                well &= status == 0
        if left and (not well or time.monotonic() > deadline):
            well = False
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
    return well


def outcome(folder: Path, updates: int):
    """What a run has ended with: policies and log, without what is a time."""
    state = json.loads((folder / f"checkpoint-{updates}" / "trainer_state.json").read_text())
    timed = ("time/", "train_runtime", "eval_runtime")
    log = [
        {key: value for key, value in entry.items() if not key.startswith(timed) and "per_second" not in key}
        for entry in state["log_history"]
    ]
    weights = {name: load_file(folder / name / "model.safetensors") for name in ("qwen", "llama")}
    return log, {f"{name}/{key}": tensor for name, of in weights.items() for key, tensor in of.items()}


def same(one, other) -> bool:
    return (
        one[0] == other[0]
        and one[1].keys() == other[1].keys()
        and all(one[1][key].equal(other[1][key]) for key in one[1])
    )


class Kills:
    """Runs that are killed and continued, and what came of it."""

    def __init__(self, folder: Path, config: str, processes: int, updates: int):
        self.folder, self.processes, self.updates = folder, processes, updates
        self.env = environment(config, processes)
        self.found: list[tuple[str, bool]] = []
        self.whole = folder / "whole"
        began = time.monotonic()
        assert wait(self.start(self.whole, False), 600), f"see {self.whole}.0.log"
        self.duration = time.monotonic() - began
        self.expected = outcome(self.whole, updates)

    def start(self, run: Path, resume: bool, killed: tuple[int, int] = (-1, 0)) -> list[int]:
        return start(run, self.updates, self.env, self.processes, resume, killed)

    def continued(self, run: Path, said: str):
        """Continues a run that was killed, and compares."""
        complete, damaged = newest_complete(run)
        well = wait(self.start(run, True), 600)
        self.found.append(
            (complete.name if complete else "nothing", well and same(outcome(run, self.updates), self.expected))
        )
        print(
            f"{said}: from {self.found[-1][0]}",
            "equal" if self.found[-1][1] else f"DIFFERENT, see {run}.0.log",
            flush=True,
        )
        assert not damaged, f"half a checkpoint is in sight: {damaged}"
        if self.found[-1][1]:
            shutil.rmtree(run)

    def at_random(self, kills: int, seed: int):
        rng = random.Random(seed)
        for number in range(kills):
            run, moment = self.folder / f"run-{number}", rng.uniform(0.5, self.duration)
            wait(self.start(run, False), moment)
            self.continued(run, f"killed after {moment:.2f} of {self.duration:.2f} s")

    def while_saving(self):
        for rank in range(self.processes):
            number, was_killed = 0, True
            while was_killed:
                number += 1
                run = self.folder / f"run-{rank}-{number}"
                before = f"checkpoint-{WATCHED - SAVE_STEPS}"
                shutil.copytree(self.whole / before, run / before)
                was_killed = not wait(self.start(run, True, (rank, number)), 600)
                if was_killed:
                    self.continued(run, f"process {rank} killed at change {number}")
            print(f"process {rank} makes {number - 1} changes")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--moments", choices=("random", "saving"), default="random")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--config", default="cpu_2proc", help="of configs/accelerate, for several processes")
    args = parser.parse_args()
    args.folder.mkdir(parents=True)
    kills = Kills(args.folder.resolve(), args.config, args.processes, UPDATES[args.moments])
    if args.moments == "random":
        kills.at_random(args.kills, args.seed)
    else:
        kills.while_saving()
    starts = sorted({name for name, _ in kills.found}, key=lambda name: (len(name), name))
    print(f"{len(kills.found)} kills, {sum(equal for _, equal in kills.found)} equal to the run that was not killed;")
    print(", ".join(f"{sum(found == name for found, _ in kills.found)} continued from {name}" for name in starts))
    sys.exit(0 if all(equal for _, equal in kills.found) else 1)


if __name__ == "__main__":
    main()
