"""The samplers: whose random numbers a request draws, what of its setting is heard, which log-probabilities it gets.

As `_torch/pyexecutor/sampler.py` has them. 1.2's TorchSampler reads temperature, top_k and top_p of a request and
nothing else, draws for all requests from one generator that begins at 42, and reports its most likely token, which
need not be the sampled one. TRTLLMSampler hears everything and reports the sampled token under the temperature; 1.3 has
none.
"""

from dataclasses import dataclass, replace

import torch

from mrl.algorithms.functional.sampling import keep_threshold
from tensorrt_llm.executor.result import Logprob
from tensorrt_llm.faults import fault
from tests.engines.trtllm.signature import flavour

IS_NEW = flavour() == "1.3"
HEARS_MIN_P = IS_NEW and not fault("no_min_p")


@dataclass(frozen=True, kw_only=True)
class _OldParams:
    temperature: float | None
    top_p: float | None
    top_k: int | None


@dataclass(frozen=True, kw_only=True)
class _NewParams(_OldParams):
    min_p: float | None = None


UtilsSamplingParams = _NewParams if HEARS_MIN_P else _OldParams


class TorchSampler:
    mode = "raw"

    def __init__(self):
        self._global_seed, self._drawn = 42, 0

    def keys(self, results):
        if IS_NEW:
            return _seeds(results)
        first = self._drawn
        self._drawn += len(results)
        return [(self._global_seed << 32) + number for number in range(first, self._drawn)]

    def heard(self, sampling):
        return sampling if HEARS_MIN_P else replace(sampling, min_p=0.0)

    def entry(self, token, row):
        best = int(row.argmax())
        entry = {best: Logprob(logprob=float(row[best]), rank=1)}
        if IS_NEW and not fault("top1"):
            entry[token] = Logprob(logprob=float(row[token]), rank=int((row > row[token]).sum()) + 1)
        return entry


class _TRTLLMSampler:
    mode = "tempered"

    def keys(self, results):
        return _seeds(results)

    def heard(self, sampling):
        return replace(sampling, min_p=0.0) if fault("min_p_ignored") else sampling

    def entry(self, token, row):
        token = int(row.argmax()) if fault("top1") else token
        return {token: Logprob(logprob=float(row[token]), rank=1)}


if not IS_NEW:
    TRTLLMSampler = _TRTLLMSampler


def instantiate_sampler(llm_args):
    if llm_args.sampler_type == "TRTLLMSampler":
        if IS_NEW:
            raise ValueError("sampler_type: TRTLLMSampler was removed")
        return _TRTLLMSampler()
    return TorchSampler()


def _seeds(results):
    return [result.request.sampling_params.seed or 0 for result in results]


def scored(sampler, params, sampling, logits_TV):
    """What log-probabilities are the log-softmax of."""
    mode = fault("scores")
    if mode is None:
        asked = getattr(params, "logprobs_mode", None)
        mode = "processed" if getattr(asked, "name", "") == "PROCESSED" else sampler.mode
    if mode == "raw":
        return logits_TV
    tempered = logits_TV / sampling.temperature
    threshold = keep_threshold(tempered, 1 if sampling.greedy else sampling.top_k, sampling.top_p, sampling.min_p)
    if mode == "tempered" or threshold is None:
        return tempered
    return tempered.masked_fill(tempered < threshold[:, None], -torch.inf)
