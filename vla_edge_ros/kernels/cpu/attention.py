"""
Grouped-query attention over cache slots, with keys rotated by rank.

The cache keeps keys unrotated, by slot. Attention reads them from a workspace, rotated, by
rank: ``rotated_keys [layers, kv_heads, panels, head_dim, PANEL]``, one panel per ``PANEL``
ranks, so that scores are the same tile product as a linear layer. Values are read from the
cache through ``order``, the slot of every rank.

The workspace cannot be stale. A call first rotates the ranks of its context that
``held_slots`` says are of another slot (:func:`rotate_context`); then it writes its new slots,
none of which is in the context, together with their ranks; then it holds exactly the ranks it
used. So a slot's key changes only where its rank is rotated with it or is no longer held.
"""

import math

import numpy as np

from vla_edge_ros.kernels.cpu.compiled import compiled
from vla_edge_ros.kernels.cpu.elementwise import exponential, larger
from vla_edge_ros.kernels.cpu.tile import (
    PANEL,
    ROWS,
    tile_row,
    tile_rows,
    VALUE_PANEL,
    value_tile_row,
    value_tile_rows,
)

_ZERO = np.float32(0)


@compiled
def _rotate_key(key, cosine, sine, rotated_keys, rank):
    """Rotate one key by Hugging Face's half-rotation into column ``rank`` of its panels."""
    half = cosine.shape[0]
    panel = rotated_keys[rank // PANEL]
    column = rank % PANEL
    for i in range(half):
        low, high = key[i], key[i + half]
        panel[i, column] = low * cosine[i] - high * sine[i]
        panel[i + half, column] = high * cosine[i] + low * sine[i]


@compiled
def rotate_context(buffers, ranks):
    """Make ranks 0..``ranks`` - 1 of the workspace match ``order``; keep those still right."""
    order, held_slots = buffers.order, buffers.held_slots
    layers, _, heads, _ = buffers.keys.shape
    held = min(ranks, buffers.num_held[0])
    first = 0
    while first < held and held_slots[first] == order[first]:
        first += 1
    for layer in range(layers):
        for head in range(heads):
            target = buffers.rotated_keys[layer, head]
            for rank in range(first, ranks):
                key = buffers.keys[layer, order[rank], head]
                _rotate_key(key, buffers.cosine[rank], buffers.sine[rank], target, rank)
    hold(buffers, first, ranks)


@compiled
def hold(buffers, first, ranks):
    """Note that the workspace holds ``ranks`` ranks, those from ``first`` on anew."""
    for rank in range(first, ranks):
        buffers.held_slots[rank] = buffers.order[rank]
    buffers.num_held[0] = ranks


@compiled
def store_heads(buffers, layer, rows, first):
    """
    Take queries, keys and values of ``rows`` new tokens at rank ``first`` on from ``qkv``.

    Keys go unrotated to the cache and rotated to the workspace, values to the cache, queries
    rotated and scaled to ``queries [kv_heads, rows * group, head_dim]``.
    """
    kv_heads, _, head_dim = buffers.queries.shape
    group = buffers.queries.shape[1] // buffers.qkv.shape[0]
    half = head_dim // 2
    scale = np.float32(1 / math.sqrt(head_dim))
    for row in range(rows):
        line = buffers.qkv[row]
        rank = first + row
        slot = buffers.order[rank]
        cosine, sine = buffers.cosine[rank], buffers.sine[rank]
        for head in range(kv_heads):
            for member in range(group):
                query = line[(head * group + member) * head_dim :]
                target = buffers.queries[head, row * group + member]
                for i in range(half):
                    low, high = query[i] * scale, query[i + half] * scale
                    target[i] = low * cosine[i] - high * sine[i]
                    target[i + half] = high * cosine[i] + low * sine[i]
            key = line[(kv_heads * group + head) * head_dim :]
            value = line[(kv_heads * (group + 1) + head) * head_dim :]
            for i in range(head_dim):
                buffers.keys[layer, slot, head, i] = key[i]
                buffers.values[layer, head, slot, i] = value[i]
            _rotate_key(key, cosine, sine, buffers.rotated_keys[layer, head], rank)


@compiled
def _softmax_row(scores, size, padded_size):
    """Make softmax weights of the first ``size`` scores and zeros of the rest."""
    largest = scores[0]
    for i in range(1, size):
        largest = larger(largest, scores[i])
    total = _ZERO
    for i in range(size):
        weight = exponential(scores[i] - largest)
        scores[i] = weight
        total += weight
    scale = np.float32(1) / total
    for i in range(size):
        scores[i] *= scale
    for i in range(size, padded_size):
        scores[i] = _ZERO


@compiled
def attend(buffers, layer, rows, first):
    """
    Write ``mixed [rows, heads * head_dim]``: attention of the new tokens over all ranks.

    Token ``i`` sees ranks 0..``first + i``. ``ROWS`` queries of one key head are taken through
    scores, softmax and value sum together, so that the scores stay in the cache.
    """
    kv_heads, query_rows, head_dim = buffers.queries.shape
    group = query_rows // buffers.qkv.shape[0]
    wide_dim = buffers.values.shape[3]
    queries = buffers.queries.reshape(kv_heads * query_rows * head_dim)
    scores = buffers.scores
    span = scores.shape[1]
    flat_scores = scores.reshape(scores.size)
    context = buffers.context.reshape(buffers.context.size)
    for head in range(kv_heads):
        keys = buffers.rotated_keys[layer, head].reshape(span * head_dim)
        values = buffers.values[layer, head].reshape(buffers.values.shape[2] * wide_dim)
        for start in range(0, rows * group, ROWS):
            block = min(ROWS, rows * group - start)
            visible = first + (start + block - 1) // group + 1
            query = (head * query_rows + start) * head_dim
            for rank in range(0, visible, PANEL):
                if block == ROWS:
                    tile_rows(
                        queries, query, head_dim, keys, rank * head_dim, PANEL, None, head_dim,
                        buffers.zeros, 0, 0, flat_scores, rank, span,
                    )  # fmt: skip
                else:
                    for row in range(block):
                        tile_row(
                            queries, query + row * head_dim, head_dim,
                            keys, rank * head_dim, PANEL, None, head_dim,
                            buffers.zeros, 0, 0, flat_scores, row * span + rank, span,
                        )  # fmt: skip
            for row in range(block):
                _softmax_row(scores[row], first + (start + row) // group + 1, visible)
            for column in range(0, wide_dim, VALUE_PANEL):
                if block == ROWS:
                    value_tile_rows(
                        flat_scores, 0, span, values, column, wide_dim, buffers.order, visible,
                        buffers.zeros, 0, 0, context, column, wide_dim,
                    )  # fmt: skip
                else:
                    for row in range(block):
                        value_tile_row(
                            flat_scores, row * span, span,
                            values, column, wide_dim, buffers.order, visible,
                            buffers.zeros, 0, 0, context, row * wide_dim + column, wide_dim,
                        )  # fmt: skip
            for row in range(block):
                token, member = divmod(start + row, group)
                target = (head * group + member) * head_dim
                for i in range(head_dim):
                    buffers.mixed[token, target + i] = buffers.context[row, i]
