"""The network as trained and the policy as run are the same function."""

import json
import sys

import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.lab.train.dataset import sample_histories
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy
from vla_edge_ros.policy.policy_config import PolicyConfig

FRAMES = 14
SWITCH = 9
INSTRUCTIONS = ('reach the red cube', 'Could you follow the yellow box, please?')


@pytest.mark.parametrize('eviction', ['semantic', 'fifo', 'uniform'])
def test_trained_network_and_runtime_choose_the_same_tokens_through_evictions(eviction):
    """One stream longer than the cache, with a new instruction in the middle."""
    torch = pytest.importorskip('torch', reason='PyTorch is needed to run the training network')
    from safetensors.torch import load_file

    from vla_edge_ros.lab.train.batches import standardised
    from vla_edge_ros.lab.train.model import PolicyNetwork, Stream

    config = PolicyConfig.load(DEFAULT_POLICY)
    policy = Policy.load(eviction=eviction)
    rng = np.random.default_rng(5)
    images = rng.integers(0, 256, (FRAMES, config.image_height, config.image_width, 3), np.uint8)
    states = rng.uniform(-0.2, 0.2, (FRAMES, config.proprioception_dim)).astype(np.float32)
    history = np.zeros((1, FRAMES, config.max_frames - 1), np.int64)
    lengths = np.zeros((1, FRAMES), np.int64)
    tokens = np.zeros((1, FRAMES, config.decode_tokens), np.int64)
    retained, evicted = [], 0
    for t in range(FRAMES):
        if t in (0, SWITCH):
            policy.set_instruction(INSTRUCTIONS[int(t == SWITCH)])
        observation = policy.observe(images[t], states[t], t * 33_000_000)
        if observation.evicted_frame_id is not None:
            retained.remove(observation.evicted_frame_id - 1)
            evicted += 1
        history[0, t, :len(retained)] = retained
        lengths[0, t] = len(retained)
        retained.append(t)
        tokens[0, t] = policy.act().tokens
    assert evicted == FRAMES - config.max_frames

    network = PolicyNetwork(config)
    network.load_state_dict(load_file(DEFAULT_POLICY / 'model.safetensors'), strict=False)
    network.float().eval()
    prompt_ids = np.zeros((1, 2, config.prompt_slots), np.int64)
    prompt_lengths = np.zeros((1, 2), np.int64)
    for i, text in enumerate(INSTRUCTIONS):
        ids = policy.tokenize(text)
        prompt_ids[0, i, :len(ids)] = ids
        prompt_lengths[0, i] = len(ids)
    decode_ids = np.roll(tokens, 1, axis=2)
    decode_ids[..., 0] = config.begin_token
    stream = Stream(*(torch.from_numpy(a) for a in (
        images[None], states[None], prompt_ids, prompt_lengths,
        (np.arange(FRAMES) >= SWITCH).astype(np.int64)[None], history, lengths, decode_ids)))
    with torch.no_grad():
        logits = network(stream, standardised(stream.images, config))
    chosen = logits.argmax(-1).numpy() + config.action_token_offset
    best = logits.max(-1).values
    given = logits.gather(
        -1, torch.from_numpy(tokens - config.action_token_offset)[..., None])[..., 0]
    # Where rounding decides between two equal logits either is right.
    assert (best - given).max() < 1e-3
    assert (chosen == tokens).mean() > 0.97


def test_training_caches_never_hold_more_than_their_capacity_and_keep_time_order():
    """The random caches of training obey the rule of the real one."""
    history, lengths = sample_histories(np.random.default_rng(0), 200, 16, 8)
    assert lengths.max() == 7
    for rows, counts in zip(history, lengths):
        for t, (row, count) in enumerate(zip(rows, counts)):
            retained = row[:count].tolist()
            assert retained == sorted(set(retained))
            assert all(frame < t for frame in retained)
            assert not count or retained[-1] == t - 1


def test_an_interrupted_training_run_ends_with_the_weights_of_an_uninterrupted_one(tmp_path):
    """Films are kept, and the optimizer goes on from its saved moments."""
    pytest.importorskip('torch', reason='PyTorch is needed to train')
    from vla_edge_ros.lab.train.train import train, TrainSettings

    settings = TrainSettings(
        streams=6, validation=2, frames=3, steps=4, batch=2, save_every=3, seed=3)
    arguments = (tmp_path / 'films', 'cpu', 1, StopRequest())
    train(settings, tmp_path / 'straight', *arguments)
    # The state of step 3 is still there: the second run takes up from it.
    train(settings, tmp_path / 'resumed', *arguments)
    straight = (tmp_path / 'straight' / 'model.safetensors').read_bytes()
    assert (tmp_path / 'resumed' / 'model.safetensors').read_bytes() == straight
    assert json.loads((tmp_path / 'resumed' / 'training.json').read_text())['first_step'] == 3


def test_missing_torch_is_one_line_that_works_in_this_checkout(tmp_path, monkeypatch, capsys):
    """The package is not on any index, so that its extra cannot be installed by name."""
    monkeypatch.setitem(sys.modules, 'torch', None)
    words = ['train', '--out', str(tmp_path / 'out'), '--work', str(tmp_path / 'work')]
    assert cli.run(words, StopRequest()) == 2
    error = capsys.readouterr().err
    assert '.venv/bin/pip install -c requirements/constraints.txt torch' in error
    assert error.count('\n') == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize('option', ['--out', '--work'])
def test_folder_that_cannot_be_written_to_is_refused_before_the_films(option, monkeypatch, capsys):
    """Hours later would be late."""
    monkeypatch.setattr('vla_edge_ros.lab.train.train.train', None)
    assert cli.run(['train', option, '/proc/none'], StopRequest()) == 2
    assert capsys.readouterr().err.startswith(f'vla-edge: {option} must be a folder that can be ')
