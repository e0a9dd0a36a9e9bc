"""The streaming policy: what it observes, decodes, refuses and forgets."""

from concurrent.futures import ThreadPoolExecutor
import json
import shutil
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from tokenizers import Tokenizer

from vla_edge_ros.errors import ConfigError, ShapeError, WeightsError
from vla_edge_ros.policy import policy as policy_module
from vla_edge_ros.policy.action_tokens import ActionTokenizer
from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.policy.vision import resize_rgb8, sincos_positions, standardise
from vla_edge_ros.telemetry.stages import Stage


@pytest.fixture(scope='module')
def loaded():
    """Return the default policy on the CPU."""
    return Policy.load(backend='cpu')


@pytest.fixture
def policy(loaded):
    """Return the default policy with an empty stream and an instruction."""
    loaded.reset()
    loaded.set_instruction('reach the red cube')
    return loaded


@pytest.fixture
def checkpoint(tmp_path):
    """Return a copy of the default checkpoint to damage."""
    folder = tmp_path / 'policy'
    shutil.copytree(DEFAULT_POLICY, folder)
    return folder


@pytest.fixture
def fake_gpu(monkeypatch):
    """Return a GPU that can be asked for its memory; nothing can be made on it."""
    from vla_edge_ros.kernels.cuda import engine

    gpu = SimpleNamespace(memory_bytes=10**9)
    monkeypatch.setattr(engine, 'Gpu', lambda: gpu)
    monkeypatch.setattr(engine, 'Device', None)
    return gpu


def frames(count, seed=0):
    """Return random pictures of the policy's size."""
    return np.random.default_rng(seed).integers(0, 256, (count, 80, 96, 3), np.uint8)


def edit_config(folder, **changes):
    """Change keys of the ``vla`` section in place."""
    path = folder / 'config.json'
    raw = json.loads(path.read_text())
    raw['vla'].update(changes)
    path.write_text(json.dumps(raw))


def test_a_frame_costs_the_configured_slots_and_reports_every_stage(policy):
    """32 slots a frame: 30 patches, the pooled token, proprioception."""
    before = len(policy.cache.context_slots)
    observation = policy.observe(frames(1)[0], np.zeros(2), 1)
    assert len(policy.cache.context_slots) - before == policy.config.slots_per_frame == 32
    assert set(observation.stage_ns) == {Stage.PREPROCESS, Stage.VISION, Stage.PREFILL}
    assert all(spent > 0 for spent in observation.stage_ns.values())


def test_acting_leaves_no_trace_in_the_stream(policy):
    """Decode tokens are scratch: acting twice gives the same chunk."""
    policy.observe(frames(1)[0], np.zeros(2), 7)
    first, second = policy.act(), policy.act()
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert first.observation_stamp_ns == 7
    assert first.values.shape == (3, 2)
    assert np.abs(first.values).max() <= 1.0


def test_the_cache_forgets_one_frame_for_each_new_one_when_full(policy):
    """Eight frames fit; the ninth evicts."""
    evicted = [
        policy.observe(image, np.zeros(2), i).evicted_frame_id
        for i, image in enumerate(frames(10))]
    assert evicted[:8] == [None] * 8
    assert None not in evicted[8:]
    assert policy.cache.num_frames == 8


def test_earlier_frames_change_what_is_decoded(policy):
    """The policy reads a stream, not single pictures."""
    images = frames(3, seed=3)
    policy.observe(images[2], np.zeros(2), 1)
    alone = policy.act().tokens
    policy.reset()
    for i, image in enumerate(images):
        policy.observe(image, np.zeros(2), i)
    assert (policy.act().tokens != alone).any()


def test_a_new_instruction_keeps_the_stream(policy):
    """Only the prompt is read again."""
    for i, image in enumerate(frames(3)):
        policy.observe(image, np.zeros(2), i)
    policy.set_instruction('now follow the blue block')
    assert policy.cache.num_frames == 3
    assert policy.act().tokens.shape == (8,)


def test_a_stamp_that_runs_backwards_begins_a_new_stream(policy):
    """A bag that starts over must not be mixed with its own past."""
    for stamp in (100, 200, 50):
        policy.observe(frames(1)[0], np.zeros(2), stamp)
    assert policy.cache.num_frames == 1


def test_the_same_stream_gives_bitwise_the_same_tokens(policy):
    """Determinism of the whole path."""
    runs = []
    for _ in range(2):
        policy.reset()
        tokens = []
        for i, image in enumerate(frames(10, seed=9)):
            policy.observe(image, np.full(2, 0.01 * i), i)
            tokens.append(policy.act().tokens)
        runs.append(np.stack(tokens))
    np.testing.assert_array_equal(*runs)


def test_every_backend_decodes_what_the_float64_reference_decodes():
    """The reference backend is slow but right."""
    tokens = []
    for backend in ('cpu', 'reference'):
        policy = Policy.load(backend=backend)
        policy.set_instruction('touch the green cube')
        for i, image in enumerate(frames(2, seed=4)):
            policy.observe(image, np.zeros(2), i)
        tokens.append(policy.act().tokens)
    np.testing.assert_array_equal(*tokens)


@pytest.mark.parametrize('text', ['', '   '])
def test_an_empty_instruction_is_refused_and_the_old_one_stays(policy, text):
    """The error names the field."""
    with pytest.raises(ConfigError, match='instruction must not be empty'):
        policy.set_instruction(text)
    assert policy.instruction == 'reach the red cube'


def test_an_instruction_longer_than_the_prompt_slots_is_refused(policy):
    """The error says how many tokens fit."""
    with pytest.raises(ConfigError, match='must fit 24 prompt tokens'):
        policy.set_instruction('reach the red cube ' * 10)


@pytest.mark.parametrize(('text', 'rule'), [
    (' ', 'must not be empty'),
    (None, 'must not be empty'),
    ('reach the red cube ' * 10, 'must fit 24 prompt tokens, this one has 4'),
    ('cube ' * 1_000_000, 'must fit 24 prompt tokens, this one has 5000000 characters'),
], ids=['blank', 'none', 'long', 'book'])
def test_checking_an_instruction_names_what_is_wrong_and_changes_nothing(policy, text, rule):
    """As short as can be shown in one line of a log."""
    with pytest.raises(ConfigError, match=f'^instruction {rule}') as caught:
        policy.check_instruction(text)
    assert len(str(caught.value)) < 200
    assert policy.instruction == 'reach the red cube'
    policy.check_instruction('touch the green cube')
    assert policy.instruction == 'reach the red cube'


def test_instructions_are_checked_while_another_thread_takes_one_up(policy):
    """The tokenizer is shared, and locked by nobody."""
    texts = [f'reach the red cube {i}' for i in range(200)]
    with ThreadPoolExecutor(4) as pool:
        checks = [pool.submit(policy.check_instruction, text) for text in texts]
        for text in texts[:20]:
            policy.set_instruction(text)
        assert [check.result() for check in checks] == [None] * len(texts)


def test_truncation_and_padding_saved_with_the_tokenizer_change_no_prompt(checkpoint, policy):
    """An instruction cut short would be another instruction."""
    path = checkpoint / 'tokenizer.json'
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.enable_truncation(2)
    tokenizer.enable_padding(length=20)
    tokenizer.save(str(path))
    other = Policy.load(checkpoint)
    text = 'reach the red cube'
    np.testing.assert_array_equal(other.tokenize(text), policy.tokenize(text))


def test_loading_a_policy_says_nothing():
    """Libraries advertise on stderr, which is the log of a node."""
    program = (
        'import logging, sys\n'
        'from vla_edge_ros.policy.policy import Policy\n'
        'Policy.load().set_instruction("reach the red cube")\n'
        'assert "transformers" not in sys.modules and not logging.getLogger().handlers\n')
    done = subprocess.run(
        [sys.executable, '-c', program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, '', '')


def test_case_does_not_change_the_prompt(policy):
    """People shout at robots."""
    np.testing.assert_array_equal(
        policy.tokenize('REACH the Red CUBE'), policy.tokenize('reach the red cube'))


@pytest.mark.parametrize('state', [np.zeros(3), np.array([0.0, np.nan]), np.array([3e38, 0.0])])
def test_impossible_proprioception_is_refused_before_the_stream_changes(policy, state):
    """A broken encoder must not poison the cache."""
    with pytest.raises(ShapeError, match='proprioception'):
        policy.observe(frames(1)[0], state, 1)
    assert policy.cache.num_frames == 0


@pytest.mark.parametrize('image', [
    np.zeros((80, 96), np.uint8), np.zeros((80, 96, 4), np.uint8),
    np.zeros((80, 96, 3), np.float32), np.zeros((0, 96, 3), np.uint8)])
def test_an_impossible_picture_is_refused(policy, image):
    """Grey, four channels, float, empty."""
    with pytest.raises(ShapeError, match='image must be uint8'):
        policy.observe(image, np.zeros(2), 1)


def test_a_picture_of_another_size_is_read_as_its_resized_copy(policy):
    """The camera needs no setting to fit the policy."""
    large = np.random.default_rng(2).integers(0, 256, (160, 192, 3), np.uint8)
    policy.observe(large, np.zeros(2), 1)
    tokens = policy.act().tokens
    policy.reset()
    policy.observe(resize_rgb8(large, 96, 80), np.zeros(2), 1)
    np.testing.assert_array_equal(policy.act().tokens, tokens)


def test_acting_before_the_first_frame_is_refused(policy):
    """There is nothing to act on."""
    with pytest.raises(ConfigError, match='frames must be observed'):
        policy.act()


@pytest.mark.parametrize('name', ['config.json', 'model.safetensors', 'tokenizer.json'])
def test_a_missing_file_is_named(checkpoint, name):
    """Each of the three files is needed."""
    (checkpoint / name).unlink()
    with pytest.raises(WeightsError, match='must be'):
        Policy.load(checkpoint)


@pytest.mark.parametrize('name', ['config.json', 'model.safetensors', 'tokenizer.json'])
def test_a_corrupt_file_is_one_clear_error(checkpoint, name):
    """Half a file is what a broken copy leaves."""
    path = checkpoint / name
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(WeightsError, match='must be'):
        Policy.load(checkpoint)


@pytest.mark.parametrize(('text', 'words'), [
    ('[1]', "config.json must be a JSON object, got 'list'"),
    ('null', "config.json must be a JSON object, got 'NoneType'"),
    ('{}', "config.json must have a section \"vla\", got 'NoneType'"),
    ('{"vla": [1]}', "config.json must have a section \"vla\", got 'list'"),
    ('{"vla": {', 'config.json must be readable JSON (Expecting property name'),
])
def test_a_configuration_of_another_form_is_one_line_with_what_it_is(checkpoint, text, words):
    """What is no JSON at all is named by its path."""
    path = checkpoint / 'config.json'
    path.write_text(text)
    with pytest.raises(WeightsError) as caught:
        PolicyConfig.load(checkpoint)
    assert str(caught.value).startswith(words) and '\n' not in str(caught.value)
    assert ('readable' in words) == str(caught.value).endswith(f'got {str(path)!r}')


@pytest.mark.parametrize(('changes', 'words'), [
    ({'bins': 10_000}, 'vla.action_token_offset plus 10000 bins must fit'),
    ({'patch_size': 17}, 'vla.image_width must be a multiple of 17'),
    ({'kv_slots': 100}, 'vla.kv_slots must be a multiple of the 32 slots'),
    ({'kv_slots': '256'}, 'vla.kv_slots must be an integer'),
    ({'step_ms': 0}, 'vla.step_ms must be > 0'),
    ({'action_low': [2.0, 2.0]}, 'vla.action_low must lie below'),
    ({'proprioception_std': [0.0, 1.0]}, 'vla.proprioception_std must be > 0'),
    ({'image_mean': [0.5, 'x', 0.5]}, 'vla.image_mean must be a list of numbers'),
    ({'surprise': 1}, 'vla.surprise is not a known key'),
    ({'image_std': [0.2, 0.2]}, 'vla.image_std must have 3 values'),
    ({'begin_token': 5000}, 'vla.begin_token must be below vocab_size'),
    ({'step_ms': 1e-9}, 'vla.step_ms must be at least a nanosecond'),
    ({'action_low': [float('-inf'), -1.0]}, 'vla.action_low must be finite'),
    ({'joint_names': ['one']}, 'vla.joint_names must have 2 values'),
])
def test_a_configuration_that_breaks_a_rule_is_named(checkpoint, changes, words):
    """Field, rule and value."""
    edit_config(checkpoint, **changes)
    with pytest.raises(ConfigError, match=words):
        Policy.load(checkpoint)


def test_a_configuration_that_does_not_fit_the_weights_is_refused(checkpoint):
    """The tensor that does not fit is named."""
    edit_config(checkpoint, vision_intermediate_size=128)
    with pytest.raises(WeightsError, match='vision.mlp.gate_proj.weight must have shape'):
        Policy.load(checkpoint)


def test_a_policy_over_its_memory_budget_is_refused_with_the_table(loaded):
    """The error comes first; below it every buffer is named, whose sum it compares."""
    needed_mb = sum(buffer.bytes for buffer in loaded.memory_plan) / 1e6
    with pytest.raises(ConfigError) as caught:
        Policy.load(memory_budget_mb=1.0)
    first, *table = str(caught.value).splitlines()
    rule = f'must be >= the {needed_mb:.1f} MB of this policy'
    assert first == f'memory_budget_mb {rule}, got 1.0'
    assert any(row.startswith('vision.tokens') for row in table)
    with pytest.raises(ConfigError, match='memory_budget_mb must be'):
        Policy.load(memory_budget_mb=needed_mb - 0.01)
    assert Policy.load(memory_budget_mb=needed_mb + 0.01).config == loaded.config


@pytest.mark.parametrize(('options', 'words'), [
    ({'memory_budget_mb': 1.0}, 'memory_budget_mb must be >= the'),
    ({'vram_budget_mb': 1.0}, 'vram_budget_mb must be >= the'),
    ({'weights_dtype': 'int8'}, 'weights_dtype must be one of'),
])
def test_no_weight_is_read_for_a_policy_that_is_refused(monkeypatch, fake_gpu, options, words):
    """The header of the file tells all that is needed; the GPU is not touched either."""
    monkeypatch.setattr(policy_module, 'read_tensors', None)
    with pytest.raises(ConfigError, match=words):
        Policy.load(backend='cuda', **options)


def test_the_budget_of_the_gpu_counts_what_lies_there_and_in_pinned_memory(fake_gpu):
    """The vision encoder as well, but not what the processor does by itself."""
    with pytest.raises(ConfigError) as caught:
        Policy.load(backend='cuda', vram_budget_mb=1.0)
    _, head, *rows, note = str(caught.value).splitlines()
    assert head.split() == ['buffer', 'shape', 'dtype', 'place', 'MB']
    names = {row.split()[0] for row in rows}
    assert names >= {
        'embedding', 'keys', 'host_state', 'vision.gate_up', 'vision.host_frame', 'total'}
    assert not any(name.startswith('proprioception') for name in names)
    assert 'not counted' in note


def test_a_policy_larger_than_the_gpu_is_refused_before_anything_is_allocated(
        monkeypatch, fake_gpu):
    """In one line, with what is planned and what is there."""
    fake_gpu.memory_bytes = 1_500_000
    monkeypatch.setattr(policy_module, 'read_tensors', None)
    with pytest.raises(ConfigError, match=r'MB are planned, there are 1\.5 MB of GPU memory'):
        Policy.load(backend='cuda')


@pytest.mark.parametrize(('key', 'field', 'value'), [
    ('kv_slots', 'kv_slots', 32 * 10**11),
    ('prompt_slots', 'vla.prompt_slots', 10**12),
    ('chunk_steps', 'vla.chunk_steps', 10**12),
])
@pytest.mark.parametrize('backend', ['cpu', 'reference'])
def test_a_policy_larger_than_the_machine_is_refused_before_anything_is_allocated(
        checkpoint, monkeypatch, backend, key, field, value):
    """In one line, with what is planned and what is there."""
    edit_config(checkpoint, **{key: value})
    monkeypatch.setattr(policy_module, 'read_tensors', None)
    with pytest.raises(ConfigError, match=r'MB are planned, there are \d+') as caught:
        Policy.load(checkpoint, backend=backend)
    assert str(caught.value).startswith(f'{field} must leave the policy enough memory: ')
    assert str(caught.value).endswith(f'got {value}') and '\n' not in str(caught.value)


@pytest.mark.parametrize('name', ['KVCache', 'Transformer', '_extra_weights'])
def test_memory_that_the_system_does_not_give_is_one_clear_error(monkeypatch, name):
    """It may have been promised to others."""
    def refuse(*_, **__):
        raise MemoryError('planted')
    monkeypatch.setattr(policy_module, name, refuse)
    with pytest.raises(ConfigError, match=r'kv_slots must .* are planned, the system gave less'):
        Policy.load()


def test_bins_decode_to_their_centres():
    """The lowest bin of a range starts at its low end."""
    config = PolicyConfig.load(DEFAULT_POLICY)
    tokens = np.full(config.decode_tokens, config.action_token_offset)
    grounding, values = ActionTokenizer(config).decode(tokens)
    np.testing.assert_allclose(values, -1 + 1 / 256, rtol=1e-6)
    np.testing.assert_allclose(
        grounding, np.asarray(config.grounding_low) * (1 - 1 / 256), rtol=1e-6)


def test_positions_of_all_patches_differ():
    """Otherwise the policy could not tell where a cube is."""
    positions = sincos_positions(5, 6, 128)
    assert positions.shape == (30, 128)
    assert len(np.unique(positions.round(5), axis=0)) == 30


def test_standardising_gives_zero_for_the_mean_colour():
    """Mean 0.45 of full scale."""
    config = PolicyConfig.load(DEFAULT_POLICY)
    mean = np.full((1, 1, 3), 255 * 0.45)
    np.testing.assert_allclose(standardise(mean, config), 0, atol=1e-6)


def test_shrinking_averages_and_keeps_flat_colours():
    """Small objects must not flicker."""
    checker = np.indices((4, 4)).sum(0) % 2 * np.uint8(200)
    image = np.repeat(checker[..., None], 3, axis=2).astype(np.uint8)
    np.testing.assert_array_equal(resize_rgb8(image, 2, 2), np.full((2, 2, 3), 100))
