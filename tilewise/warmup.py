"""Compiling kernels before anybody calls them, on any machine: which ones, and how many at a time.

What a call launches depends on more than head dim and data type: on what Triton compiles in of lengths
and heads, on the tile that suits a length, on whether query tiles are broken up. So the library's host
code runs on tensors without data for one problem of each kind, and every kernel that it would launch is
compiled once.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tilewise import dispatch, ops, schedule
from tilewise.spec import AttentionSpec, Inputs, make_spec

if TYPE_CHECKING:
    from tilewise.backends.ahead import Launch

#: The compute capabilities by the names that their compiler gives them.
ARCHES = {f"sm{n}": divmod(n, 10) for n in (80, 86, 87, 89, 90, 100, 103, 120, 121)}
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
MASKS = ("full", "causal")
LAYOUTS = ("dense", "varlen")
DIRECTIONS = ("forward", "backward")


class Problem(NamedTuple):
    """Lengths that stand for all of their kind."""

    seqlen_q: int
    seqlen_k: int
    queries: int = 0  # packed; 0: of two sequences
    trained: bool = True  # or only the forward


# Of an integer Triton compiles in whether it is 1, and whether a multiple of 16. On Hopper there is a
# tile for up to schedule.SHORT keys and one for more; few queries of many keys are broken into parts.
# Statistics of 12 heads are a multiple of 16 numbers for each batch entry where 4 divides the length.
_DENSE = (
    Problem(64, 64),
    Problem(512, 512),
    Problem(2048, 2048),
    Problem(2001, 2001),
    Problem(2004, 2004),
    Problem(64, 2048),
    Problem(64, 2**17, trained=False),
    Problem(1, 2048, trained=False),
    Problem(1, 2**17, trained=False),
    Problem(1, 2001, trained=False),
)
_VARLEN = (
    Problem(512, 512),
    Problem(2048, 2048),
    Problem(2048, 2048, queries=4001),
    Problem(2001, 2001, queries=4000),
    Problem(2001, 2001, queries=4001),
    Problem(1, 2048, queries=16, trained=False),
    Problem(1, 2048, queries=7, trained=False),
    Problem(1, 2001, queries=16, trained=False),
    Problem(1, 2001, queries=7, trained=False),
    Problem(1, 2048, queries=1, trained=False),
    Problem(1, 2001, queries=1, trained=False),
)
# Query and key heads: multiples of 16 and not, as many of both and not.
HEADS = ((16, 16), (32, 8), (12, 12), (28, 4))


class RequestError(ValueError):
    """What was asked for cannot be compiled; the message is for a person."""


@dataclass(frozen=True)
class Case:
    """One problem on one GPU."""

    arch: str
    head_dim: int
    dtype: str
    heads: tuple[int, int]
    causal: bool
    varlen: bool
    problem: Problem
    deterministic: bool
    forward: bool
    backward: bool

    def __str__(self) -> str:
        mask, layout = MASKS[self.causal], LAYOUTS[self.varlen]
        return f"{self.arch}, D={self.head_dim}, {self.dtype}, {mask}, {layout}"


@dataclass(frozen=True)
class Request:
    """What to compile: everything that one of each stands for. Raises RequestError."""

    arches: tuple[str, ...]
    head_dims: tuple[int, ...] = (64, 128)
    dtypes: tuple[str, ...] = ("bf16",)
    masks: tuple[str, ...] = MASKS
    layouts: tuple[str, ...] = LAYOUTS
    directions: tuple[str, ...] = DIRECTIONS
    heads: tuple[tuple[int, int], ...] = HEADS
    deterministic: bool = False  # these gradients besides the others

    def __post_init__(self) -> None:
        _check("--arch", self.arches, ARCHES)
        _check("--dtype", self.dtypes, DTYPES)
        _check("--mask", self.masks, MASKS)
        _check("--layout", self.layouts, LAYOUTS)
        _check("--direction", self.directions, DIRECTIONS)
        for head_dim in self.head_dims:
            if not 1 <= head_dim <= 256:
                raise RequestError(f"--head-dim: got {head_dim}; allowed is 1 to 256")
        for q, kv in self.heads:
            if min(q, kv) < 1 or q % kv:
                raise RequestError(f"--heads: got {q}/{kv}; key heads must divide query heads")

    def cases(self) -> Iterator[Case]:
        kinds = product(self.arches, self.head_dims, self.dtypes, self.masks, self.layouts)
        for arch, head_dim, dtype, mask, layout in kinds:
            problems = product(_VARLEN if layout == "varlen" else _DENSE, self.heads)
            for problem, heads in problems:
                backward = "backward" in self.directions and problem.trained
                for deterministic in (False, True) if self.deterministic and backward else (False,):
                    yield Case(
                        arch,
                        head_dim,
                        dtype,
                        heads,
                        causal=mask == "causal",
                        varlen=layout == "varlen",
                        problem=problem,
                        deterministic=deterministic,
                        forward="forward" in self.directions,
                        backward=backward,
                    )


def _check(option: str, got: tuple[Any, ...], allowed: Any) -> None:
    for value in got:
        if value not in allowed:
            raise RequestError(f"{option}: got {value!r}; allowed are {', '.join(allowed)}")


class Job(NamedTuple):
    """One kernel to compile: a launch of a case, by its place."""

    case: Case
    place: int
    kernel: str


class Outcome(NamedTuple):
    job: Job
    found: bool  # on disk; then nothing was compiled
    error: str = ""


def own_arch() -> str | None:
    """That of this machine's GPU, None if it has none."""
    if not torch.cuda.is_available() or torch.version.hip:
        return None
    return "sm{}{}".format(*torch.cuda.get_device_capability())


def refusal() -> str | None:
    """Why nothing can be compiled here; None if it can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "TRITON_INTERPRET=1 is set: kernels are interpreted, not compiled"
    return None


def plan(request: Request) -> list[Job]:
    """Every kernel of a request, once."""
    from tilewise.backends import ahead

    jobs: dict[Any, Job] = {}
    for case in request.cases():
        for place, launch in enumerate(launches(case)):
            key = (case.arch, launch.name, ahead.cache_key(launch, ahead.nvidia(ARCHES[case.arch])))
            jobs.setdefault(key, Job(case, place, launch.name))
    return list(jobs.values())


def execute(jobs: list[Job], processes: int | None = None) -> Iterator[Outcome]:
    """Compile them, each in one of some processes; in the order in which they are done."""
    processes = min(processes or os.cpu_count() or 1, len(jobs))
    if processes:
        with get_context("spawn").Pool(processes) as pool:
            yield from pool.imap_unordered(compile_job, jobs)


def compile_job(job: Job) -> Outcome:
    from tilewise.backends import ahead

    launch = launches(job.case)[job.place]
    try:
        with ahead.listening() as found:
            ahead.compile_launch(launch, ahead.nvidia(ARCHES[job.case.arch]))
    except Exception as error:  # one kernel's, whatever it is; the others go on
        return Outcome(job, False, f"{type(error).__name__}: {str(error)[-400:]}")
    return Outcome(job, all(found))


def cache_folder() -> str:
    """Where compiled kernels are."""
    from tilewise.backends import ahead

    return ahead.cache_folder()


@lru_cache(maxsize=64)
def launches(case: Case) -> list[Launch]:
    """What the operators launch for a case, as ``ops`` runs them."""
    from tilewise.backends import ahead

    x, longest = _inputs(case)
    spec = make_spec(x, causal=case.causal, deterministic=case.deterministic, **longest)
    with ahead.recording(schedule.family_of(ARCHES[case.arch])) as recorded:
        out = ops._empty_out(spec, x)
        lse, saved = ops.run_forward(_kernel(spec, case.arch, "forward"), spec, x, out)
        if not case.forward:
            recorded.clear()
        if case.backward:
            grads = ops.Gradients(spec, x)
            dout = torch.empty_like(out)
            kernel = _kernel(spec, case.arch, "backward")
            ops.run_backward(kernel, spec, x, out, lse, saved, dout, None, grads)
    return recorded


def _kernel(spec: AttentionSpec, arch: str, direction: dispatch.Direction) -> dispatch.Kernel:
    """The one that ``dispatch`` chooses on such a GPU."""
    backends = ("hopper", "triton") if arch == "sm90" else ("triton",)
    return next(
        kernel
        for kernel in dispatch.KERNELS
        if kernel.backend in backends
        and kernel.reserved is None
        and kernel.lack(spec, direction, frozenset()) is None
    )


def _inputs(case: Case) -> tuple[Inputs, dict[str, Any]]:
    dtype, (heads_q, heads_kv) = DTYPES[case.dtype], case.heads

    def empty(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    seqlen_q, seqlen_k, queries, _ = case.problem
    rows_q: tuple[int, ...] = (2, seqlen_q)
    rows_k: tuple[int, ...] = (2, seqlen_k)
    if case.varlen:
        rows_q, rows_k = (queries or 2 * seqlen_q,), (2 * seqlen_k,)
    shapes = (*rows_q, heads_q), (*rows_k, heads_kv), (*rows_k, heads_kv)
    x = Inputs(*(empty(*shape, case.head_dim) for shape in shapes))
    if not case.varlen:
        return x, {}
    begins = empty(3, dtype=torch.int32)
    x = x._replace(cu_seqlens_q=begins, cu_seqlens_k=begins)
    return x, {"max_seqlen_q": seqlen_q, "max_seqlen_k": seqlen_k}
