"""Numba CPU kernels, the embedded default; one thread, AVX-512 to NEON through LLVM."""

from vla_edge_ros.kernels.cpu.elementwise import add, gelu, layer_norm, rms_norm, silu, swiglu
from vla_edge_ros.kernels.cpu.engine import Engine
from vla_edge_ros.kernels.cpu.layout import memory_plan
from vla_edge_ros.kernels.cpu.linear import linear, pack_linear

__all__ = [
    'add',
    'Engine',
    'gelu',
    'layer_norm',
    'linear',
    'memory_plan',
    'pack_linear',
    'rms_norm',
    'silu',
    'swiglu',
]
