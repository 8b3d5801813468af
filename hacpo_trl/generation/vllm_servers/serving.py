"""Starting the servers of a recipe, one an agent, and keeping them up.

Each server gets the flags that the trainer needs, the devices that the recipe names for it (`vllm_server_devices`) and
a log of its own.
"""

import json
import os
import shlex
import signal
import socket
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
from rich.console import Console

from ...embedded import EMBEDDED, policy_path
from ...options.agent import AgentConfig, parse_agents
from ...options.recipe import read_recipe
from .plugin import GLOO_BACKEND
from .processes import ServerFailed, die_with_parent, end, signal_group


LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
# Where a server listens that is reached from other machines, unless `vllm_server_args` says otherwise.
EVERYWHERE = "0.0.0.0"
# A server that dies is started anew after pauses that double, so many times; one that has run for this long, in
# seconds, is taken for a new one.
MAX_RESTARTS = 5
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 60.0
STEADY = 600.0
# Ranks of adapters that vLLM can be started for.
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


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
        "host": "127.0.0.1" if url.hostname in LOCAL_HOSTS else EVERYWHERE,
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
    config: Path,
    only: Iterable[str] | None = None,
    python: str = sys.executable,
    on_cpu: bool | None = None,
    changes: Mapping[str, Any] | None = None,
) -> list[Server]:
    """The servers that a recipe asks for.

    Args:
        config: The recipe that training is started with.
        only: Names of agents; None means all of them.
        python: The interpreter of the environment that vLLM is installed in.
        on_cpu: See `server_of`; None looks at this machine.
        changes: What training is told to set in place of the recipe's settings.
    """
    recipe = {**read_recipe(config), **(changes or {})}
    agents = parse_agents(recipe.get("agents"))
    if agents is None:
        raise ValueError(f"{config} names no agents.")
    names = [agent.name for agent in agents]
    if unknown := sorted(set(only or ()) - set(names)):
        raise ValueError(f"{config} has no agents {unknown}; it has {names}.")
    on_cpu = not torch.accelerator.is_available() if on_cpu is None else on_cpu
    return [server_of(agent, recipe, python, on_cpu) for agent in agents if only is None or agent.name in only]


def _listens(url: str) -> bool:
    """Whether something takes connections there."""
    parsed = urlparse(url)
    try:
        with socket.create_connection((parsed.hostname, parsed.port or 80), timeout=1):
            return True
    except OSError:
        return False


class RunningServer:
    """A server that was started, and its log.

    Attributes:
        up: Whether it has answered since it was started.
        restarts: How often it was started anew since it last ran for a while.
        due: When it is to be started anew; None while it runs.
    """

    def __init__(self, server: Server, log: Path):
        self.server, self.log = server, log
        self.restarts = 0
        if _listens(server.url):
            raise ServerFailed(
                f"Agent '{server.agent}': something listens at {server.url} already, an earlier server perhaps. "
                "End it, or give the agent another port (vllm_server_base_url)."
            )
        self.start()

    def start(self):
        """Starts the server, in a process group of its own: Ctrl-C reaches this program alone."""
        self.up, self.due = False, None
        self.started = time.monotonic()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.server.command,
                env={**os.environ, **self.server.environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    def plan_restart(self) -> float:
        """Decides when a server that has died is started anew; returns the seconds until then.

        Raises:
            ServerFailed: it has died too often.
        """
        self.signal(signal.SIGKILL)
        if time.monotonic() - self.started > STEADY:
            self.restarts = 0
        if self.restarts == MAX_RESTARTS:
            raise ServerFailed(
                f"The vLLM server of agent '{self.server.agent}' at {self.server.url} has ended with exit status "
                f"{self.process.returncode}, after {MAX_RESTARTS} restarts. {self.ending()}"
            )
        pause = min(FIRST_PAUSE * 2**self.restarts, LONGEST_PAUSE)
        self.up, self.due = False, time.monotonic() + pause
        self.restarts += 1
        return pause

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def check(self) -> bool:
        """Whether the server answers."""
        try:
            return requests.get(f"{self.server.url}/health", timeout=5).status_code == 200
        except requests.exceptions.RequestException:
            return False

    def comes_up(self, timeout: float) -> bool:
        """Whether the server answers by now.

        Raises:
            ServerFailed: it has ended, or was started more than `timeout` seconds ago; with the end of its log.
        """
        # Its own process first: what answers at the port may be another one.
        if self.ended:
            reason = f"ended with exit status {self.process.returncode} before it was up"
        elif self.check():
            return True
        elif time.monotonic() - self.started > timeout:
            reason = f"was not up after {timeout:g} s"
        else:
            return False
        raise ServerFailed(
            f"The vLLM server of agent '{self.server.agent}' at {self.server.url} {reason}. {self.ending()}"
        )

    def ending(self) -> str:
        return f"The end of {self.log}:\n{self.last_lines()}"

    def signal(self, number: int):
        """Signals the server and the processes that it has started."""
        signal_group(self.process, number)

    def last_lines(self, count: int = 20) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])


def wait_until_up(servers: Iterable[RunningServer], timeout: float):
    """Waits for all servers; raises as `RunningServer.comes_up` does."""
    for running in servers:
        while not running.comes_up(timeout):
            time.sleep(1)


def stop(servers: Iterable[RunningServer]):
    """Ends all servers."""
    end([running.process for running in servers])


class ServerGroup:
    """Servers that run as long as the block does that it is entered with.

    Args:
        servers: How they are started.
        log_dir: The folder of their logs.
        timeout: Seconds that each of them has to be up in.
        console: Where it is said what happens to them.
        hint: What is said beside when all of them are up.
    """

    def __init__(self, servers: Sequence[Server], log_dir: Path, timeout: float, console: Console, hint: str = ""):
        self.servers, self.log_dir, self.timeout, self.console, self.hint = servers, log_dir, timeout, console, hint
        self.running: list[RunningServer] = []
        self.all_were_up = False

    def __enter__(self) -> "ServerGroup":
        self.log_dir.mkdir(parents=True, exist_ok=True)
        try:
            for server in self.servers:
                self.running.append(RunningServer(server, self.log_dir / f"{server.agent}.log"))
                self._say(f"{server.agent}: starting at {server.url}, log in {self.running[-1].log}")
                if EVERYWHERE in server.command:
                    self._say(
                        f"{server.agent}: listens on all addresses of this machine, with vLLM's development endpoints "
                        "open to whoever reaches them. `vllm_server_args: {host: ADDRESS}` binds it to one."
                    )
        except BaseException:
            stop(self.running)
            raise
        return self

    def __exit__(self, *_):
        stop(self.running)
        self._say("All servers are stopped.")

    def watch(self):
        """Called now and then: says which servers have come up, and starts those anew that were up and have died.

        Raises:
            ServerFailed: see `RunningServer.comes_up` and `RunningServer.plan_restart`.
        """
        for one in self.running:
            if one.due is not None:
                if time.monotonic() >= one.due:
                    one.start()
            elif one.ended and (one.up or one.restarts):
                status, ending = one.process.returncode, one.ending()
                pause = one.plan_restart()
                self._say(
                    f"{one.server.agent}: ended with exit status {status}; starting it anew in {pause:g} s. {ending}"
                )
            elif not one.up and one.comes_up(self.timeout):
                one.up = True
                if self.all_were_up:
                    self._say(f"{one.server.agent}: up again")
        if not self.all_were_up and all(one.up for one in self.running):
            self.all_were_up = True
            self._say(f"All {len(self.running)} servers are up. {self.hint}".rstrip())

    def _say(self, line: str):
        self.console.print(line, highlight=False, markup=False, soft_wrap=True)


def serve(servers: Sequence[Server], log_dir: Path, timeout: float, console: Console):
    """Starts servers and keeps them up until interrupted."""
    with ServerGroup(servers, log_dir, timeout, console, "Ctrl-C stops them.") as group:
        while True:
            group.watch()
            time.sleep(1)
