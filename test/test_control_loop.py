"""The control loop in virtual time: every stream of frames and costs ends in named ticks."""

from collections import Counter
import math
import threading

from hypothesis import given, settings
from hypothesis import strategies as st
from loop_rig import Camera, FakePolicy, names, PERIOD_NS, Rig, ScriptedLatency
import pytest

from vla_edge_ros.clock import MonotonicClock, NS_PER_MS
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.action_queue import ActionQueue, ActionQueueParameters
from vla_edge_ros.runtime.admission import AdmissionController, AdmissionParameters
from vla_edge_ros.runtime.control_loop import ControlLoop, ControlLoopParameters
from vla_edge_ros.runtime.latency import FixedLatency
from vla_edge_ros.runtime.runner import ThreadRunner


def test_engine_that_fits_gives_a_fresh_action_every_tick_as_soon_as_it_is_ready():
    results = Rig().run(100)
    assert set(names(results, 'cause')) == {'fresh'}
    assert [result.tick for result in results] == list(range(100))
    for result in results:
        assert result.published_ns == result.scheduled_ns + 18 * NS_PER_MS
        assert result.prefill_ms == 10.0 and result.decode_ms == 8.0
        assert math.isnan(result.vision_ms)
        assert 18.0 <= result.observation_age_ms < 18.0 + 1e3 / 60
        assert (result.retained_frames, result.evicted_frame, result.late) == (8, 3, False)
    assert results[-1].estimate_ms == pytest.approx(18.0)
    assert results[-1].budget_ms == pytest.approx(31.0)


def test_on_tick_publishes_at_the_start_of_the_next_tick():
    results = Rig(publish='on_tick').run(50)
    assert names(results[:2], 'cause') == ['waiting', 'fresh']
    assert set(names(results[1:], 'cause')) == {'fresh'}
    for result in results[1:]:
        assert result.published_ns == result.scheduled_ns
        assert result.chunk_index == 1, 'the first row was meant for the tick before'
        assert result.observation_age_ms >= 33.3


@pytest.mark.parametrize('publish', ['on_ready', 'on_tick'])
@pytest.mark.parametrize('late_results', ['use', 'discard'])
def test_engine_slower_than_the_period_for_ever_still_gives_named_ticks(publish, late_results):
    latency = ScriptedLatency(decode_ms=[40.0] * 10_000)
    queue = {'safe_action': 'stop_publishing', 'max_consecutive_fallbacks': 3}
    rig = Rig(latency, queue=queue, publish=publish, late_results=late_results)
    results = rig.run(600)
    causes, reasons = Counter(names(results, 'cause')), Counter(names(results, 'reason'))
    assert sum(causes.values()) == 600
    assert reasons['probe'] + reasons['deadline_missed'] > 30
    assert all(result.published_ns <= result.scheduled_ns + 33 * NS_PER_MS for result in results)
    assert causes['fresh'] == 0
    if late_results == 'use':
        assert causes['late'] > 30 and causes['safe_stop'] > 30
        assert all(r.chunk_index == 2 for r in results if r.cause.value == 'late')
    else:
        assert causes == {'waiting': 600}
        assert sum(result.late for result in results) > 30


def test_single_stall_of_two_seconds_is_bridged_and_left_behind():
    latency = ScriptedLatency(decode_ms=[8.0] * 20 + [2000.0])
    queue = {'safe_action': 'zeros', 'max_consecutive_fallbacks': 5}
    rig = Rig(latency, queue=queue, admission={'probe_after': 4})
    rig.policy.values = 1.0
    results = rig.run(100)
    causes = names(results, 'cause')
    assert causes[:29] == ['fresh'] * 20 + ['queued'] * 2 + ['hold'] * 5 + ['safe_zeros'] * 2
    assert results[20].reason.value == 'deadline_missed'
    assert results[20].published_ns == results[20].scheduled_ns + 33 * NS_PER_MS
    assert results[19].action.tolist() == [1, 1] and results[28].action.tolist() == [0, 0]
    arrival = next(i for i, result in enumerate(results) if result.late)
    assert arrival == 81, 'the first tick after 2.01 s'
    assert names(results[21:arrival], 'reason') == ['busy'] * (arrival - 21)
    assert causes[arrival] == 'safe_zeros', 'a chunk two seconds old moves nothing'
    assert names(results[arrival:], 'reason')[: 4 + 2] == (
        ['decode_over_budget'] * 4 + ['probe', 'admitted']
    )
    assert set(causes[arrival + 4 :]) == {'fresh'}


def test_camera_at_5_hz_is_looked_at_once_a_frame():
    rig = Rig(camera={'rate_hz': 5.0})
    results = rig.run(300)
    observed = [call[1] for call in rig.policy.calls if call[0] == 'observe']
    assert len(observed) == len(set(observed)) == 50
    causes = Counter(names(results, 'cause'))
    assert causes == {'fresh': 50, 'queued': 100, 'hold': 150}
    assert Counter(names(results, 'reason'))['repeated_frame'] == 250
    assert max(result.observation_age_ms for result in results) < 200 + 34


def test_camera_at_200_hz_is_never_queued_up():
    results = Rig(camera={'rate_hz': 200.0}).run(300)
    assert set(names(results, 'cause')) == {'fresh'}
    assert all(result.observation_age_ms < 18 + 5.1 for result in results)


def test_frozen_camera_has_a_name_and_ends_in_the_safe_action():
    queue = {'safe_action': 'stop_publishing'}
    rig = Rig(camera={'stop_ns': 10 * PERIOD_NS}, queue=queue, frozen_camera_ticks=12)
    results = rig.run(40)
    reasons = names(results, 'reason')
    assert reasons[11:22] == ['repeated_frame'] * 11
    assert set(reasons[22:]) == {'frozen_camera'}
    assert results[-1].cause.value == 'safe_stop' and results[-1].action is None
    rig.camera.stop_ns = math.inf
    assert rig.tick().cause.value == 'fresh'


@pytest.mark.parametrize('delay_ms', [150.0, -150.0])
def test_frame_too_far_from_now_is_not_looked_at(delay_ms):
    rig = Rig(camera={'delay_ms': delay_ms}, max_observation_age_ms=100.0)
    rig.next_ns = 10 * PERIOD_NS
    result = rig.tick()
    assert (result.reason.value, result.cause.value) == ('stale_frame', 'waiting')
    assert rig.policy.calls == []


def test_joint_states_received_too_long_ago_are_not_used():
    rig = Rig(max_joint_state_age_ms=100.0)
    rig.joints = (rig.joints[0], 0)
    reasons = names(rig.run(6), 'reason')
    assert reasons.index('no_proprioception') == 4  # ticks at 0, 33, 67, 100 and 133 ms
    rig.joints = (rig.joints[0], rig.next_ns)
    assert rig.tick().cause.value == 'fresh'


def test_missing_inputs_are_told_apart():
    rig = Rig(camera={'delay_ms': 50.0})
    assert names(rig.run(3), 'reason') == ['no_frame', 'no_frame', 'no_estimate']
    rig.joints = None
    assert rig.tick().reason.value == 'no_proprioception'
    rig.loop.instruction = None
    assert rig.tick().reason.value == 'no_instruction'
    assert rig.loop.counts['no_frame'] == 2
    assert sum(rig.loop.counts.values()) == sum(rig.loop.causes.values()) == 5


def test_prefill_only_takes_the_frame_in_without_acting():
    rig = Rig(ScriptedLatency(prefill_ms=10.0))
    rig.admission.seed(10.0, 50.0)
    rig.policy.calls.clear()
    first, second = rig.run(2)
    assert (first.decision.value, first.reason.value) == ('prefill_only', 'decode_over_budget')
    assert first.published_ns == first.scheduled_ns, 'there is nothing to wait for'
    assert ('act',) not in rig.policy.calls
    assert second.prefill_ms == 10.0 and math.isnan(second.decode_ms) and not second.late


def test_policy_error_is_counted_and_the_loop_goes_on():
    rig = Rig()
    rig.run(10)
    rig.policy.fail = RuntimeError('boom')
    failed = rig.run(2)
    rig.policy.fail = None
    assert names(failed, 'reason') == ['policy_error'] * 2
    assert names(failed, 'cause') == ['queued'] * 2
    assert str(failed[0].error) == 'boom'
    assert rig.loop.counts['policy_error'] == 2
    after = rig.tick()
    assert (after.cause.value, after.error) == ('fresh', None)


def test_action_that_is_not_finite_is_a_policy_error():
    rig = Rig()
    rig.policy.values = math.nan
    result = rig.tick()
    assert (result.reason.value, result.action) == ('policy_error', None)


def test_instruction_reaches_the_policy_before_the_next_frame_and_never_during_a_run():
    rig = Rig(ScriptedLatency(decode_ms=[8.0, 50.0]))
    rig.run(2)
    rig.loop.set_instruction('touch the blue cube')
    busy = rig.tick()
    assert busy.reason.value == 'busy' and rig.loop.instruction == 'reach the red cube'
    landed = rig.tick()
    assert landed.late and landed.cause.value != 'late', 'it follows the old instruction'
    rig.run(10)
    assert rig.loop.instruction == 'touch the blue cube'
    index = rig.policy.calls.index(('instruction', 'touch the blue cube'))
    assert rig.policy.calls[index - 1] == ('act',)
    assert rig.policy.calls[index + 1][0] == 'observe'


def test_instruction_that_the_policy_refuses_leaves_the_old_one():
    rig = Rig()
    rig.tick()
    rig.loop.set_instruction('x' * 41)
    result = rig.tick()
    assert result.reason.value == 'policy_error' and 'prompt slots' in str(result.error)
    assert rig.tick().cause.value == 'fresh'
    assert rig.loop.instruction == 'reach the red cube'
    with pytest.raises(ConfigError, match='instruction must not be blank'):
        rig.loop.set_instruction('  ')


def test_reset_forgets_frames_and_actions_but_not_the_instruction():
    rig = Rig(ScriptedLatency(decode_ms=[8.0, 8.0, 50.0]), admission={'warmup_samples': 0})
    rig.run(3)
    rig.loop.reset()
    result = rig.tick()
    assert (result.reason.value, result.cause.value) == ('busy', 'waiting')
    result = rig.tick()
    assert result.late and result.cause.value == 'waiting', 'computed before the reset'
    rig.run(8)
    assert rig.policy.calls.count(('reset',)) == 1
    assert rig.tick().cause.value == 'fresh'
    assert len([call for call in rig.policy.calls if call[0] == 'instruction']) == 1


def test_operator_hold_stops_the_policy_until_released():
    rig = Rig(queue={'safe_action': 'zeros'})
    rig.run(3)
    rig.loop.set_hold(True)
    held = rig.run(5)
    assert set(names(held, 'cause')) == set(names(held, 'reason')) == {'operator_hold'}
    assert held[0].action.tolist() == [0, 0]
    calls = len(rig.policy.calls)
    rig.loop.set_hold(False)
    assert rig.tick().cause.value == 'fresh'
    assert len(rig.policy.calls) == calls + 2


def test_parameters_change_at_the_start_of_the_next_tick():
    rig = Rig()
    rig.run(5)
    rig.loop.set_parameters(AdmissionParameters(margin_ms=25.0))
    rig.loop.set_parameters(ControlLoopParameters(deadline_ms=30.0))
    rig.loop.set_parameters(ActionQueueParameters(safe_action='zeros'))
    assert rig.admission.parameters.margin_ms == 2.0
    result = rig.tick()
    assert result.reason.value == 'over_budget' and result.budget_ms == pytest.approx(5.0)
    assert rig.loop.queue.parameters.safe_action == 'zeros'


def test_tick_that_starts_after_its_deadline_starts_nothing():
    rig = Rig()
    rig.run(3)
    rig.clock.advance_ns(10 * PERIOD_NS)
    result = rig.loop.tick(rig.next_ns)
    assert (result.decision.value, result.reason.value) == ('refuse', 'deadline_passed')


def test_deadline_longer_than_the_period_is_refused():
    with pytest.raises(ConfigError, match='deadline_ms must not exceed the period of 60.0 Hz'):
        ControlLoopParameters(rate_hz=60.0)


def test_zero_latency_publishes_in_the_instant_of_the_tick():
    results = Rig(FixedLatency({})).run(20)
    assert set(names(results, 'cause')) == {'fresh'}
    assert all(result.published_ns == result.scheduled_ns for result in results)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.floats(0.0, 300.0), max_size=60),
    st.floats(0.0, 30.0),
    st.floats(1.0, 240.0),
    st.sampled_from(['on_ready', 'on_tick']),
    st.lists(st.sampled_from(['', '', '', 'reset', 'hold', 'release', 'instruct', 'fail'])),
)
def test_every_tick_is_on_time_and_says_the_truth(decode_ms, prefill_ms, rate_hz, publish, events):
    rig = Rig(ScriptedLatency(decode_ms, prefill_ms), {'rate_hz': rate_hz}, publish=publish)
    newest_stamp_ns = 0
    for event in events + [''] * 40:
        if event == 'reset':
            rig.loop.reset()
            newest_stamp_ns = 0
        elif event in ('hold', 'release'):
            rig.loop.set_hold(event == 'hold')
        elif event == 'instruct':
            rig.loop.set_instruction('touch the blue cube')
        rig.policy.fail = RuntimeError() if event == 'fail' else None
        result = rig.tick()
        deadline_ns = result.scheduled_ns + 33 * NS_PER_MS
        assert result.started_ns <= result.published_ns <= deadline_ns
        if result.chunk is None:
            assert result.cause.value in ('waiting', 'operator_hold')
            assert result.action is None
            continue
        age_ns = result.action_stamp_ns - result.observation_stamp_ns
        assert result.observation_age_ms == pytest.approx(age_ns / NS_PER_MS)
        assert result.observation_stamp_ns >= newest_stamp_ns, 'an older plan came back'
        newest_stamp_ns = result.observation_stamp_ns
        if result.cause.value == 'fresh' and publish == 'on_ready':
            assert result.decision.value == 'full' and result.decode_ms >= 0
            assert result.prefill_ms + result.decode_ms <= 33.0
    assert sum(rig.loop.causes.values()) == len(events) + 40


def test_worker_thread_that_overruns_is_late_and_the_tick_is_not():
    steady = MonotonicClock()
    policy = FakePolicy()
    acting, gate = threading.Event(), threading.Event()
    act = policy.act

    def act_when_told():
        acting.set()
        assert gate.wait(30)
        return act()

    policy.act = act_when_told
    runner = ThreadRunner(steady)
    loop = ControlLoop(
        policy,
        Camera(steady, rate_hz=1e6),
        AdmissionController(AdmissionParameters(margin_ms=0.0)),
        ActionQueue(ActionQueueParameters(max_action_age_ms=1e6)),
        runner,
        steady,
        steady,
        ControlLoopParameters(deadline_ms=5.0, max_observation_age_ms=3e6),
    )
    loop.set_instruction('reach the red cube')
    try:
        missed = loop.tick(steady.now_ns())
        assert (missed.reason.value, missed.cause.value) == ('deadline_missed', 'waiting')
        assert missed.published_ns >= missed.scheduled_ns + 5 * NS_PER_MS
        assert acting.wait(30)
        busy = loop.tick(steady.now_ns())
        assert busy.reason.value == 'busy'
        gate.set()
        with runner._condition:
            assert runner._condition.wait_for(lambda: runner._outcome is not None, 30)
        loop.set_parameters(ControlLoopParameters(publish='on_tick'))
        late = loop.tick(steady.now_ns())
        assert (late.late, late.cause.value) == (True, 'late')
        assert late.decode_ms > 5.0 and late.observation_age_ms > 5.0
    finally:
        gate.set()
        assert runner.close()


def test_an_instruction_said_again_does_not_throw_away_the_run_that_follows_it():
    rig = Rig(ScriptedLatency([50.0] * 60), admission={'probe_after': 1})
    for _ in range(60):
        rig.loop.set_instruction('reach the red cube')
        rig.run()
    assert rig.loop.causes['late'] > 10
    assert sum(call == ('instruction', 'reach the red cube') for call in rig.policy.calls) == 1


def test_releasing_a_hold_that_is_not_engaged_changes_nothing():
    rig = Rig(queue={'safe_action': 'stop_publishing'})
    rig.run(3)
    rig.camera.stop_ns = rig.clock.now_ns()
    rig.loop.set_hold(False)
    assert rig.run()[0].cause.value in ('fresh', 'queued')
    assert rig.run()[0].cause.value == 'queued'


def test_a_result_from_before_a_hold_is_not_used_after_it():
    rig = Rig(ScriptedLatency([8.0, 8.0, 120.0]))
    rig.run(3)
    rig.loop.set_hold(True)
    rig.run()
    rig.loop.set_hold(False)
    assert 'late' not in names(rig.run(4), 'cause')


def test_an_error_that_comes_late_is_not_hidden_by_the_next_run():
    latency = ScriptedLatency(prefill_ms=40.0)
    rig = Rig(latency)
    rig.policy.fail = ValueError('broken')
    assert rig.run()[0].reason.value == 'deadline_missed'
    rig.policy.fail, latency.prefill_ms = None, 10.0
    busy, result = rig.run(2)
    assert (busy.reason.value, result.cause.value) == ('busy', 'fresh')
    assert str(result.error) == 'broken'
    assert rig.loop.counts['policy_error'] == 1
