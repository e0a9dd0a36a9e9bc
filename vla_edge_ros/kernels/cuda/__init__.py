"""Numba-CUDA kernels; an encoder that does not fit ``Vision`` takes the operations of the CPU."""

from vla_edge_ros.kernels.cpu import layer_norm, linear, pack_linear, swiglu
from vla_edge_ros.kernels.cuda.engine import Engine
from vla_edge_ros.kernels.cuda.layout import memory_plan
from vla_edge_ros.kernels.cuda.vision_encoder import Vision

__all__ = ['Engine', 'Vision', 'layer_norm', 'linear', 'memory_plan', 'pack_linear', 'swiglu']
