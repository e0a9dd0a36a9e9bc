"""Every array of the CUDA decoder: names, shapes, and the order matrices are stored in."""

import numpy as np

from vla_edge_ros.errors import ConfigError, WeightsError
from vla_edge_ros.kernels.bfloat16 import to_float32
from vla_edge_ros.kernels.cuda.constants import (
    BATCH,
    DECODE_ROWS,
    HELD_STEPS,
    MAX_CANDIDATES,
    MAX_CHUNKS,
    MAX_HEADS,
    MAX_HIDDEN,
    MAX_PROCESSORS,
    MAX_SPLITS,
    MAX_STAGES,
    PREFILL_SCRATCH,
    STAGE_BYTES,
    STAGE_STEPS,
    STATE_WORDS,
    STEP,
    STREAM_SPLITS,
    STREAM_SUMS,
    TOKENS,
    WARPS,
)
from vla_edge_ros.kernels.memory_plan import Buffer, GPU, PINNED

LEAST_STAGES = 3
"""Of a ring that is worth it."""


def check_config(config) -> None:
    """
    Refuse a network that the kernels are not made for.

    Raises
    ------
    ConfigError
        Names the field, its rule and its value.

    """
    for name, value, multiple in (
        ('hidden_size', config.hidden_size, STEP),
        ('intermediate_size', config.intermediate_size, STEP),
        ('head_dim', config.head_dim, 32),
    ):
        if value % multiple:
            raise ConfigError(name, f'must be a multiple of {multiple} on backend cuda', value)
    for name, value, most in (
        ('num_attention_heads', config.num_attention_heads, MAX_HEADS),
        ('head_dim', config.head_dim, 128),
        ('num_attention_heads * head_dim', config.query_size, 12288),
        # A block holds a row of them in shared memory, of which it has 48 KiB.
        ('hidden_size', config.hidden_size, 3680),
        ('intermediate_size', config.intermediate_size, 18432),
    ):
        if value > most:
            raise ConfigError(name, f'must be <= {most} on backend cuda', value)


def tiles(rows: int) -> int:
    """Return how many tiles of sixteen rows hold ``rows``."""
    return -(-rows // 16)


def pack_matrix(weight: np.ndarray, name: str = 'weight') -> np.ndarray:
    """
    Bring a matrix into fragment order.

    Parameters
    ----------
    weight : float32, or uint16 bfloat16 [rows, depth]
        ``depth`` a multiple of 32.
    name : str
        For the error message.

    Returns
    -------
    float16 [tiles, depth / 32, 2, 8, 32]
        Sixteen rows as two halves of eight, 32 elements at a time. A bfloat16 of at least 6e-5
        is exact in float16, a smaller one off by 3e-8 at most.

    Raises
    ------
    WeightsError
        A weight is not finite or too large for float16.

    """
    rows, depth = weight.shape
    packed = np.zeros((tiles(rows) * 16, depth), np.float16)
    with np.errstate(over='ignore'):
        packed[:rows] = to_float32(weight)
    if not np.isfinite(packed).all():
        raise WeightsError(name, 'must be finite and below 65504 on backend cuda', 'larger')
    shape = (tiles(rows), 2, 8, depth // STEP, STEP)
    return np.ascontiguousarray(packed.reshape(shape).transpose(0, 3, 1, 2, 4))


def pair_rows(low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """Interleave rows eight by eight, so that row ``i`` of both meet in one thread."""
    rows = len(low)
    padded = -(-rows // 8) * 8
    stacked = np.zeros((2, padded, *low.shape[1:]), low.dtype)
    stacked[0, :rows], stacked[1, :rows] = low, high
    shape = (2, padded // 8, 8, *low.shape[1:])
    return np.moveaxis(stacked.reshape(shape), 0, 1).reshape(2 * padded, *low.shape[1:])


def pair_heads(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Order the rows of heads so that the two numbers of a rotary pair meet in one thread."""
    heads = weight.reshape(-1, 2, head_dim // 2, *weight.shape[1:])
    return np.concatenate([pair_rows(low, high) for low, high in heads])


def query_rows(config, tokens: int) -> int:
    """Return the rows of queries of one KV head, in whole blocks of attention."""
    return -(-tokens * (config.num_attention_heads // config.num_key_value_heads) // 64) * 64


def memory_plan(config, weights_dtype: str, total_slots: int, max_tokens: int) -> list[Buffer]:
    """Return every buffer, on the device or pinned, that an ``Engine`` of these sizes holds."""
    del weights_dtype, max_tokens  # held as float16; longer prefills run in parts
    check_config(config)
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    heads, kv_heads, head_dim = (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    ranks = rank_capacity(total_slots)
    rows = query_rows(config, TOKENS)
    f16, f32, i32 = 'float16', 'float32', 'int32'

    def matrix(name, out, depth, *stack):
        return Buffer(name, (*stack, tiles(out) * 16, depth), f16)

    plan = [
        matrix('embedding', config.vocab_size, hidden),
        Buffer('attention_norm', (layers, hidden), f32),
        matrix('qkv', config.qkv_size, hidden, layers),
        Buffer('qkv_bias', (layers, config.qkv_size), f32),
        matrix('output', hidden, heads * head_dim, layers),
        Buffer('mlp_norm', (layers, hidden), f32),
        matrix('gate_up', 2 * inner, hidden, layers),
        matrix('down', hidden, inner, layers),
        Buffer('final_norm', (hidden,), f32),
        Buffer('keys', (layers, total_slots, kv_heads, head_dim), f32),
        Buffer('values', (layers, total_slots, kv_heads, head_dim), f16),
        Buffer('rotated', (layers, kv_heads, ranks, head_dim), f16),
        Buffer('pairs', (layers, kv_heads, ranks // 2, head_dim, 2), f16),
        Buffer('cosine', (ranks, head_dim // 2), f32),
        Buffer('sine', (ranks, head_dim // 2), f32),
        Buffer('state', (STATE_WORDS + ranks,), i32),
        Buffer('queries', (kv_heads, rows, head_dim), f16),
        Buffer('partials', (MAX_SPLITS, kv_heads, rows, head_dim), f16),
        Buffer('extremes', (MAX_SPLITS, kv_heads, rows, 2), f32),
        Buffer('residual', (TOKENS, hidden), f32),
        Buffer('sums', (MAX_CHUNKS, TOKENS, hidden), f32),
        Buffer('normed', (TOKENS, hidden), f16),
        Buffer('mixed', (TOKENS, heads * head_dim), f16),
        Buffer('inner', (TOKENS, inner), f16),
        Buffer('hidden', (TOKENS, hidden), f32),
        Buffer('logits', (tiles(config.vocab_size) * 16,), f32),
        Buffer('candidates', (MAX_CANDIDATES,), f32),
        Buffer('candidate_rows', (MAX_CANDIDATES,), i32),
        Buffer('tokens', (max(ranks, TOKENS),), i32),
        Buffer('stream_residual', (hidden,), 'int64'),
        Buffer('stream_partials', (2, STREAM_SPLITS, kv_heads, DECODE_ROWS, head_dim), f16),
        Buffer('stream_extremes', (2, STREAM_SPLITS, kv_heads, DECODE_ROWS, 2), f32),
        Buffer('shares', (5 * (MAX_PROCESSORS + 1),), i32),
    ]
    if not config.tie_word_embeddings:
        plan.append(matrix('head', config.vocab_size, hidden))
    return [
        *(buffer._replace(place=GPU) for buffer in plan),
        Buffer('host_state', (STATE_WORDS + ranks,), i32, PINNED),
        Buffer('host_rows', (TOKENS, hidden), f32, PINNED),
        Buffer('host_hidden', (TOKENS, hidden), f32, PINNED),
        Buffer('host_tokens', (ranks,), i32, PINNED),
    ]


def rank_capacity(total_slots: int) -> int:
    """Return the ranks kept: all slots, in whole steps of attention."""
    return -(-total_slots // 16) * 16


def rotary_tables(config, ranks: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cosine and sine float32 [ranks, head_dim / 2] of every rotary angle."""
    half = config.head_dim // 2
    angles = np.arange(ranks)[:, None] * config.rope_theta ** (-np.arange(half) / half)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def stream_blocks(config, processors: int) -> int:
    """Return how many blocks stream: each has to have a tile of gate and up."""
    return min(processors, tiles(2 * config.intermediate_size))


def stream_splits(config, processors: int) -> int:
    """Return in how many parts at most a stream attends to the keys of one head."""
    heads = config.num_key_value_heads
    return max(min(stream_blocks(config, processors) // heads, STREAM_SPLITS), 1)


def stream_shares(config, processors: int) -> np.ndarray:
    """
    Return which part of every matrix each block of a stream multiplies.

    Returns
    -------
    int32 [5, blocks + 1]
        Where each block begins, in steps of the matrix of each phase of a layer: qkv, none for
        attention, the output projection for every head in turn, gate and up, down. The last
        evens out what whole tiles cannot.

    """
    blocks = stream_blocks(config, processors)

    def even(units: int) -> np.ndarray:
        return np.arange(blocks + 1) * units // blocks

    hidden, inner = config.hidden_size, config.intermediate_size
    depth, head_steps = hidden // STEP, config.head_dim // STEP
    wide = tiles(hidden) * (inner // STEP)
    qkv = even(tiles(config.qkv_size)) * depth
    output = even(config.num_attention_heads * tiles(hidden)) * head_steps
    gate_up = even(tiles(2 * inner)) * depth
    before = qkv + output + gate_up
    wanted = even(int(before[-1]) + wide) - before
    down = np.clip(np.maximum.accumulate(wanted), 0, wide)
    down[-1] = wide
    return np.stack([qkv, 0 * qkv, output, gate_up, down]).astype(np.int32)


def can_stream(config, processors: int) -> bool:
    """Return whether the rows of a network fit what a block of the stream holds."""
    shares = stream_shares(config, processors)
    wide = config.intermediate_size // STEP
    first, last = shares[4, :-1] // wide, (shares[4, 1:] - 1) // wide
    group = config.num_attention_heads // config.num_key_value_heads
    return (
        stream_blocks(config, processors) <= MAX_PROCESSORS
        and group <= DECODE_ROWS
        and STAGE_STEPS % (config.head_dim // STEP) == 0
        and config.hidden_size <= MAX_HIDDEN
        and 2 * max(config.intermediate_size, config.query_size) <= STREAM_SUMS
        and int((last - first).max()) < BATCH
    )


def prefill_stream_parts(config, processors: int, room: int) -> tuple[int, int] | None:
    """
    Return how a prefill streams the MLP, or None where that does not fit.

    Parameters
    ----------
    config : TransformerConfig
        The network.
    processors : int
        Each has one block.
    room : int
        Bytes of shared memory of a block.

    Returns
    -------
    (int, int) or None
        In how many chunks the depth of the way back is split, and stages of the ring.

    """
    depth, wide = config.hidden_size // STEP, config.intermediate_size // STEP
    rows, held = tiles(config.hidden_size), HELD_STEPS * WARPS
    stages = min((room - PREFILL_SCRATCH) // STAGE_BYTES, MAX_STAGES)
    most = min(MAX_CHUNKS, processors, wide)
    fitting = [chunks for chunks in range(1, most + 1) if -(-wide // chunks) <= held]
    if depth > held or stages < LEAST_STAGES or not fitting:
        return None

    def slowest(chunks: int) -> int:
        """Return the steps of the block with most, and what every chunk costs who adds them."""
        return -(-rows // (processors // chunks)) * -(-wide // chunks) + 2 * chunks

    return min(fitting, key=slowest), stages
