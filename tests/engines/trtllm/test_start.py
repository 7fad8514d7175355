"""What surrounds the start: launchers that cannot hold a replica, devices, and variables hidden for a while."""

import os

import pytest
import torch

from mrl.config.config import load
from mrl.distributed import launch
from mrl.engines.trtllm.llm_runtime import check_choice
from mrl.engines.trtllm.rank_placement import check_hosts
from mrl.errors import UserError
from mrl.trainer.run_plan import build_run_plan
from tests.source import ROOT

TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a"}


@pytest.fixture
def torchrun(monkeypatch):
    """As rank 1 of 2 on one host."""
    for name, value in {**TORCHRUN, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(launch.OWN_DEVICE, "")  # so that both are put back
    monkeypatch.delenv(launch.OWN_DEVICE)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return monkeypatch


def test_a_replica_of_several_ranks_under_torchrun_is_refused_before_anything_starts(torchrun, tmp_path):
    overrides = (f"run.output_dir={tmp_path}/run", "rollout.name=trtllm", "rollout.tensor_model_parallel_size=2")
    with pytest.raises(UserError, match="needs ranks started by MPI.*launch/mpirun.sh"):
        build_run_plan(load(str(ROOT / "configs" / "quickstart.yaml"), overrides))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("seen, own", [("", "1"), ("4,5", "5"), ("6", "6")])
def test_under_torchrun_a_rank_sees_its_own_device_only(torchrun, seen, own):
    torchrun.setenv("CUDA_VISIBLE_DEVICES", seen)
    launch.hide_other_devices()
    assert os.environ["CUDA_VISIBLE_DEVICES"] == own and launch.OWN_DEVICE in os.environ


def test_one_process_keeps_what_it_sees(monkeypatch):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    before = dict(os.environ)
    launch.hide_other_devices()
    assert dict(os.environ) == before


def test_the_device_that_tensorrt_llm_takes_must_be_the_ranks():
    check_choice(torch.device("cuda:0"), 0, 1)
    check_choice(torch.device("cuda:3"), 11, 8)  # second host, eight ranks on each
    with pytest.raises(UserError, match=r"would use cuda:0 \(MPI rank 0, 8 devices\), but this rank's is cuda:3"):
        check_choice(torch.device("cuda:3"), 0, 8)


def test_a_replica_is_inside_a_host_or_of_whole_hosts():
    check_hosts(6, 2, 8, 8)
    check_hosts(8, 8, 8, 8)
    check_hosts(16, 16, 8, 8)  # the third and fourth host
    check_hosts(2, 2, 1, 1)  # hosts of one device
    with pytest.raises(UserError, match="sees 1 device.*2 ranks are on its host.*no --gpus-per-task"):
        check_hosts(2, 2, 1, 2)
    for first, size in ((6, 4), (4, 8), (0, 12)):
        with pytest.raises(UserError, match=f"ranks {first} to {first + size - 1} form a replica, on hosts of 8 dev"):
            check_hosts(first, size, 8, 8)


def test_variables_are_hidden_given_and_put_back(monkeypatch):
    monkeypatch.setenv("SLURM_X", "1")
    monkeypatch.setenv("KEPT", "2")
    before, outside = dict(os.environ), launch.get_launcher_env()
    with launch.scrubbed_env(hide=("SLURM_",), given={"KEPT": "3", "NEW": "4"}):
        assert "SLURM_X" not in os.environ and os.environ["KEPT"] == "3" and os.environ["NEW"] == "4"
        os.environ["LEFT_BY_THE_LIBRARY"] = "5"
    assert dict(os.environ) == before
    with launch.scrubbed_env(hide=(), given={"RANK": "3"}):  # a signal now still finds how to go on
        assert launch.get_launcher_env() == outside
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(UserError, match="some of torchrun's variables"):
        launch.get_launcher_env()
