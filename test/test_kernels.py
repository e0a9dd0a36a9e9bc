"""Every operation of every backend against the float64 reference, on awkward sizes."""

import shutil
import subprocess
import sys

import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError, ShapeError
from vla_edge_ros.kernels import cpu, reference
from vla_edge_ros.kernels.bfloat16 import to_bfloat16
from vla_edge_ros.kernels.cpu.compiled import compiled
from vla_edge_ros.kernels.cpu.elementwise import exponential
from vla_edge_ros.kernels.memory_plan import (
    Buffer,
    check_budgets,
    format_plan,
    GPU,
    PINNED,
    total_bytes,
)

RELATIVE = 2e-6  # of the largest output: float32 sums in another order

ROWS = (1, 3, 4, 31, 33)
SIZES = (1, 15, 64, 129)


def random_rows(rows, size, seed=0):
    """Draw rows with outliers, without which a softmax or a norm is not really tested."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, size)).astype(np.float32)
    x[rng.random(x.shape) < 0.02] *= 20
    return x


def assert_close(actual, expected):
    limit = RELATIVE * max(1, np.abs(expected).max())
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


@pytest.mark.parametrize('rows', ROWS)
@pytest.mark.parametrize('size', SIZES)
def test_row_operations_match_the_reference(rows, size):
    x, y = random_rows(rows, size, 1), random_rows(rows, size, 2)
    weight, bias = random_rows(2, size, 3)
    for name, arguments in (
        ('layer_norm', (x, weight, bias, 1e-5)),
        ('swiglu', (x, y)),
    ):
        expected = getattr(reference, name)(*arguments, np.empty(x.shape))
        actual = getattr(cpu, name)(*arguments, np.full_like(x, np.nan))
        assert_close(actual, expected)


def test_row_operations_may_write_over_their_input():
    x, y = random_rows(5, 33), random_rows(5, 33, 1)
    expected = reference.swiglu(x, y, np.empty(x.shape))
    assert_close(cpu.swiglu(x, y, x), expected)
    expected = reference.layer_norm(y, x[0], x[1], 1e-5, np.empty(x.shape))
    assert_close(cpu.layer_norm(y, x[0], x[1], 1e-5, y), expected)


@pytest.mark.parametrize('weights_dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('rows', ROWS)
@pytest.mark.parametrize(('depth', 'columns'), [(1, 1), (33, 31), (128, 128), (1030, 70)])
def test_linear_matches_the_reference(rows, depth, columns, weights_dtype):
    x, weight = random_rows(rows, depth, 1), random_rows(columns, depth, 2)
    out = np.full((rows, columns), np.nan, np.float32)
    for bias in (None, random_rows(1, columns, 3)[0]):
        expected = reference.linear(
            x, reference.pack_linear(weight, weights_dtype), bias, np.empty(out.shape)
        )
        actual = cpu.linear(x, cpu.pack_linear(weight, weights_dtype), bias, out)
        assert_close(actual, expected)


def test_bfloat16_weights_may_be_packed_as_float32_without_loss():
    x, weight = random_rows(3, 20), to_bfloat16(random_rows(9, 20))
    results = [
        cpu.linear(x, cpu.pack_linear(weight, dtype), None, np.empty((3, 9), np.float32))
        for dtype in ('float32', 'bfloat16')
    ]
    np.testing.assert_array_equal(*results)


def test_exponential_holds_over_the_whole_range():
    x = np.linspace(-87, 88, 10_001, dtype=np.float32)
    actual = np.array([exponential(value) for value in x])
    np.testing.assert_allclose(actual, np.exp(x.astype(np.float64)), rtol=1e-5)
    near_zero = np.linspace(-1, 1, 1001, dtype=np.float32)
    actual = np.array([exponential(value) for value in near_zero])
    np.testing.assert_allclose(actual, np.exp(near_zero.astype(np.float64)), rtol=3e-7)


def test_saturated_activations_stay_finite():
    x = np.array([[-1e30, -200, 0, 200, 1e30]], np.float32)
    expected = np.array([[0, 0, 0, 200, 1e30]], np.float32)
    actual = cpu.swiglu(x, np.ones_like(x), np.empty_like(x))
    np.testing.assert_allclose(actual, expected, atol=1e-6)


def test_nan_passes_through():
    x = np.array([[1, np.nan, 2]], np.float32)
    ones = np.ones(3, np.float32)
    assert np.isnan(cpu.layer_norm(x, ones, ones, 1e-6, np.empty_like(x))).all()
    packed = cpu.pack_linear(np.ones((2, 3), np.float32))
    assert np.isnan(cpu.linear(x, packed, None, np.empty((1, 2), np.float32))).all()


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'x': np.zeros((2, 4), np.float64)}, 'x dtype must be float32'),
        ({'x': np.zeros(4, np.float32)}, 'x shape'),
        ({'x': np.zeros((4, 2), np.float32).T}, 'x must be C-contiguous'),
        ({'x': [[0.0] * 4] * 2}, 'x must be a NumPy array'),
        ({'packed': np.zeros((3, 4), np.float32)}, 'packed shape'),
        ({'bias': np.zeros(2, np.float32)}, r'bias shape must be \(3\)'),
        ({'out': np.zeros((1, 3), np.float32)}, 'out shape'),
        ({'out': np.zeros((2, 3000), np.float32)}, 'packed shape'),
    ],
)
def test_linear_refuses_what_its_kernel_would_not_check(change, message):
    arguments = {
        'x': np.zeros((2, 4), np.float32),
        'packed': cpu.pack_linear(np.zeros((3, 4), np.float32)),
        'bias': np.zeros(3, np.float32),
        'out': np.zeros((2, 3), np.float32),
    }
    with pytest.raises(ShapeError, match=message):
        cpu.linear(**(arguments | change))


def test_row_operations_refuse_other_shapes():
    x = np.zeros((2, 4), np.float32)
    with pytest.raises(ShapeError, match='weight shape'):
        cpu.layer_norm(x, np.ones(3, np.float32), np.ones(4, np.float32), 1e-6, x)
    with pytest.raises(ShapeError, match='up shape'):
        cpu.swiglu(x, np.zeros((2, 5), np.float32), x)
    with pytest.raises(ShapeError, match='out shape'):
        cpu.swiglu(x, x, np.zeros((3, 4), np.float32))


def test_a_changed_kernel_reaches_callers_in_other_files(tmp_path):
    """Numba by itself keeps the caller's old machine code, with the old kernel inlined."""
    folder = tmp_path / 'kernels'
    folder.mkdir()
    shutil.copy(compiled.__code__.co_filename, folder / 'compiled.py')
    (folder / 'caller.py').write_text(
        'from compiled import compiled\nfrom inner import inner\n\n'
        '@compiled\ndef caller():\n    return inner()\n\nprint(caller())\n'
    )
    for value in (1, 2):
        (folder / 'inner.py').write_text(
            f'from compiled import compiled\n\n@compiled\ndef inner():\n    return {value}\n'
        )
        command = [sys.executable, '-B', 'caller.py']
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
        assert done.stdout.split() == [str(value)]
    assert list(folder.glob('**/*.nbc')), 'nothing was kept, so nothing was tested'


def test_a_plan_is_a_table_with_a_sum():
    plan = [Buffer('keys', (2, 300), 'float32'), Buffer('order', (5000,), 'int32')]
    assert total_bytes(plan) == 22_400
    head, keys, order, total = (line.split() for line in format_plan(plan).splitlines())
    assert head == ['buffer', 'shape', 'dtype', 'place', 'MB']
    assert keys == ['keys', '2x300', 'float32', 'main', '0.002']
    assert order == ['order', '5000', 'int32', 'main', '0.020']
    assert total == ['total', 'main', '0.022']


def test_a_plan_of_several_memories_has_the_sum_of_each_and_says_what_it_leaves_out():
    plan = [
        Buffer('weights', (1000, 1000), 'float16', GPU),
        Buffer('sent', (250_000,), 'int32', PINNED)]
    *_, gpu, pinned, total, note = format_plan(plan).splitlines()
    assert gpu.split() == ['total', 'GPU', '2.000']
    assert pinned.split() == ['total', 'pinned', '1.000']
    assert total.split() == ['total', '3.000']
    assert note.startswith('not counted: ')


def test_each_budget_counts_its_memory_and_pinned_memory_counts_in_both():
    plan = [
        Buffer('weights', (4_000_000,), 'uint8', GPU), Buffer('sent', (500_000,), 'uint8', PINNED),
        Buffer('vision', (2_000_000,), 'uint8')]
    check_budgets(plan, memory_budget_mb=2.5, vram_budget_mb=4.5)
    check_budgets(plan, memory_budget_mb=0.0, vram_budget_mb=0.0)
    for name, budget_mb, needed_mb, absent in (
        ('memory_budget_mb', 2.4, 2.5, 'weights'), ('vram_budget_mb', 4.4, 4.5, 'vision')
    ):
        with pytest.raises(ConfigError) as caught:
            check_budgets(plan, **{name: budget_mb})
        first, *table = str(caught.value).splitlines()
        assert first == f'{name} must be >= the {needed_mb} MB of this policy, got {budget_mb}'
        assert any(row.startswith('sent') for row in table)
        assert not any(row.startswith(absent) for row in table)
