"""What is installed here and which kernels can run; data only, the command line shows it."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from typing import Any

import torch

import tilewise
from tilewise import dispatch


def examine() -> dict[str, Any]:
    """Everything `tilewise doctor` knows, in JSON's own types.

    Returns {"versions", "devices", "kernels", "features"}: kernels holds one entry for each pair of
    kernel and device, with the reason where it cannot run; features is the support table.
    """
    return {
        "versions": versions(),
        "devices": [_describe(device) for device in devices()],
        "kernels": [
            _availability(kernel, device) for device in devices() for kernel in dispatch.KERNELS
        ],
        "features": dispatch.support_table(),
    }


def versions() -> dict[str, str | None]:
    """Version of each piece that matters; None where a piece is missing. Imports nothing for it."""
    return {
        "tilewise": tilewise.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": _installed("triton"),
        "cuda": torch.version.cuda,
        "rocm": torch.version.hip,
        "system": platform.platform(),
    }


def devices() -> list[torch.device]:
    """The CPU, then every GPU that torch sees."""
    gpus = range(torch.cuda.device_count())
    return [torch.device("cpu"), *(torch.device("cuda", index) for index in gpus)]


def device_name(device: torch.device) -> str:
    """What the maker calls it, as far as this system says."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return _cpu_model() or platform.machine()


def _describe(device: torch.device) -> dict[str, Any]:
    described: dict[str, Any] = {"device": str(device), "name": device_name(device)}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        # ROCm has no sm_ numbers; what it calls the architecture is what its compiler takes.
        described["architecture"] = (
            properties.gcnArchName if torch.version.hip else f"sm_{properties.major}{properties.minor}"
        )
        described["memory_bytes"] = properties.total_memory
        described["multiprocessors"] = properties.multi_processor_count
    else:
        described["cores"] = os.cpu_count()
        described["threads"] = torch.get_num_threads()
    return described


def _availability(kernel: dispatch.Kernel, device: torch.device) -> dict[str, Any]:
    reason = kernel.unavailable(device)
    return {
        "kernel": kernel.name,
        "device": str(device),
        "available": reason is None,
        "reason": reason,
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str | None:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if "model name" in line)
    except (OSError, StopIteration):
        return platform.processor() or None
