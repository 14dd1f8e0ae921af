"""Compile every kernel for every GPU family, without a GPU, and check what the compiler made of it.

    python scripts/compile_offline.py [--arch sm_90 ...] [--case NAME ...] [--keep DIR]

Runs the library's own host code on tensors without data and compiles each launch that it makes, so what
is compiled here is what a user would run. Prints registers, spills and shared memory of each kernel,
and of the Gluon kernels what the assembler made of their loops (``sass.py``). Exit status 1 if a kernel
does not compile, wants more shared memory than its GPU has, or spills or serialises products where it
must not.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import barriers
import sass
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonJITFunction

from tilewise import dispatch, ops
from tilewise.backends import ahead
from tilewise.backends.ahead import Launch
from tilewise.backends.hopper import backward as hopper_backward
from tilewise.backends.hopper.launch_backward import CONSUMERS
from tilewise.backends.triton import clear
from tilewise.spec import AttentionSpec, Inputs, make_spec

KB = 1024
TENSOR_MEMORY = 512  # columns


@dataclass(frozen=True)
class Arch:
    target: GPUTarget
    family: str  # of schedule.py
    shared_memory: int  # bytes that one program may use


ARCHES = {
    "sm_80": Arch(GPUTarget("cuda", 80, 32), "ampere", 163 * KB),
    "sm_89": Arch(GPUTarget("cuda", 89, 32), "other", 99 * KB),
    "sm_90": Arch(GPUTarget("cuda", 90, 32), "hopper", 227 * KB),
    "sm_100": Arch(GPUTarget("cuda", 100, 32), "blackwell", 227 * KB),
    "sm_120": Arch(GPUTarget("cuda", 120, 32), "other", 99 * KB),
    "gfx942": Arch(GPUTarget("hip", "gfx942", 64), "other", 64 * KB),
}


@dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.bfloat16
    dims: tuple[int, int] = (128, 128)
    heads: tuple[int, int] = (4, 4)
    varlen: bool = False
    seqlen_q: int = 2048
    seqlen_k: int = 2048
    options: tuple[tuple[str, Any], ...] = ()
    tensors: tuple[str, ...] = ()  # bias, alibi_slopes, sink, dropout_key
    # No: it is the same as another case's.
    forward: bool = True
    backward: bool = True


_DROPOUT = ("dropout_key",), (("dropout_p", 0.1),)
CASES = {
    "d64": Case(dims=(64, 64)),
    "d128": Case(),
    "d256": Case(dims=(256, 256)),
    "d128-fp16-causal-gqa": Case(torch.float16, heads=(4, 2), options=(("causal", True),)),
    "d192-128-varlen-window-softcap": Case(
        dims=(192, 128),
        varlen=True,
        options=(("window_left", 99), ("window_right", 7), ("softcap", 30.0)),
    ),
    "d24-one-query-deterministic": Case(
        dims=(24, 24), seqlen_q=1, options=(("causal", True), ("deterministic", True))
    ),
    "d128-bias-sink": Case(tensors=("bias", "sink"), options=(("causal", True),)),
    "d64-alibi-dropout-softcap": Case(
        dims=(64, 64), tensors=("alibi_slopes", *_DROPOUT[0]), options=(("softcap", 30.0), *_DROPOUT[1])
    ),
    "d256-bias-dropout-deterministic": Case(
        dims=(256, 256), tensors=("bias", *_DROPOUT[0]), options=(("deterministic", True), *_DROPOUT[1])
    ),
    "d24-odd-bias-sink-dropout": Case(
        dims=(24, 24),
        heads=(1, 1),
        seqlen_q=333,
        seqlen_k=77,
        tensors=("bias", "sink", *_DROPOUT[0]),
        options=_DROPOUT[1],
    ),
    "d64-bias-alibi-sink-dropout": Case(
        dims=(64, 64), tensors=("bias", "alibi_slopes", "sink", *_DROPOUT[0]), options=_DROPOUT[1]
    ),
    "d256-fp32-bias-dropout": Case(
        torch.float32, dims=(256, 256), tensors=("bias", *_DROPOUT[0]), options=_DROPOUT[1]
    ),
    "d64-fp32-causal": Case(torch.float32, dims=(64, 64), options=(("causal", True),)),
    "d256-fp32-deterministic": Case(torch.float32, dims=(256, 256), options=(("deterministic", True),)),
}
# The Gluon kernels: every tile with every mask that gives other loops.
_DIMS = {"d64": (64, 64), "d128": (128, 128), "d192-128": (192, 128), "d256": (256, 256)}
_VARIANTS = {
    "full": Case(),
    "causal": Case(options=(("causal", True),)),
    "window": Case(options=(("window_left", 999), ("window_right", 99))),
    "varlen-gqa": Case(heads=(4, 2), varlen=True),
    "softcap": Case(options=(("softcap", 30.0),)),
    "fp16-causal": Case(torch.float16, options=(("causal", True),)),
}
GLUON_CASES = {
    f"{dims}-{name}": replace(variant, dims=_DIMS[dims])
    for dims in _DIMS
    for name, variant in _VARIANTS.items()
} | {
    f"d64-short-{name}": replace(_VARIANTS[name], dims=(64, 64), seqlen_k=512)
    for name in ("full", "causal", "window", "fp16-causal")
}
GLUON_CASES |= {
    f"d128-short-{name}": replace(_VARIANTS[name], seqlen_k=512, forward=False)
    for name in ("full", "causal", "fp16-causal")
}
# So few queries of so many keys that query tiles are broken into parts.
_BROKEN = {"seqlen_q": 200, "seqlen_k": 2**17, "backward": False}
GLUON_CASES |= {
    f"{dims}-broken-{name}": replace(_VARIANTS[name], dims=_DIMS[dims], **_BROKEN)
    for dims in _DIMS
    for name in ("causal", "fp16-causal")[: 2 if dims == "d64" else 1]
}
_DETERMINISTIC = replace(
    _VARIANTS["causal"], options=(("causal", True), ("deterministic", True)), forward=False
)
GLUON_CASES |= {f"{dims}-deterministic": replace(_DETERMINISTIC, dims=_DIMS[dims]) for dims in _DIMS}
GLUON_CASES |= {
    f"{dims}-full-deterministic": replace(
        _DETERMINISTIC, dims=_DIMS[dims], varlen=True, options=(("deterministic", True),)
    )
    for dims in _DIMS
}
# What is added to scores and taken from weights, in few cases: each takes long.
GLUON_CASES |= {
    "d128-alibi-sink-causal": Case(tensors=("alibi_slopes", "sink"), options=(("causal", True),)),
    "d128-bias": Case(tensors=("bias",)),
    "d128-dropout": Case(tensors=_DROPOUT[0], options=_DROPOUT[1]),
    "d64-dropout-varlen": Case(
        dims=(64, 64), varlen=True, tensors=_DROPOUT[0], options=(("causal", True), *_DROPOUT[1])
    ),
    "d256-bias-sink": Case(dims=(256, 256), tensors=("bias", "sink")),
    "d192-128-everything": Case(
        dims=(192, 128),
        varlen=True,
        tensors=("bias", "alibi_slopes", "sink", *_DROPOUT[0]),
        options=(("window_left", 99), ("softcap", 99.0), ("deterministic", True), *_DROPOUT[1]),
    ),
}
ALL_CASES = CASES | GLUON_CASES
# Loads and stores of spilled registers in main loops, the most of all Triton versions (3.9, mostly of
# the second attempt). More is an objection, and so is any in another case.
KNOWN_SPILLS = {
    "d128-alibi-sink-causal-backward": 73,
    "d128-bias-backward": 69,
    "d128-causal-backward": 18,
    "d128-deterministic-backward": 66,
    "d128-dropout": 4,
    "d128-dropout-backward": 118,
    "d128-fp16-causal": 26,
    "d128-fp16-causal-backward": 18,
    "d128-full-backward": 3,
    "d128-full-deterministic-backward": 54,
    "d128-short-causal-backward": 10,
    "d128-short-fp16-causal-backward": 10,
    "d128-short-full-backward": 4,
    "d128-softcap-backward": 116,
    "d128-varlen-gqa-backward": 8,
    "d128-window-backward": 18,
    "d192-128-everything": 186,
    "d192-128-everything-backward": 42,
    "d192-128-softcap-backward": 1,
    "d256-bias-sink": 6,
    "d256-bias-sink-backward": 20,
    "d256-causal-backward": 3,
    "d256-deterministic-backward": 4,
    "d256-fp16-causal": 2,
    "d256-fp16-causal-backward": 3,
    "d256-full-backward": 3,
    "d256-full-deterministic-backward": 1,
    "d256-softcap-backward": 20,
    "d256-varlen-gqa-backward": 3,
    "d256-window": 46,
    "d256-window-backward": 3,
    "d64-broken-causal": 110,
    "d64-broken-fp16-causal": 45,
    "d64-causal": 116,
    "d64-dropout-varlen": 8,
    "d64-dropout-varlen-backward": 77,
    "d64-fp16-causal": 45,
    "d64-full-backward": 22,
    "d64-softcap-backward": 12,
    "d64-varlen-gqa-backward": 22,
}
# Families other than Hopper take the same paths: they compile the cases that differ in tile.
FEWER = (
    "d128",
    "d256",
    "d192-128-varlen-window-softcap",
    "d256-fp32-deterministic",
    "d256-bias-dropout-deterministic",
)


def launches(case: Case, kernel: dispatch.Kernel, arch: Arch) -> Iterator[Launch]:
    """The launches of one forward and, where there is one, backward on tensors without data."""
    spec, x = _problem(case, kernel.algorithm)
    module = kernel.load()
    with ahead.recording(arch.family) as recorded:
        out = ops._empty_out(spec, x)
        lse, saved = ops._empty_statistics(spec, x)
        if spec.ragged:
            clear.clear(out, x.cu_seqlens_q, x.seqused_q, spec.max_seqlen_q)
        if kernel.lack(spec, "forward", frozenset()) is None and case.forward:
            module.forward(spec, x, out, lse, saved)
        if case.backward and kernel.lack(spec, "backward", frozenset({"lse_grad"})) is None:
            grads = ops.Gradients(spec, x)
            douts = torch.empty_like(out), torch.empty_like(lse)
            module.backward(spec, x, out, lse, saved, *douts, grads)
    yield from recorded


def _problem(case: Case, algorithm: str) -> tuple[AttentionSpec, Inputs]:
    (d, dv), (hq, hkv) = case.dims, case.heads
    lead = (4096,) if case.varlen else (2, case.seqlen_k)
    lead_q = lead if case.varlen else (2, case.seqlen_q)
    shapes = ((*lead_q, hq, d), (*lead, hkv, d), (*lead, hkv, dv))
    q, k, v = (torch.empty(s, dtype=case.dtype, device="meta") for s in shapes)
    x = Inputs(q, k, v)
    longest: dict[str, int] = {}
    if case.varlen:
        cu_seqlens = torch.empty(3, dtype=torch.int32, device="meta")
        used = torch.empty(2, dtype=torch.int32, device="meta")
        x = x._replace(cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, seqused_q=used, seqused_k=used)
        longest = {"max_seqlen_q": 2048, "max_seqlen_k": 2048}
    made = {
        "bias": lambda: torch.empty(
            1, hq, case.seqlen_q, case.seqlen_k, dtype=case.dtype, device="meta"
        ),
        "alibi_slopes": lambda: torch.empty(hq, device="meta"),
        "sink": lambda: torch.empty(hq, device="meta"),
        "dropout_key": lambda: torch.empty(1, dtype=torch.int64, device="meta"),
    }
    x = x._replace(**{name: made[name]() for name in case.tensors})
    options: dict[str, Any] = dict(case.options)
    return make_spec(x, algorithm=algorithm, **longest, **options), x


def compile_launch(launch: Launch, arch: Arch) -> tuple[Any, str]:
    """Compile with the types and specializations that a launch on a GPU would have.

    Returns what Triton built, and what ptxas had to say of it."""
    triton.knobs.nvidia.dump_ptxas_log = True
    triton.knobs.compilation.always_compile = True  # what comes out of a cache has no log
    with redirect_stdout(io.StringIO()) as log:
        return ahead.compile_launch(launch, arch.target), log.getvalue()


def resources(built: Any, log: str, arch: Arch) -> dict[str, int]:
    """Registers a thread, bytes spilled and shared memory of a compiled kernel."""
    if arch.target.backend == "hip":
        patterns, text = (r"\.vgpr_count:\s+(\d+)", r"\.vgpr_spill_count:\s+(\d+)"), built.asm["amdgcn"]
    else:
        patterns, text = (r"Used (\d+) registers", r"(\d+) bytes spill stores"), log
    registers, spills = (_number(pattern, text) for pattern in patterns)
    if not registers:  # then warnings and spills would be missed as well
        raise ValueError("no register count in what the assembler said")
    return {"registers": registers, "spills": spills, "shared": int(built.metadata.shared)}


def disassemble(cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def objection(built: Any, used: dict[str, int], arch: Arch) -> str:
    """Why a compiled kernel could not run; empty if it can."""
    if used["shared"] > arch.shared_memory:
        return f"needs {used['shared']} bytes of shared memory, has {arch.shared_memory}"
    columns = getattr(built.metadata, "tmem_size", None) or 0
    # Triton compiles a kernel that wants too much tensor memory, to nothing but a trap.
    if columns > TENSOR_MEMORY or re.search(r"^\s*trap;", built.asm.get("ptx", ""), re.MULTILINE):
        return f"needs {columns} columns of tensor memory, has {TENSOR_MEMORY}"
    return ""


def _reason(error: BaseException) -> str:
    """The innermost cause, at its end: Triton's errors begin with the kernel's whole source."""
    while error.__cause__ is not None:
        error = error.__cause__
    text = getattr(error, "stderr", None) or str(error)
    return f"{type(error).__name__} {text[-400:]}"


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    return int(found.group(1)) if found else 0


def in_main_loops(launch: Launch, built: Any, log: str, known: int) -> tuple[str, str]:
    """Of a Gluon kernel: what is in it, in words, and what must not be there."""
    found = sass.read(disassemble(built.asm["cubin"]))
    consumers = launch.arguments.get("CONSUMERS", CONSUMERS)  # a backward's are not an argument
    complaints = sass.objections(found, log, consumers, known)
    complaints += [f"{name} is a barrier without a use" for name in barriers.idle(built.asm["ttgir"])]
    return str(found), "; ".join(complaints)


def check(task: tuple[str, str, str, str | None]) -> list[tuple[str, ...]]:
    """Compile one case of one kernel family for one GPU family: a row per kernel, last the complaint."""
    arch_name, case_name, kernel_name, keep = task
    arch, case = ARCHES[arch_name], ALL_CASES[case_name]
    family = next(k for k in dispatch.KERNELS if k.name == kernel_name)
    rows = []
    for launch in launches(case, family, arch):
        name = f"{family.algorithm} {launch.kernel.fn.__name__}"
        began = time.perf_counter()
        try:
            built, log = compile_launch(launch, arch)
            used = resources(built, log, arch)
        except Exception as error:
            rows.append((arch_name, case_name, name, "", "", "", "", "", f"FAILED: {_reason(error)}"))
            continue
        if keep is not None:
            for kind in ("ttgir", "ptx", "cubin", "amdgcn"):
                if kind in built.asm:
                    data = built.asm[kind]
                    path = Path(keep) / f"{arch_name}.{case_name}.{name.replace(' ', '.')}.{kind}"
                    path.write_bytes(data if isinstance(data, bytes) else data.encode())
        remark, complaint = "", objection(built, used, arch)
        if isinstance(launch.kernel, GluonJITFunction) and not complaint:
            variant = case_name + (
                "-backward" if launch.kernel is hopper_backward.backward_kernel else ""
            )
            remark, complaint = in_main_loops(launch, built, log, KNOWN_SPILLS.get(variant, 0))
        seconds = f"{time.perf_counter() - began:.1f}"
        numbers = (str(used["registers"]), str(used["spills"]), str(used["shared"]), seconds)
        rows.append((arch_name, case_name, name, *numbers, remark, complaint))
    return rows


def tasks(arches: list[str], cases: list[str] | None, keep: str | None) -> list[tuple[str, ...]]:
    """Every kernel family with its cases, for each GPU family that it is for; the slowest first."""
    every = []
    for kernel in (k for k in dispatch.KERNELS if k.backend in ("hopper", "triton")):
        for arch in arches:
            if kernel.backend == "hopper":
                mine = list(GLUON_CASES) if arch == "sm_90" else []
            else:
                mine = list(CASES) if arch == "sm_90" else list(FEWER)
            every += [(arch, case, kernel.name, keep) for case in mine if cases is None or case in cases]
    return every


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--arch", nargs="*", choices=ARCHES, default=list(ARCHES))
    parser.add_argument("--case", nargs="*", choices=ALL_CASES)
    parser.add_argument("--keep", help="folder for ttgir, ptx and cubin")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    if arguments.keep:
        Path(arguments.keep).mkdir(parents=True, exist_ok=True)
    work = tasks(arguments.arch, arguments.case, arguments.keep)
    if not work:
        parser.error("no such case for this GPU family")
    print(f"triton {triton.__version__}, {len(work)} cases", flush=True)
    complaints = []
    layout = "{:7} {:31} {:20} {:>9} {:>6} {:>7} {:>7}  {}{}"
    print(layout.format("arch", "case", "kernel", "registers", "spills", "shared", "seconds", "", ""))
    with get_context("spawn").Pool(arguments.jobs) as pool:
        run: Callable[..., Any] = pool.imap
        for rows in run(check, work):
            for *row, complaint in rows:
                line = layout.format(*row, f"  OBJECTION: {complaint}" if complaint else "")
                complaints += [line] if complaint else []
                print(line, flush=True)
    print(f"{len(complaints)} complaints" if complaints else "every kernel compiles and fits")
    print(*complaints, sep="\n")  # once more, where a log that was cut short still has them
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
