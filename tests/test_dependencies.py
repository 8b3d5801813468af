"""Upper bounds of dependencies: each says why it is there, and what it is there for is still used and still there.

A bound of which the last test says that nothing is used any more can be lifted. To raise one, install the new version,
run all tests, and see here whether what is private in it has stayed.
"""

import importlib
import importlib.metadata
import itertools
import re

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


# For each bounded library what the package takes of it that may change without notice: `module:name`.
PRIVATE = {
    # Of the parser that it brings along.
    "math-verify": ["latex2sympy2_extended.latex2sympy2:ConversionConfig", "latex2sympy2_extended.logic:And"],
    "transformers": [
        f"transformers:Trainer.{name}"
        for name in (
            "_build_accelerator_args",
            "_clip_grad_norm",
            "_get_dataloader",
            "_get_grad_norm",
            "_get_learning_rate",
            "_inner_training_loop",
            "_load_from_checkpoint",
            "_load_optimizer_and_scheduler",
            "_prepare_for_training",
            "_save_optimizer_and_scheduler",
        )
    ],
    "trl": [
        "trl.distributed:DistributedBackend",
        "trl.models.utils:prepare_deepspeed",
        "trl.trainer.utils:add_fused_lm_head",
        "trl.trainer.utils:create_model_from_path",
        "trl.trainer.utils:disable_dropout_in_model",
        "trl.trainer.utils:print_prompt_completions_sample",
        "trl.trainer.utils:use_adapter",
    ],
}
# Not installed where the tests run; `make test-vllm` has it.
ELSEWHERE = {"vllm"}


@pytest.fixture(scope="module")
def bounded(repository) -> dict[str, tuple[Requirement, str]]:
    """The requirements that have an upper bound, each with the line above it."""
    lines = (repository / "setup.cfg").read_text(encoding="utf-8").splitlines()
    found = {}
    for above, line in itertools.pairwise(lines):
        if re.fullmatch(r"\s+[\w-]+(>=|<|==)[\w.,<>=]+", line) and "<" in line:
            requirement = Requirement(line.strip())
            found[requirement.name] = (requirement, above.strip())
    return found


def test_every_upper_bound_says_why(bounded):
    assert set(bounded) == set(PRIVATE) | ELSEWHERE
    for requirement, above in bounded.values():
        assert above.startswith("# ") and len(above) > 30, f"{requirement}: no comment above it says what it is for"


def test_the_lowest_versions_are_those_of_the_bounds(repository):
    """`constraints-lowest.txt` pins what `>=` says, padded by zeros; torch is an exception that the file explains."""
    lowest = {}
    for line in (repository / "constraints-lowest.txt").read_text(encoding="utf-8").splitlines():
        if not line.startswith("#"):
            name, _, version = line.partition("==")
            lowest[name] = Version(version)
    setup = (repository / "setup.cfg").read_text(encoding="utf-8")
    for name, version in lowest.items():
        (bound,) = re.findall(rf"^    {name}>=([\w.]+)", setup, re.MULTILINE)
        assert version == Version(bound) or (name == "torch" and version > Version(bound)), name


@pytest.mark.parametrize("library", PRIVATE)
def test_the_installed_version_is_within_its_bounds(bounded, library):
    requirement, _ = bounded[library]
    version = importlib.metadata.version(library)
    assert requirement.specifier.contains(version), f"{library} {version} is installed, which {requirement} excludes"


@pytest.mark.parametrize(
    ("library", "path"), [(library, path) for library, paths in PRIVATE.items() for path in paths]
)
def test_what_a_bound_is_there_for_is_there_and_used(repository, library, path):
    module, _, name = path.partition(":")
    value = importlib.import_module(module)
    for part in name.split("."):
        assert hasattr(value, part), f"{library} {importlib.metadata.version(library)} has no {path} any more"
        value = getattr(value, part)
    last = name.split(".")[-1]
    sources = (file.read_text(encoding="utf-8") for file in (repository / "hacpo_trl").rglob("*.py"))
    assert any(re.search(rf"\b{last}\b", source) for source in sources), (
        f"The package no longer uses {path}: take it out of PRIVATE, and lift {library}'s bound with the last one."
    )
