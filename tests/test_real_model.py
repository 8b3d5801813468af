"""A real chat model beside a tiny one: SmolLM2-135M-Instruct and the miniature's Llama, on GSM8K.

SmolLM2 answers through its chat template, the tiny agent gets the plain text of the same conversation.
"""

import json
import os

import pytest
import tiny
import torch
from datasets import Dataset
from real_model import smollm2_path
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from trl.rewards import accuracy_reward

from hacpo_trl import HACPOConfig, HACPOTrainer


pytestmark = pytest.mark.slow


def brevity_reward(completions, **kwargs) -> list[float]:
    """Something to learn for models that solve nothing: to be brief."""
    return [1 / (1 + len(completion[0]["content"])) for completion in completions]


@pytest.fixture(scope="module", autouse=True)
def all_cores():
    """This worker's share of the cores: threads that wait for each other are slow where there are too many."""
    threads = torch.get_num_threads()
    torch.set_num_threads(max(1, os.cpu_count() // int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))))
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def smollm2(request):
    return smollm2_path(request.config.cache.mkdir("models"))


@pytest.fixture
def trainer(tmp_path, repository, smollm2):
    problems = [json.loads(line) for line in (repository / "tests" / "data" / "gsm8k.jsonl").read_text().splitlines()]
    prompts = Dataset.from_list(
        [{"prompt": [{"role": "user", "content": p["problem"]}], "solution": f"${p['answer']}$"} for p in problems]
    )
    tiny_tokenizer = tiny.tokenizer("llama")
    tiny_tokenizer.model_max_length = 2048
    torch.manual_seed(0)
    tiny_policy = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tiny_tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=2048,
            eos_token_id=tiny_tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
    args = HACPOConfig(
        str(tmp_path),
        agents=[{"name": "smollm2", "top_p": 0.9}, {"name": "tiny", "chat_template": "plain", "learning_rate": 1e-3}],
        prompts_per_step=2,
        num_generations=2,
        per_device_train_batch_size=8,
        max_completion_length=16,
        learning_rate=1e-5,
        max_steps=2,
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
    )
    return HACPOTrainer(
        {"smollm2": AutoModelForCausalLM.from_pretrained(smollm2), "tiny": tiny_policy},
        [accuracy_reward, brevity_reward],
        args,
        prompts,
        processing_classes={"smollm2": AutoTokenizer.from_pretrained(smollm2), "tiny": tiny_tokenizer},
    )


def test_a_real_chat_model_trains_beside_a_tiny_one(trainer):
    """Two steps; both agents move, on own and on exchanged answers."""
    before = {name: tiny.parameters(trainer, name).clone() for name in trainer.agents}
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert len(logs) == 2
    for name in trainer.agents:
        assert not torch.equal(tiny.parameters(trainer, name), before[name])
        assert all(torch.isfinite(torch.tensor(log["loss"])) for log in logs)
        assert logs[0][f"{name}/own_ratio/mean"] == pytest.approx(1.0, abs=1e-4)
    # SmolLM2's English is in reach of a byte-level tokenizer: the tiny agent can use all of it.
    assert "tiny/dropped/undecodable" not in logs[0]
    assert logs[0]["tiny/cross_ratio/mean"] < 1


def test_one_exchanged_answer_as_each_side_sees_it(trainer):
    """Text, tokens and log-probabilities on both sides; printed with `pytest -s`, quoted in docs/exchange.md."""
    rows = trainer._collect_rows([trainer.train_dataset[i] for i in range(2)])
    source = next(row for row in rows["smollm2"] if row.is_own)
    seen = next(row for row in rows["tiny"] if not row.is_own)
    smol, small = trainer.agents["smollm2"].tokenizer, trainer.agents["tiny"].tokenizer
    text, decodable = trainer.agents["smollm2"].decode(source.completion_ids)
    assert decodable
    ended = source.completion_ids[-1] in trainer.agents["smollm2"].stop_token_ids
    expected = [*small(text).input_ids, *([small.eos_token_id] if ended else [])]
    assert seen.completion_ids == expected
    assert seen.old_logprob_sum == source.old_logprob_sum and seen.old_num_tokens == len(source.completion_ids)
    assert small.decode(seen.prompt_ids) == trainer.train_dataset[0]["prompt"][0]["content"]
    assert smol.decode(source.prompt_ids).endswith("<|im_start|>assistant\n")
    logp = trainer.scorer.score("tiny", [seen.prompt_ids], [seen.completion_ids])[0].sum()

    table = Table("", "source: SmolLM2-135M-Instruct", "learner: the tiny Llama", title=f"Answer: {text!r}")
    table.add_row("prompt, tokens", str(len(source.prompt_ids)), str(len(seen.prompt_ids)))
    table.add_row("answer, tokens", str(len(source.completion_ids)), str(len(seen.completion_ids)))
    table.add_row("log-probability, nats", f"{source.old_logprob_sum:.2f}", f"{float(logp):.2f}")
    log_ratio = (float(logp) - source.old_logprob_sum) / len(source.completion_ids)
    table.add_row("log s (Eq. 11)", "", f"{log_ratio:.2f}")
    Console(width=110).print(table)
    assert float(logp) < source.old_logprob_sum < 0
