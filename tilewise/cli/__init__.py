"""The command line, `tilewise`. Its look needs the extra `cli`; the library itself never does."""

from __future__ import annotations

import sys

from tilewise.cli import streams

_EXTRA = {"typer", "rich"}


def main() -> None:
    """Runs the command line, or says in one line what is missing for it."""
    try:
        from tilewise.cli.app import app
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _EXTRA:
            raise
        sys.exit(f"tilewise: {package} is missing; install it with: pip install 'tilewise[cli]'")
    streams.run(app)
