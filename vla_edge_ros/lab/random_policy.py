"""A policy of any size with random weights, loadable like any other, for timing."""

import json
from pathlib import Path
import shutil
import tempfile

import numpy as np

from vla_edge_ros.lab.random_model import hugging_face_config
from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.policy.shapes import load_shape, RANDOM
from vla_edge_ros.policy.vision import weight_shapes
from vla_edge_ros.policy.weights import expected_shapes

PATCHES = {'image_width': 96, 'image_height': 80, 'patch_size': 16}
"""30 patches: with the pooled and the proprioception token 32 slots a frame."""
_DTYPES = {'float32': 'F32', 'uint16': 'BF16'}


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


def load_policy(model: str, backend: str, kv_slots: int, progress) -> Policy:
    """
    Return a policy ready to run.

    Parameters
    ----------
    model : str
        As of ``load_shape``; what is a shape only gets random weights.
    backend, kv_slots, progress
        As of ``Policy.load``.

    """
    if not model.startswith(RANDOM):
        return Policy.load(
            model or DEFAULT_POLICY, backend=backend, kv_slots=kv_slots, progress=progress)
    config = load_shape(model)
    with tempfile.TemporaryDirectory() as folder:
        write_random_policy(Path(folder), config.transformer, config.kv_slots)
        return Policy.load(folder, backend=backend, kv_slots=kv_slots, progress=progress)


def write_random_policy(folder: Path, transformer, kv_slots: int) -> None:
    """
    Write a checkpoint with a random decoder and encoder, the rest as the embedded policy has it.

    Parameters
    ----------
    folder : Path
        Exists; takes as many bytes as the decoder has in bfloat16.
    transformer : TransformerConfig
        The decoder, whose vocabulary holds that of the embedded policy.
    kv_slots : int
        Slots for frames, a multiple of 32.

    """
    raw = json.loads((DEFAULT_POLICY / 'config.json').read_text(encoding='utf-8'))
    section = raw['vla'] | PATCHES | {'kv_slots': kv_slots}
    raw = hugging_face_config(transformer) | {'vla': section}
    config = PolicyConfig.from_dict(raw)
    tensors = fast_random_weights(transformer)
    rng = np.random.default_rng(2)
    shapes = weight_shapes(config) | {
        'proprioception_projector.weight': (transformer.hidden_size, config.proprioception_dim),
        'proprioception_projector.bias': (transformer.hidden_size,)}
    for name, shape in shapes.items():
        values = rng.standard_normal(shape, dtype=np.float32)
        tensors[name] = values / np.float32(np.sqrt(shape[-1]) if len(shape) > 1 else 10.0)
    _write_tensors(folder / 'model.safetensors', tensors)
    (folder / 'config.json').write_text(json.dumps(raw, indent=1) + '\n', encoding='utf-8')
    shutil.copy(DEFAULT_POLICY / 'tokenizer.json', folder)


def _write_tensors(path: Path, tensors: dict[str, np.ndarray]) -> None:
    """Write safetensors: NumPy knows no bfloat16, so that the library does not take these."""
    header, offset = {}, 0
    for name, tensor in tensors.items():
        ends = offset + tensor.nbytes
        header[name] = {'dtype': _DTYPES[tensor.dtype.name], 'shape': tensor.shape,
                        'data_offsets': (offset, ends)}  # fmt: skip
        offset = ends
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with path.open('wb') as file:
        file.write(len(text).to_bytes(8, 'little') + text)
        for tensor in tensors.values():
            tensor.tofile(file)
