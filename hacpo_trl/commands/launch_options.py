"""How `hacpo train` is launched: the options that are about processes and servers, and not about the run."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path

from .errors import CommandParser
from .recipes import DEFAULT, find_recipe, recipe_path


@dataclass
class Launching:
    """What the command line says about launching; what it does not say is left at its default."""

    accelerate_config: str | None = field(
        default=None,
        metadata={
            "help": "How Accelerate launches: a name of `hacpo recipes --accelerate`, such as zero3, or a path."
        },
    )
    num_processes: int | None = field(
        default=None,
        metadata={"help": "Training processes, over all machines. Default: what accelerate_config says, else one."},
    )
    num_machines: int | None = field(
        default=None, metadata={"help": "Machines that train. Default: what accelerate_config says."}
    )
    machine_rank: int | None = field(default=None, metadata={"help": "Which of them this one is, from 0."})
    main_process_ip: str | None = field(default=None, metadata={"help": "Address of machine 0."})
    main_process_port: int | None = field(default=None, metadata={"help": "Port of machine 0."})
    serve: bool = field(
        default=False, metadata={"help": "Start the recipe's vLLM servers, too, and stop them afterwards."}
    )
    vllm_python: str | None = field(
        default=None, metadata={"help": "Interpreter of the environment that has vLLM, for these servers."}
    )

    @property
    def given(self) -> list[str]:
        """The options that were given."""
        return [f.name for f in fields(self) if getattr(self, f.name) != f.default]

    @property
    def for_accelerate(self) -> list[str]:
        """Those of them that Accelerate's launcher is started with."""
        return [f"--{name}={getattr(self, name)}" for name in self.given if name not in ("serve", "vllm_python")]


NOT_OF_A_RUN = tuple(f.name for f in fields(Launching))


def split_launching(argv: Sequence[str]) -> tuple[Launching, list[str]]:
    """What is said about launching, and the rest of the command line."""
    parser = CommandParser(prog="hacpo train", add_help=False)
    for f in fields(Launching):
        spellings = dict.fromkeys([f"--{f.name}", f"--{f.name.replace('_', '-')}"])
        how = {"action": "store_true"} if f.type is bool else {"type": int if f.type == int | None else str}
        parser.add_argument(*spellings, **how)
    found, rest = parser.parse_known_args(list(argv))
    return Launching(**vars(found)), rest


def split_recipe(argv: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The recipe that a run begins with, and the rest of the command line.

    Without `--config` it is the embedded default, unless agents are named on the command line: then there is none.
    """
    parser = CommandParser(prog="hacpo train", add_help=False)
    parser.add_argument("--config")
    found, rest = parser.parse_known_args(list(argv))
    if found.config is not None:
        return find_recipe(found.config), rest
    names_agents = any(argument.partition("=")[0] == "--agents" for argument in rest)
    return None if names_agents else recipe_path(DEFAULT), rest


def is_default(recipe: Path | None) -> bool:
    """Whether a run begins with the embedded default itself."""
    return recipe == recipe_path(DEFAULT)
