"""What a GPU can do in one cycle, as data, with where each number comes from.

Everything is per streaming multiprocessor (SM) and cycle unless its name says otherwise, because the
limits of a kernel in cycles do not depend on the clock, which moves with power and heat.

Sources, by the short names used below:

- [A100], [H100]: NVIDIA's architecture white papers of these GPUs (2020, 2022); [H200], [B200]: NVIDIA's
  data sheets. A data sheet's TFLOP/s = SMs × FLOP/cycle × clock; it gives FLOP/cycle once the clock is
  known.
- [guide]: CUDA C++ Programming Guide, the tables "Arithmetic Instructions" (results per cycle, SM) and
  "Technical Specifications per Compute Capability".
- [FA4]: "FlashAttention-4" (Zadouri et al., 2026, arXiv:2603.05451), section 3, the speeds of B200.
- [lab]: measured for this library on one H200.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

Family = Literal["ampere", "hopper", "blackwell"]

KIB = 1024
MIB = 1024 * KIB


@dataclass(frozen=True)
class GPU:
    """One GPU. Per SM and cycle where the name ends in `_per_cycle`, L2 excepted; sizes in bytes."""

    name: str
    family: Family
    sms: int
    tensor_flops_per_cycle: Mapping[str, int]  # dense, by data type; a multiply-add is two
    exps_per_cycle: int
    fmas_per_cycle: int  # fp32 multiply-adds
    shared_bytes_per_cycle: int
    l2_bytes_per_cycle: int  # of the whole GPU
    hbm_bytes_per_second: float
    boost_hz: float  # the highest clock; under load a power limit lowers it
    shared_bytes: int  # that one program can have
    register_bytes: int
    tensor_memory_bytes: int
    l2_bytes: int

    @property
    def hbm_bytes_per_cycle(self) -> float:
        """Of the whole GPU, at the boost clock."""
        return self.hbm_bytes_per_second / self.boost_hz

    @property
    def l2_bytes_per_second(self) -> float:
        return self.l2_bytes_per_cycle * self.boost_hz

    def peak_flops(self, dtype: str) -> float:
        """Dense FLOP/s of all tensor cores at the boost clock."""
        return self.tensor_flops_per_cycle[dtype] * self.sms * self.boost_hz


_A100 = GPU(
    name="A100",
    family="ampere",
    sms=108,  # [A100]
    tensor_flops_per_cycle={"fp16": 2048, "bf16": 2048},  # [A100]: 1024 multiply-adds; 312 TFLOP/s
    exps_per_cycle=16,  # [guide], 8.0
    fmas_per_cycle=64,  # [guide], 8.0
    shared_bytes_per_cycle=128,  # [guide]: 32 banks of 4 bytes
    l2_bytes_per_cycle=5120,  # [A100], read bandwidth
    hbm_bytes_per_second=2.039e12,  # [A100], the SXM card with 80 GB
    boost_hz=1.410e9,  # [A100]
    shared_bytes=163 * KIB,  # [guide], 8.0
    register_bytes=256 * KIB,  # [guide]: 64 Ki registers of 4 bytes
    tensor_memory_bytes=0,
    l2_bytes=40 * MIB,  # [A100]
)

_H100 = GPU(
    name="H100",
    family="hopper",
    sms=132,  # [H100], SXM
    tensor_flops_per_cycle={"fp16": 4096, "bf16": 4096, "fp8": 8192},  # [H100]: 989 TFLOP/s at 1830 MHz
    exps_per_cycle=16,  # [guide], 9.0
    fmas_per_cycle=128,  # [guide], 9.0
    shared_bytes_per_cycle=128,  # [guide]
    l2_bytes_per_cycle=5120,  # nothing published; taken as the A100's
    hbm_bytes_per_second=3.35e12,  # [H100], SXM
    boost_hz=1.980e9,  # highest SM clock of the SXM card; its TFLOP/s are stated at 1830 MHz
    shared_bytes=227 * KIB,  # [guide], 9.0
    register_bytes=256 * KIB,  # [guide]
    tensor_memory_bytes=0,
    l2_bytes=50 * MIB,  # [H100]
)

_H200 = replace(  # the same chip with other memory
    _H100,
    name="H200",
    hbm_bytes_per_second=4.8e12,  # [H200]; [lab]: a copy reaches 4.27e12
    boost_hz=1.980e9,  # [lab]: falls to 1400-1650 MHz under steady load at 700 W
)

_B200 = GPU(
    name="B200",
    family="blackwell",
    sms=148,  # [B200]: two dies with 74 each
    tensor_flops_per_cycle={"fp16": 8192, "bf16": 8192, "fp8": 16384},  # [FA4]; 2250 TFLOP/s at 1856 MHz
    exps_per_cycle=16,  # [FA4]: no more than Hopper's
    fmas_per_cycle=128,  # [guide], 10.0
    shared_bytes_per_cycle=128,  # [FA4]: no more than Hopper's
    l2_bytes_per_cycle=9472,  # nothing published; taken as 64 bytes a cycle for each SM, two dies' worth
    hbm_bytes_per_second=8.0e12,  # [B200]
    boost_hz=1.965e9,  # highest SM clock; its TFLOP/s are stated at about 1850 MHz
    shared_bytes=227 * KIB,  # [guide], 10.0
    register_bytes=256 * KIB,  # [guide]
    tensor_memory_bytes=256 * KIB,  # [guide], 10.0: 128 lanes × 512 columns × 4 bytes
    l2_bytes=126 * MIB,  # [B200]
)

GPUS: dict[str, GPU] = {gpu.name.lower(): gpu for gpu in (_A100, _H100, _H200, _B200)}


def find(name: str) -> GPU:
    """The GPU that `name` means: "b200", or a driver's "NVIDIA B200". ValueError if there is none."""
    found = [gpu for key, gpu in GPUS.items() if key in name.lower()]
    if len(found) != 1:
        raise ValueError(f"unknown GPU {name!r}; known are {', '.join(GPUS)}")
    return found[0]
