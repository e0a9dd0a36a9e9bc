"""Checkpoints are read whole and checked, or refused with the reason."""

import json
import struct

import numpy as np
import pytest
from safetensors.numpy import save_file

from vla_edge_ros.errors import WeightsError
from vla_edge_ros.kernels.bfloat16 import convert, to_bfloat16, to_float32
from vla_edge_ros.lab.random_model import random_weights
from vla_edge_ros.policy.config import TransformerConfig
from vla_edge_ros.policy.weights import (
    check_weights,
    expected_shapes,
    load_weights,
    read_header,
    read_tensors,
    Stored,
)

CONFIG = TransformerConfig(11, 8, 12, 2, 2, 1, 4)


@pytest.fixture
def tensors():
    return random_weights(CONFIG)


def write_raw(path, dtype, shape, data):
    header = {'x': {'dtype': dtype, 'shape': shape, 'data_offsets': [0, len(data)]}}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack('<Q', len(text)) + text + data)


def test_every_tensor_comes_back_as_written(tmp_path, tensors):
    save_file(tensors, tmp_path / 'model.safetensors')
    loaded = load_weights(tmp_path, CONFIG)
    assert set(loaded) == set(expected_shapes(CONFIG))
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(loaded[name], tensor)


def test_shards_are_joined_by_their_index(tmp_path, tensors):
    names = sorted(tensors)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:])):
        file = f'model-{number}.safetensors'
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': weight_map}), encoding='utf-8')
    assert set(load_weights(tmp_path, CONFIG)) == set(tensors)


def test_the_header_tells_dtype_and_shape_of_what_would_be_read(tmp_path, tensors):
    stored = {'half': np.ones(3, np.float16), **tensors}
    save_file(stored, tmp_path / 'a.safetensors')
    write_raw(tmp_path / 'b.safetensors', 'BF16', [2, 1], bytes(4))
    names = dict.fromkeys(stored, 'a.safetensors') | {'x': 'b.safetensors'}
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text(json.dumps({'weight_map': names}), encoding='utf-8')
    read = read_tensors(tmp_path)
    assert set(read) == set(names)
    assert read_header(tmp_path) == {
        name: Stored(tensor.dtype, tensor.shape) for name, tensor in read.items()}


def test_a_header_is_refused_as_its_file_would_be(tmp_path, tensors):
    file = tmp_path / 'model.safetensors'
    with pytest.raises(WeightsError, match='readable safetensors'):
        read_header(tmp_path)
    save_file({'x': np.arange(3)}, file)
    with pytest.raises(WeightsError, match='x dtype must be one of F32, F16, BF16'):
        read_header(tmp_path)
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(WeightsError, match='readable safetensors'):
        read_header(tmp_path)


def test_an_index_cannot_point_outside_its_folder(tmp_path):
    index = tmp_path / 'model.safetensors.index.json'
    index.write_text('{"weight_map": {"x": "../x.safetensors"}}', encoding='utf-8')
    with pytest.raises(WeightsError, match='beside the index'):
        read_tensors(tmp_path)


def test_bfloat16_is_kept_as_its_bits(tmp_path):
    write_raw(tmp_path / 'x.safetensors', 'BF16', [2], b'\x80\x3f\x00\xc0')
    tensor = read_tensors(tmp_path / 'x.safetensors')['x']
    assert tensor.dtype == np.uint16
    np.testing.assert_array_equal(to_float32(tensor), [1.0, -2.0])


def test_float16_becomes_float32(tmp_path):
    save_file({'x': np.array([0.5, 3], np.float16)}, tmp_path / 'x.safetensors')
    tensor = read_tensors(tmp_path / 'x.safetensors')['x']
    assert tensor.dtype == np.float32
    np.testing.assert_array_equal(tensor, [0.5, 3])


def test_integers_are_no_weights(tmp_path):
    save_file({'x': np.arange(3)}, tmp_path / 'x.safetensors')
    with pytest.raises(WeightsError, match='x dtype must be one of F32, F16, BF16'):
        read_tensors(tmp_path / 'x.safetensors')


@pytest.mark.parametrize('cut', [0, 7, 40, -1])
def test_a_truncated_file_is_refused(tmp_path, tensors, cut):
    file = tmp_path / 'model.safetensors'
    save_file(tensors, file)
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(WeightsError, match='readable safetensors'):
        load_weights(tmp_path, CONFIG)


def test_a_missing_checkpoint_is_refused(tmp_path):
    with pytest.raises(WeightsError, match='readable safetensors'):
        load_weights(tmp_path, CONFIG)


def test_a_corrupt_index_is_refused(tmp_path):
    (tmp_path / 'model.safetensors.index.json').write_text('{"metadata": 1}', encoding='utf-8')
    with pytest.raises(WeightsError, match='weight_map'):
        load_weights(tmp_path, CONFIG)


def test_a_missing_tensor_is_named(tmp_path, tensors):
    del tensors['model.layers.1.self_attn.q_proj.bias']
    save_file(tensors, tmp_path / 'model.safetensors')
    with pytest.raises(WeightsError, match=r'layers\.1\.self_attn\.q_proj\.bias must be in'):
        load_weights(tmp_path, CONFIG)


def test_a_tensor_that_does_not_fit_the_config_is_named(tmp_path, tensors):
    tensors['model.norm.weight'] = np.ones(9, np.float32)
    save_file(tensors, tmp_path / 'model.safetensors')
    with pytest.raises(WeightsError, match=r'model\.norm\.weight .*\(8,\), got \(9,\)'):
        load_weights(tmp_path, CONFIG)


@pytest.mark.parametrize('weights_dtype', ['float32', 'bfloat16'])
def test_values_that_are_not_finite_are_refused(tmp_path, tensors, weights_dtype):
    name = 'model.layers.0.mlp.up_proj.weight'
    tensors[name][1, 2] = np.inf
    tensors[name] = convert(tensors[name], weights_dtype)
    with pytest.raises(WeightsError, match='finite'):
        check_weights(tensors, CONFIG)


def test_rounding_to_bfloat16_takes_the_nearest_and_ties_to_even():
    exact = np.array([1.0, -2.5, 0.0, 3.0e38], np.float32)
    np.testing.assert_allclose(to_float32(to_bfloat16(exact)), exact, rtol=2**-8)
    step = np.float32(2**-7)  # between 1 and 2
    values = np.array([1 + 0.4 * step, 1 + 0.6 * step, 1 + step / 2, 1 + 1.5 * step], np.float32)
    np.testing.assert_array_equal(
        to_float32(to_bfloat16(values)), [1, 1 + step, 1, 1 + 2 * step]
    )
