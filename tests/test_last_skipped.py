"""A second run of pytest executes what the first one skipped, and nothing else."""

import os
import subprocess
import sys

import pytest

from tests.source import ROOT

CONFTEST = """
from tests import last_skipped

def pytest_addoption(parser):
    last_skipped.add_option(parser)

def pytest_configure(config):
    config.pluginmanager.register(last_skipped.LastSkipped(config))
"""
TESTS = """
import os
import pytest

needs = pytest.mark.skipif("PROGRAM" not in os.environ, reason="needs PROGRAM")

def test_passes(): pass
@needs
@pytest.mark.parametrize("case", [1, 2])
def test_marked(case): pass
def test_asks_for_a_module(): pytest.importorskip(os.environ.get("PROGRAM", "no_such_module"))
@pytest.mark.xfail
def test_known_to_fail(): raise AssertionError
"""


@pytest.mark.parametrize("workers", [(), ("-n", "2")], ids=["one process", "xdist"])
def test_only_what_was_skipped_runs_again(workers, tmp_path):
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_some.py").write_text(TESTS)

    def run(*words, **variables):
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-c",
            os.devnull,
            f"--rootdir={tmp_path}",
            "-rA",
            *workers,
            *words,
            ".",
        ]
        given = {**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_XDIST_WORKER": "", **variables}
        del given["PYTEST_XDIST_WORKER"]
        done = subprocess.run(command, cwd=tmp_path, env=given, capture_output=True, text=True, check=False)
        return sorted(line.split("::")[1] for line in done.stdout.splitlines() if line.startswith("PASSED"))

    assert run() == ["test_passes"]
    assert run("--last-skipped", PROGRAM="json") == ["test_asks_for_a_module", "test_marked[1]", "test_marked[2]"]
    assert run("--last-skipped", PROGRAM="json") == []
