"""rollout.name=vllm: vLLM on the training ranks themselves; weight sync writes into its own parameters.

One request per sample; the engine steps vLLM here, so that an abort takes effect between two forwards. Every slice of a
weight sync is written to the storage that vLLM computes with; the packed experts of CPU kernels are packed into the
same storage in `finish_update`.

On a CPU the tests run the real vLLM. The same code has not been run on GPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mrl.config.config import LoraConfig
from mrl.engines._abort_check import AbortCheck
from mrl.engines._adapters import EngineAdapters
from mrl.engines._fp8_support import quantization_config_keys
from mrl.engines._kept_tokens import KeptTokens
from mrl.engines._kv_budget import kv_budget
from mrl.engines._prompt_checks import check_prompts
from mrl.engines.base import EngineSpec, RolloutEngine, SamplingConfig
from mrl.engines.vllm import logprob_probe
from mrl.engines.vllm.adapters import VllmAdapters, lora_arguments
from mrl.engines.vllm.capabilities import LATENT_SIZES
from mrl.engines.vllm.fields import refusals_on_a_cpu
from mrl.engines.vllm.fp8_support import check_gpu, unquantized_modules
from mrl.engines.vllm.kv_cache import derived_bytes
from mrl.engines.vllm.llm_runtime import VllmRuntime
from mrl.engines.vllm.parameter_views import ParameterViews
from mrl.engines.vllm.process_state import rng_state_restored
from mrl.engines.vllm.sampling import arguments, length_to_stop, to_rollout
from mrl.errors import UserError
from mrl.resharding.copy_op import num_bytes
from mrl.resharding.layout import Layout
from mrl.resharding.vllm import vllm_layout
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt, Rollout

PARTS = ("weights", "kv_cache")
"""vLLM's sleep tags."""


class VllmEngine(RolloutEngine):
    """One rank of a vLLM replica."""

    def __init__(self, spec: EngineSpec) -> None:
        """Collective over the ranks that generate: starts vLLM in this process with dummy weights.

        Args:
            spec: Constructor argument of the engine.

        Raises:
            UserError: vLLM is missing, has an unsupported version, or cannot run this model on these ranks.
        """
        super().__init__(spec)
        config, arch = spec.config, spec.arch
        size = 1 if spec.tp_group is None else dist.get_world_size(spec.tp_group)
        rank = 0 if spec.tp_group is None else dist.get_rank(spec.tp_group)
        if spec.device.type == "cpu":
            for refusal in refusals_on_a_cpu(config):
                raise UserError(refusal)
            if arch.mla is not None and (arch.mla.kv_lora_rank, arch.mla.qk_rope_head_dim) != LATENT_SIZES:
                raise UserError(
                    f"rollout.name=vllm on a CPU has latent attention only with kv_lora_rank={LATENT_SIZES[0]} and "
                    f"qk_rope_head_dim={LATENT_SIZES[1]}; the model has {arch.mla.kv_lora_rank} and "
                    f"{arch.mla.qk_rope_head_dim}. Use rollout.name=native."
                )
            if size > 1 and not torch.cpu._is_avx512_supported():
                raise UserError(
                    f"rollout.tensor_model_parallel_size={size} with rollout.name=vllm on a CPU without AVX-512: the "
                    "ranks of vLLM 0.32 exchange wrong numbers there. Set it to 1, or use rollout.name=native."
                )
        elif config.quantization is not None:
            check_gpu(torch.cuda.get_device_capability(spec.device))
        self._layout = vllm_layout(
            arch, size, rank, spec.dtype_name, ep_size=config.expert_parallel_size, quantization=config.quantization
        )
        later = sum(map(num_bytes, self._layout.values())) + derived_bytes(arch, size, spec.dtype.itemsize)
        budget = kv_budget(spec.device, config.gpu_memory_utilization, spec.tp_group, later_bytes=later)
        router = {} if arch.mla is None else {"moe_router_dtype": "float32"}  # logits, which other families have so
        folder = spec.write_model_folder(
            {**quantization_config_keys(config, unquantized_modules=unquantized_modules(arch)), **router}
        )
        self._runtime = VllmRuntime(spec, folder, budget=budget, further=lora_arguments(spec, self._layout))
        try:
            self._storage = ParameterViews(self._runtime.model(), self._layout, self._runtime.version)
            self._lora_request = None if spec.lora is None else self._add_adapters(spec.lora)
        except UserError:
            self._runtime.close()
            raise
        self._asleep: set[str] = set()
        self._probed = False
        self._num_requests = 0
        self._stats: dict[str, float] = {}

    def _add_adapters(self, lora: LoraConfig) -> Any:
        """Activates low-rank adapters, all zero; returns the name by which requests ask for them."""
        found = VllmAdapters(
            self._runtime.runner(), self.spec.arch, self._layout, lora, self.spec.dtype_name, self._runtime.version
        )
        self.adapters = EngineAdapters(self, found.layout, found.tensors)
        return found.request()

    # weights ----------------------------------------------------------------------------------------------------------

    def layout(self) -> Layout:
        """Returns vLLM's fused and sharded tensors, as slices of Hugging Face tensors."""
        return self._layout

    def begin_update(self) -> None:
        """Wakes the weights if they are asleep, and drops cached prefixes.

        Raises:
            RuntimeError: vLLM keeps its cached prefixes, because requests still use them.
        """
        self._has_weights = False
        self._wake("weights")
        self._drop_prefixes()

    def update_weights(self, bucket: Sequence[WeightSlice]) -> None:
        """Copies a bucket of slices into vLLM's parameters.

        Raises:
            RuntimeError: No update is open, or a slice does not fit its parameter.
        """
        self._check_updating()
        for item in bucket:
            self._storage.write(item)

    def checksum(self) -> int:
        """Returns the sum modulo 2**64 over the bit patterns of all stored elements; valid before `finish_update`."""
        return self._storage.checksum()

    def finish_update(self, policy_version: int) -> None:
        """Packs the weights of packed kernels, and allows `generate` with `policy_version`."""
        self._storage.pack()
        self._drop_prefixes()
        self.policy_version = policy_version
        self._has_weights = True

    def _drop_prefixes(self) -> None:
        """Drops cached prefixes, which belong to the old weights; raises RuntimeError if vLLM refuses."""
        if not self._runtime.llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not drop its cached prefixes: requests still use them")
        self._runtime.engine.reset_encoder_cache()

    # memory -----------------------------------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Moves KV cache and weights off a GPU until `wake`, the weights into pinned host memory.

        Does nothing on a CPU, or with `rollout.free_cache_engine=false`.
        """
        if self.spec.device.type == "cuda" and self.spec.config.free_cache_engine and not self._asleep:
            self._runtime.llm.sleep(level=1)
            self._asleep = set(PARTS)

    def wake(self) -> None:
        """Wakes everything that is asleep."""
        self._wake(*PARTS)

    def _wake(self, *parts: str) -> None:
        asleep = [part for part in parts if part in self._asleep]
        if asleep:
            self._runtime.llm.wake_up(tags=asleep)
            self._asleep -= set(asleep)

    def close(self) -> None:
        """Shuts vLLM down; the engine cannot be used again, and the trainer's process groups stay."""
        self._has_weights = False
        self._storage.forget()
        self._runtime.close()

    def stats(self) -> dict[str, float]:
        """Returns statistics of the last `generate`: prefill_tokens (per sample), decode_tokens, decode_steps."""
        return dict(self._stats)

    # generation -------------------------------------------------------------------------------------------------------

    def _generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        check_prompts(prompts, self.spec, sampling)
        with rng_state_restored(self.spec.device):
            if not self._probed:
                self._probe(prompts[0])
                self._probed = True
            self._runtime.kept_tokens.start(listens=sampling.return_kept_tokens and self.spec.leads_replica)
            try:
                return self._sample(prompts, sampling)
            finally:
                self._runtime.kept_tokens.start(listens=False)

    def _sample(self, prompts: Sequence[Prompt], sampling: SamplingConfig) -> list[Rollout]:
        samples = [(prompt, index) for prompt in prompts for index in range(sampling.n)]
        asked = [arguments(sampling, prompt, index) for prompt, index in samples]
        watched = bool(sampling.stop) and not sampling.ignore_eos
        requests = self._add([prompt for prompt, _ in samples], asked, whole=not watched)
        poll = AbortCheck(self.abort_requested, self.spec.tp_group, self.on_forward)
        engine, ended, steps = (
            self._runtime.engine,
            dict[str, tuple[Any, int | None, Tensor | None, KeptTokens | None]](),
            0,
        )
        numbers = dict(zip(requests, samples, strict=True))
        while engine.has_unfinished_requests():
            if poll():
                engine.abort_request([name for name in requests if name not in ended])
                break
            steps += 1
            for output in engine.step():
                name, answer = output.request_id, output.outputs[0]
                cut = length_to_stop(answer.token_ids, sampling, self.spec.decode) if watched else None
                if name not in ended and (cut is not None or output.finished):
                    tokens = len(numbers[name][0].prompt_ids) + len(answer.token_ids[:cut])
                    own = requests[name]
                    ended[name] = (answer, cut, self._experts(own, tokens), self._runtime.kept_tokens.pop(own))
                    self.on_sampled(len(answer.token_ids[:cut]), [numbers[name][0].uid])
                    if not output.finished:
                        engine.abort_request([name])
        rollouts = [
            self._rollout(prompt, index, *ended[name], sampling)
            for name, (prompt, index) in numbers.items()
            if name in ended
        ]
        self._stats = {
            "prefill_tokens": float(sum(len(rollout.prompt.prompt_ids) for rollout in rollouts)),
            "decode_tokens": float(sum(len(rollout.response_ids) for rollout in rollouts)),
            "decode_steps": float(steps),
        }
        return rollouts

    def _add(self, prompts: Sequence[Prompt], asked: Sequence[dict[str, Any]], *, whole: bool) -> dict[str, str]:
        """Adds requests; returns their names -> vLLM's names. `whole`: each request reports once, at its end."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        kind = RequestOutputKind.FINAL_ONLY if whole else RequestOutputKind.CUMULATIVE
        names = dict[str, str]()
        for prompt, given in zip(prompts, asked, strict=True):
            name = str(self._num_requests)
            self._num_requests += 1
            names[name] = self._runtime.engine.add_request(
                name,
                {"prompt_token_ids": list(prompt.prompt_ids)},
                SamplingParams(**given, output_kind=kind),
                lora_request=self._lora_request,
            )
        return names

    def _experts(self, name: str, num_tokens: int) -> Tensor | None:
        return None if self._runtime.experts is None else self._runtime.experts.of(name, num_tokens)

    def _rollout(
        self,
        prompt: Prompt,
        index: int,
        output: Any,
        cut: int | None,
        routed: Tensor | None,
        kept: KeptTokens | None,
        sampling: SamplingConfig,
    ) -> Rollout:
        where = f"prompt {prompt.source or prompt.uid}, sample {index}"
        tokens = list(output.token_ids)
        if not all(0 <= token < self.spec.arch.vocab_size for token in tokens):
            raise RuntimeError(f"{where}: vLLM sampled a token outside the vocabulary: {max(tokens)}")
        try:
            rollout = to_rollout(prompt, index, output, cut, sampling, self.policy_version)
            if kept is not None:
                kept.attach_to(rollout)
        except RuntimeError as error:
            raise RuntimeError(f"{where}: {error}") from error
        rollout.routed_experts = routed
        return rollout

    def _probe(self, prompt: Prompt) -> None:
        """Checks once that vLLM's log-probabilities belong to the distribution that it samples from."""
        found: list[Tensor] = []
        for setting in (logprob_probe.PLAIN, logprob_probe.CUT):
            self._drop_prefixes()  # both prefill the prompt in the same way
            (name,) = self._add([prompt], [{**arguments(setting, prompt, 0), "logprobs": -1}], whole=True)
            outputs = []
            while self._runtime.engine.has_unfinished_requests():
                outputs += self._runtime.engine.step()
            (answer,) = (output.outputs[0] for output in outputs if output.request_id == name)
            found.append(logprob_probe.row(answer.logprobs[0], self.spec.arch.vocab_size))
        logprob_probe.check(*found)
