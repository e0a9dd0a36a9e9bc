"""Energy of a run by part: measured, modelled, or said to be unavailable; never 0 for unknown."""

import json

import numpy as np
import pytest
import yaml

from vla_edge_ros.clock import ManualClock, NS_PER_MS, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.devices import catalogue
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters
from vla_edge_ros.sim.episode import BatchParameters, summarise
from vla_edge_ros.sim.episode_row import EpisodeRow, make_row
from vla_edge_ros.sim.simulator import EpisodeParameters, Simulator
from vla_edge_ros.telemetry.energy import EnergyMeter
from vla_edge_ros.telemetry.energy_sources import CounterSource, Unavailable
from vla_edge_ros.telemetry.energy_summary import (
    energy_figures,
    energy_text,
    measured_energy,
    modelled_energy,
)
from vla_edge_ros.telemetry.power_model import device_names, MODELS, power_model, PowerModel
from vla_edge_ros.telemetry.stages import Stage
from vla_edge_ros.telemetry.work import (
    abandoned,
    DECODE,
    LATE,
    PARTS,
    PREFILL,
    REFUSED,
    RETRIES,
    Work,
)

PERIOD_MS = 50.0
MODEL = PowerModel(
    'it', 10.0, 200.0, 100.0,
    dict.fromkeys(('idle_w', 'prefill_w', 'decode_w'), 'assumed'), 'nowhere')


def trace_of(*reasons, late=()):
    """Return a trace: 10 ms of observing and 20 ms of decoding in each tick that ran."""
    ticks = len(reasons)
    ran = np.array([reason != 'over_budget' for reason in reasons], bool)
    due_ns = (NS_PER_S + np.arange(ticks) * PERIOD_MS * NS_PER_MS).astype(np.int64)
    nothing = np.full(ticks, np.nan)
    return {
        'tick': np.arange(ticks), 'scheduled_ns': due_ns,
        'published_ns': due_ns + np.where(ran, 30, 0) * NS_PER_MS, 'runs': ran.astype(int),
        'reason': np.array(reasons, str), 'late': np.isin(np.arange(ticks), late),
        'preprocess_ms': nothing, 'vision_ms': nothing,
        'prefill_ms': np.where(ran, 10.0, np.nan), 'decode_ms': np.where(ran, 20.0, np.nan),
    }  # fmt: skip


def metered(trace, watts=20.0):
    clock = ManualClock(NS_PER_S // 2)
    meter = EnergyMeter(
        [CounterSource('it', lambda: watts * clock.now_ns() / NS_PER_S),
         Unavailable('other', 'broken')], clock=clock)
    for _ in range(100):
        meter.sample()
        clock.advance_ns(10 * NS_PER_MS)
    return measured_energy(meter, trace, PERIOD_MS, 2, 4)


def test_a_run_is_told_by_part_and_per_completed_task():
    energy = json.loads(json.dumps(metered(trace_of(
        'admitted', 'over_budget', 'probe', 'admitted', 'policy_error', late=(3,)))))
    assert energy['other'] == 'unavailable: broken'
    found = energy['it']
    assert found['joules'] == pytest.approx(20.0 * 0.25)
    assert found['joules_by_part'] == pytest.approx({
        'idle': 20 * 0.08, PREFILL: 20 * 0.01, DECODE: 20 * 0.02, REFUSED: 20 * 0.05,
        LATE: 20 * 0.06, RETRIES: 20 * 0.03})
    assert found['joules_per_completed_task'] == pytest.approx(2.5)
    assert found['joules_per_episode'] == pytest.approx(1.25)
    assert found['idle_share'] == pytest.approx(0.08 / 0.25)
    assert found['faults'] == {} and found['resolution_ms'] == pytest.approx(10)


def test_without_a_source_all_reasons_are_told():
    clock = ManualClock()
    meter = EnergyMeter([Unavailable('nvml', 'no driver'), Unavailable('rapl', 'no zone')],
                        clock=clock)  # fmt: skip
    told = measured_energy(meter, trace_of('admitted'), PERIOD_MS, 1)
    assert told == 'unavailable: nvml: no driver; rapl: no zone'
    assert measured_energy(meter, trace_of(), PERIOD_MS, 1) == 'unavailable: the loop had no tick'


def test_nothing_completed_has_no_energy_per_task():
    assert energy_figures({'idle': 5.0}, 0)['joules_per_completed_task'] is None
    assert energy_figures({'idle': 5.0}, None)['joules_per_completed_task'] is None
    assert energy_figures({'idle': 5.0}, 1)['joules_per_episode'] is None
    unknown = energy_figures({'idle': None, PREFILL: 3.0}, 1)
    assert unknown['joules_by_part']['idle'] is None and unknown['idle_share'] is None
    assert unknown['joules'] == 3.0 and set(unknown['joules_by_part']) == set(PARTS)


def test_a_model_charges_each_stage_its_own_power():
    work = [Work(PREFILL, PREFILL, 0, 10**8), Work(LATE, DECODE, 10**8, 3 * 10**8),
            Work(REFUSED, 'idle', 5 * 10**8, 10**9)]  # fmt: skip
    joules = MODEL.joules(work, 0, 2 * 10**9)
    assert joules == pytest.approx({
        PREFILL: 20.0, LATE: 20.0, REFUSED: 5.0, 'idle': 12.0, DECODE: 0.0, RETRIES: 0.0})
    # What lies outside the run is no part of it.
    assert MODEL.joules([Work(DECODE, DECODE, -10**9, 10**9)], 0, 10**8)[DECODE] == 10.0


def test_a_run_that_nobody_collected_counts_until_the_end():
    work = abandoned({Stage.VISION: 10, Stage.PREFILL: 20, Stage.DECODE: 30}, 100)
    assert work == [Work(LATE, PREFILL, 40, 70), Work(LATE, DECODE, 70, 100)]


def test_a_replay_has_energy_by_a_model_only():
    trace = trace_of('admitted', 'admitted')
    told = modelled_energy('', trace, round(PERIOD_MS * NS_PER_MS))
    assert told.startswith('unavailable: virtual time')
    (name, found), = modelled_energy('agx-orin', trace, 50 * NS_PER_MS).items()
    model = power_model('agx-orin')
    assert name == 'model agx-orin' and found['source'] == model.source
    assert found['joules_by_part'][DECODE] == pytest.approx(model.decode_w * 0.04)
    assert found['joules'] == pytest.approx(sum(found['joules_by_part'].values()))


def test_every_model_says_where_its_figures_come_from():
    raw = yaml.safe_load(MODELS.read_text())
    assert tuple(raw) == device_names()
    # Whatever virtual time can be run on can be charged too.
    assert set(catalogue().devices) == set(raw)
    for name in raw:
        model = power_model(name)
        assert model.idle_w < model.decode_w and model.source and len(model.basis) == 3


@pytest.mark.parametrize(('change', 'field'), [
    ({'idle_w': -1.0}, 'it idle_w'), ({'decode_w': float('nan')}, 'it decode_w'),
    ({'prefill_w': '5'}, 'it prefill_w'), ({'source': ' '}, 'it source'),
    ({'basis': {'idle_w': 'assumed'}}, 'it basis'),
    ({'basis': dict.fromkeys(('idle_w', 'prefill_w', 'decode_w'), 'guessed')}, 'it basis'),
])
def test_a_model_that_does_not_say_enough_is_refused(change, field):
    values = {name: getattr(MODEL, name) for name in MODEL.__dataclass_fields__}
    with pytest.raises(ConfigError) as caught:
        PowerModel(**(values | change))
    assert caught.value.field == field


def test_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match='power_model must be one of h200'):
        EpisodeParameters(power_model='abacus')


@pytest.mark.parametrize('schedule', ['deadline', 'sync', 'overlap', 'latest'])
def test_an_episode_has_energy_by_part_that_adds_up_to_its_time(schedule):
    parameters = EpisodeParameters(control='oracle', compute_ms=20.0, power_model='orin-nano')
    loop = ControlLoopParameters(schedule=schedule)
    result = Simulator(parameters, loop=loop).run(0, 0)
    model = power_model('orin-nano')
    seconds = sum(result.decisions.values()) / 30
    active_s = sum(result.energy_j[part] for part in (PREFILL, DECODE, LATE)) / model.decode_w
    assert active_s == pytest.approx(result.runs * 0.02, abs=0.021)
    assert result.energy_j['idle'] == pytest.approx((seconds - active_s) * model.idle_w, rel=1e-3)
    row = make_row(result)
    assert row.energy_j == pytest.approx(sum(result.energy_j.values()))
    assert EpisodeRow.from_mapping(json.loads(json.dumps(row.to_mapping()))) == row
    assert make_row(Simulator(EpisodeParameters(control='oracle')).run(0, 0)).energy_j is None


def test_a_batch_tells_energy_per_completed_task_and_that_it_is_a_model():
    parameters = EpisodeParameters(control='oracle', power_model='h200')
    simulator = Simulator(parameters)
    results = [simulator.run(0, index) for index in range(3)]
    energy = summarise(results, BatchParameters(episodes=3), parameters)['energy']
    total = sum(sum(result.energy_j.values()) for result in results)
    assert energy['joules'] == pytest.approx(total) and energy['model'] == 'h200'
    assert energy['joules_per_episode'] == pytest.approx(total / 3)
    assert energy['joules_per_completed_task'] == pytest.approx(
        total / sum(result.succeeded for result in results))
    assert 'model of h200, not measured' in energy_text(energy)
    plain = EpisodeParameters(control='oracle')
    told = summarise(results[:1], BatchParameters(), plain)['energy']
    assert told.startswith('unavailable: virtual time') and energy_text(told) == told
