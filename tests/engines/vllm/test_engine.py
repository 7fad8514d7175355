"""vLLM in process against transformers, and against itself in any company, order, part and layout."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist

from mrl.distributed.groups import make_rollout_group
from mrl.engines.base import SamplingConfig
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.parallel_layout import ParallelLayout
from tests.engines.native.test_engine import score, tokens
from tests.engines.native.tiny import make_prompts, reference, refit
from tests.engines.vllm import tiny
from tests.ranks import run_ranks

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("vllm_ranks")]

LOGPROB_ATOL = 1e-4
"""The project's bound on |difference of log-probabilities| between engine and judge in fp32."""
BF16_ATOL = 0.15
"""bf16 has 8 bits: logits of size 5 are off by 0.02 a rounding, and there is one in each of 2 layers' 8 operations."""
LENGTHS = (3, 9, 20, 9, 5)
GREEDY = SamplingConfig(n=1, max_tokens=64, greedy=True, ignore_eos=True)
SETTINGS = {
    "plain": SamplingConfig(n=3, max_tokens=12, seed=1),
    "cut": SamplingConfig(n=3, max_tokens=12, temperature=0.7, top_k=20, top_p=0.9, seed=2, stop_token_ids=(5, 7, 9)),
    "min_p": SamplingConfig(n=2, max_tokens=12, temperature=1.3, top_k=40, min_p=0.05, seed=3),
    "greedy": GREEDY,
}


def sampled(folder, settings, lengths=LENGTHS, *, dtype=torch.float32, config=None):
    """Rollouts of each setting, from an engine of this rank alone."""
    with tiny.engine(folder, dtype=dtype, **(config or {})) as engine:
        refit(engine, folder, arch_from_folder(folder))
        return [engine.generate(make_prompts(lengths), setting) for setting in settings]


def assert_scored(model, rollouts, setting, atol=LOGPROB_ATOL):
    cut = (
        {} if setting.greedy else {name: getattr(setting, name) for name in ("temperature", "top_k", "top_p", "min_p")}
    )
    for rollout in rollouts:
        expected = score(model, rollout, **cut)
        torch.testing.assert_close(torch.tensor(rollout.rollout_logprobs), expected, rtol=0, atol=atol)


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_log_probabilities_are_those_of_transformers(family, folders):
    """Also 64 most likely tokens in a row, and every end of a response."""
    folder = folders(family)
    model = reference(folder)
    (found,) = run_ranks(1, sampled, folder, list(SETTINGS.values()))
    for setting, rollouts in zip(SETTINGS.values(), found, strict=True):
        assert [(r.prompt.uid, r.sample_index) for r in rollouts] == [
            (10 + number, index) for number in range(len(LENGTHS)) for index in range(setting.n)
        ]
        assert_scored(model, rollouts, setting)
        for rollout in rollouts:
            ids, ends = rollout.response_ids, () if setting.ignore_eos else setting.stop_token_ids
            assert not set(ids[:-1]) & set(ends)
            assert (rollout.finish_reason == "stop") == (ids[-1] in ends)
            assert rollout.finish_reason == "stop" or len(ids) == setting.max_tokens
    for rollout in found[-1]:
        ids, start = [*rollout.prompt.prompt_ids, *rollout.response_ids], len(rollout.prompt.prompt_ids)
        with torch.no_grad():
            likeliest = model(torch.tensor([ids])).logits[0, start - 1 : -1].argmax(-1)
        assert rollout.response_ids == likeliest.tolist()


def test_bf16_is_as_near_as_its_bits(folders):
    folder = folders("qwen3")
    (found,) = run_ranks(1, sampled, folder, [SETTINGS["plain"]], dtype=torch.bfloat16)
    assert_scored(reference(folder), found[0], SETTINGS["plain"], atol=BF16_ATOL)


@pytest.mark.parametrize("family", ["glm4_moe", "deepseek_v3"])
def test_a_bf16_mixture_is_near_on_average(family, folders):
    """The mean difference is small; single ones are not, as rounding changes the choice between near experts."""
    folder = folders(family)
    model = reference(folder)
    (found,) = run_ranks(1, sampled, folder, [SETTINGS["plain"]], dtype=torch.bfloat16)
    differences = [
        torch.tensor(rollout.rollout_logprobs) - score(model, rollout, SETTINGS["plain"].temperature)
        for rollout in found[0]
    ]
    assert torch.cat(differences).abs().mean() < BF16_ATOL


def in_company(folder, seed):
    """Tokens of the same samples: together, shuffled, alone, in parts of a prompt, and after a stop in the middle."""
    prompts, setting = make_prompts((40, 3, 64, 20, 9)), SamplingConfig(n=3, max_tokens=10, seed=4)
    long = make_prompts((40, 30, 20, 25)), SamplingConfig(n=2, max_tokens=40, seed=4)
    found, roomy = {}, None
    for name, config in {
        "together": {},
        "a few at a time": {"max_num_seqs": 2},
        "in parts": {"max_num_batched_tokens": 17, "max_num_seqs": 16},
        "without a prefix cache": {"enable_prefix_caching": False},
        # seven blocks: sequences are put aside with the tokens that they have, and read again in parts
        "with little room": {
            "max_num_batched_tokens": 17,
            "max_num_seqs": 8,
            "engine_kwargs": {"vllm": {"block_size": 32, "num_gpu_blocks_override": 8}},
        },
    }.items():
        with tiny.engine(folder, **config) as engine:
            refit(engine, folder, arch_from_folder(folder))
            if name == "with little room":
                assert tokens(engine.generate(*long)) == roomy
                continue
            found[name] = tokens(engine.generate(prompts, setting))
            if name == "together":
                roomy = tokens(engine.generate(*long))
                shuffled = random.Random(seed).sample(prompts, len(prompts))
                found["shuffled"] = tokens(engine.generate(shuffled, setting))
                found["alone"] = tokens([one for prompt in prompts for one in engine.generate([prompt], setting)])
            if name == "a few at a time":
                engine.abort_requested = partial(lambda calls: next(calls) > 14, iter(range(100)))
                stopped = tokens(engine.generate(prompts, setting))
                assert stopped and stopped.items() < found["together"].items()
                engine.abort_requested = lambda: False
                found["after a stop"] = tokens(engine.generate(prompts, setting))
    return found


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_a_sample_is_its_seeds_own_in_any_company(family, folders):
    (found,) = run_ranks(1, in_company, folders(family), 7)
    for name, ids in found.items():
        assert ids == found["together"], name


def with_strings(folder):
    prompts, setting = make_prompts(LENGTHS), SamplingConfig(n=2, max_tokens=20, seed=5, stop=("[7]", "[11]"))
    with tiny.engine(folder) as engine:
        engine.spec = replace(engine.spec, decode=lambda ids: "".join(f"[{one}]" for one in ids))
        refit(engine, folder, arch_from_folder(folder))
        return engine.generate(prompts, setting), engine.generate(prompts, replace(setting, stop=()))


def test_a_stop_string_ends_a_response_with_the_tokens_before_it_unchanged(folders):
    ((cut, whole),) = run_ranks(1, with_strings, folders("qwen2"))
    assert any(rollout.finish_reason == "stop" for rollout in cut)
    for rollout, full in zip(cut, whole, strict=True):
        ids = full.response_ids
        end = next((place + 1 for place, one in enumerate(ids) if one in (7, 11)), len(ids))
        assert rollout.response_ids == ids[:end] and rollout.rollout_logprobs == full.rollout_logprobs[:end]
        assert rollout.finish_reason == ("stop" if end < len(ids) or ids[-1] in (7, 11) else "length")


def of_replicas(folder, grid):
    """What this rank's replica samples of prompts that are its own, and that the trainer's group still works."""
    group = make_rollout_group(grid, dist.get_rank())
    before = dist.group.WORLD
    replica = dist.get_rank()
    with tiny.engine(folder, tp_group=group) as engine:
        refit(engine, folder, arch_from_folder(folder))
        found = engine.generate(make_prompts(LENGTHS[replica:], seed=replica), SETTINGS["cut"])
    total = torch.ones(1)
    dist.all_reduce(total)
    assert dist.group.WORLD is before and total.item() == grid.world_size
    return found


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_replicas_of_one_rank_sample_what_it_does_alone(family, folders):
    """1+1+1+1; replicas of two ranks are in `test_refit.py`."""
    folder = folders(family)
    model = reference(folder)
    for rollouts in run_ranks(4, of_replicas, folder, ParallelLayout(4)):
        assert_scored(model, rollouts, SETTINGS["cut"])


def refusals(folder):
    said = {}
    with tiny.engine(folder) as engine:
        for name, call in {
            "empty": lambda: engine.generate(make_prompts((3,)), SETTINGS["plain"]),
            "update": lambda: engine.update_weights([]) or engine.finish_update(0) or engine.update_weights([]),
            "long": lambda: engine.generate(make_prompts((125,)), SETTINGS["plain"]),
        }.items():
            try:
                call()
            except (RuntimeError, UserError) as error:
                said[name] = f"{type(error).__name__}: {error}"
    for name, settings in {
        "value": {"engine_kwargs": {"vllm": {"block_size": 7}}},
        "room": {"gpu_memory_utilization": 1e-7},
    }.items():
        try:
            with tiny.engine(folder, **settings):
                pass
        except UserError as error:
            said[name] = str(error)
    return said


def test_what_cannot_be_generated_is_said(folders):
    (said,) = run_ranks(1, refusals, folders("qwen2"))
    assert said["empty"].startswith("RuntimeError: weight update incomplete")
    assert said["update"].startswith("RuntimeError: update_weights() outside a weight update")
    assert "UserError" in said["long"] and "rollout.max_model_len" in said["long"]
    assert "does not start with rollout.engine_kwargs.vllm={'block_size': 7}: " in said["value"]
    assert ".." not in said["value"]
    assert "of one sequence of 128 tokens takes 0.3 MB" in said["room"]
