"""
Checkpoints: safetensors only, one file or several named by an index.

bfloat16 tensors are uint16 arrays, see ``kernels/bfloat16.py``.
"""

from collections.abc import Iterator, Mapping
import json
from pathlib import Path
from typing import NamedTuple

import numpy as np
import safetensors

from vla_edge_ros.errors import WeightsError
from vla_edge_ros.policy.config import TransformerConfig
from vla_edge_ros.progress import no_progress, Progress

_DTYPES = {'F32': np.float32, 'F16': np.float16, 'BF16': np.uint16}


class Stored(NamedTuple):
    """A tensor that has not been read: what it will be as an array."""

    dtype: np.dtype
    shape: tuple[int, ...]


def read_header(path: str | Path) -> dict[str, Stored]:
    """
    Return what :func:`read_tensors` would read, without reading it.

    Raises
    ------
    WeightsError
        As for :func:`read_tensors`.

    """
    header = {}
    for file in _files(path):
        try:
            with safetensors.safe_open(file, 'numpy') as tensors:
                for name in tensors.keys():  # noqa: SIM118 - it is no dictionary
                    tensor = tensors.get_slice(name)
                    dtype = _dtype(name, tensor.get_dtype())
                    dtype = np.float32 if dtype is np.float16 else dtype
                    header[name] = Stored(np.dtype(dtype), tuple(tensor.get_shape()))
        except (OSError, safetensors.SafetensorError) as error:
            raise _unreadable(file, error) from error
    return header


def read_tensors(
    path: str | Path, progress: Progress = no_progress
) -> dict[str, np.ndarray]:
    """
    Read every tensor of a checkpoint.

    Parameters
    ----------
    path : str or Path
        A ``.safetensors`` file, a ``.safetensors.index.json``, or the directory of either.
    progress : Progress
        Told of every file.

    Returns
    -------
    dict of str to ndarray
        float32 (also for float16), or uint16 for bfloat16; read-only views of one copy.

    Raises
    ------
    WeightsError
        A file is missing or corrupt, or a tensor has a dtype other than F32, F16 or BF16.

    """
    tensors = {}
    files = _files(path)
    for number, file in enumerate(files, 1):
        progress('reading checkpoint file', number, len(files))
        tensors.update(_read_file(file))
    return tensors


def _files(path: str | Path) -> list[Path]:
    path = Path(path)
    if path.is_dir():
        index = path / 'model.safetensors.index.json'
        path = index if index.exists() else path / 'model.safetensors'
    return _shards(path) if path.suffix == '.json' else [path]


def _shards(index: Path) -> list[Path]:
    try:
        weight_map = json.loads(index.read_text(encoding='utf-8'))['weight_map']
        names = sorted(set(weight_map.values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        rule = f'must be a readable index with a weight_map ({error!r})'
        raise WeightsError('checkpoint index', rule, str(index)) from error
    for name in names:
        if Path(name).name != name:
            raise WeightsError('weight_map', 'must name files beside the index', name)
    return [index.parent / name for name in names]


def _read_file(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    try:
        entries = safetensors.deserialize(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        raise _unreadable(path, error) from error
    for name, entry in entries:
        flat = np.frombuffer(entry['data'], dtype=_dtype(name, entry['dtype']))
        tensor = flat.reshape(entry['shape'])
        yield name, tensor.astype(np.float32) if entry['dtype'] == 'F16' else tensor


def _dtype(name: str, stored: str) -> type:
    if stored not in _DTYPES:
        raise WeightsError(f'{name} dtype', f'must be one of {", ".join(_DTYPES)}', stored)
    return _DTYPES[stored]


def _unreadable(path: Path, error: Exception) -> WeightsError:
    return WeightsError('checkpoint', f'must be a readable safetensors file ({error})', str(path))


def expected_shapes(config: TransformerConfig) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor of the decoder, as Hugging Face names them."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {'model.embed_tokens.weight': (config.vocab_size, hidden)}
    for layer in range(config.num_hidden_layers):
        prefix = f'model.layers.{layer}.'
        shapes[prefix + 'input_layernorm.weight'] = (hidden,)
        for name, rows in (
            ('q_proj', config.query_size),
            ('k_proj', config.key_value_size),
            ('v_proj', config.key_value_size),
        ):
            shapes[f'{prefix}self_attn.{name}.weight'] = (rows, hidden)
            shapes[f'{prefix}self_attn.{name}.bias'] = (rows,)
        shapes[prefix + 'self_attn.o_proj.weight'] = (hidden, config.query_size)
        shapes[prefix + 'post_attention_layernorm.weight'] = (hidden,)
        shapes[prefix + 'mlp.gate_proj.weight'] = (inner, hidden)
        shapes[prefix + 'mlp.up_proj.weight'] = (inner, hidden)
        shapes[prefix + 'mlp.down_proj.weight'] = (hidden, inner)
    shapes['model.norm.weight'] = (hidden,)
    if not config.tie_word_embeddings:
        shapes['lm_head.weight'] = (config.vocab_size, hidden)
    return shapes


def load_weights(path: str | Path, config: TransformerConfig) -> dict[str, np.ndarray]:
    """
    Read the decoder's tensors and check each against its configuration.

    Other tensors of the checkpoint (a vision encoder's, say) are left to :func:`read_tensors`.

    Raises
    ------
    WeightsError
        A tensor is missing, has another shape than the configuration says, or is not finite.

    """
    return check_weights(read_tensors(path), config)


def check_shapes(
    tensors: Mapping[str, np.ndarray | Stored], shapes: Mapping[str, tuple[int, ...]]
) -> None:
    """
    Check that a checkpoint, read or not, has every tensor of ``shapes``, so shaped.

    Raises
    ------
    WeightsError
        A tensor is missing or has another shape.

    """
    for name, shape in shapes.items():
        if name not in tensors:
            raise WeightsError(name, 'must be in the checkpoint', None)
        if tensors[name].shape != shape:
            raise WeightsError(name, f'must have shape {shape}', tensors[name].shape)


def check_weights(
    tensors: dict[str, np.ndarray], config: TransformerConfig
) -> dict[str, np.ndarray]:
    """Return the decoder's tensors, checked as :func:`load_weights` says."""
    shapes = expected_shapes(config)
    check_shapes(tensors, shapes)
    for name in shapes:
        tensor = tensors[name]
        if tensor.dtype == np.uint16:
            finite = np.all((tensor & 0x7F80) != 0x7F80)
        else:
            finite = np.all(np.isfinite(tensor))
        if not finite:
            raise WeightsError(name, 'must hold finite values only', 'NaN or infinity')
    return {name: tensors[name] for name in shapes}
