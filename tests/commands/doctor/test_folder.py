"""Folders are really read-only, full, files, or not the same one."""

import os
import subprocess
import sys

import pytest

from mrl.commands.doctor import folder
from tests.commands.doctor.test_host import small  # noqa: F401 -- a fixture
from tests.source import ROOT


def told(findings):
    return [(each.level, each.topic) for each in findings]


def test_a_folder_that_works_is_left_as_it_was(tmp_path):
    wanted = tmp_path / "runs" / "new"
    kind = folder.filesystem_type(wanted)
    first, second = folder.check_folder(wanted, 1)
    assert first.level in ("ok", "warning") and kind in first.found  # a warning where /tmp is a tmpfs or an overlay
    assert second.level == "ok" and list(tmp_path.iterdir()) == []


def test_a_full_file_system_is_a_problem(small):  # noqa: F811
    (only,) = folder.check_folder(small, None)
    assert (only.level, only.found) == ("problem", f"'{small}': No space left on device (tmpfs)")
    assert list(small.iterdir()) == []


READ_ONLY = """
import os, sys
from pathlib import Path
from mrl.commands.doctor import folder
if os.getuid() == 0:
    os.setuid(65534)
(only,) = folder.check_folder(Path(sys.argv[1]), None)
print(only.level, only.found)
"""


def test_a_folder_of_somebody_else_is_a_problem(tmp_path):
    tmp_path.chmod(0o555)
    for parent in list(tmp_path.parents)[:2]:
        parent.chmod(0o755)
    done = subprocess.run(
        [sys.executable, "-c", READ_ONLY, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    tmp_path.chmod(0o755)
    assert done.stdout.startswith(f"problem '{tmp_path}': Permission denied")


def test_a_file_in_its_place_is_a_problem(tmp_path):
    tmp_path.joinpath("runs").write_text("")
    assert told(folder.check_folder(tmp_path / "runs", None)) == [("problem", "output folder")]


@pytest.mark.parametrize(("needed", "level"), [(1, "ok"), (10**18, "problem")])
def test_room_for_the_checkpoints(needed, level, tmp_path):
    assert told(folder.check_space(tmp_path, needed)) == [(level, "free space")]


def test_little_space_without_a_config(small):  # noqa: F811
    assert told(folder.check_space(small, None)) == [("warning", "free space")]


def test_folders_that_go_with_the_host(tmp_path):
    (only,) = folder.check_commit(tmp_path, "overlay", 0.01)
    assert only.level == "warning" and "checkpoints are lost with the host" in only.found


def test_a_slow_commit(tmp_path):
    (only,) = folder.check_commit(tmp_path, "nfs4", 3.0)
    assert only.level == "warning" and "takes 3.0 s" in only.found
    assert told(folder.check_commit(tmp_path, "nfs4", 0.3)) == [("ok", "output folder")]


def test_the_kind_is_that_of_the_nearest_mount(tmp_path):
    here = str(tmp_path)
    mounts = {"/": "ext4", here: "lustre", f"{here}/deep/er": "nfs4"}
    assert folder.filesystem_type(tmp_path / "deep", mounts) == "lustre"
    os.makedirs(tmp_path / "deep" / "er")
    assert folder.filesystem_type(tmp_path / "deep" / "er" / "run", mounts) == "nfs4"
    assert folder.filesystem_type(tmp_path, {}) == "unknown"


def test_what_one_host_leaves_another_finds_or_not(tmp_path):
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    folder.write_probe(here, "token", "0")
    assert None not in folder.wait_for_probes(here, "token", ["0"])
    assert folder.wait_for_probes(elsewhere, "token", ["0"], patience_s=0.2) == [None]
    assert folder.wait_for_probes(here, "earlier", ["0"], patience_s=0) == [None]
    first, second = folder.wait_for_probes(here, "token", ["0", "1"], patience_s=0.2)
    assert first is not None and second is None
    folder.delete_probes(here, "token")
    assert list(here.iterdir()) == []


def test_hosts_that_do_not_see_the_same_folder(tmp_path):
    (only,) = folder.check_shared(tmp_path, {"b": 0.01, "c": None})
    assert only.level == "problem" and "of c is not rank 0's" in only.found
    assert told(folder.check_shared(tmp_path, {"b": 0.01, "c": 4.0})) == [("warning", "shared folder")]
    assert told(folder.check_shared(tmp_path, {"b": 0.01})) == [("ok", "shared folder")]
