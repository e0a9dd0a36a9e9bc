"""The schedule of the control thread, in virtual time, and the thread's end."""

import threading

from vla_edge_ros.clock import ManualClock, MonotonicClock
from vla_edge_ros.nodes.control_thread import ControlThread, Schedule

PERIOD_NS = 33_333_333


def test_releases_lie_on_one_grid_however_long_a_tick_takes():
    schedule = Schedule(PERIOD_NS)
    assert schedule.advance(1000) == 1000
    assert schedule.advance(1000 + PERIOD_NS // 2) == 1000 + PERIOD_NS
    assert schedule.advance(1000 + PERIOD_NS + 5) == 1000 + 2 * PERIOD_NS


def test_missed_releases_are_skipped_and_not_made_up_for():
    schedule = Schedule(PERIOD_NS)
    schedule.advance(0)
    late_ns = 5 * PERIOD_NS + 7
    assert schedule.advance(late_ns) == 5 * PERIOD_NS
    assert schedule.remaining_ns(late_ns) == -7
    assert schedule.advance(late_ns + 1) == 6 * PERIOD_NS


def test_a_clock_that_jumps_back_is_followed_at_once():
    schedule = Schedule(PERIOD_NS)
    schedule.advance(10**12)
    schedule.advance(10**12 + 1)
    assert schedule.remaining_ns(500) == 0
    assert schedule.advance(501) == 500 + PERIOD_NS


def run_ticks(count, clock=None, on_tick=lambda: None):
    """Run a control thread for ``count`` ticks and return their release times."""
    releases, done, errors = [], threading.Event(), []

    def tick(scheduled_ns):
        releases.append(scheduled_ns)
        on_tick()
        if len(releases) == count:
            done.set()

    thread = ControlThread(
        tick, PERIOD_NS, MonotonicClock(), lambda: None, errors.append, clock)
    thread.start()
    assert done.wait(20.0) and thread.stop() and not errors
    return releases


def test_on_the_machines_clock_ticks_are_told_the_grid_and_not_the_jitter():
    releases = run_ticks(4)
    gaps = [after - before for before, after in zip(releases, releases[1:])]
    assert all(gap > 0 and gap % PERIOD_NS == 0 for gap in gaps)


def test_on_ros_time_the_ticks_wait_for_the_clock_to_move():
    clock = ManualClock(10**9)
    run_ticks(3, clock, on_tick=lambda: clock.advance_ns(PERIOD_NS))
    stopped = ManualClock(10**9)
    ticks = []
    thread = ControlThread(
        ticks.append, PERIOD_NS, MonotonicClock(), lambda: None, lambda _: None, stopped)
    thread.start()
    while not ticks:
        pass
    assert thread.stop() and len(ticks) == 1


def test_between_ticks_is_called_with_the_time_of_the_next_one_and_may_use_it_up():
    steady = MonotonicClock()
    asked, releases, done = [], [], threading.Event()

    def between_ticks(until_ns):
        asked.append((until_ns, steady.now_ns()))
        while steady.now_ns() < until_ns:
            pass

    def tick(scheduled_ns):
        releases.append(scheduled_ns)
        if len(releases) == 3:
            done.set()

    thread = ControlThread(
        tick, PERIOD_NS, steady, lambda: None, lambda _: None, between_ticks=between_ticks)
    thread.start()
    assert done.wait(20.0) and thread.stop()
    assert len(asked) >= 2
    for until_ns, now_ns in asked:
        next_ns = min(release for release in [*releases, until_ns] if release > now_ns)
        assert now_ns < until_ns <= next_ns + 1_000_000


def test_an_exception_ends_the_thread_and_reaches_its_owner():
    errors, ended = [], threading.Event()

    def tick(_):
        raise RuntimeError('planted')

    def on_error(error):
        errors.append(error)
        ended.set()

    thread = ControlThread(tick, PERIOD_NS, MonotonicClock(), lambda: None, on_error)
    thread.start()
    assert ended.wait(10.0) and thread.stop()
    assert str(errors[0]) == 'planted'
