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

import logging
import math
import random
import re
import unicodedata
from functools import lru_cache
from itertools import pairwise

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.relational import Relational


# math-verify warns that its own time limit is off. The limit is kept by the process pool instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# A longer answer is wrong unread: no benchmark's gold has 1,000 characters, and the LaTeX parser needs seconds for
# more.
MAX_ANSWER_CHARS = 4096
# More words than this, and a gold answer without a box is prose that no answer can be compared with.
MAX_TEXT_WORDS = 5
# Half a unit in the sixth significant digit.
RELATIVE_TOLERANCE = 5e-6
INTEGER_TOLERANCE = 1e-6
# Points at which variables are sampled, to reject: of both signs, and in no progression.
SAMPLES = 8
# A collection with more elements than this equals only the same text: matching is quadratic.
MAX_ELEMENTS = 64

# units=False: math-verify's list of units has single letters, which turns 6m into 6 and 2t into 2.
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
# math-verify parses in lower case, which makes M - m zero.
_CONVERSION = ConversionConfig(lowercase_symbols=False)

_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "π": r"\pi ", "θ": r"\theta ", "°": r"^{\circ}", "⁰": "^{0}", "¹": "^{1}", "²": "^{2}", "³": "^{3}", "⁴": "^{4}",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "，": ",", "（": "(", "）": ")", "％": "%",
}  # fmt: skip
_UNICODE_ROOT = re.compile(r"√\s*(\d+|\w|\([^()]*\))")

_BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mathrm|mathbf|mathit|mbox|hbox|operatorname)\s*"
_TEXT = re.compile(_TEXT_COMMAND + r"\{([^{}]*)\}")
_JOINING_TEXT = re.compile(
    r",?\s*(?:" + _TEXT_COMMAND + r"\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))"
)
_FONT = re.compile(_TEXT_COMMAND + r"\{\s*([-+]?[\d.,/\s]*\d[\d.,/\s]*)\}")
_UNIT_TEXT = re.compile(r"(?<=[\d}).%a-zA-Z\s])\s*" + _TEXT_COMMAND + r"\{([^{}]*)\}\s*(?:\^\{?-?\d\}?)?\s*\.?$")
# In the place of a unit these change the value, or leave it open.
_NO_UNITS = re.compile(
    r"\d|\b(?:or|and|not|no|none|but|if|unless|except|than|is|are|was|mod|base|times|plus|minus|over|about|"
    r"squared?|cubed?|roots?|factorial|half|halves|thirds?|quarters?|twice|double|dozens?|scores?|hundreds?|"
    r"thousands?|millions?|billions?|trillions?|wrong|false|undefined|infinit\w*|maybe|perhaps|[a-zA-Z])\b",
    re.IGNORECASE,
)
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWER_WORD = re.compile(
    rf"(?<=\d)\s*(?:{_TEXT_COMMAND}\{{\s*({'|'.join(_POWERS_OF_TEN)})\b([^{{}}]*)\}}|({'|'.join(_POWERS_OF_TEN)})\b)",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?(?:\s*[CF]\b)?|\\degree\b")
_TRIGONOMETRIC = re.compile(r"(?<!arc)(?:\\|\b)(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_NUMBER_OF_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\})\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree\b)")
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])|\\imath")
_CHOICE = re.compile(r"\(([A-Z])\)\s*(\S.*)")
_THINKING = re.compile(r"<think>.*?(?:</think>|$)", re.DOTALL)
_BETWEEN_BOXES = re.compile(r"[\s$.,;:&*_]*(?:\\?(?:and|text\{\s*and\s*\}|quad|qquad|\(|\)))?[\s$.,;:&*_]*")
_UNIT_WORDS = (
    r"degrees?|radians?|rad|percent(?:age points?)?|dollars?|cents?|USD|euros?|pounds?|rupees?|yuan|"
    r"(?:square|sq\.?|cubic|cu\.?)?\s*(?:(?:kilo|centi|milli|nano|micro)?(?:met(?:er|re)s?|grams?|lit(?:er|re)s?)|"
    r"inch(?:es)?|foot|feet|ft|yards?|miles?|units?|[kcmn]m|kg|mg|ml|mL)|"
    r"mph|kmph|km/h|m/s(?:\^\{?2\}?)?|seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|months?|years?|"
    r"people|persons?|students?|children|ways|apples?|points?|[KMGT]?Hz|[kM]?eV|[kM]?Pa|Joules?|Newtons?|Watts?"
)
_UNIT_AFTER_NUMBER = re.compile(rf"(?<=[\d}})])\s*(?:{_UNIT_WORDS})(?:\s*\^\s*\{{?[23]\}}?)?\s*$", re.IGNORECASE)
_LETTER_UNIT = re.compile(r"^(-?[\d.,]+(?:\s*\\(?:times|cdot)\s*10\^\{?-?\d+\}?)?)\s*[mgsLlNJWVAKh](?:\^\{?[23]\}?)?$")
_SPACING = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\\(?:hspace|vspace)\*?\{[^{}]*\}|\s+")
_SIZING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])\s*\.?(?=\W|\w|$)")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]\{?([+-]?\d+)\}?(?![\w.])")
_TRAILING_POINT_NUMBER = re.compile(r"(?<![\d.])(\d+)\.(?!\d)")
_THOUSANDS = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+)(\.\d+)?")
_SPACED_THOUSANDS = re.compile(r"([+-]?)(\d{1,3}(?: \d{3})+)(\.\d+)?")
_BASE = re.compile(r"([0-9A-F]*[0-9][0-9A-F]*)_\{?(\d+)\}?")
# What is a bare name left of an equals sign: a variable, a function of something, a figure's points, a word.
_NAME = re.compile(
    r"(?:(?:[a-zA-Z]|[A-Z]{2,4}|[A-Z]?[a-z]{4,}|\\(?!frac|sqrt|sin|cos|tan|log|ln|binom|pi(?![a-zA-Z]))[a-zA-Z]+"
    r"(?:\{[^{}]*\})?)(?:_(?:\w|\{[^{}]*\}))?'*(?:\([^()=]*\))?|\([a-zA-Z]\w*(?:,[a-zA-Z]\w*)*\)|\[[A-Z]+\])"
)
_EQUALS = re.compile(r"(?<![\\<>!=])=(?!=)")
_RELATION = re.compile(r"[<>=]|\\(?:le|ge|leq|geq|ne|neq|lt|gt|leqslant|geqslant|in)(?![a-zA-Z])")
_MEMBERSHIP = re.compile(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])")
# What the LaTeX grammar cannot read: commands in subscripts, a subscript on Euler's e, NumPy's names of functions.
_SUBSCRIPT_COMMAND = re.compile(r"_(?:\{\s*\\([a-zA-Z]+)\s*\}|\\([a-zA-Z]+))")
_SUBSCRIPTED_E = re.compile(r"(?<![a-zA-Z\\])([eE])_")
_MODULE_FUNCTION = re.compile(r"\b(?:np|numpy|math)\.([a-z]+)")
_WORDS = re.compile(r"[^\W\d_]{2,}")
_FINAL_ANSWER = re.compile(r"(?:answer\s*(?:is|:|=)+|####)", re.IGNORECASE)
_INLINE_MATH = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?|-?\.\d+")


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    r"""Where each outermost `\boxed{...}` begins and ends, and its content; None if it is not closed."""
    found: list[tuple[int, int, str | None]] = []
    for box in _BOX.finditer(text):
        start = box.end()
        if found and box.start() < found[-1][1]:
            continue
        if start == len(text):
            found.append((box.start(), start, None))
        elif text[start] != "{":
            found.append((box.start(), start + 1, text[start]))
        else:
            end = _closing_brace(text, start)
            content = None if end is None else _innermost(text[start + 1 : end])
            found.append((box.start(), len(text) if end is None else end + 1, content))
    return found


def _innermost(content: str) -> str:
    """The content of boxes that hold nothing but one another."""
    nested = re.match(rf"(?:{_BOX.pattern}\{{)+", content)
    if nested is None:
        return content
    depth = nested[0].count("{")
    inner = content[nested.end() : len(content) - depth]
    return inner if content.endswith("}" * depth) and _balanced(inner) else content


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    # An escaped brace is part of the answer, as in \{1,2\}.
    for token in re.finditer(r"\\.|[{}]", text[start:], re.DOTALL):
        depth += (token[0] == "{") - (token[0] == "}")
        if depth == 0 and token[0] == "}":
            return start + token.start()
    return None


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 5`).

    Returns:
        The content without the braces; `None` when there is no box, or when the last one is not closed.
    """
    boxes = _boxes(text)
    return boxes[-1][2] if boxes else None


def boxed_answer(text: str) -> str | None:
    """The answer that a completion's boxes give, thoughts aside.

    Returns:
        The content of the only box, of several that say the same, or the list of those side by side; `None` when there
        is none, when one is not closed, or when they say different things.
    """
    text = _THINKING.sub("", text.rpartition("</think>")[2])
    boxes = _boxes(text)
    if not boxes or any(content is None for _, _, content in boxes):
        return None
    answers = [boxes[0][2]]
    for (_, before, _), (after, _, content) in pairwise(boxes):
        if _BETWEEN_BOXES.fullmatch(text, before, after):
            answers[-1] += f", {content}"
        else:
            answers.append(content)
    return answers[-1] if len({_squeeze(normalize(answer)) for answer in answers}) == 1 else None


def final_answer(text: str) -> str | None:
    """The answer of a completion that may lack a box: the box, what follows "answer is", the last formula or number.

    Returns:
        The text of the answer; `None` when there is neither, or when the last box is not closed.
    """
    text = _THINKING.sub("", text.rpartition("</think>")[2])
    if _BOX.search(text):
        return boxed_answer(text)
    *_, tail = _FINAL_ANSWER.split(text)
    tail = tail[-MAX_ANSWER_CHARS:]
    formulas = [next(group for group in match.groups() if group) for match in _INLINE_MATH.finditer(tail)]
    if formulas:
        return formulas[-1]
    numbers = _NUMBER.findall(tail)
    if numbers:
        return numbers[-1]
    return tail.strip(" \n.*:") if _FINAL_ANSWER.search(text) and len(tail.split()) <= MAX_TEXT_WORDS else None


def gold_answer(gold) -> str | None:
    r"""Normalised gold answer of a dataset's cell: an answer, or a solution that ends in `\boxed{...}` or `#### 42`.

    Returns:
        The normalised answer; `None` when it is empty or cannot be compared with anything (unbalanced braces, prose).
    """
    if gold is None or gold != gold:  # NaN marks an empty cell of a table
        return None
    text = str(gold)
    if _BOX.search(text):
        text = last_boxed(text)
        if text is None:
            return None
    elif "####" in text:
        text = text.rsplit("####", 1)[1]
    text = normalize(text)
    if not re.search(r"[^\W_]", text) or not _balanced(text) or len(text) > MAX_ANSWER_CHARS:
        return None
    words = _WORDS.findall(re.sub(r"\\[a-zA-Z]+", " ", _TEXT.sub(r" \1 ", text)))
    if len(words) > MAX_TEXT_WORDS:
        return None
    # Text is compared as text; everything else has to be readable for the parser.
    if _as_text(text) is None and not _elements_parse(text):
        return None
    return text


def normalize(text: str) -> str:
    """One spelling for what typesetting spells in several ways; the mathematics is left as it is."""
    # Zero-width characters, byte order marks, directional marks.
    text = "".join(
        character for character in text if unicodedata.category(character) not in ("Cf", "Cc") or character in "\n\t"
    )
    # Full-width characters are those of ASCII, in another place.
    text = "".join(chr(ord(c) - 0xFEE0) if 0xFF01 <= ord(c) <= 0xFF5E else c for c in text)
    text = _UNICODE_ROOT.sub(r"\\sqrt{\1}", text)
    text = "".join(_UNICODE.get(character, character) for character in text)
    text = re.sub(r"(?<!\\)\\!\s*", "", text).replace("{,}", ",")
    text = _SPACING.sub(" ", text)
    text = re.sub(r"\\\$|\$|(?<!\\)\\[()\[\]]", "", text)
    text = _SIZING.sub("", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\(?:lbrace|rbrace)(?![a-zA-Z])", lambda match: r"\{" if "lb" in match[0] else r"\}", text)
    text = re.sub(r"\*\*(?=\D|$)", "", text) if text.strip().startswith("**") else text.replace("**", "^")
    text = re.sub(r"\\varnothing(?![a-zA-Z])", r"\\emptyset", text)
    text = _FONT.sub(lambda match: match[1].strip(), text)
    text = _JOINING_TEXT.sub(",", text)
    text = text.strip().rstrip(".,;: ").strip()
    text = r"\emptyset" if text in ("{}", r"\{\}", r"\{ \}") else text
    text = _POWER_WORD.sub(_power_of_ten, text)
    if _TRIGONOMETRIC.search(text):
        text = _NUMBER_OF_DEGREES.sub(r"(\1\\cdot\\frac{\\pi}{180})", text)
    text = _DEGREES.sub("", text)
    unit = _UNIT_TEXT.search(text)
    if unit and not _NO_UNITS.search(unit[1]) and re.search(r"[\d}]|[a-zA-Z]", text[: unit.start()]):
        text = text[: unit.start()].strip()
    text = _UNIT_AFTER_NUMBER.sub(lambda match: r"\%" if "ercent" in match[0] else "", text)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    text = _TRAILING_POINT_NUMBER.sub(r"\1.0", text)
    return re.sub(r"\s+", " ", text).strip()


def _power_of_ten(match: re.Match) -> str:
    exponent = _POWERS_OF_TEN[(match[1] or match[3]).lower()]
    rest = rf"\text{{{match[2]}}}" if match[2] and match[2].strip() else ""
    return rf" \times 10^{{{exponent}}}{rest}"


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
    if _squeeze(gold) == _squeeze(answer):
        return True
    if not _balanced(answer):
        return False
    gold_choice, answer_choice = _choice(gold), _choice(answer)
    if gold_choice and answer_choice:
        return gold_choice[0] == answer_choice[0] and equivalent(gold_choice[1], answer_choice[1])
    if gold_choice or answer_choice:
        golds, answers = gold_choice or (gold,), answer_choice or (answer,)
        return any(equivalent(g, a) for g in golds for a in answers)
    return any(_equal(g, a) for g in _readings(gold) for a in _readings(answer))


def _squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def _balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def _readings(text: str) -> list[str]:
    """The text, and the number it is when its commas or spaces separate thousands.

    `120,240` is one number or a list of two; `1,000` only a number, for nobody lists 000.
    """
    match = _THOUSANDS.fullmatch(text) or _SPACED_THOUSANDS.fullmatch(text)
    if match is None:
        return [text]
    number = match[1] + re.sub(r"[ ,]", "", match[2]) + (match[3] or "")
    groups = re.split(r"[ ,]", match[2])
    return [number] if any(group.startswith("0") for group in groups) else [number, text]


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
    r"""Kind and elements of a collection: `("list", ...)` without order, or `("()", ...)`, `("[)", ...)` with one.

    Returns `None` for a single value, for intervals joined with `\cup`, and for matrices.
    """
    elements = _split(text)
    if len(elements) > 1:
        return "list", [value for element in elements for value in _both_signs(element)]
    if not elements or r"\cup" in text or r"\begin" in text:
        return None
    text = elements[0]
    if text.startswith(r"\{") and text.endswith(r"\}") and "|" not in text and r"\mid" not in text:
        return "list", [value for element in _split(text[2:-2]) for value in _both_signs(element)]
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
        if kind == "list" and len(elements) == 1:
            return _equal(*((elements[0], answer) if gold_structure else (gold, elements[0])))
        # A relation or a union may still describe the same set; a list of values is no single value.
        return kind != "list" and _verify(_parse(gold), _parse(answer))
    (gold_kind, golds), (answer_kind, answers) = gold_structure, answer_structure
    if len(golds) != len(answers) or len(golds) > MAX_ELEMENTS:
        return False
    if gold_kind == "list" and answer_kind in ("list", "()"):
        return _match_without_order(golds, answers)
    if gold_kind == answer_kind or (gold_kind == "()" and answer_kind == "list"):
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
    name = _squeeze(members[0]) if _NAME.fullmatch(_squeeze(members[0])) else None
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
    match = _CHOICE.fullmatch(_TEXT.sub(r"\1", text).strip())
    return (match[1], match[2]) if match else None


def _as_text(text: str) -> str | None:
    r"""The words of an answer that is text (`\text{east}`, `Evelyn`, `(A)`), lower-case; `None` for mathematics."""
    plain = _TEXT.sub(r"\1", text)
    bare = plain.strip(" ().\"'*").replace("-", " ")
    if "\\" in plain or not re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)*", bare):
        return None
    is_choice = len(bare) == 1 and bare.isupper()
    # Words of a single letter are variables unless typeset as text.
    return bare.casefold() if is_choice or plain != text or min(map(len, bare.split())) > 1 else None


def _equal_values(gold: str, answer: str) -> bool:
    if _squeeze(gold) == _squeeze(answer):
        return True
    gold_text, answer_text = _as_text(gold), _as_text(answer)
    if gold_text is not None and answer_text is not None:
        return gold_text == answer_text
    if gold_text is not None and len(gold_text) > 1:
        return False
    gold_base, answer_base = _BASE.fullmatch(_squeeze(gold)), _BASE.fullmatch(_squeeze(answer))
    if gold_base or answer_base:
        return _equal_in_base(gold, answer, gold_base, answer_base)
    gold_percent, answer_percent = _percent(gold), _percent(answer)
    if gold_percent is not None or answer_percent is not None:
        values = _parse(gold_percent or gold), _parse(answer_percent or answer)
        if _equal_parsed(*values) or (gold_percent is not None and answer_percent is not None):
            return _equal_parsed(*values)
        hundredth = sympy.Rational(1, 100)
        scaled = [
            value * hundredth if percent is not None and isinstance(value, sympy.Expr) else value
            for value, percent in zip(values, (gold_percent, answer_percent), strict=True)
        ]
        return _equal_parsed(*scaled)
    if re.fullmatch(r"[-\d.,]+", gold):
        answer = _LETTER_UNIT.sub(r"\1", answer)
    return _equal_parsed(_parse(gold), _parse(answer))


def _equal_in_base(gold: str, answer: str, gold_base: re.Match | None, answer_base: re.Match | None) -> bool:
    """Numbers such as `52_8`. Where only the gold names the base, the problem asked for it: the digits count."""
    if gold_base and not answer_base:
        return gold_base[1].casefold() == _squeeze(answer).casefold()
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
    if structure is not None and structure[0] == "list":
        return bool(structure[1]) and all(_as_text(e) is not None or _elements_parse(e) for e in structure[1])
    if structure is not None:
        return all(_elements_parse(element) for element in structure[1])
    return _parse(_percent(text) or text) is not None or _BASE.fullmatch(_squeeze(text)) is not None


@lru_cache(maxsize=1024)  # a group's completions have one gold, and often one answer
def _parse(text: str):
    """SymPy object of a normalised answer; `None` when the LaTeX cannot be read."""
    if re.fullmatch(r"-?[0-9]{1,1000}", text):
        return sympy.Integer(text)
    latex = _MODULE_FUNCTION.sub(r"\\\1", _readings(text)[0]).replace(r"\hbar", "h_{bar}")
    latex = _SUBSCRIPTED_E.sub(r"\\mathrm{\1}_", _SUBSCRIPT_COMMAND.sub(r"_{\1\2}", latex))
    latex = normalize_latex(latex, _NORMALIZATION)
    # `1 > x > 0` is `0 < x < 1`.
    if re.fullmatch(r"[^<>=]+(?:>[^<>=]+){2,}", latex):
        latex = "<".join(reversed(latex.split(">")))
    imaginary = _IMAGINARY.search(latex) is not None
    try:
        value = latex2sympy(
            latex,
            is_real=not imaginary,
            convert_degrees=False,
            normalization_config=None,
            conversion_config=_CONVERSION,
        )
        if imaginary and isinstance(value, sympy.Expr):
            value = value.xreplace({symbol: sympy.I for symbol in value.free_symbols if symbol.name == "i"})
        return value
    except Exception:  # the parser raises whatever its grammar or SymPy runs into
        return None


def _equal_parsed(gold, answer) -> bool:
    """Equal as math-verify sees it, and nothing speaks against it."""
    if gold is None or answer is None:
        return False
    return _verify(gold, answer) and not _vetoed(gold, answer)


def _verify(gold, answer) -> bool:
    if gold is None or answer is None:
        return False
    rounding = _decimals(gold) if gold.has(sympy.Float) or answer.has(sympy.Float) else 6
    return verify(gold, answer, float_rounding=rounding, allow_set_relation_comp=True, timeout_seconds=None)


def _decimals(gold) -> int:
    """The decimal place of a number's sixth significant digit; the sixth one of what is no number."""
    value = None if gold.free_symbols or not isinstance(gold, sympy.Expr) else _evaluate(gold)
    return 6 if not value else 5 - math.floor(math.log10(abs(value)))


def _vetoed(gold, answer) -> bool:
    """What math-verify accepts and is wrong all the same."""
    if (
        _is_relation(gold) != _is_relation(answer)
        and not isinstance(gold, sympy.Set)
        and not isinstance(answer, sympy.Set)
    ):
        return True
    if not isinstance(gold, sympy.Expr) or not isinstance(answer, sympy.Expr):
        return False
    if not gold.free_symbols | answer.free_symbols:
        return _equal_numbers(gold, answer) is False
    return _differ_somewhere(gold, answer)


def _is_relation(value) -> bool:
    return isinstance(value, (Relational, And))


def _evaluate(expression: sympy.Expr):
    value = sympy.N(expression.doit(), 30)
    return value if value.is_number and value.is_finite and not value.free_symbols else None


def _equal_numbers(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Equality of two constants; `None` when one of them cannot be evaluated."""
    decimal = gold.has(sympy.Float) or answer.has(sympy.Float)
    try:
        gold, answer = gold.doit(), answer.doit()
        if gold.is_Rational and answer.is_Rational and not decimal:
            return gold == answer
        gold_value, answer_value = _evaluate(gold), _evaluate(answer)
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        return None
    if gold_value is None or answer_value is None:
        return None
    difference = abs(gold_value - answer_value)
    if not decimal:
        return bool(difference <= 1e-20 * max(abs(gold_value), abs(answer_value)))
    if gold.is_Integer:
        return bool(difference <= (INTEGER_TOLERANCE if gold else 0))
    return bool(difference <= RELATIVE_TOLERANCE * abs(gold_value))


_DISCRETE = (sympy.floor, sympy.ceiling, sympy.binomial, sympy.factorial, sympy.Mod)


def _differ_somewhere(gold: sympy.Expr, answer: sympy.Expr) -> bool:
    """Whether two expressions have different values at one of some points, the same ones in every run."""
    names = sorted({symbol.name for symbol in gold.free_symbols | answer.free_symbols})
    discrete = gold.has(*_DISCRETE) or answer.has(*_DISCRETE)
    tolerance = RELATIVE_TOLERANCE if gold.has(sympy.Float) or answer.has(sympy.Float) else 1e-15
    rng = random.Random(" ".join(names))
    for point in range(SAMPLES):
        # Half of them positive, where roots and logarithms have a value.
        low = 1 if discrete or point % 2 == 0 else -299
        values = {name: sympy.Integer(rng.randrange(1, 12)) if discrete else _rational(rng, low) for name in names}
        try:
            gold_value, answer_value = (
                _evaluate(expression.xreplace({symbol: values[symbol.name] for symbol in expression.free_symbols}))
                for expression in (gold, answer)
            )
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            continue
        if gold_value is None or answer_value is None or not gold_value.is_real or not answer_value.is_real:
            continue
        if abs(gold_value - answer_value) > tolerance * max(1, abs(gold_value), abs(answer_value)):
            return True
    return False


def _rational(rng: random.Random, low: int) -> sympy.Rational:
    return sympy.Rational(rng.randrange(low, 300), rng.randrange(83, 113))
