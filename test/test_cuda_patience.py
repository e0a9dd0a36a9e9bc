"""Waiting for the GPU: asleep for most of the time, awake before the end."""

import numpy as np
import pytest

from vla_edge_ros.kernels.cuda.patience import Patience


class Machine:
    """A clock, a sleep that oversleeps, and work of a given length; counts the time spun."""

    def __init__(self, oversleep=0.0):
        self.now, self.spun, self.late = 0.0, [], []
        self.oversleep = oversleep
        self.patience = Patience(lambda: self.now, self.sleep)

    def sleep(self, seconds):
        assert seconds > 0
        self.now += seconds + self.oversleep

    def run(self, seconds, kind='decode'):
        end = self.now + seconds

        def wait():
            self.spun.append(max(end - self.now, 0.0))
            self.late.append(max(self.now - end, 0.0))
            self.now = max(self.now, end)

        self.patience.run(kind, lambda: None, wait)


@pytest.mark.parametrize('oversleep', [0.0, 60e-6, 300e-6])
def test_work_of_one_length_is_slept_through_but_for_its_end(oversleep):
    machine = Machine(oversleep)
    for _ in range(300):
        machine.run(8e-3)
    assert machine.spun[0] == 8e-3  # nothing is known yet
    assert max(machine.spun[200:]) < 60e-6
    assert max(machine.late[200:]) == 0.0


def test_work_that_varies_by_one_percent_costs_little_of_a_core_and_less_than_that_of_time():
    machine, rng = Machine(60e-6), np.random.default_rng(0)
    for length in 8e-3 * (1 + 0.01 * rng.random(1000)):
        machine.run(length)
    assert np.mean(machine.spun[100:]) < 60e-6
    assert np.mean(machine.late[100:]) < 10e-6
    assert max(machine.late[100:]) < 80e-6  # no more than the work varies by


def test_work_that_has_become_shorter_is_not_overslept_for_long():
    machine = Machine()
    for length in [8e-3] * 50 + [2e-3] * 50:
        machine.run(length)
    assert machine.late[50] > 5e-3  # the first ones may be chance
    assert max(machine.late[56:]) == 0.0 and max(machine.spun[60:]) < 60e-6


def test_each_kind_of_work_has_its_own_length():
    machine = Machine()
    for _ in range(50):
        machine.run(2e-3, 'prefill')
        machine.run(8e-3, 'decode')
    assert max(machine.late) == 0.0 and max(machine.spun[20:]) < 60e-6
