"""
The trace: one CSV record a tick, written off the control thread.

Fields that have nothing to say are empty. Times in ``*_ns`` columns are on the steady clock,
stamps on the ROS clock.
"""

from collections import deque
from contextlib import suppress
import csv
import math
from operator import attrgetter
from pathlib import Path
import threading
from typing import Any

import numpy as np

from vla_edge_ros.errors import ConfigError, one_line

COLUMNS = (
    ('tick', int, 'number of the tick, from 0'),
    ('scheduled_ns', int, 'when the tick was due'),
    ('started_ns', int, 'when it began'),
    ('published_ns', int, 'when its action was published'),
    ('action_stamp_ns', int, 'the same moment in ROS time, the stamp of the action'),
    ('decision', str, 'what was started since the tick before: full, prefill_only, refuse'),
    ('reason', str, 'why'),
    ('cause', str, 'where the published action comes from, or why there is none'),
    ('frame_sequence', int, 'newest frame looked at'),
    ('observation_stamp_ns', int, 'header stamp of the image the action was computed from'),
    ('observation_age_ms', float, 'action_stamp_ns less observation_stamp_ns'),
    ('chunk_index', int, 'row of the chunk the action was taken from'),
    ('estimate_ms', float, 'expected cost of a full chunk with its tail term'),
    ('budget_ms', float, 'time to the deadline less the margin, at the decision'),
    ('preprocess_ms', float, 'stage times of the run collected in this tick'),
    ('vision_ms', float, ''),
    ('prefill_ms', float, ''),
    ('decode_ms', float, ''),
    ('late', int, '1 when a chunk arrived in this tick that had missed its deadline'),
    ('evicted_frame', int, 'id of the frame that run dropped from the cache'),
    ('retained_frames', int, 'frames in the cache'),
    ('schedule', str, 'when the policy runs: the parameter schedule'),
    ('runs', int, 'runs of the policy that ended since the tick before'),
    ('contact', int, '1 when the tool met its object since the tick before, 0 when not, empty '
     'where nobody can tell'),
)
"""Name, type and meaning of every column; ``action_0``, ``action_1``, … (float) follow them."""

HEADER_LINES = 1
BATCH, FLUSH_S = 16, 0.25
"""Results that wake the writer, and how long fewer may wait: waking costs more than writing."""

MISSING_INT = -1
"""What ``read_trace`` puts where an integer column is empty; floats become NaN."""

_FIELDS = attrgetter(*(name for name, _, _ in COLUMNS))


class TraceWriter:
    """
    Write step results to a CSV file from a thread of its own.

    Parameters
    ----------
    path : str or Path
        File to write; folders are made, an existing file is replaced.
    action_dim : int
        Number of action columns.
    capacity : int
        Results that may wait to be written.
    lossless : bool
        False, for a live loop: a result that finds the buffer full is dropped and counted.
        True, for virtual time: ``record`` waits for room.

    Attributes
    ----------
    dropped : int
        Results that were not written.
    error : OSError or None
        Why the file could not be written; what comes after it is dropped.

    """

    def __init__(
        self,
        path: str | Path,
        action_dim: int,
        capacity: int = 4096,
        lossless: bool = False,
    ):
        self.dropped = 0
        self.error: OSError | None = None
        self._action_dim = action_dim
        self._capacity = capacity
        self._lossless = lossless
        self._waiting: deque[Any] = deque()
        self._condition = threading.Condition()
        self._closing = False
        path = Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = open(path, 'w', newline='', encoding='utf-8')  # noqa: SIM115
        except OSError as error:
            raise ConfigError('trace', f'must be a writable path ({error})', str(path)) from None
        self._thread = threading.Thread(target=self._run, name='trace', daemon=True)
        self._thread.start()

    def record(self, result: Any) -> None:
        """Queue a ``StepResult``; never blocks unless the writer is lossless."""
        with self._condition:
            if self._lossless:
                self._condition.wait_for(lambda: len(self._waiting) < self._capacity)
            elif len(self._waiting) >= self._capacity:
                self.dropped += 1
                return
            self._waiting.append(result)
            if self._lossless or len(self._waiting) >= BATCH:
                self._condition.notify_all()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Write what waits, join the thread; False when that failed or took too long."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive() and self.error is None

    def __enter__(self) -> 'TraceWriter':
        """Return the writer."""
        return self

    def __exit__(self, *_exception) -> None:
        """Close the writer."""
        self.close()

    def _run(self) -> None:
        header = [name for name, _, _ in COLUMNS]
        header += [f'action_{i}' for i in range(self._action_dim)]
        self._write([header])
        while True:
            with self._condition:
                self._condition.wait_for(
                    lambda: self._closing or self._lossless and self._waiting
                    or len(self._waiting) >= BATCH, FLUSH_S)
                batch = list(self._waiting)
                self._waiting.clear()
                self._condition.notify_all()
                ends = self._closing and not batch
            if ends:
                break
            if batch:
                self._write([self._row(result) for result in batch])
        with suppress(OSError):  # every batch was flushed, or its error kept
            self._file.close()

    def _write(self, rows: list[list[str]]) -> None:
        if self.error is None:
            try:
                csv.writer(self._file, lineterminator='\n').writerows(rows)
                self._file.flush()
                return
            except OSError as error:
                self.error = error
        self.dropped += len(rows)

    def _row(self, result: Any) -> list[str]:
        action = [None] * self._action_dim if result.action is None else result.action
        return [_text(value) for value in (*_FIELDS(result), *action)]


def _text(value: Any) -> str:
    """Return a field as it is written: shortest exact numbers, flags as 0 or 1, gaps empty."""
    if value is None or value != value:
        return ''
    if isinstance(value, bool):
        return str(int(value))
    return str(getattr(value, 'value', value))


def read_trace(path: str | Path, field: str = 'trace') -> dict[str, np.ndarray]:
    """
    Read a trace into one array a column.

    A last record cut off by a crash is left out.

    Parameters
    ----------
    path : str or Path
        File that a :class:`TraceWriter` wrote.
    field : str
        What an error calls it.

    Returns
    -------
    dict of str to array [ticks]
        int64 with ``MISSING_INT``, float64 with NaN, or str; ``late`` is bool.

    Raises
    ------
    ConfigError
        The file cannot be read or is no trace.

    """
    kinds = {name: kind for name, kind, _ in COLUMNS}
    try:
        with open(path, newline='', encoding='utf-8') as file:
            whole_lines = file.read().split('\n')[:-1]
        header, *rows = csv.reader(whole_lines) if whole_lines else ([],)
        if header[: len(kinds)] != list(kinds):
            raise ValueError(f'columns {", ".join(header)}')
        for line, row in enumerate(rows, HEADER_LINES + 1):
            if len(row) != len(header):
                raise ValueError(f'line {line} has {len(row)} of {len(header)} fields')
        columns = {
            name: _column(name, [row[i] for row in rows], kinds.get(name, float))
            for i, name in enumerate(header)
        }
    except (OSError, ValueError, csv.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else one_line(error)
        raise ConfigError(field, f'must be a readable trace ({reason})', str(path)) from None
    columns['late'] = columns['late'] == 1
    return columns


def _column(name: str, fields: list[str], kind: type) -> np.ndarray:
    if kind is str:
        return np.array(fields, dtype=str)
    missing, dtype = (MISSING_INT, np.int64) if kind is int else (np.nan, np.float64)
    try:
        values = np.array([kind(field) if field else missing for field in fields], dtype)
    except (ValueError, OverflowError):
        values = None
    # What was not measured is empty, never NaN.
    if values is None or any(fields[row] for row in np.flatnonzero(values != values)):
        row = next(row for row, field in enumerate(fields) if field and not _fits(field, kind))
        what = 'an integer' if kind is int else 'a number'
        raise ValueError(
            f'line {row + HEADER_LINES + 1}, column {name} must be {what}: {fields[row]!r}')
    return values


def _fits(field: str, kind: type) -> bool:
    try:
        return not math.isnan(float(field) if kind is float else np.int64(int(field)))
    except (ValueError, OverflowError):
        return False
