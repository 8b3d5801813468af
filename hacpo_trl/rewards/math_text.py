r"""Which text of a completion is its answer, and one spelling for it: rules 1 to 4 of `math_verification`.

Imports nothing but the standard library: it is read by what needs no SymPy, too.
"""

import re
import unicodedata
from itertools import pairwise


# A longer answer is wrong unread: no benchmark's gold has 1,000 characters, and the LaTeX parser needs seconds for
# more.
MAX_ANSWER_CHARS = 4096
# More words than this, and a gold answer without a box is prose that no answer can be compared with.
MAX_TEXT_WORDS = 5
_UNICODE = {
    "−": "-", "–": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "÷": "/", "±": r"\pm ", "∞": r"\infty ",
    "≤": r"\le ", "≥": r"\ge ", "≠": r"\ne ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
    "π": r"\pi ", "θ": r"\theta ", "°": r"^{\circ}", "⁰": "^{0}", "¹": "^{1}", "²": "^{2}", "³": "^{3}", "⁴": "^{4}",
    "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "，": ",", "（": "(", "）": ")", "％": "%",
}  # fmt: skip
_UNICODE_ROOT = re.compile(r"√\s*(\d+|\w|\([^()]*\))")
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
_TEXT_COMMAND = r"\\(?:text(?:bf|it|rm|normal|sf|tt)?|mathrm|mathbf|mathit|mbox|hbox|operatorname)\s*"
TEXT = re.compile(_TEXT_COMMAND + r"\{([^{}]*)\}")
_JOINING_TEXT = re.compile(
    r",?\s*(?:" + _TEXT_COMMAND + r"\{\s*,?\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z]))"
)
_FONT = re.compile(_TEXT_COMMAND + r"\{\s*([-+]?[\d.,/\s]*\d[\d.,/\s]*)\}")
_UNIT_TEXT = re.compile(r"(?<=[\d}).%a-zA-Z\s])\s*" + _TEXT_COMMAND + r"\{([^{}]*)\}\s*(?:\^\{?-?\d\}?)?\s*\.?$")
# In the place of a unit these change the value, or leave it open.
_NO_UNITS = re.compile(
    r"\d|\b(?i:or|and|not|no|none|but|if|unless|except|than|is|are|was|mod|base|times|plus|minus|over|about|"
    r"squared|cubed|roots?|factorial|half|halves|thirds?|quarters?|twice|double|dozens?|scores?|hundreds?|"
    r"thousands?|millions?|billions?|trillions?|wrong|false|undefined|infinit\w*|maybe|perhaps|[ap]\.?m|BCE?|AD|"
    r"positive|negative|less|more|greater|fewer|above|below|north|south|east|west)\b|"
    # Letters that stand for no unit.
    r"(?<![\w/])[a-fi-kn-rt-zB-EGHIMO-UX-Z](?![\w/])",
)
_REPEATING = re.compile(r"(?<![\d.])(\d*)\.(\d*)\\overline\s*\{(\d+)\}")
_POWERS_OF_TEN = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_POWER_WORD = re.compile(
    rf"(?<=\d)\s*(?:{_TEXT_COMMAND}\{{\s*({'|'.join(_POWERS_OF_TEN)})\b([^{{}}]*)\}}|({'|'.join(_POWERS_OF_TEN)})\b)",
    re.IGNORECASE,
)
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?(?:\s*[CF]\b)?|\\degree\b")
_TRIGONOMETRIC = re.compile(r"(?<!arc)(?:\\|\b)(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])")
_NUMBER_OF_DEGREES = re.compile(r"(\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\})\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree\b)")
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
_SPACING = re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-zA-Z])|~|\\(?:hspace|vspace)\*?\{[^{}]*\}|\s+")
_SIZING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?|displaystyle|textstyle)(?![a-zA-Z])\s*\.?(?=\W|\w|$)")
_SCIENTIFIC = re.compile(r"(?<![\w.])(\d+(?:\.\d*)?|\.\d+)[eE]\{?([+-]?\d+)\}?(?![\w.])")
_TRAILING_POINT_NUMBER = re.compile(r"(?<![\d.])(\d+)\.(?!\d)")
_THOUSANDS = re.compile(r"([+-]?)(\d{1,3}(?:,\d{3})+)(\.\d+)?")
_SPACED_THOUSANDS = re.compile(r"([+-]?)(\d{1,3}(?: \d{3})+)(\.\d+)?")
_FINAL_ANSWER = re.compile(r"(?:answer\s*(?:is|:|=)+|####)", re.IGNORECASE)
_INLINE_MATH = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?|-?\.\d+")


def _boxes(text: str) -> list[tuple[int, int, str | None]]:
    r"""Where each outermost `\boxed{...}` begins and ends, and its content; None if it is not closed."""
    found: list[tuple[int, int, str | None]] = []
    for box in BOX.finditer(text):
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
    nested = re.match(rf"(?:{BOX.pattern}\{{)+", content)
    if nested is None:
        return content
    depth = nested[0].count("{")
    inner = content[nested.end() : len(content) - depth]
    return inner if content.endswith("}" * depth) and balanced(inner) else content


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
    return answers[-1] if len({squeeze(normalize(answer)) for answer in answers}) == 1 else None


def final_answer(text: str) -> str | None:
    """The answer of a completion that may lack a box: the box, what follows "answer is", the last formula or number.

    Returns:
        The text of the answer; `None` when there is neither, or when the last box is not closed.
    """
    text = _THINKING.sub("", text.rpartition("</think>")[2])
    if BOX.search(text):
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
    text = _REPEATING.sub(_fraction_of_repeating, text)
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


def _fraction_of_repeating(match: re.Match) -> str:
    whole, fixed, period = match[1] or "0", match[2], match[3]
    nines = (10 ** len(period) - 1) * 10 ** len(fixed)
    return rf"\frac{{{int(whole + fixed + period) - int(whole + fixed)}}}{{{nines}}}"


def _power_of_ten(match: re.Match) -> str:
    exponent = _POWERS_OF_TEN[(match[1] or match[3]).lower()]
    rest = rf"\text{{{match[2]}}}" if match[2] and match[2].strip() else ""
    return rf" \times 10^{{{exponent}}}{rest}"


def squeeze(text: str) -> str:
    return re.sub(r"\s+", "", text)


def balanced(text: str) -> bool:
    depth = 0
    for brace in re.findall(r"\\.|[{}]", text, re.DOTALL):
        depth += (brace == "{") - (brace == "}")
        if depth < 0:
            return False
    return depth == 0


def readings(text: str) -> list[str]:
    """The text, and the number it is when its commas or spaces separate thousands.

    `120,240` is one number or a list of two; `1,000` only a number, for nobody lists 000.
    """
    match = _THOUSANDS.fullmatch(text) or _SPACED_THOUSANDS.fullmatch(text)
    if match is None:
        return [text]
    number = match[1] + re.sub(r"[ ,]", "", match[2]) + (match[3] or "")
    groups = re.split(r"[ ,]", match[2])
    return [number] if any(group.startswith("0") for group in groups) else [number, text]
