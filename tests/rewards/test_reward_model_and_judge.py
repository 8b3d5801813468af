"""Reward models and judges behind HTTP, as reward functions."""

import asyncio
import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
import tiny
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from hacpo_trl.rewards import HTTPJudge, RewardModel
from hacpo_trl.rewards.verification import Verifier


# ---- reward models --------------------------------------------------------------------------------------------------
def classifier(seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=len(tiny.tokenizer("qwen")), num_labels=1, max_position_embeddings=64, **sizes)
    return LlamaForSequenceClassification(config)


def test_a_reward_model_scores_prompt_and_completion_without_padding_in_the_way():
    """In a batch of unequal lengths each text gets the logit that it gets alone."""
    model, tokenizer = classifier(), tiny.tokenizer("qwen")
    reward = RewardModel(model, tokenizer, batch_size=2)
    prompts, completions = ["a=", "bcd=", "e="], ["1", "2,3,4,5,6", ""]
    scores = reward(prompts=prompts, completions=completions, answer=["x"] * 3)
    for prompt, completion, score in zip(prompts, completions, scores, strict=True):
        ids = torch.tensor([tokenizer(prompt + completion).input_ids])
        assert score == pytest.approx(model(input_ids=ids).logits[0, 0].item(), abs=1e-6)
    assert len(set(scores)) == 3


def test_a_reward_model_renders_conversations_with_its_own_template():
    tokenizer = tiny.tokenizer("qwen")
    tokenizer.chat_template = "{% for m in messages %}[{{ m.role[0] }}:{{ m.content }}]{% endfor %}"
    model = classifier()
    prompt, completion = [{"role": "user", "content": "hi"}], [{"role": "assistant", "content": "yo"}]
    (score,) = RewardModel(model, tokenizer)(prompts=[prompt], completions=[completion])
    ids = torch.tensor([tokenizer("[u:hi][a:yo]").input_ids])
    assert score == pytest.approx(model(input_ids=ids).logits[0, 0].item(), abs=1e-6)


def test_reward_models_come_loaded_or_by_path_and_train(tmp_path):
    classifier().save_pretrained(tmp_path / "judge-1b")
    tiny.tokenizer("qwen").save_pretrained(tmp_path / "judge-1b")
    by_path = str(tmp_path / "judge-1b")
    loaded = LlamaForSequenceClassification.from_pretrained(by_path)
    verdicts = [
        Verifier([funcs, tiny.partial_reward], [1.0, 0.5])("qwen", ["a="], ["1"], [[1]], {"answer": ["1"]}, None)
        for funcs in (by_path, loaded)
    ]
    assert torch.equal(verdicts[0].total, verdicts[1].total)
    trainer = tiny.trainer(tmp_path / "run", reward_funcs=[by_path, tiny.partial_reward], max_steps=2)
    trainer.train()
    assert "qwen/rewards/judge-1b/mean" in trainer.state.log_history[0]


def test_a_reward_model_without_tokenizer_is_refused():
    with pytest.raises(ValueError, match="reward_processing_classes"):
        Verifier(classifier())
    with pytest.raises(ValueError, match="1 entries for 2 reward functions"):
        Verifier([classifier(), tiny.partial_reward], tokenizers=[tiny.tokenizer("qwen")])


# ---- judges ---------------------------------------------------------------------------------------------------------
class Judge:
    """A judge on this machine. `script` tells for the n-th request about a text the status; 200 echoes the text's
    length."""

    def __init__(self, script, delay=0.0):
        self.seen, self.under_way, self.most = [], 0, 0
        lock, judge = threading.Lock(), self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["content-length"])))
                with lock:
                    judge.under_way += 1
                    judge.most = max(judge.most, judge.under_way)
                    attempt = sum(text == body["text"] for text in judge.seen)
                    judge.seen.append(body["text"])
                time.sleep(delay)
                status = script(body["text"], attempt)
                answer = json.dumps({"score": len(body["text"]), "gold": body["gold"]}).encode()
                with lock:
                    judge.under_way -= 1
                self.send_response(status)
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/judge"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def judge_of():
    judges = []

    def make(script, delay=0.0, **settings):
        judges.append(Judge(script, delay))
        reward = HTTPJudge(
            judges[-1].url,
            request=lambda prompt, completion, gold: {"text": prompt + completion, "gold": gold},
            verdict=lambda response: response["score"] if response["gold"] else None,
            **{"backoff": 0.01, **settings},
        )
        return judges[-1], reward

    yield make
    for judge in judges:
        judge.server.shutdown()


def test_a_judge_is_asked_once_about_each_completion(judge_of):
    judge, reward = judge_of(lambda text, attempt: 200)
    verdicts = asyncio.run(reward(prompts=["a", "b", "c"], completions=["1", "22", "333"], gold=[1, 0, 1]))
    assert verdicts == [2, None, 4]
    assert sorted(judge.seen) == ["a1", "b22", "c333"]


def test_a_judge_that_is_overloaded_is_asked_again(judge_of):
    judge, reward = judge_of(lambda text, attempt: [429, 503, 200][attempt])
    assert asyncio.run(reward(prompts=["a"], completions=["1"], gold=[1])) == [2]
    assert judge.seen == ["a1"] * 3


def test_a_judge_that_stays_away_gives_no_verdict(judge_of, caplog):
    judge, reward = judge_of(lambda text, attempt: 500 if text == "b2" else 200, max_retries=1)
    counted = {}
    verdicts = asyncio.run(
        reward(prompts=["a", "b"], completions=["1", "2"], gold=[1, 1], log_metric=counted.__setitem__)
    )
    assert verdicts == [2, None]
    assert judge.seen.count("b2") == 2
    assert counted == {"http_judge/failures": 1.0}
    assert "1 of 2 completions got no verdict" in caplog.text and "after 2 tries" in caplog.text
    nobody = HTTPJudge("http://127.0.0.1:9/", lambda *args: {}, lambda r: 1.0, max_retries=1, backoff=0.01)
    assert asyncio.run(nobody(prompts=["a"], completions=["1"])) == [None]


def test_a_slow_judge_is_given_up_within_its_limit(judge_of):
    _, reward = judge_of(lambda text, attempt: 200, delay=1.5, timeout=0.2, max_retries=1)
    start = time.perf_counter()
    assert asyncio.run(reward(prompts=["a"], completions=["1"], gold=[1])) == [None]
    assert time.perf_counter() - start < 1.4


def test_a_refused_request_is_an_error(judge_of):
    judge, reward = judge_of(lambda text, attempt: 401)
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        asyncio.run(reward(prompts=["a"], completions=["1"], gold=[1]))
    assert judge.seen == ["a1"]


def test_no_more_requests_than_allowed_are_under_way(judge_of):
    judge, reward = judge_of(lambda text, attempt: 200, delay=0.05, max_concurrency=3)
    numbers = [str(i) for i in range(12)]
    asyncio.run(reward(prompts=numbers, completions=numbers, gold=[1] * 12))
    assert len(judge.seen) == 12 and 2 <= judge.most <= 3


def test_a_judge_works_as_a_reward_function_of_the_trainer(judge_of, tmp_path):
    """Beside another function, from the trainer's thread; the dataset's columns reach the request."""
    judge, _ = judge_of(lambda text, attempt: 200)
    reward = HTTPJudge(
        judge.url,
        request=lambda prompt, completion, answer, source: {"text": completion, "gold": answer},
        verdict=lambda response: response["score"],
    )
    trainer = tiny.trainer(tmp_path, reward_funcs=[reward, tiny.partial_reward], max_steps=2)
    trainer.train()
    # Two agents, one step of 4 prompts x 2 answers.
    assert len(judge.seen) == 16
    log = trainer.state.log_history[0]
    assert log["llama/rewards/http_judge/mean"] > 0 and log["llama/http_judge/failures"] == 0
