"""KV blocks in files: whole or not at all, and never another block's."""

from pathlib import Path

import pytest

from replica.tier_movers.disk_store import CorruptBlock, DiskStore

NAMES = [bytes([number]) * 32 for number in range(4)]
PAYLOAD = bytes(range(256)) * 4


def store(folder: Path, fingerprint: str = "a") -> DiskStore:
    return DiskStore(folder, fingerprint, len(PAYLOAD))


def file_of(folder: Path, name: bytes) -> Path:
    return folder / "kv-a" / name.hex()


def test_what_is_written_is_read_and_found_by_the_next_process(tmp_path: Path) -> None:
    first = store(tmp_path / "new" / "folder")
    checksums = [first.write(name, memoryview(PAYLOAD)) for name in NAMES]
    assert first.read(NAMES[0], checksums[0]) == first.read(NAMES[0], None) == PAYLOAD
    first.delete(NAMES[2])
    first.delete(NAMES[2])
    first.close()
    second = store(tmp_path / "new" / "folder")
    assert second.found() == [NAMES[0], NAMES[1], NAMES[3]]
    assert second.read(NAMES[3], None) == PAYLOAD


@pytest.mark.parametrize("place", [0, 8, 40, 50, 52, 700, -1])
def test_one_wrong_bit_anywhere_is_noticed(tmp_path: Path, place: int) -> None:
    disk = store(tmp_path)
    disk.write(NAMES[0], memoryview(PAYLOAD))
    content = bytearray(file_of(tmp_path, NAMES[0]).read_bytes())
    content[place] ^= 4
    file_of(tmp_path, NAMES[0]).write_bytes(content)
    with pytest.raises(CorruptBlock):
        disk.read(NAMES[0], None)


def test_files_that_are_missing_short_long_or_another_block_s_are_corrupt(tmp_path: Path) -> None:
    disk = store(tmp_path)
    checksums = [
        disk.write(name, memoryview(PAYLOAD[number:] + PAYLOAD[:number])) for number, name in enumerate(NAMES)
    ]
    file_of(tmp_path, NAMES[0]).unlink()
    file_of(tmp_path, NAMES[1]).write_bytes(file_of(tmp_path, NAMES[1]).read_bytes()[:-1])
    file_of(tmp_path, NAMES[2]).write_bytes(file_of(tmp_path, NAMES[2]).read_bytes() + b"x")
    file_of(tmp_path, NAMES[3]).rename(file_of(tmp_path, NAMES[0]))
    for name in NAMES:
        with pytest.raises(CorruptBlock, match=name.hex()):
            disk.read(name, None)
    with pytest.raises(CorruptBlock):  # whole, but not what was written last
        disk.write(NAMES[1], memoryview(PAYLOAD))
        disk.read(NAMES[1], checksums[1])
    assert disk.found() == [NAMES[0], NAMES[1]], "what cannot be a block is deleted"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    disk = store(tmp_path)
    (tmp_path / "kv-a" / (NAMES[0].hex() + ".part")).symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        disk.write(NAMES[0], memoryview(PAYLOAD))
    assert list((tmp_path / "kv-a").iterdir()) == []


def test_what_another_model_left_is_deleted_and_strange_files_are_too(tmp_path: Path) -> None:
    first = store(tmp_path)
    first.write(NAMES[0], memoryview(PAYLOAD))
    first.close()
    (tmp_path / "mine.txt").write_text("kept")
    second = store(tmp_path, "b")
    assert second.found() == [] and not (tmp_path / "kv-a").exists() and (tmp_path / "mine.txt").exists()
    for name in ("x", "ab", NAMES[1].hex() + ".part", NAMES[1].hex()):
        (tmp_path / "kv-b" / name).write_bytes(b"short")
    assert second.found() == [] and list((tmp_path / "kv-b").iterdir()) == []


def test_what_can_be_no_block_and_cannot_be_deleted_does_not_stop_a_start(tmp_path: Path) -> None:
    disk = store(tmp_path)
    for name in NAMES[:2]:
        disk.write(name, memoryview(PAYLOAD))
    (tmp_path / "kv-a" / "folder").mkdir()
    file_of(tmp_path, NAMES[2]).mkdir()
    file_of(tmp_path, NAMES[3]).symlink_to(file_of(tmp_path, NAMES[0]))
    file_of(tmp_path, bytes([255]) * 32).symlink_to("/nowhere")
    assert disk.found() == NAMES[:2]
    assert not file_of(tmp_path, NAMES[3]).is_symlink(), "another block's bytes"
    with pytest.raises(OSError, match="directory"):
        disk.write(NAMES[2], memoryview(PAYLOAD))
    with pytest.raises(OSError, match="directory"):
        disk.read(NAMES[2], None)


def test_one_folder_is_for_one_process(tmp_path: Path) -> None:
    first = store(tmp_path)
    with pytest.raises(OSError, match=r"in use by another replica; give each its own"):
        store(tmp_path)
    first.close()
    store(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="Not a directory"):
        store(tmp_path / "file" / "below")
