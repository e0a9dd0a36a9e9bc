"""The frame buffer: whole frames or none, whatever dies, and nothing left behind."""

import errno
import fcntl
import os
import signal
import stat
import subprocess
import sys

import numpy as np
import pytest

from vla_edge_ros.errors import ShapeError, TransportError
from vla_edge_ros.lab import bench_frame_buffer as bench
from vla_edge_ros.runtime import atomics, frame_buffer
from vla_edge_ros.runtime.frame_buffer import FrameReader, FrameWriter

SHAPE = (6, 5, 3)
NUM_BYTES = 90


@pytest.fixture
def name():
    """Give a name of this test's own and insist that nothing of it stays."""
    name = f'vla_edge_test_{os.getpid()}'
    yield name
    left = os.path.exists(path_of(name))
    if left:
        os.unlink(path_of(name))
    assert not left


def path_of(name):
    return os.path.join(frame_buffer.DIRECTORY, name)


def make_image(seed, shape=SHAPE):
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def run_python(code, *arguments):
    """Start a process that is a writer or reader of its own."""
    return subprocess.Popen(
        [sys.executable, '-c', code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )


HOLD_NAME = """
import sys
import numpy as np
from vla_edge_ros.runtime.frame_buffer import FrameWriter
writer = FrameWriter(sys.argv[1], 64)
writer.write(np.full((4, 4, 1), 7, np.uint8), 11, 12)
print('ready', flush=True)
sys.stdin.read()
"""


@pytest.fixture
def foreign_writer(name):
    """Run a writer in another process that has published one frame."""
    process = run_python(HOLD_NAME, name)
    assert process.stdout.readline() == b'ready\n'
    yield process
    process.kill()
    process.communicate()
    FrameWriter(name, 1).close()


def test_frame_arrives_with_stamps_and_sequence(name):
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name) as reader:
        for sequence in (1, 2, 3):
            image = make_image(sequence)
            assert writer.write(image, 10 * sequence, -sequence) == sequence
            assert reader.newest_sequence() == sequence
            frame = reader.read()
            assert (frame.stamp_ns, frame.received_ns, frame.sequence) == (
                10 * sequence,
                -sequence,
                sequence,
            )
            np.testing.assert_array_equal(frame.image, image)


@pytest.mark.parametrize(
    'shape', [(1, 1, 1), (1, 31, 1), (33, 7, 3), (64, 64, 1), (67, 61, 3), (480, 640, 4)]
)
def test_every_size_arrives_whole(name, shape):
    with FrameWriter(name, int(np.prod(shape))) as writer, FrameReader(name) as reader:
        for seed in (1, 2, 3):
            image = make_image(seed, shape)
            writer.write(image, 0)
            np.testing.assert_array_equal(reader.read().image, image)


def test_reader_may_start_first(name):
    with FrameReader(name) as reader:
        assert reader.read() is None
        assert reader.newest_sequence() == 0
        with FrameWriter(name, NUM_BYTES) as writer:
            assert reader.read() is None
            writer.write(make_image(1), 5)
            assert reader.read().stamp_ns == 5


def test_given_array_is_filled_in_place_whatever_its_alignment(name):
    image = make_image(1)
    memory = np.zeros(NUM_BYTES + 2, np.uint8)
    out = memory[1:-1].reshape(SHAPE)
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name) as reader:
        writer.write(image, 0)
        assert np.shares_memory(reader.read(out).image, out)
        np.testing.assert_array_equal(out, image)
        assert memory[0] == memory[-1] == 0


def test_given_array_of_another_size_is_left_alone(name):
    out = np.zeros((2, 2, 3), np.uint8)
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name) as reader:
        writer.write(make_image(1), 0)
        np.testing.assert_array_equal(reader.read(out).image, make_image(1))
    assert not out.any()


@pytest.mark.parametrize(
    'out',
    [
        np.zeros(SHAPE, np.int8),
        np.zeros(NUM_BYTES, np.uint8),
        np.zeros((6, 10, 3), np.uint8)[:, ::2],
        np.frombuffer(bytes(NUM_BYTES), np.uint8).reshape(SHAPE),
    ],
)
def test_unsuitable_out_is_refused(name, out):
    with pytest.raises(ShapeError, match='out must be'):
        FrameReader(name).read(out)


def test_size_and_channels_may_change_from_frame_to_frame(name):
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name) as reader:
        inode = os.stat(path_of(name)).st_ino
        for seed, shape in enumerate([(6, 5, 3), (5, 6, 3), (3, 3, 1), (2, 3, 4), (6, 5, 3)]):
            writer.write(make_image(seed, shape), 0)
            np.testing.assert_array_equal(reader.read().image, make_image(seed, shape))
        assert os.stat(path_of(name)).st_ino == inode


def test_larger_frame_makes_a_new_segment_that_readers_follow(name):
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name) as reader:
        writer.write(make_image(1), 1)
        assert reader.read().sequence == 1
        large = make_image(2, (60, 50, 3))
        assert writer.write(large, 2) == 2
        frame = reader.read()
        assert frame.sequence == 2
        np.testing.assert_array_equal(frame.image, large)
        assert writer.capacity_bytes == large.size


def test_failed_growth_is_an_error_and_the_next_frame_works(name, monkeypatch):
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name) as reader:
        with monkeypatch.context() as patch:
            patch.setattr(os, 'posix_fallocate', no_space)
            with pytest.raises(TransportError, match=r'capacity_bytes .*No space left.* got 9000'):
                writer.write(make_image(1, (60, 50, 3)), 1)
        writer.write(make_image(2), 2)
        assert reader.read().stamp_ns == 2


def no_space(*_arguments):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_no_shared_memory_left_is_said_at_creation(name, monkeypatch):
    monkeypatch.setattr(os, 'posix_fallocate', no_space)
    with pytest.raises(TransportError, match=r'capacity_bytes must fit .*No space left.* got 90'):
        FrameWriter(name, NUM_BYTES)


def test_segment_that_the_kernel_will_not_reserve_is_refused_at_creation(name):
    limit = 1 << 20
    code = (
        'import resource, signal, sys\n'
        'from vla_edge_ros.errors import TransportError\n'
        'from vla_edge_ros.runtime.frame_buffer import FrameWriter\n'
        'signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n'
        f'resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n'
        'try:\n'
        f'    FrameWriter(sys.argv[1], {limit})\n'
        'except TransportError as error:\n'
        '    print(error)\n'
    )
    process = run_python(code, name)
    assert b'capacity_bytes must fit into free shared memory' in process.communicate()[0]
    assert process.returncode == 0


@pytest.mark.parametrize('capacity_bytes', [0, -1, atomics.MAX_CAPACITY_BYTES + 1])
def test_impossible_capacity_is_refused(name, capacity_bytes):
    with pytest.raises(TransportError, match=f'capacity_bytes must .* got {capacity_bytes}'):
        FrameWriter(name, capacity_bytes)


@pytest.mark.parametrize('bad', ['', '/camera', 'a/b', '..', '.hidden', 'ü', 'x' * 129, 'a\n', 7])
@pytest.mark.parametrize('make', [FrameReader, lambda name: FrameWriter(name, 1)])
def test_malformed_name_is_refused(make, bad):
    with pytest.raises(TransportError, match='frame_buffer must be'):
        make(bad)


@pytest.mark.parametrize(
    'image',
    [
        np.zeros((0, 5, 3), np.uint8),
        np.zeros((4, 5, 0), np.uint8),
        np.zeros((4, 5), np.uint8),
        np.zeros(SHAPE, np.float32),
        np.zeros(SHAPE, np.int8),
        [[[1]]],
        None,
    ],
)
def test_bad_image_is_refused_and_publishes_nothing(name, image):
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name) as reader:
        with pytest.raises(ShapeError, match='image must be'):
            writer.write(image, 0)
        assert reader.read() is None


@pytest.mark.parametrize(
    'view',
    [
        lambda image: image[:, ::2],
        lambda image: image[::-1, :, ::-1],
        lambda image: image.transpose(1, 0, 2),
        lambda image: np.frombuffer(image.tobytes(), np.uint8).reshape(image.shape),
        lambda image: np.asfortranarray(image),
    ],
)
def test_strided_and_readonly_images_are_accepted(name, view):
    image = view(make_image(1))
    with FrameWriter(name, NUM_BYTES) as writer, FrameReader(name) as reader:
        writer.write(image, 0)
        np.testing.assert_array_equal(reader.read().image, image)


def test_segment_is_private_to_the_user_whatever_the_umask(name):
    before = os.umask(0)
    try:
        with FrameWriter(name, NUM_BYTES):
            assert stat.S_IMODE(os.stat(path_of(name)).st_mode) == 0o600
    finally:
        os.umask(before)


def test_living_owner_is_named(name, foreign_writer):
    with pytest.raises(TransportError, match=rf'process {foreign_writer.pid}\), got .{name}'):
        FrameWriter(name, NUM_BYTES)
    with FrameReader(name) as reader:
        assert reader.read().image.tolist() == np.full((4, 4, 1), 7).tolist()


def test_segment_of_a_killed_owner_stays_readable_and_is_replaced(name, foreign_writer):
    with FrameReader(name) as reader:
        assert reader.read().stamp_ns == 11
        foreign_writer.send_signal(signal.SIGKILL)
        foreign_writer.wait()
        assert reader.read().stamp_ns == 11
        with FrameWriter(name, NUM_BYTES) as writer:
            assert reader.read() is None
            writer.write(make_image(1), 21)
            assert reader.read().stamp_ns == 21


@pytest.mark.parametrize('num_bytes', [0, 1, atomics.segment_bytes(NUM_BYTES)])
def test_owner_killed_while_creating_leaves_nothing_in_the_way(name, num_bytes):
    with open(path_of(name), 'wb') as file:
        file.truncate(num_bytes)
    with FrameReader(name) as reader:
        assert reader.read() is None
        with FrameWriter(name, NUM_BYTES) as writer:
            writer.write(make_image(1), 1)
            assert reader.read().stamp_ns == 1


def test_foreign_memory_is_neither_read_nor_replaced(name):
    content = b'not a frame buffer' * 1000
    with open(path_of(name), 'wb') as file:
        file.write(content)
    try:
        for use in (FrameReader(name).read, lambda: FrameWriter(name, NUM_BYTES)):
            with pytest.raises(TransportError, match='frame_buffer must not be that of'):
                use()
        with open(path_of(name), 'rb') as file:
            assert file.read() == content
    finally:
        os.unlink(path_of(name))


def test_symbolic_link_is_not_followed(name, tmp_path):
    target = tmp_path / 'target'
    target.write_bytes(b'')
    os.symlink(target, path_of(name))
    try:
        for use in (FrameReader(name).read, lambda: FrameWriter(name, NUM_BYTES)):
            message = 'frame_buffer must be shared memory of this user'
            with pytest.raises(TransportError, match=message):
                use()
        assert target.read_bytes() == b''
    finally:
        os.unlink(path_of(name))


def test_closed_writer_refuses_and_leaves_nothing(name):
    writer = FrameWriter(name, NUM_BYTES)
    writer.write(make_image(1), 1)
    with FrameReader(name) as reader:
        assert reader.read() is not None
        writer.close()
        writer.close()
        assert not os.path.exists(path_of(name))
        assert reader.read() is None
    with pytest.raises(RuntimeError, match='write after close'):
        writer.write(make_image(1), 1)


def test_closing_does_not_remove_a_successor_s_segment(name):
    first = FrameWriter(name, NUM_BYTES)
    os.unlink(path_of(name))
    with FrameWriter(name, NUM_BYTES):
        first.close()
        assert os.path.exists(path_of(name))


def test_claim_lost_to_a_faster_writer_starts_over(name, monkeypatch):
    lock = fcntl.flock
    others = []

    def lock_after_another_came_first(fd, operation):
        monkeypatch.setattr(fcntl, 'flock', lock)
        os.unlink(path_of(name))
        others.append(FrameWriter(name, NUM_BYTES))
        lock(fd, operation)

    monkeypatch.setattr(fcntl, 'flock', lock_after_another_came_first)
    with pytest.raises(TransportError, match='in use by another writer'):
        FrameWriter(name, NUM_BYTES)
    others[0].close()


def test_reader_never_accepts_a_chunk_that_is_being_overwritten(name):
    """Put the writer's cursor at every chunk of this and the next frames, as a kill would."""
    shape = (3, atomics.CHUNK_BYTES, 1)
    with FrameWriter(name, 3 * atomics.CHUNK_BYTES) as writer, FrameReader(name) as reader:
        writer.write(make_image(1, shape), 1)
        writer.write(make_image(2, shape), 2)
        for sequence, readable in ((2, True), (3, True), (4, False), (5, False)):
            for chunk in range(3):
                cursor = (sequence << atomics.CHUNK_BITS) + chunk
                atomics.store_header(writer._segment.base, atomics.CURSOR_OFFSET, cursor)
                frame = reader.read()
                assert (frame is not None) == readable
                if readable:
                    np.testing.assert_array_equal(frame.image, make_image(2, shape))


@pytest.mark.parametrize('shape, reads', [(bench.SMALL, 100_000), (bench.LARGE, 1_000)])
def test_reader_never_sees_torn_frame(name, shape, reads):
    result = bench.hammer(name, shape, reads)
    assert result['torn'] == 0
    assert result['reads'] == reads
    assert result['new_frames'] > 1
    assert result['success_ratio'] > 0.5


def test_checksum_notices_every_mixture():
    source = bench.FrameSource((4, 256, 1))
    image, total = source.frame(3)
    frame = frame_buffer.Frame(image.copy(), total, 3, 3)
    assert not bench.is_torn(frame)
    other = source.frame(3 + bench.POOL)[0]  # the same pixels, other marks
    frame.image[2:] = other[2:]
    assert bench.is_torn(frame)


def test_either_side_survives_the_other_s_kill(name):
    result = bench.survive_kills(name, bench.LARGE, rounds=10, seed=3)
    assert result['torn'] == 0
    assert not result['left_behind']
