"""
From Numba kernels to one cubin, with or without a GPU, kept on disk for the next start.

Numba is the compiler only; the driver loads and launches (``driver.py``). So a second start reads
one file, and the same code path makes the table of registers and spills on a machine without a
GPU.
"""

from contextlib import contextmanager, suppress
import hashlib
from importlib.metadata import PackageNotFoundError, version
import json
import os
from pathlib import Path
import re
from types import SimpleNamespace
from typing import NamedTuple

from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.progress import no_progress, Progress

STREAMS = ('prefill_stream', 'decode_stream')
"""Kernels that only processors with bulk copies have; nine warps, one of which copies."""
HOT = frozenset({
    'decode_qkv', 'decode_attention', 'decode_output', 'decode_mlp', 'decode_down', 'decode_head',
    'prefill_qkv', 'prefill_attention', 'prefill_mlp', 'prefill_partial', *STREAMS,
    'vision_resize', 'vision_encode', 'vision_pool',
})  # fmt: skip
_COMPILERS = (
    'numba-cuda', 'numba', 'llvmlite', 'nvidia-nvvm', 'nvidia-nvjitlink', 'nvidia-nvjitlink-cu12',
)  # fmt: skip


class Resources(NamedTuple):
    """What one kernel takes of a processor."""

    registers: int
    shared_bytes: int
    spill_bytes: int


UNKNOWN = Resources(-1, -1, -1)
"""Where the linker was silent: that of CUDA 12, and about what it has linked before."""


class Program(NamedTuple):
    """Compiled kernels: the cubin, the entry of each kernel, and what each takes."""

    cubin: bytes
    entries: dict[str, str]
    resources: dict[str, Resources]


def compile_program(
    capability: tuple[int, int], head_dim: int, progress: Progress = no_progress
) -> Program:
    """
    Compile every kernel for a compute capability.

    Parameters
    ----------
    capability : (int, int)
        Such as (9, 0).
    head_dim : int
        Size of an attention head.
    progress : Progress
        Told of every kernel.

    Raises
    ------
    BackendUnavailable
        numba-cuda or the linker is missing, or the toolkit does not know the processor.

    """
    try:
        from cuda.bindings import nvjitlink
        from numba import cuda

        from vla_edge_ros.kernels.cuda import program
    except ImportError as error:
        rule = "needs the CUDA compiler: pip install '.[cuda]'"
        raise BackendUnavailable('backend cuda', rule, str(error)) from error
    kernels = program.define(capability, head_dim)
    rule = f'cannot be compiled for compute capability {capability[0]}.{capability[1]}'
    try:
        options = [f'-arch=sm_{capability[0]}{capability[1]}', *_report(nvjitlink.version())]
        handle = nvjitlink.create(len(options), options)
    except nvjitlink.nvJitLinkError as error:
        raise BackendUnavailable('backend cuda', rule, str(error)) from error
    entries = {}
    try:
        with _without_device(capability):
            for number, (name, (function, signature)) in enumerate(kernels.items(), 1):
                progress('compiling kernel', number, len(kernels))
                ptx, _ = cuda.compile_ptx(function, signature, cc=capability)
                limit = program.MAX_REGISTERS.get(name)
                if limit:
                    ptx = re.sub(r'(\.visible \.entry [^{]*\))', rf'\1\n.maxnreg {limit}', ptx)
                entries[name] = re.search(r'\.visible \.entry (\w+)', ptx)[1]
                data = ptx.encode()
                nvjitlink.add_data(
                    handle, nvjitlink.InputType.PTX, data, len(data), name)
        progress('linking the kernels', 1, 1)
        nvjitlink.complete(handle)
        cubin = bytearray(nvjitlink.get_linked_cubin_size(handle))
        nvjitlink.get_linked_cubin(handle, cubin)
        log = bytearray(nvjitlink.get_info_log_size(handle))
        nvjitlink.get_info_log(handle, log)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(handle))
        nvjitlink.get_error_log(handle, log)
        text = log.decode(errors='replace').strip('\0\n') or str(error)
        raise BackendUnavailable('backend cuda', rule, text) from error
    finally:
        nvjitlink.destroy(handle)
    return Program(bytes(cubin), entries, _resources(log.decode(errors='replace'), entries))


def load_program(
    capability: tuple[int, int], head_dim: int, progress: Progress = no_progress
) -> Program:
    """Return the program from the disk cache, or compile it and put it there."""
    path = cache_directory() / f'{_key(capability, head_dim)}.safetensors'
    program = _read(path)
    if program is None:
        program = compile_program(capability, head_dim, progress)
        _write(path, program)
    return program


def cache_directory() -> Path:
    """Return where compiled kernels are kept: Numba's own choice, else the user's cache."""
    base = os.environ.get('NUMBA_CACHE_DIR') or os.environ.get('XDG_CACHE_HOME')
    return Path(base or Path.home() / '.cache') / 'vla_edge_ros'


def _key(capability, head_dim) -> str:
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.glob('*.py')):
        digest.update(path.read_bytes())
    for package in _COMPILERS:
        with suppress(PackageNotFoundError):
            digest.update(f'{package} {version(package)}'.encode())
    return f'sm_{capability[0]}{capability[1]}-d{head_dim}-{digest.hexdigest()[:16]}'


def _read(path: Path) -> Program | None:
    from safetensors import safe_open, SafetensorError

    try:
        with safe_open(path, 'numpy') as file:
            meta = json.loads(file.metadata()['program'])
            cubin = file.get_tensor('cubin').tobytes()
    except (OSError, SafetensorError, KeyError, TypeError, ValueError):
        return None
    resources = {name: Resources(*values) for name, values in meta['resources'].items()}
    return Program(cubin, meta['entries'], resources)


def _write(path: Path, program: Program) -> None:
    import numpy as np
    from safetensors.numpy import save

    meta = {'program': json.dumps({'entries': program.entries, 'resources': program.resources})}
    data = save({'cubin': np.frombuffer(program.cubin, np.uint8)}, meta)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f'.{os.getpid()}')
        part.write_bytes(data)
        part.replace(path)
    except OSError:
        pass  # a read-only home costs the next start some seconds, nothing else


def _report(version: tuple[int, int]) -> list[str]:
    """Return the option for a report on every kernel; that of CUDA 12 would go to stderr."""
    return ['-verbose'] if version >= (13, 0) else []


@contextmanager
def _without_device(capability):
    """Let Numba compile where there is no GPU: it asks the current one for its capability."""
    from numba.cuda import dispatcher

    original = getattr(dispatcher, 'get_current_device', None)
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=capability)
    try:
        yield
    finally:
        dispatcher.get_current_device = original


def _resources(log: str, entries: dict[str, str]) -> dict[str, Resources]:
    """Read the linker's report on every entry."""
    found = {}
    for name, entry in entries.items():
        spills = re.search(
            rf'properties for {entry}\n.*?(\d+) bytes spill stores, (\d+) bytes spill loads', log)
        rest = re.search(rf"properties for '{entry}':\n(.*)", log)
        registers = rest and re.search(r'used (\d+) registers', rest[1])
        shared = rest and re.search(r'(\d+) bytes smem', rest[1])
        if not (spills and registers):
            found[name] = UNKNOWN
            continue
        found[name] = Resources(
            int(registers[1]), int(shared[1]) if shared else 0, int(spills[1]) + int(spills[2]))
    return found
