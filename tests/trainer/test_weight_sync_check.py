"""The canary over real ranks: silent with the native engine, loud with engines that do not keep what they are given."""

import json
import math
from dataclasses import replace

import pytest
import torch

from mrl.config.config import CheckpointEngineConfig, LoraConfig, RolloutConfig
from mrl.engines.native.engine import NativeEngine
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.checksum import MODULUS, bit_sum
from mrl.resharding.random_init import random_init
from mrl.trainer import weight_sync_check
from mrl.types import Rollout
from tests.e2e import runs
from tests.ranks import run_ranks
from tests.resharding.archs import ARCHS
from tests.resharding.test_weight_sync import Side

NAME = "biases, tied"


class Claims(NativeEngine):
    """Like an engine that processes what it is given: its checksum is over that, not over what it holds."""

    num_refits = 0
    given = 0

    def begin_update(self):
        self.given = 0
        super().begin_update()

    def update_weights(self, bucket):
        super().update_weights(bucket)
        self.given += sum(bit_sum(item.data) for item in bucket)

    def checksum(self):
        return self.given % MODULUS

    def finish_update(self, policy_version):
        self.num_refits += 1
        self.spoil()
        super().finish_update(policy_version)

    def spoil(self):
        """What is wrong with this one."""


class Drops(Claims):
    """Its memory is new in every refit, and from the second on one tensor does not arrive there."""

    def spoil(self):
        if self.num_refits > 1:
            self._weights["layers.0.qkv"].zero_()


class Scales(Claims):
    """A tensor that is skipped is processed once more."""

    def spoil(self):
        self._weights["layers.1.post_norm"].mul_(self.num_refits)


def sing(engine, grid):
    """What the canary says on this rank."""
    side = Side(ARCHS[NAME], grid, engine=engine)
    random_init(side.arch, side.layout, side.sources, 0)
    rollout = RolloutConfig(name=engine.__name__, prompt_length=8, response_length=8)
    side.refit(3)
    try:
        moved = weight_sync_check.check(
            lambda: side.refit(3), side.engine.generate, side.arch, rollout, torch.device("cpu")
        )
    except RuntimeError as error:
        return str(error)
    return moved


@pytest.mark.parametrize(
    "grid", [ParallelLayout(2, 2, rollout_tp=2), ParallelLayout(2, 1, 2)], ids=["tp2", "pp2, two replicas"]
)
def test_it_is_silent_where_nothing_moves(grid):
    for moved in run_ranks(2, sing, NativeEngine, grid):
        assert (moved.largest, moved.num_parted, moved.num_compared) == (0.0, 0, 4 * 8)


@pytest.mark.parametrize("engine", [Drops, Scales])
def test_it_names_what_moved_on_every_rank(engine):
    first, second = run_ranks(2, sing, engine, ParallelLayout(2, 2, rollout_tp=2))
    assert first == second
    for said in ("Weight-sync self-test failed", "expected at most 0 nats", f"rollout.name={engine.__name__}"):
        assert said in first


class Ignores(NativeEngine):
    """Stores adapters and computes without them."""

    def _add_adapters(self, lora, own):
        super()._add_adapters(lora, own)
        return lambda name, first, last: None


class WithAdapters(Side):
    """Side whose engine stores adapters."""

    def __init__(self, arch, grid, engine):
        super().__init__(arch, grid, engine=lambda spec: engine(replace(spec, lora=LoraConfig(rank=2, alpha=4.0))))


def sing_of_adapters(engine, grid):
    """What the check of adapters says on this rank, and whether another sync makes the responses what they were."""
    side = WithAdapters(ARCHS[NAME], grid, engine)
    random_init(side.arch, side.layout, side.sources, 0)
    rollout = RolloutConfig(name=engine.__name__, prompt_length=8, response_length=8)
    side.refit(3)
    before = weight_sync_check.sample_responses(side.engine.generate, side.arch, rollout)
    try:
        weight_sync_check.check_adapters(side.engine.adapters, side.engine.generate, side.arch, rollout, 3)
    except RuntimeError as error:
        return str(error)
    side.engine.adapters.begin_update()
    side.engine.adapters.fill(0.0)
    side.engine.adapters.finish_update(3)
    after = weight_sync_check.sample_responses(side.engine.generate, side.arch, rollout)
    return weight_sync_check.compare(before, after).largest


@pytest.mark.parametrize(("engine", "said"), [(NativeEngine, None), (Ignores, "rollout.name=Ignores")])
def test_an_engine_that_ignores_its_adapters_is_named(engine, said):
    for found in run_ranks(2, sing_of_adapters, engine, ParallelLayout(2, 2, rollout_tp=2)):
        assert found == 0.0 if said is None else said in found


def rollout(tokens, logprobs):
    prompt = weight_sync_check.prompts_of(ARCHS[NAME], RolloutConfig())[1]
    return Rollout(prompt, 0, tokens, logprobs, "length", 0)


def test_rounding_may_part_tokens_that_are_equally_likely():
    before = [rollout([1, 2, 3], [-1.0, -2.0, -3.0])] * 4
    parted = rollout([1, 7, 9], [-1.0, -2.01, -9.0])  # what comes behind the other token is another text
    moved = weight_sync_check.compare(before, [parted, *before[1:]])
    assert (moved.num_compared, moved.num_parted) == (11, 1)
    assert math.isclose(moved.largest, 0.01, rel_tol=1e-6) and "canary 1, token 1: -2.000000" in str(moved)
    assert moved.within(weight_sync_check.ROUNDING) and not moved.within(weight_sync_check.EXACT)
    assert not weight_sync_check.compare(before, [parted] * 3 + before[:1]).within(weight_sync_check.ROUNDING)
    equally = rollout([1, 7, 9], [-1.0, -2.0, -3.0])
    assert not weight_sync_check.compare(before, [equally, *before[1:]]).within(weight_sync_check.EXACT)
    nan = rollout([1, 2, 3], [-1.0, math.nan, -3.0])
    assert not weight_sync_check.compare(before, [nan, *before[1:]]).within(weight_sync_check.ROUNDING)


def test_who_asks():
    def with_canary(value, name="native"):
        return RolloutConfig(name=name, checkpoint_engine=CheckpointEngineConfig(canary=value))

    assert weight_sync_check.is_wanted(with_canary(None, "trtllm")) and weight_sync_check.is_wanted(
        with_canary(None, "trtllm_engine")
    )
    assert not weight_sync_check.is_wanted(with_canary(None)) and not weight_sync_check.is_wanted(
        with_canary(False, "trtllm")
    )
    assert weight_sync_check.is_wanted(with_canary(True))


@pytest.mark.slow
def test_a_run_asks_once_and_trains_on_the_same_numbers(tmp_path):
    short = ["train.num_steps=1", "train.warm_start.num_steps=1"]
    plain = runs.train_in_pool(tmp_path / "plain", short, 2)
    asked = runs.train_in_pool(tmp_path / "asked", [*short, "rollout.checkpoint_engine.canary=true"], 2)
    assert asked == plain
    notes = [json.loads(line) for line in (tmp_path / "asked" / "run" / "notes.jsonl").read_text().splitlines()]
    (said,) = [note for note in notes if "self-test" in json.dumps(note)]
    assert "differ by at most 0 nats" in json.dumps(said)
