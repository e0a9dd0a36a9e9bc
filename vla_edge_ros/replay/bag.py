"""
Read and write rosbag2 recordings (sqlite3 and mcap) without ROS.

Only the standard message types that the nodes exchange are decoded, with the definitions of
ROS 2 Jazzy; whatever else a bag holds is never parsed, so it cannot be in the way.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rosbags.interfaces import (
    Qos,
    QosDurability,
    QosHistory,
    QosLiveliness,
    QosReliability,
    QosTime,
)
from rosbags.rosbag2 import Reader, StoragePlugin, Writer
from rosbags.typesys import get_typestore, Stores

from vla_edge_ros.clock import NS_PER_S
from vla_edge_ros.errors import ConfigError, one_line, TransportError

IMAGE = 'sensor_msgs/msg/Image'
COMPRESSED_IMAGE = 'sensor_msgs/msg/CompressedImage'
JOINT_STATE = 'sensor_msgs/msg/JointState'
STRING = 'std_msgs/msg/String'
STORAGES = {'sqlite3': StoragePlugin.SQLITE3, 'mcap': StoragePlugin.MCAP}


@dataclass(frozen=True, slots=True)
class Record:
    """One recorded message, still serialised (CDR)."""

    topic: str
    message_type: str
    recorded_ns: int
    data: bytes


class BagReader:
    """
    A rosbag2 recording, open for reading; a context manager.

    Parameters
    ----------
    path : path
        Directory with ``metadata.yaml``, or a single ``.db3`` or ``.mcap`` file.

    Raises
    ------
    TransportError
        There is no such path, it is not a rosbag2, or it is corrupt; reading on may raise it too.

    """

    def __init__(self, path: Path | str):
        self.path = Path(path)
        if not self.path.exists():
            raise TransportError('bag', 'must exist', str(path))
        if self.path.is_dir() and not (self.path / 'metadata.yaml').exists():
            rule = 'must hold metadata.yaml (if its recording was killed: ros2 bag reindex)'
            raise TransportError('bag', rule, str(path))
        if self.path.is_file() and self.path.suffix not in ('.db3', '.mcap'):
            raise TransportError('bag', 'must be a directory, .db3 or .mcap file', str(path))
        self._typestore = get_typestore(Stores.ROS2_JAZZY)
        try:
            self._reader = Reader(self.path)
            self._reader.open()
        except Exception as error:  # a corrupt file makes the parsers raise anything
            raise self._corrupt(error) from error
        self.topics = {c.topic: c.msgtype for c in self._reader.connections}

    def __enter__(self) -> 'BagReader':
        """Return the open reader."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Close the files."""
        self.close()

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def topics_of(self, *message_types: str) -> list[str]:
        """Return the sorted topics that carry one of these types."""
        return sorted(t for t, kind in self.topics.items() if kind in message_types)

    def choose_topic(self, field: str, topic: str, *message_types: str) -> str:
        """
        Return ``topic``, or for an empty name the only topic of these types.

        Raises
        ------
        TransportError
            The bag has no such topic, or several and none was named; lists what it has.

        """
        topics = self.topics_of(*message_types)
        if topic:
            topics = [name for name in topics if name.lstrip('/') == topic.lstrip('/')]
        if len(topics) == 1:
            return topics[0]
        listing = ', '.join(f'{name} ({kind})' for name, kind in sorted(self.topics.items()))
        kinds = ' or '.join(message_types)
        rule = f'must name one topic of type {kinds}; the bag has: {listing or "no topics"}'
        raise TransportError(field, rule, topic)

    def records(self, topics: list[str]) -> Iterator[Record]:
        """Yield the messages of ``topics`` in recorded order."""
        connections = [c for c in self._reader.connections if c.topic in topics]
        if not connections:
            return
        try:
            for connection, recorded_ns, data in self._reader.messages(connections):
                yield Record(connection.topic, connection.msgtype, recorded_ns, bytes(data))
        except Exception as error:  # as above; a consumer's own error never passes through here
            raise self._corrupt(error) from error

    def decode(self, record: Record) -> Any:
        """
        Return the message of a record, its fields named as in ROS.

        Raises
        ------
        TransportError
            This message is cut off or none of its type; those around it may be good.

        """
        try:
            return self._typestore.deserialize_cdr(record.data, record.message_type)
        except Exception as error:  # as above
            rule = f'must be a {record.message_type} ({type(error).__name__}: {one_line(error)})'
            raise TransportError('message', rule, f'{len(record.data)} bytes') from error

    def _corrupt(self, error: Exception) -> TransportError:
        rule = f'must be a readable rosbag2 ({type(error).__name__}: {one_line(error)})'
        return TransportError('bag', rule, str(self.path))


class BagWriter:
    """
    A new rosbag2 recording; a context manager, complete only after ``close``.

    Parameters
    ----------
    path : path
        Directory to make.
    storage : str
        ``sqlite3`` or ``mcap``.

    Raises
    ------
    ConfigError
        There is no such storage.
    TransportError
        The path exists or cannot be made.

    """

    def __init__(self, path: Path | str, storage: str = 'sqlite3'):
        if storage not in STORAGES:
            raise ConfigError('storage', f'must be one of {", ".join(STORAGES)}', storage)
        if Path(path).exists():
            raise TransportError('bag', 'must not exist yet', str(path))
        self._typestore = get_typestore(Stores.ROS2_JAZZY)
        self._connections = {}
        self._writer = Writer(path, version=9, storage_plugin=STORAGES[storage])
        try:
            self._writer.open()
        except OSError as error:
            raise TransportError('bag', f'must be writable ({error})', str(path)) from error

    def __enter__(self) -> 'BagWriter':
        """Return the open writer."""
        return self

    def __exit__(self, *exception: object) -> None:
        """Write the index, also after an error: what was recorded stays readable."""
        self.close()

    def close(self) -> None:
        """Write index and metadata."""
        self._writer.close()

    def write(
        self, topic: str, message_type: str, data: bytes, recorded_ns: int, latched: bool = False
    ) -> None:
        """
        Append one serialised message, as a raw subscription of rclpy hands it over.

        Parameters
        ----------
        topic : str
            Absolute name.
        message_type : str
            As ``sensor_msgs/msg/Image``.
        data : bytes
            CDR.
        recorded_ns : int
            Time of reception, ns.
        latched : bool
            Note transient local durability with the topic, so that a player latches it again.

        """
        if topic not in self._connections:
            self._connections[topic] = self._writer.add_connection(
                topic,
                message_type,
                typestore=self._typestore,
                offered_qos_profiles=[_qos(latched)],
            )
        self._writer.write(self._connections[topic], recorded_ns, data)

    def write_fields(
        self, topic: str, message_type: str, fields: dict, recorded_ns: int, latched: bool = False
    ) -> None:
        """Append one message given by its fields; nested messages by :meth:`make`."""
        message = self.make(message_type, **fields)
        data = bytes(self._typestore.serialize_cdr(message, message_type))
        self.write(topic, message_type, data, recorded_ns, latched)

    def make(self, message_type: str, **fields: Any) -> Any:
        """Return a message object of a standard type."""
        return self._typestore.types[message_type](**fields)

    def header(self, stamp_ns: int, frame_id: str = '') -> Any:
        """Return a ``std_msgs/Header``."""
        sec, nanosec = divmod(stamp_ns, NS_PER_S)
        stamp = self.make('builtin_interfaces/msg/Time', sec=sec, nanosec=nanosec)
        return self.make('std_msgs/msg/Header', stamp=stamp, frame_id=frame_id)


def _qos(latched: bool) -> Qos:
    durability = QosDurability.TRANSIENT_LOCAL if latched else QosDurability.VOLATILE
    unbounded = QosTime(0, 0)
    return Qos(
        QosHistory.KEEP_LAST,
        1 if latched else 10,
        QosReliability.RELIABLE,
        durability,
        unbounded,
        unbounded,
        QosLiveliness.SYSTEM_DEFAULT,
        unbounded,
        False,
    )
