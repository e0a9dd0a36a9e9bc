"""An episode as a row: complete, small, and the same whatever ran before it."""

import json

import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.loop_parameters import ControlLoopParameters
from vla_edge_ros.sim import episode_row
from vla_edge_ros.sim.episode_row import (
    EpisodeRow,
    EpisodeRunner,
    EpisodeSetup,
    expand_ages,
    make_row,
    merge_ages,
)
from vla_edge_ros.sim.simulator import EpisodeParameters, EpisodeResult, Simulator


def setup(schedule='deadline', chunk_steps=0, **episode):
    return EpisodeSetup(
        EpisodeParameters(safe_action='zeros', **episode),
        ControlLoopParameters(schedule=schedule, chunk_steps=chunk_steps))


def result(**changes):
    values = {
        'succeeded': True, 'ages_ms': np.array([10.04, 10.06, np.nan, 43.3], np.float32),
        'age_causes': np.array(['fresh', 'fresh', 'safe_zeros', 'queued']),
        'contact_ages_ms': np.array([np.nan, 43.3], np.float32), 'runs': 2,
        'decisions': {'full': 2, 'refuse': 28},
        'reasons': {'admitted': 2, 'playing': 28, 'busy': 0},
        'causes': {'fresh': 2, 'queued': 1, 'safe_zeros': 27}}
    return EpisodeResult(**values | changes)


def test_row_tells_counts_time_and_ages_in_tenths_of_a_millisecond():
    row = make_row(result())
    assert row.ticks == 30 and row.time_to_success_s == 1.0 and row.runs == 2
    assert row.ages == {'fresh': {100: 1, 101: 1}, 'queued': {433: 1}}
    assert row.contact_ages == {433: 1}
    assert row.reasons == {'admitted': 2, 'playing': 28}
    assert row.energy_j is None and row.events == {}
    assert make_row(result(events={'slips': 1})).events == {'slips': 1}
    assert make_row(result(succeeded=False)).time_to_success_s is None


def test_row_comes_back_from_json_as_it_was():
    row = make_row(result())
    assert EpisodeRow.from_mapping(json.loads(json.dumps(row.to_mapping()))) == row


def test_ages_add_up_and_expand_to_the_actions_they_stand_for():
    total = merge_ages([{433: 1, 100: 2}, {100: 1, 99: 1}])
    assert list(total.items()) == [(99, 1), (100, 3), (433, 1)]
    np.testing.assert_array_equal(expand_ages(total), [9.9, 10.0, 10.0, 10.0, 43.3])
    assert expand_ages({}).size == 0


SETUPS = [
    setup(control='oracle', compute_ms=40.0),
    setup('overlap', 4, control='oracle', compute_ms=100.0, object_speed=0.6),
    setup('latest', compute_ms=40.0, object_speed=0.1),
    setup('sync', 2, compute_ms=8.0, delay_ms=20.0),
    setup('deadline', compute_ms=8.0, eviction='fifo'),
    setup('overlap', 8, control='oracle', task='conveyor', slip_probability=1.0),
    setup('latest', 8, control='oracle', task='conveyor', slip_probability=0.0),
    setup('sync', 4, control='oracle', task='memory', recall_s=1.0),
    setup('sync', 4, control='oracle', task='memory', recall_s=2.0),
]


@pytest.mark.parametrize('kept', [1, episode_row.MAX_SIMULATORS])
def test_a_row_is_the_same_in_a_used_runner_as_in_a_fresh_simulator(kept, monkeypatch):
    monkeypatch.setattr(episode_row, 'MAX_SIMULATORS', kept)
    runner = EpisodeRunner()
    episodes = [(number, index) for number in range(len(SETUPS)) for index in (0, 1)]
    order = episodes + episodes[::-1]
    reused = [(at, runner.run(SETUPS[at[0]], 3, at[1])) for at in order]
    runner.close()
    for number, index in episodes:
        simulator = Simulator(SETUPS[number].episode, loop=SETUPS[number].loop)
        fresh = make_row(simulator.run(3, index))
        simulator.close()
        assert [row for at, row in reused if at == (number, index)] == [fresh, fresh]
    assert len({str(row) for _, row in reused}) == len(episodes)


def test_runner_keeps_few_simulators_and_closes_the_others(monkeypatch):
    class Noted(Simulator):
        made, open = 0, 0

        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            Noted.made += 1
            Noted.open += 1
            assert Noted.open <= 2

        def close(self):
            super().close()
            Noted.open -= 1

    monkeypatch.setattr(episode_row, 'Simulator', Noted)
    monkeypatch.setattr(episode_row, 'MAX_SIMULATORS', 2)
    runner = EpisodeRunner()
    track, conveyor, memory = (
        setup(control='oracle', task=task) for task in ('track', 'conveyor', 'memory'))
    for one, made in ((track, 1), (conveyor, 2), (track, 2), (memory, 3), (track, 3),
                      (memory, 3), (conveyor, 4), (memory, 4), (track, 5)):
        runner.run(one, 0, 0)
        assert Noted.made == made
    runner.close()
    assert not Noted.open


def test_what_makes_a_simulator_cannot_be_changed_in_it():
    simulator = Simulator(SETUPS[0].episode)
    with pytest.raises(ConfigError, match="control must stay 'oracle' in one simulator"):
        simulator.reconfigure(SETUPS[2].episode)


def test_eviction_without_a_policy_is_refused():
    with pytest.raises(ConfigError, match="eviction must not be given with control 'oracle'"):
        EpisodeParameters(control='oracle', eviction='fifo')
