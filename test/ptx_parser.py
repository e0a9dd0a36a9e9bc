"""PTX of one kernel as a list of instructions, with registers numbered and labels resolved."""

import re
from typing import NamedTuple

import numpy as np

DTYPES = {
    'u8': np.uint8,
    'b16': np.uint16, 'u16': np.uint16, 's16': np.int16, 'f16': np.float16,
    'b32': np.uint32, 'u32': np.uint32, 's32': np.int32, 'f32': np.float32,
    'b64': np.uint64, 'u64': np.uint64, 's64': np.int64, 'pred': np.bool_,
}  # fmt: skip
_TOKEN = re.compile(
    r'\s*(?:(?P<open>\{)|(?P<close>\})|\.loc\s+\d+ (?P<line>\d+) \d+[^\n]*\n'
    r'|(?P<label>[\w$%]+):(?!:)|(?P<statement>[^;]*);)', re.S)  # fmt: skip


def width(kind: str) -> int:
    """Return the bits of a type."""
    return 1 if kind == 'pred' else int(kind[1:])


def split(text: str) -> list[str]:
    """Split at commas outside of braces."""
    return [part.strip() for part in re.split(r',(?![^{]*\})', text)]


class Scope:
    """Registers and labels between two braces."""

    def __init__(self, outer=None):
        self.outer = outer
        self.registers: dict[str, tuple[int, int]] = {}
        self.labels: dict[str, int] = {}

    def register(self, name: str) -> tuple[int, int] | None:
        """Return width and number of the register of this name; None if there is none."""
        return self.registers.get(name) or (self.outer.register(name) if self.outer else None)

    def label(self, name: str) -> int:
        """Return the index of the instruction behind a label."""
        return self.labels[name] if name in self.labels else self.outer.label(name)


class Instruction(NamedTuple):
    """
    One instruction.

    ``line`` is that of the Python source, ``guard`` the predicate under which it is executed,
    ``op`` the operation and its modifiers.
    """

    text: str
    line: str
    guard: str
    op: tuple[str, ...]
    operands: tuple[str, ...]
    scope: Scope

    @property
    def name(self) -> str:
        """Operation with its modifiers."""
        return '.'.join(self.op)


class Source:
    """
    What the text of one kernel says.

    Attributes
    ----------
    file : str
        Where it was compiled from.
    parameters : list of NumPy dtypes
    shared : dict of str to (int, bool)
        Bytes of every shared array, and whether its size is the launch's.
    registers : dict of int to int
        How many of each width; a predicate has width 1.
    instructions : list of Instruction

    """

    def __init__(self, text: str):
        text = re.sub(r'//.*', '', text)
        files = re.findall(r'\.file\s+1\s+"[^"]*?([^/"]*)"', text)
        self.file = files[0] if files else ''
        head, body = re.search(r'\.visible \.entry (.*?)\)\s*\{(.*)\n\}', text, re.S).groups()
        self.parameters = [DTYPES[kind] for kind in re.findall(r'\.param \.(\w+) \w+', head)]
        self.shared = {
            name: (int(size or 0), bool(dynamic)) for dynamic, name, size in re.findall(
                r'(\.extern )?(?:\.visible )?\.shared [^;]*?\.b8 (\w+)\[(\d*)\];', text)}
        self.registers = {1: 0, 16: 0, 32: 0, 64: 0}
        self.instructions: list[Instruction] = []
        self._parse(body)

    def _parse(self, body: str) -> None:
        scope, live, line = Scope(), dict.fromkeys(self.registers, 0), ''
        outside, position = [], 0
        while body[position:].strip():
            match = _TOKEN.match(body, position)
            position = match.end()
            statement = (match['statement'] or '').strip()
            if match['open']:
                outside.append(dict(live))
                scope = Scope(scope)
            elif match['close']:
                live, scope = outside.pop(), scope.outer
            elif match['line']:
                line = line if match['line'] == '0' else match['line']
            elif match['label']:
                scope.labels[match['label']] = len(self.instructions)
            elif statement.startswith('.reg'):
                self._declare(statement, scope, live)
            elif not statement.startswith('.'):
                self.instructions.append(_read(statement, line, scope))

    def _declare(self, statement: str, scope: Scope, live: dict[int, int]) -> None:
        _, kind, names = statement.split(None, 2)
        bits = width(kind[1:])
        for name in names.split(','):
            stem, many, count = name.strip().rstrip('>').partition('<')
            for full in [f'{stem}{i}' for i in range(int(count))] if many else [stem]:
                scope.registers[full] = bits, live[bits]
                live[bits] += 1
        self.registers[bits] = max(self.registers[bits], live[bits])


def _read(statement: str, line: str, scope: Scope) -> Instruction:
    text = ' '.join(statement.split())
    guard, _, rest = text[1:].partition(' ') if text[0] == '@' else ('', '', text)
    name, _, rest = rest.partition(' ')
    operands = split(rest) if rest else []
    if 'cache_hint' in name:
        operands.pop()
    return Instruction(text, line, guard, tuple(name.split('.')), tuple(operands), scope)
