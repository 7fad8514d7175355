"""Token ids that vLLM kept at each step, for `SamplingConfig.return_kept_tokens`.

Read from `processed_logprobs`, which are -inf where vLLM masked a logit, whatever the order and kernel of min_p, top_k
and top_p. vLLM's own `return_sampling_mask` exists only in its newer model runner, and not on CPUs. For vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.engines._kept_tokens import KeptTokens, add_step
from mrl.engines.vllm.engine_fields import INSTALL
from mrl.engines.vllm.patches import look_up
from mrl.errors import UserError


class KeptTokensRecorder:
    """Kept token ids of every running request.

    Attributes:
        is_recording: Recording switch; recording costs a copy of the logits and a pass over them at each step.
    """

    def __init__(self, version: str) -> None:
        """Checks that vLLM has the methods to hook into; records nothing until `attach`."""
        for module, name in (
            ("vllm.v1.sample.sampler", "Sampler.sample"),
            ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync"),
        ):
            look_up(module, name, version)
        self.is_recording = False
        self._version = version
        self._requests: dict[str, KeptTokens] = {}
        self._newest: tuple[Tensor, Tensor] | None = None

    def attach(self, runner: Any, _cache: Any) -> None:
        """Hooks into the sampler of a model runner.

        Raises:
            UserError: Its sampler is not where mrl expects it.
        """
        if not hasattr(runner, "sampler") or not hasattr(runner, "discard_request_mask"):
            raise UserError(f"vLLM {self._version} does not have its sampler where mrl expects it. {INSTALL}")
        sampled, bookkeeping = runner.sampler.sample, runner._bookkeeping_sync

        def sample(logits: Tensor, metadata: Any, *rest: Any, **given: Any) -> Any:
            if not self.is_recording:
                return sampled(logits, metadata, *rest, **given)
            tempered = logits.float() if metadata.temperature is None else logits / metadata.temperature[:, None]
            total_N = tempered.logsumexp(1)
            found = sampled(logits, metadata, *rest, **given)
            tokens, logprobs = found
            own = tokens.long().view(-1, 1)
            mass_N = (tempered.gather(1, own) - logprobs.gather(1, own)).squeeze(1) - total_N
            self._newest = logprobs > -torch.inf, mass_N.clamp_(max=0.0)
            return found

        def keep(*given: Any) -> Any:
            if self._newest is not None:
                batch = runner.input_batch
                discarded = runner.discard_request_mask.np[: batch.num_reqs]  # sampled after an incomplete prompt
                names = zip(batch.req_ids, discarded, strict=True)
                add_step(*self._newest, [None if dropped else self._of(name) for name, dropped in names])
                self._newest = None
            return bookkeeping(*given)

        runner.sampler.sample, runner._bookkeeping_sync = sample, keep

    def start(self, *, listens: bool) -> None:
        """Clears all requests, and starts or stops recording."""
        self._requests.clear()
        self.is_recording = listens

    def _of(self, name: str) -> KeptTokens:
        return self._requests.setdefault(name, KeptTokens())

    def pop(self, name: str) -> KeptTokens | None:
        """Returns and removes the record of a finished request, by vLLM's internal name; None if not recording."""
        return self._requests.pop(name) if self.is_recording else None
