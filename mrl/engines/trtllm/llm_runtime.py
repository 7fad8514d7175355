"""Starts the LLM API inside this process, locates its executor, and monitors its event loop.

There is no worker process: every rank of a replica creates the same `LLM`, whose executor (`PyExecutor`, with the
model) runs in the rank's process. A single rank gets this from TensorRT-LLM's own branch for
TLLM_WORKER_USE_SINGLE_PROCESS. In a job started by MPI each rank creates the worker itself through the private argument
`executor_cls`, after the replica's communicator was set as TensorRT-LLM's world. The parts of this were read in the
sources of the 1.2 line (`executor/worker.py`, `_utils.set_mpi_comm`, `llmapi/mpi_session.py`) and have not been run
together.
"""

from __future__ import annotations

import atexit
import inspect
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from mrl.algorithms.functional.sampling import truncates
from mrl.config.config import RolloutConfig
from mrl.distributed import launch
from mrl.engines.trtllm.engine_kwargs import merge_arguments, user_arguments
from mrl.engines.trtllm.features import Features
from mrl.engines.trtllm.features import find as find_features
from mrl.engines.trtllm.fp8 import check_features
from mrl.engines.trtllm.mpi_env import communicator_of, hidden_variables, set_world_communicator
from mrl.engines.trtllm.process_state import process_state_restored
from mrl.engines.trtllm.rank_placement import check_hosts
from mrl.engines.trtllm.replica import EXCHANGE_INTERVAL_S, Replica
from mrl.engines.trtllm.routing import engine_arguments
from mrl.errors import UserError, first_line
from mrl.models.base import ArchSpec

SETTINGS = {"TRT_LLM_DISABLE_LOAD_WEIGHTS_IN_PARALLEL": "1"}
"""Environment while loading weights: one stream and less memory, as in verl and NeMo-RL."""

START_SETTINGS = {**SETTINGS, "TRTLLM_NO_USAGE_STATS": "1"}
"""Environment at the start: additionally no usage statistics, which 1.3 sends to NVIDIA from every rank
(`tensorrt_llm/usage`).
"""

CPP_SAMPLER = "TRTLLMSampler"


def arguments(
    config: RolloutConfig, arch: ArchSpec, dtype: torch.dtype, features: Features, *, trains_on_logprobs: bool
) -> dict[str, Any]:
    """Returns the keyword arguments of `LLM`, except `model` and those of the executor.

    Raises:
        UserError: The installed version lacks a feature or an argument that the config needs.
    """
    if config.free_cache_engine and not features.sleep:
        raise UserError(
            f"TensorRT-LLM {features.version} has neither enable_sleep nor sleep_config, so its memory cannot be freed "
            "while training. Set rollout.free_cache_engine=false, or install 1.2 or 1.3."
        )
    check_min_p(config, features, max(config.min_p, config.val_kwargs.min_p))
    if config.quantization is not None:
        check_features(features)
    graphs = not (config.enforce_eager or _must_disable_graphs(config, features))
    experts: dict[str, Any] = {}
    if arch.moe is not None:
        cut = config.moe_tensor_parallel_size or config.tensor_model_parallel_size // config.expert_parallel_size
        experts = {"moe_expert_parallel_size": config.expert_parallel_size, "moe_tensor_parallel_size": cut}
    derived = {
        "skip_tokenizer_init": True,
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "dtype": str(dtype).removeprefix("torch."),
        "max_batch_size": config.max_num_seqs,
        "max_num_tokens": config.max_num_batched_tokens,
        "max_input_len": config.max_sequence_length,  # a paused request is resubmitted with the tokens it has sampled
        "max_seq_len": config.max_sequence_length,
        "kv_cache_config": {
            "enable_block_reuse": config.enable_prefix_caching,
            "free_gpu_memory_fraction": config.gpu_memory_utilization,
        },
        "scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"},
        "cuda_graph_config": {"enable_padding": True, "max_batch_size": config.max_num_seqs} if graphs else None,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "allreduce_strategy": "NCCL",  # its own kernels break convergence with several engines, per its source
        "sampler_type": select_sampler(config, features),
        "disable_overlap_scheduler": _needs_logits(config, features, trains_on_logprobs=trains_on_logprobs),
        "load_format": "dummy",  # the first weight sync fills the weights
        **experts,
        **(features.sleep if config.free_cache_engine else {}),
        **engine_arguments(config, features),
    }
    return merge_arguments(derived, user_arguments(config), features.version)


def _must_disable_graphs(config: RolloutConfig, features: Features) -> bool:
    """Returns whether CUDA graphs are requested, but the version is not known to keep them while its engine sleeps."""
    return not config.enforce_eager and config.free_cache_engine and not features.graphs_sleep


def _notes(config: RolloutConfig, features: Features) -> tuple[str, ...]:
    """Returns messages about settings that the installed version cannot follow."""
    if not _must_disable_graphs(config, features):
        return ()
    return (
        f"no CUDA graphs: TensorRT-LLM {features.version} is not known to keep them while its engine sleeps (its own "
        "test of enable_sleep disables them). Set rollout.free_cache_engine=false to use them, or "
        "rollout.enforce_eager=true to silence this message",
    )


def select_sampler(config: RolloutConfig, features: Features) -> str:
    """Returns the sampler whose log-probabilities most likely need no correction; the probe verifies it.

    1.2's TorchSampler returns only the most likely token's log-probability, and ignores seed and `min_p`.
    """
    supports_min_p = features.torch_min_p or not (config.min_p > 0.0 or config.val_kwargs.min_p > 0.0)
    return (
        "TorchSampler" if not features.cpp_sampler or (features.processed_logprobs and supports_min_p) else CPP_SAMPLER
    )


def check_min_p(config: RolloutConfig, features: Features, min_p: float) -> None:
    """Raises UserError where the sampler would ignore `min_p`."""
    if min_p > 0.0 and select_sampler(config, features) != CPP_SAMPLER and not features.torch_min_p:
        raise UserError(
            f"rollout.min_p={min_p}: the TorchSampler of TensorRT-LLM {features.version} ignores it. Set it to "
            "0, also in rollout.val_kwargs, or use rollout.name=native."
        )


def _needs_logits(config: RolloutConfig, features: Features, *, trains_on_logprobs: bool) -> bool:
    """Returns whether training rollouts will need logits, as far as known before the probe.

    Kept token ids need them, and so do trained log-probabilities that the engine does not report exactly. The overlap
    scheduler must then be off: it runs one step too many where a response ends early, and returns no logits for it.
    """
    if truncates(config.top_k, config.top_p, config.min_p):
        return True
    if select_sampler(config, features) == CPP_SAMPLER:
        return False
    return trains_on_logprobs and (not features.processed_logprobs or not config.do_sample)


class LlmRuntime:
    """Running engine of TensorRT-LLM's LLM API.

    Attributes:
        llm: TensorRT-LLM's `LLM`.
        executor: Its `PyExecutor`, in this process.
        features: Features of the installed package.
        notes: Messages about settings that the installed version cannot follow.
        graphs: True if it captures CUDA graphs.
    """

    def __init__(
        self,
        config: RolloutConfig,
        arch: ArchSpec,
        model_folder: Path,
        *,
        replica: Replica,
        device: torch.device,
        dtype: torch.dtype,
        timeout_s: float,
        trains_on_logprobs: bool,
    ) -> None:
        """Collective over the ranks that sample: starts this rank's part of the engine.

        Args:
            config: Config section `rollout`.
            arch: Architecture of the model.
            model_folder: Folder with config.json.
            replica: Ranks that share the engine.
            device: Device of this rank.
            dtype: Weight dtype.
            timeout_s: Longest wait for the engine to pause, seconds.
            trains_on_logprobs: True if the loss uses the log-probabilities.

        Raises:
            UserError: TensorRT-LLM or MPI cannot start in this job, or it would use another rank's device.
        """
        launcher = launch.get_launcher_env().launcher
        communicator = communicator_of(replica, config.name)
        with (
            launch.scrubbed_env(hide=hidden_variables(launcher), given=_start_variables(communicator)),
            process_state_restored(device),
        ):
            self.features = find_features()
            from tensorrt_llm import LLM

            _check_device(device, replica)
            chosen = arguments(config, arch, dtype, self.features, trains_on_logprobs=trains_on_logprobs)
            self.graphs = chosen["cuda_graph_config"] is not None
            if communicator is not None:
                chosen |= _mpi_arguments(communicator)
            try:
                self.llm = LLM(str(model_folder), **chosen)
            except Exception as error:
                raise RuntimeError(
                    f"TensorRT-LLM {self.features.version} did not start on {device}: {type(error).__name__}: {error}"
                ) from error
        self.executor: Any = getattr(self.llm._executor, "engine", None)
        if self.executor is None or not hasattr(self.executor, "control_action"):
            found = type(self.llm._executor).__name__
            self.llm.shutdown()
            raise RuntimeError(
                f"TensorRT-LLM {self.features.version} started its executor in another process ({found}), where its "
                "weights cannot be replaced"
            )
        self.notes = _notes(config, self.features)
        self._replica, self._timeout_s = replica, timeout_s
        self._death: BaseException | None = None
        self._hook = threading.excepthook
        threading.excepthook = self._record_death

    def check(self) -> None:
        """Raises if the engine's event loop has ended.

        Raises:
            RuntimeError: It has ended; the message has the cause if the loop raised one.
        """
        thread = getattr(self.executor, "worker_thread", None)
        ended = bool(getattr(self.executor, "is_shutdown", False)) or (thread is not None and not thread.is_alive())
        if ended or self._death is not None:
            cause = "see its log for the cause" if self._death is None else _describe(self._death)
            raise RuntimeError(f"TensorRT-LLM's event loop has ended: {cause}")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Collective over the replica: pauses the event loop in the block, after all requests ended (`control_action`).

        The pause begins when every rank has left the previous one: the first rank starts it for all, and a rank that is
        still leaving would miss it. TensorRT-LLM's hang detector is off inside, since it would kill a loop that 1.2
        pauses for 300 s.

        Raises:
            RuntimeError: The event loop has ended, or does not pause in time; TensorRT-LLM alone would wait forever.
        """
        self._replica.barrier(self.check)
        action = self.executor.control_action()
        failures: list[BaseException] = []
        entered = threading.Event()

        def enter() -> None:
            try:
                action.__enter__()
            except BaseException as error:  # noqa: BLE001 -- it is raised below
                failures.append(error)
            finally:
                entered.set()

        threading.Thread(target=enter, daemon=True).start()
        began = time.monotonic()
        while not entered.wait(EXCHANGE_INTERVAL_S):
            self.check()
            if time.monotonic() - began > self._timeout_s:
                raise RuntimeError(
                    f"TensorRT-LLM's event loop did not pause in {self._timeout_s:g} s (run.collective_timeout_s)"
                )
        if failures:
            raise RuntimeError(f"TensorRT-LLM did not pause: {_describe(failures[0])}") from failures[0]
        detector = getattr(self.executor, "hang_detector", None)
        try:
            # Ends before the loop continues, whose own hang checkpoints would race with the end of the pause.
            with nullcontext() if detector is None else detector.pause():
                yield
        finally:
            action.__exit__(None, None, None)

    def close(self, *, wait_s: float) -> None:
        """Shuts down the engine in about `wait_s` seconds at most; repeated calls do nothing.

        An engine that does not end because its loop waits for a dead rank is left to the end of the process.
        """
        if threading.excepthook == self._record_death:
            threading.excepthook = self._hook
        executor = self.llm._executor
        ending = threading.Thread(target=self.llm.shutdown, daemon=True)
        ending.start()
        ending.join(wait_s)
        if ending.is_alive():  # at exit TensorRT-LLM would try again and block
            for at_exit in (getattr(executor, "shutdown", None), getattr(type(self.llm), "_shutdown_wrapper", None)):
                if at_exit is not None:
                    atexit.unregister(at_exit)

    def _record_death(self, args: threading.ExceptHookArgs) -> None:
        """Records the exception that ended the event loop."""
        if args.thread is not None and args.thread is getattr(self.executor, "worker_thread", None):
            self._death = args.exc_value
        self._hook(args)


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _start_variables(communicator: Any) -> Mapping[str, str]:
    return START_SETTINGS if communicator is not None else {**START_SETTINGS, "TLLM_WORKER_USE_SINGLE_PROCESS": "1"}


def _check_device(device: torch.device, replica: Replica) -> None:
    """Checks that TensorRT-LLM will select this rank's device, and that its assumptions about hosts hold."""
    if device.type == "cuda":
        from tensorrt_llm import _utils

        num_devices, rank = torch.cuda.device_count(), _utils.global_mpi_rank()
        if replica.size > 1:
            check_hosts(rank - replica.rank, replica.size, num_devices, launch.get_launcher_env().local_world_size)
        check_choice(device, rank, num_devices)


def check_choice(device: torch.device, mpi_rank: int, num_devices: int) -> None:
    """Checks that TensorRT-LLM selects this rank's device: MPI rank modulo visible ones (`executor/base_worker.py`).

    Raises:
        UserError: It would select another device.
    """
    chosen = mpi_rank % num_devices
    if chosen != device.index:
        raise UserError(
            f"TensorRT-LLM would use cuda:{chosen} (MPI rank {mpi_rank}, {num_devices} devices), but this rank's is "
            f"{device}. Make only its own device visible to each rank: one device in CUDA_VISIBLE_DEVICES, or "
            "srun --gpus-per-task=1."
        )


def _mpi_arguments(communicator: Any) -> dict[str, Any]:
    """Sets the replica as TensorRT-LLM's world; returns the arguments of `LLM` that create the worker in process."""
    from tensorrt_llm.executor.executor import GenerationExecutor
    from tensorrt_llm.executor.worker import GenerationExecutorWorker
    from tensorrt_llm.llmapi import mpi_session

    own = set_world_communicator(communicator)

    class InlineMpiSession(mpi_session.MpiSession):
        """MPI session whose ranks all run this program, so a task for all of them runs here."""

        def submit(self, task: Any, *args: Any, **kwargs: Any) -> list[Any]:
            raise RuntimeError("TensorRT-LLM wanted to start a worker; the ranks are the workers")

        def submit_sync(self, task: Any, *args: Any, **kwargs: Any) -> list[Any]:
            return [task(*args, **kwargs)]

        def shutdown(self, wait: bool = True) -> None:
            """Does nothing: there are no worker processes."""

        def abort(self) -> None:
            own.Abort(1)

    class InProcess(GenerationExecutor):
        """Creates the worker directly instead of a proxy that starts processes."""

        @staticmethod
        def create(*engine: Any, **given: Any) -> GenerationExecutorWorker:
            wanted = inspect.signature(GenerationExecutorWorker.__init__).parameters
            return GenerationExecutorWorker(*engine, **{name: value for name, value in given.items() if name in wanted})

    return {"executor_cls": InProcess, "_mpi_session": InlineMpiSession()}


def describe_error(error: Exception) -> str:
    """Returns an error of TensorRT-LLM in one line."""
    return f"{type(error).__name__}: {first_line(error)}"
