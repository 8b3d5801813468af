"""What `hacpo train` trains on: tasks, datasets and rewards by name."""

import json
import sys

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hacpo_trl import rewards
from hacpo_trl.commands import tasks
from hacpo_trl.commands.tasks import load_task, reward_function
from hacpo_trl.commands.train_options import ScriptArguments
from hacpo_trl.embedded import conv_reward


class Seed:
    """Of a HACPOConfig what the tasks read."""

    seed = 0


MODULE = """
from datasets import Dataset
import {imported}


def length_penalty(completions, **kwargs):
    return [-float(len(completion)) for completion in completions]


def squares(script_args, training_args):
    numbers = range(script_args.train_size)
    train = Dataset.from_dict({{"prompt": [f"{{n}}*{{n}}=" for n in numbers], "answer": [n * n for n in numbers]}})
    return train, {test}, [length_penalty]


def forgetful(script_args, training_args):
    return Dataset.from_dict({{"prompt": ["a"]}})


def untyped(script_args, training_args):
    return ["a", "b"], None, length_penalty


class Judge:
    def __call__(self, completions, **kwargs):
        return [1.0] * len(completions)


strict = Judge()
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current directory, with modules of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_tasks.py").write_text(MODULE.format(imported="math", test="None"))
    (tmp_path / "my_broken_tasks.py").write_text(MODULE.format(imported="nothing_of_that_name", test="None"))
    yield tmp_path
    for name in ("my_tasks", "my_broken_tasks"):
        sys.modules.pop(name, None)


def load(**settings):
    return load_task(ScriptArguments(**settings), Seed())


def write_jsonl(path, rows) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


# ---- tasks ----------------------------------------------------------------------------------------------------------
def test_conv_makes_its_prompts_itself():
    train, test, reward = load(task="conv", train_size=20, test_size=5)
    assert (len(train), len(test), reward) == (20, 5, conv_reward)


@pytest.mark.parametrize("option", tasks.DATASET_OPTIONS)
def test_datasets_have_no_effect_on_conv(option):
    with pytest.raises(ValueError, match=f"^{option}=.* has no effect with task 'conv'"):
        load(task="conv", **{option: ["math500"] if option == "test_dataset_name" else "math_train"})


def test_a_task_of_ones_own(here):
    train, test, (reward,) = load(task="my_tasks:squares", train_size=3)
    assert (train["prompt"][2], train["answer"], test) == ("2*2=", [0, 1, 4], None)
    assert reward(["abc"]) == [-3.0]


def test_given_rewards_replace_a_tasks_own(here):
    _, _, found = load(task="my_tasks:squares", train_size=3, reward_funcs=["my_tasks.length_penalty", "math"])
    assert [reward.__name__ for reward in found] == ["length_penalty", rewards.math_reward.__name__]
    _, _, found = load(task="conv", reward_funcs=["boxed_format"])
    assert found == [rewards.boxed_format_reward]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "there is nothing to train on: give a task"),
        ({"task": "convv"}, "unknown task 'convv'. Did you mean 'conv'.* A task of one's own is 'module:function'"),
        ({"task": "math"}, "task 'math' needs dataset_name, such as math_train"),
        (
            {
                "task": "math",
                "dataset_name": "math_train",
                "test_dataset_name": ["math500"],
                "dataset_columns": "problem=q",
            },
            "dataset_columns='problem=q' has no effect on benchmarks",
        ),
        ({"task": "my_tasks:squres"}, "task: my_tasks has no such function: .* Did you mean 'squares'"),
        (
            {"task": "no_tasks:squares"},
            "task: there is no module 'no_tasks' for 'no_tasks:squares', neither installed",
        ),
        ({"task": "my_tasks:Judge"}, "task: my_tasks:Judge is a class"),
        ({"task": "my_tasks:forgetful"}, "task 'my_tasks:forgetful' must return a dataset to train on, one to eval"),
        ({"task": "my_tasks:untyped"}, "must return datasets.Dataset objects, .* not list and NoneType"),
        ({"dataset_name": "gsm8k_train"}, r"dataset_name without a task needs reward_funcs, such as \[math\]"),
    ],
)
def test_tasks_that_cannot_be(here, settings, message):
    with pytest.raises(ValueError, match=message):
        load(**settings)


def test_what_a_module_lacks_is_not_taken_for_the_module(here):
    with pytest.raises(ModuleNotFoundError, match="nothing_of_that_name"):
        load(task="my_broken_tasks:squares")


# ---- datasets -------------------------------------------------------------------------------------------------------
@pytest.fixture
def files(here):
    rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), here / "test.parquet")
    return write_jsonl(here / "train.jsonl", rows), str(here / "test.parquet")


def test_a_file_goes_to_the_rewards_as_it_is(files):
    train, test, (reward,) = load(dataset_name=files[0], reward_funcs=["math"], train_size=4)
    assert train.column_names == ["prompt", "answer"] and train["prompt"] == ["0+0=", "1+1=", "2+2=", "3+3="]
    assert test is None and reward is rewards.math_reward


def test_what_is_held_out_comes_from_several_files(files):
    _, test, _ = load(
        dataset_name=files[0], test_dataset_name=[files[1], files[0]], test_size=2, reward_funcs=["math"]
    )
    assert test["answer"] == ["0", "2"] * 2


def test_datasets_of_the_hub_have_splits(monkeypatch):
    asked = []

    def load_dataset(name, config, split):
        asked.append((name, config, split))
        return datasets.Dataset.from_dict({"prompt": [split]})

    monkeypatch.setattr(tasks, "load_dataset", load_dataset)
    common = {"dataset_name": "org/data", "reward_funcs": ["math"]}
    train, test, _ = load(**common)
    assert train["prompt"] == ["train"] and test is None
    load(**common, dataset_config="hard", dataset_train_split="all", dataset_test_split="validation")
    load(**common, test_dataset_name=["org/other"])
    assert asked == [
        ("org/data", None, "train"),
        ("org/data", "hard", "all"),
        ("org/data", "hard", "validation"),
        ("org/data", None, "train"),
        ("org/other", None, "test"),
    ]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dataset_name": "nowhere.jsonl"}, "There is no file nowhere.jsonl"),
        ({"dataset_name": "gsm8k"}, "'gsm8k' is no benchmark, no id of a dataset .* The benchmarks are: math_train"),
        ({"dataset_name": "train.jsonl", "dataset_train_split": "all"}, "is a local file: it has no split 'all'"),
        ({"dataset_name": "gsm8k_train", "dataset_train_split": "all"}, "'gsm8k_train' has its own split"),
        ({"dataset_name": "train.jsonl", "dataset_columns": "problem=q"}, "no effect without task 'math'"),
        ({"dataset_name": "problems.jsonl"}, r"has no column 'prompt'; it has \['problem'\]. .* the task 'math'"),
    ],
)
def test_datasets_that_cannot_be(files, here, settings, message):
    write_jsonl(here / "problems.jsonl", [{"problem": "1+1"}])
    with pytest.raises(ValueError, match=message):
        load(**settings, reward_funcs=["math"])


# ---- reward functions -----------------------------------------------------------------------------------------------
def test_ready_made_rewards_have_short_names():
    assert set(tasks.REWARDS) == {"conv", "math", "code", "boxed_format", "think_format"}
    assert all(reward_function(f"{name}_reward") is reward_function(name) for name in tasks.REWARDS)
    assert reward_function("code") is rewards.code_reward


def test_rewards_of_ones_own_are_found_in_the_current_directory(here):
    assert reward_function("my_tasks.length_penalty")(["ab"]) == [-2.0]
    assert reward_function("my_tasks:strict")(["ab"]) == [1.0]
    assert reward_function("hacpo_trl.embedded.conv_reward") is conv_reward


def test_reward_models_are_ids_or_folders(here):
    (here / "model.v2").mkdir()
    assert reward_function("org/model") == "org/model" and reward_function("model.v2") == "model.v2"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "reward_funcs: unknown reward 'maths'. Did you mean 'math'.* such as my_rewards.length_penalty"),
        ("my_tasks.lenght_penalty", "reward_funcs: my_tasks has no such function: .* Did you mean 'length_penalty'"),
        ("no_rewards.f", "reward_funcs: there is no module 'no_rewards'"),
    ],
)
def test_rewards_that_are_not_there(here, name, message):
    with pytest.raises(ValueError, match=message):
        reward_function(name)
