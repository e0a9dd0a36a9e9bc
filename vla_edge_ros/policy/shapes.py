"""Policies by their shape alone: what can be planned for before there is a weight."""

from dataclasses import replace
from types import MappingProxyType

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.policy.config import TransformerConfig
from vla_edge_ros.policy.policy_config import DEFAULT_POLICY, PolicyConfig

RANDOM = 'random:'
REFERENCE_KV_SLOTS = 4096
"""128 frames, as in ``config/reference.yaml``."""
# Published Qwen2.5 shapes.
SHAPES = MappingProxyType({
    '0.5b': TransformerConfig(151936, 896, 4864, 24, 14, 2, 64, 1e-6, 1e6, True),
    '1.5b': TransformerConfig(151936, 1536, 8960, 28, 12, 2, 128, 1e-6, 1e6, True),
    '3b': TransformerConfig(151936, 2048, 11008, 36, 16, 2, 128, 1e-6, 1e6, True),
})


def load_shape(model: str = '', field: str = 'model') -> PolicyConfig:
    """
    Return the configuration of a policy, without its weights.

    Parameters
    ----------
    model : str
        A checkpoint folder, or ``random:`` and one of ``SHAPES``: a decoder of that shape with
        pictures, prompt and actions as the embedded policy has them and 4,096 slots for frames.
        Empty is the embedded policy.
    field : str
        What the user calls it.

    Raises
    ------
    ConfigError
        There is no such folder or shape, or its ``config.json`` breaks a rule.

    """
    if not model.startswith(RANDOM):
        return PolicyConfig.load(model or DEFAULT_POLICY)
    name = model.removeprefix(RANDOM)
    if name not in SHAPES:
        names = ', '.join(RANDOM + shape for shape in SHAPES)
        raise ConfigError(field, f'must be a checkpoint folder or one of {names}', model)
    return replace(
        PolicyConfig.load(DEFAULT_POLICY), transformer=SHAPES[name], kv_slots=REFERENCE_KV_SLOTS)


def head_rows(model: str, config: PolicyConfig) -> int:
    """
    Return how many rows of the vocabulary's matrix a decoded token is chosen from.

    A policy chooses among its action tokens only; a shape from its whole vocabulary, as
    ``vla-edge bench engine`` measures it.
    """
    return config.transformer.vocab_size if model.startswith(RANDOM) else config.bins
