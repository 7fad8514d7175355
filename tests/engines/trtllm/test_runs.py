"""Whole runs through the stand-in: rewards of the native engine, in process and over MPI; and a death on one rank."""

import os
import signal
import subprocess
import sys

import pytest

from mrl.config.config import load
from mrl.resharding.trtllm import TrtllmMapping
from mrl.trainer.run_plan import load_arch_and_tokenizer
from tests import warm
from tests.e2e import runs
from tests.e2e.test_layouts import TOKENS
from tests.e2e.test_layouts import assert_same as assert_same_numbers
from tests.engines.trtllm.conftest import FAULTS, STANDIN, forget
from tests.engines.trtllm.engines import build_engines
from tests.engines.trtllm.signature import FLAVOUR_VARIABLE
from tests.engines.trtllm.test_built_ranks import LIMITS, SETTINGS
from tests.launch.hosts import Hosts, NoRightsError
from tests.launch.test_mpirun import TIMEOUT_S, mpirun
from tests.ranks import run_ranks
from tests.source import ROOT

pytestmark = pytest.mark.slow

LENGTH = "response_length/mean"
SHORT = ("train.num_steps=2", "rollout.temperature=0.8", "rollout.top_p=0.9")
TOLERANCE = 1e-3
"""Relative, on metrics that log-probabilities enter: fp32 sums in another order."""
FP8 = (
    "train={num_steps: 2, warm_start: {num_steps: 4, batch_size: 32}}",
    "rollout.temperature=0.6", "rollout.quantization=fp8", "rollout.dtype=bfloat16",
    "algorithm.rollout_correction.preset=decoupled_token_is",
    "model.overrides.hidden_size=256", "model.overrides.intermediate_size=256",
    "model.overrides.num_hidden_layers=2", "model.overrides.num_key_value_heads=4",
)  # fmt: skip
"""Nothing is cut: at the edge of top_p a rounding in bfloat16 would say which tokens the actor scores over.
With less of a warm start the first steps go so far that rounding is seen."""
FP8_TOLERANCE = 0.02
"""Where a CPU computes in bfloat16, on metrics that log-probabilities enter."""
PATHS = f"{ROOT}{os.pathsep}{STANDIN}"


def _with_standin(words, ports, flavour):
    sys.path.insert(0, str(STANDIN))
    os.environ[FLAVOUR_VARIABLE] = flavour
    forget()
    try:
        return runs.in_rank(words, ports)
    finally:
        sys.path.remove(str(STANDIN))
        del os.environ[FLAVOUR_VARIABLE]
        forget()


def trained(folder, words, flavour="1.2", ranks=1):
    """metrics.jsonl of a run whose ranks have the stand-in."""
    assert run_ranks(ranks, _with_standin, words, [runs.free_port(), runs.free_port()], flavour) == [0] * ranks
    return runs.metrics(folder)


def assert_same_run(found, expected, tolerance=TOLERANCE):
    assert len(found) == len(expected)
    for line, other in zip(found, expected, strict=True):
        assert line.keys() == other.keys()
        for key, value in other.items():
            if key == TOKENS or "reward" in key or "response_length" in key or isinstance(value, str):
                assert line[key] == value, key
            else:
                assert line[key] == pytest.approx(value, rel=tolerance, abs=tolerance), key


def apart(lines):
    """Without how far a refit went, which is where ranks of their own differ."""
    return [{key: value for key, value in line.items() if not key.startswith("refit/")} for line in lines]


@pytest.fixture(scope="module")
def in_fp8(tmp_path_factory):
    return runs.train_in_pool(tmp_path_factory.mktemp("native"), FP8, 1)


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


@pytest.mark.parametrize("flavour", ["1.2", "1.3"])
def test_grpo_on_a_rank_of_its_own_has_them_and_its_canary_is_told(tmp_path, expected, flavour):
    words = runs.arguments(tmp_path, [*SHORT, "rollout.name=trtllm", "rollout.num_ranks=1"])
    assert_same_run(apart(trained(tmp_path, words, flavour, ranks=2)), apart(expected))
    assert (tmp_path / "run" / "model" / "config.json").is_file()
    assert "weight-sync self-test: same weights synced twice: " in (tmp_path / "run" / "notes.jsonl").read_text()


def test_grpo_on_a_built_engine_in_process_has_its_numbers(standin, tmp_path, expected):
    words = runs.arguments(tmp_path, [*SHORT, *SETTINGS, f"rollout.engine_dir={tmp_path}/built/engines"])
    arch, _ = load_arch_and_tokenizer(load(words[1], words[2:]))
    build_engines(tmp_path / "built", arch, TrtllmMapping(1), **LIMITS)
    assert_same_numbers(trained(tmp_path, words), expected)


def test_grpo_in_fp8_has_the_native_engines_numbers_in_fp8(tmp_path, in_fp8):
    words = runs.arguments(tmp_path, [*FP8, "rollout.name=trtllm"])
    assert_same_run(trained(tmp_path, words, "1.3"), in_fp8, FP8_TOLERANCE)
    assert in_fp8[-1]["training/rollout_probs_diff_max"] > 0


@pytest.mark.mpi
def test_grpo_in_fp8_of_a_replica_over_mpi_has_them_too(tmp_path, in_fp8):
    words = [*FP8, "rollout.name=trtllm", "rollout.tensor_model_parallel_size=2"]
    done = mpirun(tmp_path, *runs.arguments(tmp_path, words), PYTHONPATH=PATHS, **{FLAVOUR_VARIABLE: "1.3"})
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_run(apart(runs.metrics(tmp_path)), apart(in_fp8), FP8_TOLERANCE)


@pytest.mark.mpi
def test_grpo_of_two_replicas_over_mpi_has_the_native_engines_numbers(tmp_path, expected):
    words = [*SHORT, "rollout.name=trtllm", "rollout.tensor_model_parallel_size=2"]
    done = mpirun(tmp_path, *runs.arguments(tmp_path, words), ranks=4, PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_numbers(runs.metrics(tmp_path), expected)


@pytest.mark.mpi
def test_replicas_on_ranks_of_their_own_over_mpi_have_the_native_engines_numbers(tmp_path, expected):
    words = [*SHORT, "rollout.name=trtllm", "rollout.tensor_model_parallel_size=2", "rollout.num_ranks=2"]
    done = mpirun(tmp_path, *runs.arguments(tmp_path, words), ranks=3, PYTHONPATH=PATHS)
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_numbers(runs.metrics(tmp_path), expected)


AGENT = """#!/bin/sh
# Of mpirun: ADDRESS COMMAND... runs on the host of that address, which is a network namespace.
name=$(echo "$HOSTS" | cut -d, -f"${1##*.}"); shift
exec ip netns exec "$name" unshare --uts sh -c 'hostname "$0"; exec sh -c "$*"' "$name" "$@"
"""


@pytest.mark.mpi
@pytest.mark.netns
def test_a_replica_over_two_hosts_has_the_native_engines_numbers(tmp_path, expected):
    if "Open MPI" not in subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout:
        pytest.skip("the flags are Open MPI's")
    try:
        hosts = Hosts()
    except NoRightsError as error:
        pytest.skip(f"no network namespaces here: {error}")
    try:
        agent, told = tmp_path / "agent", tmp_path / "told.txt"
        agent.write_text(AGENT)
        agent.chmod(0o755)
        cable = [word for key in ("oob_tcp_if_include", "btl_tcp_if_include") for word in ("--mca", key, "cable")]
        words = [
            "mpirun", "-n", "2", "-H", f"{hosts.address(0)}:1,{hosts.address(1)}:1", "--bind-to", "none", *cable,
            "--mca", "btl", "tcp,self", "--mca", "plm_rsh_agent", str(agent), warm.python(), "-m", "mrl",
        ]  # fmt: skip
        words += runs.arguments(tmp_path, [*SHORT, "rollout.name=trtllm", "rollout.tensor_model_parallel_size=2"])
        environment = {
            **os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATHS, "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_coll_ucc_enable": "0", "HOSTS": ",".join(hosts.names),
            "MASTER_ADDR": hosts.address(0), FAULTS: "devices=1",
        }  # fmt: skip
        assert hosts.start(0, words, environment, told).wait(TIMEOUT_S) == 0, told.read_text()
        assert_same_numbers(runs.metrics(tmp_path), expected)
    finally:
        hosts._end(signal.SIGKILL)
        hosts.down()


@pytest.mark.mpi
def test_a_death_on_one_rank_ends_the_job_on_all_with_its_cause(tmp_path):
    words = ["train.warm_start.num_steps=0", "rollout.name=trtllm", "rollout.tensor_model_parallel_size=2"]
    done = mpirun(tmp_path, *runs.arguments(tmp_path, words), PYTHONPATH=PATHS, **{FAULTS: "die_on_rank1=2"})
    assert done.returncode not in (0, 2)
    assert "rank 1's part of the engine failed: RuntimeError: TensorRT-LLM's event loop has ended: " in done.stderr
    assert "CUDA error: an illegal memory access was encountered" in done.stderr
