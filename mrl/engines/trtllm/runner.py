"""One rank's built engine under TensorRT-LLM's Python runtime.

Owns loading it by `tensorrt_llm.runtime.ModelRunner`, one batch through it, and letting go of its KV cache. What is
asked of it and what comes of the answers is the business of `trt_engine.py`.

The runtime was read in NVIDIA's sources (`runtime/model_runner.py` and `runtime/generation.py` of the 1.x line), not
run. What follows from them here:

- With `return_dict` and a pipeline, `generate` sends the logits to MPI rank 0, whoever waits for them; with tensor
  parallelism too it never returns. So `return_dict` is off under a pipeline: the first stage returns tokens, the last
  one a dictionary of logits.
- An end token is not counted as part of the response, a stop word is: end tokens are given as stop words, and `end_id`
  is an id that no vocabulary has.
- The decoder and its log-probabilities are on the last stage; `GenerationSession.log_probs` keeps them.
- The logits that are returned are copied before the decoder changes them.
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
from mrl.engines.trtllm.mpi_env import adopt, communicator_of, hidden
from mrl.engines.trtllm.replica import Replica
from mrl.errors import UserError, first_line

FIRST_VERSION, END_VERSION = (1, 2), (1, 3)
"""Of TensorRT-LLM: 1.3 took ModelRunner, trtllm-build and the rest of the TensorRT backend out."""

NO_TOKEN = -42
"""`end_id` and `pad_id`; NeMo-Aligner runs this runtime with the same."""


@dataclass(frozen=True)
class Answers:
    """What one call brought on this rank; rows as they were asked, steps from the first new token on.

    Attributes:
        tokens_BT: `NO_TOKEN` behind a row's last; on the first pipeline stage, else None.
        decoder_logprobs_BT: What the runtime's decoder says of the tokens; on the last stage, else None.
        logits: Of each step that ran, [B, padded vocabulary]; on the last stage where they were asked for, else None.
    """

    tokens_BT: Tensor | None
    decoder_logprobs_BT: Tensor | None
    logits: list[Tensor] | None


class Runner:
    """An engine that is loaded and ready.

    Args:
        folder: The engines.
        replica: The ranks of the engine, in TensorRT-LLM's order: pipeline stage x tp_size + tensor-parallel rank.
        device: Of this rank.

    Attributes:
        engine: `tensorrt.ICudaEngine`.

    Raises:
        UserError: There is no TensorRT-LLM of a fitting version, its version is not the engines', or the ranks of a
            replica cannot talk over MPI.
    """

    def __init__(self, folder: EngineFolder, *, replica: Replica, device: torch.device) -> None:
        self._device = device
        self._mapping = folder.config.mapping
        pp_rank = replica.rank // self._mapping.tp_size
        self.is_first_stage, self.is_last_stage = pp_rank == 0, pp_rank == self._mapping.pp_size - 1
        session = communicator_of(replica, "trtllm_engine")
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        given = {"DISABLE_TORCH_DEVICE_SET": "1"}  # read at import; else it picks a device by its rank
        with launch.scrubbed_variables(hide=hidden(launch.environment().launcher), given=given):
            check_version(folder)
            from tensorrt_llm.runtime import ModelRunner

            if session is not None:
                adopt(session)
            self._runner: Any = ModelRunner.from_dir(engine_dir=str(folder.path), rank=replica.rank, stream=stream)
        self.engine: Any = self._runner.session.runtime.engine

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig,
        seeds: Sequence[int],
        *,
        with_logits: bool,
    ) -> Answers:
        """Collective over the replica: one batch.

        Args:
            prompts: Token ids.
            sampling: Distribution, end tokens and length; `n`, `stop` and `seed` are the caller's business.
            seeds: Of each row, int64.
            with_logits: Return the logits of every step; they take 4 bytes x rows x steps x padded vocabulary.
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
            tokens = _after(ids[:, 0], starts, sampling.max_tokens)
        if self.is_last_stage:
            logprobs = _after(self._runner.session.log_probs[:, 0], starts, sampling.max_tokens)
            logits = _steps(found) if with_logits else None
        return Answers(tokens, logprobs, logits)

    def release_cache(self) -> None:
        """Frees the KV cache, the logits and the decoder's state of the last call; the next call allocates them anew.

        TensorRT's own memory for activations and the engine's weights stay as long as the engine is loaded.
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
    """Imports TensorRT-LLM.

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
            f"{version}; an engine runs on the version that built it. Build them again by tools/build_trtllm_engine.py."
        )


def _stop_words(sampling: SamplingConfig, rows: int) -> Any:
    """End tokens as words of one token: [rows, 2, words] int32, ids and where each word ends; None without any."""
    if sampling.ignore_eos or not sampling.stop_token_ids:
        return None
    ids = list(sampling.stop_token_ids)
    return np.array([[ids, range(1, len(ids) + 1)]] * rows, dtype=np.int32)


def _after(rows_BL: Tensor, starts: Sequence[int], count: int) -> Tensor:
    """`count` columns of each row from its own start on, on the CPU."""
    return torch.stack([row[start : start + count] for row, start in zip(rows_BL.cpu(), starts, strict=True)])


def _steps(found: Any) -> list[Tensor]:
    """The logits of each step, [B, padded vocabulary]: with `return_dict` [B, beams, steps, V], else a list.

    Raises:
        RuntimeError: There are none.
    """
    logits = found.get("generation_logits") if isinstance(found, dict) else None
    if logits is None or len(logits) == 0:
        raise RuntimeError("TensorRT-LLM returned no logits though they were asked for")
    return list(logits[:, 0].unbind(1)) if isinstance(logits, Tensor) else list(logits)
