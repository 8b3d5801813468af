"""Retokenization: how one agent's answer becomes tokens of another agent.

An answer travels as text. Its source decodes the sampled ids, each learner encodes the text for itself:

    sampled ids --(final stop token off)--> text --(learner's tokenizer)--> ids --(learner's end of turn on)--> its ids

What keeps the two sides of a sequence ratio about the same event:

1. A learner never decodes and re-encodes its *own* answers: their sampled ids are kept, even where its tokenizer would
   have chosen others for the same text.
2. Special tokens do not travel. An answer that has one in its middle is no text that a peer could be asked the
   probability of; the learner splits a text that spells one ("<|im_end|>") into ordinary tokens, so that no peer can
   inject a control token.
3. What counts is what the learner reads behind its prompt. Tokenizers that mark the beginning of a text (SentencePiece
   puts a space there) would read `5,2`, encoded alone, as ` 5,2`; so an answer is encoded as it stands behind other
   text, and read back behind the prompt.
4. An answer that ended by itself ends with the learner's own end-of-turn token, whichever stop token the source chose;
   one that was cut by length, or ended with a stop string, ends with none. So the end is scored on both sides of the
   ratio or on neither.

A learner does not learn from a peer's answer, and `DROP_REASONS` says why, when the text does not stand for the ids.
The reward of a dropped answer still counts in every baseline.
"""

from collections.abc import Collection, Sequence

from transformers import PreTrainedTokenizerBase


REPLACEMENT_CHARACTER = "\ufffd"

# So many of a prompt's last tokens show how an answer reads behind it.
CONTEXT = 8
# What an answer is encoded behind where it does not read right when it is encoded alone: few tokenizers merge these
# with what follows.
ANCHORS = ("\n", ":", "a")

DROP_REASONS = {
    "undecodable": "the source's text does not stand for its ids: a cut character, a special token in the middle, or "
    "ids beyond the tokenizer",
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
        character cut in the middle of its bytes, special tokens in the middle, or ids that the tokenizer does not have
        (rows of padding in the embedding).
    """
    ids = list(completion_ids)
    if ids and ids[-1] in stop_token_ids:
        ids.pop()
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    whole = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    known = all(token_id < len(tokenizer) for token_id in ids)
    return text, known and text == whole and REPLACEMENT_CHARACTER not in text


def retokenize(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[str],
    finished: Sequence[bool],
    end_of_turn_id: int,
    prompt_ids: Sequence[Sequence[int]] | None = None,
) -> list[tuple[list[int], bool]]:
    """Texts in a learner's tokens.

    Args:
        tokenizer: The learner's tokenizer.
        texts: The answers.
        finished: For each, whether it ended with a stop token and thus gets the end-of-turn token.
        end_of_turn_id: The learner's end-of-turn token.
        prompt_ids: For each, the ids of the prompt that it stands behind; None where it stands alone.

    Returns:
        For each text its ids, and whether the learner reads the text in them (one whose tokenizer normalizes Unicode
        may not).
    """
    if not texts:
        return []
    contexts = [ids[-CONTEXT:] for ids in prompt_ids] if prompt_ids is not None else [()] * len(texts)
    encoded = tokenizer(list(texts), add_special_tokens=False, split_special_tokens=True)["input_ids"]
    result = []
    for text, context, ids, is_finished in zip(texts, contexts, encoded, finished, strict=True):
        ids, same_text = _as_it_is_read(tokenizer, text, context, list(ids))
        result.append(([*ids, end_of_turn_id] if is_finished else ids, same_text))
    return result


def _as_it_is_read(
    tokenizer: PreTrainedTokenizerBase, text: str, context: Sequence[int], alone: list[int]
) -> tuple[list[int], bool]:
    """The ids that read as the text behind a context, and True; if there are none, the text's alone and False."""
    if _read_behind(tokenizer, context, alone) == text:
        return alone, True
    for anchor in ANCHORS:
        in_front, both = tokenizer([anchor, anchor + text], add_special_tokens=False, split_special_tokens=True)[
            "input_ids"
        ]
        ids = both[len(in_front) :]
        # Where anchor and text share a token, the text has no ids of its own.
        if both[: len(in_front)] == in_front and _read_behind(tokenizer, context, ids) == text:
            return ids, True
    return alone, False


def _read_behind(tokenizer: PreTrainedTokenizerBase, context: Sequence[int], ids: Sequence[int]) -> str | None:
    """The text that ids add to what stands before them; None if they change that."""
    before, whole = (
        tokenizer.decode(of, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for of in (list(context), [*context, *ids])
    )
    return whole[len(before) :] if whole.startswith(before) else None
