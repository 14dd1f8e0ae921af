"""The demo's model and training, small enough for a test."""

from __future__ import annotations

from tilewise.demo.model import Shape
from tilewise.demo.train import Plan

PLAN = Plan(
    Shape(layers=2, heads=2, width=32, context=48),
    batch=4,
    steps=25,
    rate=3e-3,
    seed=0,
)
