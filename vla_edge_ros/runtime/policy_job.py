"""What the control loop asks of a policy, and one run of it."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from vla_edge_ros.clock import Clock
from vla_edge_ros.errors import ConfigError
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.runtime.runner import Outcome
from vla_edge_ros.telemetry.stages import Stage


class Policy(Protocol):
    """What the loop asks of a policy; only the runner's thread calls it."""

    def set_instruction(self, text: str) -> None:
        """Follow ``text`` from now on, without forgetting the frames."""
        ...

    def reset(self) -> None:
        """Forget all frames, keep the instruction."""
        ...

    def observe(self, image: np.ndarray, proprioception: np.ndarray | None, stamp_ns: int) -> Any:
        """Take in a frame; the result has ``stage_ns``, ``evicted_frame_id``, ``num_frames``."""
        ...

    def act(self) -> ActionChunk:
        """Return a chunk of actions for what was observed last."""
        ...


@dataclass(slots=True)
class PolicyJob:
    """
    One run of the policy; called on the runner's thread, never raises.

    Parameters
    ----------
    policy : Policy
        Whom to run.
    steady : Clock
        What the decode time is taken from.
    frame : Frame
        The picture to observe, the job's own.
    proprioception : float32 [joints], optional
        The joint state to observe with it.
    decode : bool
        Whether to act as well.
    reset : bool
        Whether to forget all earlier frames first.
    instruction : str, optional
        A new instruction to take up first.
    scheduled_ns, deadline_ns : int
        The tick that started the job, and when its chunk is late, steady time, ns.
    epoch : int
        Kept for the loop: outcomes of an earlier epoch are not used.
    prepared : bool
        Set once reset and instruction went through.

    """

    policy: Policy
    steady: Clock
    frame: Any
    proprioception: np.ndarray | None
    decode: bool
    reset: bool
    instruction: str | None
    scheduled_ns: int
    deadline_ns: int
    epoch: int
    prepared: bool = False

    def __call__(self) -> Outcome:
        outcome = Outcome()
        try:
            if self.reset:
                self.policy.reset()
            if self.instruction is not None:
                self.policy.set_instruction(self.instruction)
            self.prepared = True
            outcome.observation = self.policy.observe(
                self.frame.image, self.proprioception, self.frame.stamp_ns
            )
            outcome.stage_ns = dict(outcome.observation.stage_ns)
            if self.decode:
                begin_ns = self.steady.now_ns()
                chunk = self.policy.act()
                outcome.stage_ns[Stage.DECODE] = self.steady.now_ns() - begin_ns
                if not np.isfinite(chunk.values).all():
                    raise ConfigError('action chunk', 'must be finite', chunk.values.tolist())
                outcome.chunk = chunk
        except Exception as error:  # whatever a policy raises, the loop goes on
            outcome.error = error
        return outcome
