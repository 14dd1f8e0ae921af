"""Where commands write: a stream may not know every character, or take nothing at all."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable


def run(command: Callable[[], object]) -> None:
    """Runs a command and sees that all it wrote has arrived; if not, says so in one line, status 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # "?" for what an ASCII terminal lacks
    try:
        try:
            command()
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read has seen enough, such as head
        _drop_output()
        sys.exit(1)
    except OSError as error:
        _drop_output()
        what = error.filename or "cannot write"
        print(f"tilewise: {what}: {error.strerror or error}", file=sys.stderr)
        sys.exit(2)


def _drop_output() -> None:
    """Python would try to write the rest once more when it ends, and complain at length."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
