"""What a job leaves in its process."""

import os

import torch.distributed as dist

from mrl.distributed import launch


def test_a_job_leaves_the_environment_as_it_was():
    before = dict(os.environ)
    launch.start("cpu", num_threads=1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and dist.is_initialized()
    launch.stop()
    assert dict(os.environ) == before


def test_an_interface_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    launch.start("cpu", num_threads=1)
    launch.stop()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
