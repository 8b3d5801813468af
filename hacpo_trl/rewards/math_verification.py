r"""Verdict on one mathematical answer: find it in a completion, normalise it, compare it with the gold answer.

math-verify, and SymPy beneath it, decide whether two values are equal. In front of them stands a normalization, rule
by rule below; behind them nothing accepts what they reject, but some things reject what they accept (`_vetoed`).

1. *Which text is the answer*: the content of the only `\boxed{...}`. Boxes side by side, `\boxed{1}` and `\boxed{2}`,
   are one answer, the list `1,2`; boxes that say different things are none, for a guess must not be free. A box that
   is never closed is an unfinished answer, not a shorter one (`\boxed{4` may be the start of `\boxed{42}`). What is
   thought, in `<think>` tags, is no answer, whether the tag was closed or not.
2. *Typesetting*: spacing, sizes, `\dfrac`, Unicode signs and full-width characters; a font around a number is
   dropped, `\mathbf{42}`.
3. *Units* are dropped where they are recognisable as units: words in `\text{...}` or from a list, or a degree sign.
   The problem names the unit. A single letter is a unit only where the gold is a plain number, so `6m` is not `6`.
   Words that change the value (`or`, `not`, `dozen`) stay; `million` and the like are powers of ten. Behind a
   trigonometric function a degree is π/180.
4. *Percent*: 50% equals 0.5, and also the bare number 50, because "what percent" is answered either way. 0.5 and 50
   remain different.
5. *Numbers* are compared to six significant digits when one of the two is a decimal, exactly otherwise. Six decimals,
   math-verify's default, would make 1e-9 equal to 2e-9.
6. *Names*: `x = 5` is 5 where the left side is a bare name. Of a longer chain the last member is the answer only if
   all members are equal: `0 = 5` and `2x = 7` are no values.
7. *Structure*: a list or set has no order, a tuple has one, and brackets must agree: `(1,2)` is not `[1,2]`. A tuple
   may be written without its parentheses. Each element is compared by itself.
8. *Text*: words are compared as words, without case. A choice with its value, `\textbf{(D)} 12`, is either, and may
   not contradict itself.
9. *Variables* are what they are called: upper and lower case differ. A lone `i` is the imaginary unit.

The worker processes load this file by path: it imports neither the package nor torch.
"""

import re

import sympy

from .math_text import (
    BOX,
    MAX_ANSWER_CHARS,
    MAX_TEXT_WORDS,
    TEXT,
    balanced,
    boxed_answer,
    final_answer,
    last_boxed,
    normalize,
    readings,
    squeeze,
)
from .math_values import accepted, equal, parse


# A collection with more elements than this equals only the same text: matching is quadratic.
MAX_ELEMENTS = 64
_CHOICE = re.compile(r"\(([A-Z])\)\s*(\S.*)")
_LETTER_UNIT = re.compile(r"^(-?[\d.,]+(?:\s*\\(?:times|cdot)\s*10\^\{?-?\d+\}?)?)\s*[mgsLlNJWVAKh](?:\^\{?[23]\}?)?$")
_BASE = re.compile(r"([0-9A-F]*[0-9][0-9A-F]*)_\{?(\d+)\}?")
# What is a bare name left of an equals sign: a variable, a function of something, a figure's points, a word.
_NAME = re.compile(
    r"(?:(?:[a-zA-Z]|[A-Z]{2,4}|[A-Z]?[a-z]{4,}|\\(?!frac|sqrt|sin|cos|tan|log|ln|binom|pi(?![a-zA-Z]))[a-zA-Z]+"
    r"(?:\{[^{}]*\})?)(?:_(?:\w|\{[^{}]*\}))?'*(?:\([^()=]*\))?|\([a-zA-Z]\w*(?:,[a-zA-Z]\w*)*\)|\[[A-Z]+\])"
)
_EQUALS = re.compile(r"(?<![\\<>!=])=(?!=)")
_MEMBERSHIP = re.compile(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])")
_NO_VOWEL = re.compile(r"[^aeiou]+", re.IGNORECASE)
_WORDS = re.compile(r"[^\W\d_]{2,}")
_UNORDERED = ("list", "set")


def gold_answer(gold) -> str | None:
    r"""Normalised gold answer of a dataset's cell: an answer, or a solution that ends in `\boxed{...}` or `#### 42`.

    Returns:
        The normalised answer; `None` when it is empty or cannot be compared with anything (unbalanced braces, prose).
    """
    if gold is None or gold != gold:  # NaN marks an empty cell of a table
        return None
    text = str(gold)
    if BOX.search(text):
        text = last_boxed(text)
        if text is None:
            return None
    elif "####" in text:
        text = text.rsplit("####", 1)[1]
    text = normalize(text)
    if not re.search(r"[^\W_]", text) or not balanced(text) or len(text) > MAX_ANSWER_CHARS:
        return None
    words = _WORDS.findall(re.sub(r"\\[a-zA-Z]+", " ", TEXT.sub(r" \1 ", text)))
    if len(words) > MAX_TEXT_WORDS:
        return None
    # Text is compared as text; everything else has to be readable for the parser.
    if _as_text(text) is None and not _elements_parse(text):
        return None
    return text


def judge(item: tuple) -> tuple[float | None, str, str]:
    """Verdict on one completion.

    Args:
        item: `(golds, completion, strict_boxed)`: the alternatives for the gold answer, the text of the completion,
            and whether only a boxed answer counts.

    Returns:
        `(reward, gold, answer)`. The reward is 1.0 for an answer equal to one of the golds, 0.0 for another or for
        none, `None` when no gold is readable. `gold` and `answer` are the normalised texts, empty where there is none.
    """
    golds, completion, strict_boxed = item
    readable = [gold for gold in map(gold_answer, golds) if gold is not None]
    if not readable:
        return None, "", ""
    found = boxed_answer(completion) if strict_boxed else final_answer(completion)
    answer = normalize(found) if found is not None and len(found) <= MAX_ANSWER_CHARS else ""
    shown = " | ".join(readable)
    if not answer:
        return 0.0, shown, answer
    return float(any(equivalent(gold, answer) for gold in readable)), shown, answer


def gold_is_readable(golds: list) -> bool:
    """Whether any of the alternatives for a gold answer can be compared with an answer."""
    return any(gold_answer(gold) is not None for gold in golds)


def equivalent(gold: str, answer: str) -> bool:
    """Whether a normalised answer equals the normalised gold. Not symmetric: the gold decides how much form counts."""
    if squeeze(gold) == squeeze(answer):
        return True
    if not balanced(answer):
        return False
    gold_choice, answer_choice = _choice(gold), _choice(answer)
    if gold_choice and answer_choice:
        return gold_choice[0] == answer_choice[0] and equivalent(gold_choice[1], answer_choice[1])
    if gold_choice or answer_choice:
        golds, answers = gold_choice or (gold,), answer_choice or (answer,)
        return any(equivalent(g, a) for g in golds for a in answers)
    return any(_equal(g, a) for g in readings(gold) for a in readings(answer))


def _split(text: str) -> list[str]:
    """Parts of the text between the commas and semicolons that are in no bracket."""
    parts, depth, start = [], 0, 0
    for match in re.finditer(r"\\[a-zA-Z]+|\\.|[()\[\]{},;]", text):
        token = match[0]
        if token in ("(", "[", "{", r"\{", r"\langle"):
            depth += 1
        elif token in (")", "]", "}", r"\}", r"\rangle"):
            depth -= 1
        elif token in (",", ";") and depth == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    parts.append(text[start:].strip())
    return [part for part in parts if part]


def _structure(text: str) -> tuple[str, list[str]] | None:
    r"""Kind and elements of a collection: `("list", ...)`, `("set", ...)`; with an order `("()", ...)`, `("[)", ...)`.

    Returns `None` for a single value, for intervals joined with `\cup`, and for matrices.
    """
    elements = _split(text)
    if len(elements) > 1:
        return "list", [value for element in elements for value in _both_signs(element)]
    if not elements or r"\cup" in text or r"\begin" in text:
        return None
    text = elements[0]
    if text.startswith(r"\{") and text.endswith(r"\}") and "|" not in text and r"\mid" not in text:
        return "set", [value for element in _split(text[2:-2]) for value in _both_signs(element)]
    if text[0] in "([" and text[-1] in ")]" and _closes_at_end(text):
        elements = _split(text[1:-1])
        return (text[0] + text[-1], elements) if len(elements) > 1 else None
    signs = _both_signs(text)
    return ("list", signs) if len(signs) > 1 else None


def _closes_at_end(text: str) -> bool:
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([") - (character in ")]")
        if depth == 0:
            return position == len(text) - 1
    return False


def _both_signs(text: str) -> list[str]:
    if not re.search(r"\\(?:pm|mp)(?![a-zA-Z])", text):
        return [text]
    plus = re.sub(r"\\mp(?![a-zA-Z])", "-", re.sub(r"\\pm(?![a-zA-Z])", "+", text))
    minus = re.sub(r"\\mp(?![a-zA-Z])", "+", re.sub(r"\\pm(?![a-zA-Z])", "-", text))
    return [plus, minus]


def _equal(gold: str, answer: str) -> bool:
    gold, answer = _without_names(gold, answer)
    gold_structure, answer_structure = _structure(gold), _structure(answer)
    if gold_structure is None and answer_structure is None:
        return _equal_values(gold, answer)
    if gold_structure is None or answer_structure is None:
        kind, elements = gold_structure or answer_structure
        if kind in _UNORDERED and len(elements) == 1 and elements[0] != r"\emptyset":
            return _equal(*((elements[0], answer) if gold_structure else (gold, elements[0])))
        # A relation or a union may still describe the same set; a list of values is no single value.
        return kind not in _UNORDERED and accepted(parse(gold), parse(answer))
    (gold_kind, golds), (answer_kind, answers) = gold_structure, answer_structure
    if len(golds) != len(answers) or len(golds) > MAX_ELEMENTS or {gold_kind, answer_kind} == {"set", "()"}:
        return False
    # Values for x and y have the order of their names.
    ordered = all(_named(g)[0] for g in golds) and not any(_named(a)[0] for a in answers)
    if gold_kind in _UNORDERED and answer_kind in (*_UNORDERED, "()") and not ordered:
        return _match_without_order(golds, answers)
    if (gold_kind in _UNORDERED and ordered) or gold_kind == answer_kind or (gold_kind, answer_kind) == ("()", "list"):
        return all(_equal(g, a) for g, a in zip(golds, answers, strict=True))
    return False


def _match_without_order(golds: list[str], answers: list[str]) -> bool:
    remaining = list(answers)
    for gold in golds:
        found = next((index for index, answer in enumerate(remaining) if _equal(gold, answer)), None)
        if found is None:
            return False
        remaining.pop(found)
    return True


def _named(text: str) -> tuple[str | None, str]:
    """The name that an answer gives, if it does, and its value (rule 6); an equation that has no value stays whole."""
    members = _EQUALS.split(text)
    if len(members) == 1 or len(_split(text)) > 1:
        return None, text
    name = squeeze(members[0]) if _NAME.fullmatch(squeeze(members[0])) else None
    *others, value = [member.strip() for member in (members if name is None else members[1:])]
    if not value or not all(other and _equal(value, other) for other in others):
        return None, text
    return name, value


def _without_names(gold: str, answer: str) -> tuple[str, str]:
    r"""Drop `x =`, `f(x) =`, `(x, y) =` and `x \in` where the name says nothing (in one of the two, or the same)."""
    gold, answer = _MEMBERSHIP.sub("", gold).strip(), _MEMBERSHIP.sub("", answer).strip()
    (gold_name, gold_value), (answer_name, answer_value) = _named(gold), _named(answer)
    if gold_name is not None and answer_name not in (None, gold_name):
        return gold, answer
    # Of an equation without a name both sides belong together.
    if _EQUALS.search(answer_value) and not _EQUALS.search(gold_value):
        return gold, answer
    if _EQUALS.search(gold_value) and answer_name is not None:
        return gold, answer
    return gold_value, answer_value


def _choice(text: str) -> tuple[str, str] | None:
    r"""Label and value of a choice that has both, `\textbf{(D)} 12`."""
    match = _CHOICE.fullmatch(TEXT.sub(r"\1", text).strip())
    return (match[1], match[2]) if match else None


def _as_text(text: str) -> str | None:
    r"""The words of an answer that is text (`\text{east}`, `Evelyn`, `(A)`), lower-case; `None` for mathematics."""
    plain = TEXT.sub(r"\1", text)
    bare = plain.strip(" ().\"'*").replace("-", " ")
    if "\\" in plain or not re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", bare):
        return None
    is_choice = len(bare) == 1 and bare.isupper()
    # Short ones are products of variables unless they can be spoken, or are typeset as text.
    return bare.casefold() if is_choice or plain != text or all(map(_is_word, bare.split())) else None


def _is_word(letters: str) -> bool:
    return len(letters) > 3 or letters.lower() == "no" or (len(letters) == 3 and not _NO_VOWEL.fullmatch(letters))


def _equal_values(gold: str, answer: str) -> bool:
    if squeeze(gold) == squeeze(answer):
        return True
    gold_text, answer_text = _as_text(gold), _as_text(answer)
    if gold_text is not None and answer_text is not None:
        return gold_text == answer_text
    if gold_text is not None and len(gold_text) > 1:
        return False
    gold_base, answer_base = _BASE.fullmatch(squeeze(gold)), _BASE.fullmatch(squeeze(answer))
    if gold_base or answer_base:
        return _equal_in_base(gold, answer, gold_base, answer_base)
    gold_percent, answer_percent = _percent(gold), _percent(answer)
    if gold_percent is not None or answer_percent is not None:
        values = parse(gold_percent or gold), parse(answer_percent or answer)
        if equal(*values) or (gold_percent is not None and answer_percent is not None):
            return equal(*values)
        hundredth = sympy.Rational(1, 100)
        scaled = [
            value * hundredth if percent is not None and isinstance(value, sympy.Expr) else value
            for value, percent in zip(values, (gold_percent, answer_percent), strict=True)
        ]
        return equal(*scaled)
    if re.fullmatch(r"[-\d.,]+", gold):
        answer = _LETTER_UNIT.sub(r"\1", answer)
    return equal(parse(gold), parse(answer))


def _equal_in_base(gold: str, answer: str, gold_base: re.Match | None, answer_base: re.Match | None) -> bool:
    """Numbers such as `52_8`. Where only the gold names the base, the problem asked for it: the digits count."""
    if gold_base and not answer_base:
        return gold_base[1].casefold() == squeeze(answer).casefold()
    try:
        gold_value = int(gold_base[1], int(gold_base[2])) if gold_base else int(gold)
        return gold_value == int(answer_base[1], int(answer_base[2]))
    except ValueError:  # a digit that the base does not have, or a base beyond 36
        return False


def _percent(text: str) -> str | None:
    match = re.fullmatch(r"(.*?)\s*\\?%", text)
    return match[1] if match else None


def _elements_parse(text: str) -> bool:
    structure = _structure(text)
    if structure is not None and structure[0] in _UNORDERED:
        return bool(structure[1]) and all(_as_text(e) is not None or _elements_parse(e) for e in structure[1])
    if structure is not None:
        return all(_elements_parse(element) for element in structure[1])
    return parse(_percent(text) or text) is not None or _BASE.fullmatch(squeeze(text)) is not None
