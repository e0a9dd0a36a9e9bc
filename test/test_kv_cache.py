"""Slot bookkeeping of the key/value cache."""

import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError, ShapeError
from vla_edge_ros.policy.eviction import make_eviction_policy
from vla_edge_ros.policy.kv_cache import CacheLayout, KVCache

LAYOUT = CacheLayout(prompt_slots=5, kv_slots=14, slots_per_frame=4, scratch_slots=2)


def make_cache(layout=LAYOUT, name='fifo', embedding_size=3, **pins):
    """Build a cache."""
    return KVCache(layout, make_eviction_policy(name), embedding_size, **pins)


def test_layout_counts_whole_frames_and_all_slots():
    assert LAYOUT.max_frames == 3
    assert LAYOUT.total_slots == 21


def test_context_is_prompt_then_frames_in_time_order():
    cache = make_cache()
    cache.set_prompt(3)
    embedding = np.ones(3, np.float32)
    insertions = [cache.insert(embedding, stamp) for stamp in range(4)]
    assert insertions[0].context_slots.tolist() == [0, 1, 2]
    assert insertions[3].evicted_frame_id == 1
    assert insertions[3].slots.tolist() == [5, 6, 7, 8]
    assert cache.context_slots.tolist() == [0, 1, 2] + list(range(9, 17)) + [5, 6, 7, 8]
    assert insertions[3].context_slots.tolist() == [0, 1, 2] + list(range(9, 17))
    assert cache.scratch_slots.tolist() == [19, 20]


def test_new_prompt_keeps_the_frames():
    cache = make_cache()
    cache.set_prompt(5)
    cache.insert(np.ones(3, np.float32), 0)
    cache.set_prompt(1)
    assert cache.context_slots.tolist() == [0, 5, 6, 7, 8]
    cache.set_prompt(2)
    assert cache.context_slots.tolist() == [0, 1, 5, 6, 7, 8]


def test_reset_forgets_frames_and_keeps_the_prompt():
    cache = make_cache()
    cache.set_prompt(2)
    cache.insert(np.ones(3, np.float32), 9)
    cache.reset()
    assert cache.context_slots.tolist() == [0, 1]
    assert cache.insert(np.ones(3, np.float32), 0).frame_id == 1


@settings(max_examples=100, deadline=None)
@given(
    name=st.sampled_from(['semantic', 'fifo', 'uniform']),
    slots_per_frame=st.integers(1, 5),
    max_frames=st.integers(3, 8),
    prompts=st.lists(st.one_of(st.none(), st.integers(0, 6)), max_size=40),
    pins=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_slot_is_ever_held_twice_and_pinned_frames_stay(
    name, slots_per_frame, max_frames, prompts, pins, seed
):
    layout = CacheLayout(6, max_frames * slots_per_frame, slots_per_frame, 3)
    cache = make_cache(layout, name, 2, pin_first=pins[0], pin_newest=pins[1])
    rng = np.random.default_rng(seed)
    held, num_tokens, stamp_ns = {}, 0, 0
    for prompt in prompts:
        version, before = cache.version, list(held)
        if prompt is not None:
            cache.set_prompt(prompt)
            num_tokens = prompt
        else:
            stamp_ns += int(rng.integers(0, 5))
            insertion = cache.insert(rng.normal(size=2).astype(np.float32), stamp_ns)
            if insertion.evicted_frame_id is not None:
                del held[insertion.evicted_frame_id]
                assert not (pins[0] and insertion.evicted_frame_id == before[0])
                assert not (pins[1] and insertion.evicted_frame_id == before[-1])
            earlier = [slot for slots in held.values() for slot in slots]
            assert insertion.context_slots.tolist() == list(range(num_tokens)) + earlier
            held[insertion.frame_id] = insertion.slots.tolist()
        frames = [slot for slots in held.values() for slot in slots]
        context = cache.context_slots
        assert context.dtype == np.int32
        assert context.tolist() == list(range(num_tokens)) + frames
        assert len(set(frames)) == len(frames) == slots_per_frame * cache.num_frames
        assert all(6 <= slot < 6 + layout.kv_slots for slot in frames)
        assert cache.version > version


def test_memory_stays_constant_over_twenty_thousand_frames():
    cache = make_cache(CacheLayout(8, 64, 4, 2), 'semantic', 16)
    embeddings = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)

    def stream(start, stop):
        for stamp in range(start, stop):
            cache.insert(embeddings[stamp % 64], stamp)

    stream(0, 1000)
    address = cache.context_slots.ctypes.data
    tracemalloc.start()
    try:
        stream(1000, 2000)
        before, _ = tracemalloc.get_traced_memory()
        stream(2000, 22000)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert abs(after - before) < 1024
    assert cache.context_slots.ctypes.data == address


def test_refused_insertion_changes_nothing():
    cache = make_cache()
    for stamp in (5, 6, 7):
        cache.insert(np.ones(3, np.float32), stamp)
    version, context = cache.version, cache.context_slots.copy()
    with pytest.raises(ShapeError, match='finite'):
        cache.insert(np.float32([1, np.nan, 0]), 8)
    with pytest.raises(ShapeError, match=r'embedding must be float32 \[3\]'):
        cache.insert(np.ones(4, np.float32), 8)
    with pytest.raises(ShapeError, match=r'embedding must be float32 \[3\]'):
        cache.insert(np.ones(3, np.float64), 8)
    with pytest.raises(ConfigError, match='stamp_ns must be >= the newest retained 7, got 6'):
        cache.insert(np.ones(3, np.float32), 6)
    assert cache.version == version
    np.testing.assert_array_equal(cache.context_slots, context)
    assert cache.retained.ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize('num_tokens', [-1, 6])
def test_prompt_outside_its_slots_is_refused(num_tokens):
    with pytest.raises(ConfigError, match=r'prompt must be in 0\.\.5 tokens'):
        make_cache().set_prompt(num_tokens)


@pytest.mark.parametrize(
    'sizes, message',
    [
        ((-1, 8, 4, 0), 'prompt_slots must be >= 0, got -1'),
        ((0, 8, 0, 0), 'slots_per_frame must be >= 1, got 0'),
        ((0, 3, 4, 0), 'kv_slots must be >= slots_per_frame 4, got 3'),
        ((0, 8, 4, -2), 'scratch_slots must be >= 0, got -2'),
    ],
)
def test_impossible_layout_is_refused(sizes, message):
    with pytest.raises(ConfigError, match=message):
        CacheLayout(*sizes)


def test_cache_of_pinned_frames_only_is_refused():
    layout = CacheLayout(prompt_slots=0, kv_slots=2, slots_per_frame=1, scratch_slots=0)
    with pytest.raises(ConfigError, match='kv_slots must hold more frames than the 2 pinned'):
        make_cache(layout, pin_first=True, pin_newest=True)
