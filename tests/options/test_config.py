import dataclasses
import json
import sys

import pytest
from tiny_agents import run_config
from trl import TrlParser

from hacpo_trl.config import AgentConfig, HACPOConfig
from hacpo_trl.options.checks import OPTIONS_OF


QWEN = {"name": "qwen", "model_name_or_path": "Qwen/Qwen3-4B-Base"}

# A value other than the default for each option that only some algorithms read.
OTHER_VALUES = {
    "alpha": 2.0,
    "delta": 0.8,
    "delta_step": 0.0,
    "clip_cross": False,
    "capability_window": 3,
    "capability_metric": "success_rate",
    "capability_weighting": False,
    "cross_advantage": "source",
    "advantage_baseline": "own",
    "ratio_normalization": "own",
    "minibatch_order": "self_first",
    "naive_old_logprobs": "source",
}


# ---- agents ---------------------------------------------------------------------------------------------------------
def test_an_unknown_key_is_named_with_its_agent_and_a_suggestion():
    with pytest.raises(ValueError, match=r"'qwen'.*'learning_rat'.*Did you mean 'learning_rate'"):
        run_config(agents=[{**QWEN, "learning_rat": 1e-6}])


def test_an_unknown_key_like_no_other_lists_the_known_ones():
    with pytest.raises(ValueError, match=r"'qwen'.*'xyzzy'.*name, model_name_or_path, .*hub_model_id"):
        run_config(agents=[{**QWEN, "xyzzy": 1}])


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "_a", "a b", "a.b", "é", "a\n", 7, None])
def test_a_name_that_is_no_folder_and_no_metric_prefix_is_an_error(name):
    with pytest.raises(ValueError, match="Agent name"):
        run_config(agents=[{"name": name}])


@pytest.mark.parametrize("name", ["qwen", "Qwen3-4B", "a_1", "7b"])
def test_good_names(name):
    assert run_config(agents=[{"name": name}]).agents == [AgentConfig(name)]


def test_two_agents_of_one_name_are_an_error():
    with pytest.raises(ValueError, match=r"share a name: \['a', 'b', 'a'\]"):
        run_config(agents=[{"name": "a"}, {"name": "b"}, {"name": "a"}])


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ([], "at least one agent"),
        ("[]", "at least one agent"),
        ({"name": "a"}, "must be a list"),
        ('{"name": "a"}', "must be a list"),
        ("qwen,llama", "JSON list"),
        ([{"model_name_or_path": "x"}], "without a 'name'"),
        (["qwen"], "must be a mapping"),
    ],
)
def test_malformed_agents(agents, message):
    with pytest.raises(ValueError, match=message):
        run_config(agents=agents)


@pytest.mark.parametrize("key", ["learning_rate", "weight_decay", "max_grad_norm", "warmup_steps", "min_p", "top_p"])
def test_a_number_that_yaml_reads_as_text_becomes_one(key):
    agent = AgentConfig("a", **{key: "1e-2"})
    assert getattr(agent, key) == 0.01 and isinstance(getattr(agent, key), float)
    with pytest.raises(ValueError, match=rf"'a': {key} must be a number, not 'fast'"):
        AgentConfig("a", **{key: "fast"})


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("delta", "much", "delta must be a number, not 'much'"),
        ("delta", float("nan"), "delta must be a number, not nan"),
        ("beta", True, "beta must be a number, not True"),
        ("max_steps", 1.5, "max_steps must be a whole number, not 1.5"),
        ("clip_cross", "perhaps", "clip_cross must be true or false, not 'perhaps'"),
        ("reward_weights", 0.5, "reward_weights must be a list, not 0.5"),
        ("reward_weights", [1, None], r"reward_weights\[1\] must be a number, not None"),
        ("run_name", 1.0, "run_name must be a text, not 1.0"),
    ],
)
def test_values_of_another_kind(option, value, message):
    with pytest.raises(ValueError, match=message):
        run_config(**{option: value})


YAML = """\
learning_rate: 2e-6
num_generations: 4
delta: 0.2
chat_template_kwargs: {enable_thinking: false}
agents:
  - name: qwen
    model_name_or_path: Qwen/Qwen3-4B-Base
    learning_rate: 1e-6
    chat_template_kwargs: {enable_thinking: true}
  - name: llama
    model_name_or_path: meta-llama/Llama-3.2-3B-Instruct
    max_completion_length: 100
    generation_kwargs: {typical_p: 0.5}
    peft_config: {r: 8, target_modules: [q_proj]}
"""
COMMAND_LINE = [
    *("--learning_rate", "2e-6", "--num_generations", "4", "--delta", "0.2"),
    *("--chat_template_kwargs", '{"enable_thinking": false}'),
    "--agents",
    '[{"name": "qwen", "model_name_or_path": "Qwen/Qwen3-4B-Base", "learning_rate": 1e-6, '
    '"chat_template_kwargs": {"enable_thinking": true}}, {"name": "llama", "model_name_or_path": '
    '"meta-llama/Llama-3.2-3B-Instruct", "max_completion_length": 100, "generation_kwargs": {"typical_p": 0.5}, '
    '"peft_config": {"r": 8, "target_modules": ["q_proj"]}}]',
]


def parsed(monkeypatch, *arguments):
    common = ["--output_dir", "unused", "--report_to", "none"]
    monkeypatch.setattr(sys, "argv", ["train.py", *common, *arguments])
    (config,) = TrlParser(HACPOConfig).parse_args_and_config()
    return config


def test_yaml_and_command_line_give_the_same_config(monkeypatch, tmp_path):
    (tmp_path / "recipe.yaml").write_text(YAML)
    from_yaml = parsed(monkeypatch, "--config", str(tmp_path / "recipe.yaml"))
    from_command_line = parsed(monkeypatch, *COMMAND_LINE)
    qwen, llama = from_yaml.agents
    assert (qwen.name, qwen.learning_rate, qwen.chat_template_kwargs) == ("qwen", 1e-6, {"enable_thinking": True})
    assert (llama.max_completion_length, llama.generation_kwargs) == (100, {"typical_p": 0.5})
    assert llama.peft_config == {"r": 8, "target_modules": ["q_proj"]} and llama.learning_rate is None
    assert (from_yaml.learning_rate, from_yaml.num_generations, from_yaml.delta) == (2e-6, 4, 0.2)
    assert from_yaml.chat_template_kwargs == {"enable_thinking": False}

    def comparable(config):
        return {key: value for key, value in config.to_dict().items() if key != "logging_dir"}

    assert comparable(from_command_line) == comparable(from_yaml)


def test_the_command_line_wins_over_yaml(monkeypatch, tmp_path):
    (tmp_path / "recipe.yaml").write_text(YAML)
    config = parsed(
        monkeypatch, "--config", str(tmp_path / "recipe.yaml"), "--delta", "0.5", "--agents", '[{"name": "solo"}]'
    )
    assert config.delta == 0.5 and config.agents == [AgentConfig("solo")] and config.num_generations == 4


def test_an_unknown_key_of_the_run_is_an_error(monkeypatch, tmp_path):
    (tmp_path / "recipe.yaml").write_text("detla: 0.2\n")
    with pytest.raises(ValueError, match="detla"):
        parsed(monkeypatch, "--config", str(tmp_path / "recipe.yaml"))


# ---- options without effect -----------------------------------------------------------------------------------------
def test_every_option_of_some_algorithms_is_tried_below():
    assert set(OTHER_VALUES) == set(OPTIONS_OF)


@pytest.mark.parametrize("option", OTHER_VALUES)
@pytest.mark.parametrize("algorithm", ["hacpo", "naive", "gspo", "grpo"])
def test_an_option_that_the_algorithm_does_not_read_is_an_error(option, algorithm):
    # By hand: HACPO's mechanisms belong to it alone; naive sharing has ratios and an order of updates, too, and the
    # choice of old log-probabilities to itself; GSPO and GRPO share nothing.
    readers = {"naive_old_logprobs": {"naive"}, "ratio_normalization": {"hacpo", "naive"}}
    readers["minibatch_order"] = {"hacpo", "naive"}
    settings = {"algorithm": algorithm, option: OTHER_VALUES[option]}
    if option == "ratio_normalization" and algorithm == "naive":
        settings["naive_old_logprobs"] = "source"
    if algorithm in readers.get(option, {"hacpo"}):
        assert getattr(run_config(**settings), option) == OTHER_VALUES[option]
    else:
        with pytest.raises(ValueError, match=rf"^{option}=.*no effect with algorithm='{algorithm}'"):
            run_config(**settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"clip_cross": False, "delta": 0.8}, "delta and delta_step have no effect with clip_cross=False"),
        ({"clip_cross": False, "delta_step": 0.0}, "delta and delta_step have no effect with clip_cross=False"),
        (
            {"advantage_baseline": "own", "capability_weighting": False, "capability_window": 3},
            "capability_window has no effect",
        ),
        ({"algorithm": "naive", "ratio_normalization": "own"}, "no effect with naive_old_logprobs='learner'"),
        ({"num_completions_to_print": 3}, "no effect without log_completions"),
    ],
)
def test_combinations_without_effect_are_errors(settings, message):
    with pytest.raises(ValueError, match=message):
        run_config(**settings)


def test_ablations_of_the_paper_are_configs():
    run_config(advantage_baseline="own")
    run_config(advantage_baseline="own", capability_window=3)  # ω^(j,k) still weighs peers' rollouts
    run_config(advantage_baseline="shrinkage", capability_weighting=False, capability_window=3)  # ω^(k,j) is in it
    run_config(capability_weighting=False, capability_window=3)  # ω^(k,j) still scales the baseline
    run_config(clip_cross=False)
    run_config(delta_step=0.0)
    run_config(alpha=0.0)


# ---- numbers and choices --------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (3e-4, 4e-4)),
        ({"algorithm": "naive"}, (3e-4, 4e-4)),
        ({"algorithm": "gspo"}, (3e-4, 4e-4)),
        ({"algorithm": "grpo"}, (0.2, 0.28)),
        ({"epsilon": 0.1}, (0.1, 0.1)),
        ({"algorithm": "grpo", "epsilon": 0.1}, (0.1, 0.1)),
        ({"algorithm": "grpo", "epsilon_high": 0.5}, (0.2, 0.5)),
        ({"epsilon_high": 0.5}, (3e-4, 0.5)),
        ({"epsilon": 0.0, "epsilon_high": 0.1}, (0.0, 0.1)),
    ],
)
def test_clip_ranges(settings, expected):
    config = run_config(**settings)
    assert (config.epsilon, config.epsilon_high) == expected


DEFAULTS = {
    "algorithm": "hacpo",
    "alpha": 1.0,
    "delta": 0.2,
    "delta_step": 0.025,
    "clip_cross": True,
    "capability_window": 5,
    "capability_metric": "mean_reward",
    "capability_weighting": True,
    "advantage_baseline": "capability",
    "cross_advantage": "learner",
    "ratio_normalization": "source",
    "minibatch_order": "mixed",
    "naive_old_logprobs": "learner",
    "beta": 0.0,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "num_generations": 8,
    "num_generations_eval": 8,
}


def test_defaults_of_the_design():
    config = run_config()
    assert {name: getattr(config, name) for name in DEFAULTS} == DEFAULTS


def test_evaluation_samples_as_often_as_training_unless_told_otherwise():
    assert run_config(num_generations=4).num_generations_eval == 4
    assert run_config(num_generations=4, num_generations_eval=1).num_generations_eval == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm": "ppo"}, "algorithm must be one of hacpo, naive, gspo, grpo, not 'ppo'"),
        ({"capability_metric": "median"}, "capability_metric must be one of mean_reward, success_rate"),
        ({"minibatch_order": "random"}, "minibatch_order must be one of mixed, self_first"),
        ({"advantage_baseline": "mean"}, "advantage_baseline must be one of capability, own, shrinkage, not 'mean'"),
        ({"cross_advantage": "both"}, "cross_advantage must be one of learner, source"),
        ({"ratio_normalization": "token"}, "ratio_normalization must be one of source, own, bytes"),
        ({"num_generations": 1}, "num_generations must be at least 2, not 1"),
        ({"num_generations_eval": 0}, "num_generations_eval must be at least 1"),
        ({"prompts_per_step": 0}, "prompts_per_step must be at least 1"),
        ({"max_completion_length": 0}, "max_completion_length must be at least 1"),
        ({"capability_window": 0}, "capability_window must be at least 1"),
        ({"alpha": -1.0}, "alpha must not be negative"),
        ({"beta": -0.1}, "beta must not be negative"),
        ({"delta": 1.5}, "delta must be at most 1"),
        ({"temperature": 0.0}, "temperature must be above 0"),
        ({"agents": [{"name": "cold", "temperature": 0.0}]}, "temperature of agent 'cold' must be above 0"),
        ({"remove_unused_columns": True}, "remove_unused_columns must be False"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size is not supported"),
        ({"fp16": True}, "fp16 is not supported.*bf16"),
    ],
)
def test_bad_values(settings, message):
    with pytest.raises(ValueError, match=message):
        run_config(**settings)


def test_load_best_model_at_end_needs_a_metric_that_exists():
    settings = {"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "load_best_model_at_end": True}
    with pytest.raises(ValueError, match="metric_for_best_model"):
        run_config(**settings)
    assert run_config(**settings, metric_for_best_model="qwen/reward").metric_for_best_model == "qwen/reward"


# ---- plain data -----------------------------------------------------------------------------------------------------
def test_to_dict_is_plain_data():
    config = run_config(agents=[{**QWEN, "learning_rate": "1e-6", "peft_config": {"r": 8}}], reward_weights=[1.0, 0.5])
    read = json.loads(json.dumps(config.to_dict()))
    assert read["agents"][0]["name"] == "qwen" and read["agents"][0]["learning_rate"] == 1e-6
    assert read["agents"][0]["peft_config"] == {"r": 8} and read["agents"][0]["top_p"] is None
    assert read["delta"] == 0.2 and read["reward_weights"] == [1.0, 0.5]
    assert json.loads(config.to_json_string())["agents"] == read["agents"]
    # What was written can be read again.
    assert run_config(agents=read["agents"]).agents == config.agents


def test_replace():
    config = run_config(agents=[QWEN], delta=0.2)
    other = dataclasses.replace(config, seed=7, alpha=2.0)
    assert (other.seed, other.alpha, other.delta, other.agents) == (7, 2.0, 0.2, config.agents)
    assert (config.seed, config.alpha) == (42, 1.0)
    with pytest.raises(ValueError, match="delta must be at most 1"):
        dataclasses.replace(config, delta=2.0)


def test_who_shares_rollouts():
    shares = {name: run_config(algorithm=name).shares_rollouts for name in ("hacpo", "naive", "gspo", "grpo")}
    assert shares == {"hacpo": True, "naive": True, "gspo": False, "grpo": False}
