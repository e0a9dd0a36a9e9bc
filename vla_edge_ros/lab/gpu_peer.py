"""The same chunk through Hugging Face on the GPU: as it comes, as one CUDA graph, compiled."""

from collections.abc import Callable
import time
from typing import Any

import numpy as np
import torch
import transformers

from vla_edge_ros.lab.record import statistics
from vla_edge_ros.lab.torch_peer import HuggingFaceChunk

WARM_UP = 3
EAGER, GRAPH, COMPILED = 'hugging_face_eager', 'hugging_face_graph', 'hugging_face_compiled'
NOT_COMPILED = 'not run: takes minutes to compile, ask for it with --compiled'


@torch.inference_mode()
def measure_peers(
    config, weights, length: int, prefill_tokens: int, decode_tokens: int, chunks: int,
    compile_mode: str = '', device: str = 'cuda',
) -> dict[str, Any]:
    """
    Return versions, and by peer the times of a chunk or the reason why there are none.

    Parameters
    ----------
    config, weights
        As for the engine.
    length : int
        Cached tokens.
    prefill_tokens, decode_tokens : int
        Of a chunk.
    chunks : int
        How many to time.
    compile_mode : str
        Of ``torch.compile``, whose result is captured as one CUDA graph; '' leaves it out.
    device : str
        Where they run; a graph is captured on ``cuda`` only.

    Returns
    -------
    dict
        ``versions``; ``chunk_ms`` by peer: median, p99, p99.9 and max, or a text;
        ``compile_s``, if it was compiled.

    """
    found: dict[str, Any] = {
        'versions': {'torch': torch.__version__, 'transformers': transformers.__version__}}
    if device == 'cuda' and not torch.cuda.is_available():
        return found | {'chunk_ms': {EAGER: 'not run: torch sees no GPU'}}
    peer = HuggingFaceChunk(
        config, weights, length + prefill_tokens + decode_tokens, torch.bfloat16, device)
    x = np.random.default_rng(1).standard_normal(
        (length, config.hidden_size), dtype=np.float32)
    peer.rewind(0)
    peer.prefill(x)
    frame = peer.to_device(x[:prefill_tokens])
    token = torch.ones((1, 1), dtype=torch.long, device=device)

    def chunk() -> None:
        peer.rewind(length)
        peer.prefill(frame)
        peer.decode(token, decode_tokens)

    def compiled() -> dict[str, float]:
        began = time.perf_counter()
        peer.compile(compile_mode)
        chunk()
        _wait()
        found['compile_mode'] = compile_mode
        found['compile_s'] = time.perf_counter() - began
        chunk()  # what is only made at a second run must not be in the graph
        return captured()

    def captured() -> dict[str, float]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chunk()
        return _timed(graph.replay, chunks)

    found['chunk_ms'] = {
        EAGER: _timed(chunk, chunks),
        GRAPH: _attempt(captured),
        COMPILED: _attempt(compiled) if compile_mode else NOT_COMPILED,
    }
    return found


def _attempt(measure: Callable[[], dict]) -> dict | str:
    """Return what is measured, or why it cannot be: the run is about ours, and goes on."""
    try:
        return measure()
    except Exception as error:  # whatever torch's compiler raises
        lines = str(error).splitlines() or ['']
        return f'not run: {type(error).__name__}: {lines[0]}'


def _timed(work: Callable[[], None], chunks: int) -> dict[str, float]:
    times = []
    for _ in range(chunks + WARM_UP):
        _wait()
        began = time.perf_counter()
        work()
        _wait()
        times.append(1e3 * (time.perf_counter() - began))
    return statistics(times[WARM_UP:])


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
