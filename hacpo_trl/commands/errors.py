"""What commands say to their users. What a user did wrong is one line: `error: ...` on stderr and exit status 2.

`HACPO_TRL_TRACEBACK=1` keeps the traceback, for what looks like a mistake of the program.
"""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import NoReturn

from ..options.names import unknown_name


TRACEBACK = "HACPO_TRL_TRACEBACK"
STATUS = 2


def fail(message: str, everywhere: bool = False) -> NoReturn:
    """Ends the program with a message for its user.

    Args:
        message: What went wrong.
        everywhere: Whether each process on a machine says it, not the first one for all.
    """
    if everywhere or os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"error: {' '.join(message.split())}", file=sys.stderr)
    raise SystemExit(STATUS)


def show(text: str):
    """Prints a text whose reader may stop early, as in `hacpo recipes | head`."""
    try:
        print(text.rstrip("\n"), flush=True)
    except BrokenPipeError:
        # At exit Python would try once more to write what is left.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _message(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename is not None and error.strerror is not None:
        return f"{error.filename}: {error.strerror}"
    return str(error) or type(error).__name__


@contextlib.contextmanager
def one_line(*kinds: type[Exception]) -> Iterator[None]:
    """Makes errors of these types end the program by `fail`."""
    try:
        yield
    except kinds as error:
        if os.environ.get(TRACEBACK) == "1":
            raise
        fail(_message(error), everywhere=getattr(error, "of_one_process", False))


@contextlib.contextmanager
def user_errors(*further: type[Exception]) -> Iterator[None]:
    """Makes errors of what is put together from a user's settings, files and models end the program by `fail`.

    Args:
        further: Further types of errors, beside wrong values, files and modules.
    """
    with one_line(ValueError, OSError, ImportError, *further):
        yield


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are a line, with the option that was probably meant. Options are written in full."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_args(self, args=None, namespace=None):
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.refuse(unknown[0])
        return parsed

    def refuse(self, argument: str) -> NoReturn:
        """An argument that the command has no use for."""
        if argument.startswith("--"):
            known = [option for option in self._option_string_actions if option.startswith("--")]
            self.error(unknown_name(argument.partition("=")[0], known, "option"))
        self.error(f"unexpected argument {argument!r}. `{self.prog} --help` says what there is.")

    def error(self, message: str) -> NoReturn:
        fail(message)
