"""Frames that a device copies by itself: whole or not at all, and no segment is forgotten."""

import os

from fake_target import Copier
import numpy as np
import pytest

from vla_edge_ros.lab import bench_frame_buffer as bench
from vla_edge_ros.runtime.frame_buffer import FrameReader, FrameWriter, MAX_TRIES

SHAPE = (6, 5, 3)
NUM_BYTES = 90


@pytest.fixture
def name():
    return f'vla_edge_target_{os.getpid()}'


def make_image(seed, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def test_a_frame_is_what_the_target_made_of_it(name):
    target = Copier()
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name, target) as reader:
        assert reader.read() is None and target.fetches == 0
        for sequence, shape in enumerate([SHAPE, (5, 6, 3), (2, 3, 4), SHAPE], 1):
            writer.write(make_image(sequence, shape), 10 * sequence, -sequence)
            frame = reader.read()
            assert (frame.stamp_ns, frame.received_ns, frame.sequence) == (
                10 * sequence, -sequence, sequence)
            np.testing.assert_array_equal(frame.image, make_image(sequence, shape))
        assert target.fetches == 4


def test_a_copy_that_the_writer_overtook_is_made_again_of_the_newest_frame(name):
    with FrameWriter(name, NUM_BYTES) as writer:
        others = iter([(2, 3), (), (4, 5)])
        target = Copier(meanwhile=lambda: [
            writer.write(make_image(seed), seed) for seed in next(others)])  # fmt: skip
        with FrameReader(name, target) as reader:
            writer.write(make_image(1), 1)
            frame = reader.read()
            assert (frame.sequence, target.fetches) == (3, 2)
            np.testing.assert_array_equal(frame.image, make_image(3))


def test_one_frame_written_meanwhile_lies_elsewhere_and_spoils_nothing(name):
    with FrameWriter(name, NUM_BYTES) as writer:
        target = Copier(meanwhile=lambda: writer.write(make_image(2), 2))
        with FrameReader(name, target) as reader:
            writer.write(make_image(1), 1)
            frame = reader.read()
            assert (frame.sequence, target.fetches) == (1, 1)
            np.testing.assert_array_equal(frame.image, make_image(1))


def test_a_copy_that_is_overtaken_every_time_is_no_frame(name):
    with FrameWriter(name, NUM_BYTES) as writer:
        target = Copier(meanwhile=lambda: [writer.write(make_image(2), 2) for _ in range(2)])
        with FrameReader(name, target) as reader:
            writer.write(make_image(1), 1)
            assert reader.read() is None
            assert target.fetches == MAX_TRIES
            target.meanwhile = lambda: None
            np.testing.assert_array_equal(reader.read().image, make_image(2))


def test_a_target_that_cannot_reach_the_segment_gets_frames_in_its_own_memory(name):
    target = Copier(reachable=False)
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name, target) as reader:
        for sequence, shape in enumerate([SHAPE, (3, 3, 1), SHAPE], 1):
            writer.write(make_image(sequence, shape), sequence)
            frame = reader.read()
            assert frame.sequence == sequence and np.shares_memory(frame.image, target.memory)
            np.testing.assert_array_equal(frame.image, make_image(sequence, shape))


def test_a_frame_larger_than_the_room_of_a_target_is_an_array_of_the_reader(name):
    target = Copier(reachable=False, room_bytes=NUM_BYTES - 1)
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name, target) as reader:
        writer.write(make_image(1), 1)
        frame = reader.read()
        assert not np.shares_memory(frame.image, target.memory)
        np.testing.assert_array_equal(frame.image, make_image(1))


def test_an_array_of_the_caller_comes_before_the_target(name):
    target, out = Copier(), np.empty(SHAPE, np.uint8)
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name, target) as reader:
        writer.write(make_image(1), 1)
        assert np.shares_memory(reader.read(out).image, out) and target.fetches == 0


def test_every_segment_is_attached_when_mapped_and_detached_before_it_is_left(name):
    target = Copier()
    with FrameReader(name, target) as reader:
        with FrameWriter(name, NUM_BYTES) as writer:
            writer.write(make_image(1), 1)
            reader.read()
            assert (len(target.attached), len(target.detached)) == (1, 0)
            writer.write(make_image(2, (60, 50, 3)), 2)  # does not fit the first segment
            np.testing.assert_array_equal(reader.read().image, make_image(2, (60, 50, 3)))
            assert (len(target.attached), len(target.detached)) == (2, 1)
    assert target.detached == [base for base, _ in target.attached]


@pytest.mark.parametrize('reachable', [True, False])
def test_no_torn_frame_reaches_a_target_however_fast_the_writer_is(name, reachable):
    target = Copier(reachable)
    result = bench.hammer(name, bench.LARGE, 300, target)
    assert result['torn'] == 0 and result['reads'] == 300
    assert result['new_frames'] > 1
    assert (target.fetches > 0) is reachable
