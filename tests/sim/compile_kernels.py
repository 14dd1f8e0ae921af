"""Compile the test kernels without a GPU, as their own host code launches them.

Run as a program, apart from the tests: those run with Triton's interpreter on, under which nothing
compiles. Prints one line per kernel; exit status 1 if one does not compile.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.pop("TRITON_INTERPRET", None)
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp(prefix="tilewise-compile-")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sim")]

import torch
import triton
from problems_sim import CASES
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.int32: "i32",
    torch.float8_e4m3fn: "fp8e4nv",
}
CAPABILITY = {"ampere": 80, "hopper": 90, "blackwell": 100}


def compile_launch(kernel: Any, args: tuple[Any, ...], keywords: dict[str, Any], arch: str) -> Any:
    names = [p.name for p in kernel.params]
    constants, attributes, signature = {}, {}, {}
    for n, (parameter, value) in enumerate(zip(kernel.params, args, strict=True)):
        if parameter.is_constexpr:
            signature[parameter.name], constants[(n,)] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = "*" + TYPES[value.dtype]
            attributes[(n,)] = [["tt.divisibility", 16]]
        elif hasattr(value, "block_shape"):
            kind = TYPES[value.base.dtype]
            signature[parameter.name] = f"tensordesc<{kind}{list(value.block_shape)},{value.layout!r}>"
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    options = {k: v for k, v in keywords.items() if k not in (*names, "grid", "warmup")}
    source = GluonASTSource(kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", CAPABILITY[arch], 32), options=options)


def main() -> int:
    failures = 0
    for case in CASES:
        if not case.compiles:
            continue
        seen: set[str] = set()

        def record(
            self: Any,
            *args: Any,
            grid: Any,
            warmup: bool,
            case: Any = case,
            seen: Any = seen,
            **keywords: Any,
        ) -> None:
            nonlocal failures
            if self.fn.__name__ in seen:
                return
            seen.add(self.fn.__name__)
            try:
                compile_launch(self, args, keywords, case.arch)
                print(f"ok {case.name} {self.fn.__name__}")
            except Exception as error:
                while error.__cause__ is not None:
                    error = error.__cause__  # type: ignore[assignment]
                failures += 1
                print(
                    f"FAILED {case.name} {self.fn.__name__}: {type(error).__name__} {str(error)[-400:]}"
                )

        with mock.patch.object(JITFunction, "run", record):
            case.run()
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
