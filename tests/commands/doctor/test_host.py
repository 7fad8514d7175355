"""Limits are made real: an rlimit of a process, a tmpfs of 64 KB, folders as containers have them."""

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.commands.doctor import host
from tests.source import ROOT


def told(findings):
    ((level, found),) = [(each.level, each.found) for each in findings]
    return level, found


@pytest.fixture
def small(tmp_path):
    """A file system of 64 KB."""
    folder = tmp_path / "small"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    if os.getuid() != 0 or subprocess.run(words, capture_output=True, check=False).returncode != 0:
        pytest.skip("needs the right to mount")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_memory_for_the_ranks_of_a_host(tmp_path):
    now = host.read_memory()
    assert 0 < now.available <= now.total
    assert told(host.check_memory(now, 10_000))[0] == "problem"
    assert told(host.check_memory(host.HostMemory(64 * 10**9, 64 * 10**9, None), 8))[0] == "ok"


@pytest.mark.parametrize(
    "names", [("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes")]
)
def test_a_container_that_may_take_little(names, tmp_path):
    for name, number in zip(names, (3 * 10**9, 2 * 10**9), strict=True):
        tmp_path.joinpath(name).parent.mkdir(exist_ok=True)
        tmp_path.joinpath(name).write_text(f"{number}\n")
    memory = host.read_memory(tmp_path)
    assert (memory.limit, memory.available) == (3 * 10**9, 10**9)
    level, found = told(host.check_memory(memory, 1))
    assert level == "problem" and "of which a container may take 3.0" in found


def test_a_process_with_few_files():
    code = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
from mrl.commands.doctor import host
(found,) = host.check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 8)
print(json.dumps([found.level, found.found, found.advice]))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == ["warning", "at most 64; 8 rank(s) may want 1136", "ulimit -n 1136"]
    assert told(host.check_open_files(resource.RLIM_INFINITY, 4096))[0] == "ok"


def test_infiniband_needs_locked_memory(tmp_path):
    assert told(host.check_locked_memory(8 << 20, []))[0] == "ok"
    assert told(host.check_locked_memory(8 << 20, ["mlx5_0"]))[0] == "problem"
    assert told(host.check_locked_memory(resource.RLIM_INFINITY, ["mlx5_0"]))[0] == "ok"
    tmp_path.joinpath("mlx5_0").mkdir()
    assert host.infiniband_adapters(tmp_path) == ["mlx5_0"]
    assert host.infiniband_adapters(tmp_path / "none") == []


def test_a_small_dev_shm(small):
    assert told(host.check_shared_memory(small))[0] == "warning"


def test_a_container_without_the_hosts_adapters(tmp_path):
    level, found = told(host.check_container(["mlx5_0"], "Docker", tmp_path / "infiniband"))
    assert level == "problem" and "mlx5_0" in found
    assert told(host.check_container(["mlx5_0"], "Docker", tmp_path))[0] == "ok"
    assert list(host.check_container([], "")) == []


def test_containers_are_known_by_their_marks(tmp_path):
    assert host.container_type({}, tmp_path) == ""
    assert host.container_type({"container": "lxc"}, tmp_path) == "lxc"
    Path(tmp_path / ".dockerenv").touch()
    assert host.container_type({}, tmp_path) == "Docker"
