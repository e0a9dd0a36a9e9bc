"""Reading and writing rosbag2 recordings."""

from bag_maker import make_bag, make_image, PERIOD_NS, START_NS, TRANSPORT_NS, write_image
import numpy as np
import pytest

from vla_edge_ros.errors import ConfigError, ImageError, TransportError
from vla_edge_ros.nodes.conversions import message_to_rgb8, to_ns
from vla_edge_ros.replay.bag import (
    BagReader,
    BagWriter,
    COMPRESSED_IMAGE,
    IMAGE,
    JOINT_STATE,
    STRING,
)


@pytest.mark.parametrize('storage', ['sqlite3', 'mcap'])
@pytest.mark.parametrize('compressed', [False, True])
def test_bag_gives_back_what_was_written(tmp_path, storage, compressed):
    path = make_bag(tmp_path / 'bag', 5, storage, compressed)
    with BagReader(path) as bag:
        topic = bag.choose_topic('topic', '', IMAGE, COMPRESSED_IMAGE)
        records = list(bag.records([topic]))
        assert len(records) == 5
        for index, record in enumerate(records):
            message = bag.decode(record)
            stamp_ns = START_NS + index * PERIOD_NS
            assert record.recorded_ns == stamp_ns + TRANSPORT_NS
            assert to_ns(message.header.stamp) == stamp_ns
            np.testing.assert_array_equal(message_to_rgb8(message), make_image(index))
        joints = [bag.decode(record) for record in bag.records(['/joint_states'])]
        assert list(joints[3].name) == ['x', 'y']
        assert joints[3].position.tolist() == [0.003, -0.003]
        (instruction,) = bag.records(['/instruction'])
        assert bag.decode(instruction).data == 'reach the red cube'


@pytest.mark.parametrize('storage, suffix', [('sqlite3', '.db3'), ('mcap', '.mcap')])
def test_single_storage_file_is_read_like_its_directory(tmp_path, storage, suffix):
    path = make_bag(tmp_path / 'bag', 3, storage)
    (file,) = path.glob(f'*{suffix}')
    with BagReader(path) as bag, BagReader(file) as single:
        topics = sorted(bag.topics)
        assert list(bag.records(topics)) == list(single.records(topics))


def test_records_of_several_topics_come_in_recorded_order(tmp_path):
    with BagReader(make_bag(tmp_path / 'bag', 5)) as bag:
        times = [record.recorded_ns for record in bag.records(sorted(bag.topics))]
        assert len(times) == 11
        assert times == sorted(times)


def test_types_that_are_not_ours_are_not_in_the_way(tmp_path):
    path = make_bag(tmp_path / 'bag', 1)
    metadata = path / 'metadata.yaml'
    metadata.write_text(metadata.read_text().replace(JOINT_STATE, 'acme_msgs/msg/Widget'))
    with BagReader(path) as bag:
        (record,) = bag.records([bag.choose_topic('topic', '', IMAGE)])
        assert bag.decode(record).width == 24


def test_raw_bytes_of_another_writer_pass_through(tmp_path):
    with BagReader(make_bag(tmp_path / 'a', 2)) as source:
        records = list(source.records(sorted(source.topics)))
    with BagWriter(tmp_path / 'b', 'mcap') as writer:
        for record in records:
            writer.write(record.topic, record.message_type, record.data, record.recorded_ns)
    with BagReader(tmp_path / 'b') as copy:
        assert list(copy.records(sorted(copy.topics))) == records


def test_latched_topic_is_recorded_as_transient_local(tmp_path):
    text = (make_bag(tmp_path / 'bag', 1) / 'metadata.yaml').read_text()
    assert text.count('durability: transient_local') == 1
    assert text.count('durability: volatile') == 2


def test_topic_is_found_with_and_without_leading_slash(tmp_path):
    with BagReader(make_bag(tmp_path / 'bag', 1)) as bag:
        for name in ('camera/image_raw', '/camera/image_raw'):
            assert bag.choose_topic('topic', name, IMAGE) == '/camera/image_raw'


def test_missing_topic_is_named_with_the_topics_the_bag_has(tmp_path):
    with BagReader(make_bag(tmp_path / 'bag', 1)) as bag:
        with pytest.raises(TransportError) as caught:
            bag.choose_topic('topic', '/front/image_raw', IMAGE, COMPRESSED_IMAGE)
        assert '/camera/image_raw (sensor_msgs/msg/Image)' in str(caught.value)
        assert "got '/front/image_raw'" in str(caught.value)
        with pytest.raises(TransportError, match='must name one topic of type'):
            bag.choose_topic('topic', '/instruction', IMAGE)


def test_one_of_several_image_topics_must_be_chosen(tmp_path):
    with BagWriter(tmp_path / 'bag') as writer:
        for topic in ('/left', '/right'):
            write_image(writer, topic, make_image(0), START_NS, START_NS)
    with BagReader(tmp_path / 'bag') as bag:
        with pytest.raises(TransportError, match='/left .*/right'):
            bag.choose_topic('topic', '', IMAGE)
        assert bag.choose_topic('topic', 'right', IMAGE) == '/right'


def test_missing_path_and_what_is_no_bag_are_told_apart(tmp_path):
    with pytest.raises(TransportError, match='bag must exist'):
        BagReader(tmp_path / 'none')
    with pytest.raises(TransportError, match='must hold metadata.yaml'):
        BagReader(tmp_path)
    text = tmp_path / 'notes.txt'
    text.write_text('no bag')
    with pytest.raises(TransportError, match=r'must be a directory, \.db3 or \.mcap file'):
        BagReader(text)


@pytest.mark.parametrize('storage', ['sqlite3', 'mcap'])
@pytest.mark.parametrize('damage', ['cut', 'noise', 'empty', 'gone'])
def test_corrupt_bag_gives_one_clear_error(tmp_path, storage, damage):
    path = make_bag(tmp_path / 'bag', 20, storage)
    (file,) = (entry for entry in path.iterdir() if entry.name != 'metadata.yaml')
    raw = file.read_bytes()
    noise = np.random.default_rng(0).integers(0, 256, len(raw), dtype=np.uint8).tobytes()
    file.write_bytes({'cut': raw[: len(raw) // 2], 'noise': noise}.get(damage, b''))
    if damage == 'gone':
        file.unlink()
    with pytest.raises(TransportError, match='bag must be a readable rosbag2'):
        with BagReader(path) as bag:
            list(bag.records(sorted(bag.topics)))


@pytest.mark.parametrize('text', [
    '', '[', 'version: 9', 'rosbag2_bagfile_information: 3', 'a: [\nb: }\n' * 50, '\x00'])
def test_corrupt_metadata_gives_one_clear_line(tmp_path, text):
    path = make_bag(tmp_path / 'bag', 1)
    (path / 'metadata.yaml').write_text(text)
    with pytest.raises(TransportError, match='bag must be a readable rosbag2') as caught:
        BagReader(path)
    assert '\n' not in str(caught.value) and len(str(caught.value)) < 600


def test_message_that_is_cut_off_gives_one_clear_line(tmp_path):
    with BagWriter(tmp_path / 'bag') as writer:
        writer.write('/instruction', STRING, b'\x00\x01\x00\x00\xff\xff', START_NS)
    with BagReader(tmp_path / 'bag') as bag:
        (record,) = bag.records(['/instruction'])
        with pytest.raises(TransportError, match=f'message must be a {STRING} .*got .6 bytes'):
            bag.decode(record)


def test_image_that_contradicts_itself_is_an_image_error(tmp_path):
    with BagWriter(tmp_path / 'bag') as writer:
        write_image(writer, '/camera', make_image(0), START_NS, START_NS, encoding='rgba8')
    with BagReader(tmp_path / 'bag') as bag:
        (record,) = bag.records(['/camera'])
        with pytest.raises(ImageError, match='step must be >= 96 bytes'):
            message_to_rgb8(bag.decode(record))


def test_recording_stopped_by_an_error_stays_readable(tmp_path):
    with pytest.raises(RuntimeError, match='robot on fire'):
        with BagWriter(tmp_path / 'bag') as writer:
            write_image(writer, '/camera', make_image(0), START_NS, START_NS)
            raise RuntimeError('robot on fire')
    with BagReader(tmp_path / 'bag') as bag:
        assert len(list(bag.records(['/camera']))) == 1


def test_writer_overwrites_nothing_and_knows_its_storages(tmp_path):
    with pytest.raises(TransportError, match='must not exist yet'):
        BagWriter(tmp_path)
    with pytest.raises(ConfigError, match='storage must be one of sqlite3, mcap'):
        BagWriter(tmp_path / 'bag', 'hdf5')
    (tmp_path / 'file').touch()
    with pytest.raises(TransportError, match='must be writable'):
        BagWriter(tmp_path / 'file' / 'bag')
