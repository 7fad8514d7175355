"""What a backward pass keeps of its forward, and what both need for a moment: bytes of one rank, by arithmetic.

Owns the sizes of the largest microbatch, of what the layers and the output layer save for the backward, and of the
buffers that live inside one of their steps. Weights, optimizer and engine are in `memory.py`. It follows the code:
`megatron/cpu/layers.py`, `megatron/attention.py`, `megatron/norm.py`, `algorithms/functional/logprobs.py`, and
Megatron's layers (0.16.1: `transformer/mlp.py`, `transformer/attention.py`, `transformer/moe`,
`models/common/embeddings/rope_utils.py`). Experts are taken to be equally loaded. With context parallelism on a CPU,
attention needs more than is told here.

P stands for packed tokens of a rank, S for slots of its attention.
"""

from __future__ import annotations

from dataclasses import dataclass

from mrl.algorithms.functional.sampling import truncates
from mrl.commands.plan.recompute import recompute_of
from mrl.config.config import Config, LearnsFrom
from mrl.models.base import ArchSpec
from mrl.parallel_layout import Grid
from mrl.resharding.megatron import chunk_layers, padded_vocab

FP32 = 4
INT64 = 8
SCORED_BYTES = 53
"""Vectors of one number for each response token that the loss keeps: two int64, nine fp32, one bool."""


@dataclass(frozen=True)
class Microbatch:
    """The largest microbatch of a rank, if every response has its full length.

    Attributes:
        tokens: Distinct packed tokens; what samples of a prompt begin with alike is there once, except with
            `actor.use_prefix_grouper=false`.
        slots: Tokens of all sequences, which attention sees.
        together: Samples of a prompt whose beginning is computed once.
        scored: Response tokens.
        count: Microbatches of a minibatch on a data-parallel rank.
    """

    tokens: int
    slots: int
    together: int
    scored: int
    count: int


def largest_microbatch(config: Config, grid: Grid, *, learns_from: LearnsFrom = "samples") -> Microbatch:
    """The microbatch that needs most memory, before context parallelism cuts it.

    Args:
        config: Lengths, samples, batch sizes and the budget of a microbatch.
        grid: Data-parallel size, and what the packed length is filled up to.
        learns_from: What the algorithm learns from.
    """
    rollout, train = config.rollout, config.train
    prompt, response = rollout.prompt_length, rollout.response_length
    prompts = train.minibatch_size or train.batch_size
    samples = rollout.n if learns_from == "samples" else 1
    budget = config.actor.max_tokens_per_microbatch
    once = config.actor.use_prefix_grouper
    together = -(-samples // -(-grid.dp // prompts)) if once else 1  # samples of a prompt on a rank
    together = max(1, min(together, (budget - prompt) // response))
    sequences = -(-prompts * samples // grid.dp)
    families = -(-sequences // together)
    asked = 1  # times that the prompt of a family is computed
    if learns_from == "pairs":
        together, families, asked = 2, -(-prompts // grid.dp), 1 if once else 2
    count = -(-families // max(1, budget // (asked * prompt + together * response)))
    if grid.vpp > 1:
        count = -(-count // grid.pp) * grid.pp
    held = -(-families // count)
    computed = response - 1  # the last token of a response predicts nothing
    unit = grid.tp * (2 * grid.cp if grid.cp > 1 else 1)
    packed = -(-held * (asked * prompt + together * computed) // unit) * unit
    slots = held * together * (prompt + computed)
    return Microbatch(packed, slots, together // asked, held * together * response, count)


@dataclass(frozen=True)
class Activations:
    """Bytes of the actor's forward and backward passes on a rank.

    Attributes:
        saved: Kept for the backward by all microbatches in flight, at most.
        logits: In the output layer at a time, beside that; 0 but on the last stage.
        backward: In a layer's or the embedding's backward at a time, beside that.
        scoring: In a forward without backward at a time, the output layer included.
    """

    saved: int
    logits: int
    backward: int
    scoring: int


class ActorShape:
    """The sizes of an actor's tensors on a rank.

    Args:
        config: What was asked for, the algorithm's nulls filled.
        arch: The model.
        grid: Its layout.
        te: Layers are TransformerEngine's.
        compiled: If not, what stands between the products is compiled (`megatron/cpu/layers.py`), as on a CPU.
        learns_from: What the algorithm learns from.
    """

    def __init__(
        self,
        config: Config,
        arch: ArchSpec,
        grid: Grid,
        *,
        te: bool,
        compiled: bool = False,
        learns_from: LearnsFrom = "samples",
    ) -> None:
        self._config, self._arch, self._grid, self._te = config, arch, grid, te
        self._compiled = compiled and not te
        self._recompute = recompute_of(config)
        self._itemsize = 2 if config.model.dtype == "bfloat16" else FP32
        self.microbatch = largest_microbatch(config, grid, learns_from=learns_from)
        self._tokens = self.microbatch.tokens // grid.cp
        self._slots = self.microbatch.slots // grid.cp
        # the local layers compute long answers with the queries of their prompt, TransformerEngine's never do
        answer = config.rollout.response_length - 1
        again = not te and grid.cp == 1 and 2 * answer > config.rollout.prompt_length + answer
        self._queries, self._keys = (self._slots if again else self._tokens), self._slots
        self._masks = 0
        if not te and not again and self.microbatch.together > 1:  # of answers, which see the prompt's keys
            answers = self.microbatch.scored // config.rollout.response_length // grid.cp
            self._masks = answers * answer * (config.rollout.prompt_length + answer) * self._itemsize
            self._masks -= self._masks // self.microbatch.together
        # with context parallelism the keys of the runs on a rank begin before its own tokens
        if grid.cp > 1 and self.microbatch.together > 1:
            self._keys = min(self.microbatch.slots, self._slots + 2 * config.rollout.longest)
        self._scored = -(-self.microbatch.scored // grid.cp)
        self._own_tokens = self._tokens // (grid.tp if config.parallel.sequence_parallel else 1)
        self._vocab = padded_vocab(arch, grid.tp) // grid.tp
        self._layers = chunk_layers(arch, grid)

    def activations(self, stage: int) -> Activations:
        """Of a rank of a pipeline stage."""
        grid, arch = self._grid, self._arch
        chunks = [len(self._layers[stage, chunk]) for chunk in range(grid.vpp)]
        if grid.vpp > 1:  # Megatron's interleaved schedule: warm-up passes, and the one that is computed
            flying = (grid.pp - stage - 1) * 2 + (grid.vpp - 1) * grid.pp + 1
            flying = min(flying, self.microbatch.count * grid.vpp)
        else:
            flying = min(grid.pp - stage, self.microbatch.count)
        kept = flying * self._kept_by_chunk(max(chunks))
        first, last = stage == 0, stage == grid.pp - 1
        hidden = self._own_tokens * arch.hidden_size * self._itemsize
        whole = self._tokens * arch.hidden_size * self._itemsize
        # ids, positions, where queries, outputs and keys lie, and the order in which gradients of keys are added
        saved = kept + INT64 * (self._queries + 2 * self._keys + 4 * self._tokens) + self._masks
        if self._compiled:  # ids, positions, where each token of each sequence lies; cosine and sine
            saved = kept + INT64 * (2 * self._tokens + self.microbatch.slots)
            saved += self._tokens * arch.head_dim * self._itemsize
        elif self._recompute.method is not None:
            saved += self._tokens * arch.head_dim * FP32  # rotary angles; else each layer's cosine and sine
        weight = self._vocab * arch.hidden_size * self._itemsize
        tied = weight if arch.tie_word_embeddings and last else 0  # its gradient waits for the embedding's
        step = self._layer_backward() + tied
        if first:
            step = max(step, weight + tied - kept)  # everything saved is gone by then
        if last:
            # the final norm: what goes in, what comes out for all ranks' rows; the loss
            saved += hidden + (0 if arch.value_head else whole) + SCORED_BYTES * self._scored
        if arch.value_head:  # the hidden states in fp32, in the forward and their gradients
            logits = in_forward = 2 * self._own_tokens * arch.hidden_size * FP32
        else:
            in_forward = whole + self._logits_forward()
            logits = max(self._logits_forward(), self._logits_backward())
        return Activations(
            saved=saved,
            logits=logits if last else 0,
            backward=step,
            scoring=max(self._saved_by_layer() + 2 * hidden, in_forward if last else 0),
        )

    def _kept_by_chunk(self, layers: int) -> int:
        whole = self._recompute.whole_layers(layers)
        inputs = self._recompute.inputs(layers) * self._own_tokens * self._arch.hidden_size * self._itemsize
        return inputs + (layers - whole) * self._saved_by_layer()

    def _saved_by_layer(self) -> int:
        arch, size, own, tokens = self._arch, self._itemsize, self._own_tokens, self._tokens
        modules = self._recompute.modules
        both = 2 if "layernorm" in modules else 4  # two norms: what goes in and what comes out
        norms = own * (both * arch.hidden_size * size + 2 * FP32)
        if self._compiled:
            mlp = 0 if self._recomputes_mlp() else self._mlp_or_experts()
            return norms - own * 2 * FP32 + self._compiled_attention() + mlp
        heads, kv_heads = self._heads()
        queries = heads * arch.head_dim
        fused = tokens * (queries + 2 * kv_heads * arch.head_dim) * size
        attention = 4 * tokens * arch.head_dim * size  # cosine and sine, for queries and for keys
        if arch.qk_norm:
            copied = queries * size if kv_heads > 1 else 0  # of one group the queries lie in a row already
            attention += fused + tokens * (copied + (heads + kv_heads) * FP32)
        if "core_attn" in modules:
            attention += tokens * (queries + kv_heads * arch.head_dim) * size + (0 if arch.qk_norm else fused)
        else:
            attention += self._core_attention()
        if not self._te:
            attention += tokens * queries * size  # what attention returns, out of its slots
        return norms + attention + (0 if self._recomputes_mlp() else self._mlp_or_experts())

    def _compiled_attention(self) -> int:
        """What the product before it gives, queries and keys where they are normed, and what attention keeps."""
        arch, size, tokens = self._arch, self._itemsize, self._tokens
        heads, kv_heads = self._heads()
        queries, keys = heads * arch.head_dim, kv_heads * arch.head_dim
        recomputed = "core_attn" in self._recompute.modules
        kept = tokens * queries * size  # what attention returns
        if arch.qk_norm:
            kept += tokens * (queries + keys) * size
        if recomputed:  # its inputs: of one group the queries lie in a row already
            copied = queries + keys if arch.qk_norm else queries if kv_heads > 1 else 0
            return kept + tokens * (queries + 2 * keys + copied) * size
        return kept + self._attended(values=tokens * (queries + 2 * keys) * size)

    def _attended(self, values: int) -> int:
        """Turned queries and keys, the logarithm of each row's sum, and `values`; keys and values of all ranks."""
        heads, kv_heads = self._heads()
        dim, size = self._arch.head_dim, self._itemsize
        keys = self._tokens * kv_heads * dim * size
        both = 2 * keys * self._grid.cp if self._grid.cp > 1 else keys + values
        return self._tokens * heads * (dim * size + FP32) + both

    def _recomputes_mlp(self) -> bool:
        return ("mlp" if self._arch.moe is None else "moe") in self._recompute.modules

    def _mlp_or_experts(self) -> int:
        return self._mlp(self._arch.intermediate_size) if self._arch.moe is None else self._experts()

    def _heads(self) -> tuple[int, int]:
        return self._arch.num_heads // self._grid.tp, max(1, self._arch.num_kv_heads // self._grid.tp)

    def _core_attention(self) -> int:
        """Queries, the result, and the logarithm of each row's sum; keys and values."""
        heads, _ = self._heads()
        of_query = 2 * heads * self._arch.head_dim * self._itemsize + heads * FP32
        return self._queries * of_query + self._copied_keys()

    def _copied_keys(self) -> int:
        return self._keys * 2 * self._heads()[1] * self._arch.head_dim * self._itemsize

    def _mlp(self, width: int) -> int:
        """Gate and up and their product; if that is not compiled the activated gate, and up once more."""
        return (3 if self._compiled else 5) * self._tokens * width // self._grid.tp * self._itemsize

    def _experts(self) -> int:
        moe, grid, size = self._arch.moe, self._grid, self._itemsize
        if moe is None:
            return 0
        router = self._own_tokens * (moe.num_experts * (4 * FP32 + 1) + moe.top_k * 2 * INT64)
        assigned = self._own_tokens * moe.top_k * grid.expert_tp  # as many as go out come in
        experts = assigned * (self._arch.hidden_size * size + FP32 + 6 * moe.intermediate_size // grid.expert_tp * size)
        shared = 0
        if moe.shared_intermediate_size:  # Megatron's own, on a CPU too
            shared = 5 * self._tokens * moe.shared_intermediate_size // grid.tp * size
            shared += self._own_tokens * self._arch.hidden_size * size
        return router + experts + shared

    def _layer_backward(self) -> int:
        """Gradients of a layer's output and of its widest part, and of the largest weight; what is recomputed."""
        arch, size = self._arch, self._itemsize
        if arch.moe is None:
            width = arch.intermediate_size // self._grid.tp
            rows, weight = self._tokens, width * arch.hidden_size * 2
        else:
            width = arch.moe.intermediate_size // self._grid.expert_tp
            rows, weight = self._own_tokens * arch.moe.top_k * self._grid.expert_tp, width * arch.hidden_size * 2
        keys = self._copied_keys()
        if self._compiled:  # gradients of keys and values
            keys = self._tokens * self._grid.cp * 2 * self._heads()[1] * arch.head_dim * FP32
        step = max((rows * (2 * width + arch.hidden_size) + weight) * size, keys)
        if self._recompute.method is not None:
            return step + self._recompute.layers_at_a_time * self._saved_by_layer()
        attention = self._attended(values=0) if self._compiled else self._core_attention()
        again = attention if "core_attn" in self._recompute.modules else 0
        return step + max(again, self._mlp_or_experts() if self._recomputes_mlp() else 0)

    def _rows(self) -> int:
        """Scored rows of a chunk of logits."""
        return min(self._config.actor.logprob_chunk_tokens, self._scored)

    def _logits_forward(self) -> int:
        """Logits and, by PyTorch's operators, their powers, fp32; which were dropped, where the distribution is cut."""
        rollout = self._config.rollout
        cut = 1 if truncates(rollout.top_k, rollout.top_p, rollout.min_p) else 0
        return self._rows() * self._vocab * ((1 if self._compiled else 2) * FP32 + cut)

    def _logits_backward(self) -> int:
        """Gradients of the logits, of the hidden states and of the weight."""
        rows, size, weight = self._rows(), self._itemsize, self._vocab * self._arch.hidden_size
        hidden = self._tokens * self._arch.hidden_size
        several = self._scored > rows
        logits = rows * self._vocab * (FP32 + (size if size != FP32 else 0))
        if self._config.algorithm.entropy_coef:
            logits += rows * self._vocab * FP32
        weights = weight * (FP32 + size if several else size)  # several chunks add up in fp32
        return logits + weights + hidden * (FP32 + size)
