"""The documents: links lead somewhere, every block of code is run or says why not, the list of options is whole."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import yaml


REPOSITORY = Path(__file__).parents[2]
sys.path.insert(0, str(REPOSITORY / "docs"))
PAGES = [REPOSITORY / "README.md", REPOSITORY / "CONTRIBUTING.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
# Pages whose blocks are run one after the other in one folder, in this order: they speak of one run's output.
ONE_WALK = ("quickstart.md", "metrics.md", "evaluation.md", "checkpoints.md")

MARK = re.compile(r"<!-- test: (.+?) -->")
PAGE_MARK = re.compile(r"<!-- test page: (.+?) -->")
FENCE = re.compile(r"^( *)```(\w+)\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")


@dataclass
class Block:
    language: str
    code: str
    mark: str | None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    of_page = PAGE_MARK.search(text)
    found = []
    for fence in FENCE.finditer(text):
        above = text[: fence.start()].rstrip().splitlines()
        mark = MARK.search(above[-1]) if above else None
        indent = len(fence[1])
        code = "".join(line[indent:] if line.strip() else line for line in fence[3].splitlines(keepends=True))
        found.append(Block(fence[2], code, mark[1] if mark else of_page[1] if of_page else None))
    return found


def anchors_of(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\- ]", "", heading.replace("`", "")).strip().lower() for heading in headings)
    return {re.sub(r"\s+", "-", heading) for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in LINK.findall(page.read_text(encoding="utf-8")):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        destination = (page.parent / path).resolve() if path else page
        assert destination.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor in anchors_of(destination), f"{page.name} links to {target}"


def test_every_page_is_on_the_site_and_linked():
    navigation = (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8")
    start = (REPOSITORY / "docs" / "index.md").read_text(encoding="utf-8")
    for page in (REPOSITORY / "docs").glob("*.md"):
        assert f": {page.name}" in navigation, f"{page.name} is not in mkdocs.yml"
        assert page.name == "index.md" or f"({page.name})" in start, f"{page.name} is not in index.md"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_block_is_run_or_says_why_not(page):
    for block in blocks_of(page):
        if block.language in ("text", "yaml"):
            continue
        assert block.language in ("bash", "python"), f"{page.name}: a block of {block.language}"
        assert block.mark, f"{page.name}: nothing says how this is tested:\n{block.code}"
        if block.mark.startswith("covered by "):
            assert (REPOSITORY / block.mark.removeprefix("covered by ")).exists(), f"{page.name}: {block.mark}"
        else:
            assert block.mark in ("run", "needs GPUs", "needs the Hub"), f"{page.name}: {block.mark}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_recipes_in_documents_are_taken(page, tmp_path):
    from hacpo_trl.commands.train_options import parse_arguments

    for block in blocks_of(page):
        if block.language == "yaml":
            recipe = {"agents": [{"name": "a", "model_name_or_path": "b"}], "report_to": "none"} | yaml.safe_load(
                block.code
            )
            (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")
            parse_arguments(["--config", str(tmp_path / "recipe.yaml"), "--output_dir", str(tmp_path)])


@pytest.fixture
def cache(policies_folder, monkeypatch):
    """Where the embedded policies are kept between tests."""
    monkeypatch.setenv("HACPO_TRL_CACHE", str(policies_folder))


def run(pages: list[Path], folder: Path):
    """Runs the marked blocks of pages in a folder, one after the other."""
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    for page in pages:
        for block in blocks_of(page):
            if block.mark != "run":
                continue
            command = [sys.executable, "-c"] if block.language == "python" else ["bash", "-euo", "pipefail", "-c"]
            result = subprocess.run(
                [*command, block.code], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
            )
            assert result.returncode == 0, f"{page.name}\n{block.code}\n{result.stdout[-2000:]}{result.stderr[-3000:]}"


@pytest.mark.slow
def test_a_walk_through_the_documents(cache, tmp_path):
    run([REPOSITORY / "docs" / name for name in ONE_WALK], tmp_path)
    assert (tmp_path / "my.yaml").is_file() and (tmp_path / "outputs" / "first" / "qwen" / "config.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name not in ONE_WALK and any(b.mark == "run" for b in blocks_of(page))],
    ids=lambda page: page.name,
)
def test_the_blocks_of_a_page_run(cache, page, tmp_path):
    run([page], tmp_path)


def test_the_list_of_options_is_whole():
    import options

    page = (REPOSITORY / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page.startswith(options.own_part()), "docs/configuration.md is old: run `make options`"
    # What is there beside it is transformers', and differs between its versions.
    own = {option.name for _, of_section in options.sections() for option in of_section}
    from transformers import TrainingArguments

    from hacpo_trl import HACPOConfig

    added = {field.name for field in fields(HACPOConfig)} - {field.name for field in fields(TrainingArguments)}
    assert added <= own, f"not in the list: {sorted(added - own)}"


@pytest.mark.slow
def test_the_notebook_runs(cache, tmp_path):
    """Its cells one after the other, with fewer updates."""
    notebook = json.loads((REPOSITORY / "examples" / "demo.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    program = "\n".join(cells)
    for long, short in (("updates = 160", "updates = 4"), ('"test", 256', '"test", 32')):
        assert program.count(long) == 1
        program = program.replace(long, short)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "MPLBACKEND": "agg"}
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, env=environment, check=True, timeout=300)
    assert (tmp_path / "outputs" / "notebook" / "qwen" / "model.safetensors").is_file()


@pytest.mark.slow
def test_the_quickstarts_task_is_as_short_as_it_says_and_trains(cache, tmp_path):
    (task,) = [b for b in blocks_of(REPOSITORY / "docs" / "quickstart.md") if "class ParityTrainer" in b.code]
    assert len([line for line in task.code.splitlines() if line.strip()]) <= 30
    program = task.code.replace("max_steps=20", "max_steps=4")
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr[-3000:]
    assert "qwen3 reward" in result.stdout and len(result.stdout.strip().splitlines()) >= 3
