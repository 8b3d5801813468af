"""Starts `launched.py` on several processes, through Accelerate's launcher."""

import os
import socket
import subprocess
import sys


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def launch(repository, config, scenario, folder, processes=2, timeout=480) -> subprocess.CompletedProcess:
    """Runs a scenario under one of `configs/accelerate/` and waits for its end, whatever that is."""
    command = [
        *(sys.executable, "-m", "accelerate.commands.launch"),
        *("--config_file", str(repository / "configs" / "accelerate" / f"{config}.yaml")),
        *("--main_process_port", str(free_port()), "--num_processes", str(processes), "--mixed_precision", "no"),
        *(str(repository / "tests" / "launched.py"), scenario, str(folder)),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=timeout)


def launch_well(*args, **kwargs):
    """The same for a scenario that must succeed."""
    result = launch(*args, **kwargs)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-6000:]
