"""Recipes and launch configurations by name: what comes with the package, listed, copied, found.

`configs/` in the repository is the package's `configs` folder, and is in its wheel.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..options.names import unknown_name
from .errors import CommandParser, fail, show


CONFIGS = Path(__file__).parent.parent / "configs"
LAUNCHES = CONFIGS / "accelerate"

# By name the file in configs/recipes; the pairs are called as in examples/reproduce.py.
RECIPES = {
    "tiny": "tiny",
    "tiny_vllm": "tiny_vllm",
    "qwen3-4b+4b-instruct": "qwen3_4b_qwen3_4b_instruct",
    "qwen3-1.7b+4b": "qwen3_1_7b_qwen3_4b",
    "qwen3-4b+llama3.2-3b": "qwen3_4b_llama3_2_3b",
    "qwen3-4b+8b": "qwen3_4b_qwen3_8b",
    "llama3.2-1b+3b": "llama3_2_1b_llama3_2_3b",
    "qwen3-1.7b+llama3.2-1b": "qwen3_1_7b_llama3_2_1b",
}
# What `hacpo train` runs without arguments, and whose recipe is a good one to begin with for one's own models.
DEFAULT = "tiny"
FIRST_COPY = "qwen3-4b+llama3.2-3b"

NEEDS = "Needs: "


@dataclass(frozen=True)
class Header:
    """The comment that a configuration begins with.

    Attributes:
        summary: Its first sentence.
        needs: What the line that begins with "Needs:" says, "" without one.
    """

    summary: str
    needs: str

    @classmethod
    def of(cls, path: Path) -> "Header":
        lines = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            lines.append(line.removeprefix("#").strip())
        needs = next((line.removeprefix(NEEDS) for line in lines if line.startswith(NEEDS)), "")
        text = " ".join(line for line in lines if not line.startswith(NEEDS))
        return cls(text.partition(". ")[0].rstrip("."), needs.rstrip("."))


def recipe_path(name: str) -> Path:
    """The file of one of `RECIPES`."""
    return CONFIGS / "recipes" / f"{RECIPES[name]}.yaml"


def find_recipe(text: str) -> Path:
    """A recipe by its path, or by a name in `RECIPES`."""
    return _find(text, {name: recipe_path(name) for name in RECIPES}, "recipe", "hacpo recipes")


def find_launch(text: str) -> Path:
    """A launch configuration of Accelerate by its path, or by its name in `configs/accelerate`."""
    return _find(text, _launches(), "launch configuration", "hacpo recipes --accelerate")


def _launches() -> dict[str, Path]:
    return {path.stem: path for path in sorted(LAUNCHES.glob("*.yaml"))}


def _find(text: str, known: dict[str, Path], kind: str, lister: str) -> Path:
    if Path(text).is_file():
        return Path(text)
    if text in known:
        return known[text]
    if Path(text).suffix in (".yaml", ".yml"):
        raise ValueError(f"there is no file {text}. `{lister}` lists what comes with the package.")
    raise ValueError(f"{unknown_name(text, list(known), kind)} A file is given by its path.")


def _listing(known: dict[str, Path]) -> str:
    width = max(map(len, known))
    lines = []
    for name, path in known.items():
        header = Header.of(path)
        lines.append(f"  {name:{width}}  {header.summary}")
        if header.needs:
            lines.append(f"  {'':{width}}  needs {header.needs}")
    return "\n".join(lines)


def parse_args(argv: Sequence[str] | None = None):
    parser = CommandParser(
        prog="hacpo recipes",
        description="Lists the recipes that come with the package, or prints one: hacpo recipes tiny > my.yaml",
    )
    parser.add_argument("name", nargs="?", help="the recipe to print")
    parser.add_argument("--accelerate", action="store_true", help="the launch configurations instead")
    return parser.parse_args(argv)


USES = f"""
Copy one:  hacpo recipes {FIRST_COPY} > my.yaml
Run one:   hacpo train --config {DEFAULT}
On several GPUs `--accelerate_config` says how it is launched: hacpo recipes --accelerate
"""
USES_OF_LAUNCHES = """
Copy one:         hacpo recipes --accelerate zero3 > my_launch.yaml
Launch with one:  hacpo train --config my.yaml --accelerate_config zero3
"""


def main(argv: Sequence[str] | None = None):
    args = parse_args(argv)
    known = _launches() if args.accelerate else {name: recipe_path(name) for name in RECIPES}
    if args.name is None:
        show(f"{_listing(known)}\n{USES_OF_LAUNCHES if args.accelerate else USES}")
    elif args.name in known:
        show(known[args.name].read_text(encoding="utf-8"))
    else:
        fail(unknown_name(args.name, list(known), "launch configuration" if args.accelerate else "recipe"))


if __name__ == "__main__":
    main()
