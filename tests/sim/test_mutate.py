"""The mutator itself: one defect, at the right line, and the original is left as it was."""

from __future__ import annotations

import ast

import pytest
from kernels import elementwise, gemm
from mutants import SUBJECTS

from tilewise import sim
from tilewise.gluon import ring
from tilewise.sim.mutate import Source, edit, mutations


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS)
def test_names_are_unique_and_lines_are_real(subject) -> None:
    found = mutations(subject.module)
    assert len({m.name for m in found}) == len(found)
    with open(subject.module.__file__) as file:
        lines = file.read().splitlines()
    for m in found:
        assert lines[m.line - 1].strip(), m


def test_a_mutation_changes_one_thing_and_only_its_own_module() -> None:
    mutation = next(m for m in mutations(elementwise) if m.kind == "missing fence")
    before = ast.dump(mutation.source.tree)
    broken = mutation.load()
    assert ast.dump(mutation.source.tree) == before
    assert broken.compute.fn.__code__.co_code != elementwise.compute.fn.__code__.co_code
    assert broken.read.fn.__code__.co_code == elementwise.read.fn.__code__.co_code


def test_findings_point_into_the_original_source() -> None:
    subject = SUBJECTS["elementwise"]
    mutation = next(m for m in mutations(elementwise) if m.kind == "missing fence")
    broken = mutation.load()
    with sim.intercept(seed=0) as reports:
        subject.run(broken, 0)
    finding = next(f for r in reports for f in r.findings if f.kind == "fence")
    lines = {site.line for site in finding.sites if site.function == "compute"}
    assert mutation.line - 1 in lines or mutation.line + 2 in lines  # the store, or the copy that reads


def test_an_edit_by_hand() -> None:
    mutation = edit(
        elementwise, "compute", "adds two", "half.store(x * 2.0 + 1.0)", "half.store(x * 2.0 + 2.0)"
    )
    assert (mutation.kind, mutation.name) == ("by hand", "compute: by hand: adds two")
    assert SUBJECTS["elementwise"].notices(mutation.load(), 0) == "wrong result"


def test_an_edit_that_does_not_fit_says_so() -> None:
    with pytest.raises(ValueError, match="0 times, not once"):
        edit(elementwise, "compute", "nothing", "half.load()", "pass")


def test_a_broken_helper_breaks_its_user() -> None:
    missing = next(m for m in mutations(ring) if m.function == "release")
    user = Source.of(gemm).load(instead={ring.__name__: missing.load()})
    assert user.make_ring is not gemm.make_ring
    assert SUBJECTS["gemm"].notices(user, 0) == "deadlock"
