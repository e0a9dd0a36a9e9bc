"""What is told of slow work, when, and to whom."""

import sys

import pytest

from vla_edge_ros.clock import ManualClock, NS_PER_MS
from vla_edge_ros.nodes import engine
from vla_edge_ros.policy.policy import Policy
from vla_edge_ros.progress import no_progress, ProgressLog, terminal_progress


def test_a_line_comes_when_other_work_begins_and_once_a_second_while_it_lasts():
    lines, clock = [], ManualClock(5 * 10**9)
    progress = ProgressLog(lines.append, clock)
    for number in range(1, 31):
        progress('uploading layer', number, 30)
        clock.advance_ns(100 * NS_PER_MS)
    progress('recording the prefill', 1, 1)
    assert lines == [
        'uploading layer 1 of 30', 'uploading layer 11 of 30', 'uploading layer 21 of 30',
        'recording the prefill']


@pytest.mark.parametrize('terminal', [True, False])
def test_only_a_terminal_is_told(monkeypatch, capsys, terminal):
    monkeypatch.setattr(sys.stderr, 'isatty', lambda: terminal)
    progress = terminal_progress()
    assert (progress is no_progress) is not terminal
    progress('reading checkpoint file', 2, 3)
    assert capsys.readouterr() == ('', 'reading checkpoint file 2 of 3\n' if terminal else '')


def test_loading_and_calibrating_tell_every_step_once():
    told = []
    policy = engine.load_policy(
        engine.PolicyParameters(backend='cpu'), lambda *step: told.append(step))
    assert isinstance(policy, Policy)
    layers = policy.config.transformer.num_hidden_layers
    assert told == [
        ('reading checkpoint file', 1, 1),
        *(('packing layer', layer, layers) for layer in range(1, layers + 1))]
    told.clear()
    engine.calibrate(policy, lambda *step: told.append(step), runs=2)
    runs = policy.cache.layout.max_frames + 2
    assert told == [('warming up, run', run, runs) for run in range(1, runs + 1)]
