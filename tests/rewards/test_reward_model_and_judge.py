"""Reward models and judges behind HTTP, as reward functions."""

import asyncio
import email.utils
import json
import threading
import time
import traceback
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
class Server(ThreadingHTTPServer):
    request_queue_size = 64  # more connections at one time would be reset


class Judge:
    """A judge on this machine. `script` tells for the n-th request about a text the status, with which goes the text's
    length; or status, headers and the parts of the body."""

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
                reply = script(body["text"], attempt)
                answer = json.dumps({"score": len(body["text"]), "gold": body["gold"]}).encode()
                status, headers, parts = reply if isinstance(reply, tuple) else (reply, {}, [answer])
                if reply == 429:
                    headers = {"Retry-After": "0"}
                with lock:
                    judge.under_way -= 1
                self.send_response(status)
                for name, value in ({"Content-Length": len(answer)} if reply is status else headers).items():
                    self.send_header(name, str(value))
                self.end_headers()
                try:
                    for part in parts:
                        self.wfile.write(part)
                        self.wfile.flush()
                except OSError:
                    pass  # the other end has given up

            def log_message(self, *args):
                pass

        self.server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/judge"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()


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


FAULTS = {
    "500": 500,
    "501": 501,
    "505": 505,
    "522": 522,
    "599": 599,
    "a page": (200, {"Content-Type": "text/html"}, [b"<html>Bad gateway</html>"]),
    "nothing": (200, {}, []),
    "half of it": (200, {}, [b'{"score": 1, "go']),
    "less than announced": (200, {"Content-Length": 100}, [b'{"score": 1}']),
    "no text": (200, {}, [b"\xff\xfe\x00"]),
    "not compressed": (200, {"Content-Encoding": "gzip"}, [b"{}"]),
    "nested": (200, {}, [b"[" * 100_000]),
    "a list": (200, {}, [b"[]"]),
    "null": (200, {}, [b"null"]),
    "other keys": (200, {}, [b'{"error": "overloaded"}']),
    "a word": (200, {}, [b'{"score": "good", "gold": 1}']),
    "a digit in quotes": (200, {}, [b'{"score": "4", "gold": 1}']),
    "NaN": (200, {}, [b'{"score": NaN, "gold": 1}']),
    "infinity": (200, {}, [b'{"score": Infinity, "gold": 1}']),
    "a huge number": (200, {}, [b'{"score": 1' + b"0" * 400 + b', "gold": 1}']),
    "more than a float32": (200, {}, [b'{"score": 1e39, "gold": 1}']),
    "an object": (200, {}, [b'{"score": {}, "gold": 1}']),
}


def test_a_fault_of_the_judge_is_no_verdict_on_that_answer(judge_of, caplog):
    """And not the end of the batch."""
    judge, reward = judge_of(lambda text, attempt: FAULTS.get(text, 200), max_retries=1)
    prompts, counted = [*FAULTS, "right"], {}
    verdicts = asyncio.run(
        reward(
            prompts=prompts,
            completions=[""] * len(prompts),
            gold=[1] * len(prompts),
            log_metric=counted.__setitem__,
        )
    )
    assert dict(zip(prompts, verdicts, strict=True)) == {**dict.fromkeys(FAULTS), "right": 5}
    assert counted == {"http_judge/failures": float(len(FAULTS))}
    [warning] = [record.getMessage() for record in caplog.records if record.name.endswith("http_judge")]
    assert f"{len(FAULTS)} of {len(prompts)}" in warning and "first reason: status 500, after 2 tries" in warning
    # A fault may pass; a malformed reply would come again.
    asked = {text: judge.seen.count(text) for text in prompts}
    assert {text for text in asked if asked[text] == 2} == {
        "500", "501", "505", "522", "599", "less than announced", "not compressed"
    }  # fmt: skip


@pytest.mark.parametrize("raised", [KeyError, IndexError, TypeError, ValueError, AttributeError])
def test_a_reply_that_the_verdict_cannot_read_is_none(judge_of, caplog, raised):
    _, reward = judge_of(lambda text, attempt: 200)

    def verdict(response):
        if response["score"] == 3:
            raise raised("of this reply")
        return response["score"]

    reward.verdict = verdict
    assert asyncio.run(reward(prompts=["a", "bb"], completions=["1", "2"], gold=[1, 1])) == [2, None]
    assert f"malformed ({raised.__name__}:" in caplog.text and "of this reply" in caplog.text


def test_a_fault_of_the_functions_is_an_error(judge_of):
    _, reward = judge_of(lambda text, attempt: 200)
    reward.verdict = lambda response: undefined  # noqa: F821
    with pytest.raises(NameError):
        asyncio.run(reward(prompts=["a"], completions=["1"], gold=[1]))
    reward.request = lambda *row, gold: {"x": float("nan")}
    with pytest.raises(ValueError, match="not JSON compliant"):
        asyncio.run(reward(prompts=["a"], completions=["1"], gold=[1]))


def drip(seconds):
    """White space for as long as this, which never makes a reply."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        yield b" "
        time.sleep(0.05)


def test_a_judge_that_drips_is_given_up_within_its_limit(judge_of, caplog):
    judge, reward = judge_of(lambda text, attempt: (200, {}, drip(3.0)), timeout=0.3, max_retries=1)
    start = time.perf_counter()
    assert asyncio.run(reward(prompts=["a"], completions=["1"], gold=[1])) == [None]
    assert 0.5 < time.perf_counter() - start < 1.5
    assert judge.seen == ["a1"] * 2
    assert "no whole reply within 0.3 seconds, after 2 tries" in caplog.text


def test_all_tries_of_a_request_have_a_limit_together(judge_of, caplog):
    judge, reward = judge_of(lambda text, attempt: (200, {}, drip(3.0)), timeout=0.3, total_timeout=0.5, max_retries=9)
    start = time.perf_counter()
    assert asyncio.run(reward(prompts=["a"], completions=["1"], gold=[1])) == [None]
    assert 0.4 < time.perf_counter() - start < 1.0
    assert judge.seen == ["a1"] * 2
    # Waits count, and there is none that would end too late.
    judge, reward = judge_of(lambda text, attempt: 503, total_timeout=0.5, backoff=10.0)
    start = time.perf_counter()
    assert asyncio.run(reward(prompts=["a"], completions=["1"], gold=[1])) == [None]
    assert time.perf_counter() - start < 0.4 and "status 503, after 1 tries" in caplog.text
    with pytest.raises(ValueError, match="total_timeout > 0"):
        HTTPJudge(judge.url, dict, float, total_timeout=0.0)


def test_waiting_for_other_requests_does_not_count(judge_of):
    _, reward = judge_of(lambda text, attempt: 200, delay=0.15, max_concurrency=1, timeout=0.4, total_timeout=0.4)
    numbers = [str(i) for i in range(5)]
    assert asyncio.run(reward(prompts=numbers, completions=numbers, gold=[1] * 5)) == [2] * 5


def of_date(seconds):
    return email.utils.formatdate(time.time() + seconds, usegmt=True)


@pytest.mark.parametrize(
    ("given", "least", "most"),
    [
        (lambda: "1", 0.9, 1.5),
        (lambda: "100000", 0.3, 0.7),  # as much as is allowed
        (lambda: of_date(100_000), 0.3, 0.7),
        (lambda: of_date(2), 0.9, 2.5),
        (lambda: of_date(-100), 0.0, 0.2),
        (lambda: "-5", 0.0, 0.2),  # neither a number of seconds nor a date
        (lambda: "\xb2", 0.0, 0.2),
        (lambda: "nan", 0.0, 0.2),
        (lambda: "Fri, 99 Foo 99999999 99:99:99 GMT", 0.0, 0.2),
    ],
    ids=["seconds", "many seconds", "far date", "date", "past date", "negative", "superscript", "nan", "no date"],
)
def test_retry_after_is_heeded_up_to_a_limit(judge_of, monkeypatch, given, least, most):
    if most < 0.9 and least:
        monkeypatch.setattr("hacpo_trl.rewards.http_judge.MAX_RETRY_AFTER_SECONDS", 0.3)
    judge, reward = judge_of(lambda text, attempt: 200 if attempt else (503, {"Retry-After": given()}, []))
    start = time.perf_counter()
    assert asyncio.run(reward(prompts=["a"], completions=["1"], gold=[1])) == [2]
    assert least < time.perf_counter() - start < most
    assert judge.seen == ["a1"] * 2


def test_no_key_is_shown(judge_of, caplog):
    """Neither of the url nor of a header, in a warning or an error."""
    secret = "sk-12345-secret"
    headers = {"Authorization": f"Bearer {secret}-3"}
    failing, refusing = (judge_of(lambda text, attempt, s=status: s)[0].url for status in (503, 401))
    echoing = judge_of(lambda text, attempt: (200, {}, [f'{{"error": "not {secret}-3"}}'.encode()]))[0].url
    verdict = lambda response: float(response["error"])  # noqa: E731
    caplog.set_level("WARNING")
    for url in (failing, refusing, echoing, "http://127.0.0.1:9/", "ftp://127.0.0.1/"):
        url = url.replace("://", f"://user:{secret}-1@") + f"?key={secret}-2#{secret}-4"
        judge = HTTPJudge(url, lambda *row: {"text": "", "gold": 1}, verdict, headers, max_retries=0)
        assert secret not in repr(judge)
        if refusing in url.replace(f"user:{secret}-1@", ""):
            with pytest.raises(httpx.HTTPStatusError, match="401") as caught:
                asyncio.run(judge(prompts=["a"], completions=["1"]))
            error = caught.value
            shown = "".join(traceback.format_exception(error))
            assert refusing in str(error) and error.response.status_code == 401
            assert not any(secret in text for text in (str(error), repr(error), shown, repr(error.request)))
            assert secret not in str(error.request.headers) and secret not in str(error.response.request.url)
        else:
            assert asyncio.run(judge(prompts=["a"], completions=["1"])) == [None]
    assert len(caplog.records) == 4 and "127.0.0.1" in caplog.text
    assert secret not in caplog.text
    for value in (f"Bearer {secret}\n", f"Bearer {secret}\u2026"):
        with pytest.raises(ValueError, match="cannot send the header 'Authorization'") as refused:
            HTTPJudge(failing, dict, float, {"Authorization": value})
        assert secret not in "".join(traceback.format_exception(refused.value))


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
