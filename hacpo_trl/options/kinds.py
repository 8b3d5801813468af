"""Values of the kind that an option has: what YAML or a command line gave as text is read, and the wrong kind refused.

Options are dataclass fields, so their annotations say what they take. Kinds that mean more than a number, a text or a
list of these (a schedule, an optimizer, JSON in a text) are left to what reads them.
"""

import math
import numbers
import types
from dataclasses import fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


# Annotated as text by transformers, which takes True as well: the newest checkpoint.
NOT_AS_ANNOTATED = frozenset({"resume_from_checkpoint"})

TRUE, FALSE = {"true", "yes", "on", "y", "t", "1"}, {"false", "no", "off", "n", "f", "0"}


def convert_fields(options: Any, where: str = ""):
    """Gives every field of a dataclass the kind of value that its annotation says, in place.

    Args:
        options: The dataclass.
        where: Beginning of an error's text, such as "Agent 'qwen': ".

    Raises:
        ValueError: A value is of another kind; the option, the value and what would be right are named.
    """
    for name, kind in kinds_of(type(options)).items():
        setattr(options, name, converted(getattr(options, name), kind, where + name))


def kinds_of(dataclass: type) -> dict[str, Any]:
    """The kinds of value that a dataclass's fields take, by name."""
    kinds = get_type_hints(dataclass)
    return {field.name: kinds[field.name] for field in fields(dataclass) if field.name not in NOT_AS_ANNOTATED}


def converted(value: Any, kind: Any, name: str) -> Any:
    """The value as the kind has it: "1e-6" as a float, 8.0 as an int, "true" as a bool, 7 as a text.

    Args:
        value: What was given.
        kind: A type as it is annotated.
        name: The option, for errors.
    """
    choices = get_args(kind)
    if get_origin(kind) in (Union, types.UnionType):
        kinds = [choice for choice in choices if choice is not type(None)]
        if (value is None and len(kinds) < len(choices)) or len(kinds) > 1:
            return value
        return converted(value, kinds[0], name)
    if get_origin(kind) is Literal:
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(str, choices))}, not {value!r}.")
        return value
    if get_origin(kind) is list:
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} must be a list, not {value!r}.")
        return [converted(item, choices[0], f"{name}[{index}]") for index, item in enumerate(value)]
    if get_origin(kind) is dict:
        if not isinstance(value, dict):
            raise ValueError(f"{name} must be a mapping of names to values, not {value!r}.")
        return value
    return READERS[kind](value, name) if kind in READERS else value


def _number(value: Any, name: str) -> float:
    # A bool is an int to Python, and nobody who writes `delta: true` means 1.
    if isinstance(value, (str, numbers.Real)) and not isinstance(value, bool):
        try:
            number = float(value)
        except (ValueError, OverflowError):
            number = math.nan
        if not math.isnan(number):
            return number
    raise ValueError(f"{name} must be a number, not {value!r}.")


def _integer(value: Any, name: str) -> int:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return int(value)
    try:
        number = _number(value, name)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"{name} must be a whole number, not {value!r}.")
    return int(number)


def _boolean(value: Any, name: str) -> bool:
    if (word := str(value).lower()) in TRUE or word in FALSE:
        return word in TRUE
    raise ValueError(f"{name} must be true or false, not {value!r}.")


def _text(value: Any, name: str) -> str:
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str) and not hasattr(value, "__fspath__"):
        raise ValueError(f"{name} must be a text, not {value!r}. In YAML, put it in quotes.")
    return value if isinstance(value, str) else str(value)


READERS = {float: _number, int: _integer, bool: _boolean, str: _text}
