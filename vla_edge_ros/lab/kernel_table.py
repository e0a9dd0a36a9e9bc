"""
``make kernels``: every CUDA kernel through the compiler, for every processor, without a GPU.

Prints what each takes; exits with 1 when a kernel of the hot path spills registers.
"""

import argparse
from collections.abc import Sequence
import json
from pathlib import Path
import sys

from vla_edge_ros.errors import BackendUnavailable
from vla_edge_ros.kernels.cuda.compiler import compile_program, HOT, Program

CAPABILITIES = (
    (7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (11, 0), (12, 0),
)  # fmt: skip
HEAD_DIMS = (32, 64, 128)
"""Of the embedded policy, of Qwen2.5 0.5B, and of 1.5B and 3B."""


def describe(capability: tuple[int, int], head_dim: int, program: Program) -> list[str]:
    """Return a line for each kernel: registers, shared memory, spills."""
    return [
        f'sm_{capability[0]}{capability[1]:<2} {head_dim:>4}  {name:<18} {kernel.registers:>9} '
        f'{kernel.shared_bytes:>13} {kernel.spill_bytes:>7}'
        for name, kernel in program.resources.items()
    ]


def spilling(program: Program) -> list[str]:
    """Return the kernels of the hot path that spill."""
    return [name for name in sorted(HOT & set(program.resources))
            if program.resources[name].spill_bytes]  # fmt: skip


def main(words: Sequence[str] | None = None) -> int:
    """Print the table and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[1])
    parser.add_argument('--json', type=Path, metavar='FILE', help='also write the table there')
    options = parser.parse_args(words)
    print('arch  head  kernel             registers  shared memory  spills')
    rows, bad = [], []
    for capability in CAPABILITIES:
        for head_dim in HEAD_DIMS:
            try:
                program = compile_program(capability, head_dim)
            except BackendUnavailable as error:
                print(f'kernels: {error}', file=sys.stderr)
                return 1
            print('\n'.join(describe(capability, head_dim, program)), flush=True)
            rows += [
                {'capability': capability, 'head_dim': head_dim, 'kernel': name,
                 **kernel._asdict()}
                for name, kernel in program.resources.items()]
            bad += [f'{name} (sm_{capability[0]}{capability[1]}, head of {head_dim})'
                    for name in spilling(program)]  # fmt: skip
    if options.json:
        options.json.write_text(json.dumps(rows, indent=2) + '\n', encoding='utf-8')
    for name in bad:
        print(f'kernels: {name} must not spill registers', file=sys.stderr)
    return 1 if bad else 0


if __name__ == '__main__':
    sys.exit(main())
