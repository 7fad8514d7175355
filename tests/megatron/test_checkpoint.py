"""The actor's checkpoint loads at any layout and training goes on with the same numbers; it cannot carry code."""

import contextlib
import errno
import math
import os
import pickle
import shutil
import signal
import time
from dataclasses import replace

import psutil
import pytest
import torch

from mrl.algorithms.functional.learning_rate import LearningRate
from mrl.checkpoint.formats.checkpoint_metadata import COMMON_STATE
from mrl.distributed import launch
from mrl.distributed.local_ranks import fork_server_context
from mrl.errors import UserError
from mrl.megatron import checkpoint
from tests.megatron.actors import ARCHS, CONSTANT, LAYOUTS, adam_steps, full_weights, make_policy, train
from tests.ranks import PRELOAD, RankError, run_ranks

RELATIVE = 1e-4  # fp32 sums in another order, over two steps of Adam
ABSOLUTE = 2e-6  # losses around zero
BEFORE, AFTER = 2, 2
RATE = LearningRate(1e-3, 0.0, "linear", 0, BEFORE + AFTER)
"""Differs at each step: a resumed schedule that starts anew is seen."""


def saved(folder, grid, name, steps, **options):
    """Trains, saves, trains on: weights at the save and metrics behind it."""
    policy = make_policy(ARCHS[name], grid, **options)
    policy.start_optimizer(RATE)
    train(policy, steps)
    checkpoint.save(folder, policy)
    weights = full_weights(policy)
    return weights, train(policy, AFTER, first=steps)


def resumed(folder, grid, name, steps, **options):
    policy = make_policy(ARCHS[name], grid, seed=None, **options)
    policy.start_optimizer(RATE)
    checkpoint.load(folder, policy)
    weights = full_weights(policy)
    return weights, train(policy, AFTER, first=steps), policy.num_updates, told_of_steps(policy)


def told_of_steps(policy):
    """Number of steps that Adam holds, of distinct objects among them, and their values."""
    steps = adam_steps(policy)
    shared = {id(step) for step in steps if torch.is_tensor(step)}
    return len(steps), len(shared) or len(steps), {float(step) for step in steps}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """(layout, model, steps) -> (folder, weights, metrics after the save)."""
    known = {}

    def find(layout, name, steps=BEFORE):
        if (layout, name, steps) not in known:
            folder = tmp_path_factory.mktemp("checkpoint") / "actor"
            ranks = LAYOUTS[layout].world_size
            known[layout, name, steps] = folder, *run_ranks(ranks, saved, folder, LAYOUTS[layout], name, steps)[0]
        return known[layout, name, steps]

    return find


@pytest.mark.parametrize(
    ("name", "source", "target"),
    [
        ("qwen2", "tp2_pp2", "single"),
        ("qwen2", "tp2_pp2", "dp2"),
        ("qwen2", "tp2_pp2", "pp2_vpp2"),
        ("qwen2", "single", "tp2_pp2"),
        ("qwen3", "pp2_vpp2", "tp2"),
        ("qwen3", "dp2", "pp2"),
        ("gemma3_text", "tp2_pp2", "single"),
    ],
)
def test_training_goes_on_at_another_layout(name, source, target, written):
    """The tied embedding ends a padded bucket here: Megatron alone saves shifted master weights for it."""
    folder, weights, metrics = written(source, name)
    for found, stepped, num_updates, (params, tensors, values) in run_ranks(
        LAYOUTS[target].world_size, resumed, folder, LAYOUTS[target], name, BEFORE
    ):
        assert found.keys() == weights.keys()
        assert all(torch.equal(found[key], weights[key]) for key in weights)
        assert num_updates == BEFORE + AFTER
        assert tensors == params, "Adam advances a shared step tensor once for each parameter"
        assert values == {float(BEFORE + AFTER)}
        for ours, theirs in zip(stepped, metrics, strict=True):
            for key in theirs:
                assert math.isclose(ours[key], theirs[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE), key


@pytest.mark.parametrize("layout", ["single", "tp2_pp2", "pp2_vpp2", "dp2"])
def test_the_same_layout_goes_on_bit_for_bit(layout, written):
    folder, _, metrics = written(layout, "qwen2")
    for _, stepped, _, _ in run_ranks(LAYOUTS[layout].world_size, resumed, folder, LAYOUTS[layout], "qwen2", BEFORE):
        assert stepped == metrics


def test_an_optimizer_that_never_stepped_is_saved_and_loaded(written):
    folder, weights, metrics = written("tp2", "qwen2", 0)
    found, stepped, num_updates, _ = run_ranks(1, resumed, folder, LAYOUTS["single"], "qwen2", 0)[0]
    assert all(torch.equal(found[key], weights[key]) for key in weights)
    assert num_updates == AFTER
    for ours, theirs in zip(stepped, metrics, strict=True):
        assert math.isclose(ours["actor/grad_norm"], theirs["actor/grad_norm"], rel_tol=RELATIVE)


SWITCHES = [
    # dtype, layout and use_distributed_optimizer of the save, then of the load
    ("float32", "dp2", True, "dp2", False),
    ("float32", "dp2", False, "tp2_pp2", True),
    ("float32", "single", False, "pp2_vpp2", False),
    ("bfloat16", "dp2", True, "dp2", False),
    ("bfloat16", "dp2", False, "dp2", True),
]


@pytest.mark.parametrize(("dtype", "source", "was", "target", "becomes"), SWITCHES)
@pytest.mark.parametrize("steps", [0, BEFORE])
def test_an_optimizer_of_the_other_kind_goes_on_with_the_same_numbers(
    dtype, source, was, target, becomes, steps, tmp_path
):
    before, after = ({"actor": {"use_distributed_optimizer": kind}, "dtype": dtype} for kind in (was, becomes))
    folder, grid = tmp_path / "actor", LAYOUTS[source]
    weights, metrics = run_ranks(grid.world_size, saved, folder, grid, "qwen2", steps, **before)[0]
    grid = LAYOUTS[target]
    for found, stepped, num_updates, (params, tensors, values) in run_ranks(
        grid.world_size, resumed, folder, grid, "qwen2", steps, **after
    ):
        assert all(torch.equal(found[key], weights[key]) for key in weights)
        assert (num_updates, tensors, values) == (steps + AFTER, params, {float(steps + AFTER)})
        for ours, theirs in zip(stepped, metrics, strict=True):
            for key in theirs:
                assert math.isclose(ours[key], theirs[key], rel_tol=RELATIVE, abs_tol=ABSOLUTE), key


HYPER = {"adam_beta1": 0.5, "adam_beta2": 0.6, "adam_eps": 1e-3, "weight_decay": 0.3}


def hyperparameters(folder):
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["single"], seed=None, actor=HYPER)
    policy.start_optimizer(CONSTANT)
    checkpoint.load(folder, policy)
    train(policy, 1)
    return [(group["betas"], group["eps"], group["weight_decay"]) for group in policy.optimizer.param_groups]


def test_a_resume_takes_the_hyperparameters_of_the_config(written):
    folder, _, _ = written("tp2_pp2", "qwen2")
    assert set(run_ranks(1, hyperparameters, folder)[0]) == {((0.5, 0.6), 1e-3, 0.3), ((0.5, 0.6), 1e-3, 0.0)}


def weights_only(folder):
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["single"], seed=None)
    checkpoint.load(folder, policy)
    return full_weights(policy)


def test_an_actor_without_an_optimizer_takes_the_weights(written):
    folder, weights, _ = written("tp2_pp2", "qwen2")
    found = run_ranks(1, weights_only, folder)[0]
    assert all(torch.equal(found[key], weights[key]) for key in weights)


def refusal(folder, name="qwen2"):
    policy = make_policy(ARCHS[name], LAYOUTS["single"], seed=None)
    policy.start_optimizer(CONSTANT)
    with pytest.raises(UserError) as caught:
        checkpoint.load(folder, policy)
    return str(caught.value)


def test_another_model_is_refused(written):
    folder, _, _ = written("tp2_pp2", "qwen2")
    assert "does not fit the model of this config" in run_ranks(1, refusal, folder, "qwen3")[0]


class Attack:
    """A pickle that makes a file when it is read."""

    def __init__(self, target):
        self.target = target

    def __reduce__(self):
        return os.mkdir, (str(self.target),)


@pytest.fixture
def copy(written, tmp_path):
    folder, _, _ = written("single", "qwen2")
    return shutil.copytree(folder, tmp_path / "copy")


def test_metadata_that_carries_code_is_refused_and_not_run(copy, tmp_path):
    (copy / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "harm")))
    assert "mkdir', which is not data" in run_ranks(1, refusal, copy)[0]
    assert not (tmp_path / "harm").exists()


def test_common_state_that_carries_code_is_refused_and_not_run(copy, tmp_path):
    torch.save({"optimizer": Attack(tmp_path / "harm")}, copy / "common.pt")
    run_ranks(1, refusal, copy)
    assert not (tmp_path / "harm").exists()


def test_every_release_of_megatron_finds_the_plain_values(written):
    """0.16 to 0.18 read them from common.pt, which 0.19 does not write."""
    folder, _, _ = written("single", "qwen2")
    found = torch.load(folder / "common.pt", weights_only=True)
    assert found.keys() == {"num_updates", "content_metadata"} and found["num_updates"] == BEFORE


def place_of_common_state(folder):
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    found = [index for index in metadata.storage_data if index.fqn == COMMON_STATE]
    if not found:
        pytest.skip("megatron-core before 0.19 stores no common state in the shards")
    return metadata, found[0]


def test_without_common_pt_the_common_state_of_the_shards_is_read(copy, written):
    place_of_common_state(copy)
    (copy / "common.pt").unlink()
    _, _, metrics = written("single", "qwen2")
    ((_, stepped, num_updates, _),) = run_ranks(1, resumed, copy, LAYOUTS["single"], "qwen2", BEFORE)
    assert stepped == metrics and num_updates == BEFORE + AFTER


def test_a_common_state_of_the_shards_that_carries_code_is_refused_and_not_run(copy, tmp_path):
    metadata, index = place_of_common_state(copy)
    (copy / "common.pt").unlink()
    torch.save([{"num_updates": Attack(tmp_path / "harm")}], copy / "evil.distcp")
    metadata.storage_data[index] = replace(
        metadata.storage_data[index],
        relative_path="evil.distcp",
        offset=0,
        length=(copy / "evil.distcp").stat().st_size,
    )
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "cannot be read as data" in run_ranks(1, refusal, copy)[0]
    assert not (tmp_path / "harm").exists()


def test_a_tensor_turned_into_a_pickled_entry_is_refused(copy):
    """torch loads such an entry with an unpickler that knows no bounds."""
    from torch.distributed.checkpoint.metadata import BytesStorageMetadata

    metadata = pickle.loads((copy / ".metadata").read_bytes())
    metadata.state_dict_metadata["decoder.final_layernorm.weight"] = BytesStorageMetadata()
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    assert "(BytesStorageMetadata), expected a tensor" in run_ranks(1, refusal, copy)[0]


@pytest.mark.parametrize("harm", ["missing", "garbage", "truncated"])
def test_broken_metadata_is_a_users_error(harm, copy):
    file = copy / ".metadata"
    if harm == "missing":
        file.unlink()
    else:
        file.write_bytes(b"no pickle" if harm == "garbage" else file.read_bytes()[:100])
    assert str(copy) in run_ranks(1, refusal, copy)[0]


def test_a_missing_shard_is_a_users_error(copy):
    next(copy.glob("*.distcp")).unlink()
    assert "does not fit" in run_ranks(1, refusal, copy)[0]


def killed_while_it_writes(folder):
    os.setsid()
    launch.init_distributed("cpu", num_threads=1)
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["single"])
    rank = os.getpid()

    def fsync(file):
        os.kill(rank, signal.SIGKILL)
        time.sleep(1)  # the kernel takes a moment

    os.fsync = fsync
    checkpoint.save(folder, policy)


def test_a_rank_that_is_killed_while_it_writes_leaves_no_process(tmp_path):
    rank = fork_server_context(PRELOAD).Process(target=killed_while_it_writes, args=(tmp_path / "actor",))
    rank.start()
    rank.join(60)
    assert rank.exitcode == -signal.SIGKILL
    assert list(tmp_path.glob("actor/*.distcp"))
    time.sleep(1)
    assert left_of_session(rank.pid) == []


def left_of_session(session):
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(process.pid) == session:
                found.append(process)
    return found


def test_what_a_writer_meets_is_told(tmp_path):
    """Megatron writes with more than one writer; the second one's disk is full."""
    with pytest.raises(RankError, match=r"OSError: \[Errno 28\] No space left on device: '.*actor'"):
        run_ranks(1, saved_on_a_full_disk, tmp_path / "actor")


def saved_on_a_full_disk(folder):
    policy = make_policy(ARCHS["qwen2"], LAYOUTS["single"])
    synced, done = os.fsync, []

    def fsync(file):
        done.append(file)
        if len(done) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        synced(file)

    os.fsync = fsync
    try:
        checkpoint.save(folder, policy)
    finally:
        os.fsync = synced
