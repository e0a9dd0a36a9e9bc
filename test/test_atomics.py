"""The lock-free protocol, on private memory, and the code that it compiles to."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from vla_edge_ros.runtime import atomics

IMAGE = np.arange(90, dtype=np.uint8).reshape(6, 5, 3)


class Memory:
    """A segment of this process alone."""

    def __init__(self, capacity_bytes):
        self._memory = np.zeros(atomics.segment_bytes(capacity_bytes) // 8, np.int64)
        self.base = self._memory.ctypes.data
        self.stride = atomics.slot_bytes(capacity_bytes)

    def publish(self, image, sequence):
        atomics.publish_frame(self.base, self.stride, image, sequence, 10, 20)

    def copy(self, out):
        meta = np.zeros(atomics.META_WORDS, np.int64)
        return atomics.copy_newest(self.base, self.stride, out, meta), meta.tolist()

    def set_cursor(self, sequence, chunk):
        cursor = (sequence << atomics.CHUNK_BITS) + chunk
        atomics.store_header(self.base, atomics.CURSOR_OFFSET, cursor)


@pytest.fixture
def memory():
    return Memory(IMAGE.size)


def test_newest_frame_is_copied_with_its_metadata(memory):
    out = np.zeros_like(IMAGE)
    assert memory.copy(out)[0] == atomics.EMPTY
    for sequence in (1, 2, 3):
        memory.publish(IMAGE + np.uint8(sequence), sequence)
        assert memory.copy(out) == (sequence, [10, 20, 6, 5, 3])
        np.testing.assert_array_equal(out, IMAGE + np.uint8(sequence))


def test_other_size_is_reported_and_nothing_is_written(memory):
    memory.publish(IMAGE, 1)
    out = np.zeros((1, 1, 1), np.uint8)
    assert memory.copy(out) == (atomics.OTHER_SIZE, [10, 20, 6, 5, 3])
    assert not out.any()


def test_size_of_a_frame_that_is_being_overwritten_is_not_believed(memory):
    memory.publish(IMAGE, 1)
    memory.set_cursor(3, 0)
    assert memory.copy(np.zeros((1, 1, 1), np.uint8))[0] == atomics.TORN


def test_frame_counter_does_not_wrap_for_years(memory):
    sequence = (1 << 43) - 3
    memory.publish(IMAGE, sequence)
    assert memory.copy(np.zeros_like(IMAGE))[0] == sequence


def test_nothing_compiles_at_a_call():
    functions = (atomics.publish_frame, atomics.copy_newest, atomics.load_header)
    assert not any(function._can_compile for function in functions)
    assert all(function.signatures for function in functions)


def test_memory_order_reaches_the_compiled_code(tmp_path):
    """Compile anew, since cached code cannot be inspected, and look for the orderings."""
    code = (
        'from vla_edge_ros.runtime import atomics\n'
        'for function in (atomics.publish_frame, atomics.copy_newest):\n'
        '    print(function.inspect_llvm(function.signatures[0]))\n'
    )
    text = subprocess.run(
        [sys.executable, '-c', code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, 'NUMBA_CACHE_DIR': str(tmp_path)},
    ).stdout
    bodies = re.findall(r'^define [^\n]*@_ZN\d+vla_edge_ros[^\n]*\n(.*?)^}', text, re.M | re.S)
    publish, copy = bodies
    assert publish.count('fence release') >= 2  # before the metadata and before every chunk
    assert re.search(r'store atomic [^\n]* release', publish)
    assert copy.count('fence acquire') >= 2  # after the metadata and after every chunk
    assert re.search(r'load atomic [^\n]* acquire', copy)
