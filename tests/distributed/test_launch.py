"""What a job leaves in its process."""

import os
import resource

import torch
import torch.distributed as dist

from mrl.distributed import launch
from mrl.distributed.local_ranks import free_port
from mrl.errors import ClusterError
from tests.ranks import run_ranks


def test_a_job_leaves_the_environment_as_it_was():
    before = dict(os.environ)
    launch.init_distributed("cpu", num_threads=1)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo" and dist.is_initialized()
    launch.shutdown_distributed()
    assert dict(os.environ) == before


def test_a_job_keeps_torchs_attention_away_from_cudnn():
    """Of all libraries in the process: cuDNN would build a plan for each new shape."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    launch.init_distributed("cpu", num_threads=1)
    launch.shutdown_distributed()
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.mem_efficient_sdp_enabled()


def test_an_interface_that_the_user_chose_stays(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    launch.init_distributed("cpu", num_threads=1)
    launch.shutdown_distributed()
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


def started_again(ports, wrong):
    """Another start in a rank that has one: the sums of it, and how many files it may open."""
    from mrl.megatron import parallel_state

    parallel_state.destroy()  # what an earlier test of these ranks left
    launch.shutdown_distributed()
    os.environ["MASTER_PORT"] = str(ports[0])
    files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, files[1]))
    seen, add = [], dist.all_reduce

    def look(tensor, *args, **kwargs):
        seen.append((tensor.numel(), args, kwargs))
        add(tensor, *args, **kwargs)
        tensor += wrong

    dist.all_reduce = look
    try:
        launch.init_distributed("cpu", num_threads=1)
        return seen, resource.getrlimit(resource.RLIMIT_NOFILE) == (files[1], files[1])
    except ClusterError as error:
        return str(error)
    finally:
        dist.all_reduce = add
        launch.shutdown_distributed()
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        os.environ["MASTER_PORT"] = str(ports[1])
        launch.init_distributed("cpu", num_threads=1)


def test_all_ranks_take_part_in_the_first_exchange_of_a_job_and_may_open_many_files():
    """NCCL would wait for ever where the first message is between two of them."""
    ports = [free_port(), free_port()]
    assert run_ranks(2, started_again, ports, 0) == [([(1, (), {})], True)] * 2


def test_a_first_exchange_that_is_wrong_is_told():
    ports = [free_port(), free_port()]
    said = "the first gloo all-reduce summed 2 ones to 3. Run `mrl doctor` on the same hosts."
    assert run_ranks(2, started_again, ports, 1) == [said] * 2
