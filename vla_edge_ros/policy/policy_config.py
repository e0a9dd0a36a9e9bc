"""
Everything about a policy that its checkpoint fixes.

``config.json`` is a Hugging Face Qwen2 configuration with one more section, ``vla``, whose keys
are the fields of :class:`PolicyConfig`.
"""

from dataclasses import asdict, dataclass, fields
import json
import math
from pathlib import Path

from vla_edge_ros.errors import ConfigError, one_line, WeightsError
from vla_edge_ros.policy.config import TransformerConfig

DEFAULT_POLICY = Path(__file__).resolve().parent.parent / 'policies' / 'track'


@dataclass(frozen=True, slots=True)
class PolicyConfig:
    """
    Shapes, token ranges and normalisation of a policy.

    Lengths are in pixels, slots or tokens; ``step_ms`` in ms; ``proprioception_*``,
    ``action_*`` and ``grounding_*`` in the units of the robot (default policy: m and m/s).
    """

    transformer: TransformerConfig
    image_width: int
    image_height: int
    patch_size: int
    image_mean: tuple[float, ...]
    image_std: tuple[float, ...]
    vision_hidden_size: int
    vision_intermediate_size: int
    proprioception_mean: tuple[float, ...]
    proprioception_std: tuple[float, ...]
    prompt_slots: int
    kv_slots: int
    grounding_low: tuple[float, ...]
    grounding_high: tuple[float, ...]
    action_low: tuple[float, ...]
    action_high: tuple[float, ...]
    chunk_steps: int
    step_ms: float
    bins: int
    begin_token: int
    action_token_offset: int
    joint_names: tuple[str, ...]

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            _check_type(field, value)
            numbers = value if field.type == tuple[float, ...] else ()
            if not all(math.isfinite(number) for number in numbers):
                raise ConfigError(f'vla.{field.name}', 'must be finite', value)
            if field.type in (int, float) and not 0 < value < math.inf:
                raise ConfigError(f'vla.{field.name}', 'must be > 0', value)
        for name, size in (('image_width', self.image_width), ('image_height', self.image_height)):
            if size % self.patch_size:
                raise ConfigError(f'vla.{name}', f'must be a multiple of {self.patch_size}', size)
        for name in ('action', 'grounding'):
            low, high = getattr(self, f'{name}_low'), getattr(self, f'{name}_high')
            if len(low) != len(high) or not all(a < b for a, b in zip(low, high)):
                raise ConfigError(f'vla.{name}_low', f'must lie below vla.{name}_high', low)
        for name in ('image_std', 'proprioception_std'):
            if not all(value > 0 for value in getattr(self, name)):
                raise ConfigError(f'vla.{name}', 'must be > 0', getattr(self, name))
        for name, length in (
            ('image_mean', 3), ('image_std', 3),
            ('proprioception_std', len(self.proprioception_mean)),
            ('joint_names', len(self.joint_names) and len(self.proprioception_mean)),
        ):
            if len(getattr(self, name)) != length:
                rule = f'must have {length} values'
                raise ConfigError(f'vla.{name}', rule, getattr(self, name))
        if not self.action_low:
            raise ConfigError('vla.action_low', 'must have a value', self.action_low)
        if round(self.step_ms * 1e6) < 1:
            raise ConfigError('vla.step_ms', 'must be at least a nanosecond', self.step_ms)
        if self.vision_hidden_size % 4:
            rule = 'must be a multiple of 4'
            raise ConfigError('vla.vision_hidden_size', rule, self.vision_hidden_size)
        if self.begin_token >= self.transformer.vocab_size:
            rule = f'must be below vocab_size {self.transformer.vocab_size}'
            raise ConfigError('vla.begin_token', rule, self.begin_token)
        if self.kv_slots % self.slots_per_frame:
            rule = f'must be a multiple of the {self.slots_per_frame} slots of a frame'
            raise ConfigError('vla.kv_slots', rule, self.kv_slots)
        if self.action_token_offset + self.bins > self.transformer.vocab_size:
            rule = f'plus {self.bins} bins must fit vocab_size {self.transformer.vocab_size}'
            raise ConfigError('vla.action_token_offset', rule, self.action_token_offset)

    @property
    def patch_rows(self) -> int:
        """Patches down the image."""
        return self.image_height // self.patch_size

    @property
    def patch_columns(self) -> int:
        """Patches across the image."""
        return self.image_width // self.patch_size

    @property
    def slots_per_frame(self) -> int:
        """KV slots of one frame: its patches, their pooled token, the proprioception token."""
        return self.patch_rows * self.patch_columns + 2

    @property
    def max_frames(self) -> int:
        """Frames the cache holds."""
        return self.kv_slots // self.slots_per_frame

    @property
    def proprioception_dim(self) -> int:
        """Length of the proprioception vector."""
        return len(self.proprioception_mean)

    @property
    def action_dim(self) -> int:
        """Length of one action."""
        return len(self.action_low)

    @property
    def grounding_dim(self) -> int:
        """Tokens that name where the target is, decoded before the actions."""
        return len(self.grounding_low)

    @property
    def decode_tokens(self) -> int:
        """Tokens decoded for a chunk: grounding, then ``chunk_steps`` actions."""
        return self.grounding_dim + self.chunk_steps * self.action_dim

    @classmethod
    def load(cls, folder: Path | str) -> 'PolicyConfig':
        """
        Read ``config.json`` from a checkpoint folder.

        Raises
        ------
        WeightsError
            The file is missing or no JSON object, or has no ``vla`` section.
        ConfigError
            A key is missing, unknown, or breaks its rule.

        """
        path = Path(folder) / 'config.json'
        try:
            raw = json.loads(path.read_text(encoding='utf-8'))
        except FileNotFoundError:
            rule = 'must be a folder with a config.json'
            raise WeightsError('policy', rule, str(folder)) from None
        except (OSError, ValueError) as error:
            rule = f'must be readable JSON ({one_line(error)})'
            raise WeightsError('config.json', rule, str(path)) from None
        return cls.from_dict(raw)

    @classmethod
    def from_dict(cls, raw: dict) -> 'PolicyConfig':
        """Build from the parsed ``config.json``."""
        if not isinstance(raw, dict):
            raise WeightsError('config.json', 'must be a JSON object', type(raw).__name__)
        section = raw.get('vla')
        if not isinstance(section, dict):
            raise WeightsError('config.json', 'must have a section "vla"', type(section).__name__)
        names = {field.name for field in fields(cls)} - {'transformer'}
        for key in section.keys() - names:
            raise ConfigError(f'vla.{key}', 'is not a known key', section[key])
        for key in names - section.keys():
            raise ConfigError(f'vla.{key}', 'must be given', None)
        return cls(transformer=TransformerConfig.from_hugging_face(raw), **section)

    def vla_section(self) -> dict:
        """Return the ``vla`` section of ``config.json``."""
        return {key: value for key, value in asdict(self).items() if key != 'transformer'}


def _check_type(field, value) -> None:
    """Check that JSON gave ``value`` the type its field is declared with."""
    if field.type is int:
        fits, name = type(value) is int, 'an integer'
    elif field.type is float:
        fits, name = type(value) in (int, float), 'a number'
    elif field.type == tuple[float, ...]:
        fits = isinstance(value, tuple) and all(type(item) in (int, float) for item in value)
        name = 'a list of numbers'
    elif field.type == tuple[str, ...]:
        fits = isinstance(value, tuple) and all(isinstance(item, str) for item in value)
        name = 'a list of strings'
    else:
        fits, name = isinstance(value, field.type), field.type.__name__
    if not fits:
        raise ConfigError(f'vla.{field.name}', f'must be {name}', value)
