"""Shape of a Qwen2 decoder, read from a Hugging Face ``config.json``."""

from collections.abc import Mapping
import dataclasses
import json
from pathlib import Path
from typing import Any

from vla_edge_ros.errors import ConfigError, one_line


@dataclasses.dataclass(frozen=True, slots=True)
class TransformerConfig:
    """The numbers that make one Qwen2 model differ from another; names are Hugging Face's."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e4
    tie_word_embeddings: bool = False

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int and (type(value) is not int or value < 1):
                raise ConfigError(field.name, 'must be an integer >= 1', value)
            if field.type is float:
                if type(value) not in (int, float) or not 0 < value < float('inf'):
                    raise ConfigError(field.name, 'must be a finite number > 0', value)
                object.__setattr__(self, field.name, float(value))
            if field.type is bool and type(value) is not bool:
                raise ConfigError(field.name, 'must be true or false', value)
        if self.num_attention_heads % self.num_key_value_heads:
            rule = f'must be a multiple of num_key_value_heads = {self.num_key_value_heads}'
            raise ConfigError('num_attention_heads', rule, self.num_attention_heads)
        if self.head_dim % 2:
            raise ConfigError('head_dim', 'must be even for rotary positions', self.head_dim)

    @property
    def query_size(self) -> int:
        """Width of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Width of all key heads together, and of all value heads."""
        return self.num_key_value_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        """Width of the fused query, key and value projection."""
        return self.query_size + 2 * self.key_value_size

    @classmethod
    def from_hugging_face(cls, source: Mapping[str, Any] | str | Path) -> 'TransformerConfig':
        """
        Read a ``config.json``, or the mapping it holds.

        Parameters
        ----------
        source : mapping, str or Path
            The mapping itself, the file, or the directory that holds ``config.json``. A mapping
            with a ``text_config`` is read there. Keys that do not shape the decoder are ignored.

        Raises
        ------
        ConfigError
            A file cannot be read, a key is missing, or a value asks for what is not built here
            (another rotary scaling, sliding windows, another activation).

        """
        values = source if isinstance(source, Mapping) else _read_json(Path(source))
        values = _section(values, 'text_config') or values
        rope = _section(values, 'rope_parameters') or _section(values, 'rope_scaling')
        _require('model_type', values.get('model_type', 'qwen2'), ('qwen2',))
        _require('hidden_act', values.get('hidden_act', 'silu'), ('silu',))
        _require('use_sliding_window', bool(values.get('use_sliding_window')), (False,))
        _require('rope_type', rope.get('rope_type', rope.get('type', 'default')), ('default',))
        for name in _REQUIRED:
            if values.get(name) is None:
                raise ConfigError(name, 'must be given in config.json', None)
        heads = values['num_attention_heads']
        known = {name: values[name] for name in _REQUIRED}
        known['num_key_value_heads'] = values.get('num_key_value_heads') or heads
        known['head_dim'] = values.get('head_dim') or _split(values['hidden_size'], heads)
        known['rope_theta'] = rope.get('rope_theta', values.get('rope_theta', 1e4))
        for name in ('rms_norm_eps', 'tie_word_embeddings'):
            if name in values:
                known[name] = values[name]
        return cls(**known)


_REQUIRED = (
    'vocab_size',
    'hidden_size',
    'intermediate_size',
    'num_hidden_layers',
    'num_attention_heads',
)


def _read_json(path: Path) -> dict[str, Any]:
    path = path / 'config.json' if path.is_dir() else path
    try:
        values = json.loads(path.read_text(encoding='utf-8'))
    except (OSError, ValueError) as error:
        rule = f'must be a readable JSON file ({one_line(error)})'
        raise ConfigError('config', rule, str(path)) from error
    if not isinstance(values, dict):
        raise ConfigError('config', 'must hold a JSON object', str(path))
    return values


def _section(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = values.get(key) or {}
    if not isinstance(section, Mapping):
        raise ConfigError(key, 'must be a JSON object', type(section).__name__)
    return section


def _require(field: str, value: Any, allowed: tuple[Any, ...]) -> None:
    if value not in allowed:
        raise ConfigError(field, f'must be {" or ".join(map(repr, allowed))}', value)


def _split(hidden_size: Any, heads: Any) -> int:
    if type(hidden_size) is not int or type(heads) is not int or heads < 1:
        raise ConfigError('num_attention_heads', 'must be an integer >= 1', heads)
    if hidden_size % heads:
        raise ConfigError('hidden_size', f'must be a multiple of {heads} heads', hidden_size)
    return hidden_size // heads
