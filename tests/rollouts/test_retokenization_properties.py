"""Answers of any characters between the embedded policies, whose tokenizers split the same text differently."""

from hypothesis import given
from hypothesis import strategies as st
from tiny_agents import tiny_agent

from hacpo_trl.embedded import POLICIES
from hacpo_trl.embedded.policies import make_tokenizer
from hacpo_trl.generation.backend import completion_of
from hacpo_trl.rollouts.retokenization import REPLACEMENT_CHARACTER, decode_completion, retokenize


TOKENIZERS = {name: make_tokenizer(POLICIES[name]) for name in ("qwen3", "llama", "llama-comma")}
SPECIAL = {"<pad>", "<eos>"}

NAMES = st.sampled_from(sorted(TOKENIZERS))
# Beside any Unicode: what the merges are about, and texts that spell control tokens.
PIECES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.text("0123456789,=;", max_size=8),
    st.sampled_from(["<eos>", "<pad>", "<|im_end|>", "<eo", "s>", " ", "\n"]),
)
TEXTS = st.lists(PIECES, max_size=5).map("".join)


@given(NAMES, NAMES, TEXTS)
def test_an_answer_goes_from_any_agent_to_any_other_and_back(one, other, text):
    """Ids, text, the other's ids, text, ids again: nothing is lost, and both agents count one end of turn."""
    source, learner = TOKENIZERS[one], TOKENIZERS[other]
    ((sampled, kept),) = retokenize(source, [text], [True], source.eos_token_id)
    assert kept and sampled[-1] == source.eos_token_id

    sent, decodable = decode_completion(source, sampled, [source.eos_token_id])
    assert sent == text and decodable == (REPLACEMENT_CHARACTER not in text)
    ((received, kept),) = retokenize(learner, [sent], [True], learner.eos_token_id)
    assert kept and decode_completion(learner, received, [learner.eos_token_id])[0] == text
    assert retokenize(source, [decode_completion(learner, received, [learner.eos_token_id])[0]], [True], 1) == [
        (sampled, True)
    ]


@given(NAMES, st.lists(TEXTS, min_size=1, max_size=3), st.data())
def test_no_text_becomes_a_special_token(name, texts, data):
    """But for the one end of turn of an answer that is finished."""
    learner = TOKENIZERS[name]
    finished = data.draw(st.lists(st.booleans(), min_size=len(texts), max_size=len(texts)))
    special = set(learner.convert_tokens_to_ids(sorted(SPECIAL)))
    for (ids, _), ended in zip(retokenize(learner, texts, finished, learner.eos_token_id), finished, strict=True):
        assert [i for i in ids if i in special] == [learner.eos_token_id] * ended


@given(NAMES, TEXTS, TEXTS)
def test_answers_do_not_see_each_other(name, one, other):
    tokenizer = TOKENIZERS[name]
    together = retokenize(tokenizer, [one, other], [True, False], tokenizer.eos_token_id)
    apart = [
        retokenize(tokenizer, [t], [ended], tokenizer.eos_token_id)[0] for t, ended in ((one, True), (other, False))
    ]
    assert together == apart


@given(NAMES, st.lists(st.integers(0, 300), max_size=8))
def test_any_sampled_ids_are_decodable_or_said_not_to_be(name, ids):
    """Policies sample what they like: cut characters, control tokens amid an answer, rows of padding."""
    tokenizer = TOKENIZERS[name]
    ends = ids.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in ids else None
    completion = completion_of(tiny_agent(name, tokenizer), ids)
    assert completion.ids == tuple(ids[:ends])
    text, decodable = decode_completion(tokenizer, completion.ids, [tokenizer.eos_token_id])
    body = completion.ids[:-1] if completion.finish_reason == "stop" else completion.ids
    assert not decodable or all(i < len(tokenizer) and i not in tokenizer.all_special_ids for i in body)
    # What is decodable reads the same to everybody.
    if decodable:
        ((back, kept),) = retokenize(tokenizer, [text], [False], tokenizer.eos_token_id)
        assert kept and tokenizer.decode(back) == text
        assert text == tokenizer.decode(body)
