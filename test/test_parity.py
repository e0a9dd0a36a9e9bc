"""The decoder gives what Hugging Face gives: from golden files, and live where torch is."""

from pathlib import Path

import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.kernels import cpu, reference
from vla_edge_ros.lab.parity import Case, compare, COSINE_FLOOR, cosines
from vla_edge_ros.lab.random_model import random_weights, TINY
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.policy.config import TransformerConfig
from vla_edge_ros.policy.decoder import Transformer
from vla_edge_ros.policy.weights import load_weights

GOLDEN = Path(__file__).parent / 'golden'


@pytest.fixture(params=['grouped', 'tied_bfloat16'])
def golden(request):
    """Return configuration, weights and expected arrays as Hugging Face wrote them."""
    folder = GOLDEN / request.param
    config = TransformerConfig.from_hugging_face(folder)
    with np.load(folder / 'expected.npz') as expected:
        return config, load_weights(folder, config), dict(expected)


@pytest.fixture(params=[cpu, reference], ids=['cpu', 'reference'])
def backend(request):
    """Return one backend's module."""
    return request.param


def test_every_layer_and_the_logits_equal_the_golden_ones(golden, backend):
    config, weights, expected = golden
    token_ids = expected['token_ids']
    count = len(token_ids)
    transformer = Transformer(config, weights, backend, 60)
    slots = np.random.default_rng(0).permutation(60)[:count].astype(np.int32)
    layers = np.empty(expected['layers'].shape, np.float32)
    hidden = transformer.prefill(transformer.embed(token_ids), slots, slots[:0], layers)
    logits = np.stack([transformer.logits(row) for row in hidden])
    for actual, name in ((layers, 'layers'), (hidden, 'hidden'), (logits, 'logits')):
        assert cosines(actual, expected[name]).min() >= 1 - 1e-9
        largest = np.abs(expected[name]).max()
        np.testing.assert_allclose(actual, expected[name], rtol=0, atol=1e-5 * largest)


def test_greedy_tokens_equal_the_golden_ones(golden, backend):
    config, weights, expected = golden
    token_ids, greedy = expected['token_ids'], expected['greedy']
    count = len(token_ids)
    transformer = Transformer(config, weights, backend, count + len(greedy))
    slots = np.arange(count + len(greedy), dtype=np.int32)[::-1].copy()
    hidden = transformer.prefill(transformer.embed(token_ids), slots[:count], slots[:0])
    assert int(np.argmax(transformer.logits(hidden[-1]))) == greedy[0]
    steps = len(greedy) - 1
    tokens = transformer.decode_greedy(greedy[0], steps, slots[count:], slots[:count])
    np.testing.assert_array_equal(tokens, greedy[1:])
    assert len(set(greedy.tolist())) > 4, 'a continuation that repeats itself proves little'


@pytest.mark.parametrize('weights_dtype', ['float32', 'bfloat16'])
def test_live_hugging_face_agrees_on_the_default_shape(weights_dtype):
    pytest.importorskip('torch', reason='torch is not installed: make parity does')
    weights = random_weights(TINY, seed=7, weights_dtype=weights_dtype)
    (record,) = compare(Case('default shape', TINY, weights))
    assert record['passed'], record
    assert min(record['cosine'].values()) >= COSINE_FLOOR


def test_behind_a_filled_cache_the_compared_tokens_are_the_last_ones():
    pytest.importorskip('torch', reason='torch is not installed: make parity does')
    case = Case('tiny', TINY, random_weights(TINY, 3, 'bfloat16'))
    records = compare(case, lengths=(71, 0, 5))
    assert [record['slots'] for record in records] == [71, 0, 5]
    for record in records:
        assert record['passed']
        assert record['greedy_tokens']['before_a_tie'] == record['greedy_tokens']['of']


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--model', 'random:7b'], '--model must be a checkpoint folder or one of random:0.5b'),
        (['--model', 'nowhere'], '--model must be a folder with a config.json, got'),
        (['--slots', '-1'], '--slots must be numbers in 0..32000, apart by commas, got'),
        (['--slots', '31,x'], '--slots must be numbers in 0..32000, apart by commas, got'),
    ],
)
def test_wrong_options_of_parity_are_told_in_one_line(words, message, capsys):
    pytest.importorskip('torch', reason='torch is not installed: make parity does')
    assert cli.run(['parity', *words], StopRequest()) == 2
    assert message in capsys.readouterr().err


def test_a_chunk_of_hugging_face_chooses_the_tokens_of_ours():
    pytest.importorskip('torch', reason='torch is not installed: make parity does')
    from vla_edge_ros.lab.bench_chunk import check_tokens, OurChunk
    from vla_edge_ros.lab.torch_peer import HuggingFaceChunk

    tensors = random_weights(TINY, 4, 'bfloat16')
    x = np.random.default_rng(5).standard_normal((64, TINY.hidden_size), dtype=np.float32)
    peer = HuggingFaceChunk(TINY, tensors, 72)
    check_tokens({'ours': OurChunk(TINY, tensors, 72, 'bfloat16'), 'theirs': peer}, x)
    for first_row in (0, 512):
        peer.rewind(64)
        tokens = peer.decode_greedy(1, 8, first_row)
        assert min(tokens) >= first_row and len(tokens) == 8


def test_what_a_peer_cannot_do_is_told_and_the_others_are_timed():
    torch = pytest.importorskip('torch', reason='torch is not installed: make parity does')
    from vla_edge_ros.lab.gpu_peer import measure_peers, NOT_COMPILED

    found = measure_peers(TINY, random_weights(TINY, 4, 'bfloat16'), 40, 32, 8, 2, device='cpu')
    assert found['versions']['torch'] == torch.__version__
    eager, graph, compiled = found['chunk_ms'].values()
    assert eager['max'] >= eager['median'] > 0 and compiled == NOT_COMPILED
    assert torch.cuda.is_available() or graph.startswith('not run: ')
