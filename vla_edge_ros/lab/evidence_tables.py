"""Tables of what was measured for real: virtual against real time, and the GPU's energy."""

from collections.abc import Mapping
import re
from typing import Any

from vla_edge_ros.lab.bench_energy import STEADY
from vla_edge_ros.telemetry.energy import UNAVAILABLE
from vla_edge_ros.telemetry.power_model import MODELS

DEVICE = 'h200'
"""Whose power model is taken from a record of ``vla-edge bench engine --energy``."""
RECORDED_ON = 'NVIDIA H200'


def honesty_table(record: Mapping[str, Any], source: str) -> list[str]:
    """
    Return what real and virtual time came to for the same episodes.

    Parameters
    ----------
    record : mapping
        Of ``lab.honesty``.
    source : str
        Machine and commit.

    """
    schedules = record['schedules']
    limits = schedules[0]['tolerances']
    lines = [
        '**Virtual against real time**: the same '
        f'{schedules[0]["live"]["episodes"]} episodes of each schedule through DDS, in '
        f'{record["starts"]} starts of the nodes, and in virtual time, which is told what was '
        'recorded live: the cost of the runs, the phase of the camera, the transport of '
        f'pictures and actions ({source}). The cubes move so fast that some episodes fail. '
        f'Tolerances, stated before: success {limits["success_rate"]:g}, ages '
        f'{limits["distance"]:g} ms between the distributions and {limits["p95"]:g} ms at the '
        '95th percentile; `vla_edge_ros/lab/honesty.py` says why.',
        '', '| schedule, speed of the cubes | | success | age p50 / p95 / p99 | distance of the '
        'ages | same outcome | agrees |', '|---|---|---|---|---|---|---|',
    ]  # fmt: skip
    for found in schedules:
        for side in ('live', 'virtual'):
            told, first = found[side], side == 'live'
            low, high = told['success_interval']
            ages = ' / '.join(
                f'{told["observation_age_ms"][point]:.1f}' for point in ('p50', 'p95', 'p99'))
            what = f'{found["schedule"]}, {found["object_speed"]:g} m/s' if first else ''
            end = ('', '', '') if first else (
                f'{found["virtual_less_live"]["distance"]:.2f} ms',
                f'{100 * found["same_outcome"]:.0f} %', 'yes' if found['agree'] else '**no**')
            lines.append(
                f'| {what} | {side} | {told["success_rate"]:.3f} ({low:.2f}–{high:.2f}) | '
                f'{ages} ms | {" | ".join(end)} |')
    return [
        *lines, '', 'The medians are told but not judged, for they lie in gaps: between the first '
        'and the second action of a chunk with overlap, between starts of the nodes, each with '
        'another phase of the camera, with deadline.',
    ]


def memory_table(record: Mapping[str, Any], source: str) -> list[str]:
    """
    Return how often each eviction policy still held the cue when the robot had to act.

    Parameters
    ----------
    record : mapping
        Of ``lab.bench_memory``.
    source : str
        Machine and commit.

    """
    cells = {(row['recall_s'], row['frames'], row['eviction']): row for row in record['rows']}
    lines = [
        '**Is the cue still in the cache?** Task `memory`, '
        f'{record["episodes"]} episodes for each wait, the same frames for all caches, embedded '
        "by the embedded policy's vision encoder, cubes at "
        f'{record["object_speed"]:g} m/s ({source}). A cell is the share of episodes in which a '
        'frame with the cue was still held at the tick at which the tool was released, with its '
        '95 % interval, then at the tick at which the expert had fulfilled the task. This is what '
        'the cache kept, not what a policy makes of it: keys and values of later frames can carry '
        'the colour on. **No policy that is trained for this task is shipped, so success in the '
        'loop is not shown.**',
        '', '| wait | frames (slots) | semantic | fifo | uniform |', '|---|---|---|---|---|',
    ]
    for recall_s, frames in dict.fromkeys(key[:2] for key in cells):
        rows = [cells[recall_s, frames, name] for name in ('semantic', 'fifo', 'uniform')]
        told = []
        for row in rows:
            low, high = row['at_release']['interval']
            told.append(f'{row["at_release"]["rate"]:.3f} ({low:.2f}–{high:.2f}), '
                        f'{row["at_success"]["rate"]:.3f}')
        lines.append(
            f'| {recall_s:g} s | {frames} ({rows[0]["kv_slots"]}) | ' + ' | '.join(told) + ' |')
    return [*lines, '', _memory_verdict(cells)]


def _memory_verdict(cells: Mapping[tuple, Mapping[str, Any]]) -> str:
    """Say where semantic eviction is shown to keep the cue more, and less, often."""
    told = []
    for other in ('fifo', 'uniform'):
        better, worse = [], []
        for recall_s, frames in dict.fromkeys(key[:2] for key in cells):
            (low, high), (other_low, other_high) = (
                cells[recall_s, frames, name]['at_success']['interval']
                for name in ('semantic', other))
            place = f'{frames} frames {recall_s:g} s'
            better += [place] if low > other_high else []
            worse += [place] if high < other_low else []
        told.append(f'more often than `{other}` at {", ".join(better) or "none"} and less often '
                    f'at {", ".join(worse) or "none"}')
    return ('When the task is fulfilled, `semantic` is shown to hold the cue (intervals apart) '
            + '; '.join(told) + '. Elsewhere they are not told apart.')


def energy_table(record: Mapping[str, Any], source: str) -> list[str]:
    """
    Return what a chunk and a completed task cost in joules.

    Parameters
    ----------
    record : mapping
        Of ``vla-edge bench engine --energy``.
    source : str
        Machine and commit.

    """
    idle = record['idle']
    period = UNAVAILABLE if isinstance(idle, str) else f'{idle["counter_period_ms"]:.0f} ms'
    lines = [
        f'**Energy**: {record["device"]}, {record["shape"]} shape behind '
        f'{record["kv_slots"]} slots, by its own counter ({source}). Alone means back to back for '
        'seconds, so that the counter, which moves only every '
        f'{period}, tells it.',
        '', '| | power | energy |', '|---|---|---|',
    ]  # fmt: skip
    for name in STEADY:
        found = record[name]
        if isinstance(found, str):
            lines.append(f'| {name}{"" if name == "idle" else ", alone"} | | {found} |')
            continue
        each = '' if name == 'idle' else f'{found["joules_per_run"]:.2f} J a run'
        lines.append(f'| {name}{"" if name == "idle" else ", alone"} | {found["watts"]:.0f} W | '
                     f'{each} |')  # fmt: skip
    for name, title in (('loop', 'the loop at 30 Hz'), ('tasks', 'tasks at 30 Hz')):
        found = record[name]
        if isinstance(found, str):
            lines.append(f'| {title} | | {found} |')
            continue
        alone, share = found.get('by_steady_power'), 'between the runs not told'
        if alone:
            share = (f'{100 * alone["rest_share"]:.0f} % between the runs, at '
                     f'{alone["rest_watts"]:.0f} W')  # fmt: skip
        each = (f'{found["joules_per_chunk"]:.2f} J a chunk' if name == 'loop'
                else f'{found["joules_per_completed_task"]:.0f} J a completed task')  # fmt: skip
        lines.append(f'| {title} | {found["watts"]:.0f} W | {each}, {share} |')
    sums = [record[name] for name in (*STEADY, 'tasks') if isinstance(record[name], dict)]
    if isinstance(record['loop'], dict):
        sums.append(record['loop']['whole'])
    off = max(abs(part['parts_over_counter'] - 1) for part in sums)
    return [
        *lines, '', f'The parts add up to the counter within {100 * off:.1f} % in each of the '
        f'{len(sums)} measurements. Tasks: the expert acts, the engine runs beside it.',
    ]


def renew_power_models(record: Mapping[str, Any], text: str) -> str:
    """
    Return ``power.yaml`` with the powers of ``DEVICE`` as recorded, else as it is.

    Idle is what the GPU draws between the runs of a loop at 30 Hz, for its clocks stay up there.
    A record that has not passed, or in which a measurement failed, changes nothing.
    """
    loop = record['loop']
    if record['device'] != RECORDED_ON or not record['passed'] or not all(
            isinstance(record[name], dict) for name in (*STEADY, 'loop')):
        return text
    commit = record['environment']['commit'][:10]
    powers = {'idle_w': loop['by_steady_power']['rest_watts'],
              'prefill_w': record['prefill']['watts'], 'decode_w': record['decode']['watts']}
    block = [f'{DEVICE}:', *(f'  {name}: {watts:.1f}' for name, watts in powers.items()),
             f'  basis: {{{", ".join(f"{name}: measured" for name in powers)}}}',
             '  source: >-',
             f'    vla-edge bench engine --energy on an {RECORDED_ON}, {record["shape"]} shape,',
             f'    commit {commit}; idle is between the runs of a loop at 30 Hz, without any',
             f'    it was {record["idle"]["watts"]:.1f} W', '']  # fmt: skip
    return re.sub(rf'^{DEVICE}:\n(?:  .*\n)+', lambda _: '\n'.join(block), text, flags=re.M)


def write_power_models(record: Mapping[str, Any]) -> None:
    """Renew the file of the models."""
    text = MODELS.read_text(encoding='utf-8')
    MODELS.write_text(renew_power_models(record, text), encoding='utf-8')
