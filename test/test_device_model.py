"""The device model: right about the device that was measured, and sane about the others."""

from dataclasses import replace
import json
from pathlib import Path

import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.policy.shapes import head_rows, load_shape, SHAPES
from vla_edge_ros.policy.work import arranged
from vla_edge_ros.runtime.device_model import (
    BOUNDS,
    Cost,
    DeviceLatency,
    DeviceModel,
    full_slots,
    PREFILL_TOKENS,
    STREAMED_HIDDEN,
)
from vla_edge_ros.runtime.devices import catalogue, find_device, find_weights, Jitter
from vla_edge_ros.telemetry.stages import Stage

RECORD = json.loads(
    (Path(__file__).resolve().parent.parent / 'docs/results/engine.json').read_text())
TOLERANCE = 0.15


def model(shape='random:1.5b', device='h200', weights='bf16'):
    config = load_shape(shape)
    return DeviceModel(
        config, find_device(device), find_weights(weights), head_rows(shape, config))


def chunk_s(stages):
    return stages[Stage.PREFILL].seconds + stages[Stage.DECODE].seconds


@pytest.mark.parametrize('length', RECORD['lengths'])
def test_it_agrees_with_the_measured_chunk_at_every_length(length):
    assert RECORD['device'] == 'NVIDIA H200'
    measured = RECORD['lengths'][length]
    stages = model(f'random:{RECORD["shape"]}').stages(int(length))
    # The bench's prefill is an engine's: no picture, which the model counts apart.
    assert chunk_s(stages) * 1e3 == pytest.approx(measured['chunk_ms']['median'], rel=TOLERANCE)


def test_it_agrees_with_the_measured_halves_of_a_chunk():
    for length, measured in RECORD['lengths'].items():
        stages = model().stages(int(length))
        prefill_ms, decode_ms = (
            stages[stage].seconds * 1e3 for stage in (Stage.PREFILL, Stage.DECODE))
        assert prefill_ms == pytest.approx(measured['prefill_ms']['median'], rel=TOLERANCE)
        assert decode_ms / 8 == pytest.approx(
            measured['decode_ms_per_token']['median'], rel=TOLERANCE)


def test_a_prefill_brings_all_slots_behind_the_oldest_frame_into_order_once():
    """Keys of float32 turned to float16 and values of float16, each read and written."""
    network, bandwidth = SHAPES['1.5b'], 1e9 * find_device('h200').bandwidth_gb_s
    bandwidth *= catalogue().engine.read_efficiency
    numbers = 28 * 2 * 128 * (2048 - 32)
    assert arranged(network, 2048 - 32).bytes == 10 * numbers
    # From 2048 slots on attention computes longer than it reads, so that nothing else grows.
    more = model().prefill(4064).memory - model().prefill(2048).memory
    assert more * bandwidth == pytest.approx(arranged(network, 4064 - 2048).bytes)
    (stage,) = [row for row in RECORD['stages'] if row['kernel'] == 'arrange']
    took_us = 1e6 * arranged(network, RECORD['stage_length'] - PREFILL_TOKENS).bytes / bandwidth
    took_us += catalogue().engine.launch_us
    assert took_us == pytest.approx(stage['us'], rel=TOLERANCE)


def test_a_prefill_waits_for_the_kernels_that_the_record_counts():
    launches = sum(row['launches'] for row in RECORD['stages'] if row['pass'] == 'prefill')
    figures = catalogue().engine
    waited_us = 1e6 * model().prefill(32).latency - figures.call_us
    assert waited_us == pytest.approx(launches * figures.launch_us)
    config, weights = load_shape('random:1.5b'), find_weights('bf16')
    before = replace(find_device('h200'), one_kernel_decode=False)
    waited_us = 1e6 * DeviceModel(config, before, weights).prefill(32).latency - figures.call_us
    assert waited_us == pytest.approx((launches + 27) * figures.launch_us)


def test_the_networks_with_the_mlp_as_one_kernel_are_those_that_the_engine_streams():
    layout = pytest.importorskip('vla_edge_ros.kernels.cuda.layout')
    for network in SHAPES.values():
        streams = layout.prefill_stream_parts(network, 132, 227 * 1024) is not None
        assert streams == (network.hidden_size <= STREAMED_HIDDEN)


def test_reading_is_as_fast_as_it_was_measured():
    stated = 1e9 * find_device('h200').bandwidth_gb_s
    assert catalogue().engine.read_efficiency * stated == pytest.approx(
        1e9 * RECORD['read_bandwidth_gb_s'], rel=0.05)


def test_jitter_of_the_measured_device_is_about_what_was_measured():
    tails = [
        row['chunk_ms']['p99'] / row['chunk_ms']['median'] for row in RECORD['lengths'].values()]
    assert find_device('h200').jitter.quantile(0.99) == pytest.approx(np.mean(tails), abs=0.05)


@pytest.mark.parametrize(('weights', 'tokens_a_second'), [
    ('bf16', 27.2), ('int8', 45.2), ('int4', 71.8)])
def test_a_public_measurement_on_another_device_lies_near_the_prediction(weights, tokens_a_second):
    # Another engine, Qwen2.5-3B-VL on AGX Orin: see read_efficiency in devices.yaml.
    token = model('random:3b', 'agx-orin', weights).decoded_token(512)
    assert 1 / token.seconds == pytest.approx(tokens_a_second, rel=0.15)


@pytest.mark.parametrize('device', catalogue().devices)
def test_more_to_read_takes_longer_on_every_device(device):
    def total(shape='random:1.5b', weights='bf16', **options):
        stages = model(shape, device, weights).stages(**options)
        return sum(cost.seconds for cost in stages.values())

    assert total('random:0.5b') < total() < total('random:3b')
    assert total(weights='int4') < total(weights='int8') < total()
    assert total(length=32) < total(length=4064)
    assert total(tokens=2) < total(tokens=8)


def test_nothing_is_faster_than_its_bytes_at_the_stated_bandwidth():
    for name, device in catalogue().devices.items():
        network = SHAPES['1.5b']
        layer = network.hidden_size * (
            network.qkv_size + network.query_size + 3 * network.intermediate_size)
        weights = 2 * (28 * layer + network.vocab_size * network.hidden_size)
        least_s = weights / (1e9 * device.bandwidth_gb_s)
        assert model(device=name).decoded_token(1).seconds > least_s


def test_a_tiny_network_is_bound_by_latency_and_a_large_one_by_memory():
    assert model('').stages()[Stage.DECODE].bound == 'latency'
    assert model(device='orin-nano').stages()[Stage.DECODE].bound == 'memory'


def test_a_policy_reads_the_rows_of_its_action_tokens_and_a_shape_the_whole_vocabulary():
    config = load_shape('random:1.5b')
    assert head_rows('random:1.5b', config) == 151936 and head_rows('', config) == 256
    device, weights = find_device('h200'), find_weights('bf16')
    few, all_rows = (
        DeviceModel(config, device, weights, rows).decoded_token(1) for rows in (None, 151936))
    saved_bytes = 2 * 1536 * (151936 - 256)
    reached = catalogue().engine.read_efficiency * 4.8e12
    assert (all_rows.memory - few.memory) * reached == pytest.approx(saved_bytes, rel=0.01)


def test_a_cost_is_bound_by_what_takes_most_of_it():
    assert [Cost(**{name: 2.0}).bound for name in BOUNDS] == list(BOUNDS)
    assert (Cost(1, 0, 2) + Cost(1, 1, 0) * 2).seconds == 7


def test_a_full_cache_holds_prompt_and_frames_but_the_newest():
    config = load_shape('random:1.5b')
    assert full_slots(config) == config.prompt_slots + 4096 - 32


def test_a_frame_of_more_tokens_than_a_pass_reads_the_weights_again():
    device, weights = find_device('h200'), find_weights('bf16')
    small = load_shape('random:1.5b')
    large = replace(small, image_width=192, kv_slots=62 * 64)
    assert large.slots_per_frame == 62
    once, twice = (DeviceModel(c, device, weights).prefill(64) for c in (small, large))
    assert 1.8 < twice.memory / once.memory < 2.2


def test_equal_seeds_draw_equal_costs_and_all_stages_vary_together():
    costs = model().stages()
    jitter = Jitter(0.1, 0.1, 2.0)
    first, again, other = (DeviceLatency(costs, jitter, seed) for seed in (1, 1, 2))
    draws = [[dict(latency.draw()) for _ in range(50)] for latency in (first, again, other)]
    assert draws[0] == draws[1] != draws[2]
    ratios = [draw[Stage.DECODE] / draw[Stage.PREFILL] for draw in draws[0]]
    assert np.ptp(ratios) < 1e-5


def test_draws_follow_the_quantiles_that_are_told():
    jitter = Jitter(0.05, 0.01, 2.0)
    latency = DeviceLatency({Stage.DECODE: Cost(memory=1.0)}, jitter, seed=3)
    drawn = np.array([latency.draw()[Stage.DECODE] for _ in range(20_000)]) / 1e9
    for part in (0.5, 0.9, 0.995):
        assert np.mean(drawn <= jitter.quantile(part)) == pytest.approx(part, abs=0.01)


def test_a_device_without_jitter_always_takes_its_cost():
    jitter = Jitter(0.0, 0.0, 1.0)
    assert jitter.quantile(0.5) == pytest.approx(1) == jitter.quantile(0.99)
    latency = DeviceLatency({Stage.DECODE: Cost(latency=2e-3)}, jitter)
    assert {latency.draw()[Stage.DECODE] for _ in range(5)} == {2_000_000}


def test_unknown_shapes_are_refused_by_name():
    with pytest.raises(ConfigError, match='^model must be a checkpoint folder or one of random:0'):
        load_shape('random:70b')
