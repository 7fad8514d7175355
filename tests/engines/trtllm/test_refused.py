"""A mistake that is TensorRT-LLM's own is refused by every command, in the same words, where it is not installed."""

import pytest

from mrl.commands.cli import main
from tests.test_bad_input import Case

ARGUMENTS = "rollout.engine_kwargs.trtllm"
BUILT = ("rollout.name=trtllm_engine", "rollout.enable_prefix_caching=false", "rollout.enforce_eager=true")

MISTAKES = {
    "engine folder": (("rollout.engine_dir=engines",), "only rollout.name=trtllm_engine reads prebuilt engines"),
    "routing": (("rollout.enable_rollout_routing_replay=true",), "return the chosen experts"),
    "penalty": (("rollout.repetition_penalty=1.1",), "would not be those that sampled"),
    "log-probabilities": (("rollout.calculate_log_probs=false",), "are pi_old"),
    "FP8 of whole matrices": (("rollout.quantization=fp8_per_tensor",), "Without them its second weight sync fails"),
    "FP8 of narrow matrices": (("rollout.quantization=fp8",), "must consist of complete 128 x 128"),
    "FP8 and float32": (("rollout.quantization=fp8", "rollout.dtype=float32"), "multiplies FP8 weights with bfloat16"),
    "unknown argument": ((f"{ARGUMENTS}.attn_backnd=TRTLLM",), "Did you mean 'attn_backend'"),
    "ranks": ((f"{ARGUMENTS}.tensor_parallel_size=2",), "set rollout.tensor_model_parallel_size"),
    "memory": ((f"{ARGUMENTS}.kv_cache_config.free_gpu_memory_fraction=0.9",), "set rollout.gpu_memory_utilization"),
    "window": ((f"{ARGUMENTS}.kv_cache_config.max_attention_window=[8]",), "full attention"),
    "type": ((f"{ARGUMENTS}.kv_cache_config.tokens_per_block=many",), "expected a whole number"),
    "attention": ((f"{ARGUMENTS}.attn_backend=flashinfer",), "Did you mean 'FLASHINFER'"),
    "dtype of the cache": ((f"{ARGUMENTS}.kv_cache_config.dtype=int8",), "expected one of auto, fp8, nvfp4"),
    "drafter": ((f"{ARGUMENTS}.speculative_config.decoding_type=Eagle",), "none for other drafters"),
    "experts": ((f"{ARGUMENTS}.moe_config.backend=TRITON",), "the model has no experts"),
    "graphs": (("rollout.enforce_eager=true", f"{ARGUMENTS}.cuda_graph_config.batch_sizes=[1]"), "Set it to false"),
    "other engine": (("rollout.engine_kwargs.vllm.block_size=16",), "with rollout.name=trtllm: nothing would read it"),
    "no engine": (("rollout.engine_kwargs.sglang.swap_space=4",), "only the engines trtllm and vllm take arguments"),
    "idle arguments": (("rollout.name=native", f"{ARGUMENTS}.attn_backend=TRTLLM"), "nothing would read it"),
    "no engines": (BUILT, "needs rollout.engine_dir"),
    "prefix cache": ((*BUILT, "rollout.enable_prefix_caching=true"), "no prefix cache"),
    "FP8 of a built engine": ((*BUILT, "rollout.quantization=fp8"), "activation scales from a calibration"),
    "captured graphs": ((*BUILT, "rollout.enforce_eager=false"), "captures no CUDA graphs"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_every_command_refuses_it(tmp_path, capfd, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    overrides, why = MISTAKES[name]
    assert why in Case(tmp_path, capfd).refused_by_all("rollout.name=trtllm", *overrides)


TWO = ("rollout.name=trtllm", "rollout.tensor_model_parallel_size=2")
OF_TORCHRUN = {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1"}
OVER_MPI = "NPROC=2 launch/mpirun.sh train CONFIG, or launch/slurm.sbatch with MODE=srun SRUN_ARGS=--mpi=pmix"


@pytest.fixture
def case(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Case(tmp_path, capfd)


def test_a_replica_of_several_ranks_is_refused_by_all_that_know_that_mpi_does_not_start_it(case, monkeypatch):
    told = case.refused(*TWO, "--via", "torchrun", "--gpus-per-node", "2", command="launch")
    assert "2 ranks per replica needs ranks started by MPI" in told and "Use launch/mpirun.sh" in told
    for name, value in (OF_TORCHRUN | {"MASTER_PORT": 29500}).items():
        monkeypatch.setenv(name, str(value))
    assert case.refused(*TWO) == case.refused(*TWO, "--dry-run") == told
    case.works("rollout.name=trtllm", "--dry-run")


@pytest.mark.parametrize("command", [("train", "--dry-run"), ("plan",)], ids=" ".join)
def test_who_looks_at_it_without_a_launcher_is_told_how_it_is_started(case, command):
    def printed(*overrides, ranks="2"):
        words = [str(case.folder / "config.yaml"), *overrides, *command[1:], "--world-size", ranks]
        assert main([command[0], *words]) == 0
        (line,) = (line for line in case.capfd.readouterr().out.splitlines() if line.startswith("start "))
        return line

    assert OVER_MPI in printed(*TWO)
    assert "launch/torchrun.sh" in printed("rollout.name=trtllm") and "MPI" not in printed("rollout.name=trtllm")
    assert printed("rollout.name=trtllm", ranks="1").split() == ["start", "mrl", "train", "CONFIG"]


def test_a_number_of_ranks_that_does_not_fit_is_mended_by_the_launcher_that_it_needs(case):
    assert "Start a multiple of 2 ranks: NPROC=2 launch/mpirun.sh" in case.refused(
        *TWO, "--dry-run", "--world-size", "3"
    )
