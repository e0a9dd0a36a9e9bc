"""Latency profiles by name, and what the simulator makes of them."""

import pickle

import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab.sweep.grid import read_sweep
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.runtime import profiles
from vla_edge_ros.runtime.profiles import load_profile, profile_names
from vla_edge_ros.sim.simulator import EpisodeParameters
from vla_edge_ros.telemetry.stages import Stage


@pytest.mark.parametrize('name', [*profile_names()[1:], 'agx-orin:int8', 'h200:bf16'])
def test_every_device_makes_a_latency_model_that_its_seed_determines(name):
    profile = load_profile(name, 'random:1.5b')
    first, again = (profile.make(7) for _ in range(2))
    draws = [dict(first.draw()) for _ in range(5)]
    assert draws == [dict(again.draw()) for _ in range(5)]
    assert set(draws[0]) == set(Stage) and min(draws[0].values()) > 0
    assert dict(profile.make(8).draw()) != draws[0]


def test_medians_are_those_of_the_draws():
    profile = load_profile('orin-nano', 'random:0.5b')
    latency = profile.make(0)
    decodes = [latency.draw()[Stage.DECODE] for _ in range(2000)]
    assert np.median(decodes) == pytest.approx(profile.medians_ns[Stage.DECODE], rel=0.02)
    observe_ms, decode_ms = profile.medians_ms
    assert decode_ms * 1e6 == profile.medians_ns[Stage.DECODE] and 0 < observe_ms < decode_ms


@pytest.mark.parametrize(('name', 'model', 'reason'), [
    ('h200', 'random:1.5b', ''),
    ('h200', '', 'on NVIDIA H200 SXM only the 1.5b shape was measured'),
    ('h200:int8', 'random:1.5b', 'this package has no kernels for int8 weights'),
    ('agx-orin', 'random:1.5b', 'nothing was measured on NVIDIA Jetson AGX Orin 64GB'),
])
def test_only_what_was_measured_is_no_prediction(name, model, reason):
    assert load_profile(name, model).about['prediction'] == reason


def test_the_engine_of_this_machine_is_measured_stage_by_stage():
    costs_ns = profiles.measure_stages(runs=4, backend='cpu')
    assert {stage: ns.shape for stage, ns in costs_ns.items()} == dict.fromkeys(Stage, (4,))
    assert min(ns.min() for ns in costs_ns.values()) > 0


def test_a_measured_profile_draws_what_was_measured_and_reaches_workers(monkeypatch):
    def measure(model, backend):
        assert (model, backend) == ('', 'auto')
        return {Stage.PREFILL: np.array([3, 5]), Stage.DECODE: np.array([30, 50])}

    monkeypatch.setattr(profiles, 'measure_stages', measure)
    profile = load_profile('measured')
    assert profile.medians_ms == (4e-6, 40e-6)
    latency = pickle.loads(pickle.dumps(profile)).make(1)
    drawn = {tuple(latency.draw().values()) for _ in range(50)}
    assert drawn == {(3, 30), (5, 50)}


@pytest.mark.parametrize(('options', 'message'), [
    ({'latency_profile': 'abacus'}, "^latency_profile must be one of measured, h200.*'abacus'"),
    ({'latency_profile': 'h200:int9'}, '^weights of latency_profile must be one of bf16'),
    ({'latency_profile': 'h200', 'profile_model': 'random:9b'}, '^profile_model must be a check'),
    ({'latency_profile': 'h200', 'latency_trace': 'a.csv'}, '^latency_profile must not be given'),
    ({'profile_model': 'random:1.5b'}, '^profile_model must be given with latency_profile only'),
])
def test_options_that_contradict_or_do_not_exist_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        EpisodeParameters(**options)


def test_measuring_a_shape_without_weights_is_refused():
    with pytest.raises(ConfigError, match='^profile_model must be a checkpoint folder'):
        load_profile('measured', 'random:1.5b')


def test_episodes_on_a_slow_device_miss_the_deadline_and_say_on_which(tmp_path):
    import json

    words = ['sim', '--episodes', '1', '--workers', '1', '--control', 'oracle', '--json',
             str(tmp_path / 'out.json'), '--latency-profile', 'orin-nano', '--profile-model',
             'random:1.5b']  # fmt: skip
    assert cli.run(words, StopRequest()) == 0
    summary = json.loads((tmp_path / 'out.json').read_text())
    assert summary['latency']['profile'] == 'orin-nano'
    assert 'nothing was measured' in summary['latency']['prediction']
    assert summary['decisions']['refuse'] > summary['decisions'].get('full', 0)


def test_a_sweep_takes_devices_as_latencies_and_refuses_to_measure(tmp_path):
    path = tmp_path / 'sweep.yaml'
    grid = ('grids: [{control: oracle, latency: [{latency_profile: %s, '
            'profile_model: "random:1.5b"}]}]\n')
    path.write_text(grid % 'h200')
    (cell,) = read_sweep(path).cells
    assert cell.setup.episode.latency_profile == 'h200'
    path.write_text(grid % 'measured')
    with pytest.raises(ConfigError, match='must not be measured, which differs each time'):
        read_sweep(path)
