"""What is written is hashed; what cannot be written is one message."""

import os
import subprocess
import sys
import textwrap

import pytest
import xxhash

from mrl.errors import UserError
from mrl.files.output_file import OutputFile, hash_file


def test_the_hash_is_that_of_the_bytes_on_the_disk(tmp_path):
    parts = [os.urandom(size) for size in (8, 0, 100_000, 3_000_000, 1)]
    with OutputFile(tmp_path / "x") as file:
        for part in parts:
            assert file.write(part) == len(part)
    data = (tmp_path / "x").read_bytes()
    assert data == b"".join(parts)
    assert file.num_bytes == len(data)
    assert file.xxh3 == hash_file(tmp_path / "x") == xxhash.xxh3_64(data).hexdigest()


def test_a_file_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere/x' cannot be written: No such file"):
        OutputFile(tmp_path / "nowhere" / "x")
    with pytest.raises(UserError, match=r"nowhere' cannot be read: No such file"):
        hash_file(tmp_path / "nowhere")


def test_a_disk_that_takes_no_more_is_one_message(tmp_path):
    script = """
        import resource, signal, sys
        from mrl.errors import UserError
        from mrl.files.output_file import OutputFile
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
