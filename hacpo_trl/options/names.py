"""Names that do not exist: what was meant."""

import difflib
from collections.abc import Sequence


def unknown_name(name: str, known: Sequence[str], kind: str) -> str:
    """A sentence or two about an unknown name, with the nearest of the known ones.

    Args:
        name: What was given.
        known: What there is.
        kind: What it should name, such as "key".
    """
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"Did you mean {close[0]!r}?" if close else f"Known {kind}s: {', '.join(known)}."
    return f"unknown {kind} {name!r}. {hint}"
