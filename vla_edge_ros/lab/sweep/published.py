"""What the documents tell of the ready sweeps, and the records that it comes from."""

from collections.abc import Callable, Sequence
import json
from pathlib import Path
import shutil
import subprocess

from vla_edge_ros.lab.record import environment_record
from vla_edge_ros.lab.sweep.names import CELLS, CONFIGURATION, FINDINGS, SESSIONS

TOLD = ('dominates', 'in no condition shown', 'matters in', 'hides a tail', 'Energy per')
"""What of the findings the README repeats."""


def keep_sweep(vla_edge: Sequence[str], name: str, root: Path) -> None:
    """
    Run a ready sweep afresh and keep what is small of it in ``docs/results``.

    Parameters
    ----------
    vla_edge : sequence of str
        How the command is called.
    name : str
        Of its file, without suffix.
    root : Path
        The checkout.

    """
    out, kept = root / 'out' / name, root / 'docs' / 'results' / name
    shutil.rmtree(out, ignore_errors=True)
    for words in (['sweep', f'config/{name}.yaml', '--out', f'out/{name}'],
                  ['report', f'out/{name}']):
        print(*vla_edge, *words, flush=True)
        subprocess.run([*vla_edge, *words], check=True, cwd=root)
    kept.mkdir(parents=True, exist_ok=True)
    for file in (CONFIGURATION, CELLS, FINDINGS, SESSIONS):
        shutil.copy(out / file, kept / file)


def keep_estimate(vla_edge: Sequence[str], path: Path, root: Path) -> None:
    """Keep what ``--dry-run`` of a ready sweep tells, in ``path`` under ``root``."""
    command = [*vla_edge, 'sweep', f'config/{path.stem}.yaml', '--dry-run']
    print(*command, flush=True)
    done = subprocess.run(command, check=True, cwd=root, capture_output=True, text=True)
    record = {'told': done.stdout.splitlines(), 'environment': environment_record()}
    (root / path).write_text(json.dumps(record, indent=1) + '\n', encoding='utf-8')


def sweep_lines(records: Path, source: Callable[[dict], str]) -> list[str]:
    """
    Return how long the ready sweeps take, and what the small one found, as Markdown.

    Parameters
    ----------
    records : Path
        Folder of the records.
    source : callable
        Tells the machine and commit of a record in a few words.

    """
    def where(record: dict) -> str:
        return f'{source(record)}, load {record["load_average_1min"]:.1f}'

    folder = records / 'sweep_small'
    sessions = [json.loads(line) for line in (folder / SESSIONS).read_text().splitlines()]
    (first,) = (session for session in sessions if 'environment' in session)
    (last,) = (session for session in sessions if 'ended' in session)
    cells = len((folder / CELLS).read_text(encoding='utf-8').splitlines()) - 1
    paper = json.loads((records / 'sweep_paper.json').read_text(encoding='utf-8'))
    text = (folder / FINDINGS).read_text(encoding='utf-8')
    said = [line for line in text.splitlines() if line.startswith('- ')]
    return [
        f'**Sweeps**: `config/sweep_small.yaml`, {last["ran"]:,} episodes in {cells} cells, took '
        f'{last["seconds"] / 60:.1f} min with {first["workers"]} processes '
        f'({where(first["environment"])} when it began). `config/sweep_paper.yaml`, by '
        f'`--dry-run`: {"; ".join(paper["told"])} ({where(paper["environment"])}). Some of what '
        'the small one says, for times and powers that are predictions; all of it is in '
        '[its findings](docs/results/sweep_small/findings.md):', '',
        *(line for line in said if any(words in line for words in TOLD)),
    ]
