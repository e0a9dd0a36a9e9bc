"""
What a chunk and its kernels have to move and to compute, and how fast a card can do either.

Bytes are what has to be moved at least: weights, keys and values once for each launch, activations
once in and once out. FLOP are those of the matrix products and of attention; a multiplication with
its addition is two.
"""

from vla_edge_ros.policy.work import attention, product, Work

PREFILL_TOKENS, DECODE_TOKENS = 32, 8
STATED_TFLOP_S = {'H200': 989.4, 'H100 80GB HBM3': 989.4, 'A100-SXM': 311.9, 'A100 80GB': 311.9}
"""NVIDIA's figure for dense float16 products on the tensor cores, by a part of the card's name."""
STAGES = {
    ('arrange', 0): ('prefill', 'order of rank'),
    ('prefill_norm', 0): ('prefill', 'norm before attention'),
    ('prefill_qkv', 0): ('prefill', 'qkv'),
    ('prefill_attention', 0): ('prefill', 'attention'),
    ('prefill_mix', 0): ('prefill', 'mix'),
    ('prefill_partial', 0): ('prefill', 'output'),
    ('prefill_norm', 1): ('prefill', 'norm before mlp'),
    ('prefill_mlp', 0): ('prefill', 'mlp'),
    ('prefill_partial', 1): ('prefill', 'down'),
    ('prefill_stream', 0): ('prefill', 'mlp and down (one kernel)'),
    ('decode_stream', 0): ('decode', 'decode (one kernel)'),
    ('embed', 0): ('decode', 'embed'),
    ('decode_qkv', 0): ('decode', 'qkv'),
    ('decode_attention', 0): ('decode', 'attention'),
    ('decode_output', 0): ('decode', 'output'),
    ('decode_mlp', 0): ('decode', 'mlp'),
    ('decode_down', 0): ('decode', 'down'),
    ('decode_head', 0): ('decode', 'head'),
}
"""Pass and stage of a kernel by its name and turn, in the order of a table."""


def floor_bytes(config, length: int) -> int:
    """
    Return the bytes that one chunk behind ``length`` slots has to read at least.

    A prefill needs of its last layer no more than keys and values.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = hidden * (config.qkv_size + config.query_size + 3 * inner)
    layers = 2 * config.num_hidden_layers * layer
    head = 2 * config.vocab_size * hidden
    cache = 2 * 2 * config.num_hidden_layers * config.key_value_size
    passes = 1 + DECODE_TOKENS
    unneeded = 2 * hidden * (config.query_size + 3 * inner)
    return passes * (layers + cache * length) + DECODE_TOKENS * head - unneeded


def work_of(config, kernel: str, turn: int, length: int) -> Work | None:
    """
    Return the work of one launch of a kernel behind ``length`` slots; None if it is not known.

    ``arrange`` moves all keys and values behind the first frame.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, qkv = config.query_size, config.qkv_size
    tokens = 1 if kernel.startswith(('decode', 'embed')) else PREFILL_TOKENS
    vocabulary = product(config.vocab_size, hidden, 1)
    layer = [
        product(qkv, hidden, tokens), attention(config, length, tokens),
        product(hidden, queries, tokens), product(2 * inner, hidden, tokens),
        product(hidden, inner, tokens)]
    if kernel == 'decode_stream':
        whole = sum(layer, Work(0, 0)) * config.num_hidden_layers + vocabulary
        return whole * DECODE_TOKENS
    moved = max(length - PREFILL_TOKENS, 0) * config.num_hidden_layers
    return {
        ('arrange', 0): Work(2 * 2 * 2 * config.key_value_size * moved, 0),
        ('prefill_norm', 0): Work(6 * tokens * hidden, 0),
        ('prefill_norm', 1): Work(6 * tokens * hidden, 0),
        ('prefill_mix', 0): Work(6 * tokens * queries, 0),
        ('prefill_qkv', 0): layer[0], ('decode_qkv', 0): layer[0],
        ('prefill_attention', 0): layer[1], ('decode_attention', 0): layer[1],
        ('prefill_partial', 0): layer[2], ('decode_output', 0): layer[2],
        ('prefill_mlp', 0): layer[3], ('decode_mlp', 0): layer[3],
        ('prefill_partial', 1): layer[4], ('decode_down', 0): layer[4],
        ('prefill_stream', 0): layer[3] + layer[4],
        ('decode_head', 0): vocabulary,
        ('embed', 0): Work(6 * hidden, 0),
    }.get((kernel, turn))  # fmt: skip


def stage_rows(
    times, config, length: int, bandwidth: float, tflop_s: float | None
) -> list[dict]:
    """
    Return a row of the table of stages for each kernel.

    Parameters
    ----------
    times : iterable of KernelTime
        From ``kernels.cuda.measure``; a kernel that is not known here has no work in its row.
    config : TransformerConfig
        The network.
    length : int
        Cached slots.
    bandwidth : float
        Of memory, bytes a second.
    tflop_s : float or None
        What the tensor cores do, None if that is not known.

    """
    rows = []
    for kernel, turn, launches, seconds in times:
        part, stage = STAGES.get((kernel, turn), ('', kernel))
        row = {'pass': part, 'stage': stage, 'kernel': kernel, 'us': 1e6 * seconds,
               'launches': launches, 'ms_of_chunk': 1e3 * launches * seconds}  # fmt: skip
        work = work_of(config, kernel, turn, length)
        if work is not None:
            row |= work._asdict()
            row['memory_roof'] = work.bytes / seconds / bandwidth
            if tflop_s is not None:
                row['compute_roof'] = work.flop / seconds / (1e12 * tflop_s)
        rows.append(row)
    order = list(STAGES.values())
    known = {name: index for index, name in enumerate(order)}
    return sorted(rows, key=lambda row: known.get((row['pass'], row['stage']), len(order)))


def compute_roof(device: str) -> tuple[float | None, str]:
    """Return the TFLOP/s of a card's tensor cores, None if unknown, and where that comes from."""
    for part, tflop_s in STATED_TFLOP_S.items():
        if part in device:
            return tflop_s, f'stated by NVIDIA for {part}: float16, dense'
    return None, 'unavailable'
