"""Every array of the CPU decoder: names, shapes, and the plan that is known beforehand."""

from typing import NamedTuple

import numpy as np

from vla_edge_ros.kernels.cpu.tile import padded, PANEL, ROWS, VALUE_PANEL
from vla_edge_ros.kernels.memory_plan import Buffer


class Weights(NamedTuple):
    """Packed weights, layers stacked."""

    embedding: np.ndarray  # [panels(vocab), hidden, PANEL]
    head: np.ndarray  # [panels(vocab), hidden, PANEL], the embedding itself when tied
    attention_norm: np.ndarray  # float32 [layers, hidden]
    qkv: np.ndarray  # [layers, panels(q + k + v), hidden, PANEL]
    qkv_bias: np.ndarray  # float32 [layers, padded(q + k + v)]
    output: np.ndarray  # [layers, panels(hidden), heads * head_dim, PANEL]
    mlp_norm: np.ndarray  # float32 [layers, hidden]
    gate_up: np.ndarray  # [layers, panels(2 * inner), hidden, PANEL]
    down: np.ndarray  # [layers, panels(hidden), inner, PANEL]
    final_norm: np.ndarray  # float32 [hidden]
    eps: np.float32


class Buffers(NamedTuple):
    """Cache, workspace and activations; float32 unless said."""

    keys: np.ndarray  # [layers, slots, kv_heads, head_dim], unrotated
    values: np.ndarray  # [layers, kv_heads, slots, padded(head_dim)]
    rotated_keys: np.ndarray  # [layers, kv_heads, panels(slots), head_dim, PANEL], by rank
    order: np.ndarray  # int32 [slots], slot of each rank
    held_slots: np.ndarray  # int32 [slots], slot each workspace rank was rotated from
    num_held: np.ndarray  # int64 [1]
    cosine: np.ndarray  # [slots, head_dim / 2]
    sine: np.ndarray  # [slots, head_dim / 2]
    residual: np.ndarray  # [tokens, padded(hidden)]
    normed: np.ndarray  # [tokens, hidden]
    qkv: np.ndarray  # [tokens, padded(q + k + v)]
    queries: np.ndarray  # [kv_heads, tokens * group, head_dim], rotated and scaled
    scores: np.ndarray  # [ROWS, padded(slots)]
    context: np.ndarray  # [ROWS, padded(head_dim)]
    mixed: np.ndarray  # [tokens, heads * head_dim]
    gate_up: np.ndarray  # [tokens, padded(2 * inner)]
    inner: np.ndarray  # [tokens, inner]
    hidden: np.ndarray  # [tokens, hidden], final-normed
    logits: np.ndarray  # [padded(vocab)]
    zeros: np.ndarray  # [padded(widest)]


def memory_plan(config, weights_dtype: str, total_slots: int, max_tokens: int) -> list[Buffer]:
    """Return every buffer an :class:`Engine` of these sizes holds."""
    return [
        *weight_plan(config, weights_dtype),
        *buffer_plan(config, total_slots, max_tokens),
    ]


def _panels(columns: int, depth: int) -> tuple[int, int, int]:
    return (padded(columns) // PANEL, depth, PANEL)


def weight_plan(config, weights_dtype: str) -> list[Buffer]:
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    stored = 'uint16' if weights_dtype == 'bfloat16' else 'float32'
    f32 = 'float32'
    plan = [
        Buffer('embedding', _panels(config.vocab_size, hidden), stored),
        Buffer('attention_norm', (layers, hidden), f32),
        Buffer('qkv', (layers, *_panels(config.qkv_size, hidden)), stored),
        Buffer('qkv_bias', (layers, padded(config.qkv_size)), f32),
        Buffer('output', (layers, *_panels(hidden, config.query_size)), stored),
        Buffer('mlp_norm', (layers, hidden), f32),
        Buffer('gate_up', (layers, *_panels(2 * inner, hidden)), stored),
        Buffer('down', (layers, *_panels(hidden, inner)), stored),
        Buffer('final_norm', (hidden,), f32),
    ]
    if not config.tie_word_embeddings:
        plan.append(Buffer('head', _panels(config.vocab_size, hidden), stored))
    return plan


def buffer_plan(config, slots: int, tokens: int) -> list[Buffer]:
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = config.head_dim
    f32 = 'float32'
    value_dim = padded(head_dim, VALUE_PANEL)
    return [
        Buffer('keys', (layers, slots, kv_heads, head_dim), f32),
        Buffer('values', (layers, kv_heads, slots, value_dim), f32),
        Buffer('rotated_keys', (layers, kv_heads, *_panels(slots, head_dim)), f32),
        Buffer('order', (slots,), 'int32'),
        Buffer('held_slots', (slots,), 'int32'),
        Buffer('num_held', (1,), 'int64'),
        Buffer('cosine', (slots, head_dim // 2), f32),
        Buffer('sine', (slots, head_dim // 2), f32),
        Buffer('residual', (tokens, padded(hidden)), f32),
        Buffer('normed', (tokens, hidden), f32),
        Buffer('qkv', (tokens, padded(config.qkv_size)), f32),
        Buffer('queries', (kv_heads, tokens * (heads // kv_heads), head_dim), f32),
        Buffer('scores', (ROWS, padded(slots)), f32),
        Buffer('context', (ROWS, value_dim), f32),
        Buffer('mixed', (tokens, config.query_size), f32),
        Buffer('gate_up', (tokens, padded(2 * inner)), f32),
        Buffer('inner', (tokens, inner), f32),
        Buffer('hidden', (tokens, hidden), f32),
        Buffer('logits', (padded(config.vocab_size),), f32),
        Buffer('zeros', (padded(max(hidden, 2 * inner, config.vocab_size)),), f32),
    ]
