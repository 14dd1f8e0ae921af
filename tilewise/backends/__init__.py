"""Kernels: each backend only makes fast what spec, mask and reference define."""
