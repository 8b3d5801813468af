"""Names that do not exist: a suggestion, or the line to write for one of TRL's."""

import copy
import pickle
import re
from dataclasses import dataclass, fields

import pytest
import trl
import yaml

from hacpo_trl import AgentConfig, HACPOConfig
from hacpo_trl.commands.train_options import ScriptArguments
from hacpo_trl.options.grpo_names import GRPO_NAMES, SCRIPT_NAMES, unknown_setting
from hacpo_trl.options.names import unknown_name


def names_of(*dataclasses) -> set[str]:
    return {field.name for dataclass in dataclasses for field in fields(dataclass)}


def test_every_name_of_grpo_config_has_its_line():
    assert set(GRPO_NAMES) == names_of(trl.GRPOConfig) - names_of(HACPOConfig)


def test_every_name_of_trls_scripts_has_its_line():
    theirs = names_of(trl.ModelConfig, trl.ScriptArguments) | {"reward_model_name_or_path"}
    assert set(SCRIPT_NAMES) == theirs - names_of(HACPOConfig, ScriptArguments, AgentConfig)


@pytest.mark.parametrize("advice", sorted({*GRPO_NAMES.values(), *SCRIPT_NAMES.values()}))
def test_what_is_to_be_written_exists(advice):
    known = names_of(HACPOConfig, ScriptArguments, AgentConfig)
    named = [yaml.safe_load(text) for text in re.findall(r"`([^`]+)`", advice)]
    assert named or advice.startswith("Leave it out: ")
    assert all(set(line) <= known if isinstance(line, dict) else line == "agents" for line in named)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("detla", "unknown setting 'detla'. Did you mean 'delta'?"),
        ("vllm_importance_sampling_cap", "Write `vllm_importance_sampling_clip_max: 3.0`."),
        ("peft_config", "It is an agent's own: write `peft_config` under an agent of `agents`."),
        ("lora_r", "Write `peft_config: {r: 16"),
        ("xyzzy", "unknown setting 'xyzzy'."),
    ],
)
def test_unknown_arguments_in_python(tmp_path, name, message):
    with pytest.raises(TypeError, match=re.escape(message)):
        HACPOConfig(str(tmp_path), **{name: 1})


@dataclass
class WithMore(HACPOConfig):
    length_penalty: float = 0.0


class WithAnother(HACPOConfig):
    def __init__(self, *args, note, **kwargs):
        super().__init__(*args, **kwargs)
        self.note = note


def test_subclasses_have_names_of_their_own(tmp_path):
    assert WithMore(str(tmp_path), length_penalty=0.5, report_to="none").length_penalty == 0.5
    with pytest.raises(TypeError, match=r"WithMore: unknown setting 'lenght_penalty'. Did you mean 'length_penalty'?"):
        WithMore(str(tmp_path), lenght_penalty=0.5)
    assert WithAnother(str(tmp_path), note="mine", delta=0.2, report_to="none").note == "mine"


def test_settings_are_copied_and_pickled(tmp_path):
    args = HACPOConfig(str(tmp_path), delta=0.2, report_to="none")
    assert copy.deepcopy(args).delta == pickle.loads(pickle.dumps(args)).delta == 0.2


def test_a_list_is_given_of_few_names_alone():
    assert unknown_name("x", ["apple", "pear"], "fruit") == "unknown fruit 'x'. Known fruits: apple, pear."
    assert unknown_name("x", [f"name{i}" for i in range(50)], "key") == "unknown key 'x'."


def test_kinds_are_named():
    assert unknown_setting("detla", ["delta"], "option").startswith("unknown option 'detla'.")
