"""Latency models: what they draw and what they refuse."""

import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.latency import FixedLatency, RecordedLatency
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
