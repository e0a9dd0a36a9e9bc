"""The CUDA engine on a GPU: the float64 reference, evictions, equal bits, constant memory."""

from dataclasses import replace

import numpy as np
import pytest
from same_choice import check_same_choice, drawn

from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.kernels import reference
from vla_edge_ros.kernels.cuda.driver import Device
from vla_edge_ros.lab.random_model import QWEN_0_5B, QWEN_1_5B, random_weights, TINY
from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy

pytestmark = pytest.mark.gpu
SHAPES = {
    'tiny': TINY,
    '0.5b': replace(QWEN_0_5B, num_hidden_layers=2, vocab_size=1000),
    '1.5b': replace(QWEN_1_5B, num_hidden_layers=2, vocab_size=1000),
    'untied': replace(TINY, tie_word_embeddings=False),
    'many heads': replace(TINY, num_attention_heads=12, num_key_value_heads=1),
    'odd heads': replace(TINY, num_attention_heads=3, num_key_value_heads=1),
}
SLOTS = 300


@pytest.fixture(autouse=True, scope='module')
def gpu():
    try:
        device = Device()
    except BackendUnavailable as error:
        pytest.skip(f'no GPU: {error.value}')
    device.close()


@pytest.fixture(params=SHAPES, scope='module')
def engines(request):
    from vla_edge_ros.kernels.cuda.engine import Engine

    config = SHAPES[request.param]
    weights = random_weights(config, 1, 'bfloat16')
    fast = Engine(config, weights, 'bfloat16', SLOTS, 32)
    yield config, fast, reference.Engine(config, weights, 'bfloat16', SLOTS, 32)
    fast.close()


def cosine(a, b):
    a, b = a.astype(np.float64), b.astype(np.float64)
    return (a * b).sum(-1) / np.linalg.norm(a, axis=-1) / np.linalg.norm(b, axis=-1)


def test_a_stream_with_evictions_equals_the_reference_layer_by_layer(engines):
    config, fast, exact = engines
    rng = np.random.default_rng(0)
    free, context = list(rng.permutation(SLOTS)), np.empty(0, np.int32)
    for tokens in (5, 32, 1, 32, 48, 17, 32):
        slots = np.array([free.pop() for _ in range(tokens)], np.int32)
        x = rng.standard_normal((tokens, config.hidden_size)).astype(np.float32)
        outputs = np.zeros((config.num_hidden_layers, *x.shape), np.float32)
        expected = outputs.astype(np.float64)
        traced = fast.forward(x, context, slots, outputs)
        hidden = exact.forward(x, context, slots, expected)
        assert cosine(outputs, expected).min() > 0.99999
        assert cosine(traced, hidden).min() > 0.99999
        np.testing.assert_array_equal(fast.forward(x, context, slots), traced)
        context = np.concatenate([context, slots])
        scratch = np.array(free[-8:], np.int32)
        arguments = (5, 8, context, scratch, 16, config.vocab_size - 30)
        chosen = fast.decode_greedy(*arguments)
        np.testing.assert_array_equal(chosen, exact.decode_greedy(*arguments))
        np.testing.assert_array_equal(chosen, fast.decode_greedy(*arguments))
        leaving = rng.permutation(len(context))[: len(context) // 3]
        free += list(context[leaving])
        context = np.delete(context, leaving)


def test_embeddings_and_logits_equal_the_reference(engines):
    config, fast, exact = engines
    ids = np.arange(40) * 17 % config.vocab_size
    np.testing.assert_allclose(fast.embed(ids), exact.embed(ids), atol=2.0**-24)
    hidden = np.random.default_rng(1).standard_normal(config.hidden_size).astype(np.float32)
    for first, count in ((0, config.vocab_size), (37, 100), (config.vocab_size - 1, 1)):
        logits = fast.logits(hidden, first, count)
        assert np.abs(logits - exact.logits(hidden, first, count)).max() < 2e-3


def test_a_thousand_chunks_change_no_memory_and_no_token(engines):
    config, fast, _ = engines
    x = np.random.default_rng(2).standard_normal((32, config.hidden_size)).astype(np.float32)
    context, slots, scratch = (
        np.arange(a, b, dtype=np.int32) for a, b in ((0, 200), (200, 232), (232, 240)))
    full = np.concatenate([context, slots])

    def chunk():
        fast.forward(x, context, slots)
        return fast.decode_greedy(1, 8, full, scratch, 0, config.vocab_size)

    first, free = chunk(), fast.device.memory()[0]
    for _ in range(1000):
        np.testing.assert_array_equal(chunk(), first)
    assert fast.device.memory()[0] == free


def test_the_embedded_policy_chooses_on_1000_frames_the_tokens_of_the_cpu_but_for_ties():
    policies = [Policy.load(DEFAULT_POLICY, backend=name) for name in ('cuda', 'cpu')]
    config, rng = policies[0].config, np.random.default_rng(3)
    for policy in policies:
        policy.set_instruction('follow the red cube')
    same = 0
    for frame in range(1000):
        image = drawn(frame, config.image_height, config.image_width)
        joints = rng.uniform(-0.2, 0.2, 2)
        for policy in policies:
            policy.observe(image, joints, frame)
        same += check_same_choice(*policies, always=frame % 50 == 0)
    assert same >= 950
