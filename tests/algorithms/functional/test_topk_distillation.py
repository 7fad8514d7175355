"""A teacher's most likely tokens over a split vocabulary, and the KL over them, against plain float64 torch."""

import pytest
import torch
import torch.distributed as dist

from mrl.algorithms.functional.logprobs import VocabShard
from mrl.algorithms.functional.topk_distillation import linear_logprobs_of, top_forward_kl, top_tokens
from tests.algorithms.functional.test_divergences import PADDED, ROWS, SPLITS, TOKENS, Peak, by_definition, inputs
from tests.ranks import run_ranks

EXACT = 1e-6  # the bound, in float64
K = 5
TEMPERATURE = 0.6


def dense(k, min_logprob):
    """Loss and gradients, the teacher's ids by sorting."""
    hidden, weight, teacher, teacher_weight, slopes = inputs()
    hidden.requires_grad_()
    weight.requires_grad_()
    log_p = ((hidden @ weight.T)[ROWS, :TOKENS] / TEMPERATURE).log_softmax(1)
    log_q, ids = ((teacher @ teacher_weight.T)[:, :TOKENS] / TEMPERATURE).log_softmax(1).sort(1, descending=True)
    log_q, log_p = log_q[:, :k], log_p.gather(1, ids[:, :k])
    if min_logprob is not None:
        log_q, log_p = log_q.clamp(min=min_logprob), log_p.clamp(min=min_logprob)
    loss = (log_q.exp() * (log_q - log_p)).sum(1).clamp(min=0)
    (loss * slopes).sum().backward()
    return ids[:, :k], loss.detach(), hidden.grad, weight.grad


def fused(k, min_logprob, sizes=None):
    hidden, weight, teacher, teacher_weight, slopes = inputs()
    rank, group = (0, None) if sizes is None else (dist.get_rank(), dist.group.WORLD)
    start = 0 if sizes is None else sum(sizes[:rank])
    count = PADDED if sizes is None else sizes[rank]
    shard = VocabShard(start, min(max(TOKENS - start, 0), count), group)
    hidden.requires_grad_()
    own = weight[start : start + count].clone().requires_grad_()
    settings = {"shard": shard, "temperature": TEMPERATURE, "chunk_rows": 4}
    rows = torch.arange(len(ROWS))
    ids, log_q = top_tokens(teacher, teacher_weight[start : start + count], rows, k, **settings)
    log_p = linear_logprobs_of(hidden, own, torch.tensor(ROWS), ids, **settings)
    found = top_forward_kl(log_p, log_q.double(), min_logprob)
    (found.loss_R * slopes).sum().backward()
    grad_hidden = hidden.grad.clone()
    if group is not None:
        dist.all_reduce(grad_hidden)
    return ids, found.loss_R.detach(), grad_hidden, own.grad


@pytest.mark.parametrize("min_logprob", [None, -4.0])
@pytest.mark.parametrize("k", [1, K, TOKENS])
def test_loss_and_gradients_are_those_of_dense_float64(k, min_logprob):
    for ours, theirs in zip(fused(k, min_logprob), dense(k, min_logprob), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("k", [K, 30])
@pytest.mark.parametrize("sizes", SPLITS, ids=str)
def test_a_split_vocabulary_gives_the_same(sizes, k):
    """k = 30 is more than some ranks have tokens."""
    ids, loss, grad_hidden, grad_weight = dense(k, -4.0)
    for index, found in enumerate(run_ranks(len(sizes), fused, k, -4.0, sizes=sizes)):
        start = sum(sizes[:index])
        expected = (ids, loss, grad_hidden, grad_weight[start : start + sizes[index]])
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=EXACT, atol=EXACT)


def test_with_the_whole_vocabulary_it_is_the_forward_kl_and_both_masses_are_1():
    hidden, weight, teacher, teacher_weight, _ = inputs()
    logits, teacher_logits = (hidden @ weight.T)[ROWS, :TOKENS], (teacher @ teacher_weight.T)[:, :TOKENS]
    found = top_forward_kl(logits.log_softmax(1), teacher_logits.log_softmax(1), None)
    expected = by_definition(logits, teacher_logits, "forward_kl", 0)
    torch.testing.assert_close(found.loss_R, expected, rtol=EXACT, atol=EXACT)
    ones = torch.ones_like(expected)
    torch.testing.assert_close(found.student_mass_R, ones, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(found.teacher_mass_R, ones, rtol=EXACT, atol=EXACT)


def test_a_student_that_is_its_own_teacher_has_exactly_zero_loss():
    logprobs = torch.randn(4, 9).log_softmax(1)[:, :K].requires_grad_()
    found = top_forward_kl(logprobs, logprobs.detach(), -10.0)
    assert torch.equal(found.loss_R, torch.zeros(4))


def test_a_student_who_gives_the_tokens_more_than_the_teacher_has_no_loss():
    student, teacher = torch.tensor([[0.6, 0.35]]).log().requires_grad_(), torch.tensor([[0.4, 0.2]]).log()
    found = top_forward_kl(student, teacher, None)
    found.loss_R.sum().backward()
    assert found.loss_R.item() == 0
    assert torch.equal(student.grad, torch.zeros(1, 2))
    assert found.student_mass_R.item() == pytest.approx(0.95)
    assert found.teacher_mass_R.item() == pytest.approx(0.6)


def test_no_row_gives_nothing():
    hidden, weight, *_ = inputs()
    none = torch.zeros(0, dtype=torch.int64)
    ids, logprobs = top_tokens(hidden, weight, none, K, shard=VocabShard(0, TOKENS))
    assert ids.shape == logprobs.shape == (0, K)
    assert linear_logprobs_of(hidden, weight, none, ids, shard=VocabShard(0, TOKENS)).shape == (0, K)


def test_logits_of_all_rows_never_exist_forward_or_backward():
    rows, tokens, chunk = 64, 512, 8
    hidden, weight = torch.randn(rows, 4, requires_grad=True), torch.randn(tokens, 4, requires_grad=True)
    settings = {"shard": VocabShard(0, tokens), "temperature": 0.7, "chunk_rows": chunk}
    with Peak() as peak:
        ids, log_q = top_tokens(hidden.detach(), weight.detach(), torch.arange(rows), K, **settings)
        log_p = linear_logprobs_of(hidden, weight, torch.arange(rows), ids, **settings)
        top_forward_kl(log_p, log_q, -10.0).loss_R.sum().backward()
    assert peak.largest == chunk * tokens
