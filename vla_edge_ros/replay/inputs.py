"""
What the control loop sees of a bag at one moment of recorded time.

Frames take the same way as through the live nodes: the same decoding, the same resize.
"""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from vla_edge_ros.errors import ConfigError, ImageError, TransportError, VlaEdgeError
from vla_edge_ros.nodes.conversions import resize_rgb8
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.replay.bag import (
    BagReader,
    COMPRESSED_IMAGE,
    IMAGE,
    JOINT_STATE,
    message_to_rgb8,
    Record,
    stamp_to_ns,
    STRING,
)
from vla_edge_ros.runtime.frame_buffer import Frame


@dataclass(frozen=True, slots=True)
class ReplayParameters:
    """What is read from the bag and what a policy run costs in virtual time."""

    image_topic: str = parameter('', 'Image topic; empty takes the only one')
    joint_topic: str = parameter('joint_states', 'Joint state topic')
    instruction_topic: str = parameter('instruction', 'Instruction topic')
    instruction: str = parameter('', 'Instruction to follow instead of the recorded ones')
    prefill_ms: float = parameter(
        8.0, 'Virtual cost of taking in a frame', unit='ms', range=(0.0, 10_000.0)
    )
    decode_ms: float = parameter(
        8.0, 'Virtual cost of decoding a chunk', unit='ms', range=(0.0, 10_000.0)
    )

    def __post_init__(self):
        """Check every value."""
        validate(self)


class BagInputs:
    """
    The messages of a bag up to now: frame source, joint positions and instruction of a loop.

    Parameters
    ----------
    bag : BagReader
        Open bag.
    parameters : ReplayParameters
        Topics and instruction.
    config : PolicyConfig
        Image size and joint names that the policy wants.

    Raises
    ------
    TransportError
        The bag lacks a topic that is needed, or has no image.

    Attributes
    ----------
    start_ns : int
        When the first image was recorded, ns.
    images, frames : int
        Images that came so far, and those among them that could be decoded.
    errors : Counter of str
        What was wrong with messages that were left out.

    """

    def __init__(self, bag: BagReader, parameters: ReplayParameters, config):
        self.images = self.frames = 0
        self.errors: Counter[str] = Counter()
        self._bag = bag
        self._config = config
        self._frame: Frame | None = None
        self._positions = None if config.joint_names else np.zeros(0, np.float32)
        self._instruction: str | None = parameters.instruction or None
        topics = input_topics(bag, parameters, bool(config.joint_names))
        self._records = bag.records(list(topics.values()))
        self._image_topic = topics[IMAGE]
        # ticks start with the first image; what was recorded before it is known by then
        self._next = next(self._records, None)
        while self._next is not None and self._next.topic != self._image_topic:
            self._take(self._next)
            self._next = next(self._records, None)
        if self._next is None:
            raise TransportError('image_topic', 'must hold an image', self._image_topic)
        self.start_ns = self._next.recorded_ns

    @property
    def exhausted(self) -> bool:
        """Tell whether the bag holds nothing more."""
        return self._next is None

    def advance_to(self, now_ns: int) -> None:
        """Take in all that was recorded until ``now_ns``."""
        while self._next is not None and self._next.recorded_ns <= now_ns:
            self._take(self._next)
            self._next = next(self._records, None)

    def read(self) -> Frame | None:
        """Return the newest frame."""
        return self._frame

    def read_positions(self) -> np.ndarray | None:
        """Return the newest joint positions."""
        return self._positions

    def take_instruction(self) -> str | None:
        """Return the instruction that came since the last call, if any."""
        text, self._instruction = self._instruction, None
        return text

    def _take(self, record: Record) -> None:
        message = self._bag.decode(record)
        self.images += record.topic == self._image_topic
        try:
            if record.message_type == STRING:
                if not message.data.strip():
                    raise ConfigError('instruction', 'must not be blank', message.data)
                self._instruction = message.data
            elif record.message_type == JOINT_STATE:
                self._positions = self._positions_of(message)
            else:
                self._frame = self._frame_of(message, record.recorded_ns)
        except VlaEdgeError as error:  # as in the live nodes, a bad message changes nothing
            self.errors[str(error)] += 1

    def _positions_of(self, message) -> np.ndarray:
        names = self._config.joint_names
        by_name = dict(zip(message.name, message.position))
        positions = np.array([by_name.get(name, np.nan) for name in names], np.float32)
        if not np.isfinite(positions).all():
            rule = f'must give finite positions of {", ".join(names)}'
            raise ConfigError('joint_states', rule, message.name)
        return positions

    def _frame_of(self, message, received_ns: int) -> Frame:
        stamp_ns = stamp_to_ns(message.header.stamp)
        if stamp_ns <= 0:
            raise ImageError('header.stamp', 'must be set by the camera driver', stamp_ns)
        image = message_to_rgb8(message)
        image = resize_rgb8(image, self._config.image_width, self._config.image_height)
        self.frames += 1
        return Frame(image, stamp_ns, received_ns, self.frames)


def input_topics(
    bag: BagReader, parameters: ReplayParameters, with_joints: bool = True
) -> dict[str, str]:
    """
    Return the topics to replay by kind of message, ``IMAGE`` standing for both kinds of image.

    Raises
    ------
    TransportError
        One of them is not in the bag.

    """
    topics = {
        IMAGE: bag.choose_topic('image_topic', parameters.image_topic, IMAGE, COMPRESSED_IMAGE)
    }
    if with_joints:
        topics[JOINT_STATE] = bag.choose_topic('joint_topic', parameters.joint_topic, JOINT_STATE)
    if not parameters.instruction:
        topics[STRING] = bag.choose_topic(
            'instruction_topic (or give an instruction)', parameters.instruction_topic, STRING
        )
    return topics
