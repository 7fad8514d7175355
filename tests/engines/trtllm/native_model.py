"""What the stand-ins compute with: mrl's native engine on one rank, from Hugging Face tensors.

Owns the ways in: shards in TensorRT-LLM's layout become Hugging Face tensors and these the engine's, and a request's
seed becomes the (prompt uid, sample) whose random numbers it stands for, by running `stream_key` backwards.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from mrl.algorithms.functional import sampling as streams
from mrl.config.config import RolloutConfig
from mrl.engines.native.engine import NativeEngine
from mrl.resharding.dtypes import DTYPES, allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.native import native_layout
from mrl.resharding.regions import full_region, slices
from mrl.resharding.weight_slice import WeightSlice
from mrl.types import Prompt
from tests.engines.specs import spec_of

MASK = (1 << 64) - 1


def uid_of(key):
    """The prompt uid whose first sample under seed 0 has the stream `key`."""
    second = (_unmix(key & MASK) - streams._GOLDEN) & MASK
    return ((_unmix(second) - streams._GOLDEN) & MASK) ^ streams._mix(streams._GOLDEN)


def _unmix(state):
    state = _unshift(state, 31) * pow(streams._MIX_2, -1, 1 << 64) & MASK
    state = _unshift(state, 27) * pow(streams._MIX_1, -1, 1 << 64) & MASK
    return _unshift(state, 30)


def _unshift(state, bits):
    """x from x ^ (x >> bits)."""
    found = state
    for _ in range(64 // bits):
        found = state ^ found >> bits
    return found


def assembled(arch, layouts, shards):
    """Hugging Face tensors from what ranks hold; what several hold must be equal, bit by bit."""
    tensors = {name: torch.full(t.shape, torch.nan) for name, t in allocate(hf_layout(arch, "float32")).items()}
    for layout, shard in zip(layouts, shards, strict=True):
        for name, stored in layout.items():
            values = shard[name].reshape(stored.shape).float()
            for piece in stored.pieces:
                there, ours = tensors[piece.hf_name][slices(piece.src)], values[slices(piece.dst)]
                known = ~there.isnan()
                assert torch.equal(there[known], ours[known]), f"ranks hold different values of {piece.hf_name}"
                there.copy_(ours)
    holes = [name for name, tensor in tensors.items() if tensor.isnan().any()]
    assert not holes, f"nothing or not-a-number in {holes}"
    return tensors


class NativeModel:
    """The model of some weights.

    Args:
        arch: Its structure.
        dtype: Of the engine's weights, a name.
        max_len: Longest sequence.
        decode: For stop strings, which the stand-ins do not have.
    """

    def __init__(self, arch, dtype, max_len):
        self._arch, self._dtype = arch, dtype
        config = RolloutConfig(
            prompt_length=max_len - 1, response_length=1, max_num_seqs=64, gpu_memory_utilization=0.02,
            enable_prefix_caching=False, enable_rollout_routing_replay=arch.moe is not None,
        )  # fmt: skip
        self._engine = NativeEngine(spec_of(config, arch, dtype=DTYPES[dtype]))

    def fill(self, hf):
        self._engine.begin_update()
        for name, stored in native_layout(self._arch, 1, 0, self._dtype).items():
            values = torch.zeros(stored.shape, dtype=DTYPES[self._dtype])
            for piece in stored.pieces:
                values[slices(piece.dst)] = hf[piece.hf_name][slices(piece.src)].to(values.dtype)
            self._engine.update_weights([WeightSlice(name, full_region(stored.shape), values)])
        self._engine.finish_update(0)

    def generate(self, prompts, keys, sampling):
        """(response tokens, raw logits [tokens, V]) of each prompt, under the stream of each key.

        `routed` keeps the experts of prompt and response [tokens, L, K], of the last token too; None of a dense model.
        """
        asked = [Prompt(uid_of(key), tuple(ids), "") for ids, key in zip(prompts, keys, strict=True)]
        rollouts = self._engine.generate(asked, replace(sampling, n=1, seed=0))
        self.routed = [rollout.routed_experts for rollout in rollouts]
        return [(rollout.response_ids, self._logits(rollout)) for rollout in rollouts]

    @torch.inference_mode()
    def _logits(self, rollout):
        """Of the response's tokens: one forward over the whole sequence."""
        prompt = rollout.prompt.prompt_ids
        tokens = torch.tensor([*prompt, *rollout.response_ids[:-1]])
        hidden = self._engine._model.forward(tokens, torch.arange(tokens.numel()), _causal)
        return self._engine._model.logits(hidden[len(prompt) - 1 :]).float()


def _causal(layer, q_PND, k_PKD, v_PKD, sinks_N):
    assert sinks_N is None  # mrl refuses such models here
    q, k, v = (x.transpose(0, 1)[None] for x in (q_PND, k_PKD, v_PKD))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
