"""Prompts: streams, images, templates that refuse, rows that are none; agent and row are named."""

import pytest
import tiny
from datasets import Dataset, Features, Image, IterableDataset, Value
from torch.utils.data import DataLoader

from hacpo_trl import HACPOTrainer
from hacpo_trl.embedded import conv_dataset
from hacpo_trl.rollouts.rows import step_layout
from hacpo_trl.rollouts.stream import stream_of_steps


# ---- streams --------------------------------------------------------------------------------------------------------
def stream(size: int) -> IterableDataset:
    return conv_dataset("train", size).to_iterable_dataset()


def test_a_stream_gives_the_prompts_that_a_dataset_gives(tmp_path):
    """Without shuffling: the same rows, the same updates."""
    settings = {**tiny.PLAIN_SGD, "shuffle_dataset": False, "max_steps": 4}
    whole = tiny.trainer(tmp_path / "whole", **settings)
    streamed = tiny.trainer(tmp_path / "stream", prompts=stream(8), **settings)
    for trainer in (whole, streamed):
        trainer.train()
    for name in whole.agents:
        assert (tiny.parameters(whole, name) == tiny.parameters(streamed, name)).all()


def test_a_stream_is_shuffled_filtered_and_continued(tmp_path):
    settings = {"prompts": stream(32), "max_steps": 8, "save_strategy": "steps", "save_steps": 4}
    trainer = tiny.trainer(tmp_path / "whole", **settings)
    drawn = [[example["prompt"] for example in batch] for batch in trainer.get_train_dataloader()]
    firsts = [batch[0] for batch in drawn]
    assert len(set(firsts)) > 3 and firsts != [row["prompt"] for row in stream(32)][: len(firsts)]
    trainer.train()
    resumed = tiny.trainer(tmp_path / "resumed", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-4"))
    assert (tiny.parameters(trainer, "qwen") == tiny.parameters(resumed, "qwen")).all()


def test_steps_are_cut_laid_out_and_repeated():
    rows = IterableDataset.from_generator(lambda: ({"prompt": str(i)} for i in range(11)))
    layout = step_layout(4, 2, 2)
    assert layout == [0, 2, 1, 3]
    steps = stream_of_steps(rows, layout, 2, None, lambda row: row["prompt"] != "1")
    batches = [batch["prompt"] for batch in DataLoader(steps, batch_size=4)]
    assert batches == [["0", "3", "2", "4"]] * 2 + [["5", "7", "6", "8"]] * 2


def test_what_a_stream_cannot_have_is_refused(tmp_path):
    with pytest.raises(ValueError, match="whose length nobody knows: set max_steps"):
        tiny.trainer(tmp_path, prompts=stream(8), max_steps=-1)
    with pytest.raises(ValueError, match="set dataloader_num_workers to 0"):
        tiny.trainer(tmp_path, prompts=stream(8), dataloader_num_workers=1)


def test_a_stream_for_evaluation_is_read_to_its_end(tmp_path):
    rewards = [
        tiny.trainer(tmp_path, eval_dataset=dataset).evaluate()["eval_reward"]
        for dataset in (conv_dataset("test", 4), conv_dataset("test", 4).to_iterable_dataset())
    ]
    assert rewards[0] == rewards[1]


# ---- rows -----------------------------------------------------------------------------------------------------------
def refused(tmp_path, prompts, message, **settings):
    dataset = Dataset.from_dict({"prompt": prompts, "answer": ["3"] * len(prompts)})
    with pytest.raises(ValueError, match=message):
        tiny.trainer(tmp_path, prompts=dataset, **settings)


USER = [{"role": "user", "content": "a="}]


@pytest.mark.parametrize(
    ("prompts", "kind"),
    [
        (["a="] * 7 + [None], "'None' .NoneType."),
        ([1, 2, 3, 4, 5, 6, 7, 8], "'1' .int."),
        ([USER] * 7 + [[]], r"'\[\]' .list."),
    ],
    ids=["none", "numbers", "empty"],
)
def test_a_prompt_that_is_none_names_agent_and_row(tmp_path, prompts, kind):
    row = 0 if prompts[0] == 1 else 7
    agents = [{"name": name, "chat_template": "plain"} for name in ("qwen", "llama")]
    message = rf"Row {row} of train_dataset: Agent 'qwen': a prompt must be .* not {kind}"
    refused(tmp_path, prompts, message, agents=agents)


def test_a_template_that_refuses_a_role_names_agent_and_row(tmp_path):
    template = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    template += "{{ m.content }}{% endfor %}"
    agents = [{"name": "qwen", "chat_template": "plain"}, {"name": "llama", "chat_template": template}]
    prompts = [USER] * 3 + [[{"role": "system", "content": "be brief"}, *USER]] + [USER] * 4
    refused(
        tmp_path,
        prompts,
        r"Row 3 of train_dataset: Agent 'llama': its chat template refuses .* the roles \['system', 'user'\]",
        agents=agents,
    )


def test_images_are_refused(tmp_path):
    blocks = [{"role": "user", "content": [{"type": "text", "text": "a="}, {"type": "image", "text": None}]}]
    agents = [{"name": name, "chat_template": "plain"} for name in ("qwen", "llama")]
    message = r"Row 0 of train_dataset: Agent 'qwen': a prompt has blocks of \['image'\], not of text"
    refused(tmp_path, [blocks] * 8, message, agents=agents)
    for column in ("image", "picture"):
        kinds = {"prompt": Value("string"), column: Image()}
        dataset = Dataset.from_dict({"prompt": ["a="] * 8, column: [None] * 8}, features=Features(kinds))
        with pytest.raises(ValueError, match=rf"train_dataset has the columns \['{column}'\]: agents are"):
            tiny.trainer(tmp_path, prompts=dataset)


def test_lists_are_no_datasets(tmp_path):
    with pytest.raises(TypeError, match=r"train_dataset must be a datasets.Dataset, not list"):
        HACPOTrainer({"qwen": tiny.policy("qwen")}, tiny.partial_reward, tiny.config(tmp_path), [{"prompt": "a="}])
