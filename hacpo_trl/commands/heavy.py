"""How commands import what is heavy: torch, transformers, and what stands on them."""

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def heavy_imports() -> Iterator[None]:
    """Imports without the garbage collector, which would go through the modules again and again: a fifth of the time.

    What is there afterwards stays, and later collections leave it out.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
