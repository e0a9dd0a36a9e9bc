"""The decoder's shape is read from config.json, and what is not built is refused."""

import json

import pytest

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.policy.config import TransformerConfig

QWEN_2_5_CODER_1_5B = {
    'hidden_act': 'silu',
    'hidden_size': 1536,
    'intermediate_size': 8960,
    'max_position_embeddings': 32768,
    'model_type': 'qwen2',
    'num_attention_heads': 12,
    'num_hidden_layers': 28,
    'num_key_value_heads': 2,
    'rms_norm_eps': 1e-06,
    'rope_theta': 1000000.0,
    'sliding_window': 131072,
    'tie_word_embeddings': True,
    'torch_dtype': 'bfloat16',
    'use_sliding_window': False,
    'vocab_size': 151936,
}


def with_values(**values):
    return TransformerConfig.from_hugging_face(QWEN_2_5_CODER_1_5B | values)


def test_a_published_config_is_read():
    config = with_values()
    assert config.head_dim == 128
    assert config.query_size == 1536
    assert config.key_value_size == 256
    assert config.qkv_size == 2048
    assert config.rope_theta == 1e6
    assert config.tie_word_embeddings


def test_rope_theta_is_found_where_transformers_5_puts_it():
    values = dict(QWEN_2_5_CODER_1_5B)
    del values['rope_theta']
    values['rope_parameters'] = {'rope_type': 'default', 'rope_theta': 5e5}
    assert TransformerConfig.from_hugging_face(values).rope_theta == 5e5


def test_an_explicit_head_dim_wins_over_the_quotient():
    assert with_values(head_dim=64).query_size == 768


def test_a_text_config_inside_a_larger_one_is_read():
    outer = {'model_type': 'qwen2_vla', 'text_config': QWEN_2_5_CODER_1_5B}
    assert TransformerConfig.from_hugging_face(outer) == with_values()


def test_file_and_directory_give_the_same_as_the_mapping(tmp_path):
    file = tmp_path / 'config.json'
    file.write_text(json.dumps(QWEN_2_5_CODER_1_5B), encoding='utf-8')
    assert TransformerConfig.from_hugging_face(file) == with_values()
    assert TransformerConfig.from_hugging_face(str(tmp_path)) == with_values()


@pytest.mark.parametrize(
    ('values', 'field'),
    [
        ({'model_type': 'gemma'}, 'model_type'),
        ({'hidden_act': 'gelu'}, 'hidden_act'),
        ({'use_sliding_window': True}, 'use_sliding_window'),
        ({'rope_scaling': {'type': 'yarn', 'factor': 4.0}}, 'rope_type'),
        ({'vocab_size': None}, 'vocab_size'),
        ({'vocab_size': 12.5}, 'vocab_size'),
        ({'num_hidden_layers': 0}, 'num_hidden_layers'),
        ({'num_key_value_heads': 5}, 'num_attention_heads'),
        ({'hidden_size': 1537}, 'hidden_size'),
        ({'head_dim': 33}, 'head_dim'),
        ({'num_attention_heads': '12'}, 'num_attention_heads'),
        ({'rms_norm_eps': 0.0}, 'rms_norm_eps'),
        ({'rms_norm_eps': float('nan')}, 'rms_norm_eps'),
        ({'tie_word_embeddings': 'yes'}, 'tie_word_embeddings'),
    ],
)
def test_what_cannot_be_run_is_refused_by_name(values, field):
    with pytest.raises(ConfigError) as caught:
        with_values(**values)
    assert caught.value.field == field


@pytest.mark.parametrize('text', ['', '{', '[1, 2]'])
def test_a_corrupt_file_is_refused(tmp_path, text):
    file = tmp_path / 'config.json'
    file.write_text(text, encoding='utf-8')
    with pytest.raises(ConfigError, match='config'):
        TransformerConfig.from_hugging_face(file)


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match='readable JSON'):
        TransformerConfig.from_hugging_face(tmp_path)


@pytest.mark.parametrize('key', ['text_config', 'rope_parameters', 'rope_scaling'])
def test_section_that_is_no_object_is_refused(key):
    with pytest.raises(ConfigError, match=f"{key} must be a JSON object, got 'list'"):
        TransformerConfig.from_hugging_face({**QWEN_2_5_CODER_1_5B, key: [1]})
