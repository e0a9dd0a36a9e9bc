"""
The figures in the documents: measured by one command, kept as JSON, written by another.

``python -m vla_edge_ros.lab.results measure`` runs every measurement below that needs no GPU, or
those that are named, and leaves its record in ``docs/results``; ``write`` instead of ``measure``
renews ``docs/evidence.md``, ``docs/benchmarks.md``, the results in the README and the policy's
card from them. Nothing is typed by hand.
"""

import argparse
import json
from pathlib import Path
import shutil
import subprocess
import sys

from vla_edge_ros.lab.bench_page import DOCUMENT, engine_page
from vla_edge_ros.lab.evidence_tables import (
    energy_table,
    honesty_table,
    memory_table,
    write_power_models,
)
from vla_edge_ros.lab.generated import renew
from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.lab.sweep.published import keep_sweep, sweep_lines
from vla_edge_ros.policy.policy import DEFAULT_POLICY
from vla_edge_ros.runtime.action_queue import PLANNED_CAUSES
from vla_edge_ros.sim.tasks import TICK_HZ

ROOT = Path(__file__).resolve().parent.parent.parent
RECORDS = ROOT / 'docs' / 'results'
CARD = DEFAULT_POLICY / 'README.md'
README, EVIDENCE = ROOT / 'README.md', ROOT / 'docs' / 'evidence.md'
DELAYS_MS = (0, 33, 67, 100, 133, 167, 200)
EPISODES = 500  # without delay; a quarter of them for each point of the curve
COSTS_MS = (8, 40, 100)
SCHEDULES = {
    'deadline': ['--schedule', 'deadline'],
    'sync': ['--schedule', 'sync'],
    'overlap 50 %': ['--schedule', 'overlap'],
    'overlap 50 %, blend': ['--schedule', 'overlap', '--seam', 'blend'],
    'latest': ['--schedule', 'latest'],
}
"""Options of ``vla-edge sim`` for each row of the table of schedules."""
EXPERT = ['--control', 'oracle', '--chunk-steps', '8']
"""Chunks of 8 actions, of the expert, for those of the embedded policy have only 3."""
ON_A_GPU = {
    'engine': 'bench engine --chunks 300,300,5000,300 --compiled default',
    'engine_endurance': 'bench engine --endurance 100000',
    'engine_loop': 'bench engine --loop 600',
    'energy': 'bench engine --energy 10',
    'parity_cuda': 'parity --backend cuda --model random:1.5b --slots 0,31,2048,4064',
}
"""Measurements that need a GPU, for ``measure`` by name, as ``vla-edge`` takes them."""


def measure(names: list[str]) -> None:
    """Run the named measurements, without names all that need no GPU, one after the other."""
    RECORDS.mkdir(parents=True, exist_ok=True)
    vla_edge = [sys.executable, '-m', 'vla_edge_ros.cli']
    lab = [sys.executable, '-m']
    steps = {
        'demo': lambda path: _demo(vla_edge, path),
        'sim': lambda path: _sim(vla_edge, path),
        'schedules': lambda path: _schedules(vla_edge, path),
        'honesty': lambda path: _call([*lab, 'vla_edge_ros.lab.honesty', '--json', path]),
        'sweep_small': lambda path: keep_sweep(vla_edge, path.stem, ROOT),
        'sweep_paper': lambda path: keep_sweep(vla_edge, path.stem, ROOT),
        'telemetry': lambda path: _call(
            [*lab, 'vla_edge_ros.lab.bench_telemetry', '--json', path]),
        'chunk': lambda path: _call([*lab, 'vla_edge_ros.lab.bench_chunk', '--json', path]),
        'parity': lambda path: _call([*vla_edge, 'parity', '--json', path]),
        'memory': lambda path: _call([*lab, 'vla_edge_ros.lab.bench_memory', '--json', path]),
        'eviction': lambda path: _call([*lab, 'vla_edge_ros.lab.bench_eviction', '--json', path]),
        'frame_buffer': lambda path: _call(
            [*lab, 'vla_edge_ros.lab.bench_frame_buffer', '--json', path]),
    }
    on_a_gpu = {
        name: lambda path, words=words: _call([*vla_edge, *words.split(), '--json', path])
        for name, words in ON_A_GPU.items()}
    for name in names or steps:
        (steps | on_a_gpu)[name]((RECORDS / f'{name}.json').relative_to(ROOT))


def _call(command: list) -> None:
    print(*command, flush=True)
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT)


def _demo(vla_edge: list[str], path: Path) -> None:
    _call([*vla_edge, 'demo', '--out', 'out/demo'])
    shutil.copy(ROOT / 'out' / 'demo' / 'summary.json', ROOT / path)


def _sim(vla_edge: list[str], path: Path) -> None:
    settings = [('none', delay) for delay in DELAYS_MS]
    settings += [('wrong-colour', 0), ('blank', 0)]
    settings += [('oracle', delay) for delay in DELAYS_MS]
    _simulate(vla_edge, path, [
        ['--episodes', EPISODES // 4 if delay_ms else EPISODES, '--control', control,
         '--delay-ms', delay_ms]
        for control, delay_ms in settings])


def _schedules(vla_edge: list[str], path: Path) -> None:
    _simulate(vla_edge, path, [
        ['--episodes', EPISODES // 2, '--compute-ms', cost_ms, '--safe-action', 'zeros',
         *who, *schedule]
        for cost_ms in COSTS_MS for schedule in SCHEDULES.values() for who in ([], EXPERT)])


def _simulate(vla_edge: list[str], path: Path, settings: list[list]) -> None:
    """Every run is one configuration; its summary says which."""
    runs = []
    part = path.with_suffix('.part.json')
    for options in settings:
        _call([*vla_edge, 'sim', *options, '--json', part])
        summary = json.loads((ROOT / part).read_text(encoding='utf-8'))
        runs.append(summary | {'environment': environment_record()})
    (ROOT / part).unlink()
    (ROOT / path).write_text(json.dumps(runs, indent=1) + '\n', encoding='utf-8')


def load(name: str):
    """Return the record of a measurement."""
    return json.loads((RECORDS / f'{name}.json').read_text(encoding='utf-8'))


def _source(record: dict) -> str:
    return f'{record["cores"]} cores, {record["cpu"]}, commit {record["commit"][:10]}'


def _milliseconds(values: dict) -> str:
    return ' / '.join(f'{values[key]:.1f}' for key in values)


def demo_table() -> list[str]:
    """Return the live run as a table."""
    run = load('demo')
    decisions = ', '.join(f'{name} {count}' for name, count in run['decisions'].items())
    cpu = ', '.join(f'{name} {value:.0f} %' for name, value in run['cpu_percent'].items())
    camera = run['camera']
    return [
        f'**The loop, live**: `make demo`, three processes over DDS ({_source(run["record"])}).',
        '', '| quantity | value |', '|---|---|',
        f'| ticks, of them without action or named fallback | {run["ticks"]}, '
        f'{run["unexplained_ticks"]} |',
        f'| action rate | {run["action_rate_hz"]:.2f} Hz |',
        '| deviation from the period p50 / p99 / max | '
        f'{_milliseconds(run["period_deviation_ms"])} ms |',
        f'| decisions | {decisions} |',
        '| observation age at publication p50 / p95 / p99 / max | '
        f'{_milliseconds(run["observation_age_ms"])} ms |',
        f'| camera frames published, received | {camera["published"]}, {camera["received"]} |',
        f'| success | {run["success_rate"]:.2f} of {run["episodes"]} instructions |',
        f'| CPU (of one core) | {cpu} |',
    ]


def sim_table() -> list[str]:
    """Return success against added delay, and the controls."""
    runs = load('sim')
    by = {(run['config']['control'], run['config']['delay_ms']): run for run in runs}

    def cell(control: str, delay_ms: float) -> str:
        run = by[control, delay_ms]
        low, high = run['success_interval']
        return f'{run["success_rate"]:.3f} ({low:.2f}–{high:.2f})'

    record = runs[0]['environment']
    lines = [
        f'**Success against observation delay**: `vla-edge sim`, {runs[0]["episodes"]} episodes '
        f'in virtual time without delay, {runs[1]["episodes"]} with, 95 % intervals '
        f'({_source(record)}). The expert sees the true state, as late as the policy its image.',
        '', '| added delay | age p50 | policy | expert |', '|---|---|---|---|',
    ]
    for delay_ms in DELAYS_MS:
        age = by['none', delay_ms]['observation_age_ms']['p50']
        lines.append(f'| {delay_ms} ms | {age:.0f} ms | {cell("none", delay_ms)} | '
                     f'{cell("oracle", delay_ms)} |')
    lines += [
        '', f'With the instruction naming another cube than is scored: {cell("wrong-colour", 0)}; '
        f'with blank images: {cell("blank", 0)}. Part of the cliff is the product of the '
        'gain (8/s) and the delay, not of what the policy sees.',
    ]
    return lines


def schedule_table() -> list[str]:
    """Return what each schedule comes to at three costs of a run."""
    runs = load('schedules')
    rows = [(cost_ms, name) for cost_ms in COSTS_MS for name in SCHEDULES]
    lines = [
        f'**Schedules**: `vla-edge sim`, {runs[0]["episodes"]} episodes a cell in virtual time, '
        f'95 % intervals ({_source(runs[0]["environment"])}). One run costs the same every '
        'time; held means zeros. The policy has chunks of 3 actions, the expert of 8; ages and '
        "runs are the policy's, runs that only take the image in included.", '',
        '| cost of a run | schedule | policy | expert | age p50 / p99 / max | runs a second | '
        'ticks with a planned action |', '|---|---|---|---|---|---|---|',
    ]
    for (cost_ms, name), policy, expert in zip(rows, runs[::2], runs[1::2], strict=True):
        (policy_cell, expert_cell) = (
            '{:.2f} ({:.2f}–{:.2f})'.format(run['success_rate'], *run['success_interval'])
            for run in (policy, expert))
        age = policy['observation_age_ms']
        planned = sum(policy['causes'].get(cause.value, 0) for cause in PLANNED_CAUSES)
        lines.append(
            f'| {cost_ms} ms | {name} | {policy_cell} | {expert_cell} | '
            f'{age["p50"]:.0f} / {age["p99"]:.0f} / {age["max"]:.0f} ms | '
            f'{policy["runs"] / policy["ticks"] * TICK_HZ:.1f} | '
            f'{100 * planned / policy["ticks"]:.0f} % |')
    return lines


def engine_tables() -> list[str]:
    """Return parity and cost of the engine."""
    chunk, eviction, buffer = map(load, ('chunk', 'eviction', 'frame_buffer'))
    telemetry = load('telemetry')
    lines = [
        '**The engine**: one chunk of the embedded policy, 32 prefill and 8 decode tokens behind '
        f'{chunk["cached_tokens"]} cached, {chunk["threads"]} thread, median of '
        f'{chunk["rounds"]} in one run ({_source(chunk["environment"])}).',
        '', '| runner | chunk | prefill | decode |', '|---|---|---|---|',
    ]
    for name in ('ours_bfloat16', 'ours_float32', 'plain_torch', 'hugging_face_static_cache'):
        times = (chunk[name][key]['median'] for key in ('chunk_ms', 'prefill_ms', 'decode_ms'))
        lines.append(f'| {name.replace("_", " ")} | ' + ' | '.join(f'{t:.2f} ms' for t in times)
                     + ' |')
    lines += [
    ]
    lines += parity_lines()
    worst = max(policy['both_us']['p99'] for policy in eviction['policies'].values())
    large, small, kills = buffer['large'], buffer['small'], buffer['kills']
    lines += [
        '', f'**Admission decision and eviction** at {eviction["frames"]} frames: p99 '
        f'{worst:.0f} µs, the slowest of three policies; {eviction["memory_growth_bytes"]} bytes '
        f'more after {eviction["memory_frames"]:,} frames ({_source(eviction["environment"])}).',
        '', '**Tracing and age accounting**: '
        f'{100 * telemetry["cpu_share"]:.2f} % of a tick in CPU time of all threads, on the '
        f'control thread p99 {telemetry["control_thread_us"]["p99"]:.0f} µs '
        f'({_source(telemetry["environment"])}).',
        '', f'**Frame buffer**: {small["reads"]:,} reads of small and {large["reads"]:,} of '
        f'640x480 frames against a writer at full speed: {small["torn"] + large["torn"]} torn; '
        f'`write` p99.9 {small["write_us"]["p99.9"]:.1f} µs and '
        f'{large["write_us"]["p99.9"]:.0f} µs. {kills["kills"]} kills -9 of either side: the '
        f'other went on, {kills["slowest_recovery_ms"]:.0f} ms at the slowest '
        f'({_source(buffer["environment"])}).',
    ]
    return lines


def parity_lines() -> list[str]:
    """Return what every backend's parity came to that has a record."""
    lines = []
    for name, backend in (('parity', 'cpu'), ('parity_cuda', 'cuda')):
        if not (RECORDS / f'{name}.json').exists():
            continue
        record = load(name)
        lines += [
            '', f'**Parity** of backend `{backend}` with Hugging Face in float32 on the same '
            'weights: lowest cosine over all layers, tokens and the logits '
            f'({_source(record["environment"])}).', '',
            '| model | cached | ours | Hugging Face bfloat16 | greedy tokens equal |',
            '|---|---|---|---|---|',
        ]
        for case in record['cases']:
            if 'skipped' not in case:
                ours, theirs = (
                    min(case[key].values()) for key in ('cosine', 'hugging_face_bfloat16'))
                greedy = case['greedy_tokens']
                lines.append(
                    f'| {case["case"]} | {case.get("slots", 0)} | {ours:.7f} | {theirs:.5f} | '
                    f'{greedy["equal"]} of {greedy["of"]} |')
    return lines


def evidence() -> list[str]:
    """Return the tables of what has a record already."""
    lines = []
    for name, table in (
            ('honesty', honesty_table), ('memory', memory_table), ('energy', energy_table)):
        if (RECORDS / f'{name}.json').exists():
            record = load(name)
            lines += [*table(record, _source(record['environment'])), '']
    return lines


def all_tables() -> list[str]:
    """Return what stands in ``EVIDENCE``."""
    return [
        *demo_table(), '', *sim_table(), '', *schedule_table(), '',
        *sweep_lines(RECORDS, _source), '', *evidence(), *engine_tables()]


def renewed_pages() -> dict[Path, str]:
    """Return every page that has results, as it has to be."""
    tables = {README: demo_table(), EVIDENCE: all_tables()}
    return {
        page: renew(page.read_text(encoding='utf-8'), 'results', lines)
        for page, lines in tables.items()
    } | {ROOT / DOCUMENT: engine_page(ROOT), CARD: card()}


def card() -> str:
    """Return the policy's card."""
    training = json.loads((CARD.parent / 'training.json').read_text(encoding='utf-8'))
    settings, machine = training['settings'], training['environment']
    off = training['validation_bins_off']
    return '\n'.join([
        '# The embedded default policy: follow the cube that the instruction names', '',
        'Licence Apache-2.0. A Qwen2-architecture decoder (4 layers, hidden 128, 1.1 M parameters '
        'with the vision encoder, bfloat16) that reads a stream of 96x80 pictures and joint '
        'positions, 32 tokens a frame, and decodes where the target is and three steps of planar '
        'velocity, 8 tokens.', '',
        '- **Task**: a gantry over a table with four coloured cubes that move at 0.3 m/s; keep '
        'the tool within 4 cm of the named cube for half a second, within 3 s. English '
        'instructions of one sentence, 14 verbs, any letter case.',
        f'- **Data**: {settings["streams"]:,} rendered films of {settings["frames"]} frames, '
        'labelled by a scripted expert that knows the true state (proportional, 8/s, plus the '
        'velocity of the cube). The hand often follows another cube than the one named. Light, '
        'tints and camera are varied; frames are skipped and evicted at random; the instruction '
        'changes inside four films of ten.',
        f'- **Training**: `vla-edge train`, seed {settings["seed"]}, {settings["steps"]:,} steps '
        f'of {settings["batch"]} films, AdamW {settings["learning_rate"]:g}, on one NVIDIA H200 '
        f'with 16 cores (PyTorch 2.11, Python {machine["python"]}), in two parts of together '
        f'{(training["seconds"] + training.get("seconds_of_earlier_part", 0)) / 60:.0f} minutes. '
        'Equal '
        'seeds give equal films and batches; GPU arithmetic is not bitwise repeatable, so '
        'another run gives other weights of about the same quality. On two CPU cores it takes '
        'many hours.',
        '- **Unseen films**: mean distance from the expert in bins of 256, target '
        f'{off[0]:.1f} {off[1]:.1f}, first action {off[2]:.1f} {off[3]:.1f}.', '',
        *sim_table(), '',
        '## Limits', '',
        '- It knows these four colours, this table and this camera, and nothing else: other '
        'pictures or words give confident nonsense.',
        '- It was never shown a real image.',
        '- The actions are velocities: holding one keeps the robot moving.', '',
    ])


def main(arguments: list[str] | None = None) -> int:
    """Measure, or write the documents."""
    parser = argparse.ArgumentParser(description=__doc__.strip().splitlines()[0])
    commands = parser.add_subparsers(dest='command', required=True)
    commands.add_parser('measure').add_argument('names', nargs='*')
    commands.add_parser('write')
    options = parser.parse_args(arguments)
    if options.command == 'measure':
        measure(options.names)
    else:
        for page, text in renewed_pages().items():
            page.write_text(text, encoding='utf-8')
        if (RECORDS / 'energy.json').exists():
            write_power_models(load('energy'))
    return 0


if __name__ == '__main__':
    raise SystemExit(main())
