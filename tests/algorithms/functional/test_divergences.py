"""Divergences over a split vocabulary against plain float64 torch and TRL: values, gradients, exact zeros, memory."""

import math

import pytest
import torch
import torch.distributed as dist

from mrl.algorithms.functional.divergences import Divergence, OutputLayer, linear_divergence
from mrl.algorithms.functional.logprobs import VocabShard
from tests.ranks import run_ranks

EXACT = 1e-6  # the bound, in float64
FP32 = 2e-5  # fp32 sums over 50 tokens of logits up to 15, relative to values and gradients of order 1 to 10
BF16 = 5e-2  # bf16 logits have 8 bits

POSITIONS, HIDDEN, TEACHER_HIDDEN, TOKENS, PADDED = 13, 12, 7, 50, 54
ROWS = [0, 2, 3, 5, 6, 7, 8, 10, 12]
KINDS = {
    "reverse_kl": ("reverse_kl", 0.5),
    "forward_kl": ("forward_kl", 0.5),
    "jsd_half": ("jsd", 0.5),
    "jsd_low": ("jsd", 0.1),
    "jsd_high": ("jsd", 0.9),
}
SPLITS = [(27, 27), (40, 14), (50, 4), (14, 14, 14, 12)]


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(5)
    tensors = (
        torch.randn(POSITIONS, HIDDEN, generator=generator, dtype=torch.float64),
        torch.randn(PADDED, HIDDEN, generator=generator, dtype=torch.float64),
        torch.randn(len(ROWS), TEACHER_HIDDEN, generator=generator, dtype=torch.float64),
        torch.randn(PADDED, TEACHER_HIDDEN, generator=generator, dtype=torch.float64) * 2,
        torch.randn(len(ROWS), generator=generator, dtype=torch.float64),
    )
    return [tensor.to(dtype) for tensor in tensors]


def by_definition(logits, teacher_logits, kind, beta):
    """Written from the equations, with a mixture of probabilities."""
    p, q = logits.softmax(1), teacher_logits.softmax(1)
    if kind == "reverse_kl":
        return (p * (p.log() - q.log())).sum(1)
    if kind == "forward_kl":
        return (q * (q.log() - p.log())).sum(1)
    m = beta * q + (1 - beta) * p
    return (beta * q * (q.log() - m.log()) + (1 - beta) * p * (p.log() - m.log())).sum(1)


def dense(kind, beta, temperature):
    hidden, weight, teacher, teacher_weight, slopes = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    logits = (hidden @ weight.T)[ROWS, :TOKENS] / temperature
    value = by_definition(logits, (teacher @ teacher_weight.T)[:, :TOKENS] / temperature, kind, beta)
    (value * slopes).sum().backward()
    return value.detach(), hidden.grad, weight.grad


def fused(kind, beta, temperature, chunk_rows=4, sizes=None, dtype=torch.float64):
    """The same on this rank; `sizes`: rows of the padded weight on each rank. Gradients of the hidden states summed."""
    hidden, weight, teacher, teacher_weight, slopes = inputs(dtype)
    rank, group = (0, None) if sizes is None else (dist.get_rank(), dist.group.WORLD)
    start = 0 if sizes is None else sum(sizes[:rank])
    count = PADDED if sizes is None else sizes[rank]
    hidden.requires_grad_()
    own = weight[start : start + count].clone().requires_grad_()
    value = linear_divergence(
        hidden,
        own,
        torch.tensor(ROWS),
        OutputLayer(teacher, teacher_weight[start : start + count]),
        shard=VocabShard(start, min(max(TOKENS - start, 0), count), group),
        divergence=Divergence(kind, beta, temperature, chunk_rows),
    )
    (value * slopes).sum().backward()
    grad_hidden = hidden.grad.clone()
    if group is not None:
        dist.all_reduce(grad_hidden)
    return value.detach(), grad_hidden, own.grad


def check(found, expected, tolerance=EXACT):
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("chunk_rows", [1, 4, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_dense_float64(kind, temperature, chunk_rows):
    check(fused(*KINDS[kind], temperature, chunk_rows), dense(*KINDS[kind], temperature))


@pytest.mark.parametrize("kind", KINDS)
def test_fp32_is_near(kind):
    check(fused(*KINDS[kind], 0.6, dtype=torch.float32), dense(*KINDS[kind], 0.6), FP32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_a_split_vocabulary_gives_the_same(sizes, kind):
    """One split leaves a rank with padding only."""
    found = run_ranks(len(sizes), fused, *KINDS[kind], 0.6, sizes=sizes)
    value, grad_hidden, grad_weight = dense(*KINDS[kind], 0.6)
    for index, result in enumerate(found):
        start = sum(sizes[:index])
        check(result, (value, grad_hidden, grad_weight[start : start + sizes[index]]))
        assert torch.equal(result[0], found[0][0])  # sums in rank order: the same bits everywhere


@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0), ("jsd", 0.1), ("jsd", 0.5), ("reverse_kl", 1)])
def test_values_are_those_of_trl(kind, beta):
    from trl.experimental.gkd.gkd_trainer import GKDTrainer  # here: it takes seconds to import

    hidden, weight, teacher, teacher_weight, _ = inputs()
    logits = (hidden @ weight.T)[None, ROWS, :TOKENS]
    theirs = GKDTrainer.generalized_jsd_loss(
        logits, (teacher @ teacher_weight.T)[None, :, :TOKENS], beta=beta, temperature=0.7, reduction="sum"
    )
    torch.testing.assert_close(fused(kind, beta, 0.7)[0].sum(), theirs, rtol=EXACT, atol=EXACT)


def of_itself(kind, beta, dtype, sizes):
    """A student that is its own teacher: the largest value and gradient."""
    hidden, weight, *_ = inputs(dtype)
    rank, group = (0, None) if sizes is None else (dist.get_rank(), dist.group.WORLD)
    start = 0 if sizes is None else sum(sizes[:rank])
    count = PADDED if sizes is None else sizes[rank]
    own = weight[start : start + count].clone().requires_grad_()
    hidden.requires_grad_()
    value = linear_divergence(
        hidden,
        own,
        torch.tensor(ROWS),
        OutputLayer(hidden.detach()[ROWS], own.detach()),
        shard=VocabShard(start, min(max(TOKENS - start, 0), count), group),
        divergence=Divergence(kind, beta, 0.6, 4),
    )
    value.sum().backward()
    return [float(tensor.abs().max()) for tensor in (value.detach(), hidden.grad, own.grad)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_student_that_is_its_own_teacher_has_exactly_zero(kind, dtype):
    assert of_itself(*KINDS[kind], dtype, None) == [0, 0, 0]
    for found in run_ranks(2, of_itself, *KINDS[kind], dtype, (40, 14)):
        assert found == [0, 0, 0]


def test_bf16_weights_compare_in_fp32():
    for kind in KINDS:
        value, grad_hidden, grad_weight = fused(*KINDS[kind], 1.0, dtype=torch.bfloat16)
        assert value.dtype == torch.float32
        expected = dense(*KINDS[kind], 1.0)
        for ours, theirs in zip((value, grad_hidden, grad_weight), expected, strict=True):
            assert (ours.double() - theirs).norm() <= BF16 * theirs.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_distributions_that_share_nothing_are_finite(kind):
    """Logits 200 apart: in fp32 the smaller probability is 0."""
    hidden = torch.tensor([[100.0]], requires_grad=True)
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    value = linear_divergence(
        hidden,
        weight,
        torch.tensor([0]),
        OutputLayer(-hidden.detach(), weight.detach()),
        shard=VocabShard(0, 2),
        divergence=Divergence(*KINDS[kind]),
    )
    value.sum().backward()
    beta = KINDS[kind][1]
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert value.item() == pytest.approx(entropy if KINDS[kind][0] == "jsd" else 200.0, rel=FP32)
    assert torch.isfinite(hidden.grad).all()
    assert torch.isfinite(weight.grad).all()


def test_no_row_has_gradient_zero():
    hidden, weight, teacher, teacher_weight, _ = inputs()
    hidden.requires_grad_()
    value = linear_divergence(
        hidden,
        weight,
        torch.zeros(0, dtype=torch.int64),
        OutputLayer(teacher[:0], teacher_weight),
        shard=VocabShard(0, TOKENS),
        divergence=Divergence("jsd"),
    )
    value.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


class Peak(torch.utils._python_dispatch.TorchDispatchMode):
    """The most elements that any tensor made inside had."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.largest = max(self.largest, result.numel())
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_all_rows_never_exist_forward_or_backward(kind):
    rows, tokens, chunk = 64, 512, 8
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(tokens, 4, requires_grad=True)
    teacher = OutputLayer(torch.randn(rows, 6), torch.randn(tokens, 6))
    with Peak() as peak:
        value = linear_divergence(
            hidden,
            weight,
            torch.arange(rows),
            teacher,
            shard=VocabShard(0, tokens),
            divergence=Divergence(*KINDS[kind], 0.7, chunk),
        )
        value.sum().backward()
    assert peak.largest == chunk * tokens


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Divergence("kl"), "unknown"),
        (Divergence("jsd", 1.0), "beta"),
        (Divergence("reverse_kl", temperature=0.0), "positive"),
        (Divergence("reverse_kl", chunk_rows=0), "positive"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(given, message):
    hidden, weight, teacher, teacher_weight, _ = inputs()
    shard = VocabShard(0, TOKENS)
    with pytest.raises(ValueError, match=message):
        linear_divergence(
            hidden, weight, torch.tensor(ROWS), OutputLayer(teacher, teacher_weight), shard=shard, divergence=given
        )
    with pytest.raises(ValueError, match="rows"):
        linear_divergence(
            hidden,
            weight,
            torch.tensor(ROWS),
            OutputLayer(teacher[:3], teacher_weight),
            shard=shard,
            divergence=Divergence("jsd"),
        )
