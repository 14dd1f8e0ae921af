"""What `tilewise warmup` compiled where no GPU was seen, a process with the GPU finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tilewise import warmup

WARMUP = "import sys; from tilewise.cli import main; sys.argv[1:] = {!r}; main()"
CALLS = """
import json
import torch
import tilewise
from tilewise.backends import ahead

with ahead.listening() as found:
    for causal in (False, True):
        for lengths, heads in [((2048, 2048), (16, 16)), ((333, 333), (12, 4)), ((1, 2048), (32, 8))]:
            q, k, v = (
                torch.randn(2, n, h, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
                for n, h in zip((lengths[0], lengths[1], lengths[1]), (heads[0], heads[1], heads[1]))
            )
            with torch.set_grad_enabled(lengths[0] > 1):
                out = tilewise.attention(q, k, v, causal=causal)
            if lengths[0] == 1:
                continue
            out.sum().backward()
            begins = torch.tensor([0, lengths[0], 2 * lengths[0]], device="cuda", dtype=torch.int32)
            packed = [t.detach().flatten(0, 1).requires_grad_() for t in (q, k, v)]
            tilewise.attention_varlen(
                *packed, cu_seqlens_q=begins, cu_seqlens_k=begins,
                max_seqlen_q=lengths[0], max_seqlen_k=lengths[1], causal=causal,
            ).sum().backward()
torch.cuda.synchronize()
print(json.dumps(found))
"""


@pytest.mark.skipif(warmup.own_arch() not in warmup.ARCHES, reason="needs a GPU that has a name there")
def test_the_first_calls_compile_nothing(tmp_path):
    """A container was warmed up, and its first call compiled all the same."""
    own = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    arguments = ["warmup", "--arch", str(warmup.own_arch()), "--head-dim", "128"]
    command = [sys.executable, "-c", WARMUP.format(arguments)]
    subprocess.run(command, env=own | {"CUDA_VISIBLE_DEVICES": ""}, check=True)
    done = subprocess.run([sys.executable, "-c", CALLS], env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 10
    assert all(found)
