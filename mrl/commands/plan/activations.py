"""Activation memory of the actor on a rank: what the forward saves for the backward, and the peaks of both, in bytes.

It follows the code of `megatron/cpu/layers.py`, `megatron/attention.py`, `megatron/norm.py`,
`algorithms/functional/logprobs.py`, and Megatron's layers (0.16.1: `transformer/mlp.py`, `transformer/attention.py`,
`transformer/moe`, `models/common/embeddings/rope_utils.py`). Experts are assumed to be equally loaded. With context
parallelism on a CPU, attention needs more than predicted here. Weights, optimizer and engine are in `memory.py`.
"""

from __future__ import annotations

import itertools
from copy import copy
from dataclasses import dataclass, replace

from mrl.algorithms.functional.sampling import truncates
from mrl.commands.plan.recompute import recompute_of
from mrl.config.config import Config, LearnsFrom
from mrl.config.megatron_fields.fp8 import row_unit
from mrl.models.base import ArchSpec, MlaSpec, linear_attention_of
from mrl.models.kernels.delta_rule import CHUNK
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.megatron import chunk_layers, padded_vocab

FP32 = 4
INT64 = 8
SCORED_BYTES = 53
"""Bytes per response token of the vectors that the loss saves: two int64, nine fp32, one bool."""


@dataclass(frozen=True)
class LargestMicrobatch:
    """Largest microbatch of a rank, if every response has its full length.

    Attributes:
        tokens: Packed tokens; a prefix that samples of a prompt share counts once, unless
            `actor.use_prefix_grouper=false`.
        slots: Tokens of all sequences, as attention sees them.
        together: Samples of a prompt that share its prefix.
        scored: Response tokens.
        count: Microbatches per minibatch on a data-parallel rank.
    """

    tokens: int
    slots: int
    together: int
    scored: int
    count: int


def largest_microbatch(
    config: Config, grid: ParallelLayout, *, learns_from: LearnsFrom = "samples"
) -> LargestMicrobatch:
    """Returns the microbatch that needs most memory, before context parallelism splits it.

    Args:
        config: Config with lengths, samples, batch sizes and the token limit of a microbatch.
        grid: Layout, for the data-parallel size and the padding of the packed length.
        learns_from: Data that the algorithm learns from.
    """
    rollout, train = config.rollout, config.train
    prompt, response = rollout.prompt_length, rollout.response_length
    prompts = train.minibatch_size or train.batch_size
    samples = rollout.n if learns_from == "samples" else 1
    budget = config.actor.max_tokens_per_microbatch
    shares_prefix = config.actor.use_prefix_grouper
    together = -(-samples // -(-grid.dp // prompts)) if shares_prefix else 1  # samples of a prompt on a rank
    together = max(1, min(together, (budget - prompt) // response))
    sequences = -(-prompts * samples // grid.dp)
    groups = -(-sequences // together)
    prompt_copies = 1  # times that a group's prompt is computed
    if learns_from == "pairs":
        together, groups, prompt_copies = 2, -(-prompts // grid.dp), 1 if shares_prefix else 2
    count = -(-groups // max(1, budget // (prompt_copies * prompt + together * response)))
    if grid.vpp > 1:
        count = -(-count // grid.pp) * grid.pp
    per_microbatch = -(-groups // count)
    computed = response - 1  # the last token of a response predicts nothing
    unit = row_unit(grid, config.megatron.transformer)
    packed = -(-per_microbatch * (prompt_copies * prompt + together * computed) // unit) * unit
    slots = per_microbatch * together * (prompt + computed)
    return LargestMicrobatch(packed, slots, together // prompt_copies, per_microbatch * together * response, count)


@dataclass(frozen=True)
class Activations:
    """Activation memory of a rank, bytes.

    Attributes:
        saved: Activations of all microbatches in flight, saved for the backward.
        logits: Additional peak of the output layer; 0 except on the last stage.
        backward: Additional peak of a layer's or the embedding's backward.
        scoring: Peak of a forward without backward, including the output layer.
    """

    saved: int
    logits: int
    backward: int
    scoring: int


class ActorShape:
    """Predictor of an actor's activation memory on a rank.

    Args:
        config: Config with the algorithm's defaults filled in.
        arch: Model.
        grid: Layout.
        te: Layers are TransformerEngine's.
        compiled: Operations between matrix products are compiled (`megatron/cpu/layers.py`).
        on_host: The device is a CPU.
        learns_from: Data that the algorithm learns from.
    """

    def __init__(
        self,
        config: Config,
        arch: ArchSpec,
        grid: ParallelLayout,
        *,
        te: bool,
        compiled: bool = False,
        on_host: bool = False,
        learns_from: LearnsFrom = "samples",
    ) -> None:
        self._config, self._arch, self._grid, self._te = config, arch, grid, te
        self._compiled = compiled and not te and arch.mla is None and arch.linear_attention is None
        self._recompute = recompute_of(config)
        self._itemsize = 2 if config.model.dtype == "bfloat16" else FP32
        self._lora_rank = config.actor.lora.rank  # above 0: the model's weights have no gradients
        self.microbatch = largest_microbatch(config, grid, learns_from=learns_from)
        self._tokens = self.microbatch.tokens // grid.cp
        self._slots = self.microbatch.slots // grid.cp
        # the local layers repeat the prompt's queries for long responses, TransformerEngine's never do
        response = config.rollout.response_length - 1
        repeats = not te and grid.cp == 1 and 2 * response > config.rollout.prompt_length + response
        self._queries, self._keys = (self._slots if repeats else self._tokens), self._slots
        self._masks = 0
        if not te and not repeats and self.microbatch.together > 1:  # masks of responses over the prompt's keys
            responses = self.microbatch.scored // config.rollout.response_length // grid.cp
            self._masks = responses * response * (config.rollout.prompt_length + response) * self._itemsize
            self._masks -= self._masks // self.microbatch.together
        self._scores = (
            0  # per head, which torch's attention for a CPU keeps, in fp32, if values have another size than keys
        )
        if on_host and not te and arch.value_dim != arch.head_dim:
            sequences = self.microbatch.scored // config.rollout.response_length // grid.cp
            complete = sequences if repeats else sequences // self.microbatch.together
            tokens = config.rollout.prompt_length + response
            self._scores = (complete * tokens + (sequences - complete) * response) * tokens
        # with context parallelism the keys of a rank's segments start before its own tokens
        if grid.cp > 1 and self.microbatch.together > 1:
            self._keys = min(self.microbatch.slots, self._slots + 2 * config.rollout.max_sequence_length)
        self._scored = -(-self.microbatch.scored // grid.cp)
        self._own_tokens = self._tokens // (grid.tp if config.parallel.sequence_parallel else 1)
        self._vocab = padded_vocab(arch, grid.tp) // grid.tp
        self._layers = chunk_layers(arch, grid)
        self._is_linear = False
        self._kinds = {(True, False): self}
        for has_experts, is_linear in itertools.product((False, True), repeat=2):
            kind = self._kinds[has_experts, is_linear] = copy(self)
            kind._is_linear = is_linear
            if not has_experts:
                kind._arch = replace(arch, moe=None)

    def _kind(self, layer: int) -> ActorShape:
        """Returns the predictor for layers with the MLP, or the experts, and the attention of this one."""
        return self._kinds[layer in self._arch.moe_layers, layer in self._arch.linear_layers]

    def activations(self, stage: int) -> Activations:
        """Returns the activations on a rank of a pipeline stage."""
        grid, arch = self._grid, self._arch
        chunks = [self._layers[stage, chunk] for chunk in range(grid.vpp)]
        kinds = [self._kind(layer) for layers in chunks for layer in layers]
        if grid.vpp > 1:  # Megatron's interleaved schedule: warm-up passes and the current one
            in_flight = (grid.pp - stage - 1) * 2 + (grid.vpp - 1) * grid.pp + 1
            in_flight = min(in_flight, self.microbatch.count * grid.vpp)
        else:
            in_flight = min(grid.pp - stage, self.microbatch.count)
        kept = in_flight * max(map(self._saved_by_chunk, chunks))
        first, last = stage == 0, stage == grid.pp - 1
        hidden = self._own_tokens * arch.hidden_size * self._itemsize
        gathered = self._tokens * arch.hidden_size * self._itemsize
        angles = self._tokens * arch.rotary_dim * (1 if arch.local_rope_theta is None else 2)
        # ids, positions, indices of queries, outputs and keys, and the order in which keys' gradients are added
        saved = kept + INT64 * (self._queries + 2 * self._keys + 4 * self._tokens) + self._masks
        if self._compiled:  # ids, positions, index of each token of each sequence; cosine and sine
            saved = kept + INT64 * (2 * self._tokens + self.microbatch.slots)
            saved += angles * self._itemsize
        elif arch.mla is not None:
            saved += angles * self._itemsize  # cosine and sine, of which each layer has copies
        elif self._recompute.method is not None:
            saved += angles * FP32  # rotary angles; else each layer's cosine and sine
        weight = 0 if self._lora_rank else self._vocab * arch.hidden_size * self._itemsize
        tied = weight if arch.tie_word_embeddings and last else 0  # its gradient waits for the embedding's
        step = max(kind._layer_backward() for kind in kinds) + tied
        if first:
            step = max(step, weight + tied - kept)  # the saved activations are freed by then
        if last:
            # final norm: its input and its output for all ranks' rows; the loss
            saved += hidden + (0 if arch.value_head else gathered) + SCORED_BYTES * self._scored
        if arch.value_head:  # the hidden states in fp32 and their gradients
            logits = in_forward = 2 * self._own_tokens * arch.hidden_size * FP32
        else:
            in_forward = gathered + self._logits_forward()
            logits = max(self._logits_forward(), self._logits_backward())
        return Activations(
            saved=saved,
            logits=logits if last else 0,
            backward=step,
            scoring=max(max(kind._saved_by_layer() for kind in kinds) + 2 * hidden, in_forward if last else 0),
        )

    def _saved_by_chunk(self, layers: range) -> int:
        recomputed = self._recompute.full_layers(len(layers))
        inputs = self._recompute.inputs(len(layers)) * self._own_tokens * self._arch.hidden_size * self._itemsize
        return inputs + sum(self._kind(layer)._saved_by_layer() for layer in layers[recomputed:])

    def _saved_by_layer(self) -> int:
        return self._saved_by_own_layer() + (self._saved_by_adapters() if self._lora_rank else 0)

    def _saved_by_adapters(self) -> int:
        """Returns lora_A x of all projections, and where TransformerEngine computes a norm, its input in fp32 too."""
        moe, size = self._arch.moe, self._itemsize
        products = 4 * self._tokens
        products += 3 * self._tokens if moe is None else 3 * self._own_tokens * moe.top_k * self._grid.expert_tp
        inputs = (1 if moe else 2) * self._own_tokens * self._arch.hidden_size * (FP32 + size) if self._te else 0
        return products * self._lora_rank * size + inputs

    def _saved_by_own_layer(self) -> int:
        arch, size, own, tokens = self._arch, self._itemsize, self._own_tokens, self._tokens
        modules = self._recompute.modules
        tensors = 2 if "layernorm" in modules else 4  # input and output of two norms
        after = 2 if arch.post_norms else 0  # norms of which the input is kept
        scales = own * (2 + after) * FP32
        norms = own * (tensors + after) * arch.hidden_size * size + scales
        if self._compiled:
            mlp = 0 if self._recomputes_mlp() else self._mlp_or_experts()
            return norms - scales + self._compiled_attention() + mlp
        if self._is_linear:
            return norms + self._linear_attention() + (0 if self._recomputes_mlp() else self._mlp_or_experts())
        heads, kv_heads = self._heads()
        if arch.mla is not None:
            return norms + self._latent_attention(arch.mla) + (0 if self._recomputes_mlp() else self._mlp_or_experts())
        queries = heads * arch.head_dim
        fused = tokens * (queries + 2 * kv_heads * arch.head_dim) * size
        turns = 4  # cosine and sine, for queries and for keys
        if arch.local_rope_theta is not None:  # core attention rotates
            turns = 0 if "core_attn" in modules else 2
        attention = turns * tokens * arch.rotary_dim * size
        if arch.qk_norm:
            copied = queries * size if kv_heads > 1 else 0  # a single group's queries are contiguous already
            attention += fused + tokens * (copied + (heads + kv_heads) * FP32)
        if "core_attn" in modules:
            attention += tokens * (queries + kv_heads * arch.head_dim) * size + (0 if arch.qk_norm else fused)
        else:
            attention += self._core_attention()
        if not self._te:
            attention += tokens * queries * size  # attention's output, gathered from the slots
        if arch.output_gate:  # the gates, their sigmoid in fp32, and the product
            attention += tokens * queries * (2 * size + FP32)
        return norms + attention + (0 if self._recomputes_mlp() else self._mlp_or_experts())

    def _latent_attention(self, mla: MlaSpec) -> int:
        """Returns the latent vectors and their norms, cosine and sine, and what attention with expanded keys saves."""
        arch, size, own, tokens = self._arch, self._itemsize, self._own_tokens, self._tokens
        heads, _ = self._heads()
        modules = self._recompute.modules
        normed = 0 if "layernorm" in modules else 1
        latent = mla.cache_dim + normed * mla.kv_lora_rank
        norms = 1
        if mla.q_lora_rank is not None:
            latent, norms = latent + (1 + normed) * mla.q_lora_rank, 2
        attention = own * (latent * size + norms * FP32) + 2 * tokens * arch.rotary_dim * size
        if "core_attn" in modules:
            attention += tokens * heads * (2 * arch.head_dim + arch.value_dim) * size
        else:
            attention += self._core_attention()
        if not self._te:
            attention += tokens * heads * arch.value_dim * size  # attention's output, gathered from the slots
        return attention

    def _linear_attention(self) -> int:
        """Returns what a gated delta net saves, measured: its projections, the convolution's inputs, and its chunks."""
        linear = linear_attention_of(self._arch)
        if "core_attn" in self._recompute.modules:
            kept = linear.channels + 2 * linear.value_size + 2 * linear.num_value_heads
            return self._tokens * kept // self._grid.tp * self._itemsize
        return self._between_projections()

    def _between_projections(self) -> int:
        """Returns what a gated delta net saves without recompute."""
        linear = linear_attention_of(self._arch)
        channels = linear.channels * (linear.conv_kernel + 2) + 2 * linear.value_size
        key, value = linear.key_head_dim, linear.value_head_dim
        of_head = 4 * CHUNK + 7 * key + 6 * value + 3 * key * value // CHUNK
        each = channels * self._itemsize + linear.num_value_heads * of_head * FP32
        return self._tokens * each // self._grid.tp

    def _compiled_attention(self) -> int:
        """Returns the QKV projection's output, normed queries and keys (if normed), and what attention saves."""
        arch, size, tokens = self._arch, self._itemsize, self._tokens
        heads, kv_heads = self._heads()
        queries, keys = heads * arch.head_dim, kv_heads * arch.head_dim
        recomputed = "core_attn" in self._recompute.modules
        kept = tokens * queries * size  # attention's output
        if arch.qk_norm:
            kept += tokens * (queries + keys) * size
        if recomputed:  # its inputs; a single group's queries are contiguous already
            copied = queries + keys if arch.qk_norm else queries if kv_heads > 1 else 0
            return kept + tokens * (queries + 2 * keys + copied) * size
        return kept + self._attended(values=tokens * (queries + 2 * keys) * size)

    def _attended(self, values: int) -> int:
        """Returns rotated queries and keys, log-sum-exp per row, and `values`; with CP keys and values of all ranks."""
        heads, kv_heads = self._heads()
        dim, size = self._arch.head_dim, self._itemsize
        keys = self._tokens * kv_heads * dim * size
        keys_and_values = 2 * keys * self._grid.cp if self._grid.cp > 1 else keys + values
        return self._tokens * heads * (dim * size + FP32) + keys_and_values

    def _recomputes_mlp(self) -> bool:
        return ("mlp" if self._arch.moe is None else "moe") in self._recompute.modules

    def _mlp_or_experts(self) -> int:
        return self._mlp(self._arch.intermediate_size) if self._arch.moe is None else self._experts()

    def _heads(self) -> tuple[int, int]:
        return self._arch.num_heads // self._grid.tp, max(1, self._arch.num_kv_heads // self._grid.tp)

    def _core_attention(self) -> int:
        """Returns queries, keys and values, and output and log-sum-exp per row, or the scores where they are kept."""
        heads, _ = self._heads()
        if self._scores:
            kept = self._queries * self._arch.head_dim + self._scores
            return heads * kept * FP32 + self._copied_keys()
        per_query = heads * (self._arch.head_dim + self._arch.value_dim) * self._itemsize + heads * FP32
        return self._queries * per_query + self._copied_keys()

    def _copied_keys(self) -> int:
        size = FP32 if self._scores else self._itemsize
        return self._keys * self._heads()[1] * (self._arch.head_dim + self._arch.value_dim) * size

    def _mlp(self, width: int) -> int:
        """Returns gate, up and their product; if not compiled also the activated gate and a copy of up."""
        return (3 if self._compiled else 5) * self._tokens * width // self._grid.tp * self._itemsize

    def _experts(self) -> int:
        moe, grid, size = self._arch.moe, self._grid, self._itemsize
        if moe is None:
            return 0
        router = self._own_tokens * (moe.num_experts * (4 * FP32 + 1) + moe.top_k * 2 * INT64)
        assigned = self._own_tokens * moe.top_k * grid.expert_tp  # balanced: a rank receives as many as it sends
        experts = assigned * (self._arch.hidden_size * size + FP32 + 6 * moe.intermediate_size // grid.expert_tp * size)
        shared = 0
        if moe.shared_intermediate_size:  # Megatron's own layer, on a CPU too
            shared = 5 * self._tokens * moe.shared_intermediate_size // grid.tp * size
            shared += self._own_tokens * self._arch.hidden_size * size
        return router + experts + shared

    def _layer_backward(self) -> int:
        """Returns the gradients of a layer's output, widest part and largest weight, plus what is recomputed."""
        arch, size = self._arch, self._itemsize
        if arch.moe is None:
            width = arch.intermediate_size // self._grid.tp
            rows, weight = self._tokens, width * arch.hidden_size * 2
        else:
            width = arch.moe.intermediate_size // self._grid.expert_tp
            rows, weight = self._own_tokens * arch.moe.top_k * self._grid.expert_tp, width * arch.hidden_size * 2
        weight = 0 if self._lora_rank else weight
        keys = self._copied_keys()
        if self._compiled:  # gradients of keys and values
            keys = self._tokens * self._grid.cp * 2 * self._heads()[1] * arch.head_dim * FP32
        step = max((rows * (2 * width + arch.hidden_size) + weight) * size, keys)
        if self._recompute.method is not None:
            return step + self._recompute.layers_at_a_time * self._saved_by_layer()
        if self._is_linear:
            attention = self._between_projections()
        else:
            attention = self._attended(values=0) if self._compiled else self._core_attention()
        recomputed = attention if "core_attn" in self._recompute.modules else 0
        return step + max(recomputed, self._mlp_or_experts() if self._recomputes_mlp() else 0)

    def _rows(self) -> int:
        """Returns the number of scored rows per chunk of logits."""
        return min(self._config.actor.logprob_chunk_tokens, self._scored)

    def _logits_forward(self) -> int:
        """Returns the logits of a chunk, exponentials in fp32 unless compiled, and the truncation mask, if any."""
        rollout = self._config.rollout
        cut = 1 if truncates(rollout.top_k, rollout.top_p, rollout.min_p) else 0
        return self._rows() * self._vocab * ((1 if self._compiled else 2) * FP32 + cut)

    def _logits_backward(self) -> int:
        """Returns the gradients of the logits, the hidden states and the output weight."""
        rows, size, weight = self._rows(), self._itemsize, self._vocab * self._arch.hidden_size
        hidden = self._tokens * self._arch.hidden_size
        several = self._scored > rows
        logits = rows * self._vocab * (FP32 + (size if size != FP32 else 0))
        if self._config.algorithm.entropy_coef:
            logits += rows * self._vocab * FP32
        weights = weight * (FP32 + size if several else size)  # several chunks are summed in fp32
        weights = 0 if self._lora_rank else weights
        return logits + weights + hidden * (FP32 + size)
