"""What is written is hashed; what cannot be written is one message."""

import os
import subprocess
import sys
import textwrap

import pytest
import xxhash

from mrl.checkpoint.io import hashed_writer
from mrl.checkpoint.io.hashed_writer import BLOCK_BYTES, OutputFile, xxh3_file
from mrl.errors import UserError


def test_the_hash_is_that_of_the_bytes_on_the_disk(tmp_path):
    parts = [os.urandom(size) for size in (8, 0, 100_000, 3_000_000, 1)]
    with OutputFile(tmp_path / "x") as file:
        for part in parts:
            assert file.write(part) == len(part)
    data = (tmp_path / "x").read_bytes()
    assert data == b"".join(parts)
    assert file.num_bytes == len(data)
    assert file.xxh3 == xxh3_file(tmp_path / "x") == xxhash.xxh3_64(data).hexdigest()


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere/x' cannot be written: No such file"):
        OutputFile(tmp_path / "nowhere" / "x")
    with pytest.raises(UserError, match=r"nowhere' cannot be read: No such file"):
        xxh3_file(tmp_path / "nowhere")


def test_a_disk_that_takes_no_more_is_one_message(tmp_path):
    script = """
        import resource, signal, sys
        from mrl.errors import UserError
        from mrl.checkpoint.io.hashed_writer import OutputFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            with OutputFile(sys.argv[1]) as file:
                file.write(bytes(4000))
        except UserError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"'{tmp_path / 'x'}' cannot be written: File too large.\n"


PIECES = [BLOCK_BYTES + 1, 7, 3 * BLOCK_BYTES, 2 * BLOCK_BYTES - 8, 12_345]
"""Bytes of calls that end inside blocks, at their end, and several blocks further."""


@pytest.mark.parametrize("direct", [True, False])
def test_blocks_that_are_written_beside_the_caller_are_the_bytes_that_were_given(tmp_path, monkeypatch, direct):
    if not direct:
        monkeypatch.setattr(hashed_writer, "_DIRECT", 0)  # as where the system has no such flag
    digest = xxhash.xxh3_64()
    with OutputFile(tmp_path / "x") as file:
        for size in PIECES:
            data = bytearray(os.urandom(size))
            digest.update(data)
            file.write(data)
            data[:] = bytes(size)  # the buffer is the caller's again
    assert file.num_bytes == (tmp_path / "x").stat().st_size == sum(PIECES)
    assert file.xxh3 == xxh3_file(tmp_path / "x") == digest.hexdigest()


def test_what_a_file_system_does_not_take_directly_goes_through_the_cache(tmp_path):
    """Three bytes at an odd place, which only file systems in memory take past the cache."""
    with OutputFile(tmp_path / "x") as file:
        file._set_direct(True)
        file._write(memoryview(b"abc"), 1)
        was_direct = file._direct
    assert (tmp_path / "x").read_bytes() == b"\0abc"
    if was_direct:
        pytest.skip("this file system takes any bytes past its cache, as tmpfs does")


@pytest.mark.parametrize("size", [6, 40])
def test_a_disk_that_fills_up_in_the_middle_of_a_file_is_one_message(tmp_path, size):
    script = f"""
        import resource, signal, sys
        from mrl.errors import UserError
        from mrl.checkpoint.io.hashed_writer import OutputFile
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000_001, 5_000_001))
        try:
            with OutputFile(sys.argv[1]) as file:
                for _ in range({size}):
                    file.write(bytes(1 << 20))
        except UserError as error:
            print(error)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path / "x")], capture_output=True, text=True, check=True
    )
    assert done.stdout == f"'{tmp_path / 'x'}' cannot be written: File too large.\n"
