"""What is sampled is what is scored: no setting beside the options, every stop known, no dropout in between."""

import logging

import pytest
import tiny
import torch
from peft import LoraConfig
from real_tokenizers import llama_tokenizer, qwen_tokenizer
from tiny_agents import run_config, tiny_agent

from hacpo_trl import HACPOTrainer
from hacpo_trl.embedded import conv_dataset
from hacpo_trl.generation.backend import Completion, GenerationRequest, completion_of
from hacpo_trl.generation.transformers_generation import TransformersGeneration
from hacpo_trl.options.generation import NO_SAMPLE, OPTION_FOR, TRAINERS
from hacpo_trl.rewards import think_format_reward


# ---- generation_kwargs --------------------------------------------------------------------------------------------
@pytest.mark.parametrize("key", [*OPTION_FOR, *NO_SAMPLE, *TRAINERS])
@pytest.mark.parametrize("of_agent", [False, True])
def test_what_has_an_option_of_its_own_is_refused_by_name(key, of_agent):
    settings = {"generation_kwargs": {key: 1}}
    whose = ""
    if of_agent:
        whose, settings = "Agent 'qwen': ", {"agents": [{"name": "qwen", **settings}]}
    with pytest.raises(ValueError, match=f"^{whose}generation_kwargs has '{key}'") as error:
        run_config(**settings)
    assert OPTION_FOR.get(key, "") in str(error.value)


def test_names_that_generation_does_not_know_are_refused():
    with pytest.raises(ValueError, match=r"unknown key 'typicalp'. Did you mean 'typical_p'"):
        run_config(generation_kwargs={"typicalp": 0.5})
    assert run_config(generation_kwargs={"typical_p": 0.5, "no_repeat_ngram_size": 3})
    with pytest.raises(ValueError, match="transformers calls it 'stop_strings'"):
        run_config(generation_kwargs={"stop": ["."]})
    with pytest.raises(ValueError, match="stop_strings must be a text or a list of texts"):
        run_config(generation_kwargs={"stop_strings": [3]})


# ---- stop strings -------------------------------------------------------------------------------------------------
def sampled(agent, prompts, seed=0):
    class Engine:
        device, is_fsdp2 = torch.device("cpu"), False

    class Accelerator(Engine):
        state = type("State", (), {"deepspeed_plugin": None})()

        def unwrap_model(self, model, **kwargs):
            return model

    backend = TransformersGeneration({"agent": agent}, lambda name: (Accelerator(), agent.policy), True)
    request = GenerationRequest([agent.tokenizer(prompt).input_ids for prompt in prompts], 4, seed)
    return backend.generate({"agent": request})["agent"]


def test_a_stop_string_ends_an_answer_and_is_known_to_the_trainer():
    """By transformers' generate itself: its padding is cut off, and the answer counts as ended, by no stop token."""
    agent = tiny_agent(
        "agent",
        tiny.tokenizer("llama"),
        tiny.policy("llama"),
        run_config(max_completion_length=48, generation_kwargs={"stop_strings": ["e", "7,"]}),
    )
    answers = sampled(agent, ["abc=", "ab="], seed=1)
    kinds = {answer.finish_reason for answer in answers}
    assert "stop_string" in kinds
    for answer in answers:
        text = agent.tokenizer.decode(answer.ids, skip_special_tokens=True)
        ended = [string for string in ("e", "7,") if string in text]
        assert bool(ended) == (answer.finish_reason == "stop_string")
        if ended:
            before = agent.tokenizer.decode(answer.ids[:-1])
            assert not any(string in before for string in ("e", "7,")), "it was not the first"
            assert agent.tokenizer.pad_token_id not in answer.ids


@pytest.mark.parametrize(
    ("text", "tail", "expected"),
    [
        ("3,8;x", [], (4, "stop_string")),  # cut where the string is complete
        ("3,8", ["<eos>"], (4, "stop")),
        ("3,8", ["<pad>", "<pad>"], (5, "length")),
        ("3,;", ["<eos>"], (3, "stop_string")),
    ],
)
def test_the_first_of_both_kinds_of_stops_counts(text, tail, expected):
    tokenizer = tiny.tokenizer("qwen")
    agent = tiny_agent("agent", tokenizer, args=run_config(generation_kwargs={"stop_strings": ";"}))
    ids = [*tokenizer(text).input_ids, *tokenizer.convert_tokens_to_ids(tail)]
    completion = completion_of(agent, ids, [-1.0] * len(ids))
    assert (len(completion.ids), completion.finish_reason) == expected
    assert len(completion.logps) == expected[0]


def test_an_answer_that_a_string_ended_gets_no_end_of_turn_token(tmp_path):
    """On neither side: the source's sum has none, and what the learner scores has none."""

    class Stopping(tiny.ScriptedGeneration):
        def answer(self, name, prompt, number):
            ids = tuple(self.tokenizers[name]("3,8;").input_ids)
            return Completion(ids, "stop_string")

    names = ["qwen", "llama"]
    trainer = tiny.trainer(
        tmp_path,
        generation=Stopping(names),
        generation_kwargs={"stop_strings": [";"]},
        mask_truncated_completions=True,
    )
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])
    for name in names:
        expected = trainer.agents[name].tokenizer("3,8;").input_ids
        assert all(row.completion_ids == expected and not row.is_masked for row in rows[name])
    logged = trainer.metrics.reduce()
    assert logged["qwen/completions/clipped_ratio"] == 0.0


# ---- dropout ------------------------------------------------------------------------------------------------------
def with_dropout(tmp_path, **settings):
    adapter = LoraConfig(
        r=4, target_modules="all-linear", task_type="CAUSAL_LM", lora_dropout=0.5, init_lora_weights=False
    )
    return tiny.trainer(
        tmp_path,
        names=("qwen",),
        peft_configs={"qwen": adapter},
        per_device_train_batch_size=8,
        max_steps=1,
        **settings,
    )


def test_before_any_update_own_ratios_are_one(tmp_path, caplog):
    trainer = with_dropout(tmp_path)
    trainer.train()
    log = trainer.state.log_history[0]
    assert log["qwen/own_ratio/min"] == pytest.approx(1.0, abs=1e-5) == log["qwen/own_ratio/max"]
    with caplog.at_level(logging.WARNING, logger="hacpo_trl.loading"):
        kept = with_dropout(tmp_path, disable_dropout=False)
    assert "Agent 'qwen': dropout of 0.5 stays on" in caplog.text and "clipped" in caplog.text
    kept.train()
    log = kept.state.log_history[0]
    assert log["qwen/own_ratio/max"] - log["qwen/own_ratio/min"] > 1e-3


# ---- special tokens and rewards -----------------------------------------------------------------------------------
@pytest.mark.parametrize(("see", "expected"), [(False, "38"), (True, "3<pad>8")])
def test_reward_functions_may_ask_for_special_tokens(tmp_path, see, expected):
    seen = []

    class WithTags(tiny.ScriptedGeneration):
        def answer(self, name, prompt, number):
            tokenizer = self.tokenizers[name]
            ids = [
                *tokenizer("3").input_ids,
                tokenizer.pad_token_id,
                *tokenizer("8").input_ids,
                tokenizer.eos_token_id,
            ]
            return Completion(tuple(ids), "stop")

    def reward(completions, **kwargs):
        seen.extend(completions)
        return [float(i) for i in range(len(completions))]

    trainer = tiny.trainer(
        tmp_path, generation=WithTags(["qwen", "llama"]), reward_funcs=reward, rewards_see_special_tokens=see
    )
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(4)])
    assert set(seen) == {expected}
    # Two different events for source and learner: own answers are trained on, peers' are not.
    assert all(row.in_loss == row.is_own for row in rows["qwen"])
    assert trainer.metrics.reduce()["qwen/dropped/undecodable"] == 8


# ---- an answer that the prompt begins -----------------------------------------------------------------------------
@pytest.mark.parametrize("make", [qwen_tokenizer, llama_tokenizer])
def test_a_message_of_the_assistant_is_continued(make):
    agent = tiny_agent("agent", make())
    user = {"role": "user", "content": "2+2?"}
    begun = [user, {"role": "assistant", "content": "<think>"}]
    text = agent.tokenizer.decode(agent.encode_prompt(begun))
    assert text.endswith("<think>")
    assert text.startswith(agent.tokenizer.decode(agent.encode_prompt([user])))
    # The reward's idea of an open tag agrees: the answer goes on within it.
    assert think_format_reward(["so</think>4", "<think>so</think>4"], prompts=[begun, begun]) == [1.0, 0.0]


def test_a_continued_message_is_trained_on(tmp_path):
    dataset = conv_dataset("train", 8).map(
        lambda row: {"prompt": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": "3,"}]}
    )
    names = ("qwen", "llama")
    trainer = HACPOTrainer(
        {name: tiny.policy(name) for name in names},
        lambda completions, **kwargs: [float(len(c[0]["content"])) for c in completions],
        tiny.config(tmp_path, agents=[{"name": name, "chat_template": "plain"} for name in names]),
        dataset,
        processing_classes={name: tiny.tokenizer(name) for name in names},
    )
    trainer.train()
    assert (
        trainer.agents["qwen"]
        .tokenizer.decode(trainer.agents["qwen"].encode_prompt(dataset[0]["prompt"]))
        .endswith("3,")
    )
