"""A GPU that runs nothing: Triton's own way from a call to the CUDA driver, and what arrives there."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton import knobs
from triton.backends.nvidia import driver as nvidia

HERE = Path(__file__).parent
_SIZES = {"u64": 8, "b64": 8, "f64": 8, "s64": 8, "u32": 4, "b32": 4, "s32": 4, "f32": 4}
_SIZES |= {"u16": 2, "b16": 2, "u8": 1, "b8": 1}


class Launch(NamedTuple):
    name: str
    grid: tuple[int, int, int]
    threads: int
    shared: int
    stream: int
    parameters: tuple[bytes, ...]


class _Config(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_uint) for name in ("x", "y", "z", "threads", "ty", "tz", "shared")),
        ("stream", ctypes.c_void_p),
    ]


_Callback = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(_Config), ctypes.c_size_t, ctypes.POINTER(ctypes.c_void_p)
)


def install(folder: Path) -> FakeGpu:
    """Build the driver into a folder and make it the one that Triton loads in this process."""
    include = Path(triton.__file__).parent / "backends/nvidia/include"
    library = folder / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-O1", "-w", "-Wl,-soname,libcuda.so.1", f"-I{include}"]
    subprocess.run([*command, str(HERE / "libcuda.c"), "-o", str(library)], check=True)
    (folder / "libcuda.so").symlink_to(library)
    os.environ["TRITON_LIBCUDA_PATH"] = str(folder)
    knobs.nvidia.libcuda_path = str(folder)
    return FakeGpu(ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL))


class FakeGpu:
    """Launches that reach the driver, with the bytes of all their parameters."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.stream = 7
        self._kernels: dict[int, tuple[str, list[int]]] = {}
        knobs.runtime.kernel_load_end_hook = self._loaded
        active = nvidia.CudaDriver.__new__(nvidia.CudaDriver)
        active.utils = nvidia.CudaUtils()
        active.launcher_cls = nvidia.CudaLauncher
        active.get_current_device = lambda: 0
        active.set_current_device = lambda device: None
        active.get_current_stream = lambda device: self.stream
        active.get_device_capability = lambda device: (9, 0)
        triton.runtime.driver.set_active(active)

    def _loaded(self, module: Any, function: int, name: str, files: dict[str, str], key: str) -> None:
        ptx = next(Path(path).read_text() for file, path in files.items() if file.endswith(".ptx"))
        entry = ptx[ptx.index(".entry") :]
        found = re.findall(
            r"\.param (?:\.align \d+ )?\.(\w+)[^,\[)]*(?:\[(\d+)\])?", entry[: entry.index("{")]
        )
        self._kernels[function] = name, [_SIZES[kind] * int(n or 1) for kind, n in found]

    @contextmanager
    def recording(self) -> Iterator[list[Launch]]:
        """A list that fills with what is launched meanwhile."""
        launches: list[Launch] = []

        def launched(config: Any, function: int, parameters: Any) -> None:
            name, sizes = self._kernels[function]
            read = tuple(ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes))
            c = config.contents
            launches.append(Launch(name, (c.x, c.y, c.z), c.threads, c.shared, c.stream or 0, read))

        callback = _Callback(launched)
        self._library.on_launch(callback)
        try:
            yield launches
        finally:
            self._library.on_launch(_Callback())
