"""Names that do not exist: what was meant."""

import difflib
from collections.abc import Sequence


# Of more names than these, none of which is near, no list is given.
MANY = 40


def unknown_name(name: str, known: Sequence[str], kind: str) -> str:
    """A sentence or two about an unknown name, with the one that it begins, or else the nearest of the known ones.

    Args:
        name: What was given.
        known: What there is.
        kind: What it should name, such as "key".
    """
    begun = [other for other in known if other.startswith(name)]
    close = begun if len(begun) == 1 else difflib.get_close_matches(name, known, n=1)
    if close:
        return f"unknown {kind} {name!r}. Did you mean {close[0]!r}?"
    listed = f" Known {kind}s: {', '.join(known)}." if len(known) <= MANY else ""
    return f"unknown {kind} {name!r}.{listed}"
