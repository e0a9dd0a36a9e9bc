"""How an engine is brought onto a GPU, with a device that only takes notes."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from vla_edge_ros.kernels.cuda import engine as engine_module
from vla_edge_ros.kernels.cuda.compiler import Program
from vla_edge_ros.kernels.cuda.driver import Device
from vla_edge_ros.kernels.cuda.engine import Engine
from vla_edge_ros.kernels.cuda.layout import memory_plan
from vla_edge_ros.kernels.memory_plan import GPU, PINNED, select
from vla_edge_ros.lab.random_model import random_weights, TINY


class FakeDevice:
    """An A100 that holds nothing and runs nothing."""

    capability = (8, 0)

    def __init__(self):
        self.held = {}
        self.pinned = []
        self.end = 4096

    def attribute(self, name):
        return {'MULTIPROCESSOR_COUNT': 108}[name]

    def allocate(self, num_bytes):
        address, self.end = self.end, self.end + num_bytes
        self.held[address] = num_bytes
        return address

    def allocate_pinned(self, shape, dtype):
        self.pinned.append(np.zeros(shape, dtype))
        return self.pinned[-1]

    def load(self, cubin, entries):
        assert cubin == b'cubin'

    def prepare(self, name, *_, **__):
        return name

    def record(self, work):
        work()
        return work

    def copy_in(self, address, array):
        assert any(
            start <= address and address + array.nbytes <= start + size
            for start, size in self.held.items())

    def copy_out(self, array, address):
        self.copy_in(address, array)

    def launch(self, launch, dependent=False):
        pass

    def run(self, graph):
        graph()

    def use(self):
        pass

    wait = close = use


@pytest.fixture
def device(monkeypatch):
    device = FakeDevice()
    monkeypatch.setattr(engine_module, 'Device', lambda: device)

    def load_program(capability, head_dim, progress):
        progress('loading a program', 1, 1)
        return Program(b'cubin', {}, {})

    monkeypatch.setattr(engine_module, 'load_program', load_program)
    return device


def test_every_layer_is_told_when_its_upload_begins(device):
    told = []
    Engine(TINY, random_weights(TINY, 1, 'bfloat16'), 'bfloat16', 100, 32,
           lambda *step: told.append(step))  # fmt: skip
    layers = TINY.num_hidden_layers
    assert told == [
        ('loading a program', 1, 1),
        ('uploading the vocabulary', 1, 1),
        *(('uploading layer', layer, layers) for layer in range(1, layers + 1)),
        ('recording the prefill', 1, 1)]


class FakeDriver:
    """What registering asks of the driver; memory at 7 is never locked."""

    CU_MEMHOSTREGISTER_READ_ONLY = 8
    CUresult = SimpleNamespace(CUDA_SUCCESS=SimpleNamespace(name='CUDA_SUCCESS'))

    def __init__(self):
        self.calls = []

    def cuMemHostRegister(self, address, num_bytes, flags):
        self.calls.append((address, num_bytes, flags))
        return (SimpleNamespace(name='CUDA_ERROR_NOT_SUPPORTED')
                if address == 7 else self.CUresult.CUDA_SUCCESS,)  # fmt: skip

    def cuMemHostUnregister(self, address):
        self.calls.append(address)
        return (self.CUresult.CUDA_SUCCESS,)


@pytest.mark.parametrize('supported', [0, 1])
def test_memory_is_locked_for_reading_where_the_device_can_and_released_once(
    monkeypatch, supported
):
    device = object.__new__(Device)
    device._cu, device._registered = FakeDriver(), []
    monkeypatch.setattr(Device, 'use', lambda _: None)
    monkeypatch.setattr(Device, 'attribute', lambda _, name: {
        'READ_ONLY_HOST_REGISTER_SUPPORTED': supported}[name])  # fmt: skip
    assert device.register(4096, 100) == ''
    assert device.register(7, 100) == 'CUDA_ERROR_NOT_SUPPORTED'
    for address in (7, 4096, 4096):
        device.unregister(address)
    flags = 8 * supported
    assert device._cu.calls == [(4096, 100, flags), (7, 100, flags), 4096]


@pytest.mark.parametrize('tied', [True, False])
def test_an_engine_allocates_exactly_what_its_plan_lists(device, tied):
    config = replace(TINY, tie_word_embeddings=tied)
    engine = Engine(config, random_weights(config, 1, 'bfloat16'), 'bfloat16', 100, 32)
    plan = memory_plan(config, 'bfloat16', 100, 32)
    assert len({buffer.name for buffer in plan}) == len(plan)
    assert sorted(device.held.values()) == sorted(buffer.bytes for buffer in select(plan, [GPU]))
    assert sorted(array.nbytes for array in device.pinned) == sorted(
        buffer.bytes for buffer in select(plan, [PINNED]))
    held, pinned = len(device.held), len(device.pinned)
    slots = np.arange(40, dtype=np.int32)
    engine.forward(np.zeros((8, config.hidden_size), np.float32), slots[:20], slots[20:28])
    engine.decode_greedy(1, 8, slots[:28], slots[28:36], 0, config.vocab_size)
    assert (len(device.held), len(device.pinned)) == (held, pinned)
