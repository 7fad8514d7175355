"""The production configs, shrunk as `mrl rehearse` does: each trains a step with TensorRT-LLM's engine, a stand-in."""

import pytest
from rich.console import Console

from mrl.commands.rehearse.rehearse import FIRST, Options, rehearse
from mrl.config.config import load, to_yaml
from mrl.engines.trtllm.fields import needs_mpi
from mrl.observability.hardware import HARDWARE
from mrl.trainer.validation.rollout_ranks import num_rollout_ranks
from tests.e2e import runs
from tests.engines.trtllm import mpi_ranks
from tests.engines.trtllm.test_runs import _with_standin
from tests.ranks import run_ranks
from tests.test_configs import OF_TRTLLM as FILES

RANKS = 2
"""Enough for a replica of several, and for experts on several; and one more where that has ranks of its own."""
APART = 0.05
"""Most that a token's probability of engine and actor differ by: both round to bfloat16, in another order."""
OVER_MPI = [file for file in FILES if needs_mpi(load(file).rollout)]
ALONE = [file for file in FILES if file not in OVER_MPI]


def shrunk(file, folder):
    """The config that a rehearsal would start, with the engine that it has, and its ranks."""
    most = RANKS + (num_rollout_ranks(load(file).rollout) > 0)
    options = Options(HARDWARE["h100"], max_ranks=most, output_dir=str(folder / "rehearsal"), dry_run=True)
    report = rehearse(str(file), [], options, Console(quiet=True))
    small = folder / "small.yaml"
    changes = ["rollout.name=trtllm", f"run.output_dir={folder}/run", "train.eval_interval=0", "observe.report=false"]
    small.write_text(to_yaml(load(folder / "rehearsal" / FIRST, changes)))
    return str(small), report.layout["all"][1]


def assert_trained(folder, *, sampled=True):
    (line,) = (line for line in runs.metrics(folder) if "actor/grad_norm" in line)
    assert line["actor/grad_norm"] > 0
    if sampled:
        assert line["training/rollout_probs_diff_max"] < APART
    assert load(folder / "run" / "config.yaml").rollout.name == "trtllm"


def test_every_config_samples_with_tensorrt_llm():
    assert {load(file).rollout.name for file in FILES} == {"trtllm"} and OVER_MPI and ALONE


@pytest.mark.slow
@pytest.mark.parametrize("file", ALONE, ids=lambda path: path.stem)
def test_a_config_of_replicas_of_one_rank_trains_under_any_launcher(file, tmp_path):
    small, ranks = shrunk(file, tmp_path)
    assert run_ranks(ranks, _with_standin, ["train", small], [runs.free_port(), runs.free_port()], "1.2") == [0] * ranks
    assert_trained(tmp_path, sampled=load(file).algorithm.name != "dpo")


@pytest.mark.mpi
def test_the_configs_of_larger_replicas_train_over_mpi(tmp_path):
    found = {file.stem: shrunk(file, tmp_path / file.stem) for file in OVER_MPI}
    assert all(needs_mpi(load(small).rollout) for small, _ in found.values())
    for size in (RANKS, RANKS + 1):
        of_size = [small for small, ranks in found.values() if ranks == size]
        assert of_size
        done = mpi_ranks.mpirun(size, "-m", "tests.engines.trtllm.one_job", *of_size)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-4000:]
    for name in found:
        assert_trained(tmp_path / name)
