"""From names to agents: what is loaded, what is refused, and what a saved agent's folder gives back."""

import json
import logging

import pytest
import tiny
import torch
from datasets import Dataset
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertModel,
    T5Config,
    T5ForConditionalGeneration,
)

from hacpo_trl import HACPOTrainer
from hacpo_trl.backends.manifest import seal
from hacpo_trl.embedded import conv_dataset
from hacpo_trl.loading import share_that_moves


@pytest.fixture
def folder(tmp_path):
    """A whole model with its tokenizer, as a folder."""
    path = tmp_path / "model"
    tiny.policy("qwen").save_pretrained(path)
    tiny.tokenizer("qwen").save_pretrained(path)
    return path


def solo(tmp_path, model, tokenizer="qwen", **kwargs):
    """A trainer of one agent named `solo`."""
    own = {k: kwargs.pop(k) for k in ("peft_configs", "processing_classes") if k in kwargs}
    if tokenizer is not None:
        own.setdefault("processing_classes", {"solo": tiny.tokenizer(tokenizer)})
    settings = {"per_device_train_batch_size": 8, "learning_rate": 1e-2, **kwargs}
    models = None if "agents" in kwargs else {"solo": model}
    return HACPOTrainer(
        models, tiny.partial_reward, tiny.config(tmp_path / "out", **settings), conv_dataset("train", 8), **own
    )


def lora(**kwargs) -> LoraConfig:
    return LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM", **kwargs)


# ---- what an agent saves is a model_name_or_path --------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["full", "lora", "merged"])
def test_a_saved_agent_is_loaded_and_trained_further(tmp_path, folder, kind):
    adapter = {} if kind == "full" else {"peft_configs": {"solo": lora()}}
    first = solo(tmp_path / "first", str(folder), tokenizer=None, **adapter)
    first.train()
    saved = tmp_path / "saved" / "solo"
    first.save_model(str(saved.parent))
    if kind == "merged":
        merged = first.agents["solo"].policy.merge_and_unload()
        saved = tmp_path / "merged"
        merged.save_pretrained(saved)
        first.agents["solo"].save_tokenizer(saved)

    second = solo(tmp_path / "second", str(saved), tokenizer=None)
    agent = second.agents["solo"]
    assert agent.is_adapter == (kind == "lora")
    trained = [name for name, parameter in agent.policy.named_parameters() if parameter.requires_grad]
    assert trained and all(("lora_" in name) == (kind == "lora") for name in trained)
    ids = torch.tensor([tiny.tokenizer("qwen")("akz=3,8").input_ids])
    with torch.no_grad():
        reference = first.agents["solo"].policy if kind != "merged" else merged
        expected, found = (model.eval()(input_ids=ids).logits for model in (reference, agent.policy))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    second.train()


def test_what_is_saved_ends_answers_as_training_did(tmp_path, folder):
    """Also with an `eos_token` of the agent's own, and with the further stops that its model declares."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    comma = tiny.tokenizer("qwen").convert_tokens_to_ids(",")
    model.generation_config.eos_token_id = [1, comma]
    agents = [{"name": "solo", "model_name_or_path": str(folder), "eos_token": ";"}]
    model.save_pretrained(folder)
    trainer = solo(tmp_path, None, tokenizer=None, agents=agents)
    semicolon = trainer.agents["solo"].end_of_turn_id
    trainer.save_model(str(tmp_path / "saved"))
    saved = json.loads((tmp_path / "saved" / "solo" / "generation_config.json").read_text())
    assert sorted(saved["eos_token_id"]) == sorted({1, comma, semicolon}) == trainer.agents["solo"].stop_token_ids
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "solo")
    assert again.config.eos_token_id == semicolon


# ---- the KL term of an adapter that was trained before -------------------------------------------------------------
@pytest.mark.parametrize("given", ["folder", "model"])
def test_the_kl_is_to_the_adapter_as_it_came(tmp_path, folder, given):
    torch.manual_seed(0)
    before = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), lora(init_lora_weights=False))
    before.save_pretrained(tmp_path / "adapter")
    model = str(tmp_path / "adapter") if given == "folder" else before
    trainer = solo(tmp_path, model, beta=0.5, max_steps=2)
    assert set(trainer.agents["solo"].policy.peft_config) == {"default", "ref"}
    start = {n: p.detach().clone() for n, p in trainer.agents["solo"].policy.named_parameters() if ".ref." in n}
    trainer.train()
    kl = [log["solo/kl"] for log in trainer.state.log_history if "solo/kl" in log]
    assert kl[0] == pytest.approx(0.0, abs=1e-7) and kl[1] > 1e-6
    policy = trainer.agents["solo"].policy
    assert all(torch.equal(p, start[n]) for n, p in policy.named_parameters() if ".ref." in n)
    assert policy.active_adapter == "default"
    trainer.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "solo" / "ref").exists()
    saved = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "saved" / "solo")
    trained = {n: p for n, p in policy.named_parameters() if ".default." in n}
    assert all(torch.equal(p, trained[n]) for n, p in saved.named_parameters() if ".default." in n)


def test_a_fresh_adapter_needs_no_copy(tmp_path, folder):
    trainer = solo(tmp_path, str(folder), peft_configs={"solo": lora()}, beta=0.5, max_steps=1)
    assert set(trainer.agents["solo"].policy.peft_config) == {"default"}


# ---- torch.compile --------------------------------------------------------------------------------------------------
def test_a_compiled_run_is_saved_without_the_compilers_names_and_resumes(tmp_path, folder):
    settings = {"torch_compile": True, "torch_compile_backend": "eager", "save_strategy": "steps", "save_steps": 2}
    whole = solo(tmp_path / "whole", str(folder), tokenizer=None, max_steps=4, **settings)
    whole.train()
    checkpoint = tmp_path / "whole" / "out" / "checkpoint-2"
    _, info = AutoModelForCausalLM.from_pretrained(checkpoint / "solo", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    resumed = solo(tmp_path / "resumed", str(folder), tokenizer=None, max_steps=4, **settings)
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert torch.equal(tiny.parameters(whole, "solo"), tiny.parameters(resumed, "solo"))


@pytest.mark.parametrize("broken", ["missing", "unexpected", "adapter"])
def test_weights_that_are_not_the_agents_are_refused_when_resuming(tmp_path, folder, broken):
    from safetensors.torch import load_file, save_file

    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2}
    adapter = {"peft_configs": {"solo": lora()}} if broken == "adapter" else {}
    solo(tmp_path, str(folder), tokenizer=None, **adapter, **settings).train()
    checkpoint = tmp_path / "out" / "checkpoint-1"
    name = "adapter_model.safetensors" if broken == "adapter" else "model.safetensors"
    weights = load_file(checkpoint / "solo" / name)
    key = next(iter(weights))
    value = weights.pop(key)
    if broken == "unexpected":
        weights |= {key: value, f"_orig_mod.{key}": value.clone()}
    save_file(weights, checkpoint / "solo" / name, metadata={"format": "pt"})
    seal(checkpoint)
    expected = "does not know 1 .*_orig_mod" if broken == "unexpected" else f"lacks 1 .*{key.split('.')[-2]}"
    with pytest.raises(ValueError, match=rf"Agent 'solo': the weights in the checkpoint.*{expected}"):
        solo(tmp_path, str(folder), tokenizer=None, **adapter, **settings).train(
            resume_from_checkpoint=str(checkpoint)
        )


# ---- revisions ------------------------------------------------------------------------------------------------------
def test_a_revision_is_the_models_and_not_another_repositorys(tmp_path, folder, monkeypatch):
    from hacpo_trl import loading

    asked = {}

    def recording(kind, function):
        def wrapped(path, *args, **kwargs):
            asked.setdefault(kind, []).append((str(path), kwargs.get("revision")))
            return function(path, *args, **{k: v for k, v in kwargs.items() if k != "revision"})

        return wrapped

    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", recording("config", loading.AutoConfig.from_pretrained))
    monkeypatch.setattr(
        loading.AutoTokenizer, "from_pretrained", recording("tokenizer", loading.AutoTokenizer.from_pretrained)
    )
    monkeypatch.setattr(loading, "create_model_from_path", recording("model", loading.create_model_from_path))
    other = tmp_path / "tokenizer"
    tiny.tokenizer("qwen").save_pretrained(other)
    for tokenizer_path, expected in ((None, "v2"), (str(other), "main")):
        asked.clear()
        agent = {"name": "solo", "model_name_or_path": str(folder), "model_init_kwargs": {"revision": "v2"}}
        solo(tmp_path, None, tokenizer=None, agents=[{**agent, "tokenizer_name_or_path": tokenizer_path}])
        assert asked["config"][0] == (str(folder), "v2") and asked["model"] == [(str(folder), "v2")]
        assert asked["tokenizer"] == [(tokenizer_path or str(folder), expected)]


# ---- what cannot be trained is refused ------------------------------------------------------------------------------
def classifier():
    return AutoModelForSequenceClassification.from_config(tiny.policy("qwen").config)


def encoder():
    return BertModel(BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8))


def seq2seq():
    return T5ForConditionalGeneration(T5Config(d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2))


def half():
    return tiny.policy("qwen").half()


def frozen():
    return tiny.policy("qwen").requires_grad_(False)


def frozen_adapter():
    return get_peft_model(tiny.policy("qwen"), lora(inference_mode=True))


def quantized():
    model = tiny.policy("qwen")
    model.is_quantized = True
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (classifier, "Qwen3ForSequenceClassification, which generates no text"),
        (encoder, "BertModel, which generates no text"),
        (seq2seq, "t5 is an encoder with a decoder"),
        (half, "its weights are float16"),
        (frozen, "none of its parameters can be trained. Let some"),
        (frozen_adapter, "none of its parameters can be trained. Load it with is_trainable=True"),
        (quantized, "quantized, and cannot be trained in full. Give it a peft_config"),
        (lambda: torch.nn.Linear(2, 2), "Linear, which generates no text"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_model_that_cannot_be_trained_is_refused(tmp_path, make, message):
    with pytest.raises(ValueError, match=f"Agent 'solo'.*{message}"):
        solo(tmp_path, make())


@pytest.mark.parametrize(
    ("make", "message"),
    [(classifier, "generates no text"), (seq2seq, "encoder with a decoder")],
    ids=["classifier", "seq2seq"],
)
def test_the_same_from_a_folder(tmp_path, make, message):
    make().save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match=f"Agent 'solo'.*{message}"):
        solo(tmp_path, str(tmp_path / "model"))


def test_a_config_without_architectures_is_refused(tmp_path, folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(ValueError, match=r"Agent 'solo': its model's config names no architectures"):
        solo(tmp_path, str(folder))


def test_a_model_with_an_adapter_gets_no_other(tmp_path):
    with pytest.raises(ValueError, match="Agent 'solo': its model has an adapter already"):
        solo(tmp_path, get_peft_model(tiny.policy("qwen"), lora()), peft_configs={"solo": lora()})


def test_a_tokenizer_beyond_the_embedding_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"Agent 'solo': its tokenizer has the id 287, .* embedding only 258 rows"):
        solo(tmp_path, tiny.policy("qwen"), tokenizer="llama")


def test_bfloat16_weights_are_warned_of_with_the_share_that_moves(tmp_path, caplog):
    with caplog.at_level(logging.WARNING, logger="hacpo_trl.loading"):
        solo(tmp_path, tiny.policy("qwen").bfloat16(), learning_rate=1e-6)
    assert "trained tensors are bfloat16" in caplog.text and "learning_rate=1e-06" in caplog.text
    # By hand: an update of 1e-6 is lost on a weight of 1, moves one of 1e-5; one of 1e-3 moves up to about half.
    weights = torch.nn.Parameter(torch.tensor([1.0, 0.02, 1e-5, 0.0], dtype=torch.bfloat16))
    assert share_that_moves([weights], 1e-6) == 0.5
    assert share_that_moves([weights], 1e-3) == 0.75
    moved = weights.detach() + torch.tensor(1e-6).bfloat16()
    assert (moved != weights).tolist() == [False, False, True, True]


@pytest.mark.parametrize(
    ("path", "advice"),
    [
        ("./no/such/folder", "There is no such folder here"),
        ("/no/such/folder", "There is no such folder here"),
        ("Qwen/Qwen3-4B-Base", "not in the cache, and HF_HUB_OFFLINE"),
    ],
)
def test_a_model_that_cannot_be_loaded_names_agent_model_and_what_to_do(tmp_path, path, advice, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"Agent 'solo': its model '{path}' could not be loaded. .*{advice}"):
        solo(tmp_path, path)


def test_a_broken_folder_and_a_missing_tokenizer_are_named(tmp_path, folder):
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match=r"Agent 'solo': its tokenizer has no tokens but special ones"):
        solo(tmp_path, str(folder), tokenizer=None)
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"Agent 'solo': its tokenizer .* could not be loaded. The folder is there"):
        solo(tmp_path, str(folder), tokenizer=None)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"Agent 'solo': its model .* could not be loaded. The folder is there"):
        solo(tmp_path, str(folder))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"models": "Qwen/Qwen3-4B"}, "models must be a mapping .* not a str"),
        ({"models": [1]}, "models must be a mapping .* not a list"),
        ({"models": {"solo": 3}}, "Agent 'solo': its model must be an id, a path or a loaded model, not a int"),
        ({"processing_classes": "tokenizer"}, "processing_classes must be a mapping .* not a str"),
        ({"peft_configs": lora()}, "peft_configs must be a mapping .* not a LoraConfig"),
        ({"processing_classes": {"solo": "path"}}, "Agent 'solo': its tokenizer must be transformers', not a str"),
    ],
    ids=str,
)
def test_arguments_of_the_wrong_kind(tmp_path, arguments, message):
    given = {
        "models": {"solo": tiny.policy("qwen")},
        "processing_classes": {"solo": tiny.tokenizer("qwen")},
        **arguments,
    }
    dataset = Dataset.from_dict({"prompt": ["a"] * 8, "answer": ["b"] * 8})
    with pytest.raises(TypeError, match=message):
        HACPOTrainer(
            given["models"],
            tiny.partial_reward,
            tiny.config(tmp_path),
            dataset,
            processing_classes=given["processing_classes"],
            peft_configs=given.get("peft_configs"),
        )
