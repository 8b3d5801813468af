"""`hacpo`: what it says at once, and how it says what is wrong."""

import os
import subprocess
import sys
import zipfile
from importlib.metadata import version as installed
from pathlib import Path

import pytest

from hacpo_trl.commands.errors import CommandParser, fail, user_errors
from hacpo_trl.commands.main import COMMANDS, main, overview


def said(argv, capsys) -> str:
    """What a command that must fail says."""
    with pytest.raises(SystemExit) as ended:
        main(argv)
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    return err.removeprefix("error: ").rstrip()


# ---- at once --------------------------------------------------------------------------------------------------------
HEAVY = {"torch", "transformers", "trl", "datasets", "accelerate", "peft"}
AT_ONCE = [
    [],
    ["--help"],
    ["--version"],
    ["trian"],
    ["recipes"],
    ["recipes", "tiny"],
    ["recipes", "--accelerate"],
    *([command, "--help"] for command in COMMANDS),
    ["train", "--detla", "0.2"],
    ["train", "--config", "nowhere.yaml"],
    ["serve", "--confg", "x"],
]
PROGRAM = f"""
import contextlib, io, sys
from hacpo_trl.commands.main import main
for argv in {AT_ONCE!r}:
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), contextlib.suppress(SystemExit):
        main(argv)
    assert said.getvalue(), argv
    assert not {HEAVY!r} & set(sys.modules), argv
"""


def test_nobody_waits_for_torch_to_read_help_or_a_typo():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)


def test_alone_it_says_what_there_is_and_what_to_type_first(capsys):
    main([])
    assert capsys.readouterr().out == overview()
    assert all(f"hacpo {command} " in overview() for command in COMMANDS)
    assert overview().index("Begin with:\n  hacpo train ") > 0


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_also_a_module(command, repository):
    module = (repository / "hacpo_trl" / f"{command}.py").read_text()
    assert f"from .commands.{command} import main" in module and f"python -m hacpo_trl.{command}`" in module


def test_python_m_is_the_same():
    result = subprocess.run([sys.executable, "-m", "hacpo_trl"], capture_output=True, text=True, timeout=60)
    assert (result.returncode, result.stdout) == (0, overview())


# ---- errors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["trian"], "unknown command 'trian'. Did you mean 'train'?"),
        (["recipes", "tinny"], "unknown recipe 'tinny'. Did you mean 'tiny'?"),
        (["recipes", "--accelerate", "zero9"], "unknown launch configuration 'zero9'. Did you mean 'zero3'?"),
        (["serve"], "the following arguments are required: --config"),
        (["serve", "--config", "tiny", "--pythn", "x"], "unknown option '--pythn'. Did you mean '--python'?"),
        (["evaluate", "--backend", "vlm"], "argument --backend: invalid choice: 'vlm'"),
        (["evaluate", "conv"], "unexpected argument 'conv'. `hacpo evaluate --help` says what there is."),
        (["report", "nowhere"], "nowhere is no run"),
    ],
)
def test_what_a_user_did_wrong_is_a_line(argv, message, capsys):
    assert message in said(argv, capsys)


def test_an_error_is_one_line_however_it_was_written(capsys):
    with pytest.raises(SystemExit), user_errors():
        raise ValueError("first\n  second")
    assert capsys.readouterr().err == "error: first second\n"


def test_errors_of_the_system_name_the_file(capsys):
    with pytest.raises(SystemExit), user_errors():
        Path("nowhere.yaml").read_text()
    assert capsys.readouterr().err == "error: nowhere.yaml: No such file or directory\n"


def test_a_variable_keeps_the_traceback(monkeypatch):
    monkeypatch.setenv("HACPO_TRL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="as it was"), user_errors():
        raise ValueError("as it was")


def test_other_errors_are_the_programs_own():
    with pytest.raises(KeyError), user_errors():
        raise KeyError("a mistake of the program")


def test_of_several_processes_one_speaks(monkeypatch, capsys):
    for rank in ("0", "1"):
        monkeypatch.setenv("LOCAL_RANK", rank)
        with pytest.raises(SystemExit, match="2"):
            fail("once")
    assert capsys.readouterr().err == "error: once\n"


def test_options_are_not_abbreviated(capsys):
    parser = CommandParser(prog="hacpo test")
    parser.add_argument("--temperature")
    with pytest.raises(SystemExit):
        parser.parse_args(["--temp", "1"])
    assert "unknown option '--temp'. Did you mean '--temperature'?" in capsys.readouterr().err


def test_a_reader_who_stops_early_is_no_error():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "hacpo_trl.train", "--help"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


# ---- the wheel ------------------------------------------------------------------------------------------------------
def test_the_wheel_has_recipes_launch_configurations_and_the_command(repository, tmp_path):
    """Built from a copy, and read from where it is installed: nothing of the checkout is used."""
    if int(installed("setuptools").split(".")[0]) < 77:
        pytest.skip("pyproject.toml asks for a newer setuptools")
    source, target = tmp_path / "source", tmp_path / "target"
    copied = ["hacpo_trl", "configs", "setup.cfg", "pyproject.toml", "README.md", "LICENSE"]
    source.mkdir()
    copying = ["cp", "--recursive", "--no-dereference", *(repository / name for name in copied), source]
    subprocess.run(copying, check=True)
    build = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    built = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0, built.stderr[-3000:]
    with zipfile.ZipFile(source / built.stdout.splitlines()[-1]) as wheel:
        wheel.extractall(target)
    for path in sorted((repository / "configs").rglob("*.yaml")):
        inside = target / "hacpo_trl" / path.relative_to(repository)
        assert inside.read_bytes() == path.read_bytes() and not inside.is_symlink()
    points = next(target.glob("*.dist-info/entry_points.txt")).read_text()
    assert "hacpo = hacpo_trl.commands.main:main" in points

    def installed_python(*arguments: str) -> str:
        command, environment = [sys.executable, "-P", *arguments], {**os.environ, "PYTHONPATH": str(target)}
        return subprocess.check_output(command, env=environment, cwd=tmp_path, text=True, timeout=60)

    where = installed_python("-c", "import hacpo_trl; print(hacpo_trl.__file__, end='')")
    assert Path(where).is_relative_to(target)
    assert installed_python("-m", "hacpo_trl", "recipes", "tiny").startswith("# The embedded default")
    assert "--accelerate_config" in installed_python("-m", "hacpo_trl", "train", "--help")
