"""The fallback ladder, rung by rung."""

import dataclasses

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.runtime.action_queue import ActionQueue, ActionQueueParameters, Cause

PERIOD_NS = 33_333_333


def chunk(first=0, steps=3, stamp_ns=7):
    values = np.arange(first, first + 2 * steps, dtype=np.float32).reshape(steps, 2)
    return ActionChunk(values, PERIOD_NS, np.zeros(2), np.zeros(8, np.int32), stamp_ns)


def queue_of(**parameters):
    return ActionQueue(ActionQueueParameters(**parameters))


def causes(queue, ticks, start=0):
    return [queue.take((start + tick) * PERIOD_NS).cause.value for tick in range(ticks)]


def test_nothing_is_published_before_the_first_action():
    queue = queue_of(safe_action='zeros')
    assert queue.take(0) == (None, Cause.WAITING, None, None)


def test_initial_action_is_published_when_one_is_set():
    taken = queue_of(initial_action=[0.5, 1]).take(0)
    assert taken.cause is Cause.INITIAL
    np.testing.assert_array_equal(taken.action, [0.5, 1.0])


@pytest.mark.parametrize(
    'safe_action, cause',
    [('hold', 'safe_hold'), ('zeros', 'safe_zeros'), ('stop_publishing', 'safe_stop')],
)
def test_ladder_is_walked_down_in_order(safe_action, cause):
    queue = queue_of(safe_action=safe_action, max_consecutive_fallbacks=2)
    queue.push(chunk(), 0)
    assert causes(queue, 7) == ['fresh', 'queued', 'queued', 'hold', 'hold', cause, cause]


def test_safe_actions_are_what_they_say():
    for safe_action, expected in (('hold', [4, 5]), ('zeros', [0, 0]), ('stop_publishing', None)):
        queue = queue_of(safe_action=safe_action, max_consecutive_fallbacks=0)
        queue.push(chunk(), 0)
        queue.take(2 * PERIOD_NS)
        action = queue.take(3 * PERIOD_NS).action
        assert action is None if expected is None else action.tolist() == expected


def test_queued_action_is_the_one_meant_for_the_time_that_passed():
    queue = queue_of()
    queue.push(chunk(), 1000)
    assert queue.take(1000).chunk_index == 0
    taken = queue.take(1000 + 2 * PERIOD_NS + 5 * NS_PER_MS)
    assert (taken.cause, taken.chunk_index, taken.action.tolist()) == (Cause.QUEUED, 2, [4, 5])


def test_late_chunk_skips_what_is_past_and_says_late():
    queue = queue_of()
    queue.push(chunk(), 0, late=True)
    taken = queue.take(PERIOD_NS)
    assert (taken.cause, taken.chunk_index) == (Cause.LATE, 1)
    assert causes(queue, 2, start=2) == ['queued', 'hold']


def test_chunk_that_lies_wholly_in_the_past_gives_its_last_action():
    queue = queue_of()
    queue.push(chunk(steps=1), 0, late=True)
    taken = queue.take(2 * PERIOD_NS)
    assert (taken.cause, taken.chunk_index) == (Cause.LATE, 0)


def test_chunk_older_than_the_age_limit_is_never_used():
    queue = queue_of(max_action_age_ms=50.0, safe_action='stop_publishing')
    queue.push(chunk(), 0)
    assert causes(queue, 2) == ['fresh', 'queued']
    queue.push(chunk(), 0, late=True)
    assert causes(queue, 1, start=2) == ['safe_stop']


def test_safe_action_stays_until_a_new_chunk_comes():
    queue = queue_of(safe_action='zeros', max_consecutive_fallbacks=0)
    queue.push(chunk(), 0)
    queue.take(4 * PERIOD_NS)
    queue.take(5 * PERIOD_NS)
    queue.parameters = ActionQueueParameters(max_consecutive_fallbacks=100)
    taken = queue.take(6 * PERIOD_NS)
    assert (taken.cause, taken.action.tolist()) == (Cause.SAFE_HOLD, [0, 0])
    queue.push(chunk(), 7 * PERIOD_NS)
    assert causes(queue, 2, start=7) == ['fresh', 'queued']


def test_what_is_left_of_a_chunk_is_told_until_it_is_too_old_or_taken_away():
    queue = queue_of(max_action_age_ms=70.0)
    assert (queue.rows, queue.remaining(0), queue.ready(0)) == (0, 0, False)
    queue.push(chunk(steps=5), 0)
    assert [queue.remaining(tick * PERIOD_NS) for tick in range(4)] == [5, 4, 3, 0]
    assert queue.rows == 5 and queue.ready(0) and not queue.ready(3 * PERIOD_NS)
    queue.set_hold(True)
    assert queue.remaining(0) == 0 and not queue.ready(0)


def test_a_chunk_wholly_in_the_past_is_ready_once():
    queue = queue_of()
    queue.push(chunk(steps=1), 0, late=True)
    assert queue.remaining(3 * PERIOD_NS) == 0 and queue.ready(3 * PERIOD_NS)
    queue.take(3 * PERIOD_NS)
    assert not queue.ready(4 * PERIOD_NS)


def test_a_blended_action_that_is_held_is_a_hold_of_the_same_age():
    queue = queue_of()
    queue.push(chunk(steps=8, stamp_ns=100), 0)
    queue.push(chunk(first=100, steps=2, stamp_ns=200), PERIOD_NS, blend_from_ns=PERIOD_NS)
    blended, last, held = (queue.take(tick * PERIOD_NS) for tick in (1, 2, 3))
    assert [taken.cause.value for taken in (blended, last, held)] == ['blended', 'blended', 'hold']
    assert 100 < blended.chunk.observation_stamp_ns < last.chunk.observation_stamp_ns < 200
    assert held.chunk.observation_stamp_ns == last.chunk.observation_stamp_ns
    np.testing.assert_array_equal(held.action, last.action)
    assert (blended.action < [100, 101]).all() and (blended.action > [2, 3]).all()


@settings(deadline=None)
@given(st.integers(1, 16), st.integers(1, 16), st.integers(0, 20), st.integers(10, 100))
def test_a_blend_lies_between_both_chunks_whatever_their_lengths_and_steps(old, new, at, step_ms):
    queue = queue_of(max_action_age_ms=10_000.0)
    queue.push(chunk(steps=old, stamp_ns=100), 0)
    other = chunk(first=50, steps=new, stamp_ns=PERIOD_NS)
    other = dataclasses.replace(other, step_ns=step_ms * NS_PER_MS)
    queue.push(other, at * PERIOD_NS, blend_from_ns=(at + 2) * PERIOD_NS)
    for tick in range(at + 2, at + 40):
        taken = queue.take(tick * PERIOD_NS)
        pure = other.values[taken.chunk_index]
        assert (taken.action >= 0).all() and (taken.action <= pure).all()
        if taken.chunk.observation_stamp_ns == PERIOD_NS:
            np.testing.assert_array_equal(taken.action, pure)


def test_operator_hold_gives_the_safe_action_and_forgets_the_chunk():
    queue = queue_of(safe_action='zeros')
    queue.push(chunk(first=1), 0)
    queue.take(0)
    queue.set_hold(True)
    taken = queue.take(PERIOD_NS)
    assert (taken.cause, taken.action.tolist()) == (Cause.OPERATOR_HOLD, [0, 0])
    queue.push(chunk(), PERIOD_NS)
    assert causes(queue, 1, start=1) == ['operator_hold']
    queue.set_hold(False)
    assert causes(queue, 1, start=2) == ['safe_zeros']


def test_operator_hold_before_the_first_action_publishes_nothing():
    queue = queue_of(safe_action='zeros')
    queue.set_hold(True)
    assert queue.take(0) == (None, Cause.OPERATOR_HOLD, None, None)


def test_held_action_keeps_the_stamp_of_its_observation():
    queue = queue_of(max_consecutive_fallbacks=0)
    queue.push(chunk(stamp_ns=42), 0)
    queue.take(0)
    assert queue.take(3 * PERIOD_NS).chunk.observation_stamp_ns == 42


def test_reset_is_as_before_the_first_action():
    queue = queue_of()
    queue.push(chunk(), 0)
    queue.take(0)
    queue.reset()
    assert queue.take(PERIOD_NS).cause is Cause.WAITING


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(['push', 'late', 'hold', 'release', 'none']), max_size=60),
    st.integers(1, 5),
    st.integers(0, 4),
    st.sampled_from(['hold', 'zeros', 'stop_publishing']),
)
def test_every_tick_has_an_action_or_says_why_not(events, steps, limit, safe_action):
    queue = queue_of(safe_action=safe_action, max_consecutive_fallbacks=limit)
    held, pushed, fallbacks = False, False, 0
    for tick, event in enumerate(events):
        if event in ('hold', 'release'):
            held = event == 'hold'
            queue.set_hold(held)
        elif event != 'none':
            queue.push(chunk(steps=steps), tick * PERIOD_NS, late=event == 'late')
        taken = queue.take(tick * PERIOD_NS)
        assert (taken.cause is Cause.OPERATOR_HOLD) == held
        pushed = pushed or (event in ('push', 'late') and not held)
        if taken.action is None:
            assert not pushed or safe_action == 'stop_publishing'
            assert taken.cause in (Cause.WAITING, Cause.OPERATOR_HOLD, Cause.SAFE_STOP)
        if event in ('push', 'late') and not held:
            assert taken.cause is (Cause.FRESH if event == 'push' else Cause.LATE)
        fallbacks = fallbacks + 1 if taken.cause is Cause.HOLD else 0
        assert fallbacks <= limit
        if taken.chunk is not None:
            np.testing.assert_array_equal(taken.action, taken.chunk.values[taken.chunk_index])


def test_unusable_parameters_are_refused_by_name():
    with pytest.raises(ConfigError, match='safe_action must be one of'):
        ActionQueueParameters(safe_action='panic')
    with pytest.raises(ConfigError, match='initial_action must be a list of finite numbers'):
        ActionQueueParameters(initial_action=['fast'])
