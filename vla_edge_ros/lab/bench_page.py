"""``docs/benchmarks.md``, written from the records of ``vla-edge bench engine``."""

from collections.abc import Iterable
import json
from pathlib import Path
from typing import Any

RECORD, DOCUMENT = 'docs/results/engine.json', 'docs/benchmarks.md'
MORE_RECORDS = ('docs/results/engine_*.json', 'docs/results/energy.json')
NONE = '—'
HEADER = """# The CUDA engine

What `vla-edge bench engine` measured; the record is `docs/results/engine.json`, and
`python -m vla_edge_ros.lab.results write` writes this page from it. The floor is what a chunk
has to read at the bandwidth measured in the same run: weights once for the prefill and once a
decoded token, keys and values.

"""
TIMES = ('median', 'p99', 'p99.9', 'max')


def engine_page(root: Path) -> str:
    """Return the page on the engine, from its records."""
    paths = [root / RECORD, *(
        path for pattern in MORE_RECORDS for path in sorted(root.glob(pattern)))]
    records = [json.loads(path.read_text(encoding='utf-8')) for path in paths]
    return HEADER + '\n\n'.join(document(record) for record in records) + '\n'


def document(record: dict) -> str:
    """Return a record as Markdown; what it does not hold is left out."""
    modes = {'endurance': _endurance, 'loop': _loop, 'energy': _energy}
    return '\n'.join(modes.get(record.get('mode'), _engine)(record))


def _engine(record: dict) -> list[str]:
    lines = [
        f'**{record["device"]}**, Qwen2.5 {record["shape"]} shape, random weights, '
        f'{record["chunks"]} chunks behind {record["warm_up_chunks"]} for warming up, read '
        f'bandwidth {record["read_bandwidth_gb_s"] / 1e3:.2f} TB/s ({_commit(record)}). '
        f'{_names(_first_row(record)["chunk_ms"])}, ms:',
        '',
        *_lengths(record),
    ]
    if 'first_chunk' in record:
        first = record['first_chunk']
        lines += ['', f'The first chunk after the start took {first["after_start_ms"]:.2f} ms '
                  f'({first["after_start_over_median"]:.2f} of the median behind '
                  f'{record["stage_length"]} slots), the first after {first["idle_s"]:g} s '
                  f'without work {first["after_idle_ms"]:.2f} ms '
                  f'({first["after_idle_over_median"]:.2f}).']  # fmt: skip
    if 'gpu' in record:
        lines += ['', *_gpu(record['gpu'])]
    if record['peers']:
        lines += ['', *_peers(record)]
    return [*lines, '', *_stages(record)]


def _first_row(record: dict) -> dict:
    return next(iter(record['lengths'].values()))


def _lengths(record: dict) -> list[str]:
    rows = []
    for length, row in record['lengths'].items():
        rows.append({
            'cached slots': length,
            'chunks': row.get('chunks'),
            'chunk': _times(row['chunk_ms']),
            'p99.9 / median': _number(row.get('p99.9_over_median'), 3),
            'prefill': _times(row['prefill_ms']),
            'decode a token': _times(row['decode_ms_per_token']),
            'host CPU': _times(row['host_cpu_ms']),
            'floor': _number(row['floor_ms']),
            'chunk / floor': _number(row['chunk_ms']['median'] / row['floor_ms']),
        })  # fmt: skip
    return _table(rows)


def _peers(record: dict) -> list[str]:
    ratios, times = record.get('ours_over_peer', {}), record.get('peer_chunk_ms', {})
    rows = []
    for name, value in record['peers'].items():
        is_time = isinstance(value, float)
        rows.append({
            'peer': name,
            'chunk, ms': _number(value, 1) if is_time else value,
            'p99 / p99.9 / max': ' / '.join(
                _number(times[name][key], 1) for key in TIMES[1:]) if name in times else None,
            'ours / theirs': _number(ratios.get(name)),
        })  # fmt: skip
    notes = record.get('peer_notes', {})
    said = [f'{name} {version}' for name, version in notes.get('versions', {}).items()]
    if 'compile_s' in notes:
        said.append(f'compiled ({notes["compile_mode"]}) in {notes["compile_s"]:.0f} s')
    behind = f' ({", ".join(said)})' if said else ''
    length = record['peer_length']
    return [f'Others in the same run{behind}, behind {length} slots of a static cache of '
            f'{record["peer_cache_slots"]}, all of which they attend to:', '',
            *_table(rows)]  # fmt: skip


def _stages(record: dict) -> list[str]:
    rows = []
    for row in record['stages']:
        rows.append({
            'pass': row['pass'] or NONE,
            'stage': row['stage'],
            'launches a chunk': row.get('launches'),
            'us': _number(row['us'], 1),
            'ms of a chunk': _number(row.get('ms_of_chunk')),
            'MB': _number(_scaled(row.get('bytes'), 1e-6)),
            'GFLOP': _number(_scaled(row.get('flop'), 1e-9)),
            'memory roof': _percent(row.get('memory_roof')),
            'compute roof': _percent(row.get('compute_roof')),
        })  # fmt: skip
    title = f'Kernels of one layer behind {record["stage_length"]} slots:'
    if all('ms_of_chunk' in row for row in record['stages']):
        total = sum(row['ms_of_chunk'] for row in record['stages'])
        tflop_s = record['compute_roof_tflop_s']
        roof = NONE if tflop_s is None else f'{tflop_s:g} TFLOP/s'
        title = (
            f'One launch of each kernel behind {record["stage_length"]} slots, alone and again '
            f'and again; all of a chunk together are {total:.2f} ms. The memory roof is the read '
            f'bandwidth above; the compute roof {roof} ({record["compute_roof_source"]}):')
    return [title, '', *_table(rows)]


def _gpu(gpu: dict) -> list[str]:
    rows = []
    for when, state in gpu.items():
        row = {'GPU': when.replace('_', ' ')}
        if isinstance(state, str):
            row['state'] = state
        else:
            row |= {
                'SM clock': _of(state, 'sm_clock_mhz', 'sm_clock_max_mhz', 'MHz'),
                'memory clock': _of(state, 'memory_clock_mhz', 'memory_clock_max_mhz', 'MHz'),
                'power': _of(state, 'power_w', 'power_limit_w', 'W'),
                'temperature': f'{_plain(state["temperature_c"])} °C',
                'driver': state['driver'],
            }
        rows.append(row)
    return _table(rows)


def _endurance(record: dict) -> list[str]:
    what = _what(record)
    lines = [
        f'**Endurance**: {record["chunks"]} of {record["asked_chunks"]} chunks, {what}, '
        f'{record["device"]} ({_commit(record)}), {record["seconds"]:.0f} s: '
        f'{"passed" if record["passed"] else "FAILED"}.',
        '',
        *_table([{
            'chunk, ms (min / median / p99 / p99.9 / max)':
                _times(record['chunk_ms'], ('min', *TIMES)) if 'chunk_ms' in record else None,
            'p99.9 / median': _number(record.get('p99.9_over_median'), 3),
            'chunks with other tokens': record['differing_chunks'],
            'device grown, bytes': record['memory']['device_grown_bytes'],
            'process grown, bytes': record['memory']['rss_grown_bytes'],
        }]),
    ]  # fmt: skip
    if 'gpu' in record:
        lines += ['', *_gpu(record['gpu'])]
    if 'histogram' in record:
        edges, counts = record['histogram']['edges_ms'], record['histogram']['chunks']
        rows = [{'from, ms': f'{low:.3f}', 'to, ms': f'{high:.3f}', 'chunks': count}
                for low, high, count in zip(edges, edges[1:], counts) if count]  # fmt: skip
        lines += ['', *_table(rows)]
    return lines


def _loop(record: dict) -> list[str]:
    camera = record['camera']
    counts = ', '.join(f'{name} {count}' for name, count in record['decisions'].items())
    reasons = ', '.join(f'{name} {count}' for name, count in record['reasons'].items())
    times = [
        ('tick after its time', record['tick_late_ms']),
        ('deviation from the period', record['period_deviation_ms']),
        ('action after its tick', record['published_after_ms']),
        ('run of the policy', record['run_ms']),
        *((f'of it {name}', values) for name, values in record['stages_ms'].items()),
        ('age of the picture at publication', record['observation_age_ms']),
    ]
    rows = [{'ms': name} | {key: _number(values[key]) for key in ('p50', 'p99', 'p99.9', 'max')}
            for name, values in times]  # fmt: skip
    first = record['run_ms']['first']
    return [
        f'**The loop**: {record["ticks"]} of {record["asked_ticks"]} ticks at '
        f'{record["rate_hz"]:g} Hz, schedule {record["schedule"]}, deadline '
        f'{record["deadline_ms"]:g} ms, '
        f'{_what(record)}, {record["kv_slots"]} slots for frames, a camera of '
        f'{camera["width"]}x{camera["height"]} at {camera["rate_hz"]:g} Hz in another process, '
        f'{record["device"]} ({_commit(record)}): {"passed" if record["passed"] else "FAILED"}.',
        '',
        f'- deadline misses {record["deadline_misses"]}, late results {record["late_results"]}, '
        f'ticks skipped {record["skipped_ticks"]}',
        f'- decisions: {counts}; reasons: {reasons}',
        f'- first run {_number(first)} ms, calibrated '
        f'{sum(record["calibration_ms"].values()):.2f} ms; CPU {record["cpu_percent"]:.0f} % of a '
        f'core; bytes grown: device {record["memory"]["device_grown_bytes"]}, process '
        f'{record["memory"]["rss_grown_bytes"]}',
        '',
        *_table(rows),
        *(['', *_gpu(record['gpu'])] if 'gpu' in record else []),
    ]


def _energy(record: dict) -> list[str]:
    names = ('idle', 'prefill', 'decode', 'chunk')
    steady = [{'back to back': name} | (
        {'watts': record[name]} if isinstance(record[name], str) else {
            'watts': _number(record[name]['watts'], 1),
            'ms a run': _number(record[name].get('run_ms')),
            'J a run': _number(record[name].get('joules_per_run'), 3),
            'parts / counter': _number(record[name].get('parts_over_counter'), 4),
        }) for name in names]  # fmt: skip
    lines = [
        f'**Energy**: {_what(record)}, {record["kv_slots"]} slots for frames, all filled, '
        f'{record["source"]} on {record["device"]} ({_commit(record)}): '
        f'{"passed" if record["passed"] else "FAILED"} (sum of parts within '
        f'{100 * record["tolerance"]:g} % of the counter, '
        f'{record["sample_hz"]:g} samples a second).',
        '', *_table(steady), '', *_energy_runs(record),
    ]
    return [*lines, *(['', *_gpu(record['gpu'])] if 'gpu' in record else [])]


def _energy_runs(record: dict) -> list[str]:
    rows, said = [], []
    for name, title in (('loop', 'the loop at 30 Hz'), ('tasks', 'tasks at 30 Hz')):
        found = record[name]
        if isinstance(found, str):
            said += ['', f'{title[0].upper()}{title[1:]}: {found}.']
            continue
        alone, per_task = found.get('by_steady_power', {}), found.get('joules_per_completed_task')
        rows.append({
            'run': f'{title}, {found["seconds"]:.1f} s',
            'J': _number(found['joules'], 1), 'watts': _number(found['watts'], 1),
            'parts by samples, J': ', '.join(
                f'{part} {joules:.1f}' for part, joules in found['parts_joules'].items()),
            'parts by steady power, J': ', '.join(
                f'{part.removesuffix("_joules")} {alone[part]:.1f}'
                for part in ('prefill_joules', 'decode_joules', 'rest_joules') if part in alone),
            'rest, watts': _number(alone.get('rest_watts'), 1),
            'share of the rest': _percent(alone.get('rest_share')),
            'J a chunk': _number(found.get('joules_per_chunk'), 3),
            'J a completed task': _number(per_task, 1),
            'tasks': f'{found["completed"]} of {found["episodes"]}' if 'episodes' in found
                     else None,
            'parts / counter': _number(found.get('whole', found).get('parts_over_counter'), 4),
            'counter moves every, ms': _number(found['counter_period_ms'], 0),
        })  # fmt: skip
    return [*(_table(rows) if rows else []), *said]


def _what(record: dict) -> str:
    if record['shape'] == 'policy':
        return 'the embedded policy'
    behind = f' behind {record["length"]} slots' if 'length' in record else ''
    return f'Qwen2.5 {record["shape"]} shape, random weights{behind}'


def _commit(record: dict) -> str:
    return f'commit {record["environment"]["commit"][:10] or "unknown"}'


def _table(rows: list[dict[str, Any]]) -> list[str]:
    """Return Markdown of the columns that any row has a value for."""
    names = list(dict.fromkeys(
        name for row in rows for name, value in row.items() if value is not None))
    lines = [names, ['---'] * len(names)]
    lines += [[NONE if row.get(name) is None else str(row[name]) for name in names]
              for row in rows]  # fmt: skip
    return [_line(cells) for cells in lines]


def _line(cells: list[str]) -> str:
    separator = '|' if set(cells) == {'---'} else ' | '
    return f'|{" " * (len(separator) // 2)}{separator.join(cells)}{" " * (len(separator) // 2)}|'


def _names(times: dict) -> str:
    text = ' / '.join(name for name in TIMES if name in times)
    return text[0].upper() + text[1:]


def _times(times: dict, names: Iterable[str] = TIMES) -> str:
    return ' / '.join(_number(times[name]) for name in names if name in times)


def _number(value: float | None, digits: int = 2) -> str | None:
    return None if value is None else f'{value:.{digits}f}'


def _percent(value: float | None) -> str | None:
    return None if value is None else f'{100 * value:.0f} %'


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _plain(value: Any) -> str:
    return f'{value:g}' if isinstance(value, float) else str(value)


def _of(state: dict, name: str, limit: str, unit: str) -> str:
    return f'{_plain(state[name])} of {_plain(state[limit])} {unit}'
