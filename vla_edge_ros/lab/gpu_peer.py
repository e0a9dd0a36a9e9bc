"""The same chunk through Hugging Face on the GPU: as it comes, and as one CUDA graph."""

import time

import numpy as np
import torch
from transformers import StaticCache

from vla_edge_ros.lab.torch_peer import hugging_face_model


@torch.inference_mode()
def measure_peers(
    config, weights, length: int, prefill_tokens: int, decode_tokens: int, chunks: int
) -> dict[str, float | str]:
    """
    Return the median milliseconds of a chunk by peer, or the reason why there is none.

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

    """
    if not torch.cuda.is_available():
        return {'hugging_face': 'torch sees no GPU'}
    model = hugging_face_model(config, weights, torch.bfloat16).to('cuda')
    cache = StaticCache(config=model.config, max_cache_len=length + prefill_tokens + decode_tokens)
    x = torch.randn(1, length, config.hidden_size, device='cuda', dtype=torch.bfloat16)
    model.model(inputs_embeds=x, cache=cache, use_cache=True)
    first = x[:, :prefill_tokens].clone()
    token = torch.ones((1, 1), dtype=torch.long, device='cuda')

    def chunk():
        for layer in cache.layers:
            layer.cumulative_length.fill_(length)
        model.model(inputs_embeds=first, cache=cache, use_cache=True)
        ids = token
        for _ in range(decode_tokens):
            logits = model(input_ids=ids, cache=cache, use_cache=True).logits
            ids = logits[:, -1:].argmax(-1)
        return ids

    def median(work) -> float:
        times = []
        for _ in range(chunks + 3):
            torch.cuda.synchronize()
            began = time.perf_counter()
            work()
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - began))
        return float(np.median(times[3:]))

    found: dict[str, float | str] = {'hugging_face_eager': median(chunk)}
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chunk()
        found['hugging_face_graph'] = median(graph.replay)
    except RuntimeError as error:
        found['hugging_face_graph'] = f'cannot be captured: {str(error).splitlines()[0]}'
    return found
