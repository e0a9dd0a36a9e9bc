"""What the reasoning node has heard that is good enough to use. No rclpy here."""

from collections import Counter
from typing import Any

import numpy as np

from vla_edge_ros.clock import Clock
from vla_edge_ros.errors import ConfigError, VlaEdgeError
from vla_edge_ros.nodes.conversions import joint_positions


class RobotInputs:
    """
    The newest good instruction and joint positions; the executor's thread feeds it.

    Parameters
    ----------
    steady : Clock
        Tells when joint states are received.

    Attributes
    ----------
    instruction : str
        The last good one, '' before the first; what the policy refuses is not good.
    joints : (float32 [joints], int) or None
        Positions in the order of the policy's joints, and their reception in steady time, ns.
    rejected : dict of str to str
        By input, why its newest message was refused; inputs whose newest was good are missing.
    rejections : Counter
        By input, how many messages were refused so far.

    """

    def __init__(self, steady: Clock):
        self.instruction = ''
        self.joints: tuple[np.ndarray, int] | None = None
        self.rejected: dict[str, str] = {}
        self.rejections: Counter[str] = Counter()
        self._steady = steady
        self._policy = None

    def attach(self, policy: Any) -> str:
        """
        Judge by ``policy`` from now on, by none if it is None; return what becomes a warning.

        An instruction heard before may turn out to be none for this policy.
        """
        self._policy = policy
        self.rejected.clear()
        self.joints = None
        text, self.instruction = self.instruction, ''
        return self.take_instruction(text) if text else ''

    def take_instruction(self, text: str) -> str:
        """Keep an instruction and return '', or leave the last one and return a warning."""
        try:
            if self._policy is not None:
                self._policy.check_instruction(text)
            elif not text.strip():
                raise ConfigError('instruction', 'must not be empty', text)
        except VlaEdgeError as error:
            return self._reject('instruction', error)
        self.instruction = text
        self.rejected.pop('instruction', None)
        return ''

    def take_joint_states(self, message: Any) -> str:
        """Keep the positions of a ``JointState`` and return '', or a warning."""
        if self._policy is None:
            return ''
        try:
            positions = joint_positions(message, self._policy.config.joint_names)
        except VlaEdgeError as error:
            return self._reject('joint_states', error)
        self.joints = (positions, self._steady.now_ns())
        self.rejected.pop('joint_states', None)
        return ''

    def _reject(self, name: str, error: VlaEdgeError) -> str:
        self.rejections[name] += 1
        self.rejected[name] = f'{name.replace("_", " ")} rejected: {error}'
        return self.rejected[name]
