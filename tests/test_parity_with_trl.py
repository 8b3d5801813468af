"""With one agent, HACPO is TRL's GRPOTrainer at sequence level, and `algorithm="grpo"` is it at token level."""

import pytest
import tiny
import torch
from trl import GRPOConfig, GRPOTrainer
from trl.trainer import grpo_trainer

from hacpo_trl.miniature import conv_dataset


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


def trl_run(tmp_path, monkeypatch, model, script, prompts, **kwargs):
    # TRL deals the rollouts of a generation batch to its updates at random; here both take them in order.
    monkeypatch.setattr(grpo_trainer, "shuffle_sequence_dict", lambda batch: batch)

    def scripted_rollouts(prompts, trainer):
        tokenizer = trainer.processing_class
        answers = [script.answer("qwen", prompt, i % GENERATIONS) for i, prompt in enumerate(prompts)]
        return {
            "prompt_ids": [tokenizer(prompt).input_ids for prompt in prompts],
            "completion_ids": [list(answer.ids) for answer in answers],
            "logprobs": None,
        }

    trainer = GRPOTrainer(
        model,
        tiny.partial_reward,
        GRPOConfig(str(tmp_path / "trl"), loss_type="grpo", scale_rewards="group", **SETTINGS, **kwargs),
        prompts,
        processing_class=tiny.tokenizer("qwen"),
        rollout_func=scripted_rollouts,
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize("beta", [0.0, 0.1])
@pytest.mark.parametrize("level", ["sequence", "token"])
@pytest.mark.parametrize("updates_per_step", [1, 3])
def test_three_updates_equal_grpo_trainer(tmp_path, monkeypatch, level, updates_per_step, beta):
    """Loss and parameters after 3 updates, with ratios of 1 (a step an update) and with clipped ratios (3 updates a
    step)."""
    rollouts = PROMPTS * GENERATIONS
    batch = rollouts // updates_per_step
    tiny.policy("qwen").save_pretrained(tmp_path / "policy")
    load = type(tiny.policy("qwen")).from_pretrained
    prompts = conv_dataset("train", UPDATES * PROMPTS)
    script = tiny.ScriptedGeneration(["qwen"])
    theirs = trl_run(
        tmp_path,
        monkeypatch,
        load(tmp_path / "policy"),
        script,
        prompts,
        per_device_train_batch_size=batch // 2,
        gradient_accumulation_steps=2,
        steps_per_generation=2 * updates_per_step,
        importance_sampling_level=level,
        epsilon=3e-4 if level == "sequence" else 0.2,
        epsilon_high=4e-4 if level == "sequence" else 0.28,
        beta=beta,
    )
    settings = {k: v for k, v in SETTINGS.items() if k not in ("bf16", "gradient_checkpointing", "use_cpu")}
    ours = tiny.trainer(
        tmp_path / "ours",
        names=["qwen"],
        prompts=prompts,
        generation=script,
        models={"qwen": load(tmp_path / "policy")},
        algorithm="hacpo" if level == "sequence" else "grpo",
        prompts_per_step=PROMPTS,
        per_device_train_batch_size=batch // 2,
        gradient_accumulation_steps=2,
        beta=beta,
        **settings,
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
    their_parameters = torch.cat([p.detach().flatten() for p in theirs.model.parameters()])
    after = tiny.parameters(ours, "qwen")
    assert (after - before).abs().max() > 1e-3
    torch.testing.assert_close(after, their_parameters, rtol=0, atol=1e-5)
