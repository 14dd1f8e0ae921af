"""Products and copies that the attention kernels do not make, and what goes wrong with them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kernels import tensor_cores
from problems_sim import _matrix, error

from tilewise import sim
from tilewise.sim.mutate import edit


def found(run: Callable[[Any], object], function: str, old: str, new: str, arch: str) -> str:
    """What four schedules say of a kernel in which `old` has been replaced by `new`."""
    broken = edit(tensor_cores, function, "", old, new).load()
    text = ""
    for seed in range(4):
        with sim.intercept(seed=seed, arch=arch) as reports:
            run(broken)
        text += str(reports[0])
    return text


@pytest.mark.parametrize(
    ("old", "new", "kind"),
    [
        ("fence_async_shared()", "pass", "fence"),
        ("mbarrier.wait(done, 0)", "pass", "race"),
        ("tcgen05_commit(done)", "tcgen05_commit(done)\nx_s.store(x + 1.0)", "race"),
    ],
)
def test_a_copy_into_tensor_memory_gone_wrong(old: str, new: str, kind: str) -> None:
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(0))
    text = found(lambda module: module.copied(x), "copy_kernel", old, new, "blackwell")
    assert f"[{kind}]" in text


def test_copies_and_products_complete_in_order() -> None:
    """What a product reads may have been copied just before: one begins after the other has ended."""
    a, b = _matrix(128, 64, 0), _matrix(64, 64, 1)
    for seed in range(4):
        with sim.intercept(seed=seed, arch="blackwell") as reports:
            c = tensor_cores.copied_product(a, b)
        reports[0].raise_if_any()
        assert error(c, a.double() @ b.double().T) < 1e-6


def test_mma_v2_before_its_operands_have_arrived() -> None:
    a, b = _matrix(64, 160, 0), _matrix(64, 160, 1)
    old, new = "async_copy.wait_group(1)", "async_copy.wait_group(2)"
    text = found(lambda module: module.ampere_gemm(a, b), "ampere_kernel", old, new, "ampere")
    assert "[race]" in text and "cp.async into" in text


def test_fp8_on_hopper_loses_what_its_accumulator_lacks() -> None:
    """Adding up in fp32 now and then repairs it; Blackwell, and Hopper without the model, are exact."""
    a, b = (_matrix(m, 4096, m).to(torch.float8_e4m3fn) for m in (128, 64))
    right = a.double() @ b.double().T

    def run(promote: int, arch: str = "hopper", **options: object) -> float:
        with sim.intercept(arch=arch, **options) as reports:
            c = tensor_cores.fp8_gemm(a, b, promote, tcgen05=arch == "blackwell")
        reports[0].raise_if_any()
        return error(c, right)

    never, often = run(0), run(32)
    assert run(0, fp8_accumulator_bits=None) < 1e-6
    assert run(0, "blackwell") < 1e-6
    assert 1e-6 < often < never / 2
    assert never < 1e-2
