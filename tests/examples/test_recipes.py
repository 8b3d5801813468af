"""The paper's recipes: what they say, that all of them parse, and that their steps are the paper's."""

import pytest
import reproduce
import yaml

from hacpo_trl import HACPOConfig
from hacpo_trl.commands.train_options import ScriptArguments, parse_arguments
from hacpo_trl.evaluation.benchmarks import BENCHMARKS


# arXiv 2603.02604v1, Table 5: alpha, what it calls delta, which is the bound 1 - delta, and delta_step.
TABLE_5 = {
    "qwen3-4b+4b-instruct": (["Qwen/Qwen3-4B", "Qwen/Qwen3-4B-Instruct-2507"], 3.0, 0.8, 0.01),
    "qwen3-1.7b+4b": (["Qwen/Qwen3-1.7B-Base", "Qwen/Qwen3-4B-Base"], 1.0, 0.8, 0.025),
    "qwen3-4b+8b": (["Qwen/Qwen3-4B-Base", "Qwen/Qwen3-8B-Base"], 3.0, 0.8, 0.025),
    "llama3.2-1b+3b": (["meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"], 1.0, 0.9, 0.01),
    "qwen3-1.7b+llama3.2-1b": (["Qwen/Qwen3-1.7B-Base", "meta-llama/Llama-3.2-1B-Instruct"], 1.0, 0.8, 0.025),
    "qwen3-4b+llama3.2-3b": (["Qwen/Qwen3-4B-Base", "meta-llama/Llama-3.2-3B-Instruct"], 1.0, 0.8, 0.025),
}
# Appendix A: for each method the rollouts of a prompt that an agent samples, the rollouts of a prompt that a learner
# sees, and updates a step; epsilon and epsilon_high.
STEPS = {
    "hacpo": (8, 16, 4, 3e-4, 4e-4),
    "hacpo_code": (8, 16, 4, 3e-4, 4e-4),
    "naive": (8, 16, 4, 3e-4, 4e-4),
    "naive_source": (8, 16, 4, 3e-4, 4e-4),
    "gspo": (8, 8, 2, 3e-4, 4e-4),
    "gspo_x2": (16, 16, 4, 3e-4, 4e-4),
    "grpo": (8, 8, 2, 0.2, 0.28),
}


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """A recipe as `hacpo train` reads it, on so many processes."""

    def parse(pair: str, method: str, processes: int = 4) -> tuple[ScriptArguments, HACPOConfig]:
        recipe = reproduce.recipe_of(reproduce.PAIRS[pair], method, processes, tmp_path / "run")
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(recipe))
        monkeypatch.setattr(HACPOConfig, "world_size", processes)
        return parse_arguments(["--config", str(path)])

    return parse


def test_every_method_has_its_recipe():
    files = {path.stem for path in (reproduce.RECIPES / "methods").glob("*.yaml")}
    assert files == set(reproduce.METHODS) - {"start", "hacpo"} == set(STEPS) - {"hacpo"}
    assert set(TABLE_5) == set(reproduce.PAIRS) - {"tiny"}


@pytest.mark.parametrize("method", STEPS)
@pytest.mark.parametrize("pair", TABLE_5)
def test_the_papers_steps(parse, pair, method):
    """128 prompts, updates of 512 rollouts, one epoch of MATH, on 4 and on 8 training GPUs."""
    own, rows, updates, epsilon, epsilon_high = STEPS[method]
    for processes in (8, 4):
        script_args, args = parse(pair, method, processes)
        plan = args.step_plan(len(args.agents))
        assert (plan.prompts, plan.rows_per_prompt, plan.rows_per_update, plan.updates) == (128, rows, 512, updates)
    assert args.num_generations == own
    assert (args.learning_rate, args.lr_scheduler_type, args.epsilon, args.epsilon_high) == (
        1e-6,
        "constant",
        epsilon,
        epsilon_high,
    )
    assert (args.num_train_epochs, args.max_steps) == (1, -1)
    assert args.max_completion_length == 4096
    assert [agent.max_model_length - args.max_completion_length for agent in args.agents] == [1024, 1024]
    assert BENCHMARKS[script_args.dataset_name].hub_id == "DigitalLearningGmbH/MATH-lighteval"
    assert set(script_args.test_dataset_name) <= set(BENCHMARKS)


@pytest.mark.parametrize("pair", TABLE_5)
def test_table_5(parse, pair):
    models, alpha, bound, delta_step = TABLE_5[pair]
    _, args = parse(pair, "hacpo")
    assert [agent.model_name_or_path for agent in args.agents] == models
    assert (args.alpha, 1 - args.delta, args.delta_step) == (alpha, pytest.approx(bound), delta_step)
    assert args.capability_window == 5
    assert (args.ratio_normalization, args.minibatch_order, args.beta) == ("source", "mixed", 0.0)
    _, args = parse(pair, "hacpo_code")
    assert (args.alpha, 1 - args.delta, args.delta_step) == (alpha, pytest.approx(bound), delta_step)
    assert (args.ratio_normalization, args.minibatch_order, args.beta) == ("own", "self_first", 0.001)
    assert (args.use_bias_correction_kl, args.weight_decay) == (False, 0.01)


def test_the_pairs_differ_in_nothing_else():
    own = {"agents", "alpha", "delta", "delta_step", "output_dir"}
    recipes = [reproduce.read_recipe(reproduce.RECIPES / f"{reproduce.PAIRS[p].recipe}.yaml") for p in TABLE_5]
    shared = [{key: value for key, value in recipe.items() if key not in own} for recipe in recipes]
    assert all(recipe == shared[0] for recipe in shared)
    agents = [agent for recipe in recipes for agent in recipe["agents"]]
    # One model reasons in think tags unless it is told not to.
    assert [a["model_name_or_path"] for a in agents if "chat_template_kwargs" in a] == ["Qwen/Qwen3-4B"]
    shared = [
        [{k: v for k, v in a.items() if k not in ("name", "model_name_or_path", "chat_template_kwargs")} for a in of]
        for of in (recipe["agents"] for recipe in recipes)
    ]
    assert all(pair == shared[0] for pair in shared)


@pytest.mark.parametrize(("method", "old_logprobs"), [("naive", "learner"), ("naive_source", "source")])
def test_both_readings_of_naive_sharing(parse, method, old_logprobs):
    _, args = parse("qwen3-1.7b+4b", method)
    assert (args.algorithm, args.naive_old_logprobs) == ("naive", old_logprobs)


def test_processes_that_cannot_share_an_update(parse):
    with pytest.raises(SystemExit, match="3 processes cannot share 64 batches of 8 rollouts"):
        parse("qwen3-1.7b+4b", "hacpo", processes=3)
