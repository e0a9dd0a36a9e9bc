"""
The finished episodes of a sweep: one line each, appended, safe against kill -9 and power cuts.

A line is a checksum and a JSON list of cell, seed, index and row. Only one process writes it.
A line that is not whole, such as the last one of a killed process, counts as not written. Whoever
writes next moves it to a file of its own first: at the end it is cut off, elsewhere it leaves a
blank line.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
import fcntl
import io
import json
import os
from pathlib import Path
from typing import Any, NamedTuple
import zlib

from vla_edge_ros.clock import Clock, MonotonicClock, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab.sweep.names import DAMAGED
from vla_edge_ros.sim.episode_row import EpisodeRow

SYNC_NS = NS_PER_S
"""How much of a sweep a power cut may take; a killed process takes nothing."""


class EpisodeId(NamedTuple):
    """Which episode of a sweep: number of its cell, seed, index."""

    cell: int
    seed: int
    index: int


class EpisodeRecord:
    """
    An open record; holds a lock on its file until it is closed or the process ends.

    Parameters
    ----------
    path : Path
        File of the record; made when missing, with its folder.
    clock : Clock, optional
        Steady; says when to flush to the disk.

    Attributes
    ----------
    rows : dict of EpisodeId to EpisodeRow
        What it holds.
    damaged : int
        Lines that were not whole; ``record.damaged`` beside it has them now.

    Raises
    ------
    ConfigError
        The file cannot be written, another process writes it, or it holds an episode twice.

    """

    def __init__(self, path: Path, clock: Clock | None = None):
        self._path = path
        self._clock = clock or MonotonicClock()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            raise ConfigError('--out', f'must be writable ({error.strerror})', str(path)) from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.rows, damaged = read_rows(path)
            self.damaged = len(damaged)
            if damaged:
                self._move(damaged)
        except BlockingIOError:
            self.close()
            rule = 'must be written by one sweep at a time, and one is at work there'
            raise ConfigError('--out', rule, str(path.parent)) from None
        except BaseException:
            self.close()
            raise
        self._synced_ns = self._clock.now_ns()

    def append(self, episode: EpisodeId, row: EpisodeRow) -> None:
        """
        Add an episode; once this returns, the end of the process cannot take it away.

        Raises
        ------
        ConfigError
            It cannot be written, as on a full disk.

        """
        if episode in self.rows:
            raise RuntimeError(f'{episode} was run twice')
        line = encode(episode, row)
        with self._told():
            while line:
                line = line[os.write(self._file, line):]
        self.rows[episode] = row
        if self._clock.now_ns() - self._synced_ns >= SYNC_NS:
            self.sync()

    def sync(self) -> None:
        """Flush to the disk; raises ``ConfigError`` where that fails."""
        with self._told():
            os.fsync(self._file)
        self._synced_ns = self._clock.now_ns()

    def close(self) -> None:
        """Close the file and give up the lock; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            rule = f'must be writable ({error.strerror})'
            raise ConfigError('--out', rule, str(self._path)) from None

    def _move(self, damaged: Mapping[int, bytes]) -> None:
        """Take lines out; in place, as the lock is on this very file."""
        with self._told():
            with open(self._path.with_name(DAMAGED), 'ab') as aside:
                aside.writelines(line.rstrip(b'\n') + b'\n' for line in damaged.values())
                aside.flush()
                os.fsync(aside.fileno())
            with open(self._path, 'r+b') as file:
                for start, line in damaged.items():
                    file.seek(start)
                    if line.endswith(b'\n'):
                        file.write(b' ' * (len(line) - 1))
                    else:
                        file.truncate()


def read_rows(path: Path) -> tuple[dict[EpisodeId, EpisodeRow], dict[int, bytes]]:
    """
    Return the episodes of a record, and by where they begin its lines that are not whole.

    Raises
    ------
    ConfigError
        It cannot be read, or it holds an episode twice.

    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError('--out', f'must be readable ({error.strerror})', str(path)) from None
    rows: dict[EpisodeId, EpisodeRow] = {}
    damaged = {}
    start = 0
    for line in io.BytesIO(data):
        item = decode(line[:-1]) if line.endswith(b'\n') else None
        if item is not None:
            episode, row = item
            if episode in rows:
                rule = f'must hold every episode once, and {tuple(episode)} comes again'
                raise ConfigError('--out', rule, str(path))
            rows[episode] = row
        elif line.strip(b' ') != b'\n':
            damaged[start] = line
        start += len(line)
    return rows, damaged


def encode(episode: EpisodeId, row: EpisodeRow) -> bytes:
    """Return the line of an episode."""
    body = json.dumps([*episode, row.to_mapping()], separators=(',', ':')).encode()
    return b'%08x %s\n' % (zlib.crc32(body), body)


def decode(line: bytes) -> tuple[EpisodeId, EpisodeRow] | None:
    """Return what a line says, None when it is not whole."""
    checksum, _, body = line.partition(b' ')
    if checksum != b'%08x' % zlib.crc32(body):
        return None
    try:
        cell, seed, index, mapping = json.loads(body)
        return EpisodeId(cell, seed, index), EpisodeRow.from_mapping(mapping)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def differences(before: Any, now: Any, name: str = '') -> list[str]:
    """Return what differs between two documents, one line each: ``name: before -> now``."""
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        lines = []
        for key in [*before, *(key for key in now if key not in before)]:
            here = f'{name}.{key}' if name else str(key)
            lines += differences(before.get(key), now.get(key), here)
        return lines
    if isinstance(before, list) and isinstance(now, list) and any(
            isinstance(value, Mapping) for value in (*before, *now)):
        length = max(len(before), len(now))
        padded = [[*values, *[None] * (length - len(values))] for values in (before, now)]
        return [
            line for number, pair in enumerate(zip(*padded))
            for line in differences(*pair, f'{name}[{number}]')]
    return [] if before == now else [f'{name}: {before!r} -> {now!r}']
