"""Requests to the LLM API and what comes of them, a wait at a time, and the probe of the log-probabilities.

Owns the waiting: no answer is waited for longer than the run allows, and a request that fails takes the others back.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from mrl.algorithms.functional.sampling import stream_key
from mrl.engines.base import EngineSpec, SamplingConfig
from mrl.engines.trtllm import logprob_probe
from mrl.engines.trtllm.llm_runtime import Host, refusal
from mrl.engines.trtllm.logprob_probe import Answer, Verdict
from mrl.engines.trtllm.sampling import arguments, logits_of, logprobs_of
from mrl.errors import UserError
from mrl.types import Prompt

POLL_S = 0.005
"""Between two looks for an answer."""


class Requests:
    """The first rank's talk with a started engine.

    Args:
        host: The engine.
        spec: The replica's.
    """

    def __init__(self, host: Host, spec: EngineSpec) -> None:
        self._host, self._spec = host, spec

    def ask(self, prompts: Sequence[Prompt], asked: Sequence[dict[str, Any]]) -> list[Any]:
        """Requests that are on their way, in the order of the prompts."""
        from tensorrt_llm import SamplingParams

        return [
            self._host.llm.generate_async({"prompt_token_ids": list(prompt.prompt_ids)}, SamplingParams(**arguments))
            for prompt, arguments in zip(prompts, asked, strict=True)
        ]

    def next(self, requests: list[Any], what: str) -> Generator[None, None, Any]:
        """The completion of the first of the requests, which is taken off the list; no wait is longer than the run's.

        Raises:
            RuntimeError: TensorRT-LLM gave an error, or no answer in time; the other requests are taken back.
        """
        request, began = requests.pop(0), time.monotonic()
        try:
            while request.queue.empty():  # `result` would wait for ever: some versions do not pass its timeout on
                if time.monotonic() - began > self._spec.timeout_s:
                    raise RuntimeError(
                        f"{what}: TensorRT-LLM gave no answer in {self._spec.timeout_s:g} s (run.collective_timeout_s)"
                    )
                time.sleep(POLL_S)
                yield
            return request.result(timeout=self._spec.timeout_s).outputs[0]
        except BaseException as error:
            for each in (request, *requests):
                with suppress(Exception):  # the first failure is the one to tell
                    each.abort()
            if isinstance(error, UserError | RuntimeError | GeneratorExit):
                raise
            raise RuntimeError(f"{what}: TensorRT-LLM failed: {refusal(error)}") from error  # type: ignore[arg-type]

    def probe(self, prompt: Prompt) -> Generator[None, None, Verdict]:
        """Samples with log-probabilities and logits and compares them; then ends a response early."""
        most = min(logprob_probe.PROBE_TOKENS, self._spec.config.response_length)
        greedy = replace(logprob_probe.HOT, greedy=True, temperature=1.0)
        probes = [replace(each, max_tokens=most) for each in (logprob_probe.HOT, logprob_probe.CUT, greedy)]
        hot, cut, straight = yield from self._answers(prompt, probes)
        tokens = straight.tokens
        end = next((index for index in range(1, len(tokens)) if tokens[index] not in tokens[:index]), 0)
        early = replace(greedy, max_tokens=most, ignore_eos=False, stop_token_ids=(tokens[end],))
        (ended,) = yield from self._answers(prompt, [early])
        has_logits = all(answer.logits_TV is not None for answer in (hot, cut, ended))
        return Verdict(logprob_probe.judge([hot, cut]), has_logits)

    def _answers(self, prompt: Prompt, probes: Sequence[SamplingConfig]) -> Generator[None, None, list[Answer]]:
        """One response to each probe, with all that can be had."""
        features = self._host.features
        asked = [arguments(probe, stream_key(0, prompt.uid, 0), features, with_logits=True) for probe in probes]
        requests = self.ask(
            [prompt] * len(probes), [each | {"logprobs": 1, **features.processed_logprobs} for each in asked]
        )
        answers = []
        for probe in probes:
            output = yield from self.next(requests, "the probe of the log-probabilities")
            logits = logits_of(output, self._spec.arch.vocab_size)
            answers.append(Answer(probe, list(output.token_ids), logprobs_of(output), logits))
        return answers
