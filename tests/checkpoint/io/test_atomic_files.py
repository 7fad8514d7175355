"""A file that is replaced is the old one or the new one."""

import pytest

from mrl.checkpoint.io import atomic_files
from mrl.checkpoint.io.atomic_files import replace_file, sync_folder, write_file


def test_files_hold_what_was_written_and_nothing_else_is_left(tmp_path):
    write_file(tmp_path / "a", b"one, and more")
    write_file(tmp_path / "a", b"two")
    replace_file(tmp_path / "b", b"three")
    replace_file(tmp_path / "b", b"four")
    sync_folder(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"two", "b": b"four"}


def test_a_replacement_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    file = tmp_path / "a"
    replace_file(file, b"old")

    def full(descriptor):
        raise OSError("no space left")

    monkeypatch.setattr(atomic_files.os, "fsync", full)
    with pytest.raises(OSError, match="no space left"):
        replace_file(file, b"new")
    assert file.read_bytes() == b"old"
