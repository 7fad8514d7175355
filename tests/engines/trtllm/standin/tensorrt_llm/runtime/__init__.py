"""Stands in for TensorRT-LLM's Python runtime: `ModelRunner` over engines that `builder.py` here made.

The ranks of an engine bring their shards together over MPI and each computes the whole model. What a rank then returns
is what the real one does: tokens on the first pipeline stage, logits and log-probabilities on the last. Its faults are
`engine_fails`, `decoder` and `warm_logits` of `faults.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import tensorrt
import torch

from mrl.checkpoint.formats.trtllm_config import from_json
from mrl.engines.base import SamplingConfig as Contract
from mrl.resharding.trtllm import trtllm_layout
from tensorrt_llm import _utils, bindings
from tensorrt_llm.builder import unpacked
from tensorrt_llm.faults import StandInError, fault
from tensorrt_llm.runtime.generation import DISABLE_TORCH_DEVICE_SET, GenerationSession, SamplingConfig
from tests.engines.trtllm.native_model import NativeModel, assembled
from tests.engines.trtllm.signature import signed

__all__ = ["GenerationSession", "ModelRunner", "SamplingConfig"]


def _open_workspace(mapping, rank):
    """The memory of the custom all-reduce, as `_ipc_utils.py: IpcMemory.open_ipc_memory` opens it.

    Every rank opens the handles of the others that Python's communicator has in its pipeline stage, and its own pointer
    stands in their list at its tensor-parallel rank: with ranks of other replicas among them it opens its own handle,
    which CUDA refuses in the process that made it.
    """
    if mapping.tp_size == 1:
        return
    stage, tp_rank = divmod(rank, mapping.tp_size)
    handles = _utils.mpi_comm().Split(stage, tp_rank).allgather(os.getpid())
    for position, pid in enumerate(handles):
        if position != tp_rank and pid == os.getpid():
            raise RuntimeError("cudaErrorDeviceUninitialized")
    if len(handles) != mapping.tp_size:
        raise StandInError(f"the all-reduce of {mapping.tp_size} ranks has the memory of {len(handles)}")


class ModelRunner:
    def __init__(self, folder, rank):
        given = json.loads((folder / "config.json").read_text())
        self._build = given["build_config"]
        config = from_json(given["pretrained_config"])
        self._arch, self._mapping, self._dtype, self._rank = config.arch, config.mapping, config.dtype, rank
        weights = torch.load(folder / f"rank{rank}.engine", weights_only=True)
        self.session = GenerationSession(tensorrt.ICudaEngine(weights, self._build["use_refit"]))
        self._model = NativeModel(config.arch, config.dtype, self._build["max_seq_len"])
        self._filled = -1

    @staticmethod
    @signed("tensorrt_llm.runtime.ModelRunner.from_dir")
    def from_dir(engine_dir, *, rank=0, **rest):
        if DISABLE_TORCH_DEVICE_SET != "1":
            raise AssertionError("tensorrt_llm.runtime would choose a device of its own")
        runner = ModelRunner(Path(engine_dir), rank)
        if runner._mapping.world_size > 1 and bindings.MpiComm.size() != runner._mapping.world_size:
            raise AssertionError(f"{runner._mapping.world_size} ranks, the MPI session has {bindings.MpiComm.size()}")
        _open_workspace(runner._mapping, rank)
        return runner

    @signed("tensorrt_llm.runtime.ModelRunner.generate")
    def generate(self, batch_input_ids, position_ids=None, sampling_config=None, **how):
        with_logits = how.pop("output_generation_logits", False)
        assert not how, f"not played: {how}"
        self._check(batch_input_ids, sampling_config)
        if fault("engine_fails") == str(self._rank):
            raise RuntimeError("Executing TRT engine failed step=0!")
        engine = self.session.runtime.engine
        engine.generating = True
        try:
            self._fill(engine)
            return self._generate(batch_input_ids, sampling_config, with_logits)
        finally:
            engine.generating = False

    def _check(self, prompts, config):
        build = self._build
        lens = [ids.numel() for ids in prompts]
        for limit, value in (
            ("max_batch_size", len(prompts)),
            ("max_input_len", max(lens)),
            ("max_seq_len", max(lens) + config.max_new_tokens),
            ("max_num_tokens", sum(lens)),
        ):
            if value > build[limit]:
                raise RuntimeError(f"{value} exceeds the engine's {limit} ({build[limit]})")
        assert all(ids.dtype == torch.int32 and ids.dim() == 1 for ids in prompts)
        assert config.num_beams == 1
        seeds, words = config.random_seed, config.stop_words_list
        assert seeds is None or (seeds.dtype == torch.int64 and seeds.shape == (len(prompts),)), "random_seed"
        assert words is None or (
            isinstance(words, np.ndarray) and words.dtype == np.int32 and words.shape[:2] == (len(prompts), 2)
        ), "stop_words_list"
        if self._mapping.pp_size > 1 and config.return_dict:
            raise AssertionError("with return_dict and a pipeline the last stage's logits never reach the others")

    def _fill(self, engine):
        """Brings the ranks' shards together where they changed."""
        if self._filled == engine.refits:
            return
        layout = trtllm_layout(self._arch, self._mapping, self._rank, self._dtype)
        shards = bindings.MpiComm.gather_all(unpacked(engine.weights, layout), self._mapping.world_size)
        ranks = range(self._mapping.world_size)
        layouts = [trtllm_layout(self._arch, self._mapping, rank, self._dtype) for rank in ranks]
        self._model.fill(assembled(self._arch, layouts, shards))
        self._filled = engine.refits

    def _generate(self, prompts, config, with_logits):
        size, lens = len(prompts), [ids.numel() for ids in prompts]
        width = max(lens) + config.max_new_tokens
        words = config.stop_words_list
        ends = () if words is None else tuple(int(id_) for id_ in words[0, 0])
        if config.end_id in range(self._arch.vocab_size):
            raise AssertionError("an end token is not counted as part of the response")
        greedy = config.top_k == 1 or (config.top_k == 0 and config.top_p == 0.0)
        contract = Contract(
            n=1, max_tokens=config.max_new_tokens, temperature=config.temperature, top_k=config.top_k or -1,
            top_p=config.top_p, min_p=config.min_p, greedy=greedy, ignore_eos=words is None, stop_token_ids=ends,
        )  # fmt: skip
        keys = [0] * size if config.random_seed is None else config.random_seed.tolist()
        found = self._model.generate([ids.tolist() for ids in prompts], keys, contract)
        output_ids = torch.full((size, 1, width), config.end_id, dtype=torch.int32)
        log_probs = torch.zeros(size, 1, width)
        steps = max(len(tokens) for tokens, _ in found)
        padded = -(-self._arch.vocab_size // self._mapping.tp_size) * self._mapping.tp_size
        logits = torch.full((steps, size, padded), torch.nan)
        logits[:, :, self._arch.vocab_size :] = 100.0  # what a careless reader would take for a token
        for row, (tokens, raw) in enumerate(found):
            ids = torch.tensor(tokens)
            output_ids[row, 0, : lens[row]] = prompts[row]
            output_ids[row, 0, lens[row] : lens[row] + len(tokens)] = ids
            flavour = fault("decoder")
            scored = raw if flavour == "raw" else raw / config.temperature
            at = lens[row] + (flavour == "shifted")
            values = scored.log_softmax(1).gather(1, ids[:, None]).squeeze(1)
            log_probs[row, 0, at : at + len(tokens)] = values[: width - at]
            returned = raw / config.temperature if fault("warm_logits") else raw
            logits[: len(tokens), row, : self._arch.vocab_size] = returned
        return self._returned(output_ids, log_probs, logits, config, with_logits)

    def _returned(self, output_ids, log_probs, logits, config, with_logits):
        stage = self._rank // self._mapping.tp_size
        first, last = stage == 0, stage == self._mapping.pp_size - 1
        self.session.log_probs = None
        if config.output_log_probs:
            self.session.log_probs = log_probs if last else torch.zeros_like(log_probs)
        self.session.buffer, self.session.buffer_allocated = {"present_key_value_0": torch.zeros(1)}, True
        if first and config.return_dict:
            outputs = {"output_ids": output_ids}
            if with_logits:
                outputs["generation_logits"] = logits.transpose(0, 1)[:, None]
            return outputs
        if first:
            return output_ids
        if last:
            return {"generation_logits": list(logits)} if with_logits else {}
        return None
