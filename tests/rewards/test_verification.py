import asyncio
import functools
import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from hacpo_trl.reporting.metrics import Metrics
from hacpo_trl.rewards.verification import RESERVED_COLUMNS, Verifier, check_datasets, log_evaluation, log_verdicts


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


def right(completions, answer, **kwargs):
    return [1.0 if completion == expected else 0.0 for completion, expected in zip(completions, answer, strict=True)]


async def slow_half(completions, **kwargs):
    await asyncio.sleep(0.001)
    return [0.5] * len(completions)


def scored(verifier, completions=("a", "bb"), agent="qwen", state=None, **columns):
    prompts, ids = [f"prompt {i}" for i in range(len(completions))], [(i, i + 1) for i in range(len(completions))]
    return verifier(agent, prompts, completions, ids, columns, state)


def same(tensor, expected):
    torch.testing.assert_close(tensor, torch.tensor(expected, dtype=torch.float32), equal_nan=True)


# ---- rewards --------------------------------------------------------------------------------------------------------
def test_one_function():
    verdicts = scored(Verifier(length))
    same(verdicts.total, [1, 2])
    same(verdicts.per_function, [[1], [2]])


def test_functions_are_weighed_and_added():
    verdicts = scored(Verifier([length, right], [0.5, 2.0]), answer=["a", "x"])
    same(verdicts.per_function, [[1, 1], [2, 0]])
    same(verdicts.total, [0.5 * 1 + 2 * 1, 0.5 * 2 + 2 * 0])


def test_without_weights_each_counts_once():
    same(scored(Verifier([length, right]), answer=["a", "x"]).total, [2, 2])


def test_synchronous_and_asynchronous_functions_mix_in_their_order():
    verifier = Verifier([slow_half, right, length], [1.0, 10.0, 100.0])
    assert verifier.names == ["slow_half", "right", "length"]
    verdicts = scored(verifier, answer=["x", "bb"])
    same(verdicts.per_function, [[0.5, 0, 1], [0.5, 1, 2]])
    same(verdicts.total, [100.5, 210.5])


def test_asynchronous_functions_run_side_by_side():
    reached = []

    def waiting(name, other):
        async def function(completions, **kwargs):
            reached.append(name)
            while other not in reached:
                await asyncio.sleep(0.001)
            return [1.0] * len(completions)

        async def within_time(completions, **kwargs):
            return await asyncio.wait_for(function(completions), timeout=10)

        within_time.__name__ = name
        return within_time

    same(scored(Verifier([waiting("one", "two"), waiting("two", "one")])).total, [2, 2])


def test_asynchronous_functions_work_where_a_loop_runs_already():
    async def notebook_cell():
        return scored(Verifier(slow_half))

    same(asyncio.run(notebook_cell()).total, [0.5, 0.5])


def test_none_in_one_function_leaves_the_others_and_none_in_all_is_no_verdict():
    def first(completions, **kwargs):
        return [None, 1.0, None, 0.25]

    def second(completions, **kwargs):
        return [3.0, None, None, 0.5]

    verdicts = scored(Verifier([first, second], [1.0, 2.0]), completions="abcd")
    same(verdicts.per_function, [[math.nan, 3], [1, math.nan], [math.nan, math.nan], [0.25, 0.5]])
    same(verdicts.total, [6, 1, math.nan, 1.25])


def test_integers_booleans_and_tensors_are_rewards_too():
    def mixed(completions, **kwargs):
        return (True, 2, torch.tensor(0.5))

    same(scored(Verifier(mixed), completions="abc").total, [1, 2, 0.5])


def test_no_completions_are_no_verdicts():
    verdicts = scored(Verifier([length, slow_half]), completions=())
    assert verdicts.total.shape == (0,) and verdicts.per_function.shape == (0, 2)


# ---- what functions are given ---------------------------------------------------------------------------------------
def test_functions_get_what_trl_gives_them():
    seen = {}

    def function(prompts, completions, completion_ids, answer, level, **kwargs):
        seen.update(locals())
        return [0.0] * 2

    state = SimpleNamespace(global_step=7)
    scored(Verifier(function), answer=["x", "y"], level=[1, 2], state=state)
    assert seen["prompts"] == ["prompt 0", "prompt 1"] and seen["completions"] == ["a", "bb"]
    assert seen["completion_ids"] == [[0, 1], [1, 2]]
    assert seen["answer"] == ["x", "y"] and seen["level"] == [1, 2]
    assert seen["kwargs"]["trainer_state"] is state
    assert set(seen["kwargs"]) == {"trainer_state", "log_extra", "log_metric", "agent"}


def test_agent_is_passed_to_functions_that_take_it():
    names = {}

    def by_keywords(completions, **kwargs):
        names["by_keywords"] = kwargs["agent"]
        return [0.0] * len(completions)

    def by_name(completions, agent, **kwargs):
        names["by_name"] = agent
        assert "agent" not in kwargs
        return [0.0] * len(completions)

    def not_at_all(prompts, completions, completion_ids, trainer_state, log_extra, log_metric):
        names["not_at_all"] = None
        return [0.0] * len(completions)

    class Judge:
        __name__ = "judge"

        def __call__(self, completions, *, agent, **kwargs):
            names["judge"] = agent
            return [0.0] * len(completions)

    async def later(completions, agent, **kwargs):
        names["later"] = agent
        return [0.0] * len(completions)

    def partly(completions, scale, agent, **kwargs):
        names["partly"] = (agent, scale)
        return [0.0] * len(completions)

    partial = functools.partial(partly, scale=3)
    scored(Verifier([by_keywords, by_name, not_at_all, Judge(), later, partial]), agent="llama")
    assert names == {
        "by_keywords": "llama",
        "by_name": "llama",
        "not_at_all": None,
        "judge": "llama",
        "later": "llama",
        "partly": ("llama", 3),
    }


def test_functions_can_log():
    def talkative(completions, log_extra, log_metric, **kwargs):
        log_extra("first letter", [completion[0] for completion in completions])
        log_metric("share of a", 0.5)
        log_metric("share of a", 1)
        return [0.0] * len(completions)

    async def quiet(completions, log_metric, **kwargs):
        log_metric("quiet", torch.tensor(2.0))
        return [0.0] * len(completions)

    verifier = Verifier([talkative, quiet])
    verdicts = scored(verifier)
    assert verdicts.extra == {"first letter": ["a", "b"]}
    assert verdicts.metrics == {"share of a": [0.5, 1.0], "quiet": [2.0]}
    # Nothing of one call is left in the next.
    assert scored(verifier, completions=("c",)).extra == {"first letter": ["c"]}
    assert verdicts.extra == {"first letter": ["a", "b"]}


def test_a_function_cannot_change_the_sampled_ids():
    def vandal(completion_ids, **kwargs):
        completion_ids[0].clear()
        return [0.0] * 2

    ids = [[1, 2], [3]]
    Verifier(vandal)("a", ["p", "q"], ["x", "y"], ids, {}, None)
    assert ids == [[1, 2], [3]]


# ---- errors ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rewards", [[1.0], [1.0, 2.0, 3.0], []])
def test_a_wrong_number_of_rewards_names_function_agent_and_numbers(rewards):
    def careless(completions, **kwargs):
        return rewards

    with pytest.raises(ValueError, match=rf"'careless' returned {len(rewards)} rewards for 2 completions.*'qwen'"):
        scored(Verifier([length, careless]))


@pytest.mark.parametrize("reward", [math.inf, -math.inf])
def test_an_infinite_reward_names_function_and_agent(reward):
    def boundless(completions, **kwargs):
        return [0.0, reward]

    with pytest.raises(ValueError, match="'boundless' returned an infinite reward for agent 'qwen'"):
        scored(Verifier(boundless))


def test_an_error_in_a_function_is_not_swallowed():
    async def broken(completions, **kwargs):
        raise RuntimeError("the judge is asleep")

    with pytest.raises(RuntimeError, match="the judge is asleep"):
        scored(Verifier([length, broken]))


def test_two_functions_of_one_name_are_an_error():
    with pytest.raises(ValueError, match=r"share a name: \['length', 'right', 'length'\]"):
        Verifier([length, right, length])


@pytest.mark.parametrize("weights", [[1.0], [1.0, 1.0, 1.0], []])
def test_a_wrong_number_of_weights_names_the_functions(weights):
    with pytest.raises(ValueError, match=rf"{len(weights)} weights for 2 reward functions \(\['length', 'right'\]\)"):
        Verifier([length, right], weights)


@pytest.mark.parametrize("not_a_function", [3, torch.nn.Linear(1, 1), None])
def test_only_functions_and_classifiers_are_reward_functions(not_a_function):
    with pytest.raises(TypeError, match=type(not_a_function).__name__):
        Verifier([length, not_a_function])


def test_no_function_is_an_error():
    with pytest.raises(ValueError, match="reward_funcs is empty"):
        Verifier([])


# ---- datasets -------------------------------------------------------------------------------------------------------
GOOD = Dataset.from_dict({"prompt": ["1 + 1 ="], "answer": ["2"]})


def test_good_datasets():
    check_datasets(GOOD, None)
    check_datasets(None, GOOD)
    check_datasets(GOOD, {"easy": GOOD, "hard": GOOD})


@pytest.mark.parametrize("column", RESERVED_COLUMNS)
def test_a_column_that_would_be_shadowed_is_named(column):
    shadowing = Dataset.from_dict({"prompt": ["x"], column: ["y"]})
    with pytest.raises(ValueError, match=rf"train_dataset has the columns \['{column}'\]"):
        check_datasets(shadowing, None)
    with pytest.raises(ValueError, match=rf"eval_dataset\['hard'\] has the columns \['{column}'\]"):
        check_datasets(GOOD, {"easy": GOOD, "hard": shadowing})


def test_a_missing_prompt_names_split_and_columns():
    with pytest.raises(ValueError, match=r"eval_dataset needs a column 'prompt'; it has \['answer', 'question'\]"):
        check_datasets(GOOD, Dataset.from_dict({"question": ["x"], "answer": ["y"]}))


def test_what_is_no_dataset_is_named_by_its_type():
    with pytest.raises(TypeError, match=r"train_dataset must be a datasets\.Dataset, not list"):
        check_datasets([{"prompt": "x"}], None)


# ---- metrics --------------------------------------------------------------------------------------------------------
def test_verdicts_are_logged_without_what_has_none(monkeypatch):
    def first(completions, log_metric, **kwargs):
        log_metric("tries", 2)
        log_metric("tries", 4)
        return [1.0, 0.0, None]

    def second(completions, **kwargs):
        return [1.0, None, None]

    verifier, metrics = Verifier([first, second]), Metrics()
    verdicts = scored(verifier, completions="abc")
    log_verdicts(metrics, "qwen", verdicts, verifier.names)
    log_evaluation(metrics, "qwen", [{"source": "gsm"}, {"source": "math"}, {"source": "math"}], verdicts, 1)
    log_evaluation(metrics, "llama", [{"prompt": "a"}] * 3, verdicts, 3)
    monkeypatch.setattr("hacpo_trl.reporting.metrics.gather_object", lambda objects: objects)
    # Totals 2, 0, none: mean 1, σ = √((1 + 1) / 1).
    assert metrics.reduce() == {
        "qwen/reward": 1.0,
        "qwen/reward_std": pytest.approx(math.sqrt(2)),
        "qwen/rewards/first/mean": 0.5,
        "qwen/rewards/first/std": pytest.approx(math.sqrt(0.5)),
        "qwen/rewards/second/mean": 1.0,
        "qwen/rewards/second/std": 0.0,
        "qwen/tries": 3.0,
        "qwen/reward/gsm": 2.0,
        "qwen/reward/math": 0.0,
        # The best of one prompt's three samples: 2, 0 and one without a verdict.
        "llama/best@3": 2.0,
    }
