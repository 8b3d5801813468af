"""`hacpo serve`, with a small HTTP server in the place of vLLM."""

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest
import requests
import yaml
from launching import free_port
from reproduce import PAIRS
from rich.console import Console

from hacpo_trl.commands.serve import main
from hacpo_trl.generation.vllm_servers import serving
from hacpo_trl.generation.vllm_servers.serving import (
    RunningServer,
    Server,
    ServerFailed,
    ServerGroup,
    servers_of,
    stop,
    wait_until_up,
)


# Answers /health after DELAY seconds; ends after LIFE.
STAND_IN = """
import http.server, os, signal, sys, threading, time
print("starting with", os.environ["NOTE"], flush=True)
time.sleep(float(os.environ.get("DELAY", 0)))
if "STUBBORN" in os.environ:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
if "DIE" in os.environ:
    sys.exit("no memory for the cache")
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *args):
        pass
if "LIFE" in os.environ:
    threading.Timer(float(os.environ["LIFE"]), os._exit, [3]).start()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def recipe(folder, **changes):
    content = {
        "seed": 3,
        "agents": [
            {
                "name": "qwen",
                "model_name_or_path": "Qwen/Qwen3-4B-Base",
                "max_model_length": 5120,
                "vllm_server_base_url": "http://gpu-node:8001",
                "vllm_server_devices": "0,1",
                "vllm_server_args": {"max_num_seqs": 64, "enforce_eager": True, "enable_prefix_caching": False},
            },
            {
                "name": "llama",
                "model_name_or_path": "meta-llama/Llama-3.2-3B-Instruct",
                "tokenizer_name_or_path": "other/tokenizer",
                "peft_config": {"r": 16, "target_modules": ["q_proj", "v_proj"]},
                "vllm_server_base_url": "http://localhost:8002",
                "vllm_server_devices": "2",
            },
        ],
        "dataset_name": "math_train",  # the training script's; none of the servers' business
        **changes,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def options(server: Server) -> dict[str, str | bool]:
    """`--a b --c --d e f` as {"a": "b", "c": True, "d": "e f"}."""
    flags = " ".join(server.command[server.command.index("-m") + 2 :]).removeprefix("--").split(" --")
    return {name: value or True for name, _, value in (flag.partition(" ") for flag in flags)}


# ---- commands -------------------------------------------------------------------------------------------------------
def test_commands_on_gpus(tmp_path):
    qwen, llama = servers_of(recipe(tmp_path), python="/vllm/python", on_cpu=False)
    assert list(qwen.command[:3]) == ["/vllm/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert options(qwen) == {
        "model": "Qwen/Qwen3-4B-Base",
        "host": "0.0.0.0",
        "port": "8001",
        "dtype": "bfloat16",
        "logprobs-mode": "processed_logprobs",
        "generation-config": "vllm",
        "max-model-len": "5120",
        "weight-transfer-config": '{"backend": "nccl"}',
        "tensor-parallel-size": "2",
        "max-num-seqs": "64",
        "enforce-eager": True,
        "no-enable-prefix-caching": True,
    }
    assert qwen.environment == {"VLLM_SERVER_DEV_MODE": "1", "CUDA_VISIBLE_DEVICES": "0,1"}
    found = options(llama)
    # Only the adapter travels, so there is no group for weights; without named targets vLLM would wrap the head, too.
    assert "weight-transfer-config" not in found
    assert found["enable-lora"] is True
    assert (found["max-lora-rank"], found["lora-target-modules"]) == ("16", "q_proj v_proj")
    assert (found["host"], found["tokenizer"]) == ("127.0.0.1", "other/tokenizer")
    assert llama.environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "True"


@pytest.mark.parametrize(("rank", "started_for"), [(1, "1"), (2, "8"), (8, "8"), (12, "16"), (512, "512")])
def test_adapters_of_a_rank_that_vllm_has_not_get_the_next_one(tmp_path, rank, started_for):
    agent = {"name": "a", "model_name_or_path": "m", "vllm_server_base_url": "http://localhost:1"}
    path = recipe(tmp_path, agents=[{**agent, "peft_config": {"r": rank}}])
    assert options(servers_of(path, on_cpu=False)[0])["max-lora-rank"] == started_for


def test_commands_on_a_cpu(tmp_path):
    qwen = servers_of(recipe(tmp_path), ["qwen"], on_cpu=True)[0]
    found = options(qwen)
    assert (found["dtype"], found["weight-transfer-config"]) == ("float32", '{"backend": "hacpo_gloo"}')
    assert qwen.environment["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"
    assert list(qwen.command[:3]) == ["taskset", "--cpu-list", "0,1"], "all of its processes, not the workers alone"
    assert "tensor-parallel-size" not in found


def test_embedded_policies_are_those_of_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hacpo_trl.generation.vllm_servers.serving.policy_path", lambda name, seed, progress: f"/cache/{name}-{seed}"
    )
    agents = [{"name": "a", "model_name_or_path": "embedded:qwen3", "vllm_server_base_url": "http://localhost:1"}]
    assert options(servers_of(recipe(tmp_path, agents=agents), on_cpu=True)[0])["model"] == "/cache/qwen3-3"


def test_print_prints_commands_that_a_shell_reads(tmp_path, capsys):
    main(["--config", str(recipe(tmp_path)), "--print", "--device", "gpu", "--agent", "llama"])
    words = shlex.split(capsys.readouterr().out)
    assert words[0] == "VLLM_SERVER_DEV_MODE=1"
    start = words.index("--lora-target-modules")
    assert words[start + 1 : start + 3] == ["q_proj", "v_proj"]


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        (None, "names no agents"),
        ([{"name": "a", "model_name_or_path": "m"}], "Agent 'a' has no vllm_server_base_url"),
        ([{"name": "a", "vllm_server_base_url": "http://localhost:1"}], "Agent 'a' has no model_name_or_path"),
        (
            [{"name": "a", "model_name_or_path": "m", "vllm_server_args": {"api_key": "sesame"}}],
            "Agent 'a': an api_key in vllm_server_args would be in files",
        ),
    ],
)
def test_recipes_that_cannot_be_served(tmp_path, agents, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(recipe(tmp_path, agents=agents)), "--print"])
    assert message in capsys.readouterr().err


def test_an_unknown_agent_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(recipe(tmp_path)), "--print", "--agent", "mistral"])
    assert "no agents ['mistral']; it has ['qwen', 'llama']" in capsys.readouterr().err


def test_who_can_reach_a_server_is_said(tmp_path):
    console = Console(file=io.StringIO(), width=200)
    nothing = [sys.executable, "-c", "pass"]
    servers = [
        Server("open", "http://node0:1", {}, [*nothing, "--host", "0.0.0.0"]),
        Server("bound", "http://node0:2", {}, [*nothing, "--host", "10.0.0.3"]),
    ]
    with ServerGroup(servers, tmp_path, 1, console):
        said = console.file.getvalue()
    assert "open: listens on all addresses of this machine" in said and "bound: listens" not in said


# ---- running --------------------------------------------------------------------------------------------------------
def stand_in(agent: str, **environment: str) -> Server:
    port = free_port()
    command = [sys.executable, "-c", STAND_IN, str(port)]
    return Server(agent, f"http://127.0.0.1:{port}", {"NOTE": agent, **environment}, command)


def test_servers_are_waited_for_logged_and_stopped(tmp_path):
    running = [RunningServer(stand_in(n, DELAY="0.5"), tmp_path / f"{n}.log") for n in ("a", "b")]
    assert not any(one.check() for one in running)
    wait_until_up(running, 30)
    assert [one.log.read_text() for one in running] == ["starting with a\n", "starting with b\n"]
    stop(running)
    assert all(one.ended for one in running)
    with pytest.raises(requests.exceptions.ConnectionError):
        requests.get(running[0].server.url, timeout=1)


def test_a_server_that_ends_before_it_is_up_is_named_with_the_end_of_its_log(tmp_path):
    running = [RunningServer(stand_in("a", DIE="1"), tmp_path / "a.log")]
    with pytest.raises(
        ServerFailed, match=r"(?s)agent 'a' .* exit status 1 before it was up.*no memory for the cache"
    ):
        wait_until_up(running, 30)
    stop(running)


def test_a_server_that_is_too_slow_is_named(tmp_path):
    running = [RunningServer(stand_in("a", DELAY="60"), tmp_path / "a.log")]
    with pytest.raises(ServerFailed, match=r"agent 'a' .* was not up after 1 s"):
        wait_until_up(running, 1)
    stop(running)


def test_a_port_that_is_taken_is_named_and_nothing_is_started(tmp_path):
    """By what answers like a server, too."""
    other = RunningServer(stand_in("other"), tmp_path / "other.log")
    wait_until_up([other], 30)
    mine = Server("a", other.server.url, {"NOTE": "a"}, other.server.command)
    with pytest.raises(ServerFailed, match=r"Agent 'a': something listens at http://127.0.0.1:\d+ already"):
        RunningServer(mine, tmp_path / "a.log")
    # One that comes up while ours is starting is not ours.
    other.process, ours = subprocess.Popen([sys.executable, "-c", "pass"]), other.process
    other.process.wait()
    with pytest.raises(ServerFailed, match="ended with exit status 0 before it was up"):
        other.comes_up(30)
    other.process = ours
    stop([other])


def test_a_server_that_dies_again_and_again_is_given_up_with_the_end_of_its_log(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "FIRST_PAUSE", 0.2)
    monkeypatch.setattr(serving, "MAX_RESTARTS", 2)
    console = Console(file=io.StringIO(), width=500)
    with (
        ServerGroup([stand_in("a", LIFE="0.5")], tmp_path, 30, console) as group,
        pytest.raises(ServerFailed) as failed,
    ):
        for _ in range(600):
            group.watch()
            time.sleep(0.05)
    said = console.file.getvalue()
    assert "starting it anew in 0.2 s. The end of" in said and "starting it anew in 0.4 s. The end of" in said
    assert re.search(r"agent 'a' .* after 2 restarts\. The end of .*a\.log:\nstarting with a", str(failed.value))
    assert (tmp_path / "a.log").read_text().count("starting with a") == 3


def test_one_that_has_run_for_long_may_die_as_often_again(tmp_path, monkeypatch):
    monkeypatch.setattr(serving, "MAX_RESTARTS", 1)
    running = RunningServer(stand_in("a"), tmp_path / "a.log")
    assert running.plan_restart() == 1.0
    running.started -= 2 * serving.STEADY
    assert running.plan_restart() == 1.0
    running.start()
    with pytest.raises(ServerFailed, match="after 1 restarts"):
        running.plan_restart()
    stop([running])


PROGRAM = """
from pathlib import Path
from rich.console import Console
import sys
from hacpo_trl.generation.vllm_servers.processes import stop_on_signals
from hacpo_trl.generation.vllm_servers.serving import Server, serve
stop_on_signals()
command = [sys.executable, "-c", %(stand_in)r, "%(port)s"]
server = Server("a", "http://127.0.0.1:%(port)s", {"NOTE": "a", %(more)s}, command)
try:
    serve([server], Path(%(folder)r), 30, Console(soft_wrap=True))
except KeyboardInterrupt:
    pass
"""


class Serving:
    """`hacpo serve` of one server, from its start on; as a shell starts programs in the background, Ctrl-C ignored."""

    def __init__(self, folder, more=""):
        self.port = free_port()
        program = PROGRAM % {"port": self.port, "more": more, "stand_in": STAND_IN, "folder": str(folder)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        )
        self.lines = iter(self.process.stdout.readline, "")
        self.read_until("All 1 servers are up")
        of_it = subprocess.run(
            ["pgrep", "--parent", str(self.process.pid)], capture_output=True, text=True, check=True
        )
        self.server = int(of_it.stdout)

    def read_until(self, text: str):
        assert any(text in line for line in self.lines), f"the program never said {text!r}"

    def assert_gone(self):
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            try:
                requests.get(f"http://127.0.0.1:{self.port}/health", timeout=1)
            except requests.exceptions.ConnectionError:
                return
            time.sleep(0.1)
        raise AssertionError("the server is still there")


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_the_program_starts_dead_servers_anew_and_stops_all_on_ctrl_c(tmp_path, signal_number):
    program = Serving(tmp_path)
    os.kill(program.server, signal.SIGKILL)
    program.read_until("ended with exit status -9; starting it anew in 1 s.")
    program.read_until("a: up again")
    program.process.send_signal(signal_number)
    program.read_until("All servers are stopped.")
    assert program.process.wait(30) == 0
    program.assert_gone()


def test_ctrl_c_twice_kills_servers_that_do_not_end(tmp_path):
    program = Serving(tmp_path, '"STUBBORN": "1"')
    program.process.send_signal(signal.SIGINT)
    time.sleep(1)
    assert program.process.poll() is None
    began = time.monotonic()
    program.process.send_signal(signal.SIGINT)
    assert program.process.wait(30) == 0 and time.monotonic() - began < 5
    program.assert_gone()


def test_a_program_that_is_killed_leaves_no_server_behind(tmp_path):
    program = Serving(tmp_path)
    program.process.kill()
    program.process.wait()
    program.assert_gone()


def test_an_interpreter_that_is_none_is_a_line(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["--config", str(recipe(tmp_path)), "--python", "/no/python"])
    assert capsys.readouterr().err == (
        "error: --python /no/python: there is no such program. It is the interpreter that has vLLM.\n"
    )


@pytest.mark.parametrize("name", ["tiny_vllm", *sorted({pair.recipe for pair in PAIRS.values()} - {"tiny"})])
def test_the_recipes_servers_can_be_started(repository, monkeypatch, name):
    monkeypatch.setattr(f"{serving.__name__}.policy_path", lambda name, seed, progress: name)
    servers = servers_of(repository / "configs" / "recipes" / f"{name}.yaml", on_cpu=name == "tiny_vllm")
    assert [server.url for server in servers] == ["http://localhost:8001", "http://localhost:8002"]
