"""With one agent, HACPO is TRL's GRPOTrainer at sequence level, and `algorithm="grpo"` is it at token level."""

from unittest import mock

import pytest
import tiny
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from hacpo_trl.embedded import conv_dataset


UPDATES, PROMPTS, GENERATIONS = 3, 6, 4
SETTINGS = {
    "learning_rate": 1e-3,
    "max_steps": UPDATES,
    "num_generations": GENERATIONS,
    "max_completion_length": 8,
    "shuffle_dataset": False,
    "logging_steps": 1,
    "save_strategy": "no",
    "disable_tqdm": True,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "max_grad_norm": 0.5,
    "weight_decay": 0.1,
}


def prompts():
    return conv_dataset("train", UPDATES * PROMPTS)


@pytest.fixture
def load_policy(tmp_path):
    """Loads one policy, as often as it is called."""
    tiny.policy("qwen").save_pretrained(tmp_path / "policy")
    return lambda: type(tiny.policy("qwen")).from_pretrained(tmp_path / "policy")


def trl_run(tmp_path, monkeypatch, model, script, **kwargs):
    # TRL deals the rollouts of a generation batch to its updates at random; here both take them in order.
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)

    def scripted_rollouts(prompts, trainer):
        tokenizer = trainer.processing_class
        answers = [script.answer("qwen", prompt, i % GENERATIONS) for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [tokenizer(prompt).input_ids for prompt in prompts],
            "completion_ids": [list(answer.ids) for answer in answers],
            "logprobs": [list(answer.logps) for answer in answers] if script.with_logps else None,
        }

    trainer = GRPOTrainer(
        model,
        tiny.partial_reward,
        GRPOConfig(str(tmp_path / "trl"), loss_type="grpo", scale_rewards="group", **SETTINGS, **kwargs),
        prompts(),
        processing_class=tiny.tokenizer("qwen"),
        rollout_func=scripted_rollouts,
    )
    if script.with_logps:
        # As if vLLM had sampled.
        trainer.use_vllm, trainer.vllm_mode, trainer.vllm_generation = True, "server", mock.Mock()
        trainer._last_loaded_step = 0
    trainer.train()
    return trainer


def our_trainer(tmp_path, model, script, level, **kwargs):
    settings = {k: v for k, v in SETTINGS.items() if k not in ("bf16", "gradient_checkpointing", "use_cpu")}
    return tiny.trainer(
        tmp_path / "ours",
        names=["qwen"],
        prompts=prompts(),
        generation=script,
        models={"qwen": model},
        algorithm="hacpo" if level == "sequence" else "grpo",
        prompts_per_step=PROMPTS,
        **settings,
        **kwargs,
    )


def assert_moved_alike(before, ours, theirs):
    their_parameters = torch.cat([p.detach().flatten() for p in theirs.model.parameters()])
    after = tiny.parameters(ours, "qwen")
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, their_parameters, rtol=0, atol=1e-5)


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("updates_per_step", [1, 3])
def test_three_updates_equal_grpo_trainer(tmp_path, monkeypatch, load_policy, level, updates_per_step, beta):
    """Loss and parameters after 3 updates, with ratios of 1 (a step an update) and with clipped ratios (3 updates a
    step)."""
    rollouts = PROMPTS * GENERATIONS
    batch = rollouts // updates_per_step
    script = tiny.ScriptedGeneration(["qwen"])
    theirs = trl_run(
        tmp_path,
        monkeypatch,
        load_policy(),
        script,
        per_device_train_batch_size=batch // 2,
        gradient_accumulation_steps=2,
        steps_per_generation=2 * updates_per_step,
        importance_sampling_level=level,
        epsilon=3e-4 if level == "sequence" else 0.2,
        epsilon_high=4e-4 if level == "sequence" else 0.28,
        beta=beta,
    )
    ours = our_trainer(
        tmp_path,
        load_policy(),
        script,
        level,
        per_device_train_batch_size=batch // 2,
        gradient_accumulation_steps=2,
        beta=beta,
    )
    before = tiny.parameters(ours, "qwen").clone()
    ours.train()

    their_logs = [log for log in theirs.state.log_history if "loss" in log]
    our_logs = [log for log in ours.state.log_history if "loss" in log]
    assert len(their_logs) == len(our_logs) == UPDATES
    for their, our in zip(their_logs, our_logs, strict=True):
        assert our["loss"] == pytest.approx(their["loss"], abs=1e-5)
        assert our["qwen/loss"] == pytest.approx(their["loss"], abs=1e-5)
        assert our["grad_norm"] == pytest.approx(their["grad_norm"], rel=1e-3, abs=1e-5)
        assert our["learning_rate"] == pytest.approx(their["learning_rate"])
        if "reward" in their:
            assert our["qwen/reward"] == pytest.approx(their["reward"], abs=1e-6)
            assert our["qwen/reward_std"] == pytest.approx(their["reward_std"], abs=1e-6)
    if updates_per_step == 3 and level == "sequence":
        # The comparison would say little about clipping if nothing were clipped.
        assert any(log["qwen/clip_ratio/own_low"] + log["qwen/clip_ratio/own_high"] > 0.1 for log in our_logs)
    assert_moved_alike(before, ours, theirs)


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
@pytest.mark.parametrize("level", ["sequence", "token"])
def test_the_correction_for_the_sampler_equals_grpo_trainers(tmp_path, monkeypatch, load_policy, level, mode):
    """Loss, parameters and logged differences, with a sampler whose probabilities are not the trainer's."""
    script = tiny.ScriptedGeneration(["qwen"], with_logps=True)
    correction = {
        "vllm_importance_sampling_mode": mode,
        "vllm_importance_sampling_clip_max": 1.2,
        "vllm_importance_sampling_clip_min": 0.6,
    }
    theirs = trl_run(
        tmp_path,
        monkeypatch,
        load_policy(),
        script,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
        importance_sampling_level=level,
        vllm_importance_sampling_correction=True,
        **correction,
    )
    ours = our_trainer(
        tmp_path,
        load_policy(),
        script,
        level,
        per_device_train_batch_size=PROMPTS * GENERATIONS,
    )
    # Set afterwards: the options ask for use_vllm, which a scripted sampler is not.
    ours.args.vllm_importance_sampling_correction = True
    for name, value in correction.items():
        setattr(ours.args, name, value)
    before = tiny.parameters(ours, "qwen").clone()
    ours.train()
    for their, our in zip(theirs.state.log_history[:UPDATES], ours.state.log_history[:UPDATES], strict=True):
        assert our["loss"] == pytest.approx(their["loss"], abs=1e-5)
        for ours_name, theirs_name in (
            ("logp_difference/mean", "sampling_logp_difference/mean"),
            ("logp_difference/max", "sampling_logp_difference/max"),
            ("importance_sampling_ratio/max", "importance_sampling_ratio/max"),
            ("importance_sampling_ratio/min", "importance_sampling_ratio/min"),
        ):
            assert our[f"qwen/sampling/{ours_name}"] == pytest.approx(their[f"sampling/{theirs_name}"], abs=1e-4)
    assert_moved_alike(before, ours, theirs)
