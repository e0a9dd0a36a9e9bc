"""Plans: what holds a deadline, said of the right devices, and borne out by the loop itself."""

from dataclasses import replace
import json
import math

import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.lab import plan as planning
from vla_edge_ros.lab.plan import (
    alternatives,
    largest,
    latest_covers,
    make_plan,
    overlap_of,
    P99,
    schedules,
    with_steps,
)
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.runtime.devices import find_device
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters
from vla_edge_ros.runtime.profiles import recorded_profile
from vla_edge_ros.sim.simulator import EpisodeParameters, Simulator
from vla_edge_ros.telemetry.stages import Stage

PERIOD_MS = 1000 / 30


def make(device='h200', model='random:1.5b', weights='bf16', deadline_ms=33.0, rate_hz=30.0,
         **options):  # fmt: skip
    loop = ControlLoopParameters(rate_hz=rate_hz, deadline_ms=deadline_ms)
    return make_plan(model, find_device(device), weights, loop, 2.0, **options)


def test_the_measured_device_holds_the_deadline_and_a_small_one_does_not():
    assert make('h200').holds and not make('h200').prediction
    slow = make('orin-nano')
    assert not slow.holds and slow.slack_ms['p99'] < slow.slack_ms['p50'] < 0
    assert 'nothing was measured on NVIDIA Jetson Orin Nano' in slow.prediction


def test_missing_kernels_make_a_prediction_of_the_measured_device_too():
    assert make(weights='int8').prediction == 'this package has no kernels for int8 weights'


def test_slack_is_what_the_margin_leaves():
    plan = make()
    assert plan.slack_ms['p99'] == pytest.approx(33 - 2 - plan.run_ms(P99))
    assert plan.holds == (plan.slack_ms['p99'] >= 0)


def test_memory_is_that_of_the_buffers_and_lighter_weights_need_less():
    weights_gb = 2 * (28 * 1536 * (2048 + 1536 + 3 * 8960) + 151936 * 1536) / 1e9
    assert weights_gb < make().needed_gb < weights_gb + 0.6
    assert make(weights='int4').needed_gb < make(weights='int8').needed_gb < make().needed_gb
    assert make(slots=64).needed_gb < make(slots=8192).needed_gb


@pytest.mark.parametrize(('device', 'model', 'deadline_ms'), [
    ('rtx-4090', 'random:1.5b', 33.0), ('h200', 'random:3b', 15.0), ('jetson-thor', '', 2.75),
    ('h200', 'random:1.5b', 11.9)])
def test_what_is_said_to_hold_holds_and_one_more_would_not(device, model, deadline_ms):
    plan = make(device, model, deadline_ms=deadline_ms)
    assert not plan.holds
    found = alternatives(plan)
    if found['weights']:
        assert replace(plan, weights_name=found['weights']).holds
    if found['model']:
        assert planning._with_network(plan, found['model'].removeprefix('random:')).holds
    if found['actions']:
        assert with_steps(plan, found['actions']).holds
        assert not with_steps(plan, found['actions'] + 1).holds
    if found['slots'] is not None:
        assert replace(plan, length=found['slots']).holds
        assert not replace(plan, length=found['slots'] + 1).holds
    rate_hz, deadline_ms = found['rate_hz'], found['deadline_ms']
    assert make(device, model, deadline_ms=deadline_ms, rate_hz=rate_hz).holds
    assert any(found[name] for name in ('weights', 'model', 'actions', 'slots'))


def test_model_and_weights_together_are_tried_where_neither_suffices():
    plan = make('agx-orin', deadline_ms=90.0, rate_hz=10.0)
    found = alternatives(plan)
    name, weights = found['model_and_weights']
    both = planning._with_network(plan, name.removeprefix('random:'))
    assert replace(both, weights_name=weights).holds


def test_what_does_not_fit_the_memory_is_no_way_out():
    small = replace(find_device('h200'), memory_gb=3.2)
    plan = replace(make(), device=small)
    assert plan.holds and not plan.works
    found = alternatives(plan)
    assert found['weights'] == 'int8' and found['model'] == 'random:0.5b'
    assert found['actions'] is None
    less = replace(plan, length=found['slots'])
    assert less.needed_gb <= 3.2 < replace(plan, length=found['slots'] + 64).needed_gb


@pytest.mark.parametrize('best', [None, 0, 3, 7])
def test_largest_finds_the_last_that_holds(best):
    assert largest(0, 7, lambda n: best is not None and n <= best) == best
    assert largest(3, 2, lambda n: True) is None


def covered(schedule, run_ms, steps, **options):
    """Return the part of all ticks after the first action that have a planned one."""
    samples = {Stage.DECODE: np.array([int(run_ms * 1e6)])}
    loop = ControlLoopParameters(schedule=schedule, chunk_steps=steps, **options)
    simulator = Simulator(EpisodeParameters(
        control='oracle', safe_action='zeros'), loop=loop,
        profile=recorded_profile('fixed', samples))
    counts = simulator.run(3, 0).causes
    simulator.close()
    planned = sum(counts[cause] for cause in ('fresh', 'late', 'queued', 'blended'))
    return planned / (sum(counts.values()) - counts['waiting'])


@pytest.mark.parametrize('steps', [3, 8])
def test_overlap_does_in_the_loop_what_a_plan_says_of_it(steps):
    run_ms = next(
        ms for ms in range(500, 0, -1) if overlap_of(ms, PERIOD_MS, steps) is not None)
    found = overlap_of(run_ms, PERIOD_MS, steps)
    percent = float(found['overlap_percent'])
    assert covered('overlap', run_ms, steps, overlap_percent=percent) == 1
    # Longer than a tick with nothing to publish can wait.
    too_long_ms = 2.2 * run_ms
    assert overlap_of(too_long_ms, PERIOD_MS, steps) is None
    assert covered('overlap', too_long_ms, steps, overlap_percent=100.0) < 1


@pytest.mark.parametrize('steps', [3, 8])
def test_latest_does_in_the_loop_what_a_plan_says_of_it(steps):
    longest_ms = steps * PERIOD_MS / 2
    assert latest_covers(longest_ms - 1, PERIOD_MS, steps)
    assert covered('latest', longest_ms - 1, steps) == 1
    assert not latest_covers(longest_ms * 1.6, PERIOD_MS, steps)
    assert covered('latest', longest_ms * 1.6, steps) < 1


def test_overlap_computes_no_more_than_it_must():
    assert overlap_of(10.0, PERIOD_MS, 8) == {
        'overlap_percent': 13, 'runs_per_s': pytest.approx(30 / 7)}
    assert overlap_of(40.0, PERIOD_MS, 1) is None


def test_longer_chunks_are_offered_only_where_they_help():
    found = schedules(make('rtx-4090', weights='int4', deadline_ms=20.0))
    assert found['overlap']['covers'] and found['latest']['covers']
    hopeless = schedules(make('orin-nano'))
    assert hopeless['overlap'] == {'covers': False, 'steps': None}
    assert hopeless['latest']['steps'] is None
    # Two tokens an action, each longer than half a period: no chunk is long enough.
    assert make('orin-nano').run_ms(P99) > 8 * PERIOD_MS
    assert 0.15 < hopeless['sync']['moving'] < 0.25


def run(*words):
    return cli.run(['plan', *words], StopRequest())


def test_command_says_prediction_verdict_reason_and_ways_out(capsys, tmp_path):
    path = tmp_path / 'deep' / 'plan.json'
    assert run('--device', 'agx-orin', '--model', 'random:1.5b', '--json', str(path)) == 0
    text = capsys.readouterr().out
    for part in ('PREDICTION: nothing was measured on NVIDIA Jetson AGX Orin 64GB',
                 'DOES NOT HOLD: 33 ms', 'most of it for memory', 'of 64 GB', 'rate: ',
                 'overlap: ', 'latest: ', 'sync: moves '):  # fmt: skip
        assert part in text, text
    assert 'none suffices (p99: int8 ' in text and 'none suffices (p99: random:0.5b ' in text
    record = json.loads(path.read_text())
    assert record['alternatives']['p99_ms']['int4'] < record['run_ms']['p99']
    assert record['holds'] is False and record['bound'] == 'memory'
    assert record['slack_ms']['p99'] == pytest.approx(31 - record['run_ms']['p99'])
    assert record['environment']['commit'] is not None
    assert math.isclose(
        sum(cost['total'] for cost in record['stages_ms'].values()), record['run_ms']['p50'],
        rel_tol=1e-3)


def test_command_takes_a_policy_folder_and_names_what_has_no_kernels(capsys):
    from vla_edge_ros.policy.policy import DEFAULT_POLICY

    assert run('--device', 'h200', '--model', str(DEFAULT_POLICY), '--weights', 'int4') == 0
    text = capsys.readouterr().out
    assert 'HOLDS: 33 ms' in text and 'no kernels for int4 weights' in text


@pytest.mark.parametrize(('words', 'message'), [
    (['--model', 'random:9b'], '--model must be a checkpoint folder or one of'),
    (['--model', 'nowhere'], 'policy must be a folder with a config.json'),
    (['--slots', '-1'], '--slots must be in 0..1000000, got -1'),
    (['--tokens', '0'], '--tokens must be in 1..1000, got 0'),
    (['--deadline-ms', '40'], '--deadline-ms must not exceed the period of 30.0 Hz, got 40.0'),
    (['--rate-hz', '0'], '--rate-hz must be in 0.1..1000.0 Hz, got 0.0'),
    (['--json', '/proc/plan.json'], '--json must be a file that can be written'),
])
def test_mistakes_are_one_line_and_code_2(words, message, capsys):
    assert run('--device', 'h200', *words) == 2
    assert capsys.readouterr().err.startswith(f'vla-edge: {message}')
