"""The CUDA backend without a GPU: order of matrices, refusals, what the compiler says."""

from collections import Counter
from dataclasses import replace
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from vla_edge_ros.errors import BackendUnavailable, ConfigError, WeightsError
from vla_edge_ros.kernels import load_backend
from vla_edge_ros.kernels.bfloat16 import to_bfloat16, to_float32
from vla_edge_ros.kernels.cuda import available, compiler, driver, layout
from vla_edge_ros.kernels.cuda.constants import HELD_STEPS, PREFILL_SCRATCH, STAGE_BYTES
from vla_edge_ros.kernels.cuda.upload import upload
from vla_edge_ros.kernels.memory_plan import total_bytes
from vla_edge_ros.lab import kernel_table
from vla_edge_ros.lab.random_model import QWEN_0_5B, QWEN_1_5B, QWEN_3B, random_weights, TINY
from vla_edge_ros.policy.weights import expected_shapes


def random(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def test_a_packed_matrix_holds_sixteen_rows_a_tile_and_every_weight_once():
    weight = random(40, 96)
    packed = layout.pack_matrix(weight)
    assert packed.shape == (3, 3, 2, 8, 32) and packed.dtype == np.float16
    for row, k in ((0, 0), (7, 31), (8, 32), (39, 95), (17, 64)):
        tile, rest = divmod(row, 16)
        assert packed[tile, k // 32, rest // 8, rest % 8, k % 32] == np.float16(weight[row, k])
    assert not packed[2, :, 1].any()  # rows 40 to 47 are padding


def test_bfloat16_weights_are_exact_in_float16_unless_they_are_tiny():
    weight = to_bfloat16(random(16, 32) * 0.02)
    packed = layout.pack_matrix(weight).transpose(0, 2, 3, 1, 4).reshape(16, 32)
    expected = to_float32(weight)
    large = np.abs(expected) >= 2.0**-14
    np.testing.assert_array_equal(packed[large], expected[large])
    np.testing.assert_allclose(packed[~large], expected[~large], atol=2.0**-25)


def test_a_weight_that_float16_cannot_hold_is_refused_by_name():
    for bad in (1e6, np.nan):
        weight = random(16, 32)
        weight[3, 4] = bad
        with pytest.raises(WeightsError, match='model.o_proj must be finite and below 65504'):
            layout.pack_matrix(weight, 'model.o_proj')


def test_the_rows_of_a_rotary_pair_meet_in_one_thread():
    heads = np.arange(2 * 64)[:, None]
    paired = layout.pair_heads(heads, 64).reshape(-1, 2, 8)
    np.testing.assert_array_equal(paired[:, 1] - paired[:, 0], 32)
    assert sorted(paired.reshape(-1)) == list(range(128))


def test_the_plan_names_what_the_shape_needs():
    plan = layout.memory_plan(QWEN_1_5B, 'bfloat16', 4104, 32)
    names = [buffer.name for buffer in plan]
    assert len(set(names)) == len(names)
    weights = sum(
        buffer.bytes for buffer in plan
        if buffer.name in ('embedding', 'qkv', 'output', 'gate_up', 'down'))
    assert weights == 2 * 1_543_569_408  # every matrix of the 1.5B shape once
    assert total_bytes(plan) < 3.6e9


@pytest.mark.parametrize('tied', [True, False])
def test_every_weight_of_a_checkpoint_fills_its_buffer_exactly(tied):
    config = replace(TINY, tie_word_embeddings=tied)
    sent = Counter()
    upload(config, random_weights(config, 1, 'bfloat16'),
           lambda name, array, layer: sent.update({name: array.nbytes}))  # fmt: skip
    plan = {buffer.name: buffer.bytes for buffer in layout.memory_plan(config, 'auto', 100, 32)}
    assert {name: plan[name] for name in sent} == sent
    assert ('head' in sent) is not tied and len(sent) == 9 + (not tied)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'hidden_size': 130}, 'hidden_size must be a multiple of 32 on backend cuda, got 130'),
        ({'head_dim': 48}, 'head_dim must be a multiple of 32'),
        ({'intermediate_size': 32768}, 'intermediate_size must be <= 18432'),
    ],
)
def test_a_network_the_kernels_cannot_run_is_refused_by_field(change, message):
    with pytest.raises(ConfigError, match=message):
        layout.check_config(replace(TINY, **change))


class FakeGpu:
    name, capability, cuda_major = 'Some GPU', (9, 0), 13


def test_auto_takes_the_cpu_where_there_is_no_gpu_and_says_why(monkeypatch):
    def fail():
        raise BackendUnavailable('backend cuda', 'needs an NVIDIA GPU', 'NO_DEVICE')

    monkeypatch.setattr(driver, 'Gpu', fail)
    module, backend = load_backend('auto', TINY)
    assert module.__name__.endswith('.cpu') and backend == 'cpu (no CUDA: NO_DEVICE)'
    with pytest.raises(ConfigError, match='backend must be one of auto, cuda, cpu, reference'):
        load_backend('gpu', TINY)


@pytest.mark.parametrize(
    ('change', 'installed', 'config', 'reason'),
    [
        ({}, True, TINY, 'found Some GPU'),
        ({'capability': (7, 0)}, True, TINY, 'older than compute capability 7.5'),
        ({'cuda_major': 12}, True, TINY, 'the driver of Some GPU is older'),
        ({}, False, TINY, 'numba-cuda is not installed'),
        ({}, True, replace(TINY, head_dim=256), 'head_dim must be <= 128'),
    ],
)
def test_auto_takes_a_gpu_only_where_it_can_run_the_network(
    monkeypatch, change, installed, config, reason
):
    fake = FakeGpu()
    for name, value in change.items():
        setattr(fake, name, value)
    monkeypatch.setattr(driver, 'Gpu', lambda: fake)
    monkeypatch.setattr(driver, 'Device', lambda: SimpleNamespace(close=lambda: None))
    monkeypatch.setattr(available.util, 'find_spec', lambda name: installed or None)
    monkeypatch.setattr(available, 'version', lambda name: '13.0.3')
    found, why = available.find_gpu(config)
    assert found is (reason == 'found Some GPU') and reason in why


def test_auto_takes_the_cpu_where_the_gpu_takes_no_program_more(monkeypatch):
    def refuse():
        raise BackendUnavailable('backend cuda', 'cannot start on Some GPU', 'EXCLUSIVE_PROCESS')

    monkeypatch.setattr(driver, 'Gpu', FakeGpu)
    monkeypatch.setattr(driver, 'Device', refuse)
    monkeypatch.setattr(available.util, 'find_spec', lambda name: True)
    monkeypatch.setattr(available, 'version', lambda name: '13.0.3')
    module, backend = load_backend('auto', TINY)
    assert module.__name__.endswith('.cpu') and 'EXCLUSIVE_PROCESS' in backend


def test_without_the_bindings_the_backend_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'cuda.bindings', None)
    with pytest.raises(BackendUnavailable, match=r"pip install '\.\[cuda\]'"):
        driver.Device()


def test_a_damaged_file_in_the_cache_is_compiled_again(tmp_path, monkeypatch):
    program = compiler.Program(b'cubin', {'a': 'a_1'}, {'a': compiler.Resources(32, 0, 0)})
    path = tmp_path / 'deep' / 'program.safetensors'
    assert compiler._read(path) is None
    compiler._write(path, program)
    assert compiler._read(path) == program
    path.write_bytes(path.read_bytes()[:-3])
    assert compiler._read(path) is None


def test_spills_of_the_hot_path_are_reported():
    calm = compiler.Resources(64, 0, 0)
    resources = dict.fromkeys([*compiler.HOT, 'embed'], calm)
    program = compiler.Program(b'', {}, resources)
    assert kernel_table.spilling(program) == []
    resources['embed'] = compiler.Resources(255, 0, 8)
    resources['decode_mlp'] = compiler.Resources(80, 0, 4)
    resources['decode_qkv'] = compiler.UNKNOWN
    assert kernel_table.spilling(program) == ['decode_mlp', 'decode_qkv']
    assert any('decode_mlp' in line and ' 4' in line
               for line in kernel_table.describe((9, 0), 128, program))


def test_what_the_linker_says_of_spills_is_read_for_the_right_kernel():
    log = (
        "ptxas info : Compiling entry function 'calm' for 'sm_90'\n"
        'ptxas info : Function properties for calm\n'
        'ptxas . 0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\n'
        'ptxas info : Function properties for full\n'
        'ptxas . 560 bytes stack frame, 716 bytes spill stores, 1204 bytes spill loads\n'
        "info : Function properties for 'full':\ninfo : used 168 registers, 1024 bytes smem\n"
        "info : Function properties for 'calm':\ninfo : used 52 registers, 0 bytes smem\n")
    assert compiler._resources(log, {'a': 'calm', 'b': 'full'}) == {
        'a': compiler.Resources(52, 0, 0), 'b': compiler.Resources(168, 1024, 1920)}
    assert compiler._resources(log, {'c': 'other'}) == {'c': compiler.UNKNOWN}


def test_a_linker_is_asked_for_its_report_only_where_that_comes_back():
    assert compiler._report((13, 0)) == ['-verbose']
    assert compiler._report((12, 6)) == []  # it would write to stderr at every start


@pytest.mark.parametrize('config', [TINY, QWEN_0_5B, QWEN_1_5B, QWEN_3B])
@pytest.mark.parametrize('processors', [20, 46, 132, 188])
def test_the_blocks_of_a_stream_share_every_matrix_evenly_and_without_a_gap(config, processors):
    shares = layout.stream_shares(config, processors)
    layer = sum(math.prod(shape) for name, shape in expected_shapes(config).items()
                if 'layers.0.' in name and len(shape) == 2)  # fmt: skip
    assert shares[:, 0].tolist() == [0] * 5
    assert shares[:, -1].sum() * 16 * 32 == layer  # a step is sixteen rows of 32 weights
    steps = np.diff(shares, axis=1)
    assert steps.min() >= 0 and steps[3].min() > 0
    depth = config.hidden_size // 32
    assert steps.sum(0).max() <= -(-shares[:, -1].sum() // steps.shape[1]) + depth


def test_a_stream_is_refused_where_its_rows_do_not_fit_shared_memory():
    assert layout.can_stream(QWEN_1_5B, 132)
    assert not layout.can_stream(replace(QWEN_1_5B, hidden_size=2304), 132)
    assert not layout.can_stream(replace(QWEN_1_5B, intermediate_size=16384), 132)
    assert not layout.can_stream(replace(QWEN_1_5B, num_key_value_heads=1), 132)


def test_the_mlp_of_a_prefill_is_streamed_where_a_block_holds_what_it_multiplies_by():
    room = PREFILL_SCRATCH + 12 * STAGE_BYTES
    for config in (QWEN_0_5B, QWEN_1_5B):
        chunks, stages = layout.prefill_stream_parts(config, 132, room)
        # No block has more steps at a time than its eight warps hold.
        assert -(-config.intermediate_size // 32 // chunks) <= 8 * HELD_STEPS and stages == 12
    assert layout.prefill_stream_parts(QWEN_3B, 132, room) is None
    assert layout.prefill_stream_parts(QWEN_1_5B, 132, room - 9.5 * STAGE_BYTES) is None
    assert layout.prefill_stream_parts(QWEN_1_5B, 1, room) is None


@pytest.mark.parametrize(('capability', 'config'), [((7, 5), TINY), ((9, 0), QWEN_0_5B)])
def test_the_compiler_makes_every_kernel_without_a_gpu(capability, config):
    pytest.importorskip('numba_cuda', reason='no CUDA compiler; make kernels installs it')
    told = []
    program = compiler.compile_program(
        capability, config.head_dim, lambda *step: told.append(step))
    kernels = len(program.entries)
    assert told == [
        *(('compiling kernel', number, kernels) for number in range(1, kernels + 1)),
        ('linking the kernels', 1, 1)]
    assert program.cubin[:4] == b'\x7fELF'
    streams = set(compiler.STREAMS)
    assert set(program.entries) == set(program.resources) >= compiler.HOT - streams
    assert set(program.entries) & streams == (streams if capability >= (9, 0) else set())
    assert not kernel_table.spilling(program)
    # Two blocks of eight warps have to fit a processor's 65,536 registers.
    assert program.resources['decode_mlp'].registers <= 128
    # Of nine warps three share one quarter of them.
    assert all(program.resources[name].registers <= 168
               for name in streams & set(program.resources))


def test_an_unknown_processor_is_refused_by_name():
    pytest.importorskip('numba_cuda', reason='no CUDA compiler; make kernels installs it')
    with pytest.raises(BackendUnavailable, match='cannot be compiled for compute capability 9.9'):
        compiler.compile_program((9, 9), 32)
