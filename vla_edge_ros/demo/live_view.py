"""The terminal while a demo runs: a table that renews itself, or plain lines where it cannot."""

from collections.abc import Callable
import time

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vla_edge_ros.demo.state import CAMERA, NODES, REASONING, RunState, SIM

TABLE_PERIOD_S = 0.25
LINE_PERIOD_S = 5.0
CAUSE_STYLES = {
    'fresh': 'green', 'queued': 'cyan', 'blended': 'cyan', 'thinking': 'yellow', 'hold': 'yellow'}


def age_text(state: RunState) -> str:
    """Return the percentiles of the newest observation ages."""
    percentiles = state.age_percentiles()
    if percentiles is None:
        return 'no action yet'
    return 'p50 {:.1f}  p95 {:.1f}  p99 {:.1f} ms'.format(*percentiles)


def success_text(state: RunState) -> str:
    """Return how many of the episodes so far succeeded."""
    return f'{state.count(SIM, "successes")} of {state.count(SIM, "episodes")}'


def decision_text(state: RunState) -> str:
    """Return decision and reason of the tick that the node reported last."""
    parts = [state.value(REASONING, key) for key in ('decision', 'reason')]
    return ': '.join(filter(None, parts)) or state.value(REASONING, 'state', 'starting')


def camera_text(state: RunState) -> str:
    """Return the rate of the camera node; counts of two nodes agree only at the end."""
    rate = state.value(CAMERA, 'rate_hz')
    return f'{rate} Hz' if rate else 'starting'


def line(state: RunState, seconds: float | None) -> str:
    """Return the state in one line; ``seconds`` is None before the run has begun."""
    if seconds is None:
        nodes = ', '.join(f'{name} {text}' for name, text in state.messages.items())
        return f'starting the nodes: {nodes or "none has reported yet"}'
    return (
        f'{seconds:5.1f} s  tick {state.value(REASONING, "tick", "-")}  {decision_text(state)}'
        f'  cause {state.value(REASONING, "cause", "-")}  image age {age_text(state)}'
        f'  camera {camera_text(state)}  success {success_text(state)}')


def table(state: RunState, seconds: float | None, limit_s: float) -> Group:
    """Return the state as a table."""
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style='dim', justify='right', min_width=12)
    rows.add_column(min_width=56, no_wrap=True)
    causes = Text('  ').join(
        Text(f'{cause} {count}', style=CAUSE_STYLES.get(cause, 'red'))
        for cause, count in state.causes.most_common())
    cpu = '  '.join(f'{name} {state.cpu_percent.get(name, 0):.0f} %' for name in NODES)
    # Tick, decision and cause are of one message: of different ones they would contradict.
    cause = state.value(REASONING, 'cause', '-')
    for label, content in (
        ('time', 'starting' if seconds is None else f'{seconds:.1f} of {limit_s:.0f} s'),
        ('instruction', Text(state.value(SIM, 'instruction', 'waiting for the nodes'),
                             style='bold')),
        ('tick', state.value(REASONING, 'tick', '-')),
        ('decision', decision_text(state)),
        ('cause', Text(cause, style=CAUSE_STYLES.get(cause, 'red'))),
        ('actions', causes),
        ('image age', age_text(state)),
        ('camera', camera_text(state)),
        ('success', success_text(state)),
        ('CPU', cpu),
    ):
        rows.add_row(label, content)
    notes = [
        Text(f'{name}: {state.messages[name]}', style='dim')
        for name in (REASONING, CAMERA) if name in state.messages]
    return Group(rows, *notes)


class LiveView:
    """
    Show a ``RunState``; a context manager.

    Parameters
    ----------
    state : RunState
        What to show.
    limit_s : float
        Length of the run, s.
    console : Console, optional
        Where to; anything but a terminal gets a plain line every few seconds.
    clock : callable
        Monotonic seconds.

    """

    def __init__(
        self, state: RunState, limit_s: float, console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._state = state
        self._limit_s = limit_s
        self._console = console or Console()
        self._clock = clock
        self._start_s: float | None = None
        self._shown_s = float('-inf')
        # No thread of its own: the loop that listens also refreshes.
        self._live = Live(console=self._console, auto_refresh=False, transient=False)

    def __enter__(self) -> 'LiveView':
        """Take over the terminal, if it is one."""
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_exception: object) -> None:
        """Give the terminal back with the last table on it."""
        self._live.stop()

    def start_clock(self) -> None:
        """Count the seconds shown from now."""
        self._start_s, self._shown_s = self._clock(), float('-inf')

    def stop_clock(self) -> None:
        """Show the end of the run, and nothing of what comes after it."""
        self._shown_s = float('-inf')
        self.refresh()
        self._shown_s = float('inf')

    def refresh(self) -> None:
        """Show the state if the last time was long enough ago."""
        is_terminal = self._console.is_terminal
        now_s = self._clock()
        if now_s - self._shown_s < (TABLE_PERIOD_S if is_terminal else LINE_PERIOD_S):
            return
        self._shown_s = now_s
        seconds = None if self._start_s is None else now_s - self._start_s
        if is_terminal:
            self._live.update(table(self._state, seconds, self._limit_s), refresh=True)
        else:
            print(line(self._state, seconds), file=self._console.file, flush=True)
