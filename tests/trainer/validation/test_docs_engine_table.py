"""Each field of `rollout` in each engine is used, passed on or refused as its declaration and the page say."""

import ast
import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from mrl.checkpoint.formats.trtllm_config import TrtllmConfig, to_json
from mrl.config import registry
from mrl.config.config import RolloutConfig
from mrl.config.keys import dotted_keys
from mrl.engines._field_support import OTHER_ENGINE, Refusal, value_of
from mrl.engines.base import SamplingConfig
from mrl.engines.trtllm import llm_fields
from mrl.engines.trtllm.built_fields import FITS, SAME
from mrl.engines.trtllm.engine_dir import wanted_engine
from mrl.engines.vllm import engine_fields, sampling
from mrl.errors import UserError
from mrl.models.presets import arch_from_preset
from mrl.resharding.trtllm import TrtllmMapping
from mrl.trainer.validation.docs_engine_table import page, uses
from mrl.trainer.validation.ranges import FIXED
from mrl.trainer.validation.validate import check
from mrl.types import Prompt
from tests.engines.trtllm.signature import signatures
from tests.source import PACKAGE, ROOT, tree_of
from tests.trainer.validation.runs import changed, make

ENGINES = registry.names("engines")
KEYS = list(dotted_keys(RolloutConfig))
BUILT = "trtllm_engine"
DENSE, MIXTURE = arch_from_preset("qwen2_tiny", {}, None), arch_from_preset("qwen3_moe_tiny", {}, None)
BLOCKS = arch_from_preset(
    "qwen2_tiny",
    {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2},
    None,
)
"""Its matrices are whole blocks of FP8."""
WORLD_SIZE = 4


@dataclass(frozen=True)
class Case:
    """A field, a value of it, the engines that refuse it, what it cannot do without, and the model."""

    key: str
    value: Any
    refused_by: str = ""
    given: tuple[str, ...] = ()
    arch: Any = DENSE


EVALUATED = ("rollout.val_kwargs.do_sample=true",)
GREEDY = ("rollout.n=1", "algorithm.singleton_group=reward")
EPISODES = ("rollout.multi_turn.enable=true", "rollout.agent.environment=guess")
REPLAYED = ("actor.router_replay=rollout",)
OVER = ("rollout.over_sample_rate=0.5", "train.max_off_policy_steps=1")
DRAFTS = ("rollout.speculative.method=ngram",)
WHOLE = "trtllm trtllm_engine vllm"
TWO = ("rollout.tensor_model_parallel_size=2",)
CASES = [
    Case("engine_dir", "engines", "native trtllm vllm"),
    Case("engine_dir", None, "trtllm_engine"),
    Case("n", 3),
    Case("temperature", 0.5),
    Case("temperature", 0.005, "vllm"),
    Case("top_k", 5),
    Case("top_p", 0.9),
    Case("min_p", 0.1),
    Case("min_p", 0.1, "", ("rollout.top_p=0.9",)),
    Case("do_sample", False, "", GREEDY),
    Case("do_sample", False, "vllm", (*GREEDY, "rollout.temperature=0.5")),
    Case("ignore_eos", True),
    Case("stop", ["x"]),
    Case("repetition_penalty", 1.1),
    Case("prompt_length", 10),
    Case("prompt_length", 20, "trtllm_engine"),
    Case("response_length", 4),
    Case("max_model_len", 24),
    Case("max_model_len", 40, "trtllm_engine"),
    Case("dtype", "float32", "trtllm_engine"),
    Case("quantization", "fp8", "trtllm_engine", arch=BLOCKS),
    Case("quantization", "fp8", "trtllm_engine vllm", ("run.device=cpu",), BLOCKS),
    Case("quantization", "fp8_per_tensor", "trtllm trtllm_engine vllm", arch=BLOCKS),
    Case("tensor_model_parallel_size", 2, "trtllm_engine"),
    Case("num_ranks", 2),
    Case("nnodes", 1, "", ("rollout.n_gpus_per_node=2",)),
    Case("n_gpus_per_node", 2, "", ("rollout.nnodes=1",)),
    Case("over_sample_rate", 0.5, WHOLE),
    Case("over_age", "drop", WHOLE, OVER),
    Case("mask_offpolicy", True, WHOLE, OVER),
    Case("pipeline_model_parallel_size", 2, "native trtllm trtllm_engine vllm"),
    Case("expert_parallel_size", 2, "trtllm_engine", TWO, MIXTURE),
    Case("expert_parallel_size", 2, "trtllm_engine vllm", (*TWO, "run.device=cpu"), MIXTURE),
    Case("expert_parallel_size", 2, "trtllm_engine vllm", ("rollout.tensor_model_parallel_size=4",), MIXTURE),
    Case("moe_tensor_parallel_size", 2, "", TWO, MIXTURE),
    Case("max_num_seqs", 128),
    Case("max_num_seqs", 512, "trtllm_engine"),
    Case("max_num_batched_tokens", 4096),
    Case("max_num_batched_tokens", 16384, "trtllm_engine"),
    Case("max_num_batched_tokens", 32, "vllm", ("rollout.max_num_seqs=33",)),
    Case("enable_chunked_prefill", False),
    Case("enable_chunked_prefill", False, "vllm", ("rollout.max_num_batched_tokens=18", "rollout.max_num_seqs=8")),
    Case(
        "enable_chunked_prefill", True, "trtllm_engine", ("rollout.max_num_batched_tokens=8", "rollout.max_num_seqs=8")
    ),
    Case("enable_prefix_caching", False),
    Case("enable_prefix_caching", True, "trtllm_engine"),
    Case("true_on_policy", True, WHOLE),
    Case("gpu_memory_utilization", 0.3),
    Case("free_cache_engine", False),
    Case("enforce_eager", True),
    Case("enforce_eager", False, "trtllm_engine"),
    Case("calculate_log_probs", False),
    Case("enable_rollout_routing_replay", True, "trtllm trtllm_engine", REPLAYED, MIXTURE),
    Case("engine_kwargs", {"trtllm": {"attn_backend": "FLASHINFER"}}, "native trtllm_engine vllm"),
    Case("engine_kwargs", {"vllm": {"attention_backend": "FLASH_ATTN"}}, "native trtllm trtllm_engine"),
    Case("val_kwargs.n", 3, "", EVALUATED),
    Case("val_kwargs.do_sample", True),
    Case("val_kwargs.temperature", 0.5, "", EVALUATED),
    Case("val_kwargs.temperature", 0.005, "vllm", EVALUATED),
    Case("val_kwargs.top_k", 5, "", EVALUATED),
    Case("val_kwargs.top_p", 0.9, "", EVALUATED),
    Case("val_kwargs.min_p", 0.1, "", EVALUATED),
    Case("val_kwargs.min_p", 0.1, "", (*EVALUATED, "rollout.val_kwargs.top_p=0.9")),
    Case("multi_turn.enable", True, BUILT, ("rollout.agent.environment=guess",)),
    *(
        Case(key, value, BUILT, EPISODES)
        for key, value in {
            "multi_turn.max_assistant_turns": 3,
            "multi_turn.max_user_turns": 3,
            "multi_turn.max_parallel_calls": 2,
            "multi_turn.max_tool_response_length": 99,
            "multi_turn.tool_response_truncate_side": "left",
            "multi_turn.format": "llama3_json",
            "multi_turn.tokenization_sanity_check_mode": "disable",
            "agent.environment": "environments.py:Mine",
            "agent.environment_kwargs": {"low": 3},
            "agent.num_workers": 3,
            "agent.time_limit_s": 3.0,
            "agent.memory_limit_mb": 300,
        }.items()
    ),
    Case("checkpoint_engine.update_weights_bucket_megabytes", 64),
    Case("checkpoint_engine.canary", True),
    Case("checkpoint_engine.canary", False),
    Case("speculative.method", "ngram", WHOLE),
    Case("speculative.method", "ngram", f"native {WHOLE}", ("rollout.tensor_model_parallel_size=4",)),
    Case("speculative.num_speculative_tokens", 3, WHOLE, DRAFTS),
    Case("speculative.prompt_lookup_max", 3, WHOLE, DRAFTS),
    Case("speculative.prompt_lookup_min", 3, WHOLE, DRAFTS),
]


def test_every_engine_says_what_becomes_of_every_field():
    for engine in ENGINES:
        fixed = {key.removeprefix("rollout.") for key in FIXED}
        assert {*uses(engine), *fixed} == set(KEYS), engine
        assert not fixed & set(uses(engine))
        assert [key for key, use in uses(engine).items() if not use.words] == []
    assert len(KEYS) > 35 and {case.key for case in CASES} == set(KEYS) - {"name"}


def test_the_page_is_that_of_the_declarations():
    assert (ROOT / "mrl" / "docs" / "engines.md").read_text(encoding="utf-8") == page()


def write_engines(config, arch, folder):
    """Writes the folder of a build that fits a run."""
    wanted = wanted_engine(config, arch)
    mapping = TrtllmMapping(wanted.tp_size, wanted.pp_size, moe_ep_size=wanted.moe_ep_size)
    build = {
        "max_batch_size": wanted.batch_size, "max_input_len": wanted.input_len, "max_seq_len": wanted.seq_len,
        "max_num_tokens": wanted.num_tokens, "use_refit": True, "kv_cache_type": "continuous",
    }  # fmt: skip
    given = to_json(TrtllmConfig(arch, mapping, wanted.dtype))
    told = {"version": "1.2.1", "pretrained_config": given, "build_config": build}
    (folder / "config.json").write_text(json.dumps(told))
    for rank in range(mapping.world_size):
        (folder / f"rank{rank}.engine").touch()


def runs(engine, case, folder):
    """The config with and without the case's value."""
    own = {"enable_prefix_caching": False, "enforce_eager": True, "engine_dir": str(folder)} if engine == BUILT else {}
    config = make(f"rollout.name={engine}", *case.given)
    config = replace(config, rollout=replace(config.rollout, **own))
    return config, changed(config, f"rollout.{case.key}", case.value)


def is_told(case, before, refusal: Refusal) -> bool:
    """Whether a rule outside the declarations refuses a case, as its field's declaration says."""
    was = value_of(before.rollout, case.key)
    if refusal is SAME:
        return case.value != (was or before.model.dtype)
    if refusal is FITS:
        return case.value > (was or before.rollout.max_sequence_length)
    if refusal is OTHER_ENGINE:
        return before.rollout.name not in case.value
    return case.value is None or case.key == "engine_kwargs"


def expected(case, before, after) -> list[Refusal]:
    """What the declarations of the run's engine refuse of a case."""
    declared = uses(after.rollout.name)
    found = [refusal for use in declared.values() for refusal in use.refuses if refusal.holds is not None]
    told = [refusal for refusal in declared[case.key].refuses if refusal.holds is None]
    return [
        *(each for each in found if each.holds(after.rollout) and (not each.cpu_only or after.run.device == "cpu")),
        *(each for each in told if is_told(case, before, each)),
    ]


def is_meant_for(engine, case) -> bool:
    return engine != BUILT or (case.key, case.value) != (
        "engine_dir",
        "engines",
    )  # tests/trainer/validation/test_engine.py


OF_THE_TABLE = [
    pytest.param(engine, case, id=f"{engine}-{case.key}-{index}")
    for engine in ENGINES
    for index, case in enumerate(CASES)
    if f"rollout.{case.key}" not in FIXED and is_meant_for(engine, case)
]


@pytest.mark.parametrize(("engine", "case"), OF_THE_TABLE)
def test_a_value_is_taken_or_refused_as_the_table_says(engine, case, tmp_path):
    before, after = runs(engine, case, tmp_path)
    if engine == BUILT:
        write_engines(before, case.arch, tmp_path)
    reasons = [refusal.why for refusal in expected(case, before, after)]
    assert bool(reasons) == (engine in case.refused_by.split())
    try:
        check(after, case.arch, WORLD_SIZE, 12)
    except UserError as error:
        said = str(error)
        assert reasons, f"refused, and the table does not say so: {said}"
        assert [why for why in reasons if why not in said] == []
        assert said.count(" is refused with ") <= len(reasons), f"told twice: {said}"
    else:
        assert reasons == [], "taken, and the table says that it is refused"


@pytest.mark.parametrize("case", [case for case in CASES if f"rollout.{case.key}" in FIXED], ids=lambda case: case.key)
@pytest.mark.parametrize("engine", ENGINES)
def test_what_takes_one_value_is_refused_with_the_reason_of_the_table(engine, case, tmp_path):
    _, after = runs(engine, case, tmp_path)
    with pytest.raises(UserError, match=FIXED[f"rollout.{case.key}"][1]):
        check(after, case.arch, WORLD_SIZE, 12)


def test_the_cases_meet_every_refusal(tmp_path):
    for engine in ENGINES:
        declared = {refusal for use in uses(engine).values() for refusal in use.refuses}
        met = set()
        for case in CASES:
            if f"rollout.{case.key}" not in FIXED and is_meant_for(engine, case):
                met |= set(expected(case, *runs(engine, case, tmp_path)))
        assert {(refusal.which, refusal.why) for refusal in declared - met} == set(), engine


SHARED = (
    "rollout",
    "resharding",
    "config/config.py",
    "parallel_layout.py",
    "engines/base.py",
    "engines/_prompt_checks.py",
    *(f"trainer/{path.name}" for path in (PACKAGE / "trainer").glob("*.py")),
    "trainer/validation/parallel.py",
    "trainer/validation/rollout_ranks.py",
    "train.py",
)
"""Files and folders of the package that read fields for every engine."""


def attributes(*places: str) -> set[str]:
    """Names that code of these places reads of an object; declarations are no readers."""
    files = [path for place in places for path in (PACKAGE / place).rglob("*.py")]
    files += [PACKAGE / place for place in places if place.endswith(".py")]
    trees = [tree_of(path) for path in files if "fields" not in path.name]
    return {node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


@pytest.mark.parametrize("engine", ENGINES)
def test_what_an_engine_uses_is_read(engine):
    """A field that the table calls used, and no code looks at, would be taken and ignored."""
    room = f"engines/{engine.removesuffix('_engine')}"
    read = attributes(room, *SHARED)
    used = {key.rpartition(".")[2] for key, use in uses(engine).items() if use.does or use.passed_as}
    assert used - read - {"moe_tensor_parallel_size"} == set()  # which follows from two others
    assert len(used) > 20


def test_names_of_the_other_side_are_there():
    def of(name):
        return {item["name"] for item in signatures()[f"tensorrt_llm.{name}"]["params"]}

    asked = sampling.arguments(SamplingConfig(n=1, max_tokens=1), Prompt(uid=0, prompt_ids=(1,), text=""), 0)
    known = {
        "trtllm": llm_fields.TABLE.keys()
        | llm_fields.SECTIONS
        | {f"SamplingParams.{name}" for name in of("sampling_params.SamplingParams")},
        BUILT: {f"SamplingConfig.{name}" for name in of("runtime.SamplingConfig")},
        "vllm": engine_fields.DERIVED.keys() | {f"SamplingParams.{name}" for name in asked},
        "native": set(),
    }
    for engine in ENGINES:
        assert {name for use in uses(engine).values() for name in use.passed_as} - set(known[engine]) == set()
