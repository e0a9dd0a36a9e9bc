"""The record of a sweep holds every whole line and nothing else, whatever killed its writer."""

from contextlib import closing
import os
import zlib

import pytest

from vla_edge_ros.clock import ManualClock, NS_PER_S
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.lab.sweep.names import DAMAGED
from vla_edge_ros.lab.sweep.record import (
    decode,
    differences,
    encode,
    EpisodeId,
    EpisodeRecord,
    read_rows,
)
from vla_edge_ros.sim.episode_row import EpisodeRow

ROW = EpisodeRow(
    True, 20, 3, 20 / 30, {'full': 3}, {'admitted': 3}, {'fresh': 3}, {'fresh': {153: 3}},
    {153: 1})
IDS = [EpisodeId(0, 0, index) for index in range(3)]


def filled(path):
    with closing(EpisodeRecord(path)) as record:
        for episode in IDS:
            record.append(episode, ROW)
    return path.read_bytes()


def test_record_cut_anywhere_holds_its_whole_lines_and_goes_on_behind_them(tmp_path):
    path = tmp_path / 'record'
    data = filled(path)
    ends = [end + 1 for end, byte in enumerate(data) if byte == ord('\n')]
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        with closing(EpisodeRecord(path)) as record:
            whole = sum(end <= cut for end in ends)
            assert list(record.rows) == IDS[:whole]
            assert record.damaged == (cut not in (0, *ends))
            for episode in IDS[whole:]:
                record.append(episode, ROW)
        assert path.read_bytes() == data


def test_damaged_line_in_the_middle_counts_as_not_written(tmp_path):
    path = tmp_path / 'record'
    data = filled(path)
    length = len(data) // 3
    for at in range(length, 2 * length - 1):
        spoilt = bytearray(data)
        spoilt[at] ^= 1
        if spoilt[at] == ord('\n'):
            continue
        path.write_bytes(spoilt)
        (tmp_path / DAMAGED).unlink(missing_ok=True)
        with closing(EpisodeRecord(path)) as record:
            assert list(record.rows) == [IDS[0], IDS[2]] and record.damaged == 1
            record.append(IDS[1], ROW)
        assert (tmp_path / DAMAGED).read_bytes() == bytes(spoilt[length:2 * length])
        with closing(EpisodeRecord(path)) as record:
            assert sorted(record.rows) == IDS and not record.damaged
    path.write_bytes(data[:length] + bytes(length) + data[2 * length:])
    with closing(EpisodeRecord(path)) as record:
        assert IDS[1] not in record.rows


@pytest.mark.parametrize('tail', [b'3f00aa17 [0,0,0,{"succ', b'\0' * 40, b'\0' * 40 + b'\n',
                                  b'one\n\n two\nthree'])
def test_damaged_tail_is_moved_away_once(tmp_path, tail):
    path = tmp_path / 'record'
    data = filled(path)
    path.write_bytes(data + tail)
    for damaged in (len(tail.replace(b'\n\n', b'\n').splitlines()), 0, 0):
        with closing(EpisodeRecord(path)) as record:
            assert list(record.rows) == IDS and record.damaged == damaged
    assert (tmp_path / DAMAGED).read_bytes().split() == tail.split()
    assert path.read_bytes().startswith(data)


def test_record_is_read_without_a_lock_and_without_a_change(tmp_path):
    path = tmp_path / 'record'
    data = filled(path) + b'half a li'
    with closing(EpisodeRecord(path)):
        path.write_bytes(data)
        rows, damaged = read_rows(path)
    assert list(rows) == IDS and damaged == {len(data) - 9: b'half a li'}
    assert path.read_bytes() == data and list(tmp_path.iterdir()) == [path]


def test_line_with_a_right_checksum_and_wrong_content_is_no_episode():
    assert decode(encode(IDS[0], ROW)[:-1]) == (IDS[0], ROW)
    for body in (b'[]', b'{}', b'[0,0,0,{}]', b'[0,0,0,5]', b'no json'):
        assert decode(b'%08x %s' % (zlib.crc32(body), body)) is None


def test_episode_is_never_recorded_twice(tmp_path):
    path = tmp_path / 'record'
    data = filled(path)
    with closing(EpisodeRecord(path)) as record, pytest.raises(RuntimeError, match='twice'):
        record.append(IDS[1], ROW)
    path.write_bytes(data * 2)
    with pytest.raises(ConfigError, match=r'every episode once, and \(0, 0, 0\) comes again'):
        EpisodeRecord(path)


def test_only_one_sweep_at_a_time_may_write(tmp_path):
    path = tmp_path / 'record'
    with closing(EpisodeRecord(path)):
        with pytest.raises(ConfigError, match='one sweep at a time'):
            EpisodeRecord(path)
    with closing(EpisodeRecord(path)) as record:
        assert not record.rows


def test_disk_is_told_to_keep_it_once_a_second(tmp_path, monkeypatch):
    synced, clock = [], ManualClock()
    monkeypatch.setattr(os, 'fsync', lambda file: synced.append(clock.now_ns()))
    with closing(EpisodeRecord(tmp_path / 'record', clock)) as record:
        for index in range(7):
            record.append(EpisodeId(0, 0, index), ROW)
            clock.advance_ns(NS_PER_S // 2)
    assert synced == [NS_PER_S, 2 * NS_PER_S, 3 * NS_PER_S]


def test_full_disk_is_told_in_one_line(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(28, 'No space left on device')

    with closing(EpisodeRecord(tmp_path / 'record')) as record:
        monkeypatch.setattr(os, 'write', refuse)
        with pytest.raises(ConfigError, match='--out must be writable .No space left'):
            record.append(IDS[0], ROW)
        assert not record.rows


def test_differences_name_the_place_and_both_values():
    before = {'a': 1, 'b': {'c': [1, 2], 'd': 5}, 'g': [{'x': 1}, {'x': 2}]}
    now = {'a': 1, 'b': {'c': [1, 3], 'e': 5}, 'g': [{'x': 1}, {'x': 3}, {'x': 4}]}
    assert differences(before, now) == [
        'b.c: [1, 2] -> [1, 3]', 'b.d: 5 -> None', 'b.e: None -> 5', 'g[1].x: 2 -> 3',
        "g[2]: None -> {'x': 4}"]
    assert differences(before, before) == []
