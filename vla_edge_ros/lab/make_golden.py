"""
Write the golden files that the parity tests compare with where torch is not installed.

Each is a checkpoint as Hugging Face itself saves it, and what its model computes from it in
float32: every layer's hidden state, the final norm, the logits, and a greedy continuation.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from vla_edge_ros.lab.parity import hugging_face_greedy, hugging_face_states
from vla_edge_ros.lab.random_model import random_weights
from vla_edge_ros.lab.torch_peer import cast_parameters, hugging_face_model
from vla_edge_ros.policy.config import TransformerConfig

TOKENS = 23
GREEDY_TOKENS = 64
CASES = {
    # Awkward on purpose: no size is a multiple of a register; float32, untied, sharded.
    'grouped': (TransformerConfig(61, 36, 52, 3, 6, 2, 10, 1e-6, 1e6, False), torch.float32),
    'tied_bfloat16': (TransformerConfig(90, 64, 96, 2, 4, 1, 16, 1e-5, 1e4, True), torch.bfloat16),
}


def write_case(folder: Path, config: TransformerConfig, dtype: torch.dtype) -> None:
    """Write one checkpoint and what Hugging Face computes from it."""
    tensors = random_weights(config, seed=11, weights_dtype=str(dtype).removeprefix('torch.'))
    model = hugging_face_model(config, tensors, dtype)
    shard = '60KB' if dtype == torch.float32 else '1GB'
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / 'generation_config.json').unlink(missing_ok=True)
    model = cast_parameters(model, torch.float32)
    token_ids = np.random.default_rng(4).integers(config.vocab_size, size=TOKENS)
    *layers, hidden, logits = hugging_face_states(model, token_ids)
    np.savez_compressed(
        folder / 'expected.npz',
        token_ids=token_ids,
        layers=np.stack(layers),
        hidden=hidden,
        logits=logits,
        greedy=np.array(hugging_face_greedy(model, token_ids, GREEDY_TOKENS)[0], np.int32),
    )


def main(arguments: list[str] | None = None) -> int:
    """Write every case below the given folder."""
    parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
    parser.add_argument('folder', type=Path, nargs='?', default=Path('test/golden'))
    options = parser.parse_args(arguments)
    for name, (config, dtype) in CASES.items():
        write_case(options.folder / name, config, dtype)
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
