"""`hacpo recipes`, and recipes and launch configurations by name."""

import pytest
import yaml
from reproduce import PAIRS

from hacpo_trl.commands.recipes import (
    CONFIGS,
    LAUNCHES,
    RECIPES,
    Header,
    find_launch,
    find_recipe,
    main,
    recipe_path,
)


def test_the_packages_folder_is_the_repositorys(repository):
    assert CONFIGS.resolve() == repository / "configs"


def test_every_recipe_has_a_name_and_pairs_have_theirs():
    assert {path.stem for path in (CONFIGS / "recipes").glob("*.yaml")} == set(RECIPES.values())
    assert {name: pair.recipe for name, pair in PAIRS.items()}.items() <= RECIPES.items()


@pytest.mark.parametrize("name", RECIPES)
def test_recipes_say_what_they_are_what_they_need_and_how_they_are_run(name):
    header = Header.of(recipe_path(name))
    assert 20 < len(header.summary) < 120 and header.needs
    text = recipe_path(name).read_text()
    assert "hacpo train\n" in text if name == "tiny" else f"hacpo train --config {name} " in text


def test_all_are_listed(capsys):
    main([])
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in RECIPES)
    assert listed.count("  needs ") == len(RECIPES) and "needs a node of 8 GPUs" in listed
    main(["--accelerate"])
    listed = capsys.readouterr().out
    names = [path.stem for path in LAUNCHES.glob("*.yaml")]
    assert names and all(f"  {name} " in listed for name in names)
    assert "zero3            DeepSpeed ZeRO-3 on the GPUs of one machine: weights are sharded as well\n" in listed


@pytest.mark.parametrize("name", RECIPES)
def test_one_is_copied_as_it_is(name, capsys):
    main([name])
    copied = capsys.readouterr().out
    assert copied == recipe_path(name).read_text() and "agents" in yaml.safe_load(copied)


def test_a_launch_configuration_is_copied_too(capsys):
    main(["--accelerate", "zero3"])
    assert yaml.safe_load(capsys.readouterr().out)["deepspeed_config"]["zero_stage"] == 3


def test_files_win_over_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_recipe("tiny") == recipe_path("tiny") and find_launch("cpu").name == "cpu.yaml"
    (tmp_path / "tiny").write_text("seed: 1")
    assert find_recipe("tiny").read_text() == "seed: 1"


@pytest.mark.parametrize(
    ("find", "text", "message"),
    [
        (find_recipe, "my.yaml", "there is no file my.yaml. `hacpo recipes` lists what comes with the package."),
        (find_recipe, "qwen3-4b+llama3.2", "unknown recipe .* Did you mean 'qwen3-4b.llama3.2-3b'"),
        (find_launch, "zero", "unknown launch configuration 'zero'. Did you mean 'zero[123]'"),
    ],
)
def test_what_is_not_there_is_named(find, text, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=message):
        find(text)
