"""
Admission: start only what can finish before its deadline.

The cost of each stage is an exponentially weighted mean plus a tail term, ``tail_factor`` times
the exponentially weighted *upward* deviation. It needs two numbers a stage where a percentile
needs a window and a sort, and deviations downward, an engine getting faster, do not count
against it. With the defaults (0.2 and 4) one slow sample lifts the bound to that sample, from
where it decays by a fifth a sample. For normal jitter it lies near the 95th percentile.

Four things spoil a running mean, and each has its rule here:

- *Warm-up.* The first ``warmup_samples`` of a stage never enter its estimate.
- *Idle gaps.* When the engine has done nothing and nobody asked for ``idle_gap_ms``, the
  estimate is kept but the decision says ``stale_estimate``, and the first sample of each stage
  after the gap is left out like a warm-up sample.
- *Spikes.* A refused stage gives no samples, so one spike would refuse it for ever. After
  ``probe_after`` decisions in a row that did not admit a full chunk the next one is a ``probe``:
  it runs against the estimate, and its sample *replaces* the estimate, being the only recent
  evidence. A full chunk is thus admitted again by the decision ``probe_after + 2`` after a spike
  at the latest (one more for each sample still left out as above). A probe that ends late is
  late like any other run.
- *No estimate.* Before the first one there is nothing to refuse by: ``no_estimate`` runs.
"""

from dataclasses import dataclass
from enum import Enum
import math
from typing import NamedTuple

from vla_edge_ros.clock import NS_PER_MS
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.telemetry.stages import Stage


@dataclass(frozen=True, slots=True)
class AdmissionParameters:
    """How admission estimates cost and what it leaves in reserve."""

    margin_ms: float = parameter(
        2.0,
        'Reserve between the estimated end of a run and its deadline',
        unit='ms',
        range=(0.0, 1000.0),
    )
    ema_alpha: float = parameter(
        0.2, 'Weight of the newest sample in the cost estimates', range=(0.01, 1.0)
    )
    tail_factor: float = parameter(
        4.0, 'Mean upward deviations added to each estimate', range=(0.0, 20.0)
    )
    warmup_samples: int = parameter(
        3, 'First samples of each stage that never enter its estimate', range=(0, 1000)
    )
    idle_gap_ms: float = parameter(
        1000.0,
        'Idle time after which the estimate counts as stale',
        unit='ms',
        range=(1.0, 3.6e6),
    )
    probe_after: int = parameter(
        5,
        'Decisions in a row without a full chunk after which one runs as a probe',
        range=(1, 1000),
    )

    def __post_init__(self):
        """Check every value."""
        validate(self)


class DecisionKind(str, Enum):
    """What may start in this tick."""

    FULL = 'full'
    PREFILL_ONLY = 'prefill_only'
    REFUSE = 'refuse'


class Reason(str, Enum):
    """Why a tick decided, or ended, as it did."""

    ADMITTED = 'admitted'
    STALE_ESTIMATE = 'stale_estimate'
    NO_ESTIMATE = 'no_estimate'
    PROBE = 'probe'
    DECODE_OVER_BUDGET = 'decode_over_budget'
    OVER_BUDGET = 'over_budget'
    DEADLINE_PASSED = 'deadline_passed'
    REQUESTED = 'requested'
    PLAYING = 'playing'
    BUSY = 'busy'
    OPERATOR_HOLD = 'operator_hold'
    NO_INSTRUCTION = 'no_instruction'
    NO_FRAME = 'no_frame'
    NO_PROPRIOCEPTION = 'no_proprioception'
    STALE_FRAME = 'stale_frame'
    REPEATED_FRAME = 'repeated_frame'
    FROZEN_CAMERA = 'frozen_camera'
    DEADLINE_MISSED = 'deadline_missed'
    POLICY_ERROR = 'policy_error'


class Decision(NamedTuple):
    """
    The answer to one request.

    Parameters
    ----------
    kind : DecisionKind
        What may start.
    estimate_ms : float
        Expected cost of a full chunk with its tail term, ms; NaN while there is none.
    budget_ms : float
        Time to the deadline less the margin, ms; NaN when it was not looked at.
    reason : Reason
        Why.

    """

    kind: DecisionKind
    estimate_ms: float
    budget_ms: float
    reason: Reason


class _StageEstimate:
    """Running cost of one stage, ns; ``mean`` is NaN while there is none."""

    __slots__ = ('mean', 'tail', 'seen', 'skip', 'skipped', 'replace')

    def __init__(self):
        self.mean = math.nan
        self.tail = 0.0
        self.seen = 0
        self.skip = False
        self.skipped = False
        self.replace = False

    def seed(self, mean: float) -> None:
        self.mean = mean
        self.tail = 0.0
        self.replace = False

    def add(self, sample: float, parameters: AdmissionParameters) -> bool:
        """Take one sample in and return True, or False when it is left out."""
        self.seen += 1
        # Never two in a row: runs that are always rare would teach the estimate nothing.
        self.skipped = self.skip and not self.skipped
        left_out = self.skipped or self.seen <= parameters.warmup_samples
        self.skip = False
        if left_out:
            return False
        if self.replace or math.isnan(self.mean):
            self.seed(sample)
            return True
        deviation = sample - self.mean
        self.mean += parameters.ema_alpha * deviation
        self.tail += parameters.ema_alpha * (max(deviation, 0.0) - self.tail)
        return True


class AdmissionController:
    """
    Decide what a tick may start; one thread calls it.

    Attributes
    ----------
    parameters : AdmissionParameters
        May be replaced between two calls.
    counts : dict of str to int
        Decisions so far by reason, every reason present.

    """

    def __init__(self, parameters: AdmissionParameters | None = None):
        self.parameters = parameters or AdmissionParameters()
        self.counts = {reason.value: 0 for reason in Reason}
        self._prefill = _StageEstimate()
        self._decode = _StageEstimate()
        self._streak = 0
        self._active_ns: int | None = None

    def seed(self, prefill_ms: float, decode_ms: float) -> None:
        """Set the estimates from a calibration; samples then refine them."""
        self._prefill.seed(prefill_ms * NS_PER_MS)
        self._decode.seed(decode_ms * NS_PER_MS)

    def observe(self, stage: Stage, duration_ns: int) -> None:
        """
        Take in what a stage cost.

        Parameters
        ----------
        stage : Stage
            ``PREFILL`` stands for the whole observation (preprocess, vision, prefill), ``DECODE``
            for the action tokens.
        duration_ns : int
            Measured time, ns.

        """
        estimate = self._decode if stage is Stage.DECODE else self._prefill
        if estimate.add(duration_ns, self.parameters) and stage is Stage.DECODE:
            self._streak = 0
        if self._active_ns is not None:
            self._active_ns += duration_ns  # a long run is work, not an idle gap

    def decide(self, now_ns: int, deadline_ns: int) -> Decision:
        """Return what may start at ``now_ns`` to be complete at ``deadline_ns`` (one clock)."""
        parameters = self.parameters
        stale = (
            self._active_ns is not None
            and now_ns - self._active_ns > parameters.idle_gap_ms * NS_PER_MS
        )
        if stale:
            self._prefill.skip = self._decode.skip = True
        self._active_ns = now_ns

        prefill_ns, total_ns = self._bounds_ns()
        budget_ns = deadline_ns - now_ns - parameters.margin_ms * NS_PER_MS
        if budget_ns <= 0:
            kind, reason = DecisionKind.REFUSE, Reason.DEADLINE_PASSED
        elif math.isnan(total_ns):
            kind, reason = DecisionKind.FULL, Reason.NO_ESTIMATE
        elif total_ns <= budget_ns:
            kind = DecisionKind.FULL
            reason = Reason.STALE_ESTIMATE if stale else Reason.ADMITTED
            self._streak = 0
        elif self._streak >= parameters.probe_after:
            kind, reason = DecisionKind.FULL, Reason.PROBE
            self._prefill.replace = self._decode.replace = True
        else:
            self._streak += 1
            if prefill_ns <= budget_ns:
                kind, reason = DecisionKind.PREFILL_ONLY, Reason.DECODE_OVER_BUDGET
            else:
                kind, reason = DecisionKind.REFUSE, Reason.OVER_BUDGET
        self.counts[reason.value] += 1
        return Decision(kind, total_ns / NS_PER_MS, budget_ns / NS_PER_MS, reason)

    def request(self, now_ns: int) -> Decision:
        """Count and return a full run that starts at ``now_ns``, however long it takes."""
        self._active_ns = now_ns
        self.counts[Reason.REQUESTED.value] += 1
        _, total_ns = self._bounds_ns()
        return Decision(DecisionKind.FULL, total_ns / NS_PER_MS, math.nan, Reason.REQUESTED)

    def refuse(self, reason: Reason) -> Decision:
        """Count and return a refusal that has nothing to do with time."""
        self.counts[reason.value] += 1
        return Decision(DecisionKind.REFUSE, math.nan, math.nan, reason)

    def _bounds_ns(self) -> tuple[float, float]:
        """Return the bound on an observation and on a full run, ns."""
        tail_factor = self.parameters.tail_factor
        prefill_ns = self._prefill.mean + tail_factor * self._prefill.tail
        return prefill_ns, prefill_ns + self._decode.mean + tail_factor * self._decode.tail
