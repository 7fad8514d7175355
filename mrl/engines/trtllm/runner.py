"""One rank's built engine under TensorRT-LLM's Python runtime (`tensorrt_llm.runtime.ModelRunner`).

Loads the engine, runs one batch, and frees the KV cache; `trt_engine.py` prepares the input and interprets the output.

The following properties were read in NVIDIA's sources (`runtime/model_runner.py` and `runtime/generation.py` of the 1.x
line) and not verified by a run:

- With `return_dict` and a pipeline, `generate` sends the logits to MPI rank 0; with tensor parallelism as well it never
  returns. So `return_dict` is off under a pipeline: the first stage returns tokens, the last one a dictionary of
  logits.
- An end token is not part of the response, a stop word is. So end tokens are passed as stop words, and `end_id` is an
  invalid token id.
- The decoder runs on the last stage; `GenerationSession.log_probs` has its log-probabilities.
- The returned logits are copied before the decoder modifies them.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mrl.distributed import launch
from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm.engine_dir import EngineFolder
from mrl.engines.trtllm.mpi_env import communicator_of, hidden_variables, set_world_communicator
from mrl.engines.trtllm.replica import Replica
from mrl.errors import UserError, first_line

FIRST_VERSION, END_VERSION = (1, 2), (1, 3)
"""Supported TensorRT-LLM versions; 1.3 removed ModelRunner, trtllm-build and the rest of the TensorRT backend."""

NO_TOKEN = -42
"""Invalid token id used as `end_id` and `pad_id`, as NeMo-Aligner does with this runtime."""


@dataclass(frozen=True)
class BatchOutput:
    """Output of one call on this rank; rows in the order of the prompts, steps from the first new token.

    Attributes:
        tokens_BT: Sampled tokens, padded with `NO_TOKEN`; None on all but the first pipeline stage.
        decoder_logprobs_BT: The decoder's log-probabilities of the tokens; None on all but the last stage.
        logits: Logits of each step, [B, padded vocabulary]; None on all but the last stage, or where not requested.
    """

    tokens_BT: Tensor | None
    decoder_logprobs_BT: Tensor | None
    logits: list[Tensor] | None


class Runner:
    """Loaded TensorRT engine, run by `ModelRunner`.

    Args:
        folder: Folder of the engines.
        replica: Ranks of the engine, in TensorRT-LLM's order: pipeline stage x tp_size + tensor-parallel rank.
        device: Device of this rank.

    Attributes:
        engine: Loaded `tensorrt.ICudaEngine`.

    Raises:
        UserError: TensorRT-LLM is missing, too new, or not the version of the engines; or the ranks have no MPI.
    """

    def __init__(self, folder: EngineFolder, *, replica: Replica, device: torch.device) -> None:
        self._device = device
        self._mapping = folder.config.mapping
        pp_rank = replica.rank // self._mapping.tp_size
        self.is_first_stage, self.is_last_stage = pp_rank == 0, pp_rank == self._mapping.pp_size - 1
        session = communicator_of(replica, "trtllm_engine")
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        given = {"DISABLE_TORCH_DEVICE_SET": "1"}  # read at import; otherwise it selects a device by rank
        with launch.scrubbed_env(hide=hidden_variables(launch.get_launcher_env().launcher), given=given):
            check_version(folder)
            from tensorrt_llm.runtime import ModelRunner

            if session is not None:
                set_world_communicator(session)
            self._runner: Any = ModelRunner.from_dir(engine_dir=str(folder.path), rank=replica.rank, stream=stream)
        self.engine: Any = self._runner.session.runtime.engine

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[int],
        *,
        with_logits: bool,
    ) -> BatchOutput:
        """Collective over the replica: samples one batch.

        Args:
            prompts: Token ids of each row.
            sampling: Distribution, end tokens and length; `n`, `stop` and `seed` are not used.
            seeds: Random seed of each row, int64.
            with_logits: True to return the logits of every step, 4 bytes x rows x steps x padded vocabulary.
        """
        from tensorrt_llm.runtime import SamplingConfig as RuntimeSampling

        config = RuntimeSampling(
            end_id=NO_TOKEN,
            pad_id=NO_TOKEN,
            max_new_tokens=sampling.max_tokens,
            stop_words_list=_stop_words(sampling, len(prompts)),
            temperature=float(sampling.temperature),
            top_k=1 if sampling.greedy else max(0, sampling.top_k),
            top_p=float(sampling.top_p),
            min_p=float(sampling.min_p),
            return_dict=self._mapping.pp_size == 1,
        )
        config.random_seed = torch.tensor(list(seeds), dtype=torch.int64)
        config.output_log_probs = True
        found = self._runner.generate(
            batch_input_ids=[torch.tensor(list(ids), dtype=torch.int32) for ids in prompts],
            sampling_config=config,
            output_generation_logits=with_logits,
        )
        starts = [len(ids) for ids in prompts]
        tokens, logprobs, logits = None, None, None
        if self.is_first_stage:
            ids = found["output_ids"] if isinstance(found, dict) else found
            tokens = _new_columns(ids[:, 0], starts, sampling.max_tokens)
        if self.is_last_stage:
            logprobs = _new_columns(self._runner.session.log_probs[:, 0], starts, sampling.max_tokens)
            logits = _step_logits(found) if with_logits else None
        return BatchOutput(tokens, logprobs, logits)

    def release_cache(self) -> None:
        """Frees the KV cache, logits and decoder state of the last call; the next call allocates them again.

        TensorRT's activation memory and the engine's weights remain while the engine is loaded.
        """
        session = self._runner.session
        session.buffer, session.buffer_allocated = None, False
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Unloads the engine."""
        self.engine = None
        self._runner = None
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()


def check_version(folder: EngineFolder) -> None:
    """Imports TensorRT-LLM and checks its version.

    Raises:
        UserError: It is missing, has no TensorRT backend, or is not the version that built the engines.
    """
    first, end = (".".join(map(str, version)) for version in (FIRST_VERSION, END_VERSION))
    needs = f"rollout.name=trtllm_engine needs TensorRT-LLM >= {first}, < {end}"
    try:
        import tensorrt_llm
    except ImportError as error:
        raise UserError(
            f"{needs}, which is not installed ({first_line(error)}). Run in NVIDIA's release container, or use another "
            "rollout.name."
        ) from error
    version = str(tensorrt_llm.__version__)
    numbers = tuple(int(part) for part in version.split(".")[:2] if part.isdigit())
    if not FIRST_VERSION <= numbers < END_VERSION:
        raise UserError(
            f"{needs}; this is {version}. {end} removed the TensorRT backend: ModelRunner, trtllm-build and refit. Use "
            "rollout.name=trtllm, which needs no built engine."
        )
    if folder.version and folder.version != version:
        raise UserError(
            f"rollout.engine_dir: the engines in '{folder.path}' were built by TensorRT-LLM {folder.version}, this is "
            f"{version}; engines only run on the version that built them. Rebuild with tools/build_trtllm_engine.py."
        )


def _stop_words(sampling: SamplingConfig, rows: int) -> Any:
    """Returns end tokens as one-token stop words, int32 [rows, 2, words] of ids and end offsets; None without any."""
    if sampling.ignore_eos or not sampling.stop_token_ids:
        return None
    ids = list(sampling.stop_token_ids)
    return np.array([[ids, range(1, len(ids) + 1)]] * rows, dtype=np.int32)


def _new_columns(rows_BL: Tensor, starts: Sequence[int], count: int) -> Tensor:
    """Returns `count` columns of each row from its own start, on the CPU."""
    return torch.stack([row[start : start + count] for row, start in zip(rows_BL.cpu(), starts, strict=True)])


def _step_logits(found: Any) -> list[Tensor]:
    """Returns the logits of each step, [B, padded vocabulary], from a tensor [B, beams, steps, V] or a list.

    Raises:
        RuntimeError: There are none.
    """
    logits = found.get("generation_logits") if isinstance(found, dict) else None
    if logits is None or len(logits) == 0:
        raise RuntimeError("TensorRT-LLM returned no logits although they were requested")
    return list(logits[:, 0].unbind(1)) if isinstance(logits, Tensor) else list(logits)
