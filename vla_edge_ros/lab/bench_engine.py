"""
``vla-edge bench engine``: the CUDA engine against the memory floor, and against Hugging Face.

A chunk is a prefill of 32 tokens and 8 decoded ones behind a filled cache; the weights are
random. The floor is what a chunk has to read at the read bandwidth measured in the same run, which
is that of the vocabulary's product: one pass over the largest matrix.
"""

import argparse
from collections.abc import Callable
from importlib import util
import json
from pathlib import Path
import time

import numpy as np

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab.random_model import SHAPES
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.outputs import check_file, write_text
from vla_edge_ros.policy.weights import expected_shapes

PREFILL_TOKENS, DECODE_TOKENS = 32, 8
WARM_UP = 20
PEER_CHUNKS = 20
RECORD, DOCUMENT = 'docs/results/engine.json', 'docs/benchmarks.md'
HEADER = """# The CUDA engine

What `vla-edge bench engine` measured; the record is `docs/results/engine.json`, and
`python -m vla_edge_ros.lab.bench_engine` writes this page from it. The floor is what a chunk
has to read at the bandwidth measured in the same run: weights once for the prefill and once a
decoded token, keys and values.

"""
DECODE_STAGES = ('qkv', 'attention', 'output', 'mlp', 'down')
PREFILL_STAGES = ('norm', 'qkv', 'attention', 'mix', 'output', 'norm', 'mlp', 'down')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``vla-edge bench``."""
    parser.add_argument('what', choices=('engine',), help='what to measure')
    parser.add_argument('--shape', choices=tuple(SHAPES), default='1.5b', help='Qwen2.5 shape')
    parser.add_argument('--lengths', default='32,512,2048,4064', help='cached slots')
    parser.add_argument('--chunks', type=int, default=300, help='timed chunks of each length')
    parser.add_argument('--no-peers', action='store_true', help='leave Hugging Face out')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write the record there')


def run(options: argparse.Namespace, stop: StopRequest) -> int:
    """Run ``vla-edge bench``."""
    try:
        lengths = [int(word) for word in options.lengths.split(',')]
    except ValueError:
        raise ConfigError('--lengths', 'must be numbers like 32,2048', options.lengths) from None
    if not all(1 <= length <= 100_000 for length in lengths):
        raise ConfigError('--lengths', 'must be in 1..100000', options.lengths)
    if not 10 <= options.chunks <= 1_000_000:
        raise ConfigError('--chunks', 'must be in 10..1000000', options.chunks)
    if options.json:
        check_file('--json', options.json)
    with stop.interruptible():
        record = measure(options.shape, lengths, options.chunks, not options.no_peers)
    text = json.dumps(record, indent=2) + '\n'
    if options.json:
        write_text('--json', options.json, text)
    print(document(record))
    return 0


def measure(shape: str, lengths: list[int], chunks: int, with_peers: bool) -> dict:
    """Return the record of one run."""
    from vla_edge_ros.kernels.cuda.driver import Device
    from vla_edge_ros.kernels.cuda.engine import Engine

    Device().close()  # tells that there is no GPU before the weights are drawn
    config = SHAPES[shape]
    slots = max(lengths) + PREFILL_TOKENS + DECODE_TOKENS
    weights = fast_random_weights(config)
    began = time.perf_counter()
    engine = Engine(config, weights, 'bfloat16', slots, PREFILL_TOKENS)
    bandwidth = read_bandwidth(engine, config)
    record = {
        'environment': environment_record(),
        'device': engine.device.name,
        'capability': engine.device.capability,
        'shape': shape,
        'warm_up_chunks': WARM_UP,
        'chunks': chunks,
        'start_s': time.perf_counter() - began,
        'read_bandwidth_gb_s': bandwidth / 1e9,
        'lengths': {},
        'peers': {},
    }
    for length in lengths:
        result = measure_length(engine, config, length, slots, chunks)
        result['floor_ms'] = 1e3 * floor_bytes(config, length) / bandwidth
        record['lengths'][str(length)] = result
    middle = sorted(lengths)[len(lengths) // 2]
    record['stages'] = measure_stages(engine, config, middle)
    engine.close()
    if with_peers and util.find_spec('torch') and util.find_spec('transformers'):
        from vla_edge_ros.lab.gpu_peer import measure_peers

        record['peers'] = measure_peers(
            config, weights, middle, PREFILL_TOKENS, DECODE_TOKENS, PEER_CHUNKS)
    record['stage_length'] = record['peer_length'] = middle
    record['peer_cache_slots'] = middle + PREFILL_TOKENS + DECODE_TOKENS
    return record


def fast_random_weights(config) -> dict[str, np.ndarray]:
    """Return weights that keep the scale of their input, from one million numbers repeated."""
    base = np.random.default_rng(0).standard_normal(1 << 20).astype(np.float32)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = np.resize(base, shape)
        if name.endswith('norm.weight'):
            tensors[name] = 1 + 0.1 * values
        elif len(shape) == 1:
            tensors[name] = 0.1 * values
        else:
            values *= np.float32(0.8 / np.sqrt(shape[1]))
            tensors[name] = (values.view(np.uint32) >> 16).astype(np.uint16)
    return tensors


def floor_bytes(config, length: int) -> int:
    """Return the bytes that one chunk behind ``length`` slots has to read at least."""
    hidden, inner = config.hidden_size, config.intermediate_size
    layer = hidden * (config.qkv_size + config.query_size + 3 * inner)
    layers = 2 * config.num_hidden_layers * layer
    head = 2 * config.vocab_size * hidden
    cache = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    passes = 1 + DECODE_TOKENS
    return passes * (layers + cache * length) + DECODE_TOKENS * head


def read_bandwidth(engine, config) -> float:
    """Return bytes a second of a pass over the vocabulary's matrix, the best of several."""
    device, launches = engine.device, engine._launches
    engine._set_slots(np.arange(1, dtype=np.int32), np.arange(1, 2, dtype=np.int32))
    engine._set_rows(0, config.vocab_size)
    device.copy_in(engine._at['state'], engine._host_state)
    repeats = 16
    graph = device.record(lambda: [device.launch(launches.head()) for _ in range(repeats)])
    seconds = min(timed(device, graph, 20))
    return repeats * 2 * config.vocab_size * config.hidden_size / seconds


def timed(device, graph, count: int) -> list[float]:
    """Return the seconds each of ``count`` runs of a graph took, after a few for warming up."""
    seconds = []
    for _ in range(count + 5):
        began = time.perf_counter()
        device.run(graph)
        device.wait()
        seconds.append(time.perf_counter() - began)
    return seconds[5:]


def statistics(milliseconds) -> dict[str, float]:
    """Return median, p99 and maximum."""
    values = np.asarray(milliseconds)
    return {'median': float(np.median(values)), 'p99': float(np.percentile(values, 99)),
            'max': float(values.max())}  # fmt: skip


def measure_length(engine, config, length: int, slots: int, chunks: int) -> dict:
    """Return the times of chunks behind ``length`` slots, through the engine's own methods."""
    x = np.random.default_rng(1).standard_normal(
        (PREFILL_TOKENS, config.hidden_size)).astype(np.float32)
    order = np.arange(slots, dtype=np.int32)
    end = length + PREFILL_TOKENS
    prefill, decode, host = [], [], []
    for _ in range(chunks + WARM_UP):
        # As after an eviction: every key behind the first frame has another rank than before.
        engine._held = engine._held[:PREFILL_TOKENS]
        host_began, began = time.thread_time(), time.perf_counter()
        engine.forward(x, order[:length], order[length:end])
        between = time.perf_counter()
        engine.decode_greedy(
            1, DECODE_TOKENS, order[:end], order[end : end + DECODE_TOKENS], 0, config.vocab_size)
        prefill.append(1e3 * (between - began))
        decode.append(1e3 * (time.perf_counter() - between))
        host.append(1e3 * (time.thread_time() - host_began))
    prefill, decode, host = (np.array(times[WARM_UP:]) for times in (prefill, decode, host))
    return {
        'chunk_ms': statistics(prefill + decode),
        'prefill_ms': statistics(prefill),
        'decode_ms_per_token': statistics(decode / DECODE_TOKENS),
        'host_cpu_ms': statistics(host),
    }


def measure_stages(engine, config, length: int) -> list[dict]:
    """Return microseconds of every kernel of a layer, the mean over all layers in turn."""
    device, launches, layers = engine.device, engine._launches, config.num_hidden_layers
    engine._set_slots(
        np.arange(length, dtype=np.int32),
        np.arange(length, length + PREFILL_TOKENS, dtype=np.int32))
    engine._set_rows(0, config.vocab_size)
    device.copy_in(engine._at['state'], engine._host_state)
    device.wait()

    def time_of(make: Callable) -> float:
        graph = device.record(lambda: [device.launch(make(layer), layer > 0)
                                       for layer in range(layers)])  # fmt: skip
        return 1e6 * float(np.median(timed(device, graph, 50))) / layers

    rows = []
    for kind, names, make in (
        ('decode', DECODE_STAGES, lambda i: lambda layer: launches.decode_layer(layer, 0)[i]),
        ('prefill', PREFILL_STAGES, lambda i: lambda layer: engine._prefill_launches[layer][i]),
    ):
        for index, name in enumerate(names):
            rows.append({'pass': kind, 'stage': name, 'us': time_of(make(index))})
    return rows


def document(record: dict) -> str:
    """Return the record as Markdown."""
    environment = record['environment']
    lines = [
        f'**{record["device"]}**, Qwen2.5 {record["shape"]} shape, random weights, '
        f'{record["chunks"]} chunks behind {record["warm_up_chunks"]} for warming up, read '
        f'bandwidth {record["read_bandwidth_gb_s"] / 1e3:.2f} TB/s '
        f'(commit {environment["commit"][:10] or "unknown"}). Median / p99 / max, ms:',
        '',
        '| cached slots | chunk | prefill | decode a token | host CPU | floor | chunk / floor |',
        '|---|---|---|---|---|---|---|',
    ]
    for length, row in record['lengths'].items():
        cells = [
            ' / '.join(f'{row[name][key]:.2f}' for key in ('median', 'p99', 'max'))
            for name in ('chunk_ms', 'prefill_ms', 'decode_ms_per_token', 'host_cpu_ms')]
        ratio = row['chunk_ms']['median'] / row['floor_ms']
        lines.append(f'| {length} | {" | ".join(cells)} | {row["floor_ms"]:.2f} | {ratio:.2f} |')
    if record['peers']:
        lines += ['', f'Others in the same run, behind {record["peer_length"]} slots of a static '
                  f'cache of {record["peer_cache_slots"]}, all of which they attend to:', '']
        lines += [f'- {name}: {value:.1f} ms' if isinstance(value, float) else f'- {name}: {value}'
                  for name, value in record['peers'].items()]  # fmt: skip
    lines += ['', f'Kernels of one layer behind {record["stage_length"]} slots:', '',
              '| pass | stage | us |', '|---|---|---|']  # fmt: skip
    lines += [f'| {row["pass"]} | {row["stage"]} | {row["us"]:.1f} |' for row in record['stages']]
    return '\n'.join(lines)


def write_document(root: Path) -> None:
    """Write the page on the engine from its record."""
    record = json.loads((root / RECORD).read_text(encoding='utf-8'))
    (root / DOCUMENT).write_text(HEADER + document(record) + '\n', encoding='utf-8')


if __name__ == '__main__':
    write_document(Path.cwd())
