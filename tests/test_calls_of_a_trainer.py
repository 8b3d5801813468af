"""What users of TRL call on a trainer beside `train`: by name, without data, with data that does not do."""

import pytest
import tiny
from datasets import Dataset

from hacpo_trl.embedded import conv_dataset


def test_evaluate_by_name(tmp_path):
    trainer = tiny.trainer(tmp_path, eval_dataset={"easy": conv_dataset("test", 2), "hard": conv_dataset("test", 4)})
    both, easy = trainer.evaluate(), trainer.evaluate("easy")
    assert both["eval_easy_qwen/reward"] == easy["eval_easy_qwen/reward"]
    assert not any(key.startswith("eval_hard") for key in easy)
    with pytest.raises(ValueError, match=r"evaluate\('harder'\): eval_dataset has \['easy', 'hard'\]"):
        trainer.evaluate("harder")
    with pytest.raises(ValueError, match=r"evaluate\('easy'\): eval_dataset is one dataset without a name"):
        tiny.trainer(tmp_path, eval_dataset=conv_dataset("test", 2)).evaluate("easy")
    with pytest.raises(ValueError, match=r"evaluate\(\) needs an eval_dataset"):
        tiny.trainer(tmp_path).evaluate()


def test_what_evaluate_is_given_is_checked_like_what_the_trainer_is_given(tmp_path):
    trainer = tiny.trainer(tmp_path)
    with pytest.raises(ValueError, match=r"eval_dataset has the columns \['agent'\]"):
        trainer.evaluate(Dataset.from_dict({"prompt": ["a="], "answer": ["3"], "agent": ["qwen"]}))
    with pytest.raises(ValueError, match="eval_dataset needs a column 'prompt'"):
        trainer.evaluate(Dataset.from_dict({"question": ["a="]}))
    with pytest.raises(TypeError, match=r"eval_dataset\['x'\] must be a datasets.Dataset, not list"):
        trainer.evaluate({"x": []})
    long = Dataset.from_dict({"prompt": ["a=", "a" * 5000], "answer": ["3", "3"]})
    assert trainer.evaluate(long)["eval_reward"] is not None


def test_train_without_prompts_says_so(tmp_path):
    from hacpo_trl import HACPOTrainer

    trainer = HACPOTrainer(
        {"qwen": tiny.policy("qwen")},
        tiny.partial_reward,
        tiny.config(tmp_path, per_device_train_batch_size=8),
        processing_classes={"qwen": tiny.tokenizer("qwen")},
    )
    with pytest.raises(ValueError, match=r"train\(\) needs a train_dataset"):
        trainer.train()


def test_predict_has_no_meaning(tmp_path):
    with pytest.raises(NotImplementedError, match=r"evaluate\(\) samples their answers"):
        tiny.trainer(tmp_path).predict(conv_dataset("test", 2))


def test_a_model_card_for_each_agent(tmp_path):
    trainer = tiny.trainer(tmp_path)
    trainer.create_model_card(model_name="duo", dataset_name="conv", tags="toy")
    for name in trainer.agents:
        card = (tmp_path / name / "README.md").read_text()
        assert f"duo-{name}" in card and "conv" in card and "- toy" in card and "- hacpo" in card
