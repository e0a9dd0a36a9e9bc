"""``vla-edge bench engine`` without a GPU: options, work of kernels, the GPU's state, the page."""

import json

import numpy as np
import pytest

from vla_edge_ros import cli
from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.kernels.cuda import driver
from vla_edge_ros.lab import bench_page, roofline
from vla_edge_ros.lab.bench_lengths import compare_peers, find_peers
from vla_edge_ros.lab.gpu_state import FIELDS, gpu_state, pci_address
from vla_edge_ros.lab.random_model import QWEN_0_5B, QWEN_1_5B, TINY
from vla_edge_ros.lab.random_policy import write_random_policy
from vla_edge_ros.nodes.process import StopRequest
from vla_edge_ros.policy.policy import Policy


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--lengths', '32,x'], "--lengths must be numbers like 32,2048, got '32,x'"),
        (['--lengths', '0'], "--lengths must be in 1..100000, got '0'"),
        (['--chunks', '9'], '--chunks must be in 10..1000000'),
        (['--chunks', '300,5000'], '--chunks must be 1 or 4 numbers'),
        (['--backend', 'cpu'], '--backend must be given with --endurance, --loop or --energy'),
        (['--shape', 'policy'], '--shape must be given with --endurance, --loop or --energy'),
        (['--endurance', '0'], '--endurance must be in 1..'),
        (['--loop', 'nan'], '--loop must be > 0'),
        (['--loop', '5', '--endurance', '5'], '--loop must not be given with --endurance'),
        (['--loop', '5', '--chunks', '50'], '--chunks must not be given here'),
        (['--loop', '5', '--lengths', '50'], '--lengths must not be given here'),
        (['--endurance', '5', '--no-peers'], '--no-peers must not be given here'),
        (['--endurance', '5', '--compiled'], '--compiled must not be given here'),
        (['--endurance', '5', '--shape', 'policy', '--lengths', '50'], '--lengths must not be'),
    ],
)
def test_what_cannot_be_measured_is_refused_by_option(words, message, capsys):
    assert cli.run(['bench', 'engine', *words], StopRequest()) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize('words', [[], ['--endurance', '5'], ['--loop', '5'], ['--energy', '5']])
def test_without_a_gpu_each_mode_says_so_before_it_draws_weights(words, monkeypatch, capsys):
    def fail(_gpu):
        raise BackendUnavailable('backend cuda', 'needs an NVIDIA GPU', 'NO_DEVICE')

    monkeypatch.setattr(driver.Gpu, '__init__', fail)
    assert cli.run(['bench', 'engine', *words], StopRequest()) == 2
    assert 'needs an NVIDIA GPU, got' in capsys.readouterr().err


def test_the_floor_of_the_reference_chunk_is_nine_passes_but_for_a_last_layer():
    # 2.62 GB of layers in each of nine passes, 467 MB of vocabulary in eight, and the cache; of
    # the prefill's last layer, all but what makes keys and values is not needed.
    rest = 2 * 1536 * (1536 + 3 * 8960)
    assert roofline.floor_bytes(QWEN_1_5B, 0) == 9 * 2_620_391_424 + 8 * 466_747_392 - rest
    cache = roofline.floor_bytes(QWEN_1_5B, 2048) - roofline.floor_bytes(QWEN_1_5B, 0)
    assert cache == 9 * 2048 * 28 * 2 * 2 * 2 * 128


@pytest.mark.parametrize('config', [QWEN_0_5B, QWEN_1_5B])
@pytest.mark.parametrize('length', [32, 4064])
def test_the_work_of_all_kernels_together_is_that_of_the_chunk(config, length):
    def total(kernels, times):
        found = [roofline.work_of(config, *kernel, length) for kernel in kernels]
        return sum(found[1:], found[0]) * times

    layers, parameters = config.num_hidden_layers, 0
    for rows in (config.qkv_size, config.query_size, 3 * config.intermediate_size):
        parameters += layers * rows * config.hidden_size
    prefill = total(
        [('prefill_qkv', 0), ('prefill_attention', 0), ('prefill_partial', 0),
         ('prefill_mlp', 0), ('prefill_partial', 1)], layers)
    decode = total(
        [(f'decode_{name}', 0) for name in ('qkv', 'attention', 'output', 'mlp', 'down')],
        8 * layers) + roofline.work_of(config, 'decode_head', 0, length) * 8
    assert roofline.work_of(config, 'decode_stream', 0, length) == decode
    # Activations come on top of the floor; they are few beside the weights.
    floor = roofline.floor_bytes(config, length)
    assert floor < prefill.bytes + decode.bytes < 1.03 * floor
    attention = 4 * layers * config.query_size
    products = 2 * 32 * parameters
    assert prefill.flop == products + attention * (32 * length + 32 * 33 // 2)
    assert decode.flop == 8 * (
        2 * parameters + 2 * config.vocab_size * config.hidden_size + attention * (length + 1))


def test_rows_of_stages_say_how_near_each_roof_a_kernel_is():
    times = [('decode_stream', 0, 1, 8e-3), ('prefill_mlp', 0, 28, 20e-6), ('new', 0, 2, 1e-6)]
    mlp, stream, unknown = roofline.stage_rows(times, QWEN_1_5B, 2048, 4e12, 1000.0)
    assert (stream['pass'], stream['stage']) == ('decode', 'decode (one kernel)')
    assert stream['ms_of_chunk'] == pytest.approx(8) and stream['us'] == pytest.approx(8000)
    assert mlp['ms_of_chunk'] == pytest.approx(28 * 0.02)
    weights = 2 * 2 * 8960 * 1536
    assert mlp['memory_roof'] == pytest.approx(weights / 20e-6 / 4e12, rel=0.05)
    assert mlp['compute_roof'] == pytest.approx(32 * weights / 20e-6 / 1e15)
    assert unknown == {
        'pass': '', 'stage': 'new', 'kernel': 'new', 'us': pytest.approx(1), 'launches': 2,
        'ms_of_chunk': pytest.approx(2e-3)}
    assert 'compute_roof' not in roofline.stage_rows(times, QWEN_1_5B, 2048, 4e12, None)[0]


def test_the_compute_roof_is_a_stated_figure_or_unavailable():
    assert roofline.compute_roof('NVIDIA H200')[0] == 989.4
    assert 'stated by NVIDIA' in roofline.compute_roof('NVIDIA H100 80GB HBM3')[1]
    assert roofline.compute_roof('NVIDIA H100 PCIe') == (None, 'unavailable')


class Gpu:
    def attribute(self, name):
        return {'PCI_DOMAIN_ID': 1, 'PCI_BUS_ID': 0xAB, 'PCI_DEVICE_ID': 2}[name]


def install_smi(folder, monkeypatch, text):
    program = folder / 'nvidia-smi'
    program.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\n{text}\n')
    program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{folder}:/usr/bin:/bin')


def test_the_state_of_the_gpu_is_asked_for_by_its_place_while_it_works(tmp_path, monkeypatch):
    install_smi(
        tmp_path, monkeypatch,
        f'while [ ! -e {tmp_path}/worked ]; do :; done\n'
        'echo "580.65.06, P0, 1965, 1980, 3201, 3201, 655.31, 700.00, [N/A]"')
    state = gpu_state(pci_address(Gpu()), (tmp_path / 'worked').touch)
    assert state == {
        'driver': '580.65.06', 'performance_state': 'P0', 'sm_clock_mhz': 1965,
        'sm_clock_max_mhz': 1980, 'memory_clock_mhz': 3201, 'memory_clock_max_mhz': 3201,
        'power_w': 655.31, 'power_limit_w': 700, 'temperature_c': 'unavailable'}
    asked = (tmp_path / 'asked').read_text()
    assert '--id=00000001:ab:02.0' in asked and f'--query-gpu={",".join(FIELDS)}' in asked


@pytest.mark.parametrize('text', ['exit 9', 'echo "No devices were found"'])
def test_a_state_that_cannot_be_had_is_unavailable(tmp_path, monkeypatch, text):
    install_smi(tmp_path, monkeypatch, text)
    assert gpu_state('0') == 'unavailable'
    monkeypatch.setenv('PATH', str(tmp_path / 'nothing'))
    assert gpu_state('0') == 'unavailable'


def test_peers_are_compared_by_their_median_and_those_not_run_say_why(monkeypatch):
    times = {'median': 30.0, 'p99': 31.0, 'p99.9': 32.0, 'max': 33.0}
    found = {'versions': {'torch': '2'}, 'chunk_ms': {'graph': times, 'compiled': 'not run: no'}}
    record = compare_peers(found, 2048, 9.0)
    assert record['peers'] == {'graph': 30.0, 'compiled': 'not run: no'}
    assert record['ours_over_peer'] == {'graph': 0.3} and record['peer_cache_slots'] == 2088
    monkeypatch.setattr('importlib.util.find_spec', lambda name: None)
    missing = compare_peers(find_peers()(TINY, {}, 32), 32, 9.0)
    assert missing['peers'] == {'hugging_face': 'not run: torch is not installed'}


def first_record() -> dict:
    """Return a record as the command wrote it before it knew of more."""
    times = {'median': 14.6, 'p99': 15.0, 'max': 15.4}
    names = 'chunk_ms', 'prefill_ms', 'decode_ms_per_token', 'host_cpu_ms'
    row = dict.fromkeys(names, times)
    return {
        'environment': {'commit': '151e662bd0de'}, 'device': 'NVIDIA H200', 'shape': '1.5b',
        'warm_up_chunks': 20, 'chunks': 300, 'read_bandwidth_gb_s': 4256.7,
        'lengths': {'2048': row | {'floor_ms': 7.3}}, 'peers': {'hugging_face_graph': 30.3},
        'peer_length': 2048, 'peer_cache_slots': 2088, 'stage_length': 2048,
        'stages': [{'pass': 'decode', 'stage': 'qkv', 'us': 6.65}],
    }  # fmt: skip


def test_a_record_from_before_renders_without_a_figure_that_it_does_not_hold():
    page = bench_page.document(first_record())
    assert 'Median / p99 / max, ms:' in page and 'p99.9' not in page and '—' not in page
    cells = ' | '.join(['14.60 / 15.00 / 15.40'] * 4)
    assert f'| 2048 | {cells} | 7.30 | 2.00 |' in page
    assert '| hugging_face_graph | 30.3 |' in page and '| decode | qkv | 6.7 |' in page
    assert 'theirs' not in page and 'roof' not in page


def test_a_whole_record_tells_clocks_roofs_peers_and_first_chunks():
    record = first_record()
    record['lengths']['2048'] |= {'chunks': 5000, 'p99.9_over_median': 1.05}
    record['lengths']['2048']['chunk_ms'] = {
        'median': 9.5, 'p99': 9.6, 'p99.9': 9.975, 'max': 10.0}
    record |= {
        'compute_roof_tflop_s': 989.4, 'compute_roof_source': 'stated by NVIDIA',
        'first_chunk': {'after_start_ms': 10.0, 'after_start_over_median': 1.05,
                        'after_idle_ms': 11.0, 'after_idle_over_median': 1.16, 'idle_s': 1.0},
        'gpu': {'idle': 'unavailable', 'under_load': {
            **dict.fromkeys(FIELDS.values(), 'unavailable'), 'sm_clock_mhz': 1965.0,
            'sm_clock_max_mhz': 1980.0}},
        'stages': roofline.stage_rows(
            [('decode_stream', 0, 1, 8e-3)], QWEN_1_5B, 2048, 4e12, 989.4),
    } | compare_peers(
        {'chunk_ms': {'hugging_face_graph': {
            'median': 38.0, 'p99': 39.0, 'p99.9': 40.0, 'max': 41.0},
            'hugging_face_compiled': 'not run: takes minutes'},
         'versions': {'torch': '2.13'}}, 2048, 9.5)  # fmt: skip
    page = bench_page.document(json.loads(json.dumps(record)))
    assert 'Median / p99 / p99.9 / max, ms:' in page
    assert '| 2048 | 5000 | 9.50 / 9.60 / 9.97 / 10.00 | 1.050 |' in page
    assert 'first chunk after the start took 10.00 ms (1.05 of' in page
    assert '| idle | unavailable | — |' in page and '| 1965 of 1980 MHz |' in page
    assert '| hugging_face_graph | 38.0 | 39.0 / 40.0 / 41.0 | 0.25 |' in page
    assert '| hugging_face_compiled | not run: takes minutes | — | — |' in page
    assert 'torch 2.13' in page and '989.4 TFLOP/s (stated by NVIDIA)' in page
    assert '| decode | decode (one kernel) | 1 | 8000.0 | 8.00 |' in page


def test_a_random_policy_loads_and_acts_like_any_other(tmp_path):
    write_random_policy(tmp_path, TINY, 96)
    policy = Policy.load(tmp_path, backend='cpu')
    assert policy.config.slots_per_frame == 32 and policy.config.max_frames == 3
    policy.set_instruction('follow the red cube')
    image = np.zeros((80, 96, 3), np.uint8)
    observation = policy.observe(image, policy.config.proprioception_mean, 1)
    chunk = policy.act()
    assert observation.num_frames == 1 and chunk.values.shape == (3, 2)
