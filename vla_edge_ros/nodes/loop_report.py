"""What ``~/status`` and ``/diagnostics`` tell of a running control loop."""

from vla_edge_ros.nodes.diagnostics import OK, WARN
from vla_edge_ros.runtime.action_queue import Cause
from vla_edge_ros.runtime.control_loop import ControlLoop
from vla_edge_ros.runtime.step_result import StepResult
from vla_edge_ros.telemetry.age import AgeWindow

GOOD_CAUSES = (Cause.FRESH, Cause.QUEUED, Cause.BLENDED, Cause.THINKING)
"""All is as planned; any other is a fallback."""


class LoopReport:
    """
    Notes what each tick came to and tells it when asked, from another thread.

    Attributes
    ----------
    last : StepResult or None
        The newest tick.

    """

    def __init__(self):
        self.last: StepResult | None = None
        self._ages = AgeWindow()
        self._fallbacks = 0
        self._policy_error = ''

    def note(self, result: StepResult) -> None:
        """Take what a tick came to, in the control thread."""
        if result.action is not None:
            self._ages.add(result.cause.value, result.observation_age_ms)
        if result.error is not None:
            self._policy_error = str(result.error)
        self.last = result

    def status(self) -> tuple[bytes, dict[str, object]]:
        """Return level and values of the newest tick."""
        last = self.last
        if last is None:
            return OK, {}
        values = {'tick': last.tick, 'observation_age_ms': f'{last.observation_age_ms:.2f}'}
        values |= {name: getattr(last, name).value for name in ('decision', 'reason', 'cause')}
        return OK if last.cause in GOOD_CAUSES else WARN, values

    def report(self, loop: ControlLoop) -> tuple[str, dict[str, object]]:
        """Return a warning, '' for none, and all counts; ``last`` must not be None."""
        good = sum(loop.causes[cause.value] for cause in GOOD_CAUSES)
        fallbacks = sum(loop.causes.values()) - good
        new_fallbacks, self._fallbacks = fallbacks - self._fallbacks, fallbacks
        values: dict[str, object] = {f'reason.{name}': n for name, n in loop.counts.items()}
        values |= {f'cause.{name}': count for name, count in loop.causes.items()}
        values.update(
            ticks=self.last.tick + 1, schedule=self.last.schedule,
            estimate_ms=round(self.last.estimate_ms, 3), instruction=loop.instruction or '',
            policy_error=self._policy_error,
        )
        values |= self._ages.summary()
        if new_fallbacks > 0:
            return f'{new_fallbacks} fallbacks, last: {self.last.reason.value}', values
        return '', values
