"""Fused log-probabilities against plain float64 torch, on one rank and with the vocabulary split over several."""

import pytest
import torch
import torch.distributed as dist

from mrl.algorithms.functional.logprobs import OPERATORS, Distribution, VocabShard, linear_logprobs
from mrl.algorithms.functional.sampling import keep_threshold
from mrl.models.kernels.training import training_kernels
from mrl.types import SamplingMask
from tests.ranks import run_ranks

VALUE = 2e-6  # fp32 log-sum-exp of 50 logits against float64
GRADIENT = 5e-6  # fp32 products of 50 x 12 elements against float64, relative to gradients of order 1
BF16 = 3e-2  # bf16 logits have 8 bits

POSITIONS, HIDDEN, TOKENS, PADDED = 13, 12, 50, 54
ROWS = [0, 2, 3, 5, 6, 7, 8, 10, 12]
CUTS = {"none": (-1, 1.0, 0.0), "top_k": (7, 1.0, 0.0), "top_p": (-1, 0.7, 0.0), "min_p": (20, 0.9, 0.1), "drawn": None}
"""drawn: kept tokens that have nothing to do with the logits, in one row none"""


def inputs():
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(POSITIONS, HIDDEN, generator=generator)
    weight = torch.randn(PADDED, HIDDEN, generator=generator)
    targets = torch.randint(0, TOKENS, (len(ROWS),), generator=generator)
    grads = torch.randn(2, len(ROWS), generator=generator)
    return hidden, weight, torch.tensor(ROWS), targets, grads


def kept_of(temperature, cut):
    """What an engine would keep of the rows, bool [R, V]."""
    hidden, weight, rows, _, _ = inputs()
    if cut is None:
        kept = torch.rand(len(ROWS), TOKENS, generator=torch.Generator().manual_seed(9)) < 0.3
        kept[3] = False
        return kept
    logits = (hidden @ weight.T)[rows, :TOKENS] / temperature
    threshold = keep_threshold(logits, *cut)
    return torch.ones_like(logits, dtype=torch.bool) if threshold is None else logits >= threshold[:, None]


def support_of(kept):
    return SamplingMask(kept.nonzero()[:, 1].int(), kept.sum(1).int())


def dense(temperature, cut):
    """Values and gradients by float64 log_softmax over what is kept of the true vocabulary."""
    hidden, weight, rows, targets, grads = inputs()
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    logits = (hidden @ weight.T)[rows, :TOKENS] / temperature
    kept = kept_of(temperature, cut)
    kept[torch.arange(len(ROWS)), targets] = True
    logits = logits.masked_fill(~kept, -torch.inf)
    logprobs = logits.log_softmax(1)
    chosen = logprobs.gather(1, targets[:, None]).squeeze(1)
    probs = logprobs.exp()
    entropy = -torch.where(probs > 0, probs * logprobs.masked_fill(probs == 0, 0), 0).sum(1)
    ((chosen * grads[0].double()).sum() + (entropy * grads[1].double()).sum()).backward()
    return [x.detach().float() for x in (chosen, entropy, hidden.grad, weight.grad)]


def fused(temperature, cut, chunk_rows, dtype="float32", sizes=None, compiled=False, elsewhere=False):
    """The same on this rank; `sizes`: rows of the padded weight on each rank. Gradients of the hidden states summed.

    `elsewhere`: The gradient of the weight is added up in a buffer.
    """
    hidden, weight, rows, targets, grads = inputs()
    rank, group = (0, None) if sizes is None else (dist.get_rank(), dist.group.WORLD)
    start = 0 if sizes is None else sum(sizes[:rank])
    count = PADDED if sizes is None else sizes[rank]
    kind = getattr(torch, dtype)
    hidden = hidden.to(kind).requires_grad_()
    own = weight[start : start + count].to(kind).clone().requires_grad_()
    buffer = torch.zeros_like(own)

    def adds(grad, states):
        buffer[: grad.size(1)].addmm_(grad.T, states)
        return torch.full_like(own, torch.nan)

    chosen, entropy = linear_logprobs(
        hidden,
        own,
        rows,
        targets,
        shard=VocabShard(start, min(max(TOKENS - start, 0), count), group),
        distribution=Distribution(temperature, chunk_rows),
        kept_tokens=None if cut == CUTS["none"] else support_of(kept_of(temperature, cut)),
        of_rows=training_kernels(kind) if compiled else OPERATORS,
        adds_gradient=adds if elsewhere else None,
    )
    ((chosen * grads[0]).sum() + (entropy * grads[1]).sum()).backward()
    grad_hidden = hidden.grad.clone()
    if group is not None:
        dist.all_reduce(grad_hidden)
    return [x.detach().float() for x in (chosen, entropy, grad_hidden, buffer if elsewhere else own.grad)]


def check(found, expected, value=VALUE, gradient=GRADIENT):
    for ours, theirs, tolerance in zip(found, expected, (value, value, gradient, gradient), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("cut", CUTS)
def test_values_and_gradients_are_those_of_dense_float64(cut, temperature, chunk_rows):
    check(fused(temperature, CUTS[cut], chunk_rows), dense(temperature, CUTS[cut]))


@pytest.mark.compiler
@pytest.mark.parametrize("chunk_rows", [4, 100])
@pytest.mark.parametrize("cut", CUTS)
def test_compiled_rows_and_a_buffer_for_the_gradient_give_the_same(cut, chunk_rows):
    check(fused(0.6, CUTS[cut], chunk_rows, compiled=True, elsewhere=True), dense(0.6, CUTS[cut]))
    found = run_ranks(2, fused, 0.6, CUTS[cut], chunk_rows, sizes=(50, 4), compiled=True)  # a rank without a token
    expected = dense(0.6, CUTS[cut])
    for start, size, result in zip((0, 50), (50, 4), found, strict=True):
        check(result, [*expected[:3], expected[3][start : start + size]])


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("sizes", [(27, 27), (40, 14), (50, 4)], ids=str)
def test_a_split_vocabulary_gives_the_same(sizes, cut):
    """The last split leaves a rank with padding only."""
    found = run_ranks(2, fused, 0.6, CUTS[cut], 4, sizes=sizes)
    expected = dense(0.6, CUTS[cut])
    for index, result in enumerate(found):
        start = sum(sizes[:index])
        check(result, [*expected[:3], expected[3][start : start + sizes[index]]])
    for ours, theirs in zip(found[0][:2], found[1][:2], strict=True):
        assert torch.equal(ours, theirs)  # sums in rank order: the same bits everywhere


def test_padding_rows_get_no_gradient_and_no_probability():
    _, _, _, grad_weight = fused(1.0, CUTS["none"], 4)
    assert torch.equal(grad_weight[TOKENS:], torch.zeros(PADDED - TOKENS, HIDDEN))


def test_bf16_weights_score_in_fp32_with_the_gradient_of_their_logits():
    chosen, _, grad_hidden, grad_weight = fused(1.0, CUTS["none"], 4, dtype="bfloat16")
    expected = dense(1.0, CUTS["none"])
    assert (chosen.exp() <= 1).all()
    for ours, theirs in ((grad_hidden, expected[2]), (grad_weight, expected[3])):
        assert (ours - theirs).norm() <= BF16 * theirs.norm()


def test_a_row_that_keeps_nothing_but_its_target_is_certain_and_learns_nothing():
    hidden, weight, rows, targets, _ = inputs()
    hidden.requires_grad_()
    nothing = SamplingMask(torch.zeros(0, dtype=torch.int32), torch.zeros(len(ROWS), dtype=torch.int32))
    shard, distribution = VocabShard(0, TOKENS), Distribution(1.0, 4)
    found = linear_logprobs(hidden, weight, rows, targets, shard=shard, distribution=distribution, kept_tokens=nothing)
    (found[0].sum() + found[1].sum()).backward()
    assert all(torch.equal(values, torch.zeros(len(ROWS))) for values in found)
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_a_support_of_other_rows_is_refused():
    hidden, weight, rows, targets, _ = inputs()
    other = support_of(torch.ones(len(ROWS) - 1, TOKENS, dtype=torch.bool))
    with pytest.raises(ValueError, match="the support has 8 rows, expected 9"):
        linear_logprobs(
            hidden, weight, rows, targets, shard=VocabShard(0, TOKENS), distribution=Distribution(), kept_tokens=other
        )


def test_inputs_are_not_written():
    """Megatron's own vocab-parallel cross entropy overwrites fp32 logits: a second use of them is wrong."""
    hidden, weight, rows, targets, _ = inputs()
    kept = hidden.clone(), weight.clone()
    arguments = {"shard": VocabShard(0, TOKENS), "distribution": Distribution(0.5, 4)}
    first = linear_logprobs(hidden, weight, rows, targets, **arguments)
    second = linear_logprobs(hidden, weight, rows, targets, **arguments)
    assert torch.equal(hidden, kept[0])
    assert torch.equal(weight, kept[1])
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_no_row_has_gradient_zero():
    hidden, weight, _, _, _ = inputs()
    hidden.requires_grad_()
    none = torch.zeros(0, dtype=torch.int64)
    arguments = {"shard": VocabShard(0, TOKENS), "distribution": Distribution()}
    logprobs, entropy = linear_logprobs(hidden, weight, none, none, **arguments)
    (logprobs.sum() + entropy.sum()).backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that any tensor made inside had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("truncated", [False, True])
def test_logits_of_all_rows_never_exist_forward_or_backward(truncated):
    rows, tokens, chunk = 64, 512, 8
    hidden = torch.randn(rows, 4, requires_grad=True)
    weight = torch.randn(tokens, 4, requires_grad=True)
    support = SamplingMask(torch.arange(3 * rows, dtype=torch.int32), torch.full((rows,), 3, dtype=torch.int32))
    with Peak() as peak:
        logprobs, entropy = linear_logprobs(
            hidden,
            weight,
            torch.arange(rows),
            torch.zeros(rows, dtype=torch.int64),
            shard=VocabShard(0, tokens),
            distribution=Distribution(0.7, chunk),
            kept_tokens=support if truncated else None,
        )
        (logprobs.sum() + entropy.sum()).backward()
    assert peak.largest == chunk * tokens


@pytest.mark.parametrize(("temperature", "chunk_rows"), [(0.0, 4), (-1.0, 4), (1.0, 0)])
def test_a_distribution_that_cannot_be_is_refused(temperature, chunk_rows):
    hidden, weight, rows, targets, _ = inputs()
    with pytest.raises(ValueError, match="must be positive"):
        linear_logprobs(
            hidden,
            weight,
            rows,
            targets,
            shard=VocabShard(0, TOKENS),
            distribution=Distribution(temperature, chunk_rows),
        )
