"""`tilewise warmup`: what it leaves on disk is what a launch on a GPU looks for.

Compiling and the tests' interpreter exclude each other, so most of it runs in processes of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tilewise import warmup
from tilewise.cli.app import app

pytest.importorskip("triton.backends.nvidia.compiler")

ROOT = Path(__file__).parent.parent

# A process as one with a GPU: kernels get tensors with memory and are launched as ever. Only the driver
# is made up, and what would be compiled and launched is asked for its key.
REAL = """
import dataclasses, json, sys
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import make_backend
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver
from tilewise import warmup
from tilewise.backends.keys import settle

class Driver:
    def __init__(self, arch): self.arch = arch
    def get_current_device(self): return 0
    def get_current_stream(self, device): return 0
    def get_current_target(self): return GPUTarget("cuda", self.arch, 32)

class Kernel:
    function = packed_metadata = None
    def launch_metadata(self, *given): return None
    def run(self, *given): pass

def compile(source, target, options):
    hashes.append([source.hash(), make_backend(target).parse_options(dict(options)).hash()])
    return Kernel()

def real(value):
    if isinstance(value, torch.Tensor):
        return torch.empty(64, dtype=value.dtype)
    if isinstance(value, TensorDescriptor):
        return dataclasses.replace(value, base=real(value.base))
    return tuple(map(real, value)) if isinstance(value, tuple) else value

triton.compiler.compile = compile
found = []
for case in reversed(cases):
    driver.set_active(Driver(int(case.arch[2:])))
    for launch in reversed(warmup.launches(case)):
        hashes = []
        launch.kernel.device_caches.clear()
        keywords = {name: real(value) for name, value in launch.keywords.items()}
        settle(launch.kernel)
        launch.kernel[(7,)](*map(real, launch.given), **keywords)
        found.append([launch.name, *hashes[0]])
print(json.dumps(found[::-1]))
"""
AHEAD = """
import json
from tilewise import warmup
from tilewise.backends import ahead

print(json.dumps([
    [launch.name, *ahead.cache_key(launch, ahead.nvidia(warmup.ARCHES[case.arch]))]
    for case in cases for launch in warmup.launches(case)
]))
"""
CASES = """
from tilewise.warmup import Case, Problem
cases = [
    Case(arch, d, dtype, heads, causal, varlen, Problem(*lengths), deterministic, True, True)
    for arch, d, dtype, heads, causal, varlen, lengths, deterministic in [
        ("sm90", 128, "bf16", (16, 16), True, False, (2048, 2048), False),
        ("sm90", 128, "bf16", (28, 4), False, True, (2001, 2001), True),
        ("sm90", 64, "fp16", (1, 1), True, False, (200, 2**17), False),
        ("sm90", 64, "fp32", (4, 2), True, False, (1, 77), False),
        ("sm80", 128, "bf16", (16, 16), True, False, (2048, 2048), False),
        ("sm89", 24, "fp16", (1, 1), False, True, (1, 16), True),
        ("sm120", 128, "bf16", (28, 4), False, False, (2001, 2001), False),
    ]
]
"""


def python(code: str, status: int = 0, **environment: str) -> str:
    paths = (os.environ.get("PYTHONPATH", ""), str(ROOT))
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    inherited["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=inherited | environment)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout


def test_a_launch_with_memory_has_the_key_of_one_without():
    """Kernels were not found if types, alignment, constants or options were guessed; nor, before Triton
    3.9, if another process launched them in another order."""
    ahead, real = (json.loads(python(CASES + code)) for code in (AHEAD, REAL))
    assert ahead == real
    assert {name for name, *_ in real} == {
        *("forward_kernel", "join_kernel", "clear_kernel"),
        *("prepare_kernel", "backward_kernel", "finish_kernel", "delta_kernel", "dq_kernel"),
    }


COVERED = """
import json, random
from tilewise import warmup
from tilewise.backends import ahead

def key(launch):
    return launch.name, ahead.cache_key(launch, ahead.nvidia(warmup.ARCHES[arch]))

found = []
draw = random.Random(0)
for arch, layout in [("sm90", "dense"), ("sm90", "varlen"), ("sm80", "dense"), ("sm80", "varlen")]:
    request = warmup.Request((arch,), (128,), masks=("causal",), layouts=(layout,))
    compiled = {key(warmup.launches(job.case)[job.place]) for job in warmup.plan(request)}
    launched = set()
    for _ in range(40):
        queries = draw.choice([2, 48, 77, 128, 333, 512, 1000, 1024, 1025, 4096, 5001])
        keys = max(queries, draw.choice([2, 64, 700, 2048, 30000])) if arch == "sm90" else queries
        packed = queries + draw.randrange(queries) if layout == "varlen" else 0
        heads = draw.choice([(8, 8), (12, 12), (16, 16), (32, 8), (28, 4), (64, 8)])
        problem = warmup.Problem(queries, keys, packed)
        case = warmup.Case(arch, 128, "bf16", heads, True, packed > 0, problem, False, True, True)
        launched |= set(map(key, warmup.launches(case)))
    found.append([len(launched - compiled), sorted({name for name, _ in launched}), len(compiled)])
print(json.dumps(found))
"""


def test_lengths_and_heads_of_all_kinds_are_covered():
    """The first call with a length that no problem stood for would compile."""
    hopper = ["backward_kernel", "finish_kernel", "forward_kernel", "join_kernel", "prepare_kernel"]
    triton = ["backward_kernel", "delta_kernel", "forward_kernel"]
    assert json.loads(python(COVERED)) == [
        [0, hopper, 10],
        [0, sorted({*hopper, "clear_kernel"} - {"join_kernel"}), 7],
        [0, triton, 33],
        [0, sorted({*triton, "clear_kernel"}), 65],
    ]


COMMAND = "import sys; from tilewise.cli import main; sys.argv[1:] = {!r}; main()"
LITTLE = [
    *("warmup", "--arch", "sm80", "--head-dim", "16", "--heads", "16", "--direction", "forward"),
    *("--mask", "full", "--layout", "dense", "--dtype", "fp32", "--jobs", "1"),
]


def test_the_second_time_everything_is_there(tmp_path):
    """And it says where, for whoever packs it into a container."""
    cache = tmp_path / "a folder" / "of its own"
    runs = [python(COMMAND.format(LITTLE), TRITON_CACHE_DIR=str(cache)) for _ in range(2)]
    first, second = (run.splitlines() for run in runs)
    kernels = len(list(cache.glob("*/forward_kernel.cubin")))
    assert kernels > 1
    assert first[-2:] == [f"{kernels} kernels: {kernels} compiled, 0 there before", f"cache: {cache}"]
    assert second[-2:] == [f"{kernels} kernels: 0 compiled, {kernels} there before", f"cache: {cache}"]


def test_a_kernel_that_does_not_compile_is_named_and_the_others_go_on(tmp_path):
    code = """
from tilewise import warmup
from tilewise.cli import warmup_command
warmup.execute = lambda jobs, processes: [
    warmup.Outcome(job, False, "Failure: [why]" if n == 0 else "") for n, job in enumerate(jobs)
]
"""
    said = python(code + COMMAND.format(LITTLE), status=1, TRITON_CACHE_DIR=str(tmp_path))
    assert "sm80, D=16, fp32, full, dense: forward_kernel: Failure: [why]" in said
    assert "4 kernels: 3 compiled, 0 there before" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ("--arch sm70", "--arch: got 'sm70'; allowed are sm80, sm86, "),
        ("--arch sm90 --dtype bf16,fp8", "--dtype: got 'fp8'; allowed are bf16, fp16, fp32"),
        ("--arch sm90 --head-dim 64,257", "--head-dim: got 257; allowed is 1 to 256"),
        ("--arch sm90 --head-dim 64.5", "--head-dim: got '64.5'; allowed are whole numbers"),
        ("--arch sm90 --heads 6/4", "--heads: got 6/4; key heads must divide query heads"),
        ("--arch sm90 --mask upper", "--mask: got 'upper'; allowed are full, causal"),
        ("", "--arch: no NVIDIA GPU here; name one of sm80, "),
        ("--arch sm90", "TRITON_INTERPRET=1 is set: kernels are interpreted, not compiled"),
    ],
)
def test_bad_input_is_one_line_and_exit_status_2(options: str, said: str, monkeypatch):
    monkeypatch.setattr(warmup, "own_arch", lambda: None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    result = CliRunner().invoke(app, ["warmup", *options.split()])
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith(f"tilewise warmup: {said}")


def test_options_may_be_repeated_or_lists(monkeypatch):
    asked = []
    monkeypatch.setattr(warmup, "refusal", lambda: None)
    monkeypatch.setattr(warmup, "own_arch", lambda: "sm86")
    monkeypatch.setattr(warmup, "plan", lambda request: asked.append(request) or [])
    arguments = ["--head-dim", "64,128", "--head-dim", "96", "--dtype", "fp16", "--heads", "32/8,4"]
    assert CliRunner().invoke(app, ["warmup", *arguments]).exit_code == 0
    assert CliRunner().invoke(app, ["warmup", "--deterministic"]).exit_code == 0
    first, second = asked
    assert (first.head_dims, first.dtypes, first.heads) == ((64, 128, 96), ("fp16",), ((32, 8), (4, 4)))
    assert second == warmup.Request(("sm86",), deterministic=True)
    kinds = {(case.head_dim, case.dtype, case.deterministic) for case in second.cases()}
    assert kinds == {(d, "bf16", x) for d in (64, 128) for x in (False, True)}
