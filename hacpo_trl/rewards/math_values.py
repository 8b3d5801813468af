"""Values of normalised answers, and whether two are equal: math-verify accepts, and a veto may reject; see
`math_verification`."""

import logging
import math
import random
import re
from functools import lru_cache

import sympy
from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
from latex2sympy2_extended.latex2sympy2 import ConversionConfig
from latex2sympy2_extended.logic import And
from math_verify import verify
from sympy.core.relational import Relational

from .math_text import readings


# math-verify warns that its own time limit is off. The limit is kept by the process pool instead.
logging.getLogger("math_verify").setLevel(logging.ERROR)

# Half a unit in the sixth significant digit.
RELATIVE_TOLERANCE = 5e-6
INTEGER_TOLERANCE = 1e-6
# Points at which variables are sampled, to reject: of both signs, and in no progression.
SAMPLES = 8
# units=False: math-verify's list of units has single letters, which turns 6m into 6 and 2t into 2.
_NORMALIZATION = NormalizationConfig(
    basic_latex=True, units=False, malformed_operators=True, nits=True, boxed="none", equations=False
)
# math-verify parses in lower case, which makes M - m zero.
_CONVERSION = ConversionConfig(lowercase_symbols=False)
_IMAGINARY = re.compile(r"(?<![a-zA-Z\\])i(?![a-zA-Z])|\\imath")
# What the LaTeX grammar cannot read: commands in subscripts, a subscript on Euler's e, NumPy's names of functions.
_SUBSCRIPT_COMMAND = re.compile(r"_(?:\{\s*\\([a-zA-Z]+)\s*\}|\\([a-zA-Z]+))")
_SUBSCRIPTED_E = re.compile(r"(?<![a-zA-Z\\])([eE])_")
# What it would read as a product or a quotient: an angle's points have an order, an inverse is no power.
_FIGURE = re.compile(r"\\(angle|triangle)\s*\{?\s*([A-Z](?:\s*[A-Z])*)\s*\}?")
_INVERSE = re.compile(r"(?<![a-zA-Z\\])([a-zA-Z])\^\{?-1\}?\(")
_MODULE_FUNCTION = re.compile(r"\b(?:np|numpy|math)\.([a-z]+)")


@lru_cache(maxsize=1024)  # a group's completions have one gold, and often one answer
def parse(text: str):
    """SymPy object of a normalised answer; `None` when the LaTeX cannot be read."""
    if re.fullmatch(r"-?[0-9]{1,1000}", text):
        return sympy.Integer(text)
    latex = _MODULE_FUNCTION.sub(r"\\\1", readings(text)[0]).replace(r"\hbar", "h_{bar}")
    latex = _SUBSCRIPTED_E.sub(r"\\mathrm{\1}_", _SUBSCRIPT_COMMAND.sub(r"_{\1\2}", latex))
    latex = _FIGURE.sub(lambda match: f"{match[1][0]}_{{{match[2].replace(' ', '')}}}", latex)
    latex = normalize_latex(_INVERSE.sub(r"\1_{inverse}(", latex), _NORMALIZATION)
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


def equal(gold, answer) -> bool:
    """Equal as math-verify sees it, and nothing speaks against it."""
    if gold is None or answer is None:
        return False
    return accepted(gold, answer) and not _vetoed(gold, answer)


def accepted(gold, answer) -> bool:
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
