"""Arguments of `rollout.engine_kwargs.trtllm` reach TensorRT-LLM's `LLM`, or are refused with the reason."""

from dataclasses import fields
from functools import partial

import pytest
import torch
import yaml

from mrl.commands.from_verl.translate import translate
from mrl.config.config import RolloutConfig, load
from mrl.config.verl_keys.translated_keys import ENGINE_ARGUMENTS
from mrl.engines.trtllm import llm_fields
from mrl.engines.trtllm.engine_kwargs import expert_refusals, refusals
from mrl.engines.trtllm.features import find
from mrl.engines.trtllm.llm_fields import DERIVED, FREE, REFUSED, SECTIONS, TABLE, markdown
from mrl.engines.trtllm.llm_runtime import arguments
from mrl.errors import UserError
from mrl.trainer.validation import validate
from tests.engines.trtllm import tiny
from tests.engines.trtllm.signature import signatures
from tests.resharding.archs import small
from tests.source import ROOT

CONFIG = str(ROOT / "configs" / "quickstart.yaml")
BASE = ("rollout.name=trtllm", "rollout.prompt_length=16", "rollout.response_length=4")
KEY = "rollout.engine_kwargs.trtllm"
ALIASES = {"_mpi_session", "executor_cls"}
"""Arguments of `LLM` that are no fields."""

HANDED_ON = {
    "attn_backend": ("FLASHINFER", lambda a: a.attn_backend == "FLASHINFER"),
    "batch_wait_timeout_ms": (2, lambda a: a.batch_wait_timeout_ms == 2),
    "kv_cache_config": (
        {"dtype": "fp8"},
        lambda a: (a.kv_cache_config.dtype, a.kv_cache_config.free_gpu_memory_fraction) == ("fp8", 0.5)
        and a.kv_cache_config.enable_block_reuse,
    ),
    "scheduler_config": (
        {"context_chunking_policy": "EQUAL_PROGRESS", "capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
        lambda a: a.scheduler_config.context_chunking_policy.name == "EQUAL_PROGRESS"
        and a.scheduler_config.capacity_scheduler_policy.name == "GUARANTEED_NO_EVICT",
    ),
    "cuda_graph_config": (
        {"batch_sizes": [1, 4, 16]},
        lambda a: (a.cuda_graph_config.batch_sizes, a.cuda_graph_config.max_batch_size) == ([1, 4, 16], 0)
        and a.cuda_graph_config.enable_padding,
    ),
    "moe_config": ({"backend": "TRITON"}, lambda a: a.moe_config.backend == "TRITON"),
    "speculative_config": (
        {"decoding_type": "NGram", "max_draft_len": 3},
        lambda a: type(a.speculative_config).__name__ == "NGramDecodingConfig"
        and a.speculative_config.max_draft_len == 3,
    ),
    "torch_compile_config": ({"max_num_streams": 2}, lambda a: a.torch_compile_config == {"max_num_streams": 2}),
}  # fmt: skip

MISTAKES = {
    "near name": ("{attn_backnd: TRTLLM}", r"unknown to TensorRT-LLM 1\.2\. Did you mean 'attn_backend'"),
    "near name inside": ("{kv_cache_config: {dtyp: fp8}}", r"Did you mean 'kv_cache_config\.dtype'"),
    "of a section": ("{batch_sizes: [1]}", r"Did you mean 'cuda_graph_config\.batch_sizes'"),
    "no such thing": ("{zzz: 1}", "Look its arguments up"),
    "ranks": ("{tensor_parallel_size: 2}", r"refused: set rollout\.tensor_model_parallel_size"),
    "length": ("{max_seq_len: 4096}", r"refused: set rollout\.max_model_len"),
    "model": ("{model: other}", r"refused: set model\.path"),
    "weights": ("{load_format: auto}", "it is `dummy`: the first weight sync fills the weights"),
    "sleep": ("{sleep_config: {}}", r"set rollout\.free_cache_engine"),
    "memory": ("{kv_cache_config: {free_gpu_memory_fraction: 0.9}}", r"set rollout\.gpu_memory_utilization"),
    "prefixes": ("{kv_cache_config: {enable_block_reuse: false}}", r"set rollout\.enable_prefix_caching"),
    "window": ("{kv_cache_config: {max_attention_window: [64]}}", "full attention"),
    "type": ("{enable_autotuner: 3}", r"enable_autotuner=3: expected true or false"),
    "attention": ("{attn_backend: flashinfr}", "one of TRTLLM, FLASHINFER, VANILLA. Did you mean 'FLASHINFER'"),
    "other attention": ("{attn_backend: FLASHINFER_STAR_ATTENTION}", "expected one of TRTLLM, FLASHINFER, VANILLA"),
    "number for a text": ("{attn_backend: 3}", "attn_backend=3: expected one of TRTLLM"),
    "dtype of the cache": ("{kv_cache_config: {dtype: bfloat16}}", "expected one of auto, fp8, nvfp4"),
    "experts": ("{moe_config: {backend: CUTLAS}}", "expected one of AUTO, CUTLASS, .* Did you mean 'CUTLASS'"),
    "no block": ("{kv_cache_config: {tokens_per_block: 0}}", "tokens_per_block=0: expected at least 1"),
    "below zero": ("{batch_wait_timeout_iters: -1}", "batch_wait_timeout_iters=-1: expected at least 0"),
    "empty graph": ("{cuda_graph_config: {batch_sizes: [8, 0]}}", "expected numbers of at least 1"),
    "policy": ("{scheduler_config: {capacity_scheduler_policy: ALL}}", "expected one of MAX_UTILIZATION, GUARANTEED"),
    "section": ("{kv_cache_config: fp8}", "kv_cache_config=fp8: expected a mapping of .*dtype"),
    "graphs": ("{cuda_graph_config: null}", r"rollout\.enforce_eager turns CUDA graphs on or off"),
    "two sizes": ("{cuda_graph_config: {batch_sizes: [1], max_batch_size: 2}}", "set either"),
    "drafter": ("{speculative_config: {decoding_type: Eagle}}", "expected NGram or AUTO.* none for other drafters"),
    "no drafter": ("{speculative_config: {max_draft_len: 3}}", "decoding_type=null: expected"),
    "text": ("text", "is text, expected a mapping"),
}  # fmt: skip


def test_every_field_of_the_known_version_is_in_one_class():
    known = {item["name"] for item in signatures()["tensorrt_llm.llmapi.llm_args.TorchLlmArgs"]["params"]}
    for name, kind in SECTIONS.items():
        known |= {f"{name}.{item['name']}" for item in signatures()[f"tensorrt_llm.llmapi.llm_args.{kind}"]["params"]}
    named = [name for rows in (*FREE.values(), *DERIVED.values(), *REFUSED.values()) for name in rows.split()]
    assert {*named, *SECTIONS} == known | ALIASES
    assert len(named) == len(set(named)) == len(TABLE) > 100 and not set(named) & set(SECTIONS)


def test_every_reason_names_a_key_of_mrls_that_there_is():
    own = {item.name for item in fields(RolloutConfig)}
    said = [word.strip(",:;.") for why in (*DERIVED, *REFUSED) for word in why.split() if word.startswith("rollout.")]
    assert said and {word.removeprefix("rollout.") for word in said} <= own


def test_the_page_has_the_table():
    assert markdown() in (ROOT / "mrl" / "docs" / "trtllm.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HANDED_ON)
def test_an_argument_reaches_llm_beside_what_mrl_derives(flavour, tmp_path, name):
    value, holds = HANDED_ON[name]
    given = tiny.rollout(free_cache_engine=False, engine_kwargs={"trtllm": {name: value}})
    assert list(refusals(given)) == []
    with tiny.engine(tmp_path, free_cache_engine=False, engine_kwargs={"trtllm": {name: value}}) as engine:
        assert holds(engine._runtime.llm.args)


def start(**kwargs):
    config = tiny.rollout(engine_kwargs={"trtllm": kwargs})
    return arguments(config, tiny.ARCH, torch.float32, find(), trains_on_logprobs=True)


def test_what_the_installed_version_lacks_or_refuses_is_told_when_the_engine_starts(standin):
    for kwargs, why in (
        ({"attn_backnd": "TRTLLM"}, "attn_backnd is unknown to TensorRT-LLM 1.2.*Did you mean 'attn_backend'"),
        ({"kv_cache_config": {"dtyp": "fp8"}}, "Did you mean 'kv_cache_config.dtype'"),
        ({"moe_config": {"backend": "NONE"}}, "TensorRT-LLM 1.2.* refuses .*moe_config=.*'NONE' is none of its values"),
        ({"speculative_config": {"decoding_type": "AUTO"}}, "refuses .*speculative_config=.*Invalid decoding type"),
        ({"cuda_graph_config": {"batch_sizes": [1]}}, "CUDA graphs while its engine sleeps.*free_cache_engine=false"),
    ):
        with pytest.raises(UserError, match=why):
            start(**kwargs)


def test_a_field_that_only_the_installed_version_has_is_left_to_it(standin):
    given = tiny.rollout(engine_kwargs={"trtllm": {"of_a_newer_version": 1}})
    assert list(refusals(given)) == []
    with pytest.raises(UserError, match="of_a_newer_version is unknown"):
        start(of_a_newer_version=1)


SOURCE = """
class Policy(StrEnum, metaclass=Mirror):
    FIRST = "FIRST"
    _order = 3

class Base(Strict):
    attn_backend: Optional[Literal["TRTLLM", "OF_ITS_OWN"]] = Field(default="TRTLLM", description="VANILLA")

class TorchLlmArgs(Base):
    other: str = "x"

class MoeConfig(Strict):
    backend: typing.Literal["CUTLASS", "ONLY_THIS"] = Field(default="CUTLASS")

class SchedulerConfig(Strict):
    capacity_scheduler_policy: Policy = Field(default=Policy.FIRST)

class KvCacheConfig(Strict):
    dtype: str = Field(default="auto")
"""


def test_the_installed_versions_own_texts_go_before_the_known_ones(tmp_path, monkeypatch):
    for folder in (tmp_path / "tensorrt_llm", tmp_path / "tensorrt_llm" / "llmapi"):
        folder.mkdir()
        (folder / "__init__.py").write_text("raise RuntimeError('it was imported')")
    (tmp_path / "tensorrt_llm" / "llmapi" / "llm_args.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))

    def told(**given):
        return " ".join(refusals(tiny.rollout(engine_kwargs={"trtllm": given})))

    assert told(attn_backend="OF_ITS_OWN", moe_config={"backend": "ONLY_THIS"}) == ""
    assert "expected one of TRTLLM, OF_ITS_OWN." in told(attn_backend="VANILLA")
    assert "expected one of CUTLASS, ONLY_THIS. Did you mean 'ONLY_THIS'?" in told(moe_config={"backend": "ONLYTHIS"})
    assert "expected one of FIRST." in told(scheduler_config={"capacity_scheduler_policy": "MAX_UTILIZATION"})
    assert "expected one of auto, fp8, nvfp4." in told(kv_cache_config={"dtype": "int8"})


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_refused_before_anything_starts(name):
    given, why = MISTAKES[name]
    check = partial(validate.check_config, world_size=2)
    check(load(CONFIG, [*BASE, f"{KEY}={{attn_backend: FLASHINFER}}"]))
    with pytest.raises(UserError, match=f"{KEY}.*{why}"):
        check(load(CONFIG, [*BASE, f"{KEY}={given}"]))


def test_arguments_of_an_engine_that_is_not_the_runs_are_refused():
    check = partial(validate.check_config, world_size=2)
    with pytest.raises(UserError, match=r"engine_kwargs\.sglang is refused: only the engines trtllm and vllm take"):
        check(load(CONFIG, [*BASE, "rollout.engine_kwargs.sglang={swap_space: 4}"]))
    for engine in ("native", "trtllm_engine"):
        with pytest.raises(UserError, match=f"{KEY} is refused with rollout.name={engine}: nothing would read it"):
            check(load(CONFIG, [*BASE, f"rollout.name={engine}", f"{KEY}.attn_backend=FLASHINFER"]))
    check(load(CONFIG, [*BASE, "rollout.name=native", f"{KEY}={{}}"]))


def test_graphs_are_either_sized_or_left_out_and_experts_need_a_model_that_has_them():
    sized = tiny.rollout(enforce_eager=True, engine_kwargs={"trtllm": {"cuda_graph_config": {"batch_sizes": [1]}}})
    assert "Set it to false" in next(refusals(sized))
    given = load(CONFIG, [*BASE, f"{KEY}.moe_config.backend=TRITON"])
    assert "no experts" in next(expert_refusals(given.rollout))
    with pytest.raises(UserError, match="moe_config is refused: it would have no effect"):
        validate.check(given, small("qwen2_tiny"), 1, 14)


def test_verls_arguments_of_tensorrt_llm_are_taken_over():
    prefix = ENGINE_ARGUMENTS["trtllm"]
    given = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.name": "trtllm",
        f"{prefix}attn_backend": "FLASHINFER",
        f"{prefix}kv_cache_config.dtype": "fp8",
        f"{prefix}speculative_config.decoding_type": "NGram",
        f"{prefix}max_seq_len": 4096,
        f"{prefix}enable_attention_dp": True,
        f"{prefix}zzz": 1,
    }
    found = translate(given)
    passed = {"attn_backend": "FLASHINFER", "kv_cache_config": {"dtype": "fp8"}}
    passed |= {"speculative_config": {"decoding_type": "NGram"}}
    assert yaml.safe_load(found.text)["rollout"]["engine_kwargs"] == {"trtllm": passed}
    told = "\n".join(found.missing)
    assert f"{prefix}enable_attention_dp=true: every rank" in told.replace("True", "true")
    assert f"{prefix}zzz=1: TensorRT-LLM {llm_fields.VERSION} has no such argument" in told
    assert any(one.startswith(f"{prefix}max_seq_len: set rollout.max_model_len") for one in found.moot)
    other = translate({**given, "actor_rollout_ref.rollout.name": "vllm"})
    assert (found.via, other.via) == ("mpirun", "torchrun")  # replicas of two ranks, verl's default
    assert "engine_kwargs" not in other.text and any("not the run's" in one for one in other.moot)
