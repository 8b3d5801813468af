"""Every field of transformers' TrainingArguments has a decision; what has no meaning here is refused by name."""

from dataclasses import fields

import pytest
import tiny
import torch
from tiny_agents import run_config
from transformers import TrainingArguments

from hacpo_trl.options.training_arguments import CHECKED, NO_MEANING, NO_MEANING_TO_ACCELERATOR, WORKS


# A value other than the default, where True is none.
OTHER = {
    "neftune_noise_alpha": 5.0,
    "label_smoothing_factor": 0.1,
    "label_names": ["labels"],
    "eval_do_concat_batches": False,
    "eval_accumulation_steps": 2,
    "include_for_metrics": ["inputs"],
    "average_tokens_across_devices": False,
    "include_num_input_tokens_seen": "all",
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "size",
    "liger_kernel_config": {"rope": True},
    "torch_empty_cache_steps": 3,
    "debug": "underflow_overflow",
}


def test_every_field_of_the_installed_transformers_has_one_decision():
    names = {field.name for field in fields(TrainingArguments)}
    decided = WORKS | CHECKED | set(NO_MEANING)
    assert not names - decided, f"new in this transformers: {sorted(names - decided)}"
    assert len(decided) == len(WORKS) + len(CHECKED) + len(NO_MEANING)


@pytest.mark.parametrize("name", [name for name in NO_MEANING if name != "parallelism_config"])
def test_what_has_no_meaning_is_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"^{name}=.* has no effect: .*Leave it out"):
        run_config(**{name: OTHER.get(name, True)})


def test_context_parallelism_is_refused():
    from accelerate import ParallelismConfig

    with pytest.raises(ValueError, match=r"(?s)^parallelism_config=.* has no effect: log-probabilities"):
        run_config(parallelism_config=ParallelismConfig())


@pytest.mark.parametrize("name", NO_MEANING_TO_ACCELERATOR)
def test_settings_of_accelerate_that_would_deal_prompts_otherwise_are_refused(name):
    with pytest.raises(ValueError, match=f"accelerator_config has {name}, which has no effect"):
        run_config(accelerator_config={name: True})


def test_defaults_are_not_refused():
    defaults = {field.name: getattr(run_config(), field.name) for field in fields(TrainingArguments) if field.init}
    given = {name: value for name, value in defaults.items() if name in NO_MEANING}
    assert run_config(**given)


def test_data_seed_orders_the_prompts(tmp_path):
    def order(**settings):
        trainer = tiny.trainer(tmp_path, prompts=16, **settings)
        return [tuple(example["prompt"] for example in batch) for batch in trainer.get_train_dataloader()]

    assert order(seed=1, data_seed=7) == order(seed=2, data_seed=7) != order(seed=1, data_seed=8)
    assert order(seed=7) == order(seed=3, data_seed=7)
    with pytest.raises(ValueError, match="data_seed has no effect with shuffle_dataset=False"):
        tiny.config(tmp_path, data_seed=7, shuffle_dataset=False)


# ---- names ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "name", ["eval", "train", "Train", "checkpoint-4", "completions", "COMPLETIONS", "runs", "vllm_adapters"]
)
def test_names_that_a_run_has_for_other_things_are_taken(name):
    with pytest.raises(ValueError, match=f"Agent name '{name}' is taken"):
        run_config(agents=[{"name": name}])


def test_names_that_differ_in_case_alone_are_one():
    with pytest.raises(ValueError, match=r"Two agents share a name: .*without regard to case"):
        run_config(agents=[{"name": "Qwen"}, {"name": "qwen"}])


@pytest.mark.parametrize("name", ["type", "keys", "forward", "policies", "training", "to", "half"])
def test_names_of_module_attributes_are_names(tmp_path, name):
    trainer = tiny.trainer(
        tmp_path,
        names=("qwen",),
        models={name: tiny.policy("qwen")},
        generation=None,
        processing_classes={name: tiny.tokenizer("qwen")},
        max_steps=1,
        per_device_train_batch_size=8,
    )
    trainer.train()
    assert f"{name}/reward" in trainer.state.log_history[0]
    assert isinstance(trainer.model.policies[name], torch.nn.Module)
