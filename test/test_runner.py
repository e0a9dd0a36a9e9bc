"""Runners: a worker thread that owns its job, and virtual time that charges for it."""

import threading

import pytest

from vla_edge_ros.clock import ManualClock, MonotonicClock, NS_PER_S
from vla_edge_ros.runtime.latency import FixedLatency
from vla_edge_ros.runtime.runner import Outcome, ThreadRunner, VirtualRunner
from vla_edge_ros.telemetry.stages import Stage


@pytest.fixture
def thread_runner():
    runner = ThreadRunner(MonotonicClock(), name='under_test')
    yield runner
    assert runner.close()


def virtual_runner(clock):
    return VirtualRunner(clock, FixedLatency({Stage.PREFILL: 6, Stage.DECODE: 4}))


def test_virtual_job_completes_after_its_modelled_stages():
    clock = ManualClock(100)
    runner = virtual_runner(clock)
    runner.start(lambda: Outcome(observation=1, chunk=2, stage_ns={Stage.PREFILL: 99999}))
    assert runner.busy and clock.now_ns() == 100
    assert runner.wait(109) is None and clock.now_ns() == 109
    outcome = runner.wait(500)
    assert (outcome.finished_ns, clock.now_ns(), runner.busy) == (110, 110, False)
    assert outcome.stage_ns == {Stage.PREFILL: 6, Stage.DECODE: 4}


def test_virtual_job_pays_only_for_the_stages_it_ran():
    clock = ManualClock()
    runner = virtual_runner(clock)
    runner.start(lambda: Outcome(observation=1))
    assert runner.wait(500).finished_ns == 6
    runner.start(lambda: Outcome(error=ValueError()))
    assert runner.wait(500).stage_ns == {} and clock.now_ns() == 6


def test_virtual_poll_in_the_past_collects_what_is_complete():
    clock = ManualClock()
    runner = virtual_runner(clock)
    runner.start(lambda: Outcome(observation=1))
    clock.advance_ns(50)
    assert runner.wait(0).finished_ns == 6
    assert clock.now_ns() == 50


@pytest.mark.parametrize('kind', ['virtual', 'thread'])
def test_idle_runner_has_nothing_to_wait_for(kind, thread_runner):
    runner = virtual_runner(ManualClock()) if kind == 'virtual' else thread_runner
    assert runner.wait(MonotonicClock().now_ns() + 100 * NS_PER_S) is None


@pytest.mark.parametrize('kind', ['virtual', 'thread'])
def test_second_job_is_refused_while_busy(kind, thread_runner):
    runner = virtual_runner(ManualClock()) if kind == 'virtual' else thread_runner
    runner.start(Outcome)
    with pytest.raises(RuntimeError):
        runner.start(Outcome)


def test_thread_runs_the_job_on_its_named_worker(thread_runner):
    steady = MonotonicClock()
    gate = threading.Event()

    def job():
        gate.wait(10)
        return Outcome(observation=threading.current_thread().name)

    before_ns = steady.now_ns()
    thread_runner.start(job)
    assert thread_runner.wait(steady.now_ns()) is None and thread_runner.busy
    gate.set()
    outcome = thread_runner.wait(steady.now_ns() + 10 * NS_PER_S)
    assert outcome.observation == 'under_test' and not thread_runner.busy
    assert before_ns < outcome.finished_ns <= steady.now_ns()


def test_close_joins_a_worker_in_the_middle_of_a_job():
    runner = ThreadRunner(MonotonicClock())
    started, gate = threading.Event(), threading.Event()

    def job():
        started.set()
        gate.wait(10)
        return Outcome()

    runner.start(job)
    started.wait(10)
    assert runner.close(timeout_s=0.0) is False
    gate.set()
    assert runner.close()
    with pytest.raises(RuntimeError):
        runner.start(Outcome)
