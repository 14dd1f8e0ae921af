"""What is planned for a problem whose tensors lie as they are made."""

from __future__ import annotations

from tilewise import ops
from tilewise.backends.hopper import around, launch, launch_backward
from tilewise.backends.hopper.terms import lay_terms
from tilewise.spec import AttentionSpec, Inputs


def forward(spec: AttentionSpec, x: Inputs) -> launch.Plan:
    out, (lse, _) = ops._empty_out(spec, x), ops._empty_statistics(spec, x)
    inputs = [launch.for_tma(spec, t)[1] for t in x[:3]]
    laid = launch.Laid(
        *inputs, out.stride(), launch.tma_strides(spec, out), lse.stride(), lay_terms(spec, x)
    )
    return launch.plan_forward(spec, laid)


def backward(spec: AttentionSpec, x: Inputs) -> launch_backward.Plan:
    out = ops._empty_out(spec, x)
    inputs = [launch.for_tma(spec, t)[1] for t in (*x[:3], out)]
    space = around.space_of(spec, x.q.shape[0])
    laid = launch_backward.LaidBackward(
        *inputs, x.k.contiguous().stride(), x.v.contiguous().stride(), lay_terms(spec, x), space
    )
    return launch_backward.plan_backward(spec, laid)
