"""
What the control loop sees of a bag at one moment of recorded time.

Messages are read by the same functions as in the live nodes.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.errors import ConfigError, TransportError
from vla_edge_ros.nodes.conversions import image_stamp_ns, joint_positions, message_to_rgb8
from vla_edge_ros.parameters import parameter, validate
from vla_edge_ros.replay.bag import (
    BagReader,
    COMPRESSED_IMAGE,
    IMAGE,
    JOINT_STATE,
    Record,
    STRING,
)
from vla_edge_ros.runtime.frame_buffer import Frame
from vla_edge_ros.telemetry.power_model import power_model


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
    power_model: str = parameter(
        '', 'Device whose modelled power the replay is charged with; empty for none')

    def __post_init__(self):
        """Check every value."""
        validate(self)
        if self.power_model:
            power_model(self.power_model)


@dataclass(slots=True)
class InputErrors:
    """Messages of one topic that broke one rule: how many, and the first of them."""

    topic: str
    count: int
    first_recorded_ns: int
    first_error: str


class BagInputs:
    """
    The messages of a bag up to now: frame source, joint positions and instruction of a loop.

    Parameters
    ----------
    bag : BagReader
        Open bag.
    parameters : ReplayParameters
        Topics and instruction.
    policy : Policy
        Its ``config`` tells the joint names it wants; it judges the recorded instructions.

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
    errors : dict
        What was wrong with messages that were left out, by topic, field and rule.

    """

    def __init__(self, bag: BagReader, parameters: ReplayParameters, policy: Any):
        self.images = self.frames = 0
        self.errors: dict[tuple[str, str, str], InputErrors] = {}
        self._bag = bag
        self._policy = policy
        self._joint_names = policy.config.joint_names
        self._frame: Frame | None = None
        self._joints: tuple[np.ndarray, int] | None = None
        self._instruction: str | None = parameters.instruction or None
        topics = input_topics(bag, parameters, bool(self._joint_names))
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

    def read_joints(self) -> tuple[np.ndarray, int] | None:
        """Return the newest joint positions and when they were recorded, ns."""
        return self._joints

    def take_instruction(self) -> str | None:
        """Return the instruction that came since the last call, if any."""
        text, self._instruction = self._instruction, None
        return text

    def check_images(self) -> None:
        """
        Refuse a recording of which no image was good so far.

        Raises
        ------
        TransportError
            Naming the topic, and time and fault of its first image.

        """
        if self.frames:
            return
        first = next(e for e in self.errors.values() if e.topic == self._image_topic)
        at = f'{first.first_recorded_ns / NS_PER_S:.9f} s'
        rule = f'must hold an image that can be used (at {at}: {first.first_error})'
        raise TransportError('image_topic', rule, self._image_topic)

    def _take(self, record: Record) -> None:
        self.images += record.topic == self._image_topic
        try:
            message = self._bag.decode(record)
            if record.message_type == STRING:
                self._policy.check_instruction(message.data)
                self._instruction = message.data
            elif record.message_type == JOINT_STATE:
                self._joints = joint_positions(message, self._joint_names), record.recorded_ns
            else:
                self._frame = self._frame_of(message, record.recorded_ns)
        except ConfigError as error:  # as in the live nodes, a bad message changes nothing
            key = (record.topic, error.field, error.rule)
            first = InputErrors(record.topic, 0, record.recorded_ns, str(error))
            self.errors.setdefault(key, first).count += 1

    def _frame_of(self, message, received_ns: int) -> Frame:
        stamp_ns = image_stamp_ns(message)
        image = message_to_rgb8(message)
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
