"""
Where a policy job runs: on a worker thread, or inline in virtual time.

A runner holds at most one job. ``start`` hands it over, ``wait`` collects its outcome; between
the two the runner is ``busy``. Only the control loop's thread calls a runner.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
import threading
from typing import Any, Protocol

from vla_edge_ros.clock import Clock, ManualClock
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.runtime.latency import LatencyModel
from vla_edge_ros.telemetry.stages import Stage


@dataclass(slots=True)
class Outcome:
    """
    What a job left behind.

    Parameters
    ----------
    observation : object, optional
        What ``Policy.observe`` returned; None when it was not reached.
    chunk : ActionChunk, optional
        What ``Policy.act`` returned; None when it was not reached or not asked for.
    error : Exception, optional
        What the policy raised.
    stage_ns : dict of Stage to int
        Time each stage took, ns.
    finished_ns : int
        End of the job on the steady clock, ns.

    """

    observation: Any = None
    chunk: ActionChunk | None = None
    error: Exception | None = None
    stage_ns: dict[Stage, int] = field(default_factory=dict)
    finished_ns: int = 0


Job = Callable[[], Outcome]


class Runner(Protocol):
    """Runs one job at a time."""

    @property
    def native_id(self) -> int:
        """Thread id of where jobs run, as the operating system knows it; 0 is the caller's."""
        ...

    @property
    def busy(self) -> bool:
        """Tell whether a job was started whose outcome has not been collected."""
        ...

    def start(self, job: Job) -> None:
        """Start a job; the runner must not be busy and the job must not raise."""
        ...

    def wait(self, until_ns: int) -> Outcome | None:
        """Return the outcome as soon as there is one, None at ``until_ns`` or when not busy."""
        ...

    def close(self) -> bool:
        """Let go of all resources and tell whether that was clean."""
        ...


class VirtualRunner:
    """
    Run jobs inline and charge virtual time for them.

    The job computes its real result at once; its outcome becomes visible only when the clock
    has moved on by the stage costs drawn from ``latency``, which also replace the measured ones.
    """

    native_id = 0

    def __init__(self, clock: ManualClock, latency: LatencyModel):
        self._clock = clock
        self._latency = latency
        self._outcome: Outcome | None = None

    @property
    def busy(self) -> bool:
        """Tell whether an outcome waits to be collected."""
        return self._outcome is not None

    @property
    def unfinished(self) -> Outcome | None:
        """Return the outcome that waits to be collected."""
        return self._outcome

    def start(self, job: Job) -> None:
        """Run ``job`` and schedule its completion."""
        if self.busy:
            raise RuntimeError('the runner is busy')
        outcome = job()
        outcome.stage_ns = {
            stage: ns
            for stage, ns in self._latency.draw().items()
            if (outcome.chunk if stage is Stage.DECODE else outcome.observation) is not None
        }
        outcome.finished_ns = self._clock.now_ns() + sum(outcome.stage_ns.values())
        self._outcome = outcome

    def wait(self, until_ns: int) -> Outcome | None:
        """Move the clock to the completion or to ``until_ns``, whichever is first."""
        outcome = self._outcome
        if outcome is None:
            return None
        now_ns = self._clock.advance_to_ns(min(outcome.finished_ns, until_ns))
        if outcome.finished_ns > now_ns:
            return None
        self._outcome = None
        return outcome

    def close(self) -> bool:
        """Drop an outcome that was never collected."""
        self._outcome = None
        return True


class ThreadRunner:
    """
    Run jobs on one named worker thread, which lives until ``close``.

    The worker is a daemon so that a policy that never returns cannot keep the process alive;
    the owner calls ``close``, which joins it.
    """

    def __init__(self, steady: Clock, name: str = 'policy'):
        self._steady = steady
        self._condition = threading.Condition()
        self._job: Job | None = None
        self._outcome: Outcome | None = None
        self._busy = False
        self._closing = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def native_id(self) -> int:
        """Thread id by which the operating system knows the worker."""
        return self._thread.native_id

    @property
    def busy(self) -> bool:
        """Tell whether a job was started whose outcome has not been collected."""
        return self._busy

    def start(self, job: Job) -> None:
        """Hand ``job`` to the worker and return at once."""
        if self._busy or self._closing:
            raise RuntimeError('the runner is busy or closed')
        self._busy = True
        with self._condition:
            self._job = job
            self._condition.notify_all()

    def wait(self, until_ns: int) -> Outcome | None:
        """Block until the outcome is there or the steady clock shows ``until_ns``."""
        with self._condition:
            while self._outcome is None:
                left_ns = until_ns - self._steady.now_ns()
                if left_ns <= 0 or not self._busy:
                    return None
                self._condition.wait(left_ns * 1e-9)
            outcome, self._outcome = self._outcome, None
            self._busy = False
            return outcome

    def close(self, timeout_s: float = 5.0) -> bool:
        """Finish the running job, join the worker; False when it did not end in time."""
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while True:
            with self._condition:
                while self._job is None and not self._closing:
                    self._condition.wait()
                job, self._job = self._job, None
            if job is None:
                return
            outcome = job()
            outcome.finished_ns = self._steady.now_ns()
            with self._condition:
                self._outcome = outcome
                self._condition.notify_all()
