"""What a learner reads of a peer's answer behind its prompt, with tokenizers that treat the beginning apart."""

import pytest
from tiny_agents import tiny_agent
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hacpo_trl import Rollout
from hacpo_trl.rollouts.retokenization import decode_completion, retokenize


CHARACTERS = [chr(code) for code in range(33, 127)]
WORDS = ["▁5", "▁the", "the", "▁answer", "5,", "2x", "\\frac", "▁▁"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
ANSWERS = ["5,2", " 5,2", "  the answer", "the answer is 5", "\n\nthe", "\\frac{1}{2}", "x = 2x", "π é", "a", ":b", ""]


def sentencepiece(kind: str) -> PreTrainedTokenizerFast:
    """A small BPE with byte fallback whose spaces are ▁, in the ways that Llama 2, Mistral and T5 have it."""
    vocabulary = ["<s>", "</s>", "<pad>", *BYTES, "▁", *CHARACTERS, *WORDS]
    merges = [("▁", "5"), ("t", "h"), ("th", "e"), ("▁", "the"), ("5", ","), ("2", "x"), ("▁", "▁")]
    vocabulary += [left + right for left, right in merges if left + right not in vocabulary]
    backend = Tokenizer(
        models.BPE({token: i for i, token in enumerate(vocabulary)}, merges, byte_fallback=True, fuse_unk=True)
    )
    strip = [decoders.Strip(" ", 1, 0)]
    if kind == "llama 2":
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace("▁", prepend_scheme=kind, split=False)
        strip = strip if kind != "never" else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        clean_up_tokenization_spaces=False,
    )


def byte_level(add_prefix_space: bool) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate([*alphabet, "<eos>"])}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>", clean_up_tokenization_spaces=False)


TOKENIZERS = {
    **{f"SentencePiece, {kind}": sentencepiece(kind) for kind in ("llama 2", "always", "first", "never")},
    "byte-level": byte_level(False),
    "byte-level with a space in front": byte_level(True),
}


def behind(tokenizer, prompt: list[int], ids: list[int]) -> str:
    """What the learner reads: prompt and answer decoded together, without the prompt's text."""
    text, before = (tokenizer.decode(of, clean_up_tokenization_spaces=False) for of in ([*prompt, *ids], prompt))
    assert text.startswith(before)
    return text.removeprefix(before)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("prompt", ["What is it? ", "Q: 2+2\nA:", "[/INST]"])
def test_a_learner_reads_the_very_answer_behind_its_prompt(name, prompt):
    tokenizer = TOKENIZERS[name]
    prompt_ids = tokenizer(prompt).input_ids
    encoded = retokenize(tokenizer, ANSWERS, [False] * len(ANSWERS), 0, [prompt_ids] * len(ANSWERS))
    for answer, (ids, same_text) in zip(ANSWERS, encoded, strict=True):
        assert same_text, answer
        assert behind(tokenizer, prompt_ids, ids) == answer


def test_encoded_alone_it_would_be_another_answer():
    """So that the test above means something."""
    for kind in ("llama 2", "always", "first"):
        tokenizer = sentencepiece(kind)
        prompt_ids = tokenizer("Q: 2+2\nA:").input_ids
        alone = tokenizer("5,2", add_special_tokens=False).input_ids
        assert behind(tokenizer, prompt_ids, alone) == " 5,2"
        assert retokenize(tokenizer, ["5,2"], [False], 0, [prompt_ids])[0][0] != alone


def test_a_tokenizer_that_loses_the_text_drops_it():
    """WordPiece decodes words with spaces between them: what it reads is another text."""
    vocabulary = {token: i for i, token in enumerate(["[UNK]", "</s>", "the", "answer", "5", ",", "2", "##s"])}
    backend = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", clean_up_tokenization_spaces=False)
    prompt_ids = tokenizer("the", add_special_tokens=False).input_ids
    encoded = retokenize(tokenizer, ["5,2", " answers", "π"], [False] * 3, 1, [prompt_ids] * 3)
    assert [same_text for _, same_text in encoded] == [False, True, False]
    assert behind(tokenizer, prompt_ids, encoded[1][0]) == " answers"


def test_the_view_of_an_agent_is_behind_its_prompt():
    tokenizer = sentencepiece("llama 2")
    agent = tiny_agent("learner", tokenizer)
    prompt_ids = tuple(tokenizer("Q:").input_ids)
    rollout = Rollout("peer", "Q:", 0, (1, 2), "5,2", True, "stop", -1.0, 1.0, 0)
    [view] = agent.view([rollout], [prompt_ids])
    assert view.dropped is None and view.completion_ids[-1] == tokenizer.eos_token_id
    assert behind(tokenizer, list(prompt_ids), list(view.completion_ids[:-1])) == "5,2"


@pytest.mark.parametrize("middle", ["<s>", "</s>", "<pad>"])
def test_a_special_token_in_the_middle_is_no_text(middle):
    """The source's sum covers it, the text does not: two different events."""
    tokenizer = sentencepiece("never")
    five, special = tokenizer("5", add_special_tokens=False).input_ids, tokenizer.convert_tokens_to_ids(middle)
    text, decodable = decode_completion(tokenizer, [*five, special, *five, tokenizer.eos_token_id], [1])
    assert (text, decodable) == ("55", False)
    assert decode_completion(tokenizer, [*five, tokenizer.eos_token_id], [1]) == ("5", True)
