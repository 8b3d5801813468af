r"""Verdict on one mathematical answer: find it in a completion, normalise it, compare it with the gold answer.

math-verify and its parser turn LaTeX into SymPy and compare relations, sets and matrices. Around them, this module
decides what they leave open or get wrong:

1. *Which text is the answer*: the last `\boxed{...}`. A box that is never closed is an unfinished answer, not a
   shorter one (`\boxed{4` may be the start of `\boxed{42}`).
2. *Units* are ignored where they are recognisable as units: in `\text{...}`, as words, or as a degree sign. The
   problem names the unit. A single letter is a unit only where the gold is a plain number, so `6m` is not `6`.
3. *Percent*: 50% equals 0.5, and also the bare number 50, because "what percent" is answered either way. 0.5 and 50
   remain different.
4. *Numbers* are compared to six significant digits when one of the two is a decimal, exactly otherwise. Six decimals,
   math-verify's rule, would make 1e-9 equal to 2e-9.
5. *Structure*: a list or set has no order, a tuple has one, and brackets must agree: `(1,2)` is not `[1,2]`.
   A tuple may be written without its parentheses.
6. *Expressions with variables* are compared at fixed positive points, which is faster than simplification and gives
   the same verdict on every run. Upper and lower case are different variables.

The worker processes load this file by path: it imports neither the package nor torch.
"""

import logging
import re
import unicodedata
from functools import lru_cache

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from math_verify import verify
from math_verify.grader import should_treat_as_complex
from math_verify.parser import get_last_eq


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
_UNIT_TEXT = re.compile(r"(?<=[\d}).%a-zA-Z\s])\s*" + _TEXT_COMMAND + r"\{[^{}]*\}\s*(?:\^\{?-?\d\}?)?\s*\.?$")
_DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?(?:\s*[CF]\b)?|\\degree\b")
_UNIT_WORDS = (
    r"degrees?|radians?|rad|percent(?:age points?)?|dollars?|cents?|USD|euros?|pounds?|rupees?|yuan|"
    r"(?:square|sq\.?|cubic|cu\.?)?\s*(?:(?:kilo|centi|milli|nano|micro)?(?:met(?:er|re)s?|grams?|lit(?:er|re)s?)|"
    r"inch(?:es)?|foot|feet|ft|yards?|miles?|units?|[kcmn]m|kg|mg|ml|mL)|"
    r"mph|kmph|km/h|m/s(?:\^\{?2\}?)?|seconds?|secs?|minutes?|mins?|hours?|hrs?|days?|weeks?|months?|years?|"
    r"people|persons?|students?|children|ways|apples?|times|points?|[KMGT]?Hz|[kM]?eV|[kM]?Pa|Joules?|Newtons?|Watts?"
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
_ASSIGNMENT = re.compile(
    r"^((?:[a-zA-Z]|\\(?!frac|sqrt)[a-zA-Z]+)[^=<>+*/^\-]*|\([a-zA-Z]\w*(?:,[a-zA-Z]\w*)*\))=(?!=)"
)
_MEMBERSHIP = re.compile(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])")
# What the LaTeX grammar cannot read: commands in subscripts, a subscript on Euler's e, NumPy's names of functions.
_SUBSCRIPT_COMMAND = re.compile(r"_(?:\{\s*\\([a-zA-Z]+)\s*\}|\\([a-zA-Z]+))")
_SUBSCRIPTED_E = re.compile(r"(?<![a-zA-Z\\])([eE])_")
_MODULE_FUNCTION = re.compile(r"\b(?:np|numpy|math)\.([a-z]+)")
_WORDS = re.compile(r"[^\W\d_]{2,}")
_FINAL_ANSWER = re.compile(r"(?:answer\s*(?:is|:|=)+|####)", re.IGNORECASE)
_INLINE_MATH = re.compile(r"\$([^$]+)\$|\\\((.+?)\\\)|\\\[(.+?)\\\]", re.DOTALL)
_NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:/\d+)?%?|-?\.\d+")


def last_boxed(text: str) -> str | None:
    r"""Content of the last `\boxed{...}` (or `\fbox{...}`, or `\boxed 5`).

    Returns:
        The content without the braces; `None` when there is no box, or when the last one is not closed.
    """
    boxes = list(_BOX.finditer(text))
    if not boxes or boxes[-1].end() == len(text):
        return None
    start = boxes[-1].end()
    if text[start] != "{":
        return text[start]
    depth, position = 0, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1  # an escaped brace is part of the answer, as in \{1,2\}
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return text[start + 1 : position]
        position += 1
    return None


def final_answer(text: str) -> str | None:
    """The answer of a completion that may lack a box: the box, what follows "answer is", the last formula or number.

    Returns:
        The text of the answer; `None` when there is neither, or when the last box is not closed.
    """
    if _BOX.search(text):
        return last_boxed(text)
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
    text = _UNICODE_ROOT.sub(r"\\sqrt{\1}", text)
    text = "".join(_UNICODE.get(character, character) for character in text)
    text = re.sub(r"(?<!\\)\\!\s*", "", text).replace("{,}", ",")
    text = _SPACING.sub(" ", text)
    text = re.sub(r"\\\$|\$|(?<!\\)\\[()\[\]]", "", text)
    text = _SIZING.sub("", text)
    text = re.sub(r"\\[dtc]frac(?![a-zA-Z])", r"\\frac", text)
    text = re.sub(r"\\(?:lbrace|rbrace)(?![a-zA-Z])", lambda match: r"\{" if "lb" in match[0] else r"\}", text)
    text = re.sub(r"\*\*(?=\D|$)", "", text) if text.strip().startswith("**") else text.replace("**", "^")
    text = _JOINING_TEXT.sub(",", text)
    text = text.strip().rstrip(".,;: ").strip()
    text = _DEGREES.sub("", text)
    unitless = _UNIT_TEXT.sub("", text).strip()
    if re.search(r"[\d}]|[a-zA-Z]", unitless):
        text = unitless
    text = _UNIT_AFTER_NUMBER.sub(lambda match: r"\%" if "ercent" in match[0] else "", text)
    text = _SCIENTIFIC.sub(r"\1 \\times 10^{\2}", text)
    text = _TRAILING_POINT_NUMBER.sub(r"\1.0", text)
    return re.sub(r"\s+", " ", text).strip()


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
    found = last_boxed(completion) if strict_boxed else final_answer(completion)
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


def _without_names(gold: str, answer: str) -> tuple[str, str]:
    r"""Drop `x =`, `f(x) =`, `(x, y) =` and `x \in` where the name says nothing (in one of the two, or the same)."""
    gold, answer = _MEMBERSHIP.sub("", gold).strip(), _MEMBERSHIP.sub("", answer).strip()
    if len(_split(gold)) > 1 or len(_split(answer)) > 1:
        # The names of a list belong to its elements.
        return gold, answer
    gold_name, answer_name = _ASSIGNMENT.match(_squeeze(gold)), _ASSIGNMENT.match(_squeeze(answer))
    same_name = gold_name and answer_name and gold_name[1] == answer_name[1]
    if gold_name and (same_name or "=" not in answer):
        gold = gold.split("=")[-1]
    elif gold_name or "=" in gold:
        return gold, answer
    if answer_name:
        answer = answer.split("=")[-1]
    return gold.strip(), answer.strip()


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
    return _parse(text) is not None or _BASE.fullmatch(_squeeze(text)) is not None


@lru_cache(maxsize=1024)  # a group's completions have one gold, and often one answer
def _parse(text: str):
    """SymPy object of a normalised answer; `None` when the LaTeX cannot be read."""
    if re.fullmatch(r"-?[0-9]{1,1000}", text):
        return sympy.Integer(text)
    latex = _MODULE_FUNCTION.sub(r"\\\1", _readings(text)[0]).replace(r"\hbar", "h_{bar}")
    latex = _SUBSCRIPTED_E.sub(r"\\mathrm{\1}_", _SUBSCRIPT_COMMAND.sub(r"_{\1\2}", latex))
    latex = normalize_latex(latex, _NORMALIZATION)
    # Of a chain of equations the last member is the answer.
    for candidate in dict.fromkeys((latex, get_last_eq(latex))):
        try:
            return latex2sympy(
                candidate,
                is_real=not should_treat_as_complex(candidate),
                convert_degrees=False,
                normalization_config=None,
                conversion_config=_CONVERSION,
            )
        except Exception:  # the parser raises whatever its grammar or SymPy runs into
            continue
    return None


def _verify(gold, answer) -> bool:
    if gold is None or answer is None:
        return False
    return verify(gold, answer, allow_set_relation_comp=True, timeout_seconds=None)


def _equal_parsed(gold, answer) -> bool:
    if gold is None or answer is None:
        return False
    if isinstance(gold, sympy.Expr) and isinstance(answer, sympy.Expr):
        decided = _equal_numbers(gold, answer) if not gold.free_symbols | answer.free_symbols else _agree(gold, answer)
        if decided is not None:
            return decided
    return _verify(gold, answer)


def _evaluate(expression: sympy.Expr):
    value = sympy.N(expression.doit(), 30)
    return value if value.is_number and value.is_finite and not value.free_symbols else None


def _equal_numbers(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Equality of two constants; `None` when one of them cannot be evaluated."""
    decimal = gold.has(sympy.Float) or answer.has(sympy.Float)
    gold, answer = gold.doit(), answer.doit()
    if gold.is_Rational and answer.is_Rational and not decimal:
        return gold == answer
    try:
        gold_value, answer_value = _evaluate(gold), _evaluate(answer)
    except (TypeError, ValueError, ArithmeticError):
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


def _agree(gold: sympy.Expr, answer: sympy.Expr) -> bool | None:
    """Whether two expressions have the same value at three fixed points; `None` when they have none there."""
    names = sorted({symbol.name for symbol in gold.free_symbols | answer.free_symbols})
    discrete = gold.has(*_DISCRETE) or answer.has(*_DISCRETE)
    for point in range(3):
        values = {
            name: sympy.Integer(5 + 3 * index + point)
            if discrete
            else sympy.Rational(97 + 31 * index + 17 * point, 89)
            for index, name in enumerate(names)
        }
        try:
            gold_value, answer_value = (
                _evaluate(expression.xreplace({symbol: values[symbol.name] for symbol in expression.free_symbols}))
                for expression in (gold, answer)
            )
        except (TypeError, ValueError, ArithmeticError, AttributeError):
            return None
        if gold_value is None or answer_value is None:
            return None
        tolerance = RELATIVE_TOLERANCE if gold.has(sympy.Float) or answer.has(sympy.Float) else 1e-20
        if abs(gold_value - answer_value) > tolerance * max(abs(gold_value), abs(answer_value)):
            return False
    return True
