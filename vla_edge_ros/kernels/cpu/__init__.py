"""Numba CPU kernels, the embedded default."""
