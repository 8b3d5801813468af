"""Retokenization: how one agent's answer becomes tokens of another agent.

An answer travels as text. Its source decodes the sampled ids, each learner encodes the text for itself:

    sampled ids --(final stop token off)--> text --(learner's tokenizer)--> ids --(learner's end of turn on)--> its ids

What keeps the two sides of a sequence ratio about the same event:

1. A learner never decodes and re-encodes its *own* answers: their sampled ids are kept, even where its tokenizer would
   have chosen others for the same text.
2. Special tokens do not travel. The source leaves them out; the learner splits a text that spells one ("<|im_end|>")
   into ordinary tokens, so that no peer can inject a control token.
3. An answer that ended by itself ends with the learner's own end-of-turn token, whichever stop token the source chose;
   one that was cut by length ends with none. So the end is scored on both sides of the ratio or on neither.

A learner does not learn from a peer's answer, and `DROP_REASONS` says why, when the text does not stand for the ids.
The reward of a dropped answer still counts in every baseline.
"""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase


REPLACEMENT_CHARACTER = "\ufffd"

DROP_REASONS = {
    "undecodable": "the source's text does not stand for its ids: a cut character, or ids beyond the tokenizer",
    "round_trip": "the learner's tokenizer does not give the text back",
    "empty": "no token is left",
    "too_long": "prompt and answer exceed the learner's context",
}


def decode_completion(
    tokenizer: PreTrainedTokenizerBase, completion_ids: Sequence[int], stop_token_ids: Collection[int]
) -> tuple[str, bool]:
    """The text of sampled ids, and whether it stands for them.

    Args:
        tokenizer: The source's tokenizer.
        completion_ids: The sampled ids, the stop token included if there is one.
        stop_token_ids: Every id that ends an answer of the source, secondary EOS tokens included.

    Returns:
        The text without the final stop token and without special tokens, and False if ids were lost on the way: a
        character cut in the middle of its bytes, or ids that the tokenizer does not have (rows of padding in the
        embedding).
    """
    ids = list(completion_ids)
    if ids and ids[-1] in stop_token_ids:
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    known = all(token_id < len(tokenizer) for token_id in ids)
    return text, known and REPLACEMENT_CHARACTER not in text


def retokenize(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], finished: Sequence[bool], end_of_turn_id: int
) -> list[tuple[list[int], bool]]:
    """Texts in a learner's tokens.

    Args:
        tokenizer: The learner's tokenizer.
        texts: The answers.
        finished: For each, whether it ended by itself and thus gets the end-of-turn token.
        end_of_turn_id: The learner's end-of-turn token.

    Returns:
        For each text its ids, and whether the tokenizer gives the text back from them (one that normalizes Unicode may
        not).
    """
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    decoded = [tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False) for ids in encoded]
    return [
        ([*ids, end_of_turn_id] if is_finished else list(ids), back == text)
        for ids, back, text, is_finished in zip(encoded, decoded, texts, finished, strict=True)
    ]
