"""The CUDA driver as the engine needs it: one device, its memory, launches, recorded graphs."""

from collections.abc import Callable, Mapping, Sequence
import ctypes
from typing import NamedTuple

import numpy as np

from vla_edge_ros.errors import BackendUnavailable

_TYPES = {
    'p': ctypes.c_uint64,
    'i': ctypes.c_int32,
    'f': ctypes.c_float,
}
DEFAULT_SHARED_BYTES = 49152
"""Shared memory that a block gets without being asked for."""


class CudaError(RuntimeError):
    """The driver reported an error; the engine cannot be used any more."""

    def __init__(self, what: str, error: object):
        super().__init__(f'the CUDA driver failed in {what}: {error}')


class Launch(NamedTuple):
    """One kernel with its arguments, ready to be launched."""

    function: object
    grid: tuple[int, int, int]
    threads: int
    shared_bytes: int
    values: tuple
    types: tuple
    cooperative: bool = False
    name: str = ''


class Gpu:
    """
    The first GPU and what can be known of it; nothing is made there.

    Raises
    ------
    BackendUnavailable
        There is no driver, no such GPU, or the bindings are missing.

    """

    def __init__(self):
        try:
            from cuda.bindings import driver
        except ImportError as error:
            rule = "needs the CUDA bindings: pip install '.[cuda]'"
            raise BackendUnavailable('backend cuda', rule, str(error)) from error
        self._cu = driver
        try:
            self._call('starting', driver.cuInit(0))
            self._device = self._call('finding a GPU', driver.cuDeviceGet(0))
        except (CudaError, RuntimeError) as error:
            raise BackendUnavailable('backend cuda', 'needs an NVIDIA GPU', str(error)) from error

    def attribute(self, name: str) -> int:
        """Return a device attribute, such as ``MULTIPROCESSOR_COUNT``."""
        key = getattr(self._cu.CUdevice_attribute, f'CU_DEVICE_ATTRIBUTE_{name}')
        return self._call(name, self._cu.cuDeviceGetAttribute(key, self._device))

    @property
    def capability(self) -> tuple[int, int]:
        """Compute capability, such as (9, 0)."""
        return (self.attribute('COMPUTE_CAPABILITY_MAJOR'),
                self.attribute('COMPUTE_CAPABILITY_MINOR'))  # fmt: skip

    @property
    def name(self) -> str:
        """Name of the product."""
        raw = self._call('naming', self._cu.cuDeviceGetName(96, self._device))
        return raw.split(b'\0')[0].decode()

    @property
    def cuda_major(self) -> int:
        """Major version of CUDA that the driver knows."""
        return self._call('asking for the version', self._cu.cuDriverGetVersion()) // 1000

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that the device has."""
        return self._call('asking for memory', self._cu.cuDeviceTotalMem(self._device))

    def _call(self, what: str, answer: tuple):
        error, *values = answer
        if error != self._cu.CUresult.CUDA_SUCCESS:
            raise CudaError(what, error.name)
        if not values:
            return None
        return values[0] if len(values) == 1 else tuple(values)


class Device(Gpu):
    """
    The first GPU through its primary context, which torch and others of this process share.

    Raises
    ------
    BackendUnavailable
        As for ``Gpu``, or it takes no program more.

    """

    def __init__(self):
        super().__init__()
        try:
            self._context = self._call(
                'retaining', self._cu.cuDevicePrimaryCtxRetain(self._device))
        except CudaError as error:
            rule = f'cannot start on {self.name}'
            raise BackendUnavailable('backend cuda', rule, str(error)) from error
        self.use()
        self.stream = self._call(
            'making a stream',
            self._cu.cuStreamCreate(self._cu.CUstream_flags.CU_STREAM_NON_BLOCKING))
        self._module = None
        self._functions: dict[str, object] = {}
        self._held: list[int] = []
        self._pinned: list[int] = []
        self._registered: list[int] = []
        self._graphs: list[object] = []

    def use(self) -> None:
        """Make this device current in the calling thread."""
        self._call('setting the context', self._cu.cuCtxSetCurrent(self._context))

    def memory(self) -> tuple[int, int]:
        """Return the free and the total bytes of the device."""
        return self._call('asking for memory', self._cu.cuMemGetInfo())

    def allocate(self, num_bytes: int) -> int:
        """
        Return the address of new, zeroed memory.

        Raises
        ------
        MemoryError
            The device has no more of it.

        """
        answer = self._cu.cuMemAlloc(max(num_bytes, 1))
        if answer[0] == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise MemoryError(f'{num_bytes:,} bytes on {self.name}')
        address = int(self._call('allocating', answer))
        self._held.append(address)
        self._call('zeroing', self._cu.cuMemsetD8(address, 0, max(num_bytes, 1)))
        return address

    def allocate_pinned(self, shape: tuple[int, ...], dtype) -> np.ndarray:
        """Return host memory that the device can copy from and to by itself."""
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        address = int(self._call('pinning', self._cu.cuMemHostAlloc(max(size, 1), 0)))
        self._pinned.append(address)
        raw = (ctypes.c_uint8 * size).from_address(address)
        array = np.frombuffer(raw, dtype).reshape(shape)
        array[...] = 0
        return array

    def register(self, address: int, num_bytes: int) -> str:
        """
        Page-lock memory that is mapped here for reading, so that the device copies it by itself.

        Returns '' or why that cannot be; it is no error of the device.
        """
        self.use()
        cu = self._cu
        readable = self.attribute('READ_ONLY_HOST_REGISTER_SUPPORTED')
        flags = cu.CU_MEMHOSTREGISTER_READ_ONLY if readable else 0
        (error,) = cu.cuMemHostRegister(address, num_bytes, flags)
        if error != cu.CUresult.CUDA_SUCCESS:
            return error.name
        self._registered.append(address)
        return ''

    def unregister(self, address: int) -> None:
        """Release what ``register`` locked, before it is unmapped; after ``close`` it is done."""
        if address in self._registered:
            self._registered.remove(address)
            self.use()
            self._call('unpinning', self._cu.cuMemHostUnregister(address))

    def load(self, cubin: bytes, entries: Mapping[str, str]) -> None:
        """Load compiled kernels."""
        self._module = self._call('loading kernels', self._cu.cuModuleLoadData(cubin))
        for name, entry in entries.items():
            self._functions[name] = self._call(
                name, self._cu.cuModuleGetFunction(self._module, entry.encode()))

    def prepare(
        self, name: str, grid: Sequence[int], threads: int, kinds: str, *values, shared: int = 0,
        cooperative: bool = False,
    ) -> Launch:
        """
        Return a launch of kernel ``name``.

        ``kinds`` has a letter for each of ``values``: p an address, i an int32, f a float32.
        ``cooperative``: all blocks run at the same time, or none.
        """
        shape = (*grid, *(1,) * (3 - len(grid)))
        if shared > DEFAULT_SHARED_BYTES:
            kind = self._cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call(name, self._cu.cuFuncSetAttribute(self._functions[name], kind, shared))
        return Launch(
            self._functions[name], shape, threads, shared, values,
            tuple(_TYPES[kind] for kind in kinds), cooperative, name)

    def launch(self, launch: Launch, dependent: bool = False) -> None:
        """Queue a launch; a dependent one may start while the one ahead still runs."""
        cu = self._cu
        config = cu.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.threads, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = self.stream
        attribute, kinds = cu.CUlaunchAttribute(), cu.CUlaunchAttributeID
        if dependent:
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
        if launch.cooperative:
            attribute.id = kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attribute.value.cooperative = 1
        if dependent or launch.cooperative:
            config.attrs, config.numAttrs = [attribute], 1
        self._call('launching', cu.cuLaunchKernelEx(
            config, launch.function, (launch.values, launch.types), 0))

    def copy_in(self, address: int, array: np.ndarray) -> None:
        """Queue a copy to the device; only pinned memory is not waited for."""
        self._call('copying in', self._cu.cuMemcpyHtoDAsync(
            address, array.ctypes.data, array.nbytes, self.stream))

    def copy_out(self, array: np.ndarray, address: int) -> None:
        """Queue a copy from the device."""
        self._call('copying out', self._cu.cuMemcpyDtoHAsync(
            array.ctypes.data, address, array.nbytes, self.stream))

    def copy_bytes_in(self, address: int, source: int, num_bytes: int) -> None:
        """Queue a copy to the device from an address in page-locked memory."""
        self._call('copying in', self._cu.cuMemcpyHtoDAsync(
            address, source, num_bytes, self.stream))

    def copy_across(self, address: int, source: int, num_bytes: int) -> None:
        """Queue a copy from the device to itself."""
        self._call('copying', self._cu.cuMemcpyDtoDAsync(
            address, source, num_bytes, self.stream))

    def wait(self) -> None:
        """Wait until all that was queued is done."""
        self._call('running', self._cu.cuStreamSynchronize(self.stream))

    def record(self, work: Callable[[], None]):
        """Return a graph of everything that ``work`` queues; nothing runs yet."""
        cu = self._cu
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._call('recording', cu.cuStreamBeginCapture(self.stream, mode))
        try:
            work()
        finally:
            graph = self._call('recording', cu.cuStreamEndCapture(self.stream))
        made = self._call('making a graph', cu.cuGraphInstantiate(graph, 0))
        self._call('making a graph', cu.cuGraphDestroy(graph))
        self._graphs.append(made)
        return made

    def run(self, graph) -> None:
        """Queue a recorded graph."""
        self._call('running a graph', self._cu.cuGraphLaunch(graph, self.stream))

    def close(self) -> None:
        """Give everything back."""
        if self._context is None:
            return
        cu = self._cu
        self.use()
        cu.cuStreamSynchronize(self.stream)
        for graph in self._graphs:
            cu.cuGraphExecDestroy(graph)
        for address in self._held:
            cu.cuMemFree(address)
        for address in self._registered:
            cu.cuMemHostUnregister(address)
        self._registered.clear()
        for address in self._pinned:
            cu.cuMemFreeHost(address)
        if self._module is not None:
            cu.cuModuleUnload(self._module)
        cu.cuStreamDestroy(self.stream)
        cu.cuDevicePrimaryCtxRelease(self._device)
        self._context = None
