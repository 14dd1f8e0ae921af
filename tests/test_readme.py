"""The README tells the truth: its table is the code's, its commands exist, its examples run."""

from __future__ import annotations

import re

import pytest
import readme_table

ROOT = readme_table.README.parent
TEXT = readme_table.README.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)


def test_the_support_table_is_the_codes():
    assert readme_table.updated(TEXT) == TEXT, "run: python scripts/readme_table.py"


def test_a_readme_without_the_markers_is_refused():
    with pytest.raises(ValueError, match="support-table:begin"):
        readme_table.updated("no table here")


@pytest.mark.parametrize("target", ["demo", "test"])
def test_the_two_commands_exist(target):
    assert f"make {target}" in TEXT
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_examples_run(example):
    exec(compile(example, "README.md", "exec"), {})


def test_there_are_examples():
    assert len(EXAMPLES) >= 3


@pytest.mark.parametrize("link", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", TEXT))))
def test_links_lead_somewhere(link):
    assert (ROOT / link).exists()
