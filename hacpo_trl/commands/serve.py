"""Starts the vLLM servers of a recipe, one an agent: `hacpo serve --config recipe.yaml`.

Each server gets the flags that the trainer needs, the devices that the recipe names for it (`vllm_server_devices`) and
a log of its own. The program waits until all of them are up, says so, and starts a server that dies anew: the trainer
then sends it its weights. Ctrl-C stops all of them. `--print` only prints the commands, for those who start servers by
hand or by Slurm; `--agent` takes some of the agents, for servers on several machines.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from ..generation.vllm_servers.processes import ServerFailed, stop_on_signals
from .errors import CommandParser, user_errors
from .recipes import find_recipe


# Where the logs of servers go.
LOG_DIR = Path("outputs/vllm_servers")
# Seconds that servers have to be up in.
TIMEOUT = 900.0


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = CommandParser(prog="hacpo serve", description=__doc__.split("\n\n")[0])
    parser.add_argument("--config", required=True, help="the recipe that training is started with, a file or a name")
    parser.add_argument("--agent", action="append", metavar="NAME", help="start this agent's server only; repeatable")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the environment that has vLLM")
    parser.add_argument("--log_dir", type=Path, default=LOG_DIR, help="where the logs go")
    parser.add_argument("--timeout", type=float, default=TIMEOUT, help="seconds that the servers have to be up in")
    parser.add_argument("--device", choices=("cpu", "gpu"), help="what the servers run on; default: what is here")
    parser.add_argument("--print", action="store_true", help="print the commands instead of running them")
    return parser.parse_args(argv)


def check_python(option: str, python: str):
    """Refuses an interpreter that is none."""
    if shutil.which(python) is None:
        raise ValueError(f"{option} {python}: there is no such program. It is the interpreter that has vLLM.")


def main(argv: Sequence[str] | None = None):
    args = parse_args(argv)
    from rich.console import Console

    from ..generation.vllm_servers.serving import serve, servers_of

    with user_errors():
        on_cpu = None if args.device is None else args.device == "cpu"
        servers = servers_of(find_recipe(args.config), args.agent, args.python, on_cpu)
    if args.print:
        for server in servers:
            print(server)
        return
    with user_errors():
        check_python("--python", args.python)
    stop_on_signals()
    try:
        with user_errors():
            serve(servers, args.log_dir, args.timeout, Console())
    except KeyboardInterrupt:
        return
    except ServerFailed as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
