"""The experts that TensorRT-LLM chose come back with its samples where a version can tell them; else it is refused."""

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from acceptance.checks import FUNCTIONS
from acceptance.fixture import Bench
from acceptance.model import CONFIG, write_random
from acceptance.result import CheckError

from mrl.config.config import load
from mrl.distributed import launch
from mrl.engines.native.engine import NativeEngine
from mrl.errors import UserError
from mrl.megatron import parallel_state
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from mrl.trainer.validation.rollout import sampling_rules
from tests.e2e import runs
from tests.e2e.test_experts import MODELS, REPLAY
from tests.engines.trtllm import tiny
from tests.engines.trtllm.conftest import FAULTS
from tests.engines.trtllm.signature import FLAVOUR_VARIABLE
from tests.engines.trtllm.test_engine import PROMPTS, SAMPLING, assert_same
from tests.engines.trtllm.test_runs import assert_same_run, trained
from tests.ranks import run_ranks
from tests.resharding.archs import small

ARCH = small("qwen3_moe_tiny", vocab_size=14)
RECORD = {"enable_rollout_routing_replay": True}
LONG = replace(SAMPLING, n=2, max_tokens=8)
KWARGS = "rollout.engine_kwargs.trtllm"


@pytest.fixture
def telling(standin):
    """The stand-in of a version that can tell."""
    standin.setenv(FLAVOUR_VARIABLE, "1.3")
    return standin


@pytest.fixture(scope="module")
def weights():
    return tiny.weights(ARCH)


@pytest.fixture(scope="module")
def sampling(weights):
    """Ends some responses early, and not all."""
    free = tiny.native(weights, ARCH).generate(PROMPTS, replace(LONG, ignore_eos=True))
    counts = Counter(token for rollout in free for token in set(rollout.response_ids[:-1]))
    end = next(token for token, count in counts.items() if count < LONG.n * len(PROMPTS))
    return replace(LONG, stop_token_ids=(end,))


@pytest.fixture(scope="module")
def expected(weights, sampling):
    found = tiny.native(weights, ARCH, **RECORD).generate(PROMPTS, sampling)
    assert {rollout.finish_reason for rollout in found} == {"stop", "length"}
    return found


def generated(tmp_path, weights, sampling, **settings):
    with tiny.engine(tmp_path, ARCH, **RECORD, **settings) as engine:
        tiny.refit(engine, weights)
        return engine.generate(PROMPTS, sampling)


def test_each_sample_has_the_experts_of_its_tokens(telling, tmp_path, weights, sampling, expected):
    """Also of one that ended early, for which the overlap scheduler runs a step too many."""
    found = generated(tmp_path, weights, sampling)
    assert_same(found, expected)
    for rollout, other in zip(found, expected, strict=True):
        assert rollout.routed_experts.dtype == torch.int8
        assert torch.equal(rollout.routed_experts, other.routed_experts)


def test_a_stop_string_cuts_them_with_the_response(telling, tmp_path, weights):
    text = tiny.native(weights, ARCH).generate(PROMPTS, LONG)[0].response_ids
    cut = replace(LONG, stop=(tiny.TOKENIZER.decode(text[1:3]),))
    expected = tiny.native(weights, ARCH, **RECORD).generate(PROMPTS, cut)
    assert any(len(rollout.response_ids) < 8 for rollout in expected)
    for rollout, other in zip(generated(tmp_path, weights, cut), expected, strict=True):
        assert torch.equal(rollout.routed_experts, other.routed_experts)


@pytest.mark.parametrize("fault, rows", [("lost_routes=2", slice(0, 2)), ("short_routes=1", slice(-2, None))])
def test_what_is_not_told_is_left_to_the_actor(telling, tmp_path, weights, sampling, expected, fault, rows):
    telling.setenv(FAULTS, fault)
    (found,) = [each for each in generated(tmp_path, weights, sampling) if each.finish_reason == "length"][:1]
    same = (each for each in expected if (each.prompt, each.sample_index) == (found.prompt, found.sample_index))
    wanted = next(same).routed_experts.clone()
    wanted[rows] = -1
    assert torch.equal(found.routed_experts, wanted)


@pytest.mark.parametrize(
    "fault, said", [("no_routes", "did not return the chosen experts"), ("short_routes=3", "returned the experts of ")]
)
def test_samples_without_them_end_the_run(telling, tmp_path, weights, fault, said):
    telling.setenv(FAULTS, fault)
    with pytest.raises(RuntimeError, match=said):
        generated(tmp_path, weights, LONG)


def test_a_version_without_it_is_refused_with_what_does_the_same(standin, tmp_path):
    with (
        pytest.raises(UserError, match=r"does not return the chosen experts.*actor.router_replay=recompute"),
        tiny.engine(tmp_path, ARCH, **RECORD),
    ):
        pass


def rules(**settings):
    from mrl.config.config import Config

    return [one for one in sampling_rules(Config(rollout=tiny.rollout(**RECORD, **settings))) if "routing" in one]


def test_arguments_under_which_nothing_can_be_told_are_refused(telling):
    """Where it is installed and can; the fields of a stand-in are not spelt out in its file."""
    assert rules() == []
    free = {
        "moe_config": {"backend": "DEEPGEMM"},
        "scheduler_config": {"capacity_scheduler_policy": "GUARANTEED_NO_EVICT"},
    }
    assert rules(engine_kwargs={"trtllm": free}) == []
    for given, said in (
        ({"moe_config": {"backend": "TRTLLM"}}, "inside a kernel. Set it to CUTLASS or DEEPGEMM"),
        ({"scheduler_config": {"capacity_scheduler_policy": "MAX_UTILIZATION"}}, "a paused request records experts"),
        (
            {"speculative_config": {"decoding_type": "NGram", "max_draft_len": 2}},
            "does not return the experts of drafted tokens",
        ),
    ):
        (told,) = rules(engine_kwargs={"trtllm": given})
        assert said in told and KWARGS in told


SOURCE = """
class BaseLlmArgs:
    model: str

class TorchLlmArgs(BaseLlmArgs):
    attn_backend: str = "TRTLLM"
"""


@pytest.mark.parametrize("line, known", [("", False), ("    enable_return_routed_experts: bool = False\n", True)])
def test_the_source_of_what_is_installed_says_whether_it_can(monkeypatch, tmp_path, line, known):
    (tmp_path / "tensorrt_llm" / "llmapi").mkdir(parents=True)
    (tmp_path / "tensorrt_llm" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "tensorrt_llm" / "llmapi" / "llm_args.py").write_text(SOURCE + line)
    monkeypatch.syspath_prepend(str(tmp_path))
    told = rules()
    assert told == [] if known else "actor.router_replay=recompute" in told[0]


@pytest.mark.slow
def test_grpo_replays_what_it_told_with_the_native_engines_numbers(tmp_path):
    short = [*MODELS["qwen3_moe"], *REPLAY, "train.num_steps=1", "train.warm_start.num_steps=1"]
    expected = runs.train_in_pool(tmp_path / "native", short, 1)
    found = trained(tmp_path / "trtllm", runs.arguments(tmp_path / "trtllm", [*short, "rollout.name=trtllm"]), "1.3")
    assert_same_run(found, expected)


class Shifted(NativeEngine):
    """It tells each token's experts one place too late."""

    def generate(self, prompts, sampling):
        rollouts = super().generate(prompts, sampling)
        for rollout in rollouts:
            rollout.routed_experts[1:-1] = rollout.routed_experts[:-2].clone()
        return rollouts


def accepted(folder, overrides):
    """What the acceptance run's check of the log-probabilities says of each engine."""
    parallel_state.destroy()
    launch.shutdown_distributed()
    said = {}
    for name in ("native", "tests.engines.trtllm.test_routing:Shifted"):
        config = load(Path(folder) / "config.yaml", [*overrides, f"rollout.name={name}"])
        with open_trainer(build_run_plan(config), log=False) as trainer:
            try:
                said[name.rpartition(":")[2]] = FUNCTIONS["logprobs"](Bench(trainer, Path(folder)))["tokens"]
            except CheckError as error:
                said[name.rpartition(":")[2]] = str(error)
    launch.init_distributed("cpu", num_threads=1)
    return said


def test_the_acceptance_run_scores_by_the_experts_that_were_told(tmp_path):
    (tmp_path / "config.yaml").write_text(CONFIG)
    tiny_mixture = (
        "model.preset=qwen3_moe_tiny", "~model.overrides", "model.overrides.vocab_size=16", "model.dtype=float32",
        "rollout.prompt_length=16", "rollout.response_length=8", "rollout.gpu_memory_utilization=0.02",
        "run.num_threads=1", *REPLAY,
    )  # fmt: skip
    model = write_random(load(tmp_path / "config.yaml", tiny_mixture), tmp_path / "model")
    (said,) = run_ranks(1, accepted, str(tmp_path), [*tiny_mixture, *model])
    assert said["native"] > 0
    assert "engine and actor differ by" in said["Shifted"]
