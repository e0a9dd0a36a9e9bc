"""The CUDA kernels without a GPU: their PTX run as NumPy, against the float64 reference."""

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from emulated_gpu import EmulatedGpu
import numpy as np
from ptx_machine import MachineError
import pytest

from vla_edge_ros.kernels import reference
from vla_edge_ros.kernels.cuda import layout
from vla_edge_ros.kernels.cuda.constants import (
    PREFILL_SCRATCH,
    STAGE_BYTES,
    STREAM_EXTRA,
    STREAM_SCRATCH,
)
from vla_edge_ros.lab.random_model import random_weights, TINY
from vla_edge_ros.policy.config import TransformerConfig

pytest.importorskip('numba_cuda', reason='no CUDA compiler; make kernels installs it')
SLOTS = 100
THREE_STAGES = STREAM_SCRATCH + STREAM_EXTRA + 3 * STAGE_BYTES
"""So little shared memory that a stream's ring is short."""
WIDE_STAGES = PREFILL_SCRATCH + 3 * STAGE_BYTES
"""The same of the stream of a prefill of TOY."""
TOY = replace(
    TINY, vocab_size=90, hidden_size=64, intermediate_size=1824, num_hidden_layers=2)


class Case(NamedTuple):
    """A device and a shape."""

    capability: tuple[int, int]
    processors: int
    config: TransformerConfig
    streams: bool = False
    room: int = THREE_STAGES


CASES = {
    'sm_75, many heads': Case((7, 5), 2, replace(
        TOY, num_attention_heads=9, num_key_value_heads=1, tie_word_embeddings=False)),
    'sm_90': Case((9, 0), 3, TOY, room=PREFILL_SCRATCH),
    'sm_90, prefill as a stream': Case((9, 0), 3, TOY, room=WIDE_STAGES),
    'stream in one block, odd heads': Case((9, 0), 1, replace(
        TOY, num_attention_heads=3, num_key_value_heads=1, tie_word_embeddings=False), True),
    'stream in three blocks, wide heads': Case(
        (9, 0), 3, replace(TOY, hidden_size=96, head_dim=64), True),
}  # fmt: skip
STREAMED_PREFILLS = ('sm_90, prefill as a stream', 'stream in three blocks, wide heads')
SMALL = {
    name: case._replace(config=replace(case.config, intermediate_size=160, num_hidden_layers=1))
    for name, case in CASES.items()
}
"""For what takes a while."""


def weights(config) -> dict[str, np.ndarray]:
    return random_weights(config, 1, 'bfloat16')


def make_engine(case: Case, **options):
    from vla_edge_ros.kernels.cuda.engine import Engine

    gpu = EmulatedGpu(case.capability, case.processors, case.room, **options)
    with pytest.MonkeyPatch.context() as patch:
        gpu.install(patch)
        if not case.streams:
            patch.setattr(layout, 'can_stream', lambda *_: False)
        return Engine(case.config, weights(case.config), 'bfloat16', SLOTS, 32)


def play(engine, config, prefills=(13,)) -> list[np.ndarray]:
    """Prefill and decode in turn, with slots in any order and some evicted."""
    rng = np.random.default_rng(0)
    free, context, arrays = list(rng.permutation(SLOTS)), np.empty(0, np.int32), []
    for tokens in prefills:
        slots = np.array([free.pop() for _ in range(tokens)], np.int32)
        x = rng.standard_normal((tokens, config.hidden_size)).astype(np.float32)
        outputs = np.zeros((config.num_hidden_layers, *x.shape), np.float32)
        hidden = engine.forward(x, context, slots, outputs)
        # Anew, without what the last layer makes of it: the same keys and values.
        engine.fill(x, context, slots)
        context = np.concatenate([context, slots])
        chosen = engine.decode_greedy(5, 3, context, np.array(free[-3:], np.int32), 16, 50)
        logits = engine.logits(hidden[-1].astype(np.float32), 7, 60)
        arrays += [outputs, hidden, chosen, logits, engine.embed(chosen)]
        leaving = rng.permutation(len(context))[: len(context) // 3]
        free += list(context[leaving])
        context = np.delete(context, leaving)
    return arrays


def check(case: Case, arrays, prefills=(13,)) -> None:
    config = case.config
    exact = reference.Engine(config, weights(config), 'bfloat16', SLOTS, 32)
    for ours, expected in zip(arrays, play(exact, config, prefills), strict=True):
        # Of a token it is the number that counts.
        tolerance = 0 if expected.dtype == np.int32 else 0.01
        np.testing.assert_allclose(ours, expected, atol=tolerance, rtol=0)


@cache
def play_in_lockstep(name: str) -> tuple[list[np.ndarray], set[str]]:
    engine = make_engine(CASES[name])
    return play(engine, CASES[name].config, (13, 34)), engine.device.launched


@pytest.mark.parametrize('name', CASES)
def test_prefill_and_decode_equal_the_reference_layer_by_layer(name):
    arrays, launched = play_in_lockstep(name)
    check(CASES[name], arrays, (13, 34))
    assert ('decode_stream' in launched) is CASES[name].streams
    assert ('prefill_stream' in launched) is (name in STREAMED_PREFILLS)


def test_no_kernel_is_left_out():
    from vla_edge_ros.kernels.cuda import program

    launched = set().union(*(play_in_lockstep(name)[1] for name in CASES))
    kernels = set(program.define((9, 0), 32))
    # Those of the encoder are launched in test_cuda_vision.py.
    assert launched == {name for name in kernels if not name.startswith('vision')}


@pytest.mark.parametrize('name', SMALL)
def test_no_order_of_threads_and_copies_changes_a_bit(name):
    case = SMALL[name]
    expected = play(make_engine(case), case.config)
    check(case, expected)
    for seed in (1, 2):
        arrays = play(make_engine(case, seed=seed), case.config)
        for ours, same in zip(arrays, expected, strict=True):
            np.testing.assert_array_equal(ours, same)


@pytest.mark.parametrize(
    ('name', 'kernel', 'right', 'wrong', 'seed'),
    [
        # Addresses that are off by a little, and far behind a matrix.
        ('sm_90', 'prefill_mlp', '[w+512]', '[w+496]', None),
        ('sm_90', 'decode_attention', '[vv+512]', '[vv+256]', None),
        ('sm_90', 'decode_qkv', '[w+512]', '[w+1048576]', None),
        # Operands of the tensor core that changed places.
        ('sm_90', 'prefill_attention', '{f0, f1, f2, f3}', '{f0, f2, f1, f3}', None),
        ('sm_75, many heads', 'decode_qkv', '{a0, a4}, {b0}', '{a4, a0}, {b0}', None),
        # No wait for a copy, none for the kernel ahead, no barrier.
        ('sm_90', 'decode_head', 'cp.async.wait_all;', '', None),
        ('sm_90', 'decode_mlp', 'griddepcontrol.wait;', '', None),
        ('sm_90', 'decode_mlp', 'bar.sync \t0;', '', None),
        ('sm_75, many heads', 'decode_mlp', 'bar.sync \t0;', '', 1),
        ('sm_90, prefill as a stream', 'prefill_stream', '[w+512]', '[w+528]', None),
        ('sm_90, prefill as a stream', 'prefill_stream', 'griddepcontrol.wait;', '', None),
        # Blocks that do not wait for each other in the middle.
        ('sm_90, prefill as a stream', 'prefill_stream', 'setp.lt.s32 p, d, 0;',
         'setp.lt.s32 p, d, d;', None),
        # A stage of the ring that is never given back, weights that nobody waits for.
        ('stream in one block, odd heads', 'decode_stream',
         '@lead mbarrier.arrive.shared::cta.b64 _, [bar+8];', '', None),
        ('stream in one block, odd heads', 'decode_stream',
         'mbarrier.try_wait.parity.shared::cta.b64 p, [bar], ph;', 'setp.eq.s32 p, ph, ph;', None),
    ],
)  # fmt: skip
def test_a_mistake_in_a_kernel_is_found(name, kernel, right, wrong, seed):
    case = SMALL[name]
    engine = make_engine(case, seed=seed, mistakes={kernel: (right, wrong)})
    with pytest.raises((AssertionError, MachineError)):
        check(case, play(engine, case.config))
