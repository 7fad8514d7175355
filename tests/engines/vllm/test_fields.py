"""Each field of `rollout` does what the page says of vLLM, or is refused; vLLM itself is not needed for that."""

import os
from dataclasses import fields, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from mrl.commands.cli import main
from mrl.config.config import Config, RolloutConfig, load
from mrl.engines.base import SamplingConfig
from mrl.engines.vllm import engine_kwargs, logprob_probe, package_signature
from mrl.engines.vllm.engine_fields import DERIVED, FREE, IDLE, NAMES, REFUSED, markdown
from mrl.engines.vllm.fields import FIELDS
from mrl.engines.vllm.parameter_views import ParameterViews
from mrl.engines.vllm.process_state import ALWAYS, OWN, process_state_restored
from mrl.engines.vllm.sampling import arguments
from mrl.errors import UserError
from mrl.resharding.layout import StoredTensor
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.validation import validate
from mrl.types import Prompt
from tests.engines.specs import spec_of
from tests.resharding.archs import small
from tests.source import ROOT

PROMPT = Prompt(uid=3, prompt_ids=(1, 2), text="")
VLLM = RolloutConfig(name="vllm")


def test_the_page_has_the_table():
    assert markdown() in (ROOT / "mrl" / "docs" / "vllm.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"vllm": {"dtype": "float16"}}, "rollout.engine_kwargs.vllm.dtype is refused: set rollout.dtype"),
        ({"vllm": {"speculative_config": {"method": "ngram"}}}, "scores drafted tokens"),
        ({"vllm": {"moe_backend": "flashinfer_cutlass"}}, "which weight sync would scramble"),
        ({"vllm": {"logits_processors": []}}, "it would change the sampling distribution"),
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
        validate.check_config(config, 1)
    assert said in str(caught.value)


def test_an_unknown_argument_is_told_with_the_nearest(monkeypatch):
    mistaken = replace(VLLM, engine_kwargs={"vllm": {"kv_cache_dtyp": "fp8", 3: 4}})
    for version in (None, "0.32.1"):
        monkeypatch.setattr(engine_kwargs, "installed", lambda version=version: version)
        message, of_a_number = engine_kwargs.refusals(mistaken)
        assert "is unknown to vLLM 0.32" in message and "Did you mean 'kv_cache_dtype'?" in message
        assert "rollout.engine_kwargs.vllm.3 is unknown" in of_a_number
    monkeypatch.setattr(engine_kwargs, "installed", lambda: "0.33.0")
    assert list(engine_kwargs.refusals(mistaken)) == []


def test_every_argument_is_handed_on_or_refused_with_its_reason():
    idle = [name for names in IDLE.values() for name in names.split()]
    free = [name for names in FREE.values() for name in names.split()]
    assert len(idle) + len(free) + len(DERIVED) == len(NAMES) and set(REFUSED) == {*idle, *DERIVED}
    told = list(engine_kwargs.refusals(replace(VLLM, engine_kwargs={"vllm": dict.fromkeys([*free, *REFUSED], 1)})))
    assert told == [f"rollout.engine_kwargs.vllm.{name} is refused: {why}." for name, why in REFUSED.items()]


@pytest.mark.vllm
def test_every_argument_of_the_installed_version_is_known():
    from vllm.engine.arg_utils import EngineArgs

    assert {item.name for item in fields(EngineArgs) if not item.name.startswith("_")} == set(NAMES)


def test_every_reason_names_a_key_that_there_is():
    keys = {f"rollout.{item.name}" for item in fields(RolloutConfig)} | {
        f"run.{item.name}" for item in fields(Config().run)
    }
    for reason in REFUSED.values():
        for word in reason.replace(",", " ").replace(";", " ").split():
            if word.startswith(("rollout.", "run.")):
                assert word in keys, word


@pytest.mark.parametrize(
    ("version", "said"),
    [
        (None, 'vLLM is not installed here. Install it: pip install -e ".[vllm]"'),
        ("0.31.2+cpu", "vLLM's build for CPUs 0.31.2+cpu is installed here, and mrl was written for 0.32"),
        ("0.32.1+cpu", "vLLM's build for CPUs 0.32.1+cpu"),
    ],
)
def test_a_dry_run_says_which_vllm_is_there(version, said, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(package_signature, "installed", lambda: version)
    monkeypatch.chdir(tmp_path)
    assert main(["train", str(ROOT / "configs" / "quickstart.yaml"), "rollout.name=vllm", "--dry-run"]) == 0
    assert f"engine     vllm: {said}" in capsys.readouterr().out


def test_a_run_without_vllm_ends_before_it_begins(monkeypatch, tmp_path):
    monkeypatch.setattr(package_signature, "installed", lambda: None)
    config = load(ROOT / "configs" / "quickstart.yaml", ["rollout.name=vllm", f"run.output_dir={tmp_path}/run"])
    with pytest.raises(UserError, match="vllm.*not installed. Install it"):
        build_run_plan(config)


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


def test_the_probe_leaves_open_which_of_equal_tokens_at_the_edge_are_kept():
    """Transformers cuts as vLLM does: of equal ones it drops what it can. To drop the likeliest is another cut."""
    generator = torch.Generator().manual_seed(0)
    plain_NV = (15 + 3 * torch.randn(200, 5000, generator=generator)).bfloat16().float().log_softmax(1)
    cut_NV = plain_NV
    for warp in (TemperatureLogitsWarper(logprob_probe.CUT.temperature), TopKLogitsWarper(logprob_probe.CUT.top_k),
                 TopPLogitsWarper(logprob_probe.CUT.top_p)):  # fmt: skip
        cut_NV = warp(None, cut_NV)
    cut_NV = cut_NV.log_softmax(1)
    differ = 0
    for plain, cut in zip(plain_NV, cut_NV, strict=True):
        logprob_probe.check(plain, cut)
        expected = logprob_probe.expected(plain)
        differ += not torch.equal(cut.isfinite(), expected.isfinite())
        if expected[expected.isfinite()].unique().numel() > 1:
            without = cut.index_fill(0, cut.argmax(), -torch.inf).log_softmax(0)
            with pytest.raises(RuntimeError, match="do not belong to the distribution"):
                logprob_probe.check(plain, without)
    assert differ > 10


def test_the_probe_believes_the_contract_only():
    plain = torch.randn(500, generator=torch.Generator().manual_seed(0)).mul(2).log_softmax(0)
    logprob_probe.check(plain, logprob_probe.expected(plain))
    for other in (plain, (plain / logprob_probe.CUT.temperature).log_softmax(0), plain.roll(1)):
        with pytest.raises(RuntimeError, match="do not belong to the distribution"):
            logprob_probe.check(plain, other)


def started(arch, device="cpu", **changes):
    """Arguments of `LLM`."""
    from mrl.engines.vllm.llm_runtime import arguments

    config = replace(VLLM, **{"prompt_length": 5, "response_length": 6, **changes})
    return arguments(spec_of(config, arch, device=torch.device(device)), 1000, "0.32.0")


START = {
    "max_model_len": ({"max_model_len": 40}, 40),
    "max_num_seqs": ({"max_num_seqs": 5}, 5),
    "max_num_batched_tokens": ({"max_num_batched_tokens": 64}, 64),
    "enable_chunked_prefill": ({"enable_chunked_prefill": False}, False),
    "enable_prefix_caching": ({"enable_prefix_caching": False}, False),
    "tensor_parallel_size": ({"tensor_model_parallel_size": 2}, 2),
    "enable_expert_parallel": ({"tensor_model_parallel_size": 2, "expert_parallel_size": 2}, True),
    "kv_cache_dtype": ({"engine_kwargs": {"vllm": {"kv_cache_dtype": "fp8"}}}, "fp8"),
    "kv_cache_memory_bytes": ({}, 1000),
    "dtype": ({}, "float32"),
    "distributed_timeout_seconds": ({}, 60),
    "cpu_distributed_timeout_seconds": ({}, 60),
}


@pytest.mark.vllm
@pytest.mark.parametrize("name", START)
def test_a_field_of_the_start_reaches_the_arguments_of_llm(name):
    changes, value = START[name]
    assert started(small("qwen3_moe_tiny"), **changes)[name] == value


@pytest.mark.vllm
def test_what_a_start_on_a_gpu_says_besides():
    dense, mixed = small("qwen3_tiny"), small("qwen3_moe_tiny")
    assert started(mixed, "cuda:0")["moe_backend"] == "triton"
    assert started(dense, "cuda:0", quantization="fp8")["linear_backend"] == "triton"
    assert "linear_backend" not in started(dense, "cuda:0")
    assert "moe_backend" not in started(dense, "cuda:0") and "moe_backend" not in started(mixed)
    assert started(dense, "cuda:0")["enable_sleep_mode"] and not started(dense)["enable_sleep_mode"]
    assert not started(dense, "cuda:0", free_cache_engine=False)["enable_sleep_mode"]
    assert started(dense, enforce_eager=False)["enforce_eager"]
    assert not started(dense, "cuda:0", enforce_eager=False)["enforce_eager"]


def test_every_name_that_a_field_is_passed_as_has_a_test_here():
    names = {name for use in FIELDS.values() for name in use.passed_as}
    assert names <= {*START, *(f"SamplingParams.{name}" for name in SAMPLE), "enforce_eager", "enable_sleep_mode"}


@pytest.mark.vllm
def test_a_build_for_other_devices_is_refused():
    from mrl.engines.vllm.llm_runtime import check_build

    check_build(torch.device("cpu"), "0.32.0")
    with pytest.raises(UserError, match=r"a build for device 'cpu', but the run uses 'cuda'. .*\.\[vllm\]"):
        check_build(torch.device("cuda:0"), "0.32.0")


@pytest.mark.vllm
def test_what_mrl_makes_is_refused_of_a_user():
    given = started(small("qwen3_moe_tiny"), "cuda:0").keys()
    assert given <= DERIVED.keys()


def test_a_kernel_that_keeps_experts_otherwise_is_refused():
    layer = torch.nn.Module()
    layer.quant_method = SimpleNamespace(unquantized_backend=SimpleNamespace(name="FLASHINFER_CUTLASS"))
    with pytest.raises(UserError, match="with FLASHINFER_CUTLASS, which reorders them"):
        ParameterViews(layer, {}, "0.32.0")
    layer.quant_method.unquantized_backend.name = "TRITON"
    ParameterViews(layer, {}, "0.32.0")


class DeepGemm:
    pass


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ({"fp8_backend": SimpleNamespace(name="DEEPGEMM")}, "multiplies experts with DEEPGEMM"),
        ({"fp8_linear": DeepGemm()}, "multiplies matrices in FP8 with DeepGemm"),
    ],
    ids=["experts", "matrices"],
)
def test_a_kernel_that_keeps_fp8_otherwise_is_refused(method, said):
    layer = torch.nn.Module()
    layer.quant_method = SimpleNamespace(**method)
    with pytest.raises(UserError, match=said):
        ParameterViews(layer, {}, "0.32.0")


def test_a_tensor_of_another_dtype_is_refused():
    model = torch.nn.Linear(4, 3, bias=False)
    with pytest.raises(UserError, match="stores 'weight' in float32, mrl expects bfloat16"):
        ParameterViews(model, {"weight": StoredTensor((3, 4), "bfloat16", ())}, "0.32.0")


def test_what_a_start_changes_is_put_back(monkeypatch):
    for name in (*ALWAYS, *OWN):
        monkeypatch.setenv(name, "0")  # those stay until the test ends
    torch.manual_seed(3)
    before = torch.get_float32_matmul_precision(), torch.get_num_threads(), os.sched_getaffinity(0), os.environ.copy()
    with process_state_restored(torch.device("cpu")):
        torch.set_float32_matmul_precision("medium")
        torch.set_num_threads(before[1] + 1)
        os.sched_setaffinity(0, {min(before[2])})
        os.environ["LOCAL_WORLD_SIZE"] = "7"
        torch.rand(3)
    after = torch.get_float32_matmul_precision(), torch.get_num_threads(), os.sched_getaffinity(0), os.environ.copy()
    changed = {name for name, value in after[3].items() if before[3].get(name) != value}
    assert after[:3] == before[:3] and changed <= {*ALWAYS, *OWN}
    assert torch.initial_seed() == 3 and torch.equal(torch.rand(1), torch.rand(1, generator=torch.manual_seed(3)))
