import math
import re

import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from tiny_agents import run_config
from torch.utils.data import BatchSampler

from hacpo_trl.config import HACPOConfig
from hacpo_trl.options.step import StepPlan
from hacpo_trl.rollouts.rollout import LearnerView, Rollout
from hacpo_trl.rollouts.rows import (
    LearnerRow,
    StepSampler,
    arrange,
    collate,
    learner_row,
    pad_sequences,
    prompts_per_update,
)


def sampler_of(num_prompts=22, step=8, repeats=1, per_update=4.0, processes=1, seed=0, epoch=0):
    return StepSampler(num_prompts, step, repeats, per_update, processes, seed, lambda: epoch)


def dealt(sampler, step, processes):
    """The batches of each process, as accelerate deals them: batches of B/P prompts, in turn."""
    shards = [
        list(BatchSamplerShard(BatchSampler(sampler, step // processes, drop_last=False), processes, rank))
        for rank in range(processes)
    ]
    assert len({len(batches) for batches in shards}) == 1
    return shards


# ---- StepSampler ----------------------------------------------------------------------------------------------------
def test_every_prompt_once_an_epoch_but_for_a_last_step_that_is_not_full():
    indices = list(sampler_of(num_prompts=22, step=8))
    assert len(indices) == len(set(indices)) == 16 == len(sampler_of(num_prompts=22, step=8))
    assert sorted(sampler_of(num_prompts=24, step=8)) == list(range(24))


def test_a_steps_prompts_come_again_for_each_of_its_micro_batches():
    sampler = sampler_of(num_prompts=9, step=3, repeats=4, per_update=3.0)
    indices = list(sampler)
    assert len(indices) == len(sampler) == 36
    for start in range(0, 36, 12):
        assert indices[start : start + 12] == indices[start : start + 3] * 4


def test_no_seed_keeps_the_order_of_the_dataset():
    sampler = sampler_of(num_prompts=6, step=2, repeats=2, per_update=2.0, seed=None)
    assert list(sampler) == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5]


def test_each_epoch_has_an_order_of_its_own_which_a_resumed_run_finds_again():
    epoch = 0
    sampler = StepSampler(40, 8, 2, 4.0, 1, 7, lambda: epoch)
    first = list(sampler)
    assert list(sampler) == first != sorted(first)
    epoch = 1
    second = list(sampler)
    assert second != first and sorted(second) == sorted(first)
    # A run that resumes in epoch 1 has never drawn epoch 0, and other random numbers besides.
    torch.manual_seed(999)
    assert list(StepSampler(40, 8, 2, 4.0, 1, 7, lambda: 1)) == second
    assert list(StepSampler(40, 8, 2, 4.0, 1, 8, lambda: 1)) != second


def test_sampling_leaves_the_global_random_state_alone():
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    list(sampler_of())
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("per_update", [4, 8, 16])
def test_each_update_holds_the_same_prompts_over_1_2_and_4_processes(per_update):
    step = 16

    def updates(processes):
        shards = dealt(sampler_of(40, step, 1, float(per_update), processes), step, processes)
        share = per_update // processes
        return [
            sorted(prompt for batches in shards for prompt in batches[number][u * share : (u + 1) * share])
            for number in range(len(shards[0]))
            for u in range(step // per_update)
        ]

    alone = updates(1)
    assert len(alone) == 2 * step // per_update and all(len(set(prompts)) == per_update for prompts in alone)
    assert updates(2) == alone and updates(4) == alone


def test_the_layout_by_hand():
    # 8 prompts in updates of 4, two processes: each has two prompts of the first update, then two of the second.
    shards = dealt(sampler_of(8, 8, 2, 4.0, 2, seed=None), 8, 2)
    assert shards == [[[0, 1, 4, 5]] * 2, [[2, 3, 6, 7]] * 2]


@pytest.mark.parametrize("order", ["mixed", "self_first"])
@pytest.mark.parametrize(
    ("agents", "prompts", "generations", "rows_per_update"),
    [(2, 8, 2, 8), (2, 8, 2, 16), (2, 8, 2, 32), (3, 4, 2, 12), (3, 4, 2, 24), (3, 8, 2, 24)],
)
def test_updates_hold_the_same_rollouts_over_any_number_of_processes(
    order, agents, prompts, generations, rows_per_update
):
    plan = StepPlan(prompts, agents * generations, rows_per_update, prompts * agents * generations // rows_per_update)

    def updates(processes):
        sampler = StepSampler(
            prompts, prompts, 1, prompts_per_update(plan, generations, order), processes, 3, lambda: 0
        )
        rows = []
        for (of_process,) in dealt(sampler, prompts, processes):
            sources = {
                source: [
                    row_of(source=source, prompt_index=p, reward=i) for p in of_process for i in range(generations)
                ]
                for source in "abc"[:agents]
            }
            rows.append([(r.source, r.prompt_index, r.reward) for r in arrange(sources, generations, order)])
        size = rows_per_update // processes
        return [
            sorted(row for of_process in rows for row in of_process[u * size : (u + 1) * size])
            for u in range(plan.updates)
        ]

    alone = updates(1)
    assert sum(map(len, alone)) == prompts * agents * generations
    assert updates(2) == alone


# ---- rows -----------------------------------------------------------------------------------------------------------
def row_of(**values):
    defaults = {
        "source": "a",
        "prompt_index": 0,
        "prompt_ids": [1],
        "completion_ids": [2],
        "is_own": True,
        "in_loss": True,
        "is_masked": False,
        "reward": 1.0,
        "advantage": 0.5,
        "weight": 1.0,
        "old_logprob_sum": -1.0,
        "old_num_tokens": 1,
    }
    return LearnerRow(**{**defaults, **values})


def row_from(learner="a", dropped=None, mask_truncated=False, advantage=0.5, weight=1.5, **values):
    """The row of a rollout of three tokens, which are four in the learner's."""
    defaults = {"agent": "b", "prompt": "x", "prompt_index": 7, "completion_ids": (4, 5, 6), "text": "y"}
    defaults |= {"decodable": True, "finish_reason": "stop", "logprob_sum": -2.5, "reward": 0.25, "policy_version": 3}
    view = LearnerView(Rollout(**{**defaults, **values}), (1, 2), (10, 11, 12, 13), dropped)
    return learner_row(learner, view, advantage, weight, stand_in=99, mask_truncated=mask_truncated)


def test_a_row_has_the_learners_tokens_and_the_sources_counts():
    assert row_from() == LearnerRow(
        source="b",
        prompt_index=7,
        prompt_ids=[1, 2],
        completion_ids=[10, 11, 12, 13],
        is_own=False,
        in_loss=True,
        is_masked=False,
        reward=0.25,
        advantage=0.5,
        weight=1.5,
        old_logprob_sum=-2.5,
        old_num_tokens=3,
    )
    assert row_from(learner="b").is_own


def test_which_rows_are_in_the_loss():
    dropped = row_from(dropped="undecodable")
    assert not dropped.in_loss and dropped.completion_ids == [99] and dropped.prompt_ids == [1, 2]
    # Its reward is known and counts in baselines, as ever.
    assert dropped.reward == 0.25
    without = row_from(reward=None)
    assert not without.in_loss and math.isnan(without.reward) and without.completion_ids == [10, 11, 12, 13]
    cut = [row_from(finish_reason="length", mask_truncated=mask) for mask in (True, False)]
    assert [row.is_masked for row in cut] == [True, False] and all(row.in_loss for row in cut)
    assert not row_from(mask_truncated=True).is_masked


def three_sources():
    return {
        source: [row_of(source=source, prompt_index=p, reward=float(i)) for p in range(3) for i in range(2)]
        for source in ("me", "b", "c")
    }


def test_mixed_order_keeps_the_rollouts_of_a_prompt_together():
    rows = [(r.prompt_index, r.source, r.reward) for r in arrange(three_sources(), 2, "mixed")]
    # Groups of n·G = 6, prompt by prompt, and in each of them every source's two rollouts.
    for prompt in range(3):
        group = rows[prompt * 6 : (prompt + 1) * 6]
        assert sorted(group) == sorted((prompt, source, i) for source in ("me", "b", "c") for i in (0.0, 1.0))
    # Any three rows in a row hold one rollout of each source: a micro-batch of three is mixed, too.
    assert all({source for _, source, _ in rows[i : i + 3]} == {"me", "b", "c"} for i in range(0, 18, 3))


def test_self_first_order_takes_one_source_after_the_other():
    rows = [(r.source, r.prompt_index, r.reward) for r in arrange(three_sources(), 2, "self_first")]
    assert rows == [(source, p, float(i)) for source in ("me", "b", "c") for p in range(3) for i in range(2)]


@pytest.mark.parametrize(
    ("values", "moves"),
    [
        ({}, True),
        ({"advantage": 0.0}, False),
        ({"in_loss": False}, False),
        ({"is_masked": True}, False),
        ({"advantage": 0.0, "ref_logps": torch.zeros(1)}, True),  # the KL term has a gradient of its own
        ({"is_masked": True, "ref_logps": torch.zeros(1)}, False),
        ({"in_loss": False, "ref_logps": torch.zeros(1)}, False),
    ],
)
def test_only_rows_with_a_gradient_move_the_policy(values, moves):
    assert row_of(**values).moves_policy is moves


def test_pad_sequences():
    batch = pad_sequences([[5, 6, 7], [8]], [[1, 2], [3]], pad_token_id=0)
    assert batch["input_ids"].tolist() == [[5, 6, 7, 1, 2], [8, 3, 0, 0, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, -100, 1, 2], [-100, 3, -100, -100, -100]]
    # What tokenizers give, and models take: no flags.
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_tokens_equal_to_the_pad_token_count_inside_prompts_and_answers():
    # An end-of-turn token that is the pad token, too, is learned; the padding behind it is not.
    batch = pad_sequences([[9, 1], [1]], [[4, 9], [9]], pad_token_id=9)
    assert batch["input_ids"].tolist() == [[9, 1, 4, 9], [1, 9, 9, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 0, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 4, 9], [-100, 9, -100, -100]]


def test_collate():
    rows = [
        row_of(
            prompt_ids=[5, 6],
            completion_ids=[1, 2, 3],
            old_logps=torch.tensor([-0.1, -0.2, -0.3]),
            ref_logps=torch.tensor([-1.0, -2.0, -3.0]),
            old_logprob_sum=-0.6,
            old_num_tokens=3,
        ),
        row_of(
            prompt_ids=[7],
            completion_ids=[8, 9],
            is_own=False,
            in_loss=False,
            reward=math.nan,
            advantage=-0.25,
            weight=1.5,
            old_logprob_sum=-7.5,
            old_num_tokens=4,
            old_logps=torch.tensor([-0.4, -0.5]),
        ),
    ]
    batch = collate(rows, 0, torch.device("cpu"))
    assert batch["labels"].tolist() == [[-100, -100, 1, 2, 3], [-100, 8, 9, -100, -100]]
    # Entry t is about token t + 1.
    torch.testing.assert_close(batch["old_logps"], torch.tensor([[0, -0.1, -0.2, -0.3], [-0.4, -0.5, 0, 0]]))
    torch.testing.assert_close(batch["ref_logps"], torch.tensor([[0, -1.0, -2.0, -3.0], [0.0, 0, 0, 0]]))
    assert batch["is_own"].tolist() == [True, False] and batch["in_loss"].tolist() == [True, False]
    assert batch["advantage"].tolist() == [0.5, -0.25] and batch["weight"].tolist() == [1.0, 1.5]
    assert batch["old_logprob_sum"].tolist() == pytest.approx([-0.6, -7.5])
    assert batch["old_num_tokens"].tolist() == [3.0, 4.0]
    assert batch["reward"][0] == 1.0 and batch["reward"][1].isnan()


def test_collate_without_token_log_probabilities_has_none():
    batch = collate([row_of()], 0, torch.device("cpu"))
    assert "old_logps" not in batch and "ref_logps" not in batch


# ---- the arithmetic of a step ---------------------------------------------------------------------------------------
def plan_of(monkeypatch, processes=1, agents=2, **settings):
    monkeypatch.setattr(HACPOConfig, "world_size", processes)
    return run_config(**settings).step_plan(agents)


def test_the_papers_step(monkeypatch):
    # 128 prompts, 2 agents with 8 rollouts each: 2048 rollouts for each learner, 512 an update: 4 updates.
    plan = plan_of(
        monkeypatch,
        processes=8,
        prompts_per_step=128,
        num_generations=8,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=8,
    )
    assert plan == StepPlan(prompts=128, rows_per_prompt=16, rows_per_update=512, updates=4)
    assert prompts_per_update(plan, 8, "mixed") == 32  # 16 rollouts of each
    assert prompts_per_update(plan, 8, "self_first") == 64  # 8 rollouts of each: the paper's mini-batch


@pytest.mark.parametrize(
    ("settings", "plan"),
    [
        # GSPOx2: one agent's 16 rollouts, mini-batch 32 prompts = 512 rollouts.
        ({"algorithm": "gspo", "num_generations": 16}, StepPlan(128, 16, 512, 4)),
        ({"algorithm": "gspo", "num_generations": 8}, StepPlan(128, 8, 512, 2)),
        ({"algorithm": "grpo", "num_generations": 8}, StepPlan(128, 8, 512, 2)),
        ({"algorithm": "naive", "num_generations": 8}, StepPlan(128, 16, 512, 4)),
    ],
)
def test_the_steps_of_other_algorithms(monkeypatch, settings, plan):
    batch = {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 16, "prompts_per_step": 128}
    assert plan_of(monkeypatch, **batch, **settings) == plan


@pytest.mark.parametrize(
    ("agents", "algorithm", "plan"),
    [
        # 4 x 2 x 2 processes = 16 rollouts an update = 4 prompts of one agent's 4 rollouts.
        (1, "hacpo", StepPlan(4, 4, 16, 1)),
        (2, "hacpo", StepPlan(4, 8, 16, 2)),
        (3, "naive", StepPlan(4, 12, 16, 3)),
        (3, "gspo", StepPlan(4, 4, 16, 1)),
    ],
)
def test_default_step_fills_one_update_with_one_agents_rollouts(monkeypatch, agents, algorithm, plan):
    settings = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_generations": 4}
    assert plan_of(monkeypatch, 2, agents, algorithm=algorithm, **settings) == plan


def numbers_after(phrase, message):
    match = re.search(rf"{phrase} (\d+(?:(?:, | or )\d+)*)", message)
    assert match, message
    return [int(number) for number in re.findall(r"\d+", match[1])]


@pytest.mark.parametrize(
    ("processes", "agents", "settings"),
    [
        (1, 2, {"prompts_per_step": 10, "num_generations": 8, "per_device_train_batch_size": 64}),
        (1, 2, {"prompts_per_step": 1, "num_generations": 2, "per_device_train_batch_size": 7}),
        (2, 3, {"prompts_per_step": 14, "num_generations": 4, "per_device_train_batch_size": 10}),
        (4, 1, {"prompts_per_step": 12, "num_generations": 3, "gradient_accumulation_steps": 5}),
        # Not to be dealt to the processes, either: what is proposed must suit both.
        (2, 2, {"prompts_per_step": 5, "num_generations": 8, "per_device_train_batch_size": 32}),
        (2, 2, {"prompts_per_step": 7, "num_generations": 8, "per_device_train_batch_size": 16}),
        (4, 2, {"prompts_per_step": 1, "num_generations": 2, "per_device_train_batch_size": 4}),
    ],
)
def test_an_uneven_step_names_numbers_that_work(monkeypatch, processes, agents, settings):
    with pytest.raises(ValueError) as error:
        plan_of(monkeypatch, processes, agents, **settings)
    message = str(error.value)
    assert str(settings["prompts_per_step"]) in message
    for prompts in numbers_after("What would work: prompts_per_step", message):
        plan = plan_of(monkeypatch, processes, agents, **{**settings, "prompts_per_step": prompts})
        assert plan.prompts == prompts
    if "or gradient_accumulation_steps" in message:
        for steps in numbers_after("or gradient_accumulation_steps", message):
            plan_of(monkeypatch, processes, agents, **{**settings, "gradient_accumulation_steps": steps})


def test_the_nearest_numbers_are_proposed(monkeypatch):
    # 16 rollouts a prompt, 64 an update: multiples of 4 prompts. 64 a device never divide 160.
    with pytest.raises(ValueError, match=r"160 rollouts .* updates of 64 .* prompts_per_step 8 or 12\b"):
        plan_of(monkeypatch, prompts_per_step=10, per_device_train_batch_size=64)


@pytest.mark.parametrize(
    ("processes", "per_device", "generations"), [(1, 6, 4), (2, 4, 8), (2, 3, 2), (4, 2, 4), (3, 4, 8)]
)
def test_an_update_of_no_whole_prompts_names_the_multiple_that_works(monkeypatch, processes, per_device, generations):
    settings = {"num_generations": generations, "per_device_train_batch_size": per_device}
    with pytest.raises(ValueError, match=f"num_generations={generations}") as error:
        plan_of(monkeypatch, processes, **settings)
    (multiple,) = numbers_after("multiple of", str(error.value))
    assert multiple % processes == 0
    for factor in (1, 2, 3):
        settings["per_device_train_batch_size"] = factor * multiple // processes
        assert plan_of(monkeypatch, processes, **settings).rows_per_update == factor * multiple
