"""Numba CPU kernels, the embedded default; one thread, AVX-512 to NEON through LLVM."""

from vla_edge_ros.kernels.cpu.elementwise import layer_norm, swiglu
from vla_edge_ros.kernels.cpu.engine import Engine
from vla_edge_ros.kernels.cpu.layout import memory_plan
from vla_edge_ros.kernels.cpu.linear import linear, pack_linear

__all__ = ['Engine', 'layer_norm', 'linear', 'memory_plan', 'pack_linear', 'swiglu']
