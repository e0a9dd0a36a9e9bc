"""A checkpoint's weights, brought into the order of the kernels and onto the device."""

from collections.abc import Callable, Mapping

import numpy as np

from vla_edge_ros.kernels.bfloat16 import to_float32
from vla_edge_ros.kernels.cuda.layout import pack_matrix, pair_heads, pair_rows
from vla_edge_ros.progress import no_progress, Progress


def upload(
    config, tensors: Mapping[str, np.ndarray], send: Callable[[str, np.ndarray, int], None],
    progress: Progress = no_progress,
) -> None:
    """
    Pack every weight, one matrix at a time, and hand it to ``send(buffer, array, layer)``.

    Parameters
    ----------
    config : TransformerConfig
        Shape of the network.
    tensors : mapping of str to ndarray
        Checkpoint tensors by their Hugging Face names, float32 or uint16 (bfloat16).
    send : callable
        Takes the name of a buffer of ``layout.memory_plan``, what belongs there, and the layer.
    progress : Progress
        Told of every layer.

    """

    def vectors(*names: str) -> list[np.ndarray]:
        return [to_float32(tensors[name]) for name in names]

    def pack(name: str) -> np.ndarray:
        return pack_matrix(tensors[f'{name}.weight'], name)

    progress('uploading the vocabulary', 1, 1)
    send('embedding', pack('model.embed_tokens'), 0)
    if not config.tie_word_embeddings:
        send('head', pack('lm_head'), 0)
    send('final_norm', *vectors('model.norm.weight'), 0)
    for layer in range(config.num_hidden_layers):
        progress('uploading layer', layer + 1, config.num_hidden_layers)
        prefix = f'model.layers.{layer}'
        attention, mlp = f'{prefix}.self_attn', f'{prefix}.mlp'
        names = [f'{attention}.{name}_proj' for name in 'qkv']
        heads = [tensors[f'{name}.weight'] for name in names]
        qkv, bias = (
            np.concatenate([pair_heads(kind, config.head_dim) for kind in kinds])
            for kinds in (heads, vectors(*(f'{name}.bias' for name in names))))
        gate_up = pair_rows(*(tensors[f'{mlp}.{name}_proj.weight'] for name in ('gate', 'up')))
        send('attention_norm', *vectors(f'{prefix}.input_layernorm.weight'), layer)
        send('qkv', pack_matrix(qkv, f'{attention}.qkv'), layer)
        send('qkv_bias', bias, layer)
        send('output', pack(f'{attention}.o_proj'), layer)
        send('mlp_norm', *vectors(f'{prefix}.post_attention_layernorm.weight'), layer)
        send('gate_up', pack_matrix(gate_up, f'{mlp}.gate_up'), layer)
        send('down', pack(f'{mlp}.down_proj'), layer)
