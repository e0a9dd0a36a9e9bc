"""
PTX as Python: each basic block of a kernel becomes a function of NumPy arrays.

All threads of a launch are one array axis. A block function takes the machine and ``g``, the
threads that are there (a slice or sorted indices), and sends them on. What is not arithmetic is a
method of :class:`ptx_machine.Machine`. An instruction that is not known is an error, not a guess.
"""

import re

import numpy as np
from ptx_parser import DTYPES, Instruction, Scope, Source, split, width

_ARITHMETIC = {
    'add': '{0} + {1}', 'sub': '{0} - {1}', 'mul': '{0} * {1}', 'mul.lo': '{0} * {1}',
    'mad.lo': '{0} * {1} + {2}', 'fma': 'fma({0}, {1}, {2})', 'neg': '-{0}', 'not': '~{0}',
    'and': '{0} & {1}', 'or': '{0} | {1}', 'xor': '{0} ^ {1}', 'mov': '{0}',
    'div': 'divide({0}, {1})', 'rem': 'remainder({0}, {1})', 'div.full': '{0} / {1}',
    'ex2': 'np.exp2({0})', 'rsqrt': '1 / np.sqrt({0})', 'rcp': '1 / {0}', 'abs': 'np.abs({0})',
    'selp': 'np.where({2}, {0}, {1})', 'bfi': 'insert({0}, {1}, {2}, {3})',
    'cvta.to.global': '{0}', 'cvta.shared': 'm.window + {0}',
}  # fmt: skip
_OTHER_KINDS = {('selp', 3): 'pred', ('bfi', 3): 'u32', ('bfi', 4): 'u32'}
"""Of operands that have not the type of the instruction."""
_COMPARE = {'eq': '==', 'ne': '!=', 'lt': '<', 'le': '<=', 'gt': '>', 'ge': '>='}
_UNORDERED = {'equ': 'ne', 'neu': 'eq', 'ltu': 'ge', 'leu': 'gt', 'gtu': 'le', 'geu': 'lt'}
"""Comparisons that a NaN passes, and what they are the opposite of."""
_ROUNDING = {'rn', 'approx', 'ftz'}
_TOGETHER = ('shfl', 'mma', 'bar.warp')
"""What all lanes of a warp must reach together."""
_POLLS = ('ld.acquire', 'ld.relaxed', 'ld.volatile', 'mbarrier.test_wait')
"""What a loop may ask again and again, so that others must come to their turn."""
_ENDS = ('bra', 'ret', 'bar.sync', 'mbarrier.try_wait', *_POLLS)
_NOTHING = ('fence', 'createpolicy', 'bar.warp', 'griddepcontrol.launch')


class Kernel(Source):
    """
    One kernel, translated.

    Attributes
    ----------
    blocks : dict of int to callable
        By the index of their first instruction.
    together : dict of int to callable
        Of the blocks that begin with what lanes must reach together: which lanes of each warp.

    """

    def __init__(self, text: str):
        super().__init__(text)
        self.blocks, self.together = {}, {}
        leaders = self._leaders()
        for first, last in zip(leaders, [*leaders[1:], len(self.instructions)], strict=True):
            self.blocks[first] = self._translate(first, last)
            item = self.instructions[first]
            if item.name.startswith(_TOGETHER):
                mask = '0xFFFFFFFF' if item.op[0] == 'mma' else self._get(
                    item.operands[-1], 'b32', item.scope)
                self.together[first] = eval(f'lambda m, g: {mask}', {'np': np})

    def _leaders(self) -> list[int]:
        leaders = {0}
        for item in self.instructions:
            if item.op[0] == 'bra':
                leaders.add(item.scope.label(item.operands[0]))
        together = False
        for index, item in enumerate(self.instructions):
            together = together and index not in leaders
            if item.name.startswith('mbarrier.try_wait'):
                leaders.add(index)
            elif item.name.startswith(_TOGETHER) and not together:
                leaders.add(index)
                together = True
            if item.name.startswith(_ENDS):
                leaders.add(index + 1)
        return sorted(leaders - {len(self.instructions)})

    def _translate(self, first: int, last: int):
        lines = ['def block(m, g):']
        for index in range(first, last):
            lines += [f'    m.pc = {index}', *(f'    {line}' for line in self._statement(index))]
        if not self.instructions[last - 1].name.startswith(_ENDS):
            lines.append(f'    m.go({last}, g)')
        scope = {'np': np, **_HELPERS}
        exec(compile('\n'.join(lines), f'<block {first}>', 'exec'), scope)
        return scope['block']

    def _statement(self, index: int) -> list[str]:
        """Return Python for one instruction."""
        item, after = self.instructions[index], index + 1
        if item.op[0] in ('bra', 'ret'):
            target = item.scope.label(item.operands[0]) if item.operands else None
            if item.guard:
                return [f'm.branch(g, {self._guard(item)}, {target}, {after})']
            return ['m.leave(g)' if target is None else f'm.go({target}, g)']
        lines = self._unguarded(item, index)
        polls = item.name.startswith(_POLLS)
        if item.guard:
            if item.name.startswith(_ENDS) and not polls:
                raise NotImplementedError(f'a condition of {item.text}')
            lines = [
                f'h, g = g, m.where(g, {self._guard(item)})', 'if g is not None:',
                *(f'    {line}' for line in lines), 'g = h']  # fmt: skip
        return [*lines, f'm.poll({after}, g)'] if polls else lines

    def _guard(self, item: Instruction) -> str:
        value = self._get(item.guard.lstrip('!'), 'pred', item.scope)
        return f'~{value}' if item.guard[0] == '!' else value

    def _unguarded(self, item: Instruction, index: int) -> list[str]:
        op, name, kind = item.op, item.name, item.op[-1]
        if name.startswith(_NOTHING):
            return ['pass']
        if op[0] in ('ld', 'st', 'red'):
            return self._access(item)
        if op[0] == 'mma':
            out, *inputs = (
                ', '.join(self._get(part, of, item.scope) for part in split(operand[1:-1]))
                for operand, of in zip(item.operands, ('f32', 'b32', 'b32', 'f32'), strict=True))
            return [f'{out} = m.multiply(g, {", ".join(f"[{part}]" for part in inputs)})']
        if op[0] == 'mov' and '{' in item.text:
            return self._repack(item)
        value, kind = self._value(item) or (None, kind)
        if value:
            return [self._put(item.operands[0].split('|')[0], value, kind, item.scope)]
        return [self._control(item, index)]

    def _value(self, item: Instruction) -> tuple[str, str] | None:
        """Return the value of an instruction that has one, and its type."""
        op, kind = item.op, item.op[-1]

        def get(number, of=kind):
            return self._get(item.operands[number], of, item.scope)

        simple = '.'.join(part for part in op[:-1] if part not in _ROUNDING)
        if simple in _ARITHMETIC and kind in DTYPES:
            values = [get(n, _OTHER_KINDS.get((op[0], n), kind))
                      for n in range(1, len(item.operands))]  # fmt: skip
            return _ARITHMETIC[simple].format(*values), kind
        if op[0] == 'setp':
            value = self._comparison(op[1], get(1), get(2))
            if len(op) == 4:
                value = f'({value}) {"&" if op[2] == "and" else "|"} {get(3, "pred")}'
            return value, 'pred'
        if op[0] in ('min', 'max') and kind in DTYPES:
            # Of a number and a NaN, the number.
            function = f'f{op[0]}' if kind == 'f32' and 'NaN' not in op else f'{op[0]}imum'
            return f'np.{function}({get(1)}, {get(2)})', kind
        if op[0] in ('shl', 'shr'):
            amount = f'np.{DTYPES[kind].__name__}({get(2, "u32")})'
            return f'{get(1)} {"<<" if op[0] == "shl" else ">>"} {amount}', kind
        if op[:2] == ('mul', 'wide'):
            wide = f'{kind[0]}{2 * width(kind)}'
            return f'{get(1)}.astype(np.{DTYPES[wide].__name__}) * {get(2, wide)}', wide
        if op[0] == 'cvt':
            return self._conversion(item)
        if op[0] == 'shfl':
            return f'm.shuffle(g, {get(1)}, {op[2]!r}, {get(2, "s32")}, {get(4)})', kind
        if op[0] == 'activemask':
            return 'm.active(g)', kind
        return None

    def _comparison(self, how: str, left: str, right: str) -> str:
        if how in _UNORDERED:
            return f'~({self._comparison(_UNORDERED[how], left, right)})'
        if how == 'nan':
            return f'np.isnan({left}) | np.isnan({right})'
        return f'{left} {_COMPARE[how]} {right}'

    def _conversion(self, item: Instruction) -> tuple[str, str]:
        *how, to, of = item.op[1:]
        value = self._get(item.operands[1], of, item.scope)
        if to == 'f16x2':
            return f'pack({self._get(item.operands[2], of, item.scope)}, {value})', 'b32'
        if 'rni' in how:
            return f'np.rint({value}.astype(np.float64)).astype(np.int64)', to
        return f'{value}.astype(np.{DTYPES[to].__name__})', to

    def _repack(self, item: Instruction) -> list[str]:
        """Return Python for a register made of parts, or taken apart."""
        (to, source), kind, scope = item.operands, item.op[-1], item.scope
        if to[0] == '{':
            parts = split(to[1:-1])
            bits, value = width(kind) // len(parts), self._get(source, kind, scope)
            return [self._put(part, f'{value} >> {bits * i}', f'b{bits}', scope)
                    for i, part in enumerate(parts)]  # fmt: skip
        parts = split(source[1:-1])
        bits, whole = width(kind) // len(parts), f'np.{DTYPES[kind].__name__}'
        values = (self._get(part, f'b{bits}', scope) for part in parts)
        joined = ' | '.join(
            f'({value}.astype({whole}) << {bits * i})' for i, value in enumerate(values))
        return [self._put(to, joined, kind, scope)]

    def _control(self, item: Instruction, index: int) -> str:
        """Return Python for what orders threads or copies without them."""
        op, name, operands = item.op, item.name, item.operands
        if op[0] == 'atom' and 'add' in op:
            value = (f'm.fetch_add(g, {self._address(operands[1], item.scope, "global")}, '
                     f'np.{DTYPES[op[-1]].__name__}, '
                     f'{self._get(operands[2], op[-1], item.scope)})')  # fmt: skip
            return self._put(operands[0], value, op[-1], item.scope)

        def at(number, space='shared'):
            return self._address(operands[number], item.scope, space)

        def get(number):
            return self._get(operands[number], 'b32', item.scope)

        if name == 'bar.sync':
            return f'm.meet(g, {get(0)}, {get(1) if len(operands) > 1 else None}, {index + 1})'
        if op[0] == 'prefetch':
            return f'm.prefetch(g, {at(0, "global")})'
        if name == 'griddepcontrol.wait':
            return 'm.depend(g)'
        if op[:2] == ('cp', 'async') and op[2] in ('wait_all', 'wait_group', 'commit_group'):
            later = operands[0] if operands else -1
            return 'm.commit(g)' if op[2] == 'commit_group' else f'm.await_copies(g, {later})'
        if name.startswith('cp.async.bulk.shared'):
            return f'm.bulk_copy(g, {at(0)}, {at(1, "global")}, {get(2)}, {at(3)})'
        if name.startswith('cp.async.cg.'):
            return f'm.copy(g, {at(0)}, {at(1, "global")}, {get(2)})'
        if op[:2] == ('mbarrier', 'init'):
            return f'm.make_barrier(g, {at(0)}, {get(1)})'
        if op[:2] == ('mbarrier', 'arrive'):
            return f'm.arrive(g, {at(1)}, {get(2) if "expect_tx" in op else 0})'
        if op[0] == 'mbarrier' and 'parity' in op:
            value = f'm.is_over(g, {at(1)}, {get(2)})'
            if op[1] == 'try_wait':
                value = f'm.wait(g, {at(1)}, {get(2)}, {index}, {index + 1})'
            return self._put(operands[0], value, 'pred', item.scope)
        raise NotImplementedError(f'PTX that nobody taught the translator: {item.text}')

    def _access(self, item: Instruction) -> list[str]:
        """Return Python for a load, a store or an addition in memory."""
        op, scope, kind = item.op, item.scope, item.op[-1]
        count = next((int(part[1]) for part in op if re.fullmatch(r'v\d', part)), 1)
        space = next((part for part in ('param', 'shared', 'global') if part in op), 'generic')
        space = 'constant' if 'nc' in op else space
        memory, data = item.operands[::-1] if op[0] == 'ld' else item.operands
        if space == 'param':
            number = int(memory[1:-1].rsplit('_', 1)[1])
            return [self._put(data, f'm.parameters[{number}]', kind, scope)]
        where, dtype = self._address(memory, scope, space), f'np.{DTYPES[kind].__name__}'
        names = split(data[1:-1]) if count > 1 else [data]
        if op[0] == 'ld':
            return [f'v = m.load(g, {space!r}, {where}, {dtype}, {count})',
                    *(self._put(name, f'v[{i}]', kind, scope) for i, name in enumerate(names))]
        values = ', '.join(self._get(name, kind, scope) for name in names)
        if op[0] == 'red' and 'add' in op:
            return [f'm.add(g, {where}, {dtype}, {values})']
        if op[0] == 'st':
            return [f'm.store(g, {space!r}, {where}, {dtype}, [{values}])']
        raise NotImplementedError(f'PTX that nobody taught the translator: {item.text}')

    def _address(self, operand: str, scope: Scope, space: str) -> str:
        base, _, offset = operand.strip('[]').partition('+')
        register = scope.register(base)
        if register:
            base = self._get(base, f'u{register[0]}', scope) + '.astype(np.int64)'
        else:
            base = f'm.symbols[{base!r}]'
        return f'{base} + {offset}' if offset else base

    def _get(self, operand: str, kind: str, scope: Scope) -> str:
        """Return the expression of a value of a type."""
        dtype = DTYPES[kind]
        register = scope.register(operand)
        if register:
            bits, number = register
            if bits == width(kind):
                return f'm.{kind}[{number}][g]'
            return f'm.b{bits}[{number}][g].astype(np.{dtype.__name__})'
        if operand[0] == '%':
            return f'm.special[{operand[1:]!r}][g].astype(np.{dtype.__name__})'
        if operand in self.shared:
            return f'm.symbols[{operand!r}]'
        if operand[:2] in ('0f', '0F'):
            return f'np.array([0x{operand[2:]}], np.uint32).view(np.float32)[0]'
        value = int(operand, 0)
        if kind == 'pred':
            return str(bool(value))
        value &= (1 << width(kind)) - 1
        if kind[0] == 's' and value >> (width(kind) - 1):
            value -= 1 << width(kind)
        return f'np.{dtype.__name__}({value})'

    def _put(self, operand: str, value: str, kind: str, scope: Scope) -> str:
        """Return the assignment of a value of a type to a register, perhaps a wider one."""
        bits, number = scope.register(operand)
        if bits != width(kind):
            kind = ('s' if kind[0] == 's' else 'u') + str(bits)
        return f'm.{kind}[{number}][g] = {value}'


def _fma(a, b, c):
    return (np.asarray(a, np.float64) * b + c).astype(np.float32)


def _divide(a, b):
    """Divide, integers rounding towards zero."""
    if np.asarray(a).dtype.kind == 'f':
        return a / b
    if np.any(b == 0):
        raise ZeroDivisionError('a thread divides by zero')
    if not np.any(a < 0) and not np.any(b < 0):
        return a // b
    return np.where((a < 0) != (b < 0), -(np.abs(a) // np.abs(b)), np.abs(a) // np.abs(b))


def _insert(value, into, at, count):
    mask = into.dtype.type((1 << int(count)) - 1)
    at = into.dtype.type(at)
    return (into & ~(mask << at)) | ((value & mask) << at)


def _pack(low, high):
    low, high = (np.asarray(half).astype(np.float16).view(np.uint16).astype(np.uint32)
                 for half in (low, high))  # fmt: skip
    return low | (high << 16)


_HELPERS = {
    'fma': _fma, 'divide': _divide, 'remainder': lambda a, b: a - _divide(a, b) * b,
    'insert': _insert, 'pack': _pack,
}  # fmt: skip
