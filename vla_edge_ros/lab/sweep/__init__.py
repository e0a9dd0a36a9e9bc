"""Sweeps: a grid of configurations, run to the end however often it is interrupted."""
