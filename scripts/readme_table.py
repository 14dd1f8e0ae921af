"""Writes the support table of the code into README.md, between its two markers.

python scripts/readme_table.py
"""

from __future__ import annotations

from pathlib import Path

from tilewise import dispatch

README = Path(__file__).parent.parent / "README.md"
BEGIN = "<!-- support-table:begin -->"
END = "<!-- support-table:end -->"


def updated(text: str) -> str:
    """`text` with the table as the code has it now. Raises ValueError if a marker is missing."""
    before, _ = _cut(text, BEGIN)
    _, after = _cut(text, END)
    return f"{before}{BEGIN}\n{dispatch.support_markdown()}\n{END}{after}"


def _cut(text: str, marker: str) -> tuple[str, str]:
    before, found, after = text.partition(marker)
    if not found:
        raise ValueError(f"README.md has no {marker}")
    return before, after


if __name__ == "__main__":
    README.write_text(updated(README.read_text(encoding="utf-8")), encoding="utf-8")
