"""The CUDA vision encoder against the processor's: on a GPU, and without one its PTX as NumPy."""

from dataclasses import replace
import os
import platform
from types import SimpleNamespace

from emulated_gpu import EmulatedGpu
import numpy as np
import pytest
from same_choice import check_same_choice, drawn

from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.kernels import cpu, cuda
from vla_edge_ros.kernels.cuda import compiler, engine, resize, vision_layout
from vla_edge_ros.kernels.cuda.driver import Device
from vla_edge_ros.kernels.device_array import DeviceArray
from vla_edge_ros.kernels.memory_plan import GPU, MAIN, PINNED, select
from vla_edge_ros.lab.random_model import TINY
from vla_edge_ros.policy import vision
from vla_edge_ros.policy.policy import DEFAULT_POLICY, Policy
from vla_edge_ros.policy.policy_config import PolicyConfig
from vla_edge_ros.runtime.frame_buffer import FrameReader, FrameWriter

RELATIVE = 4e-6  # of the largest number: float32 sums in another order, approximate roots
LEVELS = 0 if platform.machine() == 'x86_64' else 1
"""Elsewhere OpenCV may fuse products and sums, and a level between two goes either way."""
DEFAULT = PolicyConfig.load(DEFAULT_POLICY)
TOY = replace(
    DEFAULT, transformer=replace(TINY, vocab_size=800, hidden_size=96), image_width=12,
    image_height=8, patch_size=4, vision_hidden_size=20, vision_intermediate_size=37, kv_slots=16)
SHAPES = {
    'toy': TOY,
    'one patch': replace(TOY, image_width=4, image_height=4, kv_slots=9),
    'wide': replace(TOY, vision_hidden_size=324, vision_intermediate_size=300, patch_size=2,
                    image_width=6, image_height=2, kv_slots=10),
}  # fmt: skip
SIZES = (
    (8, 12), (16, 24), (24, 36), (8, 24), (16, 12), (9, 13), (13, 29), (31, 17), (60, 12),
    (5, 7), (7, 30), (30, 7), (1, 1), (1, 40),
)  # fmt: skip
"""Kept, halved, whole and broken parts, smaller one way or both."""


@pytest.fixture
def small_frames(monkeypatch):
    """Keep room for small pictures only, which is quicker."""
    monkeypatch.setattr(vision_layout, 'MAX_FRAME_BYTES', 3 * 64 * 48)


def make_gpu():
    try:
        device = Device()
    except BackendUnavailable as error:
        pytest.skip(f'no GPU: {error.value}')
    program = compiler.load_program(device.capability, TINY.head_dim)
    device.load(program.cubin, program.entries)
    return device


def make_emulated(capability, **options):
    pytest.importorskip('numba_cuda', reason='no CUDA compiler; make kernels installs it')
    device = EmulatedGpu(capability, **options)
    device.load(TINY.head_dim, {})
    return device


@pytest.fixture(params=[
    'emulated 7.5', 'emulated 9.0', pytest.param('gpu', marks=pytest.mark.gpu)])
def device(request, small_frames):
    """Give a device that the kernels are loaded on."""
    if request.param == 'gpu':
        device = make_gpu()
    else:
        device = make_emulated(tuple(map(int, request.param.split()[1].split('.'))))
    yield device
    device.close()


def random_weights(config, seed=0):
    rng = np.random.default_rng(seed)
    return {name: (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)
            for name, shape in vision.weight_shapes(config).items()}  # fmt: skip


def make_encoders(device, config):
    """Return an encoder on the device and one of the processor, of the same weights."""
    weights = random_weights(config)
    return (vision.make_encoder(config, weights, cuda, SimpleNamespace(device=device)),
            vision.make_encoder(config, weights, cpu, None))  # fmt: skip


def random_image(size, seed=1):
    return np.random.default_rng(seed).integers(0, 256, (*size, 3), np.uint8)


def held(device, array: DeviceArray) -> np.ndarray:
    """Return what lies on the device."""
    host = np.empty(array.shape, array.dtype)
    device.copy_out(host, array.address)
    device.wait()
    return host


def see(encoder, image, row):
    """Return tokens and embedding of an image, wherever they lie."""
    tokens, embedding = encoder.encode(encoder.preprocess(image), row)
    if isinstance(tokens, DeviceArray):
        return held(encoder._vision._device, tokens), embedding
    return tokens.copy(), embedding


def assert_close(actual, expected):
    limit = RELATIVE * max(1, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


def patches_of(encoder) -> np.ndarray:
    """Return the patches that a device encoder made of its last picture."""
    own = encoder._vision
    shape = own._plan['vision.patches'].shape
    return held(own._device, DeviceArray(own._at['vision.patches'], shape, np.float32))


@pytest.mark.parametrize('size', SIZES)
def test_a_picture_is_resized_standardised_and_cut_as_on_the_processor(device, size):
    fast, exact = make_encoders(device, TOY)
    image = random_image(size)
    fast.encode(fast.preprocess(image), np.zeros(96))
    level = vision.standardise(np.ones(3, np.uint8), TOY) - vision.standardise(np.zeros(3), TOY)
    np.testing.assert_allclose(
        patches_of(fast), exact.preprocess(image), rtol=0, atol=LEVELS * 1.01 * level.max())


@pytest.mark.parametrize('name', SHAPES)
def test_tokens_and_embedding_are_those_of_the_processor(device, name):
    config = SHAPES[name]
    fast, exact = make_encoders(device, config)
    rng = np.random.default_rng(2)
    for size in ((8, 12), (40, 50), (3, 3)):
        image, row = random_image(size), rng.standard_normal(96)
        tokens, embedding = see(fast, image, row)
        expected, pooled = see(exact, image, row)
        assert tokens.shape == expected.shape == (config.slots_per_frame, 96)
        assert_close(tokens, expected)
        assert_close(embedding, pooled)
        np.testing.assert_array_equal(tokens[-1], row.astype(np.float32))
        for ours, same in zip(see(fast, image, row), (tokens, embedding), strict=True):
            np.testing.assert_array_equal(ours, same)


def test_no_order_of_threads_changes_a_bit(small_frames):
    config, row = SHAPES['toy'], np.ones(96)
    image = random_image((13, 29))
    results = [
        see(make_encoders(make_emulated((9, 0), seed=seed), config)[0], image, row)
        for seed in (None, 1, 2, 3)]
    for other in results[1:]:
        for ours, same in zip(other, results[0], strict=True):
            np.testing.assert_array_equal(ours, same)


@pytest.mark.parametrize(
    ('kernel', 'right', 'wrong', 'seed'),
    [
        ('vision_resize', 'mul.rn.f32', 'add.rn.f32', None),
        ('vision_encode', 'griddepcontrol.wait;', '', None),
        ('vision_encode', '[x+8]', '[x+12]', None),
        ('vision_encode', 'bar.sync \t0;', '', 1),
        ('vision_pool', 'griddepcontrol.wait;', '', None),
    ],
)
def test_a_mistake_in_a_kernel_is_found(small_frames, kernel, right, wrong, seed):
    from ptx_machine import MachineError

    device = make_emulated((9, 0), seed=seed, mistakes={kernel: (right, wrong)})
    with pytest.raises((AssertionError, MachineError)):
        fast, exact = make_encoders(device, TOY)
        for ours, expected in zip(*(
            see(encoder, random_image((13, 29)), np.ones(96)) for encoder in (fast, exact)
        ), strict=True):
            assert_close(ours, expected)


def test_any_strides_are_taken_and_what_is_too_large_is_resized_before(device, monkeypatch):
    monkeypatch.setattr(vision_layout, 'MAX_FRAME_BYTES', 3 * 20 * 30)
    fast, exact = make_encoders(device, TOY)
    image = random_image((40, 60))
    turned = image[:30, :20].transpose(1, 0, 2)
    for view in (image[:20, :30, ::-1], image[::-2, ::2], turned, image):
        assert fast.frame_target.holds(view.shape) is (view is not image)
        expected = see(exact, np.ascontiguousarray(view), np.zeros(96))
        for ours, other in zip(see(fast, view, np.zeros(96)), expected, strict=True):
            assert_close(ours, other)


def test_frames_come_out_of_the_frame_buffer_without_the_processor(device):
    fast, _ = make_encoders(device, TOY)
    target, name = fast.frame_target, f'vla_edge_vision_{os.getpid()}'
    image, larger = random_image((12, 16), 3), random_image((48, 64), 4)
    with FrameReader(name, target) as reader, FrameWriter(name, image.size) as writer:
        for stamp, sent in enumerate((image, larger)):
            writer.write(sent, stamp)
            frame = reader.read()
            assert isinstance(frame.image, DeviceArray) and frame.image.shape == sent.shape
            assert target.route == 'out of the frame buffer by itself'
            np.testing.assert_array_equal(held(device, frame.image), sent)
            ours = see(fast, frame.image, np.zeros(96))
            for seen, expected in zip(ours, see(fast, sent, np.zeros(96)), strict=True):
                np.testing.assert_array_equal(seen, expected)
    assert target.route == ''


def test_frames_come_through_pinned_memory_where_the_driver_locks_none(device, monkeypatch):
    monkeypatch.setattr(device, 'register', lambda *_: 'CUDA_ERROR_NOT_SUPPORTED', raising=False)
    fast, _ = make_encoders(device, TOY)
    target, name = fast.frame_target, f'vla_edge_vision_{os.getpid()}'
    copies = []
    monkeypatch.setattr(np, 'copyto', lambda *arrays: copies.append(arrays))
    with FrameReader(name, target) as reader, FrameWriter(name, 4000) as writer:
        writer.write(random_image((12, 16)), 7)
        frame = reader.read()
        assert frame.image.ctypes.data == target._pinned.ctypes.data
        picture = fast.preprocess(frame.image)
        assert not copies  # the reader's copy is the only one
        np.testing.assert_array_equal(held(device, picture), random_image((12, 16)))
        assert target.route == (
            'through pinned memory (the frame buffer cannot be registered: '
            'CUDA_ERROR_NOT_SUPPORTED)')


def test_a_picture_without_three_channels_is_refused_wherever_it_lies(device):
    fast, _ = make_encoders(device, TOY)
    for image in (np.zeros((8, 12, 4), np.uint8), DeviceArray(1, (8, 12, 1), np.uint8)):
        with pytest.raises(ValueError, match=r'image must be uint8 \[height, width, 3\]'):
            fast.preprocess(image)


@pytest.fixture(scope='module', params=['emulated', pytest.param('gpu', marks=pytest.mark.gpu)])
def policy(request):
    """Give the embedded policy on CUDA."""
    if request.param == 'gpu':
        make_gpu().close()
        return Policy.load(backend='cuda')
    device = make_emulated((9, 0))
    with pytest.MonkeyPatch.context() as patch:
        device.install(patch)
        patch.setattr(engine, 'Gpu', lambda: SimpleNamespace(memory_bytes=10**10))
        return Policy.load(backend='cuda')


def test_the_embedded_policy_sees_what_it_sees_on_the_processor(policy):
    other, seen = Policy.load(backend='cpu'), []
    for one in (policy, other):
        fill = one.transformer.fill
        one.transformer.fill = lambda rows, *slots, fill=fill: (
            seen.append(rows if isinstance(rows, np.ndarray) else held(
                policy.transformer.engine.device, rows)), fill(rows, *slots))
    for frame, size in enumerate(((480, 640), (80, 96), (33, 47))):
        for one in (policy, other):
            one.observe(random_image(size), np.array([0.1, -0.05]), frame)
        ours, expected = (rows.copy() for rows in seen[-2:])
        assert ours.shape == (32, 128)
        assert_close(ours, expected)
    del policy.transformer.fill


def test_a_prefill_of_tokens_on_the_device_is_that_of_the_same_numbers(policy):
    tokens, _ = policy._vision.encode(
        policy._vision.preprocess(random_image((48, 64))), np.ones(128))
    slots = np.arange(32, dtype=np.int32)
    from_device = policy.transformer.prefill(tokens, slots, slots[:0])
    rows = held(policy.transformer.engine.device, tokens)
    np.testing.assert_array_equal(
        policy.transformer.prefill(rows, slots, slots[:0]), from_device)


@pytest.mark.gpu
def test_the_embedded_policy_chooses_the_tokens_of_the_processor_for_a_camera_s_frames():
    make_gpu().close()
    policies = [Policy.load(backend=name) for name in ('cuda', 'cpu')]
    for policy in policies:
        policy.set_instruction('follow the red cube')
    same, device = 0, policies[0].transformer.engine.device
    for frame in range(200):
        joints = np.random.default_rng(frame).uniform(-0.2, 0.2, 2)
        for policy in policies:
            policy.observe(drawn(frame, 480, 640), joints, frame)
        same += check_same_choice(*policies, always=frame % 20 == 0)
        if frame == 20:
            free = device.memory()[0]
    assert same >= 190
    assert device.memory()[0] == free



@pytest.mark.parametrize('name', SHAPES)
def test_an_encoder_allocates_exactly_what_its_plan_lists(small_frames, name):
    config = SHAPES[name]
    device = make_emulated((9, 0))
    make_encoders(device, config)
    plan = vision.memory_plan(config, cuda)
    assert len({buffer.name for buffer in plan}) == len(plan)
    assert device._memory.sizes == [buffer.bytes for buffer in select(plan, [GPU])]
    assert {buffer.name for buffer in select(plan, [PINNED])} == {
        'vision.host_frame', 'vision.host_table', 'vision.host_row', 'vision.host_embedding'}
    sizes = {buffer.name: buffer.shape for buffer in plan}
    weights = {**random_weights(config), 'vision.positions': vision._positions(config)}
    for buffer, array in vision_layout.arrange(weights).items():
        assert array.shape == sizes[buffer]


def test_an_encoder_whose_rows_no_block_holds_runs_on_the_processor():
    large = replace(TOY, vision_intermediate_size=6000)
    assert not cuda.Vision.fits(large) and cuda.Vision.fits(DEFAULT)
    assert {buffer.place for buffer in vision.memory_plan(large, cuda)} == {MAIN}
    encoder = vision.make_encoder(large, random_weights(large), cuda, None)
    assert isinstance(encoder, vision.VisionEncoder) and encoder.frame_target is None


def test_a_table_is_as_long_as_the_policy_s_picture_needs_whatever_the_camera_sends():
    for size in SIZES:
        table = resize.Resize(*size, TOY.image_height, TOY.image_width).table()
        assert table.shape == (resize.table_words(TOY.image_height, TOY.image_width),)


@pytest.mark.parametrize('capability', [(7, 5), (9, 0), (12, 0)])
def test_the_kernels_compile_without_a_spill(capability, monkeypatch):
    pytest.importorskip('numba_cuda', reason='no CUDA compiler; make kernels installs it')
    from vla_edge_ros.kernels.cuda import program

    kernels = program.define(capability, TINY.head_dim)
    own = {name: kernel for name, kernel in kernels.items() if name.startswith('vision_')}
    monkeypatch.setattr(program, 'define', lambda *_: own)
    resources = compiler.compile_program(capability, TINY.head_dim).resources
    assert set(resources) == {'vision_resize', 'vision_encode', 'vision_pool'} <= compiler.HOT
    assert not any(kernel.spill_bytes for kernel in resources.values())
    # A block of 512 threads has to get the 65,536 registers of a processor.
    assert max(kernel.registers for kernel in resources.values()) <= 128
