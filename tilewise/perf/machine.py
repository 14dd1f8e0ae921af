"""The machine a measurement was made on: what it is, how it fares, and the most it can do."""

from __future__ import annotations

import os
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import tilewise
from tilewise import doctor
from tilewise.perf.timing import Clock, Times, alternate

_PACKAGES = ("fa3-fwd", "flash-attn-4", "flash-attn", "nvidia-cutlass-dsl")
_STATE = {  # nvidia-smi's name -> ours
    "clocks.sm": "sm_mhz",
    "clocks.mem": "memory_mhz",
    "power.draw": "watts",
    "power.limit": "watts_limit",
    "temperature.gpu": "celsius",
}


def describe(device: torch.device) -> dict[str, Any]:
    """Name and sizes, without anything that tells whose machine it is."""
    found: dict[str, Any] = {"device": device.type, "name": doctor.device_name(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "capability": [properties.major, properties.minor],
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": getattr(properties, "L2_cache_size", None),
            "driver": _nvidia_smi(device, "driver_version") or "unknown",
        }
    else:
        found |= {"cores": os.cpu_count(), "threads": torch.get_num_threads()}
    return found


def versions() -> dict[str, str | None]:
    """This library, what it runs on, and the peers that are packages of their own."""
    found = {name: value for name, value in doctor.versions().items() if name != "system"}
    if torch.backends.cudnn.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def state(device: torch.device) -> dict[str, float | None]:
    """Clocks in MHz, power in W and temperature of a GPU; of a CPU, how many processes want to run."""
    if device.type != "cuda":
        return {"load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None}
    text = _nvidia_smi(device, ",".join(_STATE)) or ""
    values = [_number(field) for field in text.split(",")]
    values += [None] * (len(_STATE) - len(values))
    return dict(zip(_STATE.values(), values, strict=False))


def ceilings(device: torch.device, clock: Clock, rounds: int) -> dict[str, float | None]:
    """What the machine reaches in practice: FLOP/s of one large matrix product, bytes/s of a copy.

    On a GPU the product is 8192 x 8192 x 8192 in bf16 and the copy 1 GiB, read and written.
    """
    gpu = device.type == "cuda"
    n, dtype, size = (8192, torch.bfloat16, 2**30) if gpu else (1024, torch.float32, 2**26)
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    source = torch.zeros(size, dtype=torch.int8, device=device)
    target = torch.zeros_like(source)
    times = alternate(
        {"product": lambda: torch.matmul(a, b), "copy": lambda: target.copy_(source)}, clock, rounds
    )
    return {
        "matmul_flops_per_second": _rate(times["product"], 2.0 * n**3),
        "copy_bytes_per_second": _rate(times["copy"], 2.0 * size),
    }


def commit() -> str:
    """The commit of the code that runs, with a + if it has changed since; where there is no
    repository the environment's TILEWISE_COMMIT, and without that "unknown"."""
    package = Path(tilewise.__file__).parent
    # Installed inside someone else's repository, git would answer with a commit that is not ours.
    if _output("git", "ls-files", "--error-unmatch", "__init__.py", folder=package):
        head = _output("git", "rev-parse", "HEAD", folder=package)
        if head:
            return head + ("+" if _output("git", "status", "--porcelain", ".", folder=package) else "")
    return os.environ.get("TILEWISE_COMMIT") or "unknown"


def _rate(times: Times | Exception, work: float) -> float | None:
    return work / (times.median * 1e-3) if isinstance(times, Times) else None


def _nvidia_smi(device: torch.device, query: str) -> str | None:
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    chosen = [f"--id=GPU-{uuid}"] if uuid else []
    asked = [f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    text = _output("nvidia-smi", *chosen, *asked) or _output("nvidia-smi", *asked)
    return text.splitlines()[0].strip() if text else None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:  # "[N/A]"
        return None


def _output(*command: str, folder: Path | None = None) -> str | None:
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=30
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
