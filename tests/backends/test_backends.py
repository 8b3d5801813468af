"""What of a launch is refused at its start, or settled for each agent, before any process is started."""

import pytest
import tiny
import torch
from accelerate.utils import FullyShardedDataParallelPlugin
from torch.distributed.fsdp import MixedPrecisionPolicy

from hacpo_trl.backends.deepspeed_plugins import check_config
from hacpo_trl.backends.fsdp_plugins import plugin_of


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"zero_optimization": {"stage": 0}}, "stage 0, which shards nothing"),
        ({"zero_optimization": {"stage": 2}, "fp16": {"enabled": True}}, "enables fp16"),
        ({"zero_optimization": {"stage": 3}}, "zero3_save_16bit_model"),
        ({"zero_optimization": {"stage": 2}, "optimizer": {}}, "'optimizer' or 'scheduler' section"),
    ],
)
def test_deepspeed_configurations_that_cannot_work_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        check_config(config)


def test_deepspeed_configurations_that_work_are_taken():
    for zero in ({"stage": 1}, {"stage": 2}, {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}):
        check_config({"zero_optimization": zero, "fp16": {"enabled": "auto"}})


def test_an_agent_is_cut_at_its_own_layers():
    base = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer", "LlamaDecoderLayer"],
    )
    layers = {
        name: plugin_of(base, name, tiny.policy(name)).transformer_cls_names_to_wrap for name in ("qwen", "llama")
    }
    assert layers == {"qwen": ["Qwen3DecoderLayer"], "llama": ["LlamaDecoderLayer"]}

    base.transformer_cls_names_to_wrap = ["Qwen3DecoderLayer"]
    with pytest.raises(ValueError, match=r"Agent 'llama'.*=Qwen3DecoderLayer. Add its own \(LlamaDecoderLayer\)"):
        plugin_of(base, "llama", tiny.policy("llama"))


def test_fsdp_rounds_no_log_probability_and_no_sum_of_gradients():
    base = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy="bf16")
    policy = plugin_of(base, "llama", tiny.policy("llama")).mixed_precision_policy
    assert policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def test_fsdp_is_refused_where_accelerate_would_not_shard(tmp_path, monkeypatch):
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(RuntimeError, match="every process would hold whole policies"):
        tiny.trainer(tmp_path)


def test_a_checkpoint_of_another_backend_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    saved = tiny.trainer(tmp_path / "saved", max_steps=2, save_strategy="steps", save_steps=2)
    monkeypatch.setattr(type(saved), "backend", "ZeRO-2")
    saved.train()
    monkeypatch.undo()
    resumed = tiny.trainer(tmp_path / "resumed")
    start = tiny.parameters(resumed, "qwen").clone()
    with pytest.raises(ValueError, match=r"checkpoint-2 was saved under ZeRO-2.*this run is under DDP"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "saved" / "checkpoint-2"))
    assert torch.equal(tiny.parameters(resumed, "qwen"), start)


def test_a_step_of_another_number_of_updates_cannot_be_resumed(tmp_path):
    settings = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    tiny.trainer(tmp_path, **settings).train()
    resumed = tiny.trainer(tmp_path, **settings, per_device_train_batch_size=4)
    with pytest.raises(ValueError, match=r"counts 2 updates a step; this run has 4"):
        resumed.train(resume_from_checkpoint=True)
