"""Temporary folders go with their owner, or at a later start, and nothing else goes with them."""

import os
import signal
import subprocess
import sys
import tempfile

import pytest

from mrl.distributed.worker_processes import folders
from mrl.distributed.worker_processes.folders import empty, folder_usage, remove_abandoned, temporary_folder
from tests.source import ROOT

HOLD = """
import os, sys, time
from mrl.distributed.worker_processes.folders import temporary_folder
with temporary_folder("test") as folder:
    open(folder + "/file", "w").close()
    print(folder, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def killed_owner(place):
    """A folder of an owner that was killed."""
    owner = holding(place)
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    return owner.folder


def holding(place):
    """A process that has a folder."""
    variables = {**os.environ, "TMPDIR": str(place)}
    owner = subprocess.Popen([sys.executable, "-c", HOLD], cwd=ROOT, env=variables, stdout=subprocess.PIPE, text=True)
    owner.folder = owner.stdout.readline().strip()
    owner.stdout.close()
    return owner


def test_a_folder_goes_with_its_block(place):
    with temporary_folder("test") as folder:
        assert os.listdir(folder) == [] and os.stat(folder).st_mode & 0o777 == 0o700
    assert list(place.iterdir()) == []


def test_the_folder_of_a_killed_owner_is_removed_and_no_other(place):
    owner = holding(place)
    left = killed_owner(place)
    own = place / os.path.basename(left).replace("-test-", "-other-")
    kept = [place / "mrl-test-elsewhere-abcd", place / "mrl-run", place / f"{own.name}.txt"]
    try:
        for path in kept:
            path.mkdir()
        (place / own.name).symlink_to(kept[0])
        assert os.path.exists(left)
        with temporary_folder("test") as folder:
            remove_abandoned(str(place))
            assert not os.path.exists(left)
            assert os.path.exists(folder) and os.path.exists(owner.folder)
        assert all(path.exists() for path in kept) and own.is_symlink()
    finally:
        owner.kill()
        owner.wait()


def test_a_folder_of_another_user_is_left_alone(place):
    if os.geteuid() != 0:
        pytest.skip("only root can give a folder to another user")
    left = killed_owner(place)
    os.chown(left, 65534, 65534)
    remove_abandoned(str(place))
    assert os.path.exists(left)


def test_a_first_folder_in_a_process_removes_what_was_left(place):
    left = killed_owner(place)
    owner = holding(place)
    owner.kill()
    owner.wait()
    assert not os.path.exists(left)


def test_a_folder_that_is_removed_while_it_is_made_is_made_again(place, monkeypatch):
    made, tries = tempfile.mkdtemp, []

    def removed_at_once(**given):
        folder = made(**given)
        tries.append(folder)
        if len(tries) < 3:
            os.rmdir(folder)
        return folder

    monkeypatch.setattr(folders.tempfile, "mkdtemp", removed_at_once)
    with temporary_folder("test") as folder:
        assert folder == tries[2]


@pytest.mark.slow
def test_a_folder_is_emptied_whatever_is_in_it(tmp_path):
    base = tmp_path / "base"
    outside = tmp_path / "outside"
    base.mkdir(), outside.mkdir()
    (outside / "kept").write_text("x")
    (base / "link").symlink_to(outside)
    (base / "locked").mkdir()
    (base / "locked" / "mrl-0").mkdir()
    (base / "mrl-0").mkdir()
    os.mkfifo(base / "fifo")
    here = os.getcwd()
    try:
        os.chdir(base)
        for _ in range(1500):  # deeper than a path may be long
            os.mkdir("d" * 20)
            os.chdir("d" * 20)
        open("file", "w").close()
    finally:
        os.chdir(here)
    for path in (base / "locked" / "mrl-0", base / "locked"):
        path.chmod(0)
    assert folder_usage(str(base), 100)[1] == 101
    empty(str(base))
    assert list(base.iterdir()) == [] and (outside / "kept").read_text() == "x"


def test_a_folder_is_measured(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "file").write_bytes(bytes(100_000))
    (tmp_path / "link").symlink_to("/usr")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 30)
    num_bytes, num_files = folder_usage(str(tmp_path), 10)
    assert num_files == 4 and 100_000 <= num_bytes < 200_000
    assert folder_usage(str(tmp_path), 2)[1] == 3
    assert folder_usage(str(tmp_path / "missing"), 10) == (0, 0)
