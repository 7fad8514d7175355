"""Which tokens vLLM kept at each step, for `SamplingConfig.with_support`.

Owns what is read of each step: `processed_logprobs` are -inf where vLLM has masked a logit, whatever the order and the
kernel in which it applied min_p, top_k and top_p. vLLM's own `return_sampling_mask` is for its newer model runner
alone, and not for CPUs. Read in vLLM 0.32.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mrl.engines._kept_tokens import Kept, add_step
from mrl.engines.vllm.engine_fields import INSTALL
from mrl.engines.vllm.patches import place
from mrl.errors import UserError


class Supports:
    """What was kept of every request that runs.

    Attributes:
        listens: Whether it is kept; it costs a copy of the logits, and a look through them, at each step.
    """

    def __init__(self, version: str) -> None:
        """Hears nothing until `attach`; `version`: of vLLM, for messages."""
        for module, name in (
            ("vllm.v1.sample.sampler", "Sampler.sample"),
            ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner._bookkeeping_sync"),
        ):
            place(module, name, version)
        self.listens = False
        self._version = version
        self._requests: dict[str, Kept] = {}
        self._newest: tuple[Tensor, Tensor] | None = None

    def attach(self, runner: Any, _cache: Any) -> None:
        """Listens to the sampler of a model runner from here on.

        Raises:
            UserError: It has another.
        """
        if not hasattr(runner, "sampler") or not hasattr(runner, "discard_request_mask"):
            raise UserError(f"vLLM {self._version} has its sampler elsewhere. {INSTALL}")
        sampled, bookkeeping = runner.sampler.sample, runner._bookkeeping_sync

        def sample(logits: Tensor, metadata: Any, *rest: Any, **given: Any) -> Any:
            if not self.listens:
                return sampled(logits, metadata, *rest, **given)
            tempered = logits.float() if metadata.temperature is None else logits / metadata.temperature[:, None]
            whole_N = tempered.logsumexp(1)
            found = sampled(logits, metadata, *rest, **given)
            tokens, logprobs = found
            own = tokens.long().view(-1, 1)
            mass_N = (tempered.gather(1, own) - logprobs.gather(1, own)).squeeze(1) - whole_N
            self._newest = logprobs > -torch.inf, mass_N.clamp_(max=0.0)
            return found

        def keep(*given: Any) -> Any:
            if self._newest is not None:
                batch = runner.input_batch
                thrown_away = runner.discard_request_mask.np[: batch.num_reqs]  # behind a part of a prompt
                names = zip(batch.req_ids, thrown_away, strict=True)
                add_step(*self._newest, [None if away else self._of(name) for name, away in names])
                self._newest = None
            return bookkeeping(*given)

        runner.sampler.sample, runner._bookkeeping_sync = sample, keep

    def start(self, *, listens: bool) -> None:
        """Forgets all requests; from here on those that come are listened to, or not."""
        self._requests.clear()
        self.listens = listens

    def _of(self, name: str) -> Kept:
        return self._requests.setdefault(name, Kept())

    def pop(self, name: str) -> Kept | None:
        """Of a request that has ended, by vLLM's own name; None where they are not listened to."""
        return self._requests.pop(name) if self.listens else None
