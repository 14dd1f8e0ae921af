"""The package's own Gluon kernels, called as the demonstrations are."""

from tilewise import ops
from tilewise.backends.hopper import forward
from tilewise.spec import Inputs, make_spec


def hopper_forward(q, k, v, causal):
    """O and lse of q, k, v: [B, H, S, D], bf16 or fp16."""
    x = Inputs(*(t.transpose(1, 2) for t in (q, k, v)))
    spec = make_spec(x, causal=causal)
    out = ops._empty_out(spec, x)
    lse, saved = ops._empty_statistics(spec, x)
    forward.forward(spec, x, out, lse, saved)
    return out.transpose(1, 2), lse
