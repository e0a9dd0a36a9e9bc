"""
What the benchmarks run again and again: a short cycle of chunks, each the same in every round.

A cycle has several chunks, so that whatever one leaves behind would change the next.
"""

import numpy as np

from vla_edge_ros.kernels.device_array import DeviceArray
from vla_edge_ros.lab.roofline import DECODE_TOKENS, PREFILL_TOKENS

ENGINE_CYCLE = 4
FRAMES_BEHIND_FULL = 4
INSTRUCTION = 'follow the red cube'


class EngineChunks:
    """
    Chunks of an engine behind a filled cache, each as after an eviction.

    A chunk prefills a frame and decodes greedily. Every one sees the cached frames behind the
    first in another order, so that their keys change rank as when the oldest of them leaves. The
    cache is filled here and not written to again.

    Parameters
    ----------
    engine : Engine
        Of any backend, with room for ``length`` slots, a frame and the decoded tokens.
    config : TransformerConfig
        Its network.
    length : int
        Cached slots.

    """

    cycle = ENGINE_CYCLE

    def __init__(self, engine, config, length: int):
        self._engine, self._config = engine, config
        slots = np.arange(length + PREFILL_TOKENS + DECODE_TOKENS, dtype=np.int32)
        context, self._new, self._scratch = np.split(slots, [length, length + PREFILL_TOKENS])
        rng = np.random.default_rng(1)
        shape = (self.cycle, PREFILL_TOKENS, config.hidden_size)
        frames = rng.standard_normal(shape, dtype=np.float32)
        self._frames = [_where_the_encoder_leaves(frame, engine) for frame in frames]
        for start in range(0, length, PREFILL_TOKENS):
            frame = rng.standard_normal(shape[1:], dtype=np.float32)
            new = context[start : start + PREFILL_TOKENS]
            engine.fill(frame[: len(new)], context[:start], new)
        first, behind = np.split(context, [min(PREFILL_TOKENS, length)])
        self._contexts = [
            np.concatenate([first, np.roll(behind, -index * PREFILL_TOKENS)])
            for index in range(self.cycle)]
        self._seen = [np.concatenate([context, self._new]) for context in self._contexts]
        for index in range(self.cycle):  # what is recorded at the first use, is
            self.prefill(index)

    def prefill(self, index: int) -> None:
        """Take in the frame of a chunk."""
        index %= self.cycle
        self._engine.fill(self._frames[index], self._contexts[index], self._new)

    def decode(self, index: int) -> np.ndarray:
        """Return the tokens of a chunk, chosen from the whole vocabulary."""
        return self._engine.decode_greedy(
            1, DECODE_TOKENS, self._seen[index % self.cycle], self._scratch, 0,
            self._config.vocab_size)

    def run(self, index: int) -> np.ndarray:
        """Return the tokens of a chunk after its prefill."""
        self.prefill(index)
        return self.decode(index)


def _where_the_encoder_leaves(frame: np.ndarray, engine):
    """Return the tokens of a frame as a policy on this engine has them: in its own memory."""
    device = getattr(engine, 'device', None)
    if device is None:
        return frame
    address = device.allocate(frame.nbytes)
    device.copy_in(address, frame)
    device.wait()
    return DeviceArray(address, frame.shape, np.float32)


class PolicyChunks:
    """
    Chunks of a whole policy, from an empty cache until some frames have left the full one.

    Parameters
    ----------
    policy : Policy
        With its encoder; forgets its frames at the start of each cycle.

    """

    def __init__(self, policy):
        self._policy = policy
        config = policy.config
        self.cycle = config.max_frames + FRAMES_BEHIND_FULL
        shape = (self.cycle, config.image_height, config.image_width, 3)
        self._images = np.random.default_rng(1).integers(0, 256, shape, np.uint8)
        self._joints = np.asarray(config.proprioception_mean, np.float32)
        policy.set_instruction(INSTRUCTION)

    def run(self, index: int) -> np.ndarray:
        """Return the tokens of a chunk after observing its picture."""
        index %= self.cycle
        if index == 0:
            self._policy.reset()
        self._policy.observe(self._images[index], self._joints, index)
        return self._policy.act().tokens


class Endless:
    """Run a chunk at each call."""

    def __init__(self, chunks: EngineChunks | PolicyChunks):
        self._chunks = chunks
        self._index = 0

    def __call__(self) -> None:
        """Run the next one."""
        self._chunks.run(self._index)
        self._index += 1
