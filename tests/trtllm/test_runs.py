"""Whole runs through the stand-in: rewards of the native engine, in process and over MPI; and a death on one rank."""

import os
import sys

import pytest

from mrl.config import load
from mrl.run.prepare import load_model_facts
from mrl.weights.trtllm import TrtllmMapping
from tests.e2e import runs
from tests.e2e.test_layouts import assert_same as assert_same_numbers
from tests.launch.test_mpirun import mpirun
from tests.ranks import run_ranks
from tests.source import ROOT
from tests.trtllm.conftest import FAULTS, STANDIN, forget
from tests.trtllm.engines import build_engines
from tests.trtllm.signature import FLAVOUR_VARIABLE
from tests.trtllm.test_built_ranks import LIMITS, SETTINGS

LENGTH = "response_length/mean"
SHORT = ("train.num_steps=2", "rollout.temperature=0.8", "rollout.top_p=0.9")
REPLICAS = {"one of two ranks": 2, "two of two ranks": 4}
TOLERANCE = 1e-3
"""Relative, on metrics that log-probabilities enter: fp32 sums in another order."""
PATHS = f"{ROOT}{os.pathsep}{STANDIN}"


def _with_standin(words, ports, flavour):
    sys.path.insert(0, str(STANDIN))
    os.environ[FLAVOUR_VARIABLE] = flavour
    forget()
    try:
        return runs._main(words, ports)
    finally:
        sys.path.remove(str(STANDIN))
        del os.environ[FLAVOUR_VARIABLE]
        forget()


def trained(folder, words, flavour="1.2"):
    """metrics.jsonl of a run of one rank that has the stand-in."""
    assert run_ranks(1, _with_standin, words, [runs.free_port(), runs.free_port()], flavour) == [0]
    return runs.metrics(folder)


def assert_same_run(found, expected):
    assert len(found) == len(expected)
    for line, other in zip(found, expected, strict=True):
        assert line.keys() == other.keys()
        for key, value in other.items():
            if "reward" in key or "response_length" in key or isinstance(value, str):
                assert line[key] == value, key
            else:
                assert line[key] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), key


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    found = runs.train_in_pool(tmp_path_factory.mktemp("native"), SHORT, 1)
    assert any(1 < line.get(LENGTH, 0) < 4 for line in found), "no response ends early"
    return found


@pytest.mark.parametrize("flavour", ["1.2", "1.3"])
def test_grpo_in_process_has_the_native_engines_rewards(tmp_path, expected, flavour):
    words = runs.arguments(tmp_path, [*SHORT, "rollout.name=trtllm"])
    assert_same_run(trained(tmp_path, words, flavour), expected)
    assert (tmp_path / "run" / "model" / "config.json").is_file()


def test_grpo_on_a_built_engine_in_process_has_its_numbers(standin, tmp_path, expected):
    words = runs.arguments(tmp_path, [*SHORT, *SETTINGS, f"rollout.engine_dir={tmp_path}/built/engines"])
    arch, _ = load_model_facts(load(words[1], words[2:]))
    build_engines(tmp_path / "built", arch, TrtllmMapping(1), **LIMITS)
    assert_same_numbers(trained(tmp_path, words), expected)


@pytest.mark.mpi
@pytest.mark.parametrize("ranks", REPLICAS.values(), ids=REPLICAS)
def test_grpo_of_replicas_over_mpi_has_the_native_engines_numbers(tmp_path, expected, ranks):
    words = [*SHORT, "rollout.name=trtllm", "rollout.tensor_model_parallel_size=2"]
    done = mpirun(tmp_path, *runs.arguments(tmp_path, words), ranks=ranks, PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_numbers(runs.metrics(tmp_path), expected)


@pytest.mark.mpi
def test_a_death_on_one_rank_ends_the_job_on_all_with_its_cause(tmp_path):
    words = ["train.warm_start.num_steps=0", "rollout.name=trtllm", "rollout.tensor_model_parallel_size=2"]
    done = mpirun(tmp_path, *runs.arguments(tmp_path, words), PYTHONPATH=PATHS, **{FAULTS: "die_on_rank1=2"})
    assert done.returncode not in (0, 2)
    assert "rank 1's part of the engine failed: RuntimeError: TensorRT-LLM's event loop has ended: " in done.stderr
    assert "CUDA error: an illegal memory access was encountered" in done.stderr
