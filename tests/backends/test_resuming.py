"""What a resumed run is told: settings that differ, that take no effect, that cannot be; and secrets in no file."""

import json
import logging

import pytest
import tiny

from hacpo_trl import AgentConfig
from hacpo_trl.options.secrets import settings_without_secrets


SETTINGS = {
    "per_device_train_batch_size": 4,  # four updates a step
    "max_steps": 6,
    "save_strategy": "steps",
    "save_steps": 1,
}


def began(tmp_path, **settings):
    trainer = tiny.trainer(tmp_path / "began", **{**SETTINGS, **settings})
    trainer.train()
    return tmp_path / "began"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"num_generations": 4, "prompts_per_step": 2},
            "prompts_per_step 4 there, 2 here, num_generations 2 there, 4 here",
        ),
        ({"per_device_train_batch_size": 8}, "rollouts_per_update 4 there, 8 here"),
        ({"prompts_per_step": 8, "per_device_train_batch_size": 8, "prompts": 16}, "prompts_per_step 4 there, 8 here"),
        ({"algorithm": "naive"}, "algorithm hacpo there, naive here"),
        ({"minibatch_order": "self_first"}, "minibatch_order mixed there, self_first here"),
    ],
    ids=str,
)
def test_within_a_step_its_shape_must_be_the_same(tmp_path, settings, message):
    run = began(tmp_path)
    prompts = settings.pop("prompts", 8)
    trainer = tiny.trainer(tmp_path / "other", prompts=prompts, **{**SETTINGS, **settings})
    before = tiny.parameters(trainer, "qwen").clone()
    with pytest.raises(ValueError, match=f"lies 2 updates into a step of 4, .*{message}"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert (tiny.parameters(trainer, "qwen") == before).all(), "nothing may have been loaded"


def test_between_steps_it_may_change_and_that_is_said(tmp_path, caplog):
    run = began(tmp_path)
    trainer = tiny.trainer(
        tmp_path / "other", **{**SETTINGS, "algorithm": "naive", "learning_rate": 0.5, "adam_beta2": 0.9}
    )
    with caplog.at_level(logging.WARNING):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-4"))
    assert "algorithm 'hacpo' -> 'naive'" in caplog.text and "learning_rate 0.001 -> 0.5" in caplog.text
    assert "Without effect: adam_beta2, learning_rate, which are in the optimizers' saved states" in caplog.text
    # And so it is.
    assert trainer.state.log_history[-2]["qwen/learning_rate"] < 1e-3


def test_the_setting_resumes_where_train_is_told_nothing(tmp_path):
    run = began(tmp_path)
    trainer = tiny.trainer(tmp_path / "other", **SETTINGS, resume_from_checkpoint=str(run / "checkpoint-4"))
    trainer.train()
    assert [log["step"] for log in trainer.state.log_history if "loss" in log] == [1, 2, 3, 4, 5, 6]
    assert not (tmp_path / "other" / "checkpoint-4").exists()


def test_the_same_settings_are_nothing_to_say(tmp_path, caplog):
    run = began(tmp_path)
    with caplog.at_level(logging.WARNING):
        tiny.trainer(tmp_path / "other", **SETTINGS).train(resume_from_checkpoint=str(run / "checkpoint-2"))
    assert "other settings" not in caplog.text


def test_a_checkpoint_of_policies_alone_says_what_is_missing(tmp_path):
    run = began(tmp_path, save_only_model=True)
    with pytest.raises(
        ValueError, match=r"checkpoint-2 was saved with save_only_model.*optimizers.*model_name_or_path"
    ):
        tiny.trainer(tmp_path / "other", **SETTINGS).train(resume_from_checkpoint=str(run / "checkpoint-2"))


def test_the_best_of_policies_alone_is_loaded(tmp_path):
    from hacpo_trl.embedded import conv_dataset

    settings = {**SETTINGS, "save_only_model": True, "load_best_model_at_end": True, "metric_for_best_model": "reward"}
    settings |= {"eval_strategy": "steps", "eval_steps": 1, "eval_dataset": conv_dataset("test", 4), "max_steps": 3}
    trainer = tiny.trainer(tmp_path / "best", greater_is_better=False, **settings)
    trainer.train()
    assert trainer.state.best_model_checkpoint
    again = tiny.trainer(tmp_path / "again", **SETTINGS)
    again._load_policies(trainer.state.best_model_checkpoint)
    for name in trainer.agents:
        assert (tiny.parameters(trainer, name) == tiny.parameters(again, name)).all()


def test_no_token_is_in_any_file(tmp_path):
    secret = "hf_" + "s" * 30
    trainer = tiny.trainer(
        tmp_path / "run",
        **{**SETTINGS, "max_steps": 1},
        hub_token=secret,
        model_init_kwargs={"token": secret},
        chat_template_kwargs={"api_key": secret, "tools": [{"access_token": secret}]},
    )
    trainer.train()
    trainer.save_model()
    trainer.save_state()
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 20
    assert not [path for path in files if secret.encode() in path.read_bytes()]
    assert not [path for path in files if path.suffix == ".bin"], "nothing that would be run when it is opened"


def test_settings_survive_json():
    args = tiny.config("unused", agents=[AgentConfig("qwen", eos_token=";", generation_kwargs={"typical_p": 0.5})])
    settings = settings_without_secrets(args)
    assert json.loads(json.dumps(settings)) == settings
    assert settings["agents"][0]["eos_token"] == ";" and settings["delta"] == args.delta
