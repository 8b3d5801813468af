"""Starts the processes of `hacpo train`, and its vLLM servers beside them.

    hacpo train --accelerate_config zero3 --serve        `launch` watches over the two below
    ├── vLLM servers, one an agent                       generation/vllm_servers/serving.py
    └── python -m hacpo_trl.commands.accelerate_launch   Accelerate's launcher
        └── python -m hacpo_trl.train, several times     a run each, see training.py

Servers are started at the same time as training, which waits for them itself: what is wrong with a recipe is said
before they are up. Whatever of the two ends, the other one is ended; Ctrl-C and SIGTERM are passed on to training.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..generation.vllm_servers.processes import ServerFailed, end, signal_group, stop_on_signals
from ..options.recipe import read_recipe
from .errors import CommandParser, user_errors
from .launch_options import Launching, split_recipe
from .recipes import find_launch
from .serve import LOG_DIR, TIMEOUT, check_python


if TYPE_CHECKING:
    from ..generation.vllm_servers.serving import Server, ServerGroup


# In the environment of what is started here, which ends when this program is gone.
LAUNCHED = "HACPO_TRL_LAUNCHED"
# Seconds between two looks at what runs.
TICK = 0.5


def launch(launching: Launching, argv: Sequence[str]) -> int:
    """Runs training as `launching` says, and returns its exit status.

    Args:
        launching: How.
        argv: The rest of the command line.
    """
    environment, group = dict(os.environ), None
    stop_on_signals()
    with user_errors():
        check_launching(launching)
        if launching.serve:
            from rich.console import Console

            from ..generation.vllm_servers.serving import ServerGroup

            servers = servers_beside(launching, argv)
            environment |= training_devices(launching, servers)
            group = ServerGroup(servers, LOG_DIR, TIMEOUT, Console())
    try:
        return supervise(command_of(launching, argv), environment, group)
    except ServerFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def check_launching(launching: Launching):
    """Refuses what cannot be launched, and what would have no effect."""
    if launching.accelerate_config is not None:
        launching.accelerate_config = str(find_launch(launching.accelerate_config).resolve())
    if launching.vllm_python is not None and not launching.serve:
        raise ValueError("--vllm_python has no effect without --serve. Leave it out.")
    if launching.vllm_python is not None:
        check_python("--vllm_python", launching.vllm_python)
    if launching.num_processes is not None and launching.num_processes < 1:
        raise ValueError(f"--num_processes must be at least 1, not {launching.num_processes}.")
    if launching.accelerate_config is None and launching.num_processes is None:
        for name in ("num_machines", "machine_rank", "main_process_ip", "main_process_port"):
            if name in launching.given:
                raise ValueError(f"--{name} has no effect without --accelerate_config or --num_processes.")
    if launching.serve and (launching.num_machines or 1) > 1:
        raise ValueError(
            "--serve starts servers on the machine that trains. Over several machines start them by `hacpo serve`, on "
            "the machine that the recipe's vllm_server_base_url names."
        )


def command_of(launching: Launching, argv: Sequence[str]) -> list[str]:
    """The command that trains; one process that nothing is said about needs no launcher."""
    if launching.accelerate_config is None and launching.num_processes in (None, 1):
        return [sys.executable, "-m", "hacpo_trl.train", *argv]
    return [sys.executable, "-m", "hacpo_trl.commands.accelerate_launch", *launching.for_accelerate, *argv]


def servers_beside(launching: Launching, argv: Sequence[str]) -> "list[Server]":
    """The servers of the recipe, with what the command line changes of it."""
    from ..generation.vllm_servers.serving import servers_of

    recipe, rest = split_recipe(argv)
    if recipe is None:
        raise ValueError("--serve needs a recipe, whose agents have servers: --config.")
    if read_recipe(recipe).get("vllm_mode") != "server":
        raise ValueError(f"--serve has no effect: {recipe} has no `vllm_mode: server`. Leave it out.")
    return servers_of(recipe, python=launching.vllm_python or sys.executable, changes=_what_servers_read(rest))


def _what_servers_read(argv: Sequence[str]) -> dict[str, Any]:
    parser = CommandParser(add_help=False)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--agents")
    parser.add_argument("--trust_remote_code", "--trust-remote-code", nargs="?", const=True)
    found, _ = parser.parse_known_args(list(argv))
    return {name: value for name, value in vars(found).items() if value is not None}


def training_devices(launching: Launching, servers: "Sequence[Server]") -> dict[str, str]:
    """The first GPUs that no server has, as many as there are training processes; {} without servers on GPUs."""
    of_servers = (server.environment.get("CUDA_VISIBLE_DEVICES", "").split(",") for server in servers)
    taken = {device for devices in of_servers for device in devices if device}
    if not taken:
        return {}
    wanted = launching.num_processes
    if wanted is None:
        config = launching.accelerate_config
        wanted = read_recipe(Path(config)).get("num_processes", 1) if config else 1
    visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(count_gpus())))
    free = [device for device in visible.split(",") if device and device not in taken]
    if len(free) < wanted:
        raise ValueError(
            f"{wanted} training processes need as many GPUs, but of {visible or 'none'} the servers have "
            f"{','.join(sorted(taken))}. Give --num_processes, or change vllm_server_devices in the recipe."
        )
    return {"CUDA_VISIBLE_DEVICES": ",".join(free[:wanted])}


def count_gpus() -> int:
    """How many accelerators this machine has."""
    import torch

    return torch.accelerator.device_count()


def supervise(command: Sequence[str], environment: Mapping[str, str], group: "ServerGroup | None") -> int:
    """Runs a command beside servers; returns its exit status when it has ended and they are stopped.

    Training gets the signals that this program gets: it ends its update, which servers may be needed for, and saves.
    """
    with ExitStack() as stack:
        if group is not None:
            stack.enter_context(group)
        # In a group of its own, which is ended as a whole: Ctrl-C reaches this program alone.
        process = subprocess.Popen(command, env={**environment, LAUNCHED: "1"}, start_new_session=True)
        stack.callback(end, [process])
        stack.enter_context(passing_signals_to(process))
        while process.poll() is None:
            if group is not None:
                group.watch()
            try:
                process.wait(TICK)
            except subprocess.TimeoutExpired:
                continue
    return shell_status(process.returncode)


@contextmanager
def passing_signals_to(process: subprocess.Popen) -> Iterator[None]:
    """Passes signals on, of which the first stops training and the second ends it; the third kills what is left."""
    count = 0

    def pass_on(number, frame):
        nonlocal count
        count += 1
        if count > 2:
            signal_group(process, signal.SIGKILL)
        else:
            process.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def shell_status(returncode: int) -> int:
    """As a shell has it: of a program that a signal has ended 128 and the signal's number."""
    return 128 - returncode if returncode < 0 else returncode
