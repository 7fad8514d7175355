"""Requests to the LLM API with a time limit, the probe of the log-probabilities, and host memory of returned logits."""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from psutil import virtual_memory

from mrl.algorithms.functional.sampling import stream_key
from mrl.engines.base import EngineSpec, SamplingConfig
from mrl.engines.trtllm import logprob_probe
from mrl.engines.trtllm.llm_runtime import LlmRuntime, describe_error
from mrl.engines.trtllm.logprob_probe import ProbeResponse, ProbeResult
from mrl.engines.trtllm.sampling import arguments, logits_of, logprobs_of
from mrl.errors import UserError
from mrl.types import Prompt

POLL_S = 0.005
"""Interval between checks for a completed request, seconds."""

HOST_PART = 0.25
"""Fraction of the host's free memory for the logits of all its ranks; offloaded optimizer state may need the rest."""

ITEM_BYTES = 4
"""Bytes per logit, at most fp32."""

EXTRA_STEPS = 1
"""Extra decoding steps of the overlap scheduler."""


class Requests:
    """Request client on the first rank of a replica.

    Args:
        runtime: Started engine.
        spec: Specification of the replica.
    """

    def __init__(self, runtime: LlmRuntime, spec: EngineSpec) -> None:
        self._runtime, self._spec = runtime, spec

    def submit(self, prompts: Sequence[Prompt], asked: Sequence[dict[str, Any]]) -> list[Any]:
        """Submits one request per prompt and returns them in the order of the prompts.

        Args:
            prompts: Prompts of the requests.
            asked: Arguments of `SamplingParams` for each request.
        """
        from tensorrt_llm import SamplingParams

        return [
            self._runtime.llm.generate_async({"prompt_token_ids": list(prompt.prompt_ids)}, SamplingParams(**arguments))
            for prompt, arguments in zip(prompts, asked, strict=True)
        ]

    def next_completion(self, requests: list[Any], what: str) -> Generator[None, None, Any]:
        """Waits for the first request, removes it from the list, and returns its completion; yields while waiting.

        Args:
            requests: Pending requests.
            what: Name of the request in error messages.

        Raises:
            RuntimeError: TensorRT-LLM reported an error or did not answer within the run's timeout; the others are
                aborted.
        """
        request, began = requests.pop(0), time.monotonic()
        try:
            while request.queue.empty():  # `result` would block forever: some versions ignore its timeout
                if time.monotonic() - began > self._spec.timeout_s:
                    raise RuntimeError(
                        f"{what}: TensorRT-LLM did not respond in {self._spec.timeout_s:g} s (run.collective_timeout_s)"
                    )
                time.sleep(POLL_S)
                yield
            return request.result(timeout=self._spec.timeout_s).outputs[0]
        except BaseException as error:
            for each in (request, *requests):
                with suppress(Exception):  # the first failure is the one to report
                    each.abort()
            if isinstance(error, UserError | RuntimeError | GeneratorExit):
                raise
            raise RuntimeError(f"{what}: TensorRT-LLM failed: {describe_error(error)}") from error  # type: ignore[arg-type]

    def probe(self, prompt: Prompt) -> Generator[None, None, ProbeResult]:
        """Samples with log-probabilities and logits to compare them; checks that early-ended responses have logits too.

        Args:
            prompt: Prompt to sample from.
        """
        most = min(logprob_probe.PROBE_TOKENS, self._spec.config.response_length)
        greedy = replace(logprob_probe.HIGH_TEMPERATURE_PROBE, greedy=True, temperature=1.0)
        probes = [
            replace(each, max_tokens=most)
            for each in (logprob_probe.HIGH_TEMPERATURE_PROBE, logprob_probe.TRUNCATED_PROBE, greedy)
        ]
        hot, cut, straight = yield from self._responses(prompt, probes)
        tokens = straight.tokens
        end = next((index for index in range(1, len(tokens)) if tokens[index] not in tokens[:index]), 0)
        early = replace(greedy, max_tokens=most, ignore_eos=False, stop_token_ids=(tokens[end],))
        (ended,) = yield from self._responses(prompt, [early])
        has_logits = all(response.logits_TV is not None for response in (hot, cut, ended))
        return ProbeResult(logprob_probe.identify_distribution([hot, cut]), has_logits)

    def _responses(
        self, prompt: Prompt, probes: Sequence[SamplingConfig]
    ) -> Generator[None, None, list[ProbeResponse]]:
        """Returns one response per probe, with log-probabilities and logits where available."""
        features = self._runtime.features
        asked = [arguments(probe, stream_key(0, prompt.uid, 0), features, with_logits=True) for probe in probes]
        requests = self.submit(
            [prompt] * len(probes), [each | {"logprobs": 1, **features.processed_logprobs} for each in asked]
        )
        responses = []
        for probe in probes:
            output = yield from self.next_completion(requests, "the probe of the log-probabilities")
            logits = logits_of(output, self._spec.arch.vocab_size)
            responses.append(ProbeResponse(probe, list(output.token_ids), logprobs_of(output), logits))
        return responses


def requests_at_a_time(sampling: SamplingConfig, vocab_size: int, *, most: int, ranks: int) -> int:
    """Returns how many requests may have buffered logits at the same time.

    Every rank of a replica allocates a pinned buffer for each request, as long as its longest response
    (`_torch/pyexecutor/llm_request.py: LogitsStorage`).

    Args:
        sampling: Settings of the requests.
        vocab_size: Number of logits per token.
        most: Upper limit, `rollout.max_num_seqs`.
        ranks: Number of ranks that share the host.

    Raises:
        UserError: The logits of a single request do not fit.
    """
    row_bytes = (sampling.max_tokens + EXTRA_STEPS) * vocab_size * ITEM_BYTES
    own_bytes = int(virtual_memory().available * HOST_PART) // ranks
    if row_bytes > own_bytes:
        raise UserError(
            f"the logits of one response take {row_bytes} bytes of host memory, but each of the host's {ranks} ranks "
            f"may use only {own_bytes}. Shorten rollout.response_length, or avoid logits: set "
            "rollout.top_k=-1 top_p=1 and min_p=0, or train on the actor's own log-probabilities: "
            "algorithm.rollout_correction.bypass_mode=false, no rollout_is or rollout_rs."
        )
    return min(most, own_bytes // row_bytes)
