"""Text in, bytes out: the demo's model reads bytes, so any text is a sequence of numbers below 256."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

_TEXT_SUFFIXES = {".md", ".py", ".rst", ".txt"}
# Installed packages are not the standard library, and its tests are data more than prose.
_NOT_STDLIB = {"site-packages", "dist-packages", "test", "tests", "idle_test"}


class TextError(ValueError):
    """The text cannot be used; the message is one line that says which file and why."""


@dataclass(frozen=True)
class Corpus:
    """A text and where it came from.

    data: uint8 tensor of shape (bytes,).
    source: what a person would call it.
    files: how many files it was read from.
    """

    data: torch.Tensor
    source: str
    files: int

    def split(self, window: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The text to train on and, from its end, the twentieth that no training step sees.

        Raises TextError if there is not at least one window (in bytes) in each.
        """
        held_out = len(self.data) // 20
        if held_out < window:
            needed = f"{len(self.data):,} bytes, and training needs {20 * window:,}"
            raise TextError(f"{self.source} is too short: {needed}")
        return self.data[:-held_out], self.data[-held_out:]


def standard_library() -> Corpus:
    """The `.py` files of the running Python's own standard library, in alphabetical order.

    Raises TextError where Python was installed without its sources.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(
        file for file in root.rglob("*.py") if _NOT_STDLIB.isdisjoint(file.relative_to(root).parts[:-1])
    )
    if not files:
        raise TextError(f"no .py files in {root}: name a text of your own with --text PATH")
    return _read(files, f"Python {_python_version()} standard library")


def from_paths(paths: Iterable[Path]) -> Corpus:
    """The text of files, and of every .py, .md, .rst and .txt file in folders, in the order given;
    at least one path.

    Raises TextError if a path is missing or unreadable, or if there is no text in them at all.
    """
    paths = list(paths)
    files = [file for path in paths for file in _files_of(path)]
    others = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return _read(files, f"{paths[0]}{others}")


def _files_of(path: Path) -> Iterator[Path]:
    if path.is_dir():
        yield from sorted(f for f in path.rglob("*") if f.suffix in _TEXT_SUFFIXES and f.is_file())
    else:
        yield path


def _read(files: list[Path], source: str) -> Corpus:
    parts = []
    for file in files:
        try:
            parts.append(file.read_bytes())
        except OSError as error:
            raise TextError(f"cannot read {file}: {error.strerror}") from error
    text = b"\n".join(parts)
    if not text.strip():
        raise TextError(f"no text in {source}")
    return Corpus(torch.frombuffer(bytearray(text), dtype=torch.uint8), source, len(files))


def _python_version() -> str:
    return sysconfig.get_python_version()
