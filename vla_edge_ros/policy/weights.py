"""
Checkpoints: safetensors only, one file or several named by an index.

bfloat16 tensors are uint16 arrays, see ``kernels/bfloat16.py``.
"""

import json
from pathlib import Path

import numpy as np
import safetensors

from vla_edge_ros.errors import WeightsError
from vla_edge_ros.policy.config import TransformerConfig

_DTYPES = {'F32': np.float32, 'F16': np.float16, 'BF16': np.uint16}


def read_tensors(path: str | Path) -> dict[str, np.ndarray]:
    """
    Read every tensor of a checkpoint.

    Parameters
    ----------
    path : str or Path
        A ``.safetensors`` file, a ``.safetensors.index.json``, or the directory of either.

    Returns
    -------
    dict of str to ndarray
        float32 (also for float16), or uint16 for bfloat16; read-only views of one copy.

    Raises
    ------
    WeightsError
        A file is missing or corrupt, or a tensor has a dtype other than F32, F16 or BF16.

    """
    path = Path(path)
    if path.is_dir():
        index = path / 'model.safetensors.index.json'
        path = index if index.exists() else path / 'model.safetensors'
    files = _shards(path) if path.suffix == '.json' else [path]
    tensors = {}
    for file in files:
        for name, tensor in _read_file(file):
            tensors[name] = tensor
    return tensors


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


def _read_file(path: Path):
    try:
        entries = safetensors.deserialize(path.read_bytes())
    except (OSError, safetensors.SafetensorError) as error:
        rule = f'must be a readable safetensors file ({error})'
        raise WeightsError('checkpoint', rule, str(path)) from error
    for name, entry in entries:
        if entry['dtype'] not in _DTYPES:
            rule = f'must be one of {", ".join(_DTYPES)}'
            raise WeightsError(f'{name} dtype', rule, entry['dtype'])
        flat = np.frombuffer(entry['data'], dtype=_DTYPES[entry['dtype']])
        tensor = flat.reshape(entry['shape'])
        yield name, tensor.astype(np.float32) if entry['dtype'] == 'F16' else tensor


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


def check_weights(
    tensors: dict[str, np.ndarray], config: TransformerConfig
) -> dict[str, np.ndarray]:
    """Return the decoder's tensors, checked as :func:`load_weights` says."""
    checked = {}
    for name, shape in expected_shapes(config).items():
        tensor = tensors.get(name)
        if tensor is None:
            raise WeightsError(name, 'must be in the checkpoint', None)
        if tensor.shape != shape:
            raise WeightsError(name, f'must have the configured shape {shape}', tensor.shape)
        if tensor.dtype == np.uint16:
            finite = np.all((tensor & 0x7F80) != 0x7F80)
        else:
            finite = np.all(np.isfinite(tensor))
        if not finite:
            raise WeightsError(name, 'must hold finite values only', 'NaN or infinity')
        checked[name] = tensor
    return checked
