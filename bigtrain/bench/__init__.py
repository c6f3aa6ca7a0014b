"""Sweeps: one subprocess a cell of a grid; what was predicted beside what was measured; failures are rows, never the end."""
