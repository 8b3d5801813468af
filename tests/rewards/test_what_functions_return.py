"""What reward functions return and do: kinds, sizes, hanging, changing what they were given; names in every error."""

import asyncio
import logging
import math
import time

import numpy as np
import pytest
import tiny
import torch

from hacpo_trl.rewards.verification import Answers, Verifier


def returning(value):
    def function(completions, **kwargs):
        return value

    return function


def score(functions, *, agents=("qwen",), examples=None, texts=("a", "bb"), **kwargs):
    examples = examples or [{"prompt": f"prompt {i}"} for i in range(len(texts))]
    answers = {agent: Answers(examples, texts, [(i,) for i in range(len(texts))]) for agent in agents}
    return Verifier(functions, **kwargs).verify(answers, None)


async def awaited(value):
    return value


# ---- kinds ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ({"a": 1.0, "b": 2.0}, "a dict"),
        ("10", "a str"),
        (b"10", "a bytes"),
        ({0.0, 1.0}, "a set"),
        (1.0, "a float"),
        (True, "a bool"),
        (np.float64(1.0), "a float64"),
        (torch.tensor(1.0), "a Tensor"),
        (torch.ones(2, 1), "a Tensor .* of 2 dimensions"),
        (np.ones((2, 2)), "a ndarray .* of 2 dimensions"),
        ([[1.0], [0.0]], "a list .* as number 0"),
        ([1.0, "0.5"], "a str .* as number 1"),
        ([1.0, {"score": 1}], "a dict .* as number 1"),
        ([1.0, 1j], "a complex .* as number 1"),
        ([1.0, torch.ones(1)], "a Tensor .* as number 1"),
        (None, "None"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_list_of_numbers_is_named(value, kind):
    with pytest.raises(TypeError, match=rf"'function' returned.*'qwen'.*{kind}"):
        score(returning(value))


@pytest.mark.parametrize("inner", [False, True])
def test_a_coroutine_that_nothing_awaits_is_named(inner):
    coroutine = awaited([1.0, 0.0])
    value = [coroutine, 0.0] if inner else coroutine
    with pytest.raises(TypeError, match=r"'function' returned for agent 'qwen' a coroutine"):
        score(returning(value))
    coroutine.close()


@pytest.mark.parametrize(
    "value",
    [
        [1, 0],
        (True, None),
        np.array([1.0, 0.5]),
        torch.tensor([1, 0]),
        [np.float32(1), torch.tensor(0.5)],
        iter([1, 0]),
    ],
)
def test_whatever_holds_one_number_for_each_is_fine(value):
    assert score(returning(value))["qwen"].total[0] == 1.0


# ---- sizes ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1e20, 1e30])
def test_large_rewards_still_tell_good_from_bad(tmp_path, size):
    """Their squares are beyond float32, whose statistics would be infinite."""

    def reward(completions, **kwargs):
        return [size * len(set(c)) for c in completions]

    trainer = tiny.trainer(tmp_path, reward_funcs=reward, **tiny.PLAIN_SGD)
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])["qwen"]
    assert all(math.isfinite(row.advantage) for row in rows) and any(abs(row.advantage) > 0.3 for row in rows)
    trainer.train()
    assert tiny.parameters(trainer, "qwen").isfinite().all()


@pytest.mark.parametrize("value", [1e39, -1e300])
def test_what_no_float32_holds_is_refused(value):
    with pytest.raises(ValueError, match=r"'function' returned .*which no float32 holds, for agent 'qwen'"):
        score(returning([0.0, value]))


def test_weights_may_not_make_it_infinite():
    with pytest.raises(ValueError, match="weighted rewards of agent 'qwen' exceed"):
        score(returning([0.0, 3e38]), weights=[10.0])


# ---- no verdict -----------------------------------------------------------------------------------------------------
def test_an_answer_without_any_verdict_is_warned_of_once(caplog):
    verifier = Verifier([returning([None, 1.0]), lambda completions, **kwargs: [None, None]])
    answers = {"qwen": Answers([{"prompt": "why?"}] * 2, ["because", "so"], [(1,), (2,)])}
    with caplog.at_level(logging.WARNING, logger="hacpo_trl.rewards.verification"):
        for _ in range(2):
            verifier.verify(answers, None)
    assert caplog.text.count("Agent 'qwen': every reward function returned None for 1 of 2 answers") == 1
    assert "'because'" in caplog.text and "'why?'" in caplog.text


# ---- what functions are given is their own --------------------------------------------------------------------------
def test_a_function_that_changes_what_it_gets_reaches_nobody_else():
    messages = [{"role": "user", "content": "q"}]
    examples = [{"prompt": messages, "facts": [1, 2], "name": "n"} for _ in range(2)]
    seen = []

    def meddler(prompts, completions, facts, name, completion_ids, **kwargs):
        seen.append(
            (prompts[0][0]["content"], completions[0][0]["content"], tuple(facts[0]), name[0], completion_ids[0])
        )
        prompts[0][0]["content"] = completions[0][0]["content"] = name[0] = "changed"
        facts[0].append(3)
        completion_ids[0].append(9)
        prompts.clear()
        return [0.0, 0.0]

    def second(prompts, completions, facts, name, completion_ids, **kwargs):
        return meddler(prompts, completions, facts, name, completion_ids)

    score([meddler, second], agents=("qwen", "llama"), examples=examples)
    assert len(seen) == 4
    assert all((p, c, f, n) == ("q", "a", (1, 2), "n") for p, c, f, n, _ in seen)
    assert messages == [{"role": "user", "content": "q"}] and examples[0]["facts"] == [1, 2]


# ---- time -----------------------------------------------------------------------------------------------------------
def test_async_rewards_of_all_agents_run_together():
    running, most = set(), []

    async def slow(completions, agent, **kwargs):
        running.add(agent)
        for _ in range(100):
            most.append(len(running))
            if len(running) == 3:
                break
            await asyncio.sleep(0.01)
        running.discard(agent)
        return [float(len(c)) for c in completions]

    verdicts = score(slow, agents=("a", "b", "c"))
    assert max(most) == 3
    assert all(of_agent.total.tolist() == [1.0, 2.0] for of_agent in verdicts.values())


def test_a_reward_that_never_returns_is_named():
    async def asleep(completions, **kwargs):
        await asyncio.sleep(60)

    def busy(completions, **kwargs):
        time.sleep(60)

    for function in (asleep, busy):
        start = time.monotonic()
        with pytest.raises(TimeoutError, match=rf"'{function.__name__}' gave agent 'qwen' no rewards within reward_"):
            score(function, timeout=0.2)
        assert time.monotonic() - start < 30


def test_within_its_limit_nothing_changes():
    async def later(completions, **kwargs):
        await asyncio.sleep(0.001)
        return [0.5, 0.25]

    assert score([returning([1.0, 2.0]), later], timeout=30)["qwen"].total.tolist() == [1.5, 2.25]
    with pytest.raises(ZeroDivisionError):
        score(lambda completions, **kwargs: 1 / 0, timeout=30)


def test_the_trainer_passes_its_limit_on(tmp_path):
    assert tiny.trainer(tmp_path, reward_timeout=7.0).verifier.timeout == 7.0
    with pytest.raises(ValueError, match="reward_timeout must be above 0 seconds, not 0"):
        tiny.config(tmp_path, reward_timeout=0)


# ---- negative rewards, and metrics that cover what they say ---------------------------------------------------------
def test_a_baseline_below_every_reward_falls_back_too():
    from hacpo_trl.algorithm.advantages import group_advantages
    from hacpo_trl.algorithm.shrinkage import shrinkage_advantages

    # Rewards -1 and -2 with ω = 10 for the peer: (-1 - 2 - 10 - 20) / 4 = -8.25, below all.
    rewards = torch.tensor([[[-1.0, -2.0], [-1.0, -2.0]]])
    result = group_advantages(rewards, 0, torch.tensor([1.0, 10.0]))
    assert result.fallback.tolist() == [True] and result.baseline.tolist() == [-1.5]
    assert (result.advantages[0, 0] > 0).tolist() == [True, False]
    mixed = shrinkage_advantages(rewards, 0, torch.tensor([1.0, 10.0]), 0.0)
    assert mixed.fallback.tolist() == [True] and mixed.baseline.tolist() == [-1.5]


def test_entropy_speaks_of_all_own_answers_also_when_nothing_is_trained_on(tmp_path):
    trainer = tiny.trainer(tmp_path, reward_funcs=lambda completions, **kwargs: [1.0] * len(completions), max_steps=1)
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])["qwen"]
    own = [row for row in rows if row.is_own]
    with torch.no_grad():
        entropies = []
        for row in own:
            logits = trainer.agents["qwen"].policy.eval()(torch.tensor([row.prompt_ids + row.completion_ids])).logits
            logp = torch.log_softmax(logits[0, len(row.prompt_ids) - 1 : -1].double(), -1)
            entropies.append(-(logp.exp() * logp).sum(-1))
    assert trainer.metrics.reduce()["qwen/entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)


def test_the_mean_advantage_leaves_out_answers_without_a_verdict(tmp_path):
    def reward(completions, agent, **kwargs):
        return [None if agent == "llama" and i % 2 else float(i) for i in range(len(completions))]

    trainer = tiny.trainer(tmp_path, reward_funcs=reward)
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])["qwen"]
    judged = [row.advantage for row in rows if not row.is_own and not math.isnan(row.reward)]
    assert len(judged) == 4
    assert trainer.metrics.reduce()["qwen/advantage/cross"] == pytest.approx(sum(judged) / 4)
