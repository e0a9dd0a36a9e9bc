"""
All CUDA kernels, for one compute capability and head size.

Eight warps of a block share the depth of sixteen rows of a matrix and add up through shared
memory, always in the same order: equal input gives equal bits. Rows are ordered so that the two
numbers one thread holds belong together: two halves of a rotary pair, or gate and up.

Kernel arguments are int32, int64 addresses, float32 and pointers. ``state`` is int32
[STATE_WORDS], see ``constants.py``; ``order`` is int32 [ranks]: the slot of each rank.
"""

from numba.core import types

from vla_edge_ros.kernels.cuda.attention import define_attention
from vla_edge_ros.kernels.cuda.decode import define_decode
from vla_edge_ros.kernels.cuda.device import define_device
from vla_edge_ros.kernels.cuda.prefill import define_prefill
from vla_edge_ros.kernels.cuda.prefill_stream import define_prefill_stream
from vla_edge_ros.kernels.cuda.stream import define_stream
from vla_edge_ros.kernels.cuda.vision import define_vision

MAX_REGISTERS = {
    'decode_qkv': 112, 'decode_output': 112, 'decode_mlp': 112, 'decode_down': 112,
    'decode_head': 112, 'prefill_qkv': 168, 'prefill_mlp': 120, 'prefill_partial': 128,
    'prefill_attention': 168, 'prefill_stream': 168, 'decode_stream': 168,
}  # fmt: skip
"""So that two blocks fit a processor, three of attention, and one of what streams or, with others
beside it, loads all at once."""


def define(capability: tuple[int, int], head_dim: int) -> dict[str, tuple]:
    """Return ``{name: (function, signature)}`` of every kernel."""
    device = define_device(capability, head_dim)
    kernels = define_prefill_stream(capability, device)
    for make in (define_decode, define_prefill, define_attention, define_stream, define_vision):
        kernels += make(capability, head_dim, device)
    return {name: (function, types.void(*arguments)) for name, function, arguments in kernels}
