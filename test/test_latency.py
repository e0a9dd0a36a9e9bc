"""Latency models: what they draw and what they refuse."""

import math

import numpy as np
import pytest
from test_trace import result, write

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.latency import FixedLatency, read_stage_costs, RecordedLatency
from vla_edge_ros.telemetry.stages import Stage


def test_fixed_latency_draws_the_same_costs_every_time():
    latency = FixedLatency({Stage.PREFILL: 7, 'decode': 9})
    assert latency.draw() == {Stage.PREFILL: 7, Stage.DECODE: 9} == latency.draw()


def test_recorded_latency_draws_whole_runs():
    samples = {Stage.PREFILL: np.arange(50), Stage.DECODE: np.arange(50) + 1000}
    latency = RecordedLatency(samples, seed=1)
    draws = [latency.draw() for _ in range(200)]
    assert all(draw[Stage.DECODE] - draw[Stage.PREFILL] == 1000 for draw in draws)
    assert len({draw[Stage.PREFILL] for draw in draws}) > 30


def test_equal_seeds_draw_equal_sequences_and_other_seeds_do_not():
    samples = {Stage.DECODE: np.arange(1000)}
    one, two, other = (RecordedLatency(samples, seed) for seed in (3, 3, 4))
    draws = [[model.draw()[Stage.DECODE] for _ in range(20)] for model in (one, two, other)]
    assert draws[0] == draws[1] != draws[2]


@pytest.mark.parametrize(
    'samples',
    [
        {},
        {Stage.DECODE: []},
        {Stage.DECODE: [-1]},
        {Stage.DECODE: [1, 2], Stage.PREFILL: [1]},
        {Stage.DECODE: [[1, 2]]},
    ],
)
def test_recorded_latency_refuses_unusable_samples(samples):
    with pytest.raises(ConfigError):
        RecordedLatency(samples)


def test_fixed_latency_refuses_negative_costs():
    with pytest.raises(ConfigError, match='latency of decode'):
        FixedLatency({Stage.DECODE: -1})


def run(vision_ms, prefill_ms, decode_ms):
    return result(
        preprocess_ms=None, vision_ms=vision_ms, prefill_ms=prefill_ms, decode_ms=decode_ms)


def test_stage_costs_are_those_of_the_full_runs_in_a_trace(tmp_path):
    write(tmp_path / 'trace.csv', run(None, 3.0, 5.5), run(1.0, 4.0, None), run(1.0, 3.5, 6.0))
    costs = read_stage_costs(tmp_path / 'trace.csv')
    assert {stage.value: ns.tolist() for stage, ns in costs.items()} == {
        'preprocess': [0, 0], 'vision': [0, 1_000_000], 'prefill': [3_000_000, 3_500_000],
        'decode': [5_500_000, 6_000_000]}


def test_trace_without_a_full_run_is_refused(tmp_path):
    write(tmp_path / 'trace.csv', run(1.0, 3.0, None))
    with pytest.raises(ConfigError, match='must hold a run that decoded a chunk'):
        read_stage_costs(tmp_path / 'trace.csv')


@pytest.mark.parametrize(('stage', 'wrong'), [('decode', -1.0), ('vision', -0.5),
                                              ('prefill', math.inf), ('decode', 1e300)])
def test_impossible_stage_cost_is_named_by_line_column_and_value(tmp_path, stage, wrong):
    path = tmp_path / 'trace.csv'
    write(path, run(1.0, 3.0, 5.0), run(**{
        **{'vision_ms': 1.0, 'prefill_ms': 3.0, 'decode_ms': 5.0}, f'{stage}_ms': wrong}))
    with pytest.raises(ConfigError) as caught:
        read_stage_costs(path, 'latency_trace')
    where = f'line 3, column {stage}_ms of {path}'
    rule = f'must hold times in 0..3600000 ms ({where})'
    assert str(caught.value) == f'latency_trace {rule}, got {wrong!r}'


def test_file_that_is_no_trace_is_told_under_the_name_of_the_option(tmp_path):
    with pytest.raises(ConfigError, match='^latency_trace must be a readable trace .No such file'):
        read_stage_costs(tmp_path / 'none', 'latency_trace')
