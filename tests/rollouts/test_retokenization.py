import copy
import json
import re
from datetime import date
from pathlib import Path

import pytest
import torch
from real_tokenizers import llama_tokenizer, qwen_tokenizer
from tiny_agents import run_config, tiny_agent, tiny_policy
from tokenizers import processors

from hacpo_trl.algorithm.objective import sequence_log_ratio
from hacpo_trl.generation.backend import completion_of
from hacpo_trl.learner import add_byte_lengths
from hacpo_trl.reporting.metrics import Metrics
from hacpo_trl.rollouts.retokenization import decode_completion, retokenize
from hacpo_trl.rollouts.rollout import Rollout
from hacpo_trl.rollouts.rows import learner_row


QWEN_END, LLAMA_END = "<|im_end|>", "<|eot_id|>"
ROWS = [
    json.loads(line)
    for line in (Path(__file__).parents[1] / "data" / "solutions.jsonl").read_text(encoding="utf-8").splitlines()
]
TEXTS = [row["text"] for row in ROWS]
SOLUTIONS = [row["text"] for row in ROWS if row["source"] == "GSM8K"]
MESSAGES = [{"role": "user", "content": "What is 6 x 7?"}]


@pytest.fixture(scope="module")
def policies():
    """The policies of both agents, their declared stop tokens those of the real models."""
    qwen, llama = tiny_policy(len(qwen_tokenizer())), tiny_policy(len(llama_tokenizer()))
    qwen.generation_config.eos_token_id = qwen_tokenizer().convert_tokens_to_ids([QWEN_END, "<|endoftext|>"])
    llama.generation_config.eos_token_id = llama_tokenizer().convert_tokens_to_ids(
        ["<|end_of_text|>", "<|eom_id|>", LLAMA_END]
    )
    return {"qwen": qwen, "llama": llama}


@pytest.fixture(scope="module")
def agents(policies):
    return {
        "qwen": tiny_agent("qwen", qwen_tokenizer(), policies["qwen"]),
        "llama": tiny_agent("llama", llama_tokenizer(), policies["llama"]),
    }


def sampled(agent, ids):
    """A rollout as the trainer makes it from sampled ids."""
    completion = completion_of(agent, ids)
    text, decodable = agent.decode(completion.ids)
    return Rollout(agent.name, "prompt", 0, completion.ids, text, decodable, completion.finish_reason, -1.0, 1.0, 0)


def written(agent, text, end=True):
    """A rollout whose agent wrote `text`, control tokens spelled out if it has any, and stopped if `end`."""
    ids = agent.tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    return sampled(agent, [*ids, agent.end_of_turn_id] if end else ids)


def seen_by(learner, rollout, prompt_ids=(1, 2, 3)):
    (view,) = learner.view([rollout], [list(prompt_ids)])
    return view


def decoded(agent, ids):
    return agent.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


# ---- real texts -----------------------------------------------------------------------------------------------------
def test_the_texts_are_worth_a_test():
    assert len(SOLUTIONS) == 12 and len(TEXTS) == 17
    together = "".join(TEXTS)
    assert re.search(r"\d{4}", together) and "\\frac" in together and "$" in together and "\n" in together
    assert not together.isascii()


def test_qwen_needs_a_fifth_more_tokens_for_worked_solutions():
    """On all of GSM8K's solutions it is 1.21 times Llama 3's count: the divisor of the sequence ratio is no detail."""
    counts = [
        sum(len(tokenizer(text, add_special_tokens=False).input_ids) for text in SOLUTIONS)
        for tokenizer in (qwen_tokenizer(), llama_tokenizer())
    ]
    assert 1.1 < counts[0] / counts[1] < 1.35


def test_three_divisors_of_the_sequence_ratio(agents, monkeypatch):
    """Solutions that both agents find equally likely, at a third of a nat a token of Llama's, read by Qwen."""
    views = [seen_by(agents["qwen"], written(agents["llama"], text)) for text in SOLUTIONS]
    rows = [learner_row("qwen", view, 1.0, 1.0, 0, False) for view in views]
    metrics = Metrics()
    for module in ("hacpo_trl.learner", "hacpo_trl.reporting.metrics"):
        monkeypatch.setattr(f"{module}.gather_object", lambda objects: objects)
    add_byte_lengths("qwen", {"llama": views}, {"llama": rows}, metrics)
    counts = torch.tensor([len(view.completion_ids) for view in views])
    old_counts = torch.tensor([row.old_num_tokens for row in rows])
    lengths = torch.tensor([row.byte_length for row in rows])
    sums = -old_counts / 3
    found = {
        normalization: sequence_log_ratio(sums, sums, counts, old_counts, normalization, lengths).exp()
        for normalization in ("source", "own", "bytes")
    }
    # Qwen counts more tokens, so that its mean is nearer to 0.
    assert 1.04 < found["own"].mean() < 1.08 and (found["own"] > 1).float().mean() > 0.9
    assert (found["source"] == 1).all() and (found["bytes"] == 1).all()
    # On the scale of the learner's tokens, whose total the lengths keep.
    assert lengths.sum() == pytest.approx(float(counts.sum()), rel=1e-6)
    num_bytes = sum(len(text.encode()) for text in SOLUTIONS)
    assert metrics.reduce()["qwen/bytes_per_token"] == pytest.approx(num_bytes / int(counts.sum()))
    for normalization, ratio in found.items():
        print(f"\n{normalization}: mean ratio {ratio.mean():.3f}, {(ratio > 1).float().mean():.0%} above 1", end="")


@pytest.mark.parametrize(("source", "learner"), [("qwen", "llama"), ("llama", "qwen")])
@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_real_texts_travel_exactly(agents, text, source, learner):
    rollout = written(agents[source], text)
    assert rollout.text == text and rollout.decodable and rollout.finish_reason == "stop"
    view = seen_by(agents[learner], rollout)
    assert view.dropped is None and view.rollout is rollout and view.prompt_ids == (1, 2, 3)
    assert view.completion_ids[-1] == agents[learner].end_of_turn_id
    assert decoded(agents[learner], view.completion_ids[:-1]) == text


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_digits_are_single_tokens_for_qwen_and_groups_of_three_for_llama(agents, text):
    def number_tokens(name):
        ids = seen_by(agents[name], written(agents["llama" if name == "qwen" else "qwen"], text)).completion_ids
        return [token for i in ids if (token := decoded(agents[name], [i])).isdigit()]

    numbers = re.findall(r"\d+", text)
    assert number_tokens("qwen") == [digit for number in numbers for digit in number]
    groups = [number[i : i + 3] for number in numbers for i in range(0, len(number), 3)]
    assert number_tokens("llama") == groups


def test_both_token_counts_of_a_number():
    # 80000 + 1234567: 12 digits, " + " in two tokens (" +", " "). Groups: 800 00 123 456 7.
    text = "80000 + 1234567"
    for tokenizer, count in ((qwen_tokenizer(), 12 + 2), (llama_tokenizer(), 5 + 2)):
        ((ids, same_text),) = retokenize(tokenizer, [text], [False], end_of_turn_id=7)
        assert len(ids) == count and same_text


# ---- own answers ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_own_ids_that_spell_a_word_letter_by_letter_stay(agents, name):
    agent, other = agents[name], agents["llama" if name == "qwen" else "qwen"]
    letters = [agent.tokenizer(letter, add_special_tokens=False)["input_ids"][0] for letter in "hello"]
    assert agent.tokenizer("hello", add_special_tokens=False)["input_ids"] != letters
    rollout = sampled(agent, [*letters, agent.end_of_turn_id])
    assert rollout.text == "hello"
    assert seen_by(agent, rollout).completion_ids == (*letters, agent.end_of_turn_id)
    # The peer sees the word as it would write it.
    whole = other.tokenizer("hello", add_special_tokens=False)["input_ids"]
    assert seen_by(other, rollout).completion_ids == (*whole, other.end_of_turn_id)


def test_a_view_keeps_the_order_of_own_and_foreign_rollouts(agents):
    qwen, llama = agents["qwen"], agents["llama"]
    rollouts = [written(llama, "one"), written(qwen, "two"), written(llama, "three")]
    views = qwen.view(rollouts, [[5]])
    assert [decoded(qwen, view.completion_ids) for view in views] == [
        f"one{QWEN_END}",
        f"two{QWEN_END}",
        f"three{QWEN_END}",
    ]
    assert [view.rollout for view in views] == rollouts


# ---- what is dropped ------------------------------------------------------------------------------------------------
def test_a_cut_emoji_is_not_trained_on_by_peers_but_kept_by_its_own_agent(agents):
    llama, qwen = agents["llama"], agents["qwen"]
    emoji = llama.tokenizer("🤖", add_special_tokens=False)["input_ids"]
    assert len(emoji) == 3
    cut = sampled(llama, [*llama.tokenizer("ok ", add_special_tokens=False)["input_ids"], *emoji[:2]])
    assert not cut.decodable and cut.finish_reason == "length"
    assert seen_by(qwen, cut).dropped == "undecodable"
    own = seen_by(llama, cut)
    assert own.dropped is None and own.completion_ids == cut.completion_ids
    whole = sampled(llama, [*emoji, llama.end_of_turn_id])
    assert whole.text == "🤖" and seen_by(qwen, whole).dropped is None


@pytest.mark.parametrize(("source", "learner"), [("qwen", "llama"), ("llama", "qwen")])
def test_ids_beyond_the_tokenizer_are_not_trained_on_by_peers(agents, source, learner):
    agent = agents[source]
    ids = agent.tokenizer("The answer is 42", add_special_tokens=False)["input_ids"]
    # Qwen's embedding has rows of padding beyond the tokenizer, which a policy can sample.
    rollout = sampled(agent, [*ids, len(agent.tokenizer) + 5, agent.end_of_turn_id])
    assert not rollout.decodable and seen_by(agents[learner], rollout).dropped == "undecodable"
    assert seen_by(agent, rollout).completion_ids == rollout.completion_ids
    assert sampled(agent, [*ids, agent.end_of_turn_id]).decodable


def test_a_tokenizer_that_normalizes_does_not_give_nfd_text_back(agents):
    nfd, nfc = "cafe\u0301", "caf\u00e9"
    from_llama = written(agents["llama"], nfd)
    assert from_llama.text == nfd and from_llama.decodable
    assert seen_by(agents["qwen"], from_llama).dropped == "round_trip"
    assert seen_by(agents["qwen"], written(agents["llama"], nfc)).dropped is None
    # Qwen can sample the letter and the accent apart; Llama does not normalize.
    qwen = agents["qwen"]
    ids = [i for part in ("cafe", "\u0301") for i in qwen.tokenizer(part, add_special_tokens=False)["input_ids"]]
    view = seen_by(agents["llama"], sampled(qwen, [*ids, qwen.end_of_turn_id]))
    assert view.dropped is None and decoded(agents["llama"], view.completion_ids) == nfd + LLAMA_END


def test_an_answer_without_a_token_is_dropped(agents):
    nothing = Rollout("qwen", "prompt", 0, (), "", True, "length", 0.0, 0.0, 0)
    assert seen_by(agents["llama"], nothing).dropped == "empty"
    # An answer that is its end of turn alone is one token on both sides.
    silent = sampled(agents["qwen"], [agents["qwen"].end_of_turn_id])
    view = seen_by(agents["llama"], silent)
    assert silent.text == "" and view.dropped is None
    assert view.completion_ids == (agents["llama"].end_of_turn_id,)


def test_an_answer_beyond_the_learners_context_is_dropped(agents, policies):
    qwen = tiny_agent("qwen", qwen_tokenizer(), policies["qwen"], max_model_length=24)
    # Llama writes 27 digits in 9 tokens, Qwen in 27: only one of them is short of room.
    rollout = written(agents["llama"], "123456789" * 3, end=False)
    assert rollout.num_tokens == 9
    assert seen_by(qwen, rollout).dropped == "too_long"
    short = written(agents["llama"], "1" * 20)
    assert seen_by(qwen, short, [0] * 3).dropped is None  # 3 + 20 + 1 = 24
    assert seen_by(qwen, short, [0] * 4).dropped == "too_long"


# ---- control tokens -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("source", "learner"), [("qwen", "llama"), ("llama", "qwen")])
@pytest.mark.parametrize("control", [QWEN_END, LLAMA_END, "<|endoftext|>", "<|begin_of_text|>", "<|im_start|>user"])
def test_a_control_token_in_plain_text_injects_none(agents, source, learner, control):
    text = f"42{control}"
    for end in (True, False):
        rollout = written(agents[source], text, end)
        # The source wrote it as ordinary tokens, and it arrives as such.
        assert rollout.text == text and rollout.decodable
        ids = seen_by(agents[learner], rollout).completion_ids
        special = [i for i in ids if i in agents[learner].tokenizer.all_special_ids]
        assert special == ([agents[learner].end_of_turn_id] if end else [])
        assert decoded(agents[learner], ids[: len(ids) - end]) == text


def test_control_tokens_that_were_sampled_do_not_travel(agents):
    qwen = agents["qwen"]
    (start,) = qwen.tokenizer("<|im_start|>", add_special_tokens=False)["input_ids"]
    (two,) = qwen.tokenizer("2", add_special_tokens=False)["input_ids"]
    rollout = sampled(qwen, [two, start, two, qwen.end_of_turn_id])
    assert rollout.text == "22"
    assert seen_by(qwen, rollout).completion_ids == (two, start, two, qwen.end_of_turn_id)


def test_a_thinking_tag_stays_byte_for_byte(agents):
    text = "<think>\n6 x 7\n</think>\n\na</think>b"
    for source, learner in (("qwen", "llama"), ("llama", "qwen")):
        view = seen_by(agents[learner], written(agents[source], text))
        assert view.rollout.text == text and view.dropped is None
        assert decoded(agents[learner], view.completion_ids[:-1]) == text
    # For Qwen the tag is one token.
    ((ids, _),) = retokenize(qwen_tokenizer(), ["a</think>b"], [False], 0)
    assert len(ids) == 3


@pytest.mark.parametrize("stop", ["<|end_of_text|>", "<|eom_id|>", LLAMA_END])
def test_every_stop_token_of_the_source_becomes_the_learners_end_of_turn(agents, stop):
    llama, qwen = agents["llama"], agents["qwen"]
    stop_id = llama.tokenizer.convert_tokens_to_ids(stop)
    ids = llama.tokenizer("42", add_special_tokens=False)["input_ids"]
    rollout = sampled(llama, [*ids, stop_id, stop_id, 5])
    assert rollout.finish_reason == "stop" and rollout.completion_ids == (*ids, stop_id) and rollout.text == "42"
    assert seen_by(llama, rollout).completion_ids == (*ids, stop_id)
    four_two = qwen.tokenizer("42", add_special_tokens=False)["input_ids"]
    assert seen_by(qwen, rollout).completion_ids == (*four_two, qwen.tokenizer.convert_tokens_to_ids(QWEN_END))


@pytest.mark.parametrize(("source", "learner"), [("qwen", "llama"), ("llama", "qwen")])
def test_an_answer_cut_by_length_gets_no_end_of_turn(agents, source, learner):
    rollout = written(agents[source], "The answer is", end=False)
    assert rollout.finish_reason == "length"
    assert decoded(agents[learner], seen_by(agents[learner], rollout).completion_ids) == "The answer is"


def test_padding_that_is_the_eos_token(policies):
    tokenizer = copy.deepcopy(llama_tokenizer())
    tokenizer.pad_token = None
    agent = tiny_agent("llama", tokenizer, policies["llama"])
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == agent.end_of_turn_id
    (hi,) = tokenizer("Hi", add_special_tokens=False)["input_ids"]
    padded = sampled(agent, [hi, *[agent.end_of_turn_id] * 4])
    assert padded.completion_ids == (hi, agent.end_of_turn_id) and padded.finish_reason == "stop"
    assert seen_by(agent, padded).completion_ids == (hi, agent.end_of_turn_id)
    assert padded.text == "Hi"


def test_an_eos_token_by_name(policies):
    agent = tiny_agent("llama", copy.deepcopy(llama_tokenizer()), policies["llama"], eos_token="<|eom_id|>")
    assert agent.end_of_turn_id == agent.tokenizer.convert_tokens_to_ids("<|eom_id|>")
    with pytest.raises(ValueError, match=r"'llama'.*'<\|im_end\|>' is not in its tokenizer"):
        tiny_agent("llama", copy.deepcopy(llama_tokenizer()), policies["llama"], eos_token=QWEN_END)


def test_a_tokenizer_without_an_end_is_an_error(policies):
    tokenizer = copy.deepcopy(llama_tokenizer())
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match=r"'llama'.*no EOS token.*Set eos_token"):
        tiny_agent("llama", tokenizer, policies["llama"])


def test_only_the_final_stop_token_is_taken_off():
    tokenizer = qwen_tokenizer()
    (a,), (dot,) = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("a", "."))
    # Here the full stop is a stop token.
    assert decode_completion(tokenizer, [dot, a, dot], {dot}) == (".a", True)
    assert decode_completion(tokenizer, [dot, a], {dot}) == (".a", True)
    assert decode_completion(tokenizer, [], {dot}) == ("", True)
    # Spaces before punctuation are not tidied up.
    spaced = tokenizer("x = 1 , y .", add_special_tokens=False)["input_ids"]
    assert decode_completion(tokenizer, spaced, {dot - 1})[0] == "x = 1 , y ."


def test_nothing_to_retokenize():
    assert retokenize(qwen_tokenizer(), [], [], 0) == []


# ---- prompts --------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def bos_agent(policies):
    """Llama's tokenizer as it is shipped: a post-processor puts a BOS token in front."""
    tokenizer = copy.deepcopy(llama_tokenizer())
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    assert tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id
    return tiny_agent("llama", tokenizer, policies["llama"])


def bos_tokens(agent, prompt):
    (ids,) = agent.render([prompt])
    positions = [i for i, token_id in enumerate(ids) if token_id == agent.tokenizer.bos_token_id]
    return positions, agent.tokenizer.decode(ids)


@pytest.mark.parametrize("prompt", [MESSAGES, "Hello", "<|begin_of_text|>Hello"])
def test_exactly_one_bos_where_the_tokenizer_adds_it(bos_agent, prompt):
    positions, text = bos_tokens(bos_agent, prompt)
    assert positions == [0]
    assert ("6 x 7" if prompt is MESSAGES else "Hello") in text


def test_exactly_one_bos_where_only_the_tokenizer_wants_it(bos_agent, policies):
    agent = tiny_agent("llama", bos_agent.tokenizer, policies["llama"], chat_template="plain")
    assert bos_tokens(agent, MESSAGES) == ([0], "<|begin_of_text|>What is 6 x 7?")


def test_exactly_one_bos_where_the_template_writes_it(agents):
    assert bos_tokens(agents["llama"], MESSAGES)[0] == [0]
    # This tokenizer itself adds none, so plain text has none.
    assert bos_tokens(agents["llama"], "Hello") == ([], "Hello")


def test_answers_get_no_bos(bos_agent, agents):
    view = seen_by(bos_agent, written(agents["qwen"], "42"))
    assert decoded(bos_agent, view.completion_ids) == f"42{LLAMA_END}"


def test_no_bos_for_qwen(agents):
    (chat, plain) = agents["qwen"].render([MESSAGES, "Hello"])
    assert agents["qwen"].tokenizer.decode(chat) == (
        "<|im_start|>user\nWhat is 6 x 7?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert plain == agents["qwen"].tokenizer("Hello", add_special_tokens=False)["input_ids"]


def test_a_template_that_prints_the_date_prints_a_fixed_one(agents, policies):
    (ids,) = agents["llama"].render([MESSAGES])
    text = agents["llama"].tokenizer.decode(ids)
    assert "Today Date: 26 Jul 2024<|eot_id|>" in text
    assert date.today().strftime("%d %b %Y") not in text
    # Without the variable that Llama's template looks at first.
    template = "{{ strftime_now('%Y-%m-%d') }}|{{ strftime_now( \"%B\" ) }}|{{ messages[0].content }}"
    agent = tiny_agent("llama", llama_tokenizer(), policies["llama"], chat_template=template)
    (ids,) = agent.render([MESSAGES])
    assert agent.tokenizer.decode(ids) == "2024-07-26|July|What is 6 x 7?"


def test_a_date_given_by_the_user_stays(policies):
    agent = tiny_agent(
        "llama", llama_tokenizer(), policies["llama"], chat_template_kwargs={"date_string": "01 Jan 2030"}
    )
    assert "Today Date: 01 Jan 2030" in agent.tokenizer.decode(agent.render([MESSAGES])[0])


def test_a_date_that_cannot_be_fixed_is_warned_about(policies, caplog):
    template = "{% set f = '%d' %}{{ strftime_now(f) }}"
    tiny_agent("llama", llama_tokenizer(), policies["llama"], chat_template=template)
    (record,) = caplog.records
    assert "'llama'" in record.getMessage() and "today's date" in record.getMessage()


def test_chat_templates_plain_and_from_a_file(policies, tmp_path):
    conversation = [{"role": "system", "content": "Be brief. "}, *MESSAGES]
    plain = tiny_agent("qwen", qwen_tokenizer(), policies["qwen"], chat_template="plain")
    assert plain.tokenizer.decode(plain.render([conversation])[0]) == "Be brief. What is 6 x 7?"
    path = tmp_path / "template.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}{{ tail }}", encoding="utf-8")
    args = run_config(chat_template_kwargs={"tail": "run's"})
    from_file = tiny_agent("qwen", qwen_tokenizer(), policies["qwen"], args, chat_template=str(path))
    assert from_file.tokenizer.decode(from_file.render([MESSAGES])[0]) == "[user] What is 6 x 7?run's"
    of_agent = tiny_agent(
        *("qwen", qwen_tokenizer(), policies["qwen"], args),
        chat_template=str(path),
        chat_template_kwargs={"tail": "agent's"},
    )
    assert of_agent.tokenizer.decode(of_agent.render([MESSAGES])[0]) == "[user] What is 6 x 7?agent's"


def test_a_missing_chat_template_names_the_agent(policies):
    tokenizer = copy.deepcopy(qwen_tokenizer())
    tokenizer.chat_template = None
    agent = tiny_agent("base", tokenizer, policies["qwen"])
    assert agent.render(["Hello"]) == [tokenizer("Hello")["input_ids"]]
    with pytest.raises(ValueError, match=r"'base'.*no chat template.*'plain'"):
        agent.render([MESSAGES])
    with pytest.raises(ValueError, match=r"'base'.*'nowhere\.jinja' is no Jinja template, no file and not 'plain'"):
        tiny_agent("base", tokenizer, policies["qwen"], chat_template="nowhere.jinja")


def test_prompts_that_do_not_fit_name_the_agent_and_the_numbers(policies):
    # 16 tokens are set aside for the answer.
    agent = tiny_agent("qwen", qwen_tokenizer(), policies["qwen"], max_model_length=20)
    assert len(agent.render(["1234"])[0]) == 4
    with pytest.raises(ValueError, match=r"'qwen'.*prompt of 5 tokens.*max_completion_length=16.*20 tokens.*'12345'"):
        agent.render(["12345"])
    with pytest.raises(ValueError, match=r"'qwen'.*the prompt '' is empty"):
        agent.render([""])
    with pytest.raises(ValueError, match=r"'qwen'.*max_completion_length=16 leaves no room.*16 tokens"):
        tiny_agent("qwen", qwen_tokenizer(), policies["qwen"], max_model_length=16)
