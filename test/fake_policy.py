"""A policy of fixed cost that steers by the brightness of the image, and a node that runs it."""

import ctypes
from dataclasses import dataclass
import os
import time
from types import SimpleNamespace

import numpy as np

from vla_edge_ros.errors import ConfigError
from vla_edge_ros.kernels.memory_plan import Buffer
from vla_edge_ros.policy.action_tokens import ActionChunk
from vla_edge_ros.telemetry.stages import Stage

STEP_NS = 33_333_333


@dataclass
class FakeObservation:
    stage_ns: dict
    evicted_frame_id: int | None = None
    num_frames: int = 1


class FakePolicy:
    """Offer what the node uses of a policy; ``error`` is raised by the next run if set."""

    def __init__(self, observe_s: float = 0.002, act_s: float = 0.003):
        self.config = SimpleNamespace(
            image_width=24, image_height=20, action_dim=2, chunk_steps=3,
            proprioception_mean=(0.0, 0.0),
            joint_names=('gantry_x', 'gantry_y'), action_low=(-1.0, -0.5), action_high=(1.0, 0.5),
        )
        self.cache = SimpleNamespace(layout=SimpleNamespace(max_frames=2))
        self.backend = 'fake (asked for)'
        self.memory_plan = [Buffer('brightness', (20, 24), 'float32')]
        self.frame_target = None
        self.instruction = None
        self.error = None
        self.instructions = []
        self.images = []
        self.joints = []
        self.resets = 0
        self._observe_s, self._act_s = observe_s, act_s
        self._stamp_ns = 0

    def check_instruction(self, text):
        if not 0 < len(text.split()) <= 4:
            raise ConfigError('instruction', 'must be 1..4 words', text)

    def set_instruction(self, text):
        self.instruction = text
        self.instructions.append(text)

    def reset(self):
        self.resets += 1

    def observe(self, image, proprioception, stamp_ns):
        if self.error is not None:
            raise self.error
        time.sleep(self._observe_s)
        self._stamp_ns = stamp_ns
        self.images.append(image.shape)
        self.joints.append(np.array(proprioception))
        return FakeObservation({Stage.PREFILL: int(self._observe_s * 1e9)})

    def act(self):
        time.sleep(self._act_s)
        values = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], np.float32)
        return ActionChunk(values, STEP_NS, np.zeros(2, np.float32), np.zeros(8, np.int32),
                           self._stamp_ns)


def load_forever(_parameters, _progress):
    """Keep busy until interrupted, mostly in callbacks from C, where exceptions are lost."""
    def work(seconds):
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            pass
        return 0
    callback = ctypes.CFUNCTYPE(ctypes.c_int)(lambda: work(0.05))
    print('loading', flush=True)
    while True:
        callback()
        work(0.02)


def make_fake_reasoning_node(interruptible, **options):
    """Build the real node around the fake policy, as ``run_node`` wants it."""
    from vla_edge_ros.nodes.reasoning import ReasoningNode
    load = load_forever if os.environ.get('LOAD_FOREVER') else lambda *_: FakePolicy()
    return ReasoningNode(interruptible, load_policy=load, **options)


if __name__ == '__main__':
    import sys

    from vla_edge_ros.nodes.process import run_node
    sys.exit(run_node('fake_policy', 'make_fake_reasoning_node'))
