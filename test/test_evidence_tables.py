"""Tables of honesty and energy say what their records say, and renew the model they measured."""

from test_bench_energy import Machine
import yaml

from vla_edge_ros.lab.bench_energy import measure_energy, STEADY
from vla_edge_ros.lab.evidence_tables import energy_table, honesty_table, renew_power_models
from vla_edge_ros.telemetry.power_model import MODELS, PowerModel


def energy_record(**options):
    machine = Machine()
    bench = machine.bench()
    record = measure_energy(bench, 0.6, machine.run_loop(20))
    return record | {
        'device': 'NVIDIA H200', 'shape': '1.5b', 'kv_slots': 4096,
        'environment': {'commit': '0123456789abcdef'}} | options  # fmt: skip


def side(rate, age):
    return {'episodes': 200, 'success_rate': rate, 'success_interval': [rate - 0.1, rate + 0.1],
            'observation_age_ms': {'p50': age, 'p95': age + 5, 'p99': age + 6}}  # fmt: skip


def test_the_table_of_honesty_shows_both_sides_and_who_does_not_agree():
    schedules = [
        {'schedule': name, 'object_speed': 0.5, 'live': side(0.7, 10.0), 'virtual': side(0.8, 11),
         'virtual_less_live': {'distance': 1.25}, 'same_outcome': 0.9, 'agree': agree,
         'tolerances': {'success_rate': 0.1, 'distance': 2.0, 'p95': 4.0}}
        for name, agree in (('deadline', True), ('overlap', False))]  # fmt: skip
    lines = honesty_table({'schedules': schedules, 'starts': 5}, 'here')
    rows = [line for line in lines if line.startswith('| ') and '---' not in line][1:]
    assert rows[0].startswith(
        '| deadline, 0.5 m/s | live | 0.700 (0.60–0.80) | 10.0 / 15.0 / 16.0 ms |')
    assert rows[1].endswith('| 1.25 ms | 90 % | yes |') and rows[3].endswith('| **no** |')
    assert len({row.count('|') for row in rows}) == 1
    assert 'medians are told but not judged' in lines[-1]
    assert 'the same 200 episodes' in lines[0] and 'success 0.1, ages 2 ms' in lines[0]


def test_the_table_of_energy_shows_joules_and_how_the_parts_add_up():
    record = energy_record()
    text = '\n'.join(energy_table(record, 'here'))
    assert f'{record["chunk"]["joules_per_run"]:.2f} J a run' in text
    assert f'{record["loop"]["joules_per_chunk"]:.2f} J a chunk' in text
    assert f'{record["tasks"]["joules_per_completed_task"]:.0f} J a completed task' in text
    assert 'in each of the 6 measurements' in text
    without = '\n'.join(energy_table(record | {'tasks': 'unavailable: no mujoco'}, 'here'))
    assert '| tasks at 30 Hz | | unavailable: no mujoco |' in without
    assert 'in each of the 5 measurements' in without


def test_a_measured_device_gets_its_powers_and_the_others_stay():
    record, before = energy_record(), MODELS.read_text()
    after = renew_power_models(record, before)
    old, new = yaml.safe_load(before), yaml.safe_load(after)
    model = PowerModel(device='h200', **new.pop('h200'))
    assert set(model.basis.values()) == {'measured'} and '0123456789' in model.source
    assert model.prefill_w == round(record['prefill']['watts'], 1)
    assert model.idle_w == round(record['loop']['by_steady_power']['rest_watts'], 1)
    del old['h200']
    assert new == old and renew_power_models(record, after) == after
    assert after.count('\n#') + after.startswith('#') == before.count('\n#') + 1


def test_a_record_of_another_device_or_without_a_loop_changes_no_model():
    text = MODELS.read_text()
    assert renew_power_models(energy_record(device='NVIDIA L4'), text) == text
    assert renew_power_models(energy_record(loop='unavailable: no'), text) == text


def test_a_record_that_failed_changes_no_model_and_its_table_says_what_failed():
    text = MODELS.read_text()
    assert renew_power_models(energy_record(), text) != text
    assert renew_power_models(energy_record(passed=False), text) == text
    for name in STEADY:
        failed = energy_record() | {name: 'unavailable: it stood still', 'passed': False}
        for what in ('loop', 'tasks'):
            del failed[what]['by_steady_power']
        assert renew_power_models(failed, text) == text
        assert renew_power_models(failed | {'passed': True}, text) == text
        page = '\n'.join(energy_table(failed, 'here'))
        assert '| | unavailable: it stood still |' in page and 'not told' in page
        assert 'in each of the 5 measurements' in page
