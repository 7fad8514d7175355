"""GRPO on built engines over a real MPI: the numbers of the native engine, and an engine that dies ends the job."""

import json

import pytest

from mrl.config.config import load
from mrl.resharding.trtllm import TrtllmMapping
from mrl.trainer.run_plan import load_arch_and_tokenizer
from tests.e2e import runs
from tests.e2e.test_layouts import TOKENS, assert_same
from tests.engines.trtllm.conftest import FAULTS
from tests.engines.trtllm.engines import build_engines
from tests.engines.trtllm.mpi_ranks import mpirun

pytestmark = pytest.mark.mpi

LENGTH = "response_length/mean"
SHORT = ("train.num_steps=2", "train.warm_start.num_steps=2", "rollout.temperature=0.8", "rollout.top_p=0.9")
LIMITS = {"max_batch_size": 16, "max_input_len": 12, "max_seq_len": 16}
SETTINGS = ("rollout.name=trtllm_engine", "rollout.enable_prefix_caching=false", "rollout.enforce_eager=true")
REPLICAS = {
    "tp2": (2, TrtllmMapping(2), "rollout.tensor_model_parallel_size=2"),
    "pp2": (2, TrtllmMapping(1, 2), "rollout.pipeline_model_parallel_size=2"),
    "two of tp2": (4, TrtllmMapping(2), "rollout.tensor_model_parallel_size=2"),
    "tp2, on ranks of its own": (3, TrtllmMapping(2), "rollout={tensor_model_parallel_size: 2, num_ranks: 2}"),
}
"""Ranks of the job, spread of an engine, the setting of its size."""


@pytest.fixture(scope="module")
def native(tmp_path_factory):
    found = runs.train_in_pool(tmp_path_factory.mktemp("native"), SHORT, 1)
    assert any(1 < line.get(LENGTH, 0) < 4 for line in found), "no response ends early"
    return found


def train(folder, replica, **variables):
    """A run of such replicas."""
    ranks, mapping, size = REPLICAS[replica]
    words = runs.arguments(folder, [*SHORT, *SETTINGS, f"rollout.engine_dir={folder}/built/engines", size])
    arch, _ = load_arch_and_tokenizer(load(words[1], words[2:]))
    build_engines(folder / "built", arch, mapping, **LIMITS)
    return mpirun(ranks, "-m", "mrl", *words, **variables)


@pytest.mark.parametrize("replica", REPLICAS)
def test_rewards_and_everything_else_are_those_of_the_native_engine(replica, native, standin, tmp_path):
    done = train(tmp_path, replica)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    found = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert_same(found, native)
    assert any(TOKENS in row for row in found)


def test_an_engine_that_dies_ends_the_job_with_the_cause(standin, tmp_path):
    done = train(tmp_path, "tp2", **{FAULTS: "engine_fails=1"})
    assert done.returncode not in (0, 2)
    assert "rank 1's engine failed: RuntimeError: Executing TRT engine failed step=0!" in done.stderr
