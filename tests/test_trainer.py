"""HACPOTrainer on one process: what may change the result, and what must not."""

import json
import math

import pytest
import tiny
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer

from hacpo_trl import HACPOConfig, HACPOTrainer
from hacpo_trl.algorithm.shrinkage import own_weight, own_weight_sums, shrinkage_advantages
from hacpo_trl.embedded import conv_dataset


def trained(tmp_path, **kwargs) -> HACPOTrainer:
    trainer = tiny.trainer(tmp_path, **kwargs)
    trainer.train()
    return trainer


def training_logs(trainer: HACPOTrainer) -> list[dict]:
    return [log for log in trainer.state.log_history if "loss" in log]


# ---- invariances ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("order", ["mixed", "self_first"])
@pytest.mark.parametrize("algorithm", ["hacpo", "naive"])
def test_accumulation_does_not_change_the_updates(tmp_path, order, algorithm):
    """Micro-batch x accumulation of 8 x 1, 1 x 8 and 2 x 4 are the same update, of each agent."""
    settings = {"algorithm": algorithm, "minibatch_order": order, **tiny.PLAIN_SGD}
    whole = trained(tmp_path / "8x1", per_device_train_batch_size=8, **settings)
    for size, accumulation in ((1, 8), (2, 4)):
        cut = trained(
            tmp_path / f"{size}x{accumulation}",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=accumulation,
            **settings,
        )
        for name in whole.agents:
            torch.testing.assert_close(tiny.parameters(cut, name), tiny.parameters(whole, name), rtol=0, atol=1e-6)
            for log, expected in zip(training_logs(cut), training_logs(whole), strict=True):
                assert log[f"{name}/loss"] == pytest.approx(expected[f"{name}/loss"], abs=1e-6)


@pytest.mark.parametrize("order", ["mixed", "self_first"])
def test_a_kl_term_where_a_micro_batch_holds_peers_rows_alone(tmp_path, order):
    """Rows one by one: a peer's row has no reference, and the update is that of the rows together."""
    settings = {"minibatch_order": order, "beta": 0.1, **tiny.PLAIN_SGD}
    whole = trained(tmp_path / "whole", **settings)
    cut = trained(tmp_path / "cut", per_device_train_batch_size=1, gradient_accumulation_steps=8, **settings)
    for name in whole.agents:
        torch.testing.assert_close(tiny.parameters(cut, name), tiny.parameters(whole, name), rtol=0, atol=1e-6)


@pytest.mark.parametrize("order", ["mixed", "self_first"])
@pytest.mark.parametrize("baseline", ["capability", "shrinkage"])
def test_permuting_the_agents_permutes_the_results(tmp_path, order, baseline):
    names = ["qwen", "llama", "third"]
    settings = {"per_device_train_batch_size": 12, "minibatch_order": order, "max_steps": 4}
    settings["advantage_baseline"] = baseline
    results = [
        trained(tmp_path / str(i), names=order_of_names, **settings)
        for i, order_of_names in enumerate((names, names[::-1]))
    ]
    for name in names:
        assert torch.equal(tiny.parameters(results[0], name), tiny.parameters(results[1], name))
        for one, other in zip(*map(training_logs, results), strict=True):
            assert {k: v for k, v in one.items() if k.startswith(name)} == {
                k: v for k, v in other.items() if k.startswith(name)
            }


def test_three_agents_learn_from_each_other(tmp_path):
    trainer = trained(tmp_path, names=["qwen", "llama", "third"], per_device_train_batch_size=12)
    log = training_logs(trainer)[0]
    for name in trainer.agents:
        for peer in set(trainer.agents) - {name}:
            product = log[f"{name}/capability_ratio/{peer}"] * log[f"{peer}/capability_ratio/{name}"]
            assert product == pytest.approx(1.0)
            assert f"{name}/alignment/{peer}" in trainer.state.log_history[1]


def test_a_peer_whose_rollouts_are_all_dropped_changes_nothing_but_the_baseline(tmp_path):
    """With the learner's own baseline there is no baseline to change: the run equals one without the peer."""
    generation = tiny.ScriptedGeneration(["qwen", "llama"], cut=["llama"])
    settings = {"weight_decay": 0.1, "max_steps": 4}
    together = trained(tmp_path / "two", generation=generation, advantage_baseline="own", **settings)
    alone = trained(tmp_path / "one", names=["qwen"], per_device_train_batch_size=4, **settings)
    assert training_logs(together)[0]["qwen/dropped/undecodable"] == 8
    torch.testing.assert_close(tiny.parameters(together, "qwen"), tiny.parameters(alone, "qwen"), rtol=0, atol=1e-6)

    # With the capability-aware baseline the peer's rewards still count: the advantages differ.
    counted = trained(tmp_path / "three", generation=generation, **settings)
    assert (tiny.parameters(counted, "qwen") - tiny.parameters(alone, "qwen")).abs().max() > 1e-5


def test_an_agent_without_any_usable_peer_rollout_keeps_its_own_tokens(tmp_path):
    """The peers drop the cut characters; the source itself trains on the very ids it sampled."""
    generation = tiny.ScriptedGeneration(["qwen", "llama"], cut=["llama"])
    trainer = tiny.trainer(tmp_path, generation=generation)
    examples = [trainer.train_dataset[i] for i in range(4)]
    rows = trainer._collect_rows(examples)
    own = [row for row in rows["llama"] if row.is_own]
    assert all(row.in_loss for row in own)
    assert {tuple(row.completion_ids) for row in own} == {generation.answer("llama", "x", 0).ids}
    assert not any(row.in_loss for row in rows["qwen"] if not row.is_own)


def test_gradient_checkpointing_changes_nothing(tmp_path):
    plain = trained(tmp_path / "plain", **tiny.PLAIN_SGD)
    recomputed = trained(tmp_path / "recomputed", gradient_checkpointing=True, **tiny.PLAIN_SGD)
    assert all(agent.policy.is_gradient_checkpointing for agent in recomputed.agents.values())
    for name in plain.agents:
        torch.testing.assert_close(tiny.parameters(plain, name), tiny.parameters(recomputed, name), rtol=0, atol=1e-6)


def test_mixed_precision_starts_at_a_ratio_of_one(tmp_path):
    """bfloat16 in the forward passes, float32 parameters; old and new log-probabilities come from the same
    arithmetic."""
    trainer = trained(tmp_path, generation=None, bf16=True, max_steps=1, algorithm="gspo")
    log = training_logs(trainer)[0]
    for name, agent in trainer.agents.items():
        assert {p.dtype for p in agent.policy.parameters()} == {torch.float32}
        assert log[f"{name}/own_ratio/mean"] == pytest.approx(1.0, abs=2e-3)
        assert math.isfinite(log[f"{name}/grad_norm"])


# ---- what an update is made of --------------------------------------------------------------------------------------
def test_mixed_updates_hold_own_and_cross_rollouts_of_the_same_prompts(tmp_path):
    trainer = tiny.trainer(tmp_path)
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])["qwen"]
    for update in (rows[:8], rows[8:]):
        own = sorted(row.prompt_index for row in update if row.is_own)
        cross = sorted(row.prompt_index for row in update if not row.is_own)
        assert own == cross and len(own) == 4


def test_self_first_puts_own_rollouts_into_the_first_updates(tmp_path):
    trainer = tiny.trainer(tmp_path, minibatch_order="self_first")
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])["llama"]
    assert [row.source for row in rows] == ["llama"] * 8 + ["qwen"] * 8


def test_cross_rows_carry_the_sources_weight_and_counts(tmp_path):
    """ω^(j,k), the source's log-probability sum and the source's token count; the learner's own tokens."""
    trainer = tiny.trainer(tmp_path)
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])
    ratio = trainer.capability.ratio("llama", "qwen")
    assert ratio != 1.0
    sources = {(row.prompt_index, i): row for i, row in enumerate(r for r in rows["llama"] if r.is_own)}
    cross = [row for row in rows["qwen"] if not row.is_own]
    for own, seen in zip(sources.values(), cross, strict=True):
        assert seen.weight == ratio and own.weight == 1.0
        assert (seen.old_logprob_sum, seen.old_num_tokens) == (own.old_logprob_sum, len(own.completion_ids))
        # A digit and the comma behind it are one token for llama, two for qwen.
        assert len(seen.completion_ids) >= len(own.completion_ids)


def test_rows_lengths_by_bytes_are_those_of_their_texts(tmp_path):
    trainer = tiny.trainer(tmp_path, ratio_normalization="bytes")
    agent = trainer.agents["qwen"]
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])["qwen"]
    rows = [row for row in rows if row.in_loss]
    num_bytes = [len(agent.decode(row.completion_ids)[0].encode()) for row in rows]
    bytes_per_token = sum(num_bytes) / sum(len(row.completion_ids) for row in rows)
    assert [row.byte_length for row in rows] == pytest.approx([n / bytes_per_token for n in num_bytes])
    assert trainer.metrics.reduce()["qwen/bytes_per_token"] == pytest.approx(bytes_per_token)
    trainer.train()
    log = training_logs(trainer)[0]
    assert math.isfinite(log["qwen/grad_norm"]) and log["qwen/cross_ratio/mean"] < 1
    assert log["qwen/own_ratio/mean"] == pytest.approx(1.0, abs=1e-5)


def test_no_capability_weighting_is_weight_one_and_leaves_the_baseline(tmp_path):
    with_weight, without = (tiny.trainer(tmp_path / str(w), capability_weighting=w) for w in (True, False))
    examples = [with_weight.train_dataset[i] for i in range(4)]
    rows, plain = with_weight._collect_rows(examples)["qwen"], without._collect_rows(examples)["qwen"]
    assert {row.weight for row in plain} == {1.0} and {row.weight for row in rows} != {1.0}
    assert [row.advantage for row in rows] == [row.advantage for row in plain]


def test_cross_advantage_source_measures_by_the_sources_baseline(tmp_path):
    by_learner, by_source = (tiny.trainer(tmp_path / c, cross_advantage=c) for c in ("learner", "source"))
    examples = [by_learner.train_dataset[i] for i in range(4)]
    llama_own = [row.advantage for row in by_source._collect_rows(examples)["llama"] if row.is_own]
    cross = [row.advantage for row in by_source._collect_rows(examples)["qwen"] if not row.is_own]
    assert cross == llama_own
    assert cross != [row.advantage for row in by_learner._collect_rows(examples)["qwen"] if not row.is_own]


def test_the_shrinkage_baseline_is_fitted_on_the_step(tmp_path):
    """The rows' advantages are those of the step's rewards and ω; the weight is logged; training goes on."""
    settings = {"num_generations": 4, "advantage_baseline": "shrinkage", "reward_funcs": tiny.uneven_reward}
    trainer = tiny.trainer(tmp_path, **settings)
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])["llama"]
    rows = sorted(rows, key=lambda row: (row.prompt_index, row.source))
    rewards, advantages = (
        torch.tensor([getattr(row, field) for row in rows]).view(4, 2, 4) for field in ("reward", "advantage")
    )
    ratios = torch.tensor([1.0, trainer.capability.ratio("llama", "qwen")])
    weight = own_weight(*own_weight_sums(rewards, 0, ratios))
    assert 0 < weight < 1
    torch.testing.assert_close(advantages, shrinkage_advantages(rewards, 0, ratios, weight).advantages)
    assert trainer.metrics.reduce()["llama/baseline_own_weight"] == pytest.approx(weight)

    log = training_logs(trained(tmp_path / "run", **settings))[0]
    for name in ("qwen", "llama"):
        assert 0 <= log[f"{name}/baseline_own_weight"] <= 1 and math.isfinite(log[f"{name}/grad_norm"])


def test_one_agent_under_shrinkage_is_measured_against_its_other_rollouts(tmp_path):
    settings = {"names": ["qwen"], "num_generations": 4}
    grpo, shrunk = (tiny.trainer(tmp_path, **settings, **o) for o in ({}, {"advantage_baseline": "shrinkage"}))
    examples = [grpo.train_dataset[i] for i in range(4)]
    expected, rows = (trainer._collect_rows(examples)["qwen"] for trainer in (grpo, shrunk))
    assert any(row.advantage for row in rows)
    assert [row.advantage for row in rows] == pytest.approx(
        [row.advantage * 4 / 3 for row in expected], rel=1e-5, abs=1e-6
    )


@pytest.mark.parametrize("old_logprobs", ["learner", "source"])
def test_naive_old_log_probabilities(tmp_path, old_logprobs):
    """Recomputed by the learner, a foreign rollout's ratio starts at 1; with the source's it does not."""
    trainer = trained(tmp_path, algorithm="naive", naive_old_logprobs=old_logprobs, max_steps=1)
    log = training_logs(trainer)[0]
    assert log["qwen/own_ratio/mean"] == pytest.approx(1.0, abs=1e-5)
    assert (log["qwen/cross_ratio/mean"] == pytest.approx(1.0, abs=1e-5)) == (old_logprobs == "learner")


@pytest.mark.parametrize("algorithm", ["gspo", "grpo"])
def test_alone_agents_share_nothing(tmp_path, algorithm):
    """What several agents do together is what each does alone, whichever place it has among them."""
    names = ["qwen", "llama", "third"]
    together = trained(tmp_path / "all", algorithm=algorithm, names=names)
    for name in names:
        alone = trained(tmp_path / name, algorithm=algorithm, names=[name])
        assert torch.equal(tiny.parameters(together, name), tiny.parameters(alone, name))
        for log, expected in zip(training_logs(together), training_logs(alone), strict=True):
            assert {k: v for k, v in log.items() if k.startswith(name)} == {
                k: v for k, v in expected.items() if k.startswith(name)
            }


def test_rewards_of_none_leave_the_loss(tmp_path):
    """The last rollout of each group has no verdict: mean, std and loss are those of the other three."""

    def all_but_the_last(completions, answer, **kwargs):
        rewards = tiny.partial_reward(completions, answer)
        return [None if i % 4 == 3 else reward for i, reward in enumerate(rewards)]

    trainer = tiny.trainer(tmp_path, names=["qwen"], num_generations=4, reward_funcs=all_but_the_last)
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])["qwen"]
    assert [row.in_loss for row in rows] == [True, True, True, False] * 4
    for prompt in range(4):
        rewards = torch.tensor([row.reward for row in rows[4 * prompt : 4 * prompt + 3]])
        expected = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        actual = torch.tensor([row.advantage for row in rows[4 * prompt : 4 * prompt + 4]])
        torch.testing.assert_close(actual[:3], expected)
        assert actual[3] == 0
    trained_on = trained(tmp_path, names=["qwen"], num_generations=4, reward_funcs=all_but_the_last)
    assert training_logs(trained_on)[0]["qwen/dropped/no_verdict"] == 4


@pytest.mark.parametrize("algorithm", ["hacpo", "grpo"])
def test_the_mean_over_two_processes_losses_is_the_loss_of_one(tmp_path, monkeypatch, algorithm):
    """Gradients are averaged over processes, so each process's share of the loss counts as often as there are
    processes. Here one process plays both; real ones are launched in tests/backends/test_distributed.py."""
    trainer = tiny.trainer(tmp_path, algorithm=algorithm, **tiny.PLAIN_SGD)
    trainer._rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])
    trainer._rows_in_loss = trainer._count_rows_in_loss(trainer._rows)
    rows = trainer._rows["qwen"][:8]
    policy = trainer.agents["qwen"].policy

    def gradient(rows):
        policy.zero_grad()
        loss = trainer._loss("qwen", rows, 0)
        loss.backward()
        return torch.cat([p.grad.flatten() for p in policy.parameters()])

    whole = gradient(rows)
    assert whole.abs().max() > 1e-3
    # A mean over the update's rows: were there twice as many, these would count half.
    trainer._rows_in_loss["qwen"][0] *= 2
    torch.testing.assert_close(gradient(rows) * 2, whole, rtol=1e-4, atol=1e-6)
    trainer._rows_in_loss["qwen"][0] /= 2
    monkeypatch.setattr(type(trainer.accelerator), "num_processes", 2)
    # Uneven in what moves the policy, as shares are.
    torch.testing.assert_close((gradient(rows[:3]) + gradient(rows[3:])) / 2, whole, rtol=1e-4, atol=1e-6)


def test_masked_truncated_answers_count_in_the_mean_only(tmp_path):
    trainer = tiny.trainer(tmp_path, mask_truncated_completions=True)
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])["qwen"]
    cut = [row for row in rows if row.is_masked]
    assert cut and all(row.in_loss and not row.moves_policy for row in cut)


# ---- checkpoints ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("checkpoint", [3, 4])
def test_resumed_run_is_bit_identical(tmp_path, checkpoint):
    """Sampling for real, over an epoch's end, from a checkpoint between two steps (4) and from one within a step
    (3)."""
    settings = {"generation": None, "max_steps": 7, "save_strategy": "steps", "save_steps": checkpoint, "beta": 0.05}
    whole = trained(tmp_path / "whole", **settings)
    tiny_resumed = tiny.trainer(tmp_path / "resumed", **settings)
    tiny_resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{checkpoint}"))
    for name in whole.agents:
        assert torch.equal(tiny.parameters(whole, name), tiny.parameters(tiny_resumed, name))
    assert whole.capability.state_dict() == tiny_resumed.capability.state_dict()
    logs = [
        [
            {k: v for k, v in log.items() if not k.startswith("time/")}
            for log in training_logs(t)
            if log["step"] > checkpoint
        ]
        for t in (whole, tiny_resumed)
    ]
    assert len(logs[0]) == 7 - checkpoint
    assert logs[0] == logs[1]


def test_a_resumed_run_goes_on_measuring_where_it_was(tmp_path):
    """From within a step, and from between two logs: what the step's alignment, the logged means and the token counts
    are made of is in the checkpoint."""
    settings = {"max_steps": 6, "save_strategy": "steps", "save_steps": 3, "logging_steps": 2}
    whole = trained(tmp_path / "whole", **settings)
    resumed = tiny.trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"))
    # transformers' own mean over agents, "loss", begins anew.
    logs = [
        [
            {k: v for k, v in log.items() if k != "loss" and not k.startswith("time/")}
            for log in training_logs(t)
            if log["step"] > 3
        ]
        for t in (whole, resumed)
    ]
    assert [log["step"] for log in logs[0]] == [4, 6] and logs[0] == logs[1]
    # The step of updates 3 and 4 has rows of both in its alignment: without the first ones it would be another number.
    assert logs[0][0]["qwen/alignment/llama"] not in (None, 1.0, -1.0)


def test_checkpoints_load_with_transformers(tmp_path):
    trainer = trained(tmp_path, save_strategy="steps", save_steps=1, save_total_limit=2)
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-3"]
    for name, agent in trainer.agents.items():
        folder = tmp_path / "checkpoint-3" / name
        model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("akz=", return_tensors="pt").input_ids
        assert ids.tolist() == agent.tokenizer("akz=", return_tensors="pt").input_ids.tolist()
        agent.policy.eval()
        assert torch.equal(model(ids).logits, agent.policy(ids).logits)
        assert "2603.02604" in (folder / "README.md").read_text()


def test_save_model_writes_a_folder_for_each_agent(tmp_path):
    trainer = tiny.trainer(tmp_path)
    trainer.save_model(str(tmp_path / "final"))
    for name in trainer.agents:
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "final" / name)
        vector = torch.cat([p.flatten() for p in loaded.parameters()])
        assert torch.equal(vector, tiny.parameters(trainer, name))


@pytest.mark.parametrize("length", [{"num_train_epochs": 1, "max_steps": -1}, {"max_steps": 2}, {"max_steps": 3}])
def test_resuming_a_finished_run_changes_nothing(tmp_path, length):
    """Which ended with an epoch, with a step in the midst of one, in the midst of a step."""
    settings = {**length, "save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
    whole = trained(tmp_path / "whole", **settings)
    resumed = tiny.trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / f"checkpoint-{whole.state.global_step}"))
    assert resumed.state.global_step == whole.state.global_step
    for name in whole.agents:
        assert torch.equal(tiny.parameters(whole, name), tiny.parameters(resumed, name))


def test_resuming_with_other_agents_says_so(tmp_path):
    trained(tmp_path, save_strategy="steps", save_steps=2)
    other = tiny.trainer(tmp_path / "other", names=["qwen", "third"])
    with pytest.raises(ValueError, match=r"no agent 'third'.*llama.*qwen"):
        other.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_adapters_train_resume_and_leave_the_base_alone(tmp_path):
    """One agent trains a LoRA adapter (with a KL term to its base), the other all weights."""
    from peft import LoraConfig

    def run(folder, resume=None):
        trainer = tiny.trainer(
            folder,
            generation=None,
            peft_configs={"qwen": LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")},
            max_steps=4,
            save_strategy="steps",
            save_steps=2,
            beta=0.1,
        )
        base = {n: p.clone() for n, p in trainer.agents["qwen"].policy.named_parameters() if "lora" not in n}
        trainer.train(resume_from_checkpoint=resume)
        return trainer, base

    whole, base = run(tmp_path / "whole")
    for name, parameter in whole.agents["qwen"].policy.named_parameters():
        if "lora" not in name:
            assert torch.equal(parameter, base[name])
    assert any(p.abs().sum() > 0 for n, p in whole.agents["qwen"].policy.named_parameters() if "lora_B" in n)
    assert (tmp_path / "whole" / "checkpoint-2" / "qwen" / "adapter_model.safetensors").is_file()
    assert training_logs(whole)[-1]["qwen/kl"] > 0
    resumed, _ = run(tmp_path / "resumed", resume=str(tmp_path / "whole" / "checkpoint-2"))
    for name in whole.agents:
        assert torch.equal(tiny.parameters(whole, name), tiny.parameters(resumed, name))


def test_an_adapter_by_the_agents_configuration(tmp_path):
    """As a recipe says it: peft_config of one agent; said twice, it is an error."""
    from peft import LoraConfig

    agents = [{"name": "qwen", "peft_config": {"r": 4, "target_modules": "all-linear"}}, {"name": "llama"}]
    trainer = trained(tmp_path, agents=agents, max_steps=1)
    trainable = {n for n, p in trainer.agents["qwen"].policy.named_parameters() if p.requires_grad}
    assert trainable and all("lora_" in name for name in trainable)
    assert not any("lm_head" in name for name in trainable)
    assert all(p.requires_grad for p in trainer.agents["llama"].policy.parameters())
    with pytest.raises(ValueError, match=r"Agent 'qwen'.*both peft_configs and args.agents"):
        tiny.trainer(tmp_path, agents=agents, peft_configs={"qwen": LoraConfig(r=4, task_type="CAUSAL_LM")})


def test_an_adapter_on_the_head_is_refused(tmp_path):
    from peft import LoraConfig

    head = LoraConfig(r=4, target_modules=["q_proj", "lm_head"], task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match=r"Agent 'qwen'.*language-model head"):
        tiny.trainer(tmp_path, peft_configs={"qwen": head})


# ---- logging and evaluation -----------------------------------------------------------------------------------------
def test_metrics(tmp_path):
    """The logged numbers of one update, against a recomputation from the rows."""
    trainer = tiny.trainer(tmp_path, max_steps=2)
    trainer.train()
    first, second = training_logs(trainer)
    reference = tiny.trainer(tmp_path / "reference")
    order = list(iter(reference._get_train_sampler(reference.train_dataset)))[:4]
    examples = [reference.train_dataset[i] for i in order]
    for name in trainer.agents:
        answers = [reference.generation.answer(name, example["prompt"], g) for example in examples for g in range(2)]
        texts = [reference.agents[name].decode(a.ids)[0] for a in answers]
        expected = torch.tensor(tiny.partial_reward(texts, [e["answer"] for e in examples for _ in range(2)]))
        assert first[f"{name}/reward"] == pytest.approx(expected.mean().item())
        assert first[f"{name}/reward_std"] == pytest.approx(expected.std().item(), rel=1e-5)
        assert first[f"{name}/capability"] == pytest.approx(expected.mean().item())
        lengths = [len(a.ids) for a in answers]
        assert first[f"{name}/completions/mean_length"] == pytest.approx(sum(lengths) / 8)
        assert first[f"{name}/completions/max_length"] == max(lengths)
        cut = sum(a.finish_reason == "length" for a in answers) / 8
        assert first[f"{name}/completions/clipped_ratio"] == pytest.approx(cut)
        assert first[f"{name}/tokens/generated"] == second[f"{name}/tokens/generated"] == sum(lengths)
        assert second[f"{name}/tokens/trained"] > first[f"{name}/tokens/trained"] > 0
    for log in (first, second):
        for name, peer in (("qwen", "llama"), ("llama", "qwen")):
            for key in ("own_ratio/mean", "cross_ratio/min", "clip_ratio/cross_below", "clip_ratio/cross_above"):
                assert math.isfinite(log[f"{name}/{key}"])
            for key in ("grad_norm", "learning_rate", "loss"):
                assert math.isfinite(log[f"{name}/{key}"])
            # Of the answers as they were scored: once a step.
            assert math.isfinite(first[f"{name}/entropy"]) and f"{name}/entropy" not in second
            assert f"{name}/capability_ratio/{peer}" in first
    assert {
        f"time/{phase}" for phase in ("generate", "verify", "score", "exchange", "update", "step")
    } <= second.keys()
    json.dumps(trainer.state.log_history)


def test_evaluation_reports_every_agent_and_source(tmp_path):
    def which_agent(completions, agent, **kwargs):
        # llama: 0, 0.25, 0.5 for the three samples of each prompt.
        return [1.0 if agent == "qwen" else i % 3 / 4 for i in range(len(completions))]

    test = conv_dataset("test", 7)
    trainer = tiny.trainer(
        tmp_path, generation=None, reward_funcs=which_agent, eval_dataset=test, num_generations_eval=3
    )
    before = torch.get_rng_state()
    metrics = trainer.evaluate()
    assert torch.equal(torch.get_rng_state(), before)
    assert metrics["eval_qwen/reward"] == 1.0 and metrics["eval_llama/reward"] == 0.25
    assert metrics["eval_reward"] == 0.625
    assert metrics["eval_qwen/best@3"] == 1.0 and metrics["eval_llama/best@3"] == 0.5
    for source in set(test["source"]):
        assert metrics[f"eval_llama/reward/{source}"] == 0.25 and metrics[f"eval_llama/best@3/{source}"] == 0.5
    assert trainer.evaluate({"a": test.select(range(2)), "b": test})["eval_b_llama/reward"] == 0.25


def test_evaluation_during_training_changes_nothing(tmp_path):
    plain = trained(tmp_path / "plain", generation=None)
    settings = {"eval_dataset": conv_dataset("test", 5), "eval_strategy": "steps", "eval_steps": 1}
    evaluated = trained(tmp_path / "evaluated", generation=None, **settings)
    assert torch.equal(tiny.parameters(plain, "qwen"), tiny.parameters(evaluated, "qwen"))
    assert sum("eval_reward" in log for log in evaluated.state.log_history) == 3


def test_best_model_is_loaded_at_the_end(tmp_path):
    """By one agent's reward; every agent goes back to that checkpoint."""

    def scripted(completions, trainer_state, **kwargs):
        return [0.0 if trainer_state.global_step != 2 else 1.0] * len(completions)

    trainer = trained(
        tmp_path,
        generation=None,
        reward_funcs=[tiny.partial_reward, scripted],
        eval_dataset=conv_dataset("test", 4),
        eval_strategy="steps",
        eval_steps=1,
        save_strategy="steps",
        save_steps=1,
        load_best_model_at_end=True,
        metric_for_best_model="qwen/rewards/scripted/mean",
        greater_is_better=True,
    )
    assert trainer.state.best_global_step == 2
    for name in trainer.agents:
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint-2" / name)
        vector = torch.cat([p.flatten() for p in saved.parameters()])
        assert torch.equal(vector, tiny.parameters(trainer, name))


def test_conversations_reach_reward_functions_as_messages(tmp_path):
    seen = []

    def spy(prompts, completions, **kwargs):
        seen.append((prompts[0], completions[0]))
        return [float(i % 2) for i in range(len(completions))]

    prompts = Dataset.from_dict({"prompt": [[{"role": "user", "content": f"{i}="}] for i in range(8)]})
    agents = [
        {"name": "qwen", "chat_template": "plain"},
        {"name": "llama", "chat_template": "<{{ messages[0]['content'] }}>"},
    ]
    trainer = tiny.trainer(tmp_path, generation=None, prompts=prompts, reward_funcs=spy, agents=agents)
    assert trainer.agents["qwen"].tokenizer.decode(trainer.agents["qwen"].render([prompts[0]["prompt"]])[0]) == "0="
    assert (
        trainer.agents["llama"].tokenizer.decode(trainer.agents["llama"].render([prompts[0]["prompt"]])[0]) == "<0=>"
    )
    trainer.train()
    prompt, completion = seen[0]
    assert prompt[0]["role"] == "user"
    assert completion[0]["role"] == "assistant" and isinstance(completion[0]["content"], str)


def test_completions_are_saved_and_printed(tmp_path, capsys):
    import pandas as pd

    def with_extra(completions, log_extra, log_metric, **kwargs):
        log_extra("length", [len(c) for c in completions])
        log_metric("answers", len(completions))
        return [float(i) for i in range(len(completions))]

    trainer = trained(tmp_path, log_completions=True, num_completions_to_print=1, reward_funcs=with_extra, max_steps=2)
    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert sorted(table["agent"].unique()) == ["llama", "qwen"] and len(table) == 16
    assert (table["length"] == table["completion"].str.len()).all()
    assert table["with_extra"].tolist()[:3] == [0.0, 1.0, 2.0]
    assert training_logs(trainer)[0]["qwen/answers"] == 8
    assert "Completion" in capsys.readouterr().out


# ---- settings -------------------------------------------------------------------------------------------------------
def test_settings_of_one_agent_hold_for_it_alone(tmp_path):
    agents = [
        {"name": "qwen", "learning_rate": 1e-4, "max_grad_norm": 1e-3, "weight_decay": 0.5, "temperature": 0.7},
        {"name": "llama", "lr_scheduler_type": "constant", "top_k": 3},
    ]
    trainer = trained(tmp_path, agents=agents)
    log = training_logs(trainer)[-1]
    assert log["qwen/learning_rate"] == pytest.approx(1e-4 / 3) and log["llama/learning_rate"] == 1e-3
    decays = {name: [g["weight_decay"] for g in o.param_groups] for name, o in trainer.optimizer.optimizers.items()}
    assert decays == {"qwen": [0.5, 0.0], "llama": [0.0, 0.0]}
    assert trainer.agents["qwen"].generation_config.temperature == 0.7
    assert trainer.agents["llama"].generation_config.temperature == 1.0
    assert (trainer.agents["llama"].generation_config.top_k, trainer.agents["qwen"].generation_config.top_k) == (3, 0)


def test_warm_up_is_each_agents_own(tmp_path):
    """Learning rates of 4 updates: qwen warms up over 2, llama over half of them by the run's setting, third not at
    all."""
    agents = [{"name": "qwen", "warmup_steps": 2}, {"name": "llama"}, {"name": "third", "warmup_steps": 0}]
    settings = {"lr_scheduler_type": "constant_with_warmup", "warmup_steps": 0.5, "learning_rate": 0.1}
    trainer = trained(
        tmp_path,
        names=[a["name"] for a in agents],
        agents=agents,
        per_device_train_batch_size=12,
        max_steps=4,
        **settings,
    )
    rates = {name: [log[f"{name}/learning_rate"] for log in training_logs(trainer)] for name in trainer.agents}
    assert rates == {"qwen": [0.0, 0.05, 0.1, 0.1], "llama": [0.0, 0.05, 0.1, 0.1], "third": [0.1] * 4}


def test_clipping_is_each_agents_own(tmp_path):
    """A gradient clipped to next to nothing moves SGD next to nothing."""
    agents = [{"name": "qwen", "max_grad_norm": 1e-9}, {"name": "llama", "max_grad_norm": 0}]
    trainer = tiny.trainer(tmp_path, agents=agents, optim="sgd", max_steps=1)
    before = {name: tiny.parameters(trainer, name).clone() for name in trainer.agents}
    trainer.train()
    moved = {name: (tiny.parameters(trainer, name) - before[name]).norm().item() for name in trainer.agents}
    assert moved["qwen"] <= 1e-11 * 1.01
    assert moved["llama"] == pytest.approx(1e-3 * training_logs(trainer)[0]["llama/grad_norm"], rel=1e-3)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"models": {"qwen": None}, "agents": [{"name": "qwen"}, {"name": "llama"}]}, "must match"),
        ({"prompts": 3}, "train_dataset has 3 prompts"),
        ({"prompts_per_step": 3}, "gives each agent 12 rollouts"),
        ({"max_completion_length": 4096}, "leaves no room for a prompt"),
        ({"reward_weights": [1.0, 2.0]}, "2 weights for 1 reward functions"),
    ],
)
def test_bad_input_is_refused_with_the_reason(tmp_path, kwargs, message):
    with pytest.raises(ValueError, match=message):
        tiny.trainer(tmp_path, **kwargs)


def test_missing_arguments_are_named(tmp_path):
    with pytest.raises(ValueError, match="needs args"):
        HACPOTrainer({"a": "x"}, tiny.partial_reward)
    with pytest.raises(ValueError, match="needs reward_funcs"):
        HACPOTrainer({"a": "x"}, args=tiny.config(tmp_path))
    with pytest.raises(ValueError, match="There are no agents"):
        HACPOTrainer(None, tiny.partial_reward, HACPOConfig(str(tmp_path)))
    with pytest.raises(ValueError, match=r"Agent 'a' has no model"):
        HACPOTrainer(None, tiny.partial_reward, tiny.config(tmp_path, agents=[{"name": "a"}]))
    shared = tiny.policy("qwen")
    with pytest.raises(ValueError, match="share one model object"):
        tiny.trainer(tmp_path, models={"qwen": shared, "llama": shared})


# ---- the Hub --------------------------------------------------------------------------------------------------------
