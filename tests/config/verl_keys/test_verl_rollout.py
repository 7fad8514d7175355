"""Every field of verl's RolloutConfig acts under a name of mrl's, or is refused with the reason."""

import json

import pytest

from mrl.commands.from_verl.translate import translate
from mrl.config.config import Config, load
from mrl.config.keys import dotted_keys
from mrl.config.verl_keys.foreign_names import key_hint
from mrl.config.verl_keys.translated_keys import ROLLOUT, is_harmless, verdict
from mrl.config.verl_keys.verl_rollout import ABSENT, FIELDS, MAPS, NEEDLESS
from mrl.errors import UserError
from tests.source import ROOT

VERL = json.loads((ROOT / "tests" / "config" / "verl_keys" / "verl_rollout-0.9.1.json").read_text())
"""Field -> default, of `verl.workers.config.RolloutConfig` 0.9.1 with its nested dataclasses opened."""

IN_YAML_ONLY = {"engine_kwargs.vllm", "engine_kwargs.sglang", "engine_kwargs.trtllm", "mtp"}
"""Of verl's config files, beside its dataclass."""

NAMED = {
    "mode": ("async", "`train.mode=async` samples concurrently"),
    "data_parallel_size": (2, "the number of replicas follows from"),
    "log_prob_micro_batch_size": (4, "`actor.max_tokens_per_microbatch`"),
    "log_prob_micro_batch_size_per_gpu": (4, "`actor.max_tokens_per_microbatch`"),
    "log_prob_use_dynamic_bsz": ("true", "`actor.max_tokens_per_microbatch`"),
    "log_prob_max_token_len_per_gpu": (4096, "`actor.max_tokens_per_microbatch`"),
    "multi_turn.function_tool_path": ("tools.py", "`rollout.agent.environment`"),
    "agent.default_agent_loop": ("tool_agent", "`rollout.agent.environment`"),
    "server": ("null", "no HTTP server"),
    "server.timeout": (60, "no HTTP server"),
    "enable_sleep_mode": ("false", "`rollout.free_cache_engine`"),
    "load_format": ("auto", "weight sync fills them before the first sample"),
    "quantization_config_file": ("fp8.json", "`rollout.quantization`"),
}


def test_the_table_has_every_field_of_verls():
    assert set(VERL) - set(FIELDS) == set()
    assert set(FIELDS) - set(VERL) == IN_YAML_ONLY
    assert len(FIELDS) == len({*MAPS}) + len({*NEEDLESS}) + len({*ABSENT}) == len(set(FIELDS))


@pytest.mark.parametrize("field", VERL)
def test_a_field_acts_or_is_answered_in_a_config_with_the_reason(field):
    found = verdict(f"{ROLLOUT}{field}")
    if found.kind == "maps":
        assert found.to in dotted_keys(Config)
    else:
        assert found.text in key_hint(f"rollout.{field}")
        assert found.kind == "moot" or is_harmless(f"{ROLLOUT}{field}", VERL[field])


def test_defaults_of_the_dataclass_list_nothing():
    given = {f"{ROLLOUT}{field}": value for field, value in VERL.items() if value != "???"}
    told = translate({"algorithm.adv_estimator": "grpo", **given}).missing
    assert [one for one in told if ROLLOUT in one] == []


@pytest.mark.parametrize("field", NAMED)
def test_a_setting_of_it_in_a_config_is_refused_with_what_acts_in_its_place(field):
    value, why = NAMED[field]
    with pytest.raises(UserError) as caught:
        load(ROOT / "configs" / "quickstart.yaml", [f"rollout.{field}={value}"])
    assert f"'rollout.{field}" in str(caught.value) and why in str(caught.value)


def test_ranks_that_share_an_expert_are_those_that_verl_means():
    key = f"{ROLLOUT}moe_tensor_parallel_size"
    base = {"algorithm.adv_estimator": "grpo"}
    assert "moe_tensor_parallel_size" not in translate({**base, key: 1}).text
    assert "moe_tensor_parallel_size: 2" in translate({**base, key: 2}).text


def test_what_mrl_always_does_is_not_passed_on_and_what_it_never_does_is_listed():
    given = {f"{ROLLOUT}calculate_log_probs": False, f"{ROLLOUT}repetition_penalty": 1.05}
    found = translate({"algorithm.adv_estimator": "grpo", **given})
    assert "log_probs" not in found.text and "penalty" not in found.text
    assert f"{ROLLOUT}calculate_log_probs: always on: mrl records them while sampling" in found.moot
    assert [one for one in found.missing if "repetition_penalty=1.05: must be 1" in one]


def test_fp8_means_the_same_blocks_and_other_quantisation_is_told():
    base = {"algorithm.adv_estimator": "grpo"}
    assert "quantization: fp8" in translate({**base, f"{ROLLOUT}quantization": "fp8"}).text
    found = translate({**base, f"{ROLLOUT}quantization": "torchao"})
    assert "quantization: " not in found.text.replace("rollout.quantization", "")
    assert any("quantization" in told and "mrl has None, fp8" in told for told in found.missing)
