"""The tasks `conv` and `conv_words`: the digits of three symbols, "akz=" -> "3,8,7", or the same in words.

In words an answer is three statements, "a stands for 3; let k now be 8; for z take 7;", each in one of four wordings,
of which each policy prefers one. So answers are as long, and as likely to a peer, as those of language models are: a
token's choice is seldom free, and many small habits add up. `conv` is over in six tokens, whose ratios scatter as no
language model's do; it is for tests, and for what is enumerated.

There are 48 symbols, each with a fixed digit, in three families; the symbols of a prompt come from one family:

- family 0: the "qwen3" policy starts skilled, the "llama" policy does not;
- family 1: the other way round;
- family 2: two conventions are right, the digits as they are or all of them plus one (mod 10), but no mixture of both.
  The "qwen3" policy starts with a preference for the first, the "llama" policy for the second.

A fact (symbol -> digit) serves in every prompt with that symbol. The held-out prompts are combinations that no policy
is ever trained on; what an agent can learn from another agent is facts.
"""

import functools
import random
import re
from collections.abc import Iterator, Sequence
from typing import Literal

from datasets import Dataset


_LOWER, _UPPER = "abcdefghijklmnopqrstuvwx", "ABCDEFGHIJKLMNOPQRSTUVWX"
FAMILIES = (_LOWER[:16], _UPPER[:16], _LOWER[16:] + _UPPER[16:])
DIGIT_OF = {symbol: random.Random(i * 7919 + 13).randrange(10) for i, symbol in enumerate(_LOWER + _UPPER)}

_SYMBOLS_PER_PROMPT = 3
_HELD_OUT_SIZE = 512
_HELD_OUT_SEED = 999

# How far off a mistaken digit is. In family 2 it is the step from one accepted convention to the other: what is wrong
# there is only a mixture of both.
SHIFT = (3, 3, 1)

WORDINGS = (
    "{symbol} stands for {digit};",
    "let {symbol} now be {digit};",
    "for {symbol} take {digit};",
    "we read {symbol} as {digit};",
)
_STATEMENT = re.compile("|".join(wording.format(symbol=r"(\w)", digit=r"(\d)") for wording in WORDINGS))


def _draw(rng: random.Random, family: int) -> str:
    return "".join(rng.choice(FAMILIES[family]) for _ in range(_SYMBOLS_PER_PROMPT))


@functools.cache
def _held_out() -> dict[str, int]:
    """The symbols of each held-out prompt and their family, in order."""
    rng = random.Random(_HELD_OUT_SEED)
    items: dict[str, int] = {}
    while len(items) < _HELD_OUT_SIZE:
        family = rng.randrange(len(FAMILIES))
        items[_draw(rng, family)] = family
    return items


def draw_for_training(rng: random.Random, mix: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Iterator[tuple[str, int]]:
    """Draws the symbols of a prompt and their family, without end, never held-out ones; `mix` weighs the families."""
    while True:
        family = rng.choices(range(len(FAMILIES)), mix)[0]
        symbols = _draw(rng, family)
        if symbols not in _held_out():
            yield symbols, family


def in_words(symbols: str, digits: Sequence[int], wordings: Sequence[int]) -> str:
    """An answer of `conv_words`: for each symbol a statement, in the wording of that number."""
    parts = zip(symbols, digits, wordings, strict=True)
    return " ".join(WORDINGS[wording].format(symbol=symbol, digit=digit) for symbol, digit, wording in parts)


def conv_reading(text: str) -> str:
    """What an answer says: "a=3,k=8,z=7" of statements in any wording, and else the text itself."""
    statements = list(_STATEMENT.finditer(text))
    if not statements or " ".join(statement[0] for statement in statements) != text:
        return text
    return ",".join("=".join(filter(None, statement.groups())) for statement in statements)


def _answer(symbols: str, family: int, words: bool) -> str:
    """The accepted answers, joined with "|"."""
    shifts = (0, SHIFT[2]) if family == 2 else (0,)
    digits = [[f"{(DIGIT_OF[symbol] + shift) % 10}" for symbol in symbols] for shift in shifts]
    if words:
        digits = [[f"{symbol}={digit}" for symbol, digit in zip(symbols, of, strict=True)] for of in digits]
    return "|".join(map(",".join, digits))


def conv_dataset(split: Literal["train", "test"], size: int, seed: int = 0, words: bool = False) -> Dataset:
    """
    Makes `size` prompts of the task `conv`, or of `conv_words`.

    Args:
        split: "test" is the beginning of one fixed list of 512 distinct held-out prompts. "train" is drawn with
            replacement from the other 11,776 prompts, the families with equal probability.
        size: number of prompts; at most 512 for "test".
        seed: seed of the "train" split. The "test" split does not depend on it.
        words: whether answers are in words, `conv_words`.

    Returns:
        A dataset with the columns `prompt` ("akz="), `answer` ("3,8,7", or what is to be stated, "a=3,k=8,z=7"; for
        family 2 both accepted answers, joined by "|") and `source` ("family 0", "family 1" or "family 2").

    Raises:
        ValueError: for another split, or more prompts than "test" has.
    """
    if split not in ("train", "test"):
        raise ValueError(f"conv_dataset has the splits 'train' and 'test', not {split!r}.")
    if split == "test" and size > _HELD_OUT_SIZE:
        raise ValueError(f"The split 'test' of conv_dataset has {_HELD_OUT_SIZE} prompts, fewer than {size}.")
    draws = iter(_held_out().items()) if split == "test" else draw_for_training(random.Random(seed))
    items = [next(draws) for _ in range(size)]
    return Dataset.from_dict(
        {
            "prompt": [f"{symbols}=" for symbols, _ in items],
            "answer": [_answer(symbols, family, words) for symbols, family in items],
            "source": [f"family {family}" for _, family in items],
        }
    )


def conv_reward(completions: list[str], answer: list[str], **kwargs) -> list[float]:
    """
    TRL reward function: 1.0 for each completion that says one of its accepted answers, in any wording, else 0.0.

    `completions` are plain texts and `answer` is the dataset's column for them; what else TRL passes is not used.

    Only the text is compared, without special tokens, so that the agent needs room to show whether it ends its answer.
    Every answer of `conv` is at most five tokens and an EOS. From `max_completion_length=6` on, a completion that was
    cut off has more text than the answer and earns nothing; with five, a right answer would be rewarded though it
    never ended. In words it is at most 47 tokens and an EOS. (The one exception is a sampled `<pad>` in place of the
    EOS, which no policy is ever taught.)
    """
    return [
        float(conv_reading(text) in accepted.split("|")) for text, accepted in zip(completions, answer, strict=True)
    ]


def noisy_conv_reward(
    prompts: list[str], completions: list[str], answer: list[str], false_positives: float, seed: int, **kwargs
) -> list[float]:
    """
    `conv_reward` of a verifier that makes mistakes: it accepts a wrong answer with probability `false_positives`.

    Prompt, text and seed decide: the same answer to the same prompt gets the same verdict, whoever gives it and
    however often. So a mistake can be learned for that prompt, and says nothing about others. `functools.partial`
    fixes the last two arguments.

    Raises:
        ValueError: if `false_positives` is no probability.
    """
    if not 0 <= false_positives <= 1:
        raise ValueError(f"false_positives is a probability, from 0 to 1, not {false_positives}.")
    return [
        max(reward, float(random.Random(f"{seed} {prompt} {text}").random() < false_positives))
        for prompt, text, reward in zip(prompts, completions, conv_reward(completions, answer), strict=True)
    ]
