"""Starts the vLLM servers of a recipe, one an agent: `python -m hacpo_trl.serve --config recipe.yaml`.

Each server gets the flags that the trainer needs, the devices that the recipe names for it (`vllm_server_devices`) and
a log of its own. The program waits until all of them are up, says so, and starts a server that dies anew: the trainer
then sends it its weights. Ctrl-C stops all of them. `--print` only prints the commands, for those who start servers by
hand or by Slurm; `--agent` takes some of the agents, for servers on several machines.
"""

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

import requests
import torch
import yaml
from rich.console import Console

from ..embedded import EMBEDDED, policy_path
from ..generation.vllm_servers.plugin import GLOO_BACKEND
from ..options.agent import AgentConfig, parse_agents


LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
# Ranks of adapters that vLLM can be started for.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
# Seconds that a server has to end in before it is killed.
GRACE = 20.0


@dataclass(frozen=True)
class Server:
    """How one agent's server is started.

    Attributes:
        agent: The agent's name.
        url: Its address.
        environment: What its environment has beside this process's.
        command: The command line.
    """

    agent: str
    url: str
    environment: Mapping[str, str]
    command: Sequence[str]

    def __str__(self) -> str:
        variables = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        return " ".join([*variables, shlex.join(self.command)])


def _flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments as command-line flags: True and False as a flag alone, lists as several words, mappings as JSON."""
    flags = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list):
            flags += [f"--{flag}", *map(str, value)]
        else:
            flags += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return flags


def _lora_flags(agent: AgentConfig) -> dict[str, Any]:
    """What a server of an adapter needs to know of it beforehand."""
    rank = agent.peft_config.get("r", 8)
    # The next one that vLLM has; it refuses an adapter of a higher rank than its largest itself.
    rank = next((supported for supported in LORA_RANKS if supported >= rank), rank)
    flags = {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    targets = agent.peft_config.get("target_modules")
    # Unnamed, vLLM would also wrap modules that carry no adapter, the head among them.
    return flags | ({"lora_target_modules": targets} if isinstance(targets, list) else {})


def server_of(agent: AgentConfig, recipe: Mapping[str, Any], python: str, on_cpu: bool) -> Server:
    """The command that starts one agent's server.

    Args:
        agent: The agent.
        recipe: The whole recipe.
        python: The interpreter of the environment that vLLM is installed in.
        on_cpu: Whether the server runs on a machine without GPUs.
    """
    if agent.vllm_server_base_url is None:
        raise ValueError(f"Agent '{agent.name}' has no vllm_server_base_url, so no server can be started for it.")
    if agent.model_name_or_path is None:
        raise ValueError(f"Agent '{agent.name}' has no model_name_or_path, so its server has no model to load.")
    model = agent.model_name_or_path
    if model.startswith(EMBEDDED):
        model = policy_path(model.removeprefix(EMBEDDED), recipe.get("seed", 42), progress=print)
    url = urlparse(agent.vllm_server_base_url)
    devices = (agent.vllm_server_devices or "").replace(" ", "")
    environment = {"VLLM_SERVER_DEV_MODE": "1"}
    arguments: dict[str, Any] = {
        "model": model,
        "host": "127.0.0.1" if url.hostname in LOCAL_HOSTS else "0.0.0.0",
        "port": url.port or 80,
        # The trainer computes in float32 on a CPU, and in bfloat16 on GPUs.
        "dtype": "float32" if on_cpu else "bfloat16",
        "logprobs_mode": "processed_logprobs",
        "generation_config": "vllm",
    }
    if agent.tokenizer_name_or_path is not None:
        arguments["tokenizer"] = agent.tokenizer_name_or_path
    if agent.max_model_length is not None:
        arguments["max_model_len"] = agent.max_model_length
    if recipe.get("trust_remote_code"):
        arguments["trust_remote_code"] = True
    if agent.peft_config is not None:
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "True"
        arguments |= _lora_flags(agent)
    else:
        arguments["weight_transfer_config"] = {"backend": GLOO_BACKEND if on_cpu else "nccl"}
    if devices and on_cpu:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = devices
    elif devices:
        environment["CUDA_VISIBLE_DEVICES"] = devices
        arguments["tensor_parallel_size"] = len(devices.split(","))
    arguments |= agent.vllm_server_args or {}
    # Not `vllm serve`: builds of vLLM for CPUs come without that command.
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *_flags(arguments)]
    if devices and on_cpu:
        # vLLM binds its workers alone. Its other processes would take turns on the cores of other servers.
        command = ["taskset", "--cpu-list", devices, *command]
    return Server(agent.name, agent.vllm_server_base_url.rstrip("/"), environment, command)


def servers_of(
    config: Path, only: Iterable[str] | None = None, python: str = sys.executable, on_cpu: bool | None = None
) -> list[Server]:
    """The servers that a recipe asks for.

    Args:
        config: The recipe that training is started with.
        only: Names of agents; None means all of them.
        python: The interpreter of the environment that vLLM is installed in.
        on_cpu: See `server_of`; None looks at this machine.
    """
    recipe = yaml.safe_load(config.read_text(encoding="utf-8"))
    agents = parse_agents(recipe.get("agents"))
    if agents is None:
        raise ValueError(f"{config} names no agents.")
    names = [agent.name for agent in agents]
    if unknown := sorted(set(only or ()) - set(names)):
        raise ValueError(f"{config} has no agents {unknown}; it has {names}.")
    on_cpu = not torch.accelerator.is_available() if on_cpu is None else on_cpu
    return [server_of(agent, recipe, python, on_cpu) for agent in agents if only is None or agent.name in only]


class RunningServer:
    """A server that was started, and its log."""

    def __init__(self, server: Server, log: Path):
        self.server, self.log = server, log
        self.start()

    def start(self):
        """Starts the server, in a process group of its own: Ctrl-C reaches this program alone."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.server.command,
                env={**os.environ, **self.server.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def check(self) -> bool:
        """Whether the server answers."""
        try:
            return requests.get(f"{self.server.url}/health", timeout=5).status_code == 200
        except requests.exceptions.RequestException:
            return False

    def signal(self, number: int):
        """Signals the server and the processes that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def last_lines(self, count: int = 20) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


class ServerFailed(RuntimeError):
    """A server ended before it was up."""


def wait_until_up(servers: Iterable[RunningServer], timeout: float):
    """Waits for all servers.

    Raises:
        ServerFailed: when one ends, or is not up after `timeout` seconds; with the end of its log.
    """
    deadline = time.monotonic() + timeout
    for running in servers:
        while not running.check():
            if running.ended:
                reason = f"ended with exit status {running.process.returncode} before it was up"
            elif time.monotonic() > deadline:
                reason = f"was not up after {timeout:g} s"
            else:
                time.sleep(1)
                continue
            raise ServerFailed(
                f"The vLLM server of agent '{running.server.agent}' at {running.server.url} {reason}. The end of "
                f"{running.log}:\n{running.last_lines()}"
            )


def stop(servers: Iterable[RunningServer]):
    """Ends all servers; kills what has not ended after a while."""
    for running in servers:
        running.signal(signal.SIGTERM)
    deadline = time.monotonic() + GRACE
    for running in servers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            running.process.wait(max(0.0, deadline - time.monotonic()))
        # Its workers, too, if they have outlived it.
        running.signal(signal.SIGKILL)
        running.process.wait()


def stop_on_signals():
    """Makes SIGTERM, with which Slurm and docker stop a program, the same as Ctrl-C; and Ctrl-C an interrupt even in a
    program that a shell has started in the background, where it is ignored."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


def serve(servers: Sequence[Server], log_dir: Path, timeout: float, console: Console):
    """Starts servers and keeps them up until interrupted."""
    log_dir.mkdir(parents=True, exist_ok=True)
    running = []
    try:
        for server in servers:
            running.append(RunningServer(server, log_dir / f"{server.agent}.log"))
            console.print(f"{server.agent}: starting at {server.url}, log in {running[-1].log}", highlight=False)
        wait_until_up(running, timeout)
        console.print(f"All {len(running)} servers are up. Ctrl-C stops them.", highlight=False)
        while True:
            time.sleep(1)
            for one in running:
                if one.ended:
                    console.print(
                        f"{one.server.agent}: ended with exit status {one.process.returncode}; starting it anew",
                        highlight=False,
                    )
                    one.signal(signal.SIGKILL)
                    one.start()
                    wait_until_up([one], timeout)
                    console.print(f"{one.server.agent}: up again", highlight=False)
    finally:
        stop(running)
        console.print("All servers are stopped.", highlight=False)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m hacpo_trl.serve", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", type=Path, required=True, help="the recipe that training is started with")
    parser.add_argument("--agent", action="append", metavar="NAME", help="start this agent's server only; repeatable")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment that has vLLM")
    parser.add_argument("--log_dir", type=Path, default=Path("outputs/vllm_servers"), help="where the logs go")
    parser.add_argument("--timeout", type=float, default=900.0, help="seconds that the servers have to be up in")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="what the servers run on; default: what is here")
    parser.add_argument("--print", action="store_true", help="print the commands instead of running them")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None):
    args = parse_args(argv)
    console = Console(soft_wrap=True)
    try:
        on_cpu = None if args.device is None else args.device == "cpu"
        servers = servers_of(args.config, args.agent, args.python, on_cpu)
        if args.print:
            for server in servers:
                print(server)
            return
        stop_on_signals()
        serve(servers, args.log_dir, args.timeout, console)
    except KeyboardInterrupt:
        return
    except (ValueError, ServerFailed) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
