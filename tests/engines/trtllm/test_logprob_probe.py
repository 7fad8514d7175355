"""What the log-probabilities score is found out, corrected where it can be, and refused where it cannot."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm import logprob_probe
from mrl.engines.trtllm.logprob_probe import HIGH_TEMPERATURE_PROBE, TRUNCATED_PROBE, ProbeResponse, Scores
from mrl.engines.trtllm.requests import HOST_PART
from mrl.engines.trtllm.scoring import score
from mrl.errors import UserError
from tests.engines.trtllm import tiny
from tests.engines.trtllm.conftest import FAULTS, STANDIN, forget
from tests.engines.trtllm.signature import FLAVOUR_VARIABLE
from tests.engines.trtllm.test_engine import LOGPROB_TOLERANCE
from tests.engines.trtllm.tiny import PROMPTS, SAMPLING

ENDING = replace(SAMPLING, stop_token_ids=(13, 4, 9))
"""Many responses end before their length."""

SETTINGS = {
    "plain": ENDING,
    "tempered": replace(ENDING, temperature=0.7),
    "truncated": replace(ENDING, temperature=0.7, top_k=9, top_p=0.9),
    "min_p": replace(ENDING, min_p=0.2),
    "greedy": replace(ENDING, n=1, greedy=True, temperature=0.7),
}


SURPRISES = (("tempered", "raw"), ("greedy", "raw"), ("greedy", "processed"))
"""Settings that need no logits with what 1.2's sampler scores, and something else that it scored."""


@pytest.fixture(scope="module")
def weights():
    return tiny.weights()


@pytest.fixture(scope="module")
def expected(weights):
    native = tiny.native(weights)
    return {name: native.generate(PROMPTS, sampling) for name, sampling in SETTINGS.items()}


def sampled(folder, weights, name, **settings):
    """Rollouts of a setting that the run trains on, and the engine."""
    with tiny.engine(
        folder, **tiny.trains_with(SETTINGS[name]), max_num_seqs=4, **settings
    ) as engine:  # logits come in waves
        tiny.refit(engine, weights)
        return engine.generate(PROMPTS, SETTINGS[name]), engine


def assert_same(found, expected):
    assert [r.response_ids for r in found] == [r.response_ids for r in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.rollout_logprobs == pytest.approx(other.rollout_logprobs, abs=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("scores", ["raw", "tempered", "processed"])
@pytest.mark.parametrize("name", SETTINGS)
def test_whatever_is_scored_the_rollouts_have_the_contracts_logprobs(
    standin, tmp_path, weights, expected, name, scores
):
    standin.setenv(FAULTS, f"scores={scores}")
    try:
        found, engine = sampled(tmp_path, weights, name)
    except UserError as error:  # the sampler was chosen for what it should score
        assert "it returns no logits" in str(error) and (name, scores) in SURPRISES
        return
    assert_same(found, expected[name])
    assert engine._verdict.scores is Scores[scores.upper()]


@pytest.mark.parametrize("name", SETTINGS)
def test_each_line_samples_and_scores_as_the_contract_says(flavour, tmp_path, weights, expected, name):
    found, engine = sampled(tmp_path, weights, name)
    assert {rollout.finish_reason for rollout in expected[name]} >= {"stop"}, "no response ends early"
    assert_same(found, expected[name])
    assert engine._verdict.scores is (Scores.TEMPERED if flavour == "1.2" else Scores.PROCESSED)
    assert engine._runtime.llm.args.sampler_type == ("TRTLLMSampler" if flavour == "1.2" else "TorchSampler")


def test_logits_take_no_more_of_the_hosts_memory_than_their_part(standin, tmp_path, weights, expected):
    row = 4 * tiny.ARCH.vocab_size * (SAMPLING.max_tokens + 1)
    free = 2 * row / HOST_PART
    standin.setattr("mrl.engines.trtllm.requests.virtual_memory", lambda: SimpleNamespace(available=free))
    standin.setattr("mrl.engines.trtllm.logprob_probe.PROBE_TOKENS", 2)
    found, _ = sampled(tmp_path, weights, "truncated")
    from tensorrt_llm._torch.pyexecutor import llm_request

    assert_same(found, expected["truncated"])
    assert 0 < llm_request.pinned_peak <= 2 * row
    standin.setattr("mrl.engines.trtllm.requests.virtual_memory", lambda: SimpleNamespace(available=row))
    with pytest.raises(UserError, match="logits of one response take .* of host memory"):
        sampled(tmp_path, weights, "truncated")


def test_an_evaluation_asks_for_no_logits(flavour, tmp_path, weights, expected):
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        asked = []
        ask = engine._requests.submit
        engine._requests.submit = lambda prompts, given: asked.extend(given) or ask(prompts, given)
        engine.generate(PROMPTS, SAMPLING)
        asked.clear()
        for name in ("truncated", "greedy"):
            found = engine.generate(PROMPTS, SETTINGS[name])
            assert [r.response_ids for r in found] == [r.response_ids for r in expected[name]]
        assert not any(given.get("return_generation_logits") for given in asked)


def test_a_sampler_without_min_p_is_refused_where_it_is_asked_for(monkeypatch, tmp_path, weights):
    monkeypatch.setenv(FLAVOUR_VARIABLE, "1.3")
    monkeypatch.setenv(FAULTS, "no_min_p")
    monkeypatch.syspath_prepend(str(STANDIN))
    forget()
    refusal = "rollout.min_p.*TorchSampler of TensorRT-LLM 1.3.* ignores it"
    with pytest.raises(UserError, match=refusal):
        sampled(tmp_path, weights, "min_p")
    with tiny.engine(tmp_path) as engine:
        tiny.refit(engine, weights)
        with pytest.raises(UserError, match=refusal):
            engine.generate(PROMPTS, SETTINGS["min_p"])
    forget()


def test_without_logits_a_setting_that_needs_them_is_refused_with_choices(standin, tmp_path, weights):
    standin.setenv(FAULTS, "no_logits scores=raw")
    assert len(sampled(tmp_path, weights, "plain")[0]) == 9  # temperature 1: every distribution is the same
    with pytest.raises(UserError, match=r"temperature=0.7.*Set temperature=1.*bypass_mode=false"):
        sampled(tmp_path, weights, "tempered")
    with tiny.engine(
        tmp_path, **tiny.trains_with(SETTINGS["tempered"]), trains_on_logprobs=False
    ) as engine:  # second choice
        tiny.refit(engine, weights)
        assert len(engine.generate(PROMPTS, SETTINGS["tempered"])) == 9


def test_a_sampled_token_without_a_logprob_is_never_given_anothers(standin, tmp_path, weights, expected):
    standin.setenv(FAULTS, "top1")
    found, engine = sampled(tmp_path, weights, "truncated")  # which goes by logits anyway
    assert_same(found, expected["truncated"])
    assert engine._verdict.scores is Scores.UNKNOWN
    with pytest.raises(UserError, match="score nothing that could be recognised"):
        sampled(tmp_path, weights, "plain")


def test_a_token_that_truncation_drops_is_an_error(standin, tmp_path, weights):
    standin.setenv(FAULTS, "min_p_ignored")
    with tiny.engine(tmp_path, min_p=0.5) as engine:
        tiny.refit(engine, weights)
        with pytest.raises(RuntimeError, match=r"prompt 0, sample \d: response token \d .*is outside .*min_p=0.5"):
            engine.generate(PROMPTS, replace(SAMPLING, min_p=0.5))


LOGITS = torch.tensor([[3.0, 1.0, 0.0, -2.0]]).repeat(3, 1) * torch.tensor([[1.0], [0.7], [1.3]])
TOKENS = [0, 1, 0]


@pytest.mark.parametrize("scale, expected", [(0.0, Scores.UNVERIFIED), (1.0, Scores.TEMPERED)])
def test_the_probe_decides_only_where_the_distributions_differ(scale, expected):
    logits = LOGITS * scale

    def answers(change=0.0, **missing):
        found = []
        for under in (HIGH_TEMPERATURE_PROBE, TRUNCATED_PROBE):
            tempered = score(logits, torch.tensor(TOKENS), replace(under, top_p=1.0)).tolist()
            found.append(
                replace(ProbeResponse(under, TOKENS, [value + change for value in tempered], logits), **missing)
            )
        return found

    assert logprob_probe.identify_distribution(answers()) is expected
    assert logprob_probe.identify_distribution(answers(change=-0.3)) is Scores.UNKNOWN
    assert logprob_probe.identify_distribution(answers(logits_TV=None)) is Scores.UNVERIFIED
    assert logprob_probe.identify_distribution(answers(reported=None)) is Scores.UNKNOWN


def test_a_temperature_alone_does_not_tell_what_is_cut():
    hot = ProbeResponse(
        HIGH_TEMPERATURE_PROBE, TOKENS, score(LOGITS, torch.tensor(TOKENS), HIGH_TEMPERATURE_PROBE).tolist(), LOGITS
    )
    assert logprob_probe.identify_distribution([hot]) is Scores.UNVERIFIED


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
    assert {each for each in every if logprob_probe.is_exact(scores, each)} == set(EXACT[scores])
