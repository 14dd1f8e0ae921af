"""What the Gluon kernels share: names that move between Triton versions, and ring buffers.

Kernels import from `tilewise.gluon.compat` what is named differently from one Triton to the next;
nothing else in the package may. `tilewise.gluon.ring` is a buffer of stages with its barriers.
"""
