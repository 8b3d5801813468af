"""`hacpo train` from its arguments to its end: one process, several, and servers beside."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import requests
import yaml
from launching import free_port
from test_serve import STAND_IN, stand_in
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from hacpo_trl.commands import accelerate_launch, launch, train
from hacpo_trl.commands.accelerate_launch import accelerate_options
from hacpo_trl.commands.launch import check_launching, command_of, servers_beside, supervise, training_devices
from hacpo_trl.commands.launch_options import NOT_OF_A_RUN, Launching, split_launching
from hacpo_trl.commands.recipes import LAUNCHES
from hacpo_trl.generation.vllm_servers.serving import Server, ServerGroup


@pytest.fixture
def policies(policies_folder, monkeypatch):
    """The environment of a user who has the embedded policies already."""
    monkeypatch.setenv("HACPO_TRL_CACHE", str(policies_folder))
    monkeypatch.setenv("COLUMNS", "120")


# ---- options --------------------------------------------------------------------------------------------------------
def test_launching_is_told_apart_from_the_run():
    argv = ["--delta", "0.2", "--accelerate_config", "zero3", "--num-processes=4", "--serve", "--beta", "-0.1"]
    launching, rest = split_launching(argv)
    assert launching == Launching("zero3", 4, serve=True)
    assert rest == ["--delta", "0.2", "--beta", "-0.1"]
    assert launching.given == ["accelerate_config", "num_processes", "serve"]
    assert split_launching(rest)[0].given == []


def test_no_option_of_a_run_has_the_name_of_one_of_launching():
    from hacpo_trl.commands.train_options import TrainParser

    assert not set(NOT_OF_A_RUN) & set(TrainParser().settings)


@pytest.mark.parametrize(
    ("launching", "message"),
    [
        (Launching("zero9"), "unknown launch configuration 'zero9'"),
        (Launching(num_processes=0), "--num_processes must be at least 1, not 0"),
        (Launching(vllm_python="python"), "--vllm_python has no effect without --serve"),
        (Launching(main_process_port=1), "--main_process_port has no effect without --accelerate_config or"),
        (
            Launching("zero3_multinode", num_machines=2, serve=True),
            "--serve starts servers on the machine",
        ),
    ],
)
def test_what_cannot_be_launched(launching, message):
    with pytest.raises(ValueError, match=message):
        check_launching(launching)


@pytest.mark.parametrize("launching", [Launching(serve=True), Launching(num_processes=1)])
def test_one_process_needs_no_launcher(launching):
    assert command_of(launching, ["--delta", "0.2"]) == [sys.executable, "-m", "hacpo_trl.train", "--delta", "0.2"]


def test_others_are_started_by_accelerate(tmp_path):
    launching = Launching("zero3", num_processes=4, main_process_port=0)
    check_launching(launching)
    command = command_of(launching, ["--delta", "0.2"])
    assert command[2] == "hacpo_trl.commands.accelerate_launch"
    found, rest = split_launching(command[3:])
    assert (found.num_processes, found.main_process_port, rest) == (4, 0, ["--delta", "0.2"])
    zero3 = str((LAUNCHES / "zero3.yaml").resolve())
    assert accelerate_options(found) == ["--config_file", zero3, "--num_processes=4", "--main_process_port=0"]
    mine = tmp_path / "mine.yaml"
    mine.write_text("num_processes: 2")
    launching = Launching(str(mine))
    check_launching(launching)
    assert accelerate_options(launching) == ["--config_file", str(mine)]


@pytest.mark.parametrize(("gpus", "name"), [(0, "cpu_2proc"), (8, "multi_gpu")])
def test_several_processes_without_a_configuration_are_ddp(monkeypatch, gpus, name):
    monkeypatch.setattr(accelerate_launch, "count_gpus", lambda: gpus)
    assert accelerate_options(Launching(num_processes=4)) == [
        *("--config_file", str(LAUNCHES / f"{name}.yaml")),
        "--num_processes=4",
    ]


# ---- how processes end ----------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("code", "status"), [("", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), 9)", 137)])
def test_the_status_is_that_of_training(code, status):
    assert supervise([sys.executable, "-c", f"import os\n{code}"], os.environ, None) == status


def failed(rank: int, status: int) -> ChildFailedError:
    return ChildFailedError("train", {rank: ProcessFailure(rank, 1, status, "none")})


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (failed(0, 2), 2, ""),
        (
            failed(1, 1),
            1,
            "error: process 1 ended with exit status 1",
        ),
        (subprocess.CalledProcessError(-signal.SIGKILL, "train"), 137, ""),
        (KeyboardInterrupt(), 130, ""),
        (ValueError("at least 2 processes"), 2, "error: at least 2 processes"),
    ],
)
def test_the_launcher_adds_no_traceback(monkeypatch, capsys, error, status, said):
    def launch_command(args):
        assert (args.module, args.training_script, args.training_script_args) == (
            True,
            "hacpo_trl.train",
            ["--delta", "3"],
        )
        raise error

    monkeypatch.setattr(accelerate_launch, "launch_command", launch_command)
    with pytest.raises(SystemExit) as ended:
        accelerate_launch.main(["--accelerate_config", str(LAUNCHES / "cpu.yaml"), "--delta", "3"])
    assert ended.value.code == status and capsys.readouterr().err.strip() == said


def test_a_run_that_is_broken_off_says_how_to_continue(monkeypatch, capsys):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", interrupt)
    with pytest.raises(SystemExit) as ended:
        train.main([])
    assert ended.value.code == 130 and "--resume continues" in capsys.readouterr().err


# ---- servers --------------------------------------------------------------------------------------------------------
def recipe(folder: Path, **changes) -> Path:
    agent = {"name": "a", "model_name_or_path": "m", "vllm_server_base_url": "http://localhost:1"}
    content = {"agents": [agent], "use_vllm": True, "vllm_mode": "server", "seed": 1, **changes}
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_servers_get_what_the_command_line_changes(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "hacpo_trl.generation.vllm_servers.serving.policy_path", lambda name, seed, progress: f"{name}-{seed}"
    )
    path = str(recipe(tmp_path))
    agents = '[{"name": "b", "model_name_or_path": "embedded:x", "vllm_server_base_url": "http://localhost:2"}]'
    arguments = ["--config", path, "--seed", "7", "--agents", agents, "--trust_remote_code", "--delta", "0.2"]
    (server,) = servers_beside(Launching(serve=True, vllm_python="/vllm/python"), arguments)
    assert (server.agent, server.url) == ("b", "http://localhost:2")
    assert "x-7" in server.command and "--trust-remote-code" in server.command and "/vllm/python" in server.command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agents", "[]"], "--serve needs a recipe"),
        ([], "--serve has no effect: .*tiny.yaml has no `vllm_mode: server`"),
    ],
)
def test_recipes_without_servers(arguments, message):
    with pytest.raises(ValueError, match=message):
        servers_beside(Launching(serve=True), arguments)


def on(devices: str) -> Server:
    return Server("a", "http://localhost:1", {"CUDA_VISIBLE_DEVICES": devices}, [])


@pytest.mark.parametrize(
    ("visible", "processes", "config", "expected"),
    [
        (None, 4, None, "0,1,2,3"),
        (None, None, "zero3", "needs"),
        ("2,3,4", 2, None, "2,3"),
        ("4,5", 1, None, "needs"),
        (None, None, None, "0"),
    ],
)
def test_training_takes_the_gpus_that_no_server_has(monkeypatch, visible, processes, config, expected):
    monkeypatch.setattr(launch, "count_gpus", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    launching = Launching(config, processes, serve=True)
    check_launching(launching)
    servers = [on("4,5"), on("6,7")]
    if expected == "needs":
        with pytest.raises(ValueError, match=r"processes need as many GPUs, but of .* the servers have 4,5,6,7"):
            training_devices(launching, servers)
    else:
        assert training_devices(launching, servers) == {"CUDA_VISIBLE_DEVICES": expected}


def test_on_a_cpu_nothing_is_dealt_out():
    assert training_devices(Launching(serve=True), [Server("a", "http://localhost:1", {}, [])]) == {}


# Ends as soon as the server answers, with a status.
CLIENT = """
import sys, time, urllib.request
for _ in range(600):
    try:
        urllib.request.urlopen(sys.argv[1])
        sys.exit(int(sys.argv[2]))
    except OSError:
        time.sleep(0.05)
"""


def gone(url: str) -> bool:
    try:
        requests.get(url, timeout=1)
    except requests.exceptions.ConnectionError:
        return True
    return False


def group_of(servers, folder, console) -> ServerGroup:
    return ServerGroup(servers, folder, 30, console)


@pytest.fixture
def console():
    from rich.console import Console

    return Console(soft_wrap=True, width=200)


@pytest.mark.parametrize("status", [0, 3])
def test_servers_run_as_long_as_training_does(tmp_path, console, capsys, status):
    servers = [stand_in("a"), stand_in("b")]
    command = [sys.executable, "-c", CLIENT, servers[1].url, str(status)]
    assert supervise(command, os.environ, group_of(servers, tmp_path, console)) == status
    assert all(gone(server.url) for server in servers)
    assert capsys.readouterr().out.splitlines()[-1] == "All servers are stopped."


def test_training_ends_when_a_server_fails(tmp_path, console):
    mark = tmp_path / "trained"
    code = f"import pathlib, time; time.sleep(60); pathlib.Path({str(mark)!r}).touch()"
    with pytest.raises(launch.ServerFailed, match=r"(?s)agent 'a' .* exit status 1 .*no memory for the cache"):
        supervise([sys.executable, "-c", code], os.environ, group_of([stand_in("a", DIE="1")], tmp_path, console))
    assert not mark.exists()


@pytest.mark.parametrize(
    ("training", "signals", "status"),
    [
        ("import time; time.sleep(60)", [signal.SIGINT], 130),
        ("import time; time.sleep(60)", [signal.SIGTERM], 143),
        # It saves, for a while, and says that all is well.
        ("signal.signal(15, lambda *_: (time.sleep(1), sys.exit(0))); time.sleep(60)", [signal.SIGTERM], 0),
        ("signal.signal(10, lambda *_: sys.exit(0)); time.sleep(60)", [signal.SIGUSR1], 0),
        # It hears nothing.
        ("[signal.signal(n, signal.SIG_IGN) for n in (2, 15)]; time.sleep(60)", [2, 15, 2], 137),
    ],
)
def test_signals_are_trainings_to_hear_and_servers_outlive_it(tmp_path, console, training, signals, status):
    server = stand_in("a")
    command = [sys.executable, "-c", f"import signal, sys, time; {training}"]

    def send():
        for number in signals:
            time.sleep(2)
            assert not gone(server.url)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()
    before = signal.getsignal(signal.SIGTERM)
    assert supervise(command, os.environ, group_of([server], tmp_path, console)) == status
    assert gone(server.url) and signal.getsignal(signal.SIGTERM) == before


# `hacpo train --serve` with a server and a training of a few lines: `launch` from its check on.
SERVING = """
import sys
from hacpo_trl.commands import launch, train
from hacpo_trl.generation.vllm_servers.serving import Server

port = sys.argv[1]
server = Server("a", f"http://127.0.0.1:{port}", {"NOTE": "a"}, [sys.executable, "-c", %(stand_in)r, port])
launch.servers_beside = lambda *_: [server]
training = "import time; print('training', flush=True); time.sleep(60)"
launch.command_of = lambda *_: [sys.executable, "-c", training]
train.main(["--serve"])
"""


def test_sigterm_ends_servers_and_training(tmp_path):
    port = str(free_port())
    program = [sys.executable, "-u", "-c", SERVING % {"stand_in": STAND_IN}, port]
    process = subprocess.Popen(program, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = iter(process.stdout.readline, "")
    wanted = {"training", "All 1 servers are up."}
    while wanted:
        line = next(lines, None)
        assert line is not None, "it ended before anything ran"
        wanted.discard(line.strip())
    children = subprocess.check_output(["pgrep", "--parent", str(process.pid)], text=True).split()
    assert len(children) == 2
    process.send_signal(signal.SIGTERM)
    rest = "".join(lines)
    assert process.wait(60) == 143 and "All servers are stopped." in rest
    assert gone(f"http://127.0.0.1:{port}/") and not any(Path(f"/proc/{child}").exists() for child in children)
    assert (tmp_path / "outputs" / "vllm_servers" / "a.log").read_text() == "starting with a\n"


# ---- whole runs -----------------------------------------------------------------------------------------------------
TASK = """
from datasets import Dataset

def copies(script_args, training_args):
    prompts = [f"{letter}=" for letter in "abcdefghijklmnop"] * 4
    return Dataset.from_dict({"prompt": prompts}), None, lengths

def lengths(completions, **kwargs):
    return [float(len(completion)) for completion in completions]
"""


def test_a_task_of_ones_own_without_held_out_prompts(policies, tmp_path, monkeypatch, capsys):
    """In this process, on the demo's models."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    (tmp_path / "my_copies.py").write_text(TASK)
    train.main(["--task", "my_copies:copies", "--max_steps", "4", "--output_dir", "run", "--report_to", "none"])
    printed = capsys.readouterr().out
    assert "before" not in printed and re.search(r"│ qwen +│ +[\d,]+ │", printed)
    assert (tmp_path / "run" / "llama" / "config.json").is_file()
    assert printed.rstrip().endswith("# on several GPUs with --accelerate_config zero3 --serve")


@pytest.mark.distributed
def test_two_processes_train_the_embedded_default(policies, tmp_path):
    command = [
        *(sys.executable, "-m", "hacpo_trl", "train", "--accelerate_config", "cpu_2proc", "--main_process_port", "0"),
        *("--max_steps", "4", "--test_size", "16", "--output_dir", str(tmp_path / "run")),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-5000:]
    assert result.stdout.count("HACPO after 4 updates of each agent") == 1
    assert "hacpo recipes qwen3-4b+llama3.2-3b > my.yaml" in result.stdout
    # Sixteen prompts, eight answers each, by each agent: one step, in updates of as many rollouts as on one process.
    state = (tmp_path / "run" / "trainer_state.json").read_text()
    assert '"global_step": 4' in state


@pytest.mark.distributed
def test_a_wrong_setting_is_a_line_however_many_processes_read_it(tmp_path):
    command = [sys.executable, "-m", "hacpo_trl", "train", "--num_processes", "2", "--main_process_port", "0"]
    result = subprocess.run([*command, "--delta", "3"], capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert result.returncode == 2 and "Traceback" not in result.stderr
    assert result.stderr.count("error: delta must be at most 1, not 3.0") == 1
