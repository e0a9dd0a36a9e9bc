"""The decoder over cache slots: fast engine against the float64 one, under every slot history."""

import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError, ShapeError
from vla_edge_ros.kernels import cpu, reference
from vla_edge_ros.kernels.memory_plan import total_bytes
from vla_edge_ros.lab.random_model import random_weights
from vla_edge_ros.policy.config import TransformerConfig
from vla_edge_ros.policy.decoder import Transformer

SLOTS = 150
TOLERANCE = 3e-5  # of hidden states near 1

# Awkward on purpose: no size is a multiple of a register, three queries share a key head.
AWKWARD = TransformerConfig(61, 36, 52, 3, 6, 2, 10, 1e-6, 1e6, False)
# A single key head, head_dim wider than a value panel, tied head.
SINGLE = TransformerConfig(90, 64, 33, 2, 2, 1, 40, 1e-5, 1e4, True)


@pytest.fixture(params=[(AWKWARD, 'float32'), (SINGLE, 'bfloat16')], ids=['awkward', 'single'])
def pair(request):
    """Return the fast decoder and the reference, with the same weights and an empty cache."""
    config, weights_dtype = request.param
    weights = random_weights(config, seed=5)
    return [
        Transformer(config, weights, kernels, SLOTS, 32, weights_dtype)
        for kernels in (cpu, reference)
    ]


def slots(*values):
    return np.array(values, np.int32)


def embeddings_of(transformer, count, seed):
    rng = np.random.default_rng(seed)
    return transformer.embed(rng.integers(transformer.config.vocab_size, size=count))


def prefill_both(pair, count, write_slots, context_slots, seed=0):
    """Prefill the same into both; every layer, the hidden state and logits must agree."""
    fast, exact = pair
    embeddings = embeddings_of(fast, count, seed)
    shape = (fast.config.num_hidden_layers, count, fast.config.hidden_size)
    layers, exact_layers = np.empty(shape, np.float32), np.empty(shape)
    hidden = fast.prefill(embeddings, write_slots, context_slots, layers)
    expected = exact.prefill(embeddings, write_slots, context_slots, exact_layers)
    limit = TOLERANCE * np.abs(exact_layers).max()
    np.testing.assert_allclose(layers, exact_layers, rtol=0, atol=limit)
    np.testing.assert_allclose(hidden, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())
    logits, exact_logits = fast.logits(hidden[-1]), exact.logits(expected[-1])
    np.testing.assert_allclose(
        logits, exact_logits, rtol=0, atol=TOLERANCE * np.abs(exact_logits).max()
    )
    return hidden


@pytest.mark.parametrize('count', [1, 2, 3, 31, 32])
def test_one_prefill_of_any_length_matches_the_reference(pair, count):
    write_slots = np.random.default_rng(count).permutation(SLOTS)[:count].astype(np.int32)
    prefill_both(pair, count, write_slots, slots())


def test_holes_reuse_and_any_order_match_the_reference(pair):
    """Random histories of insertions and evictions, never the same context twice."""
    rng = np.random.default_rng(8)
    context = slots()
    for round_ in range(25):
        kept = np.sort(rng.permutation(len(context))[: rng.integers(len(context) + 1)])
        context = context[kept] if len(context) > 100 or round_ % 3 == 0 else context
        free = np.setdiff1d(np.arange(SLOTS), context)
        count = int(rng.integers(1, 33))
        write_slots = rng.permutation(free)[:count].astype(np.int32)
        count = len(write_slots)
        prefill_both(pair, count, write_slots, context, seed=round_)
        context = np.concatenate([context, write_slots])


@pytest.mark.parametrize('rewrites', [((9, 4),), ((9,), (4,)), ((2,), (9,), (4,))])
def test_a_slot_written_again_is_read_anew(pair, rewrites):
    """Same context list, other contents: the trap of a workspace that trusts the list."""
    context, query = slots(4, 9, 2), slots(11)
    prefill_both(pair, 3, context, slots(), seed=1)
    before = prefill_both(pair, 1, query, context, seed=2)
    for seed, (slot, *seen) in enumerate(rewrites, start=3):
        prefill_both(pair, 1, slots(slot), slots(*seen), seed=seed)
    after = prefill_both(pair, 1, query, context, seed=2)
    assert np.abs(after - before).max() > 1e-3


def test_the_same_context_in_another_order_is_another_context(pair):
    prefill_both(pair, 3, slots(0, 1, 2), slots(), seed=1)
    forward = prefill_both(pair, 1, slots(5), slots(0, 1, 2), seed=2)
    backward = prefill_both(pair, 1, slots(5), slots(2, 1, 0), seed=2)
    assert np.abs(forward - backward).max() > 1e-3


def test_position_is_rank_not_slot(pair):
    low = prefill_both(pair, 5, slots(0, 1, 2, 3, 4), slots())
    scattered = prefill_both(pair, 5, slots(140, 3, 77, 20, 149), slots())
    np.testing.assert_array_equal(low, scattered)


def test_pieces_give_the_same_as_one_prefill(pair):
    fast, _ = pair
    embeddings = embeddings_of(fast, 20, seed=6)
    order = np.arange(20, dtype=np.int32)
    whole = fast.prefill(embeddings, order, order[:0])
    pieces = [
        fast.prefill(embeddings[a:b], order[a:b] + 50, order[:a] + 50)
        for a, b in ((0, 7), (7, 8), (8, 20))
    ]
    np.testing.assert_allclose(np.concatenate(pieces), whole, rtol=0, atol=TOLERANCE * 10)


def test_decode_is_a_prefill_of_one_token(pair):
    for transformer in pair:
        order = np.arange(6, dtype=np.int32)
        transformer.prefill(embeddings_of(transformer, 5, 1), order[:5], order[:0])
        one = transformer.prefill(transformer.embed([17]), order[5:], order[:5])
        np.testing.assert_array_equal(transformer.decode(17, 5, order[:5]), one[0])


def test_greedy_decode_chooses_what_single_steps_choose(pair):
    fast, exact = pair
    order = np.arange(SLOTS, dtype=np.int32)[::-1].copy()
    embeddings = embeddings_of(fast, 20, 3)
    chosen = []
    for transformer in pair:
        transformer.prefill(embeddings, order[:20], order[:0])
        chosen.append(transformer.decode_greedy(7, 12, order[20:40], order[:20], 10, 45))
    token, stepwise = 7, []
    for step in range(12):
        hidden = fast.decode(token, order[20 + step], order[: 20 + step])
        token = 10 + int(np.argmax(fast.logits(hidden, 10, 45)))
        stepwise.append(token)
    np.testing.assert_array_equal(chosen[0], stepwise)
    np.testing.assert_array_equal(chosen[0], chosen[1])
    assert chosen[0].dtype == np.int32
    assert all(10 <= token < 55 for token in stepwise)


def test_a_row_range_of_the_head_is_a_slice_of_all_rows(pair):
    for transformer in pair:
        hidden = transformer.decode(3, 0, slots())
        whole = transformer.logits(hidden)
        np.testing.assert_allclose(transformer.logits(hidden, 13, 29), whole[13:42], rtol=1e-6)
        assert len(whole) == transformer.config.vocab_size


def test_results_are_the_callers_own(pair):
    fast, _ = pair
    first = fast.decode(3, 0, slots())
    logits = fast.logits(first)
    kept = first.copy(), logits.copy()
    fast.logits(fast.decode(5, 1, slots(0)))
    np.testing.assert_array_equal(first, kept[0])
    np.testing.assert_array_equal(logits, kept[1])


def test_same_history_gives_bitwise_the_same(pair):
    fast, _ = pair
    order = np.arange(40, dtype=np.int32)
    embeddings = embeddings_of(fast, 32, 9)
    results = []
    for _ in range(2):
        hidden = fast.prefill(embeddings, order[:32], order[:0])
        tokens = fast.decode_greedy(1, 8, order[32:], order[:32])
        results.append((hidden.tobytes(), tokens.tobytes()))
    assert results[0] == results[1]


def test_the_plan_is_exactly_what_is_held(pair):
    fast, _ = pair
    engine = fast._engine
    arrays = {'embedding': engine.weights.embedding}
    for group in (engine.weights, engine.buffers):
        for name, array in zip(group._fields, group):
            if name != 'eps' and not (name == 'head' and array is engine.weights.embedding):
                arrays[f'{type(group).__name__}.{name}'] = array
    del arrays['embedding']
    plan = fast.memory_plan()
    assert sorted((a.shape, a.dtype.name) for a in arrays.values()) == sorted(
        (b.shape, b.dtype) for b in plan
    )
    assert total_bytes(plan) == sum(array.nbytes for array in arrays.values())


def test_auto_holds_weights_as_the_checkpoint_does():
    for stored in ('float32', 'bfloat16'):
        weights = random_weights(AWKWARD, weights_dtype=stored)
        assert Transformer(AWKWARD, weights, cpu, 4).weights_dtype == stored


def test_an_unknown_weights_dtype_is_refused():
    with pytest.raises(ConfigError, match='weights_dtype must be one of auto'):
        Transformer(AWKWARD, random_weights(AWKWARD), cpu, 4, weights_dtype='int8')


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda t: t.embed([61]), 'token_ids must be'),
        (lambda t: t.embed([-1]), 'token_ids must be'),
        (lambda t: t.prefill(np.zeros((2, 35), np.float32), slots(0, 1), slots()), 'embeddings'),
        (lambda t: t.prefill(np.zeros((0, 36), np.float32), slots(), slots()), '1..4 tokens'),
        (lambda t: t.prefill(np.zeros((5, 36), np.float32), slots(), slots()), '1..4 tokens'),
        (lambda t: t.prefill(t.embed([1]), slots(0, 1), slots()), r'write_slots shape'),
        (lambda t: t.prefill(t.embed([1]), np.zeros(1, np.int64), slots()), 'write_slots dtype'),
        (lambda t: t.prefill(t.embed([1]), slots(10), slots()), 'slots must be in 0..9'),
        (lambda t: t.prefill(t.embed([1]), slots(0), slots(-1)), 'slots must be in 0..9'),
        (lambda t: t.prefill(t.embed([1, 2]), slots(3, 3), slots()), 'distinct'),
        (lambda t: t.prefill(t.embed([1]), slots(3), slots(2, 3)), 'distinct'),
        (lambda t: t.prefill(t.embed([1]), slots(3), slots(2, 2)), 'distinct'),
        (lambda t: t.logits(np.zeros(35, np.float32)), 'hidden shape'),
        (lambda t: t.logits(np.zeros(36, np.float32), 60, 2), 'range of rows'),
        (lambda t: t.logits(np.zeros(36, np.float32), 3, 0), 'range of rows'),
        (lambda t: t.decode_greedy(61, 1, slots(0), slots()), 'first_token'),
        (lambda t: t.decode_greedy(1, 2, slots(0), slots()), 'num_tokens'),
        (lambda t: t.decode_greedy(1, 1, slots(0), slots(0)), 'distinct'),
    ],
)
def test_what_would_read_outside_a_buffer_is_refused(call, message):
    transformer = Transformer(AWKWARD, random_weights(AWKWARD), reference, 10, max_tokens=4)
    with pytest.raises(ShapeError, match=message):
        call(transformer)
