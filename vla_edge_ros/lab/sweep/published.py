"""What the documents tell of the ready sweeps, and the records that it comes from."""

from collections.abc import Callable, Sequence
import json
from pathlib import Path
import shutil
import subprocess

from vla_edge_ros.lab.sweep.names import CELLS, CONFIGURATION, FINDINGS, REPORT, SESSIONS

TOLD = ('dominates', 'in no condition shown', 'matters in', 'hides a tail', 'Energy per')
"""What of the findings the documents repeat."""


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
    for file in (CONFIGURATION, CELLS, FINDINGS, SESSIONS, REPORT):
        shutil.copy(out / file, kept / file)


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
    def took(name: str) -> str:
        folder = records / name
        sessions = [json.loads(line) for line in (folder / SESSIONS).read_text().splitlines()]
        (first,) = (session for session in sessions if 'environment' in session)
        (last,) = (session for session in sessions if 'ended' in session)
        cells = len((folder / CELLS).read_text(encoding='utf-8').splitlines()) - 1
        machine = first['environment']
        return (
            f'`config/{name}.yaml`, {last["ran"]:,} episodes in {cells} cells, took '
            f'{last["seconds"] / 60:.1f} min with {first["workers"]} processes '
            f'({source(machine)}, load {machine["load_average_1min"]:.1f} when it began)')

    text = (records / 'sweep_paper' / FINDINGS).read_text(encoding='utf-8')
    said = [line for line in text.splitlines() if line.startswith('- ')]
    return [
        f'**Sweeps**: {took("sweep_small")}; {took("sweep_paper")}. Some of what the large one '
        'says, for times and powers that are predictions; all of it is in '
        '[its findings](results/sweep_paper/findings.md) and in '
        '[those of the small one](results/sweep_small/findings.md):', '',
        *(line for line in said if any(words in line for words in TOLD)),
    ]
