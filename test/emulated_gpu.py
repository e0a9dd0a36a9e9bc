"""``driver.Device`` without a GPU: compiled kernels run as NumPy, see ``ptx_machine``."""

import ctypes
from functools import cache
from itertools import product

import numpy as np
from ptx_machine import Machine
from ptx_memory import Memory
from ptx_translator import Kernel

from vla_edge_ros.kernels.cuda.compiler import _without_device, Program
from vla_edge_ros.kernels.cuda.driver import Launch

_KINDS = {'p': np.uint64, 'i': np.uint32, 'f': np.float32}
_THREADS = 4096
"""Threads that run together at most, unless all have to."""


@cache
def _define(capability: tuple[int, int], head_dim: int) -> dict[str, tuple]:
    from vla_edge_ros.kernels.cuda import program

    return program.define(capability, head_dim)


@cache
def compile_kernel(capability: tuple[int, int], head_dim: int, name: str) -> str:
    """Return the PTX of a kernel."""
    from numba import cuda

    function, signature = _define(capability, head_dim)[name]
    with _without_device(capability):
        return cuda.compile_ptx(function, signature, cc=capability, lineinfo=True)[0]


@cache
def translate(text: str) -> Kernel:
    """Return what PTX says as Python."""
    return Kernel(text)


class EmulatedGpu:
    """
    A device with the methods of ``driver.Device``; what is queued is done at once.

    Parameters
    ----------
    capability : (int, int)
        Compute capability to compile for.
    processors, shared_bytes : int
        What the attributes say there is of both.
    seed : int, optional
        Of another order of the threads, see ``Machine``.
    mistakes : dict of str to (str, str)
        What to replace in the PTX of a kernel, and by what.

    """

    def __init__(self, capability, processors=2, shared_bytes=101376, seed=None, mistakes=None):
        self.capability, self.seed = capability, seed
        self._attributes = {
            'MULTIPROCESSOR_COUNT': processors,
            'MAX_SHARED_MEMORY_PER_BLOCK_OPTIN': shared_bytes,
        }
        self._mistakes = mistakes or {}
        self._recording = None
        self._memory = Memory()
        self.launched = set()
        self.registered: dict[int, int] = {}

    def install(self, monkeypatch) -> None:
        """Let engines be made on this device."""
        from vla_edge_ros.kernels.cuda import engine

        def load_program(capability, head_dim, progress):
            return Program(head_dim, {}, {})  # kernels are compiled when they are prepared

        monkeypatch.setattr(engine, 'Device', lambda: self)
        monkeypatch.setattr(engine, 'load_program', load_program)

    def attribute(self, name: str) -> int:
        return self._attributes[name]

    def allocate(self, num_bytes: int) -> int:
        return self._memory.allocate(num_bytes)

    def allocate_pinned(self, shape, dtype) -> np.ndarray:
        return np.zeros(shape, dtype)

    def load(self, head_dim, entries) -> None:
        self._head_dim = head_dim

    def prepare(self, name, grid, threads, kinds, *values, shared=0, cooperative=False) -> Launch:
        text = compile_kernel(self.capability, self._head_dim, name)
        if name in self._mistakes:
            right, wrong = self._mistakes[name]
            if right not in text:
                raise LookupError(f'{right} is not in {name}')
            text = text.replace(right, wrong)
        kernel = translate(text)
        assert [_KINDS[kind] for kind in kinds] == kernel.parameters, name
        values = [np.int32(value).view(np.uint32) if kind == 'i' else value
                  for kind, value in zip(kinds, values, strict=True)]
        return Launch((name, kernel), (*grid, 1, 1)[:3], threads, shared, values, kinds,
                      cooperative, name)  # fmt: skip

    def launch(self, launch: Launch, dependent: bool = False) -> None:
        self._do(self._run, launch, dependent)

    def copy_in(self, address: int, array: np.ndarray) -> None:
        self._do(self._copy, address, array, True)

    def copy_out(self, array: np.ndarray, address: int) -> None:
        self._do(self._copy, address, array, False)

    def copy_bytes_in(self, address: int, source: int, num_bytes: int) -> None:
        assert any(start <= source and source + num_bytes <= start + size
                   for start, size in self.registered.items())  # fmt: skip
        raw = (ctypes.c_uint8 * num_bytes).from_address(source)
        self.copy_in(address, np.frombuffer(raw, np.uint8))

    def copy_across(self, address: int, source: int, num_bytes: int) -> None:
        self._do(self._copy_across, address, source, num_bytes)

    def register(self, address: int, num_bytes: int) -> str:
        self.registered[address] = num_bytes
        return ''

    def unregister(self, address: int) -> None:
        del self.registered[address]

    def record(self, work):
        self._recording = []
        work()
        recorded, self._recording = self._recording, None
        return recorded

    def run(self, graph) -> None:
        for work, arguments in graph:
            work(*arguments)

    def use(self) -> None:
        pass

    wait = close = use

    def _do(self, work, *arguments) -> None:
        if self._recording is None:
            work(*arguments)
        else:
            self._recording.append((work, arguments))

    def _copy(self, address: int, array: np.ndarray, inwards: bool) -> None:
        device = self._memory.view(address, array.nbytes)
        host = array.reshape(-1).view(np.uint8)
        assert host.size == 0 or np.shares_memory(host, array)
        if inwards:
            device[:] = host
        else:
            host[:] = device
        self._memory.fresh[:] = False

    def _copy_across(self, address: int, source: int, num_bytes: int) -> None:
        self._memory.view(address, num_bytes)[:] = self._memory.view(source, num_bytes)
        self._memory.fresh[:] = False

    def _run(self, launch: Launch, dependent: bool) -> None:
        name, kernel = launch.function
        self.launched.add(name)
        if not dependent:
            self._memory.fresh[:] = False
        blocks = [block[::-1] for block in product(*map(range, launch.grid[::-1]))]
        together = len(blocks) if launch.cooperative else max(_THREADS // launch.threads, 1)
        for first in range(0, len(blocks), together):
            Machine(kernel, self._memory, launch.grid, blocks[first : first + together],
                    launch.threads, launch.shared_bytes, launch.values, self.seed,
                    dependent).run()  # fmt: skip
