"""Models with random weights, for parity and timing when no trained ones are at hand."""

import numpy as np

from vla_edge_ros.kernels.bfloat16 import to_bfloat16
from vla_edge_ros.policy.config import TransformerConfig
from vla_edge_ros.policy.shapes import SHAPES
from vla_edge_ros.policy.weights import expected_shapes

# The decoder of policies/track.
TINY = TransformerConfig(768, 128, 384, 4, 4, 2, 32, tie_word_embeddings=True)
QWEN_0_5B, QWEN_1_5B, QWEN_3B = SHAPES['0.5b'], SHAPES['1.5b'], SHAPES['3b']

_OUTLIER_FRACTION = 1e-3
_OUTLIER_SCALE = 20


def random_weights(
    config: TransformerConfig, seed: int = 0, weights_dtype: str = 'float32'
) -> dict[str, np.ndarray]:
    """
    Draw a checkpoint: matrices that keep the scale of their input, one value in 1000 larger.

    Without the outliers attention is nearly uniform and a comparison proves little; in the
    vocabulary they would make one token win for ever.
    """
    rng = np.random.default_rng(seed)
    tensors = {}
    for name, shape in expected_shapes(config).items():
        values = rng.standard_normal(shape, dtype=np.float32)
        if name.endswith('norm.weight'):
            values = 1 + 0.1 * values
        elif name.endswith('bias'):
            values *= np.float32(0.1)
        else:
            values *= np.float32(0.8 / np.sqrt(shape[1]))
            if 'layers' in name:
                outliers = rng.random(shape, dtype=np.float32) < _OUTLIER_FRACTION
                values[outliers] *= _OUTLIER_SCALE
        if len(shape) == 2 and weights_dtype == 'bfloat16':
            values = to_bfloat16(values)
        tensors[name] = np.ascontiguousarray(values)
    return tensors


def hugging_face_config(config: TransformerConfig) -> dict:
    """Return the mapping ``Qwen2Config(**mapping)`` builds the same network from."""
    return {
        'model_type': 'qwen2',
        'vocab_size': config.vocab_size,
        'hidden_size': config.hidden_size,
        'intermediate_size': config.intermediate_size,
        'num_hidden_layers': config.num_hidden_layers,
        'num_attention_heads': config.num_attention_heads,
        'num_key_value_heads': config.num_key_value_heads,
        'head_dim': config.head_dim,
        'rms_norm_eps': config.rms_norm_eps,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': config.rope_theta},
        'tie_word_embeddings': config.tie_word_embeddings,
        'max_position_embeddings': 32768,
        'use_sliding_window': False,
    }
