"""Each field of `rollout` does what the page says of vLLM, or is refused; vLLM itself is not needed for that."""

from dataclasses import fields, replace

import pytest

from mrl.config import Config, RolloutConfig, ValConfig, load
from mrl.engines.base import SamplingConfig
from mrl.engines.vllm import contract
from mrl.engines.vllm.engine_fields import DERIVED, NAMES
from mrl.engines.vllm.fields import TABLE, markdown, refusals
from mrl.engines.vllm.sampling import arguments
from mrl.errors import UserError
from mrl.preflight import preflight
from mrl.types import Prompt
from tests.source import ROOT

PROMPT = Prompt(uid=3, prompt_ids=(1, 2), text="")
VLLM = RolloutConfig(name="vllm")


def test_the_table_has_every_field_and_the_page_has_the_table():
    assert list(TABLE) == [item.name for item in fields(RolloutConfig)]
    assert markdown() in (ROOT / "mrl" / "docs" / "vllm.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"pipeline_model_parallel_size": 2}, "rollout.pipeline_model_parallel_size=2 is refused"),
        ({"quantization": "fp8"}, "would pack what a refit writes into"),
        ({"expert_parallel_size": 2, "tensor_model_parallel_size": 4}, "either cuts every expert"),
        ({"moe_tensor_parallel_size": 3}, "it follows from"),
        ({"enable_rollout_routing_replay": True}, "returns experts only"),
        ({"do_sample": False, "n": 1, "temperature": 0.5}, "greedy responses are scored"),
        ({"min_p": 0.1, "top_p": 0.9}, "rollout.min_p=0.1 with rollout.top_p=0.9"),
        ({"val_kwargs": ValConfig(min_p=0.1, top_p=0.9)}, "rollout.val_kwargs.min_p=0.1"),
    ],
    ids=str,
)
def test_what_vllm_cannot_do_is_refused(changes, said):
    assert any(said in message for message in refusals(replace(VLLM, **changes)))


def test_a_plain_run_is_not_refused():
    assert list(refusals(VLLM)) == list(refusals(replace(VLLM, min_p=0.1))) == []
    assert list(refusals(replace(VLLM, name="native", quantization="fp8"))) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vllm": {"dtype": "float16"}}, "rollout.engine_kwargs.vllm.dtype is refused: set rollout.dtype"),
        ({"vllm": {"speculative_config": {"method": "ngram"}}}, "of drafted tokens"),
        ({"vllm": 3}, "expected a mapping such as {attention_backend: FLASH_ATTN}"),
        ({"trtllm": {"attn_backend": "TRTLLM"}}, "is refused with rollout.name=vllm: nothing would read it"),
        ({"sglang": {"x": 1}}, "only the engines trtllm and vllm take arguments"),
    ],
    ids=str,
)
def test_arguments_of_its_own_that_are_refused(given, said):
    config = load(ROOT / "configs" / "quickstart.yaml", [])
    config = replace(config, rollout=replace(config.rollout, name="vllm", engine_kwargs=given))
    with pytest.raises(UserError) as caught:
        preflight.check_config(config, 1)
    assert said in str(caught.value)


def test_an_unknown_argument_is_told_with_the_nearest(monkeypatch):
    from mrl.engines.vllm import passed

    monkeypatch.setattr(passed.importlib.util, "find_spec", lambda name: None)
    (message,) = passed.refusals(replace(VLLM, engine_kwargs={"vllm": {"kv_cache_dtyp": "fp8"}}))
    assert "is unknown to vLLM 0.32" in message and "Did you mean 'kv_cache_dtype'?" in message


def test_every_reason_is_of_an_argument_and_names_a_key_that_there_is():
    assert DERIVED.keys() <= NAMES
    keys = {f"rollout.{item.name}" for item in fields(RolloutConfig)} | {
        f"run.{item.name}" for item in fields(Config().run)
    }
    for reason in DERIVED.values():
        for word in reason.replace(",", " ").replace(";", " ").split():
            if word.startswith(("rollout.", "run.")):
                assert word in keys, word


SAMPLE = {
    "temperature": ({"temperature": 0.5}, 0.5),
    "top_k": ({"top_k": 7}, 7),
    "top_p": ({"top_p": 0.8}, 0.8),
    "min_p": ({"min_p": 0.2}, 0.2),
    "max_tokens": ({}, 9),
    "stop_token_ids": ({"stop_token_ids": (5, 6)}, [5, 6]),
}


@pytest.mark.parametrize("field", SAMPLE)
def test_a_field_of_sampling_reaches_sampling_params(field):
    changes, value = SAMPLE[field]
    assert arguments(SamplingConfig(n=1, max_tokens=9, **changes), PROMPT, 0)[field] == value


def test_what_every_request_says():
    plain = SamplingConfig(n=4, max_tokens=9, stop_token_ids=(5,))
    asked = arguments(plain, PROMPT, 0)
    assert asked["top_k"] == 0 and asked["ignore_eos"] and asked["logprobs"] == 0 and not asked["detokenize"]
    assert arguments(replace(plain, ignore_eos=True), PROMPT, 0)["stop_token_ids"] == []
    assert arguments(replace(plain, greedy=True, top_p=0.5), PROMPT, 0)["temperature"] == 0.0
    assert len({arguments(plain, PROMPT, index)["seed"] for index in range(4)}) == 4


def test_the_probe_believes_the_contract_only():
    import torch

    plain = torch.randn(500, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(0)
    contract.check(plain, contract.expected(plain))
    for other in (plain, (plain / contract.CUT.temperature).log_softmax(0), plain.roll(1)):
        with pytest.raises(RuntimeError, match="not those of what it samples from"):
            contract.check(plain, other)
