"""The data file of devices: complete, sourced, and refused when it is not."""

import copy

import pytest
import yaml

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.devices import catalogue, DATA, find_device, find_weights, read_catalogue
from vla_edge_ros.telemetry.power_model import device_names

RAW = yaml.safe_load(DATA.read_text(encoding='utf-8'))


def changed(tmp_path, change):
    raw = copy.deepcopy(RAW)
    change(raw)
    path = tmp_path / 'devices.yaml'
    path.write_text(yaml.safe_dump(raw))
    return path


def test_devices_are_those_whose_power_is_modelled_too():
    assert set(catalogue().devices) == set(device_names())


def test_only_the_reference_was_measured_and_only_16_bit_weights_have_kernels():
    measured = [name for name, device in catalogue().devices.items() if device.measured]
    assert measured == ['h200']
    assert [name for name, weights in catalogue().weights.items() if weights.kernels] == ['bf16']


def test_every_figure_of_the_engine_says_where_it_comes_from():
    assert all(len(text) > 40 for text in catalogue().texts.values())


@pytest.mark.parametrize(('change', 'message'), [
    (lambda raw: raw['devices']['h200'].pop('tflop_s'), 'h200.tflop_s must be given'),
    (lambda raw: raw['devices']['h200'].update(tflops=1), 'h200.tflops is not a known key'),
    (lambda raw: raw['devices']['h200'].update(bandwidth_gb_s=0),
     'h200.bandwidth_gb_s must be a number in 0.001..1e.09, got 0'),
    (lambda raw: raw['devices']['h200'].update(bandwidth_gb_s='fast'),
     "h200.bandwidth_gb_s must be a number in .* got 'fast'"),
    (lambda raw: raw['devices']['h200'].update(measured='yes'),
     "h200.measured must be true or false, got 'yes'"),
    (lambda raw: raw['devices']['h200'].update(source=' '), 'h200.source must not be blank'),
    (lambda raw: raw['devices']['h200']['basis'].update(tflop_s='heard'),
     'h200.basis must say for each of'),
    (lambda raw: raw['devices']['h200']['jitter'].update(sigma=-1), 'jitter.sigma must be a numb'),
    (lambda raw: raw['devices']['h200']['jitter'].pop('sigma'), 'h200.jitter.sigma must be given'),
    (lambda raw: raw['engine']['call_us'].update(value=None), 'engine.call_us must be a number'),
    (lambda raw: raw['engine'].update(read_efficiency=0.9), 'engine.read_efficiency must be a ma'),
    (lambda raw: raw['engine'].update(reference='abacus'), 'reference must be one of .* .abacus'),
    (lambda raw: raw['weights']['int8'].update(bytes=0), 'weights.bytes must be a number'),
    (lambda raw: raw.pop('devices'), 'devices file.devices must be given'),
    (lambda raw: raw.update(devices=[1]), 'devices must be a mapping'),
])
def test_broken_data_is_refused_by_field_rule_and_value(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        read_catalogue(changed(tmp_path, change))


def test_a_file_that_is_no_yaml_is_refused(tmp_path):
    (tmp_path / 'devices.yaml').write_text('a: [')
    with pytest.raises(ConfigError, match='^devices must be a readable YAML file'):
        read_catalogue(tmp_path / 'devices.yaml')
    with pytest.raises(ConfigError, match='^devices must be a readable YAML file'):
        read_catalogue(tmp_path / 'none.yaml')


def test_unknown_names_are_refused_with_the_list():
    with pytest.raises(ConfigError, match="^device must be one of h200, .* got 'tpu'"):
        find_device('tpu')
    with pytest.raises(ConfigError, match="^weights must be one of bf16, int8, int4, got 'int2'"):
        find_weights('int2')
