"""Tile loops in PyTorch operations: the embedded default, and the papers to read and step through."""
