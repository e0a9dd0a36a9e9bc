"""Transformer operations; every backend offers the same names."""
