"""What the log-probabilities score is found out, corrected where it can be, and refused where it cannot."""

from dataclasses import replace

import pytest
import torch

from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm import contract
from mrl.engines.trtllm.contract import PROBE, Scores, Verdict
from mrl.engines.trtllm.scoring import score
from mrl.errors import UserError
from tests.trtllm import tiny
from tests.trtllm.conftest import FAULTS
from tests.trtllm.test_engine import LOGPROB_TOLERANCE
from tests.trtllm.tiny import PROMPTS, SAMPLING

SETTINGS = {
    "plain": SAMPLING,
    "tempered": replace(SAMPLING, temperature=0.7),
    "truncated": replace(SAMPLING, temperature=0.7, top_k=9, top_p=0.9),
    "min_p": replace(SAMPLING, min_p=0.2),
    "greedy": replace(SAMPLING, n=1, greedy=True, temperature=0.7),
}


@pytest.fixture(scope="module")
def weights():
    return tiny.weights()


@pytest.fixture(scope="module")
def expected(weights):
    native = tiny.native(weights)
    return {name: native.generate(PROMPTS, sampling) for name, sampling in SETTINGS.items()}


@pytest.mark.parametrize("scores", ["raw", "tempered", "processed"])
def test_whatever_is_scored_the_rollouts_have_the_contracts_logprobs(standin, tmp_path, weights, expected, scores):
    standin.setenv(FAULTS, f"scores={scores}")
    with tiny.engine(tmp_path, max_num_seqs=4) as engine:  # logits come in waves
        tiny.refit(engine, weights)
        for name, sampling in SETTINGS.items():
            found = engine.generate(PROMPTS, sampling)
            assert [r.response_ids for r in found] == [r.response_ids for r in expected[name]], name
            for one, other in zip(found, expected[name], strict=True):
                assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=LOGPROB_TOLERANCE), name
        assert engine._verdict == Verdict(Scores[scores.upper()], has_logits=True)


def test_without_logits_a_setting_that_needs_them_is_refused_with_choices(standin, tmp_path, weights):
    standin.setenv(FAULTS, "no_logits")
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        assert len(engine.generate(PROMPTS, SAMPLING)) == 9  # temperature 1: every distribution is the same
        with pytest.raises(UserError, match=r"temperature=0.7.*Set temperature=1.*algorithm.proximal=recompute"):
            engine.generate(PROMPTS, SETTINGS["tempered"])
    with tiny.engine(tmp_path, trains_on_logprobs=False) as engine:  # the second choice
        tiny.refit(engine, weights)
        assert len(engine.generate(PROMPTS, SETTINGS["tempered"])) == 9


def test_a_sampled_token_without_a_logprob_is_never_given_anothers(standin, tmp_path, weights):
    standin.setenv(FAULTS, "top1")
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        found = engine.generate(PROMPTS, SAMPLING)  # from logits instead
        assert engine._verdict == Verdict(Scores.UNKNOWN, has_logits=True)
        for one, other in zip(found, tiny.native(weights).generate(PROMPTS, SAMPLING), strict=True):
            assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=LOGPROB_TOLERANCE)
    standin.setenv(FAULTS, "top1 no_logits")
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        with pytest.raises(UserError, match="score nothing that could be recognised"):
            engine.generate(PROMPTS, SAMPLING)


def test_a_token_that_truncation_drops_is_an_error(standin, tmp_path, weights):
    standin.setenv(FAULTS, "min_p_ignored")
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        with pytest.raises(RuntimeError, match=r"prompt 0, sample \d: response token \d .*min_p=0.5 keep"):
            engine.generate(PROMPTS, replace(SAMPLING, min_p=0.5))


def test_the_newer_line_is_asked_for_what_it_samples_from(flavour, tmp_path, weights):
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        engine.generate(PROMPTS, SETTINGS["truncated"])
        assert engine._verdict.scores is (Scores.RAW if flavour == "1.2" else Scores.PROCESSED)


LOGITS = torch.tensor([[3.0, 1.0, 0.0, -2.0]]).repeat(3, 1) * torch.tensor([[1.0], [0.7], [1.3]])
TOKENS = [0, 1, 0]


@pytest.mark.parametrize("scale, expected", [(0.0, Scores.UNVERIFIED), (1.0, Scores.TEMPERED)])
def test_the_probe_decides_only_where_the_distributions_differ(scale, expected):
    logits = LOGITS * scale
    reported = score(logits, torch.tensor(TOKENS), replace(PROBE, top_p=1.0)).tolist()
    assert contract.judge(reported, logits, TOKENS).scores is expected
    wrong = [value - 0.3 for value in reported]
    assert contract.judge(wrong, logits, TOKENS).scores is Scores.UNKNOWN
    assert contract.judge(reported, None, TOKENS) == Verdict(Scores.UNVERIFIED, has_logits=False)
    assert contract.judge(None, logits, TOKENS) == Verdict(Scores.UNKNOWN, has_logits=True)


def sampling(**settings):
    return SamplingConfig(n=1, max_tokens=1, **settings)


EXACT = {
    Scores.RAW: (sampling(), sampling(greedy=True)),
    Scores.TEMPERED: (sampling(), sampling(temperature=2), sampling(greedy=True), sampling(greedy=True, temperature=2)),
    Scores.PROCESSED: (sampling(), sampling(temperature=2), sampling(top_p=0.9, min_p=0.1), sampling(top_k=5)),
    Scores.UNVERIFIED: (sampling(),),
    Scores.UNKNOWN: (),
}


@pytest.mark.parametrize("scores", Scores)
def test_which_settings_are_exact(scores):
    every = {each for group in EXACT.values() for each in group}
    assert {each for each in every if contract.is_exact(scores, each)} == set(EXACT[scores])
