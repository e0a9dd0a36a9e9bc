"""Numba-CUDA kernels; the vision encoder still runs on the processor's own."""

from vla_edge_ros.kernels.cpu import layer_norm, linear, pack_linear, swiglu
from vla_edge_ros.kernels.cuda.engine import Engine
from vla_edge_ros.kernels.cuda.layout import memory_plan

__all__ = ['Engine', 'layer_norm', 'linear', 'memory_plan', 'pack_linear', 'swiglu']
