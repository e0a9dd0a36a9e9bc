"""Sources of energy are found where a machine has them, and name what stands in the way."""

import errno
from pathlib import Path

import pytest

from vla_edge_ros.clock import NS_PER_MS, NS_PER_S
from vla_edge_ros.telemetry import energy_sources
from vla_edge_ros.telemetry.energy_sources import (
    CounterSource,
    find_sources,
    hwmon_sources,
    nvml_source_at,
    nvml_sources,
    PowerSource,
    rapl_sources,
    Reading,
    Unavailable,
    Unreadable,
)

RANGE_UJ = 262_143_328_850


class FakeNvml:
    """NVIDIA's library as ctypes shows it, with two GPUs of which one has no counter."""

    def __init__(self, count=2, init=0):
        self.millijoules = 123_456_789
        self._count, self._init = count, init

    def __getattr__(self, name):
        raise AttributeError(f'undefined symbol: {name}')

    class nvmlErrorString:  # noqa: N801
        def __new__(cls, code):
            return {3: b'Not Supported', 9: b'Driver Not Loaded', 15: b'GPU is lost'}[code.value]

    def nvmlInit_v2(self):  # noqa: N802
        return self._init

    def nvmlDeviceGetCount_v2(self, count):  # noqa: N802
        count._obj.value = self._count
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index, device):  # noqa: N802
        device._obj.value = 0x7FFF_0000_1000 + index.value
        return 0

    def nvmlDeviceGetHandleByPciBusId_v2(self, address, device):  # noqa: N802
        slot = int(address.value.split(b':')[1], 16)
        if slot >= self._count:
            return 15
        return self.nvmlDeviceGetHandleByIndex_v2(type('c', (), {'value': slot}), device)

    def nvmlDeviceGetName(self, device, name, length):  # noqa: N802
        name.value = b'Some GPU' if device.value & 1 == 0 else b'Old GPU'
        return 0

    def nvmlDeviceGetTotalEnergyConsumption(self, device, energy):  # noqa: N802
        if device.value & 1:
            return 3
        if self.millijoules is None:
            return 15
        energy._obj.value = self.millijoules
        return 0


def write(folder, **files):
    folder.mkdir(parents=True)
    for name, value in files.items():
        (folder / name).write_text(f'{value}\n')
    return folder


def rapl_zone(root, zone, name, energy_uj=1_000_000):
    return write(root / zone, name=name, energy_uj=energy_uj, max_energy_range_uj=RANGE_UJ)


def test_counter_that_wraps_goes_on_and_is_counted():
    values = iter([90.0, 95.0, 3.0, 10.0])
    source = CounterSource('it', lambda: next(values), range_j=100.0)
    readings = [source.read(i * NS_PER_S) for i in range(4)]
    assert readings == [
        Reading(0.0, False), Reading(5.0, True), Reading(13.0, True, 'counter wrapped'),
        Reading(20.0, True)]


def test_step_back_that_no_wrap_around_explains_is_a_reset():
    values = iter([1000.0, 5.0, 8.0])
    source = CounterSource('it', lambda: next(values), range_j=262_143.0)
    readings = [source.read(i * NS_PER_S) for i in range(3)]
    assert readings[1:] == [Reading(0.0, False, 'counter reset'), Reading(3.0, True)]


def test_step_that_no_machine_could_have_used_is_a_reset():
    values = iter([5.0, 1e9, 1e9 + 7.0])
    source = CounterSource('it', lambda: next(values))
    readings = [source.read(i * NS_PER_S) for i in range(3)]
    assert readings[1:] == [Reading(0.0, False, 'counter reset'), Reading(7.0, True)]


def test_counter_that_stands_still_has_nothing_to_say():
    source = CounterSource('it', lambda: 5.0)
    assert source.read(0) == Reading(0.0, False)
    assert source.read(NS_PER_S) is None


def test_ramp_of_power_is_integrated_exactly_over_uneven_times():
    now_ns = 0
    source = PowerSource('it', lambda: 10.0 + 4.0 * now_ns / NS_PER_S)
    for now_ms in (0, 7, 300, 310, 900, 1900):
        now_ns = now_ms * NS_PER_MS
        reading = source.read(now_ns)
    assert reading.joined and reading.joules == pytest.approx(10 * 1.9 + 2 * 1.9**2)


def test_power_samples_too_far_apart_are_not_joined():
    source = PowerSource('it', lambda: 50.0)
    source.read(0)
    assert source.read(3 * NS_PER_S) == Reading(0.0, False, 'sampled too seldom')
    assert source.read(3 * NS_PER_S + 100 * NS_PER_MS).joules == pytest.approx(5.0)


def test_gpu_counter_is_read_in_joules_and_named_after_its_gpu():
    library = FakeNvml()
    source, _ = nvml_sources(lambda _name: library)
    assert source.name == 'nvml 0 Some GPU'
    assert source.read(0).joules == 0.0
    library.millijoules += 2500
    assert source.read(NS_PER_S).joules == pytest.approx(2.5)


def test_gpu_without_a_counter_is_unavailable_in_the_words_of_the_driver():
    _, old = nvml_sources(lambda _name: FakeNvml())
    assert old == Unavailable(
        'nvml 1 Old GPU', 'nvmlDeviceGetTotalEnergyConsumption: Not Supported')


def test_gpu_that_is_lost_later_is_unreadable_and_not_0():
    library = FakeNvml()
    source, _ = nvml_sources(lambda _name: library)
    library.millijoules = None
    with pytest.raises(Unreadable, match='GPU is lost'):
        source.read(0)


@pytest.mark.parametrize(('library', 'reason'), [
    (FakeNvml(init=9), 'nvmlInit_v2: Driver Not Loaded'),
    (FakeNvml(count=0), 'the NVIDIA driver finds no GPU'),
    (object(), 'nvmlErrorString'),
])
def test_library_that_finds_nothing_says_why(library, reason):
    (missing,) = nvml_sources(lambda _name: library)
    assert isinstance(missing, Unavailable) and reason in missing.reason


def test_machine_without_a_driver_says_so():
    def load(name):
        raise OSError(f'{name}: cannot open shared object file')

    (missing,) = nvml_sources(load)
    assert missing == Unavailable(
        'nvml', 'libnvidia-ml.so.1 cannot be loaded: no NVIDIA driver')


def test_rapl_takes_packages_memory_and_platform_but_no_part_twice(tmp_path):
    for zone, name in (
        ('intel-rapl:0', 'package-0'), ('intel-rapl:0:0', 'core'), ('intel-rapl:0:1', 'dram'),
        ('intel-rapl:0:2', 'uncore'), ('intel-rapl:1', 'psys'), ('intel-rapl-mmio:0', 'package-0'),
    ):
        rapl_zone(tmp_path, zone, name)
    assert [source.name for source in rapl_sources(tmp_path)] == [
        'rapl 0 package-0', 'rapl 0:1 dram', 'rapl 1 psys']


def test_rapl_counter_wraps_where_the_kernel_says(tmp_path):
    zone = rapl_zone(tmp_path, 'intel-rapl:0', 'package-0', RANGE_UJ - 3_000_000)
    (source,) = rapl_sources(tmp_path)
    source.read(0)
    (zone / 'energy_uj').write_text('4000000\n')
    reading = source.read(NS_PER_S)
    assert reading.joules == pytest.approx(7.0) and reading.fault == 'counter wrapped'


def test_rapl_without_permission_says_how_to_allow_it(tmp_path, monkeypatch):
    rapl_zone(tmp_path, 'intel-rapl:0', 'package-0')
    read_text = Path.read_text

    def refuse(path, *arguments):
        if path.name == 'energy_uj':
            raise PermissionError(errno.EACCES, 'Permission denied')
        return read_text(path, *arguments)

    monkeypatch.setattr(Path, 'read_text', refuse)
    (missing,) = rapl_sources(tmp_path)
    assert missing.name == 'rapl 0 package-0' and 'Permission denied' in missing.reason
    assert 'chmod a+r' in missing.advice


def test_rapl_that_vanishes_is_unreadable_and_names_its_file(tmp_path):
    zone = rapl_zone(tmp_path, 'intel-rapl:0', 'package-0')
    (source,) = rapl_sources(tmp_path)
    (zone / 'energy_uj').unlink()
    with pytest.raises(Unreadable, match='energy_uj: No such file'):
        source.read(0)


def test_file_without_a_number_is_no_source(tmp_path):
    rapl_zone(tmp_path, 'intel-rapl:0', 'package-0', energy_uj='')
    (missing,) = rapl_sources(tmp_path)
    assert isinstance(missing, Unavailable) and 'holds no number' in missing.reason


def test_jetson_rails_are_voltage_times_current_and_shunts_are_no_rails(tmp_path):
    write(tmp_path / 'hwmon3', name='ina3221', in1_label='VDD_IN', in1_input=5000, curr1_input=900,
          in2_label='VDD_SOC', in2_input=5000, curr2_input=100,
          in4_input=1, curr4_input=1000, in7_input=3, in7_label='sum of shunt voltages')
    whole, part = hwmon_sources(tmp_path)
    assert (whole.name, part.name) == ('hwmon3 ina3221 in1 VDD_IN', 'hwmon3 ina3221 in2 VDD_SOC')
    whole.read(0)
    assert whole.read(NS_PER_S).joules == pytest.approx(4.5)


def test_power_sensors_of_other_chips_are_taken_in_microwatts(tmp_path):
    write(tmp_path / 'hwmon0', name='ina238', power1_input=12_500_000, in1_input=12_000,
          curr1_input=1000)
    write(tmp_path / 'hwmon1', name='power_meter', power1_average=80_000_000)
    sources = hwmon_sources(tmp_path)
    assert [source.name for source in sources] == ['hwmon0 ina238 power1',
                                                   'hwmon1 power_meter power1']
    for source, joules in zip(sources, (12.5, 80.0), strict=True):
        source.read(0)
        assert source.read(NS_PER_S).joules == pytest.approx(joules)


def test_battery_is_no_source(tmp_path):
    chip = write(tmp_path / 'hwmon0', name='BAT0', power1_input=9_000_000)
    write(chip / 'device', type='Battery')
    (missing,) = hwmon_sources(tmp_path)
    assert isinstance(missing, Unavailable) and 'no power sensor' in missing.reason


def test_every_kind_that_is_missing_is_named(tmp_path, monkeypatch):
    def load(_name):
        raise OSError

    empty = tmp_path / 'nowhere'
    monkeypatch.setattr(energy_sources, 'nvml_sources', lambda: nvml_sources(load))
    monkeypatch.setattr(energy_sources, 'hwmon_sources', lambda: hwmon_sources(empty))
    monkeypatch.setattr(energy_sources, 'rapl_sources', lambda: rapl_sources(empty))
    assert [missing.name for missing in find_sources()] == ['nvml', 'hwmon', 'rapl']


def test_one_gpu_is_found_by_its_place_on_the_bus():
    nvml = FakeNvml()
    source = nvml_source_at('00000000:00:00.0', lambda _: nvml)
    assert source.name == 'nvml Some GPU' and source.read(0).joules == 0
    nvml.millijoules += 5000
    assert source.read(NS_PER_S) == Reading(5.0, True)
    assert 'Not Supported' in nvml_source_at('00000000:01:00.0', lambda _: nvml).reason
    assert 'GPU is lost' in nvml_source_at('00000000:07:00.0', lambda _: nvml).reason
    broken = nvml_source_at('00000000:00:00.0', lambda _: FakeNvml(init=9))
    assert isinstance(broken, Unavailable) and 'Driver Not Loaded' in broken.reason

    def missing(_):
        raise OSError('no such file')

    assert 'no NVIDIA driver' in nvml_source_at('0:0:0.0', missing).reason


def test_another_source_on_a_counter_begins_for_itself():
    value = [90.0]
    source = CounterSource('it', lambda: value[0], 100.0)
    source.read(0)
    value[0] = 95.0
    source.read(NS_PER_S)
    other = source.again()
    assert other.name == 'it' and other.read(NS_PER_S).joules == 0
    value[0] = 2.0
    assert other.read(2 * NS_PER_S) == Reading(7.0, True, 'counter wrapped')
    assert source.read(2 * NS_PER_S).joules == pytest.approx(12.0)
