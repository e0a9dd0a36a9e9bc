"""The trace file: what goes in comes out, and a full disk or a crash never blocks the loop."""

from enum import Enum
import math
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.runtime.control_loop import StepResult
from vla_edge_ros.telemetry.trace import COLUMNS, MISSING_INT, read_trace, TraceWriter


class Name(Enum):
    """A value as the loop's enumerations are."""

    FULL = 'full'


def result(tick=0, **changes):
    """Return a step result of two actions with every field set."""
    values = {
        name: {int: tick, float: tick / 3, str: Name.FULL}[kind] for name, kind, _ in COLUMNS
    }
    values |= {'late': False, 'action': np.array([0.1, -2.5e-7], np.float32), **changes}
    return SimpleNamespace(**values)


def write(path, *results, **options):
    with TraceWriter(path, 2, **options) as writer:
        for one in results:
            writer.record(one)
    return writer


def test_columns_are_the_fields_of_a_step_result():
    names = [name for name, _, _ in COLUMNS]
    assert names == list(StepResult.__dataclass_fields__)[: len(names)]


def test_records_come_back_as_they_went_in(tmp_path):
    path = tmp_path / 'deep' / 'trace.csv'
    write(path, *(result(tick, late=tick == 1) for tick in range(3)))
    trace = read_trace(path)
    assert list(trace) == [name for name, _, _ in COLUMNS] + ['action_0', 'action_1']
    np.testing.assert_array_equal(trace['tick'], [0, 1, 2])
    np.testing.assert_array_equal(trace['estimate_ms'], np.arange(3) / 3)
    np.testing.assert_array_equal(trace['late'], [False, True, False])
    np.testing.assert_array_equal(trace['action_1'].astype(np.float32), np.float32([-2.5e-7] * 3))
    assert trace['decision'].tolist() == ['full'] * 3


def test_gaps_stay_gaps(tmp_path):
    path = tmp_path / 'trace.csv'
    write(path, result(7, frame_sequence=None, budget_ms=math.nan, action=None))
    assert ',,' in path.read_text()
    trace = read_trace(path)
    assert trace['frame_sequence'][0] == MISSING_INT
    assert np.isnan(trace['budget_ms'][0]) and np.isnan(trace['action_1'][0])


def test_record_cut_off_by_a_crash_is_left_out(tmp_path):
    path = tmp_path / 'trace.csv'
    write(path, result(0), result(1))
    whole = path.read_text()
    for cut in range(1, len(whole.splitlines()[-1]) + 1):
        path.write_text(whole[:-cut])
        assert read_trace(path)['tick'].tolist() == [0]


def test_trace_without_records_has_empty_columns(tmp_path):
    write(tmp_path / 'trace.csv')
    assert read_trace(tmp_path / 'trace.csv')['late'].shape == (0,)


@pytest.mark.parametrize('content', ['', 'a,b\n1,2\n', '\x00\n', None])
def test_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / 'trace.csv'
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match='trace must be a readable trace'):
        read_trace(path)


@pytest.mark.parametrize(('column', 'text', 'what'), [
    ('vision_ms', 'nan', 'must be a number'), ('vision_ms', 'fast', 'must be a number'),
    ('action_1', 'NaN', 'must be a number'), ('tick', '1.5', 'must be an integer'),
    ('scheduled_ns', '9' * 30, 'must be an integer'),
])
def test_field_that_is_no_number_is_named_by_line_column_and_value(tmp_path, column, text, what):
    path = tmp_path / 'trace.csv'
    write(path, result(), result(1), result(2))
    rows = [line.split(',') for line in path.read_text().splitlines()]
    rows[2][rows[0].index(column)] = text
    path.write_text('\n'.join(map(','.join, rows)) + '\n')
    with pytest.raises(ConfigError, match=f"line 3, column {column} {what}: '{text}'"):
        read_trace(path)


def test_line_of_another_length_is_named(tmp_path):
    path = tmp_path / 'trace.csv'
    write(path, result())
    path.write_text(path.read_text() + '1,2\n')
    with pytest.raises(ConfigError, match=r'trace \(line 3 has 2 of 26 fields\)'):
        read_trace(path)


def test_path_that_cannot_be_written_is_refused(tmp_path):
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigError, match='trace must be a writable path'):
        TraceWriter(tmp_path / 'file' / 'trace.csv', 2)


class Slow:
    """A result whose formatting waits for ``gate``."""

    def __init__(self, tick, entered, gate):
        self.__dict__.update(result(tick).__dict__)
        self._entered, self._gate = entered, gate

    @property
    def action(self):
        """Return the action once the gate is open."""
        self._entered.set()
        assert self._gate.wait(30)
        return np.zeros(2, np.float32)

    @action.setter
    def action(self, value):
        pass


def test_full_buffer_drops_and_counts_and_never_blocks(tmp_path):
    entered, gate = threading.Event(), threading.Event()
    with TraceWriter(tmp_path / 'trace.csv', 2, capacity=3) as writer:
        writer.record(Slow(0, entered, gate))
        assert entered.wait(30)
        for tick in range(1, 11):
            writer.record(result(tick))
        assert writer.dropped == 7
        gate.set()
    assert read_trace(tmp_path / 'trace.csv')['tick'].tolist() == [0, 1, 2, 3]


def test_lossless_writer_waits_for_room_instead(tmp_path):
    writer = write(tmp_path / 'trace.csv', *map(result, range(500)), capacity=2, lossless=True)
    assert writer.dropped == 0
    assert read_trace(tmp_path / 'trace.csv')['tick'].tolist() == list(range(500))


def test_a_single_result_is_in_the_file_soon_also_without_a_close(tmp_path):
    writer = TraceWriter(tmp_path / 'trace.csv', 2)
    writer.record(result(7))
    end_s = time.monotonic() + 30
    while (tmp_path / 'trace.csv').read_text().count('\n') < 2:
        assert time.monotonic() < end_s
    assert read_trace(tmp_path / 'trace.csv')['tick'].tolist() == [7]
    assert writer.close()


def test_full_disk_is_told_and_ends_nothing():
    writer = TraceWriter('/dev/full', 2)
    writer.record(result())
    assert writer.close() is False
    assert isinstance(writer.error, OSError) and writer.dropped >= 1


def test_close_joins_the_writer_thread(tmp_path):
    writer = TraceWriter(tmp_path / 'trace.csv', 2)
    assert any(thread.name == 'trace' for thread in threading.enumerate())
    assert writer.close() and writer.close()
    assert not any(thread.name == 'trace' for thread in threading.enumerate())
