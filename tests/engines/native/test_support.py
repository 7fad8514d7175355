"""What the sampler says it kept, and TRL's case: the bias of a trainer that does not know of it.

TRL measured it on 2048 tokens of Qwen2.5-1.5B with top_p=0.8 and top_k=1024 (huggingface/trl, pull request 7269): the
kept mass is 0.895 on average, as is the ratio of a trainer that scores over the whole vocabulary, of which 51.8% lie
outside of [0.9, 1.1]. That model is not at hand: here are as many tokens, as many of them uncertain, with a Zipf law
where the model hesitates and nearly all the mass on one token where it is sure.
"""

import math

import pytest
import torch

from mrl.algorithms.functional.logprobs import Distribution, VocabShard, linear_logprobs
from mrl.algorithms.functional.sampling import keep_threshold, stream_key
from mrl.engines._kept_tokens import KeptTokens, add_step
from mrl.engines.base import SamplingConfig
from mrl.engines.native.sampler import TokenSampler
from mrl.engines.native.torch_ops import Operations
from mrl.types import Prompt, Rollout

TOKENS, KINDS, VOCAB = 2048, 64, 4096
HESITATING = 0.518
"""TRL's part of the ratios outside of [0.9, 1.1]."""
ZIPF = 1.6
"""Exponent with which the first 1024 tokens have 0.994 of the mass, which TRL measured for top_k=1024 alone."""
SURE = 0.994
"""Probability of the first token where the model is sure; TRL's mean comes of it."""
RATIO = 1e-5
CUT = SamplingConfig(n=1, max_tokens=1, top_p=0.8, top_k=1024, return_kept_tokens=True)


def logits_of_kinds():
    """Of each kind of position, [KINDS, V]: the first HESITATING of them follow Zipf, ids in an order of their own."""
    zipf = (-ZIPF * torch.arange(1, VOCAB + 1).log()).log_softmax(0)
    sure = torch.cat([torch.tensor([math.log(SURE)]), zipf[1:].log_softmax(0) + math.log(1 - SURE)])
    hesitating = round(KINDS * HESITATING)
    rows = [zipf] * hesitating + [sure] * (KINDS - hesitating)
    generator = torch.Generator().manual_seed(1)
    return torch.stack([row[torch.randperm(VOCAB, generator=generator)] for row in rows])


def sampled(sampling):
    """Kinds, sampled tokens, their log-probabilities by the sampler, and what it kept as a rollout."""
    logits, kinds = logits_of_kinds(), torch.arange(TOKENS) % KINDS
    keys = torch.tensor([stream_key(0, uid, 0) for uid in range(TOKENS)])
    tokens, logprobs, kept = TokenSampler(sampling, Operations()).sample(logits[kinds], keys, torch.zeros_like(keys))
    record = KeptTokens()
    add_step(*kept, [record] * TOKENS)
    rollout = Rollout(Prompt(0, (1,), ""), 0, tokens.tolist(), logprobs.tolist(), "length", 0)
    record.attach_to(rollout)
    return kinds, tokens, logprobs, rollout


def ratios(support, kinds, tokens, logprobs):
    """Of an actor with the same logits."""
    weight, hidden = logits_of_kinds().T.contiguous(), torch.eye(KINDS)
    found, _ = linear_logprobs(
        hidden,
        weight,
        kinds,
        tokens,
        shard=VocabShard(0, VOCAB),
        distribution=Distribution(1.0, 256),
        kept_tokens=support,
    )
    return (found - logprobs).exp()


def test_in_trls_case_the_kept_mass_is_0_895_and_the_support_takes_it_out_of_the_ratio():
    kinds, tokens, logprobs, rollout = sampled(CUT)
    mass = torch.tensor(rollout.log_kept_mass).exp()
    assert abs(float(mass.mean()) - 0.895) < 2e-3
    corrected, without = (ratios(each, kinds, tokens, logprobs) for each in (rollout.kept_tokens, None))
    assert (corrected - 1).abs().max() < RATIO
    torch.testing.assert_close(without, mass, rtol=RATIO, atol=0)
    assert abs(float(without.mean()) - 0.895) < 2e-3
    assert abs(float((without < 0.9).double().mean()) - HESITATING) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "cut", [{"top_p": 0.8}, {"top_k": 5}, {"min_p": 0.1}, {"top_p": 0.8, "top_k": 5, "min_p": 0.1}, {"top_k": VOCAB}],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("greedy", [False, True])
def test_the_support_is_what_the_contract_keeps(cut, greedy):
    given = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, **cut}
    sampling = SamplingConfig(n=1, max_tokens=1, greedy=greedy, return_kept_tokens=True, **given)
    kinds, tokens, logprobs, rollout = sampled(sampling)
    logits = logits_of_kinds().double()
    threshold = keep_threshold(logits.float(), given["top_k"], given["top_p"], given["min_p"])
    kept = torch.ones_like(logits, dtype=torch.bool) if threshold is None else logits.float() >= threshold[:, None]
    whole = logits.logsumexp(1)
    mass = logits.masked_fill(~kept, -torch.inf).logsumexp(1) - whole
    assert torch.equal(rollout.kept_tokens.counts_R.long(), kept.sum(1)[kinds])
    for row, part in enumerate(rollout.kept_tokens.split([1] * TOKENS)[:KINDS]):
        assert part.ids_K.tolist() == kept[kinds[row]].nonzero().flatten().tolist()
    torch.testing.assert_close(torch.tensor(rollout.log_kept_mass).double(), mass[kinds], rtol=0, atol=RATIO)
    assert (ratios(rollout.kept_tokens, kinds, tokens, logprobs) - 1).abs().max() < 5 * RATIO  # sums of 4096 in fp32


def test_a_token_that_was_not_kept_is_no_sample_of_that_distribution():
    record = KeptTokens()
    add_step(torch.tensor([[True, False, True]]), torch.tensor([-0.1]), [record])
    with pytest.raises(RuntimeError, match=r"response token 0 \(1\) is not among the kept token ids"):
        record.attach_to(Rollout(Prompt(0, (1,), ""), 0, [1], [-0.5], "stop", 0))
    with pytest.raises(RuntimeError, match="exist for 1 of 2 response tokens"):
        record.attach_to(Rollout(Prompt(0, (1,), ""), 0, [0, 2], [-0.5, -0.5], "stop", 0))
