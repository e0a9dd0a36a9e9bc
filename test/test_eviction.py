"""Eviction policies against their brute-force definitions."""

from hypothesis import given, settings
from hypothesis import strategies as st
import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError, ShapeError
from vla_edge_ros.policy.eviction import make_eviction_policy, RetainedFrames, SIMILARITY_DECIMALS
from vla_edge_ros.policy.kv_cache import CacheLayout, KVCache

EMBEDDING_SIZE = 3


def cosine(a, b):
    """Cosine in float64 with the documented rounding; 0 when a vector is zero."""
    a, b = np.float64(a), np.float64(b)
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return round(float(a @ b / norms), SIMILARITY_DECIMALS) if norms else 0.0


def brute_fifo(stamps, embeddings, incoming_ns, allowed):
    """Oldest of the allowed ranks."""
    return allowed[0]


def brute_semantic(stamps, embeddings, incoming_ns, allowed):
    """Older frame of the most similar adjacent pair among all pairs, oldest first on ties."""
    pairs = [
        (-cosine(embeddings[rank], embeddings[rank + 1]), rank)
        for rank in allowed
        if rank + 1 < len(embeddings)
    ]
    return min(pairs)[1] if pairs else allowed[0]


def brute_uniform(stamps, embeddings, incoming_ns, allowed):
    """Try every rank but the oldest and add up the squared gaps that would remain."""

    def unevenness(rank):
        kept = stamps[:rank] + stamps[rank + 1 :] + [incoming_ns]
        return sum((b - a) ** 2 for a, b in zip(kept, kept[1:]))

    inner = [rank for rank in allowed if rank > 0]
    return min((unevenness(rank), rank) for rank in inner)[1] if inner else allowed[0]


BRUTE = {'fifo': brute_fifo, 'semantic': brute_semantic, 'uniform': brute_uniform}

frames_strategy = st.lists(
    st.tuples(
        st.integers(0, 50),
        st.lists(st.integers(-2, 2), min_size=EMBEDDING_SIZE, max_size=EMBEDDING_SIZE),
    ),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize('name', sorted(BRUTE))
@settings(max_examples=150, deadline=None)
@given(
    frames=frames_strategy,
    max_frames=st.integers(1, 9),
    pin_first=st.booleans(),
    pin_newest=st.booleans(),
)
def test_every_eviction_equals_the_brute_force_definition(
    name, frames, max_frames, pin_first, pin_newest
):
    max_frames += pin_first + pin_newest
    layout = CacheLayout(prompt_slots=2, kv_slots=max_frames, slots_per_frame=1, scratch_slots=1)
    cache = KVCache(layout, make_eviction_policy(name), EMBEDDING_SIZE, pin_first, pin_newest)
    kept = []
    stamp_ns = 0
    for frame_id, (gap_ns, embedding) in enumerate(frames, start=1):
        stamp_ns += gap_ns
        expected = None
        if len(kept) == max_frames:
            allowed = range(int(pin_first), max_frames - int(pin_newest))
            stamps, embeddings = [k[1] for k in kept], [k[2] for k in kept]
            rank = BRUTE[name](stamps, embeddings, stamp_ns, allowed)
            expected = kept.pop(rank)[0]
        kept.append((frame_id, stamp_ns, embedding))
        insertion = cache.insert(np.float32(embedding), stamp_ns)
        assert insertion.evicted_frame_id == expected
        assert cache.retained.ids.tolist() == [k[0] for k in kept]
        assert cache.retained.stamps_ns.tolist() == [k[1] for k in kept]
        similarities = [cosine(a[2], b[2]) for a, b in zip(kept, kept[1:])]
        np.testing.assert_allclose(cache.retained.similarities, similarities, atol=1e-9)


@pytest.mark.parametrize('pin_first', [False, True])
def test_still_scene_leaves_oldest_first_under_semantic_eviction(pin_first):
    layout = CacheLayout(prompt_slots=0, kv_slots=4, slots_per_frame=1, scratch_slots=0)
    cache = KVCache(layout, make_eviction_policy('semantic'), 1536, pin_first)
    noise = np.random.default_rng(0).normal(size=1536).astype(np.float32)
    evicted = [cache.insert(noise, stamp).evicted_frame_id for stamp in range(8)]
    first = 1 + pin_first
    assert evicted == [None] * 4 + list(range(first, first + 4))


def test_semantic_eviction_keeps_the_frames_that_differ():
    layout = CacheLayout(prompt_slots=0, kv_slots=4, slots_per_frame=1, scratch_slots=0)
    cache = KVCache(layout, make_eviction_policy('semantic'), 4)
    scenes = np.eye(4, dtype=np.float32)
    for stamp, scene in enumerate([0, 1, 1, 1, 1, 2, 2, 2, 3]):
        cache.insert(scenes[scene], stamp)
    assert cache.retained.stamps_ns.tolist() == [0, 4, 7, 8]


def test_uniform_eviction_spreads_over_the_whole_stream():
    layout = CacheLayout(prompt_slots=0, kv_slots=9, slots_per_frame=1, scratch_slots=0)
    cache = KVCache(layout, make_eviction_policy('uniform'), 1)
    for stamp in range(1001):
        cache.insert(np.ones(1, np.float32), stamp)
    gaps = np.diff(cache.retained.stamps_ns)
    assert cache.retained.stamps_ns[0] == 0 and cache.retained.stamps_ns[-1] == 1000
    assert gaps[:-1].max() <= 4 * 1000 / 8


def test_zero_embedding_is_similar_to_nothing():
    frames = RetainedFrames(max_frames=3, embedding_size=2)
    for rank, embedding in enumerate([[0, 0], [0, 0], [1, 0]]):
        frames.prepare(np.float32(embedding), rank)
        frames.append(rank, rank)
    assert frames.similarities.tolist() == [0.0, 0.0]


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
def test_embedding_that_is_not_finite_is_refused(value):
    frames = RetainedFrames(max_frames=3, embedding_size=2)
    with pytest.raises(ShapeError, match='embedding must have finite elements'):
        frames.prepare(np.float32([1, value]), 0)


@pytest.mark.parametrize('scale', [1e-30, 1.0, 1e30])
def test_similarity_does_not_depend_on_the_embedding_scale(scale):
    frames = RetainedFrames(max_frames=2, embedding_size=2)
    for rank, embedding in enumerate([[3, 4], [3 * scale, 4 * scale]]):
        frames.prepare(np.float32(embedding), rank)
        frames.append(rank, rank)
    assert frames.similarities[0] == pytest.approx(1.0, abs=1e-6)


def test_unknown_policy_is_refused_with_the_known_names():
    with pytest.raises(ConfigError, match='eviction must be one of semantic, fifo, uniform'):
        make_eviction_policy('random')
