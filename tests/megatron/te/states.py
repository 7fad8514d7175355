"""Optimizers whose states have types of their own, or lie on the host; runs where the hooks are in place.

pytest -p tests.megatron.te.active tests/megatron/te/states.py
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed.checkpoint as dcp

from mrl.checkpoint.formats.checkpoint_metadata import COMMON_STATE, METADATA, read_metadata
from mrl.commands.plan.memory import stage_memory
from mrl.megatron import checkpoint
from mrl.megatron.adam import Adam, HybridAdam, PreciseAdam, adam_of
from mrl.parallel_layout import ParallelLayout
from tests.megatron.actors import ARCHS, CONSTANT, adam_steps, config_for, full_weights, make_policy, train
from tests.ranks import run_ranks

ARCH = replace(ARCHS["qwen3"], num_layers=2)
PRECISE = {"use_precision_aware_optimizer": True}
KINDS = {
    "plain": {},
    "remainders": PRECISE,
    "low": {
        **PRECISE,
        "main_params_dtype": "fp16",
        "main_grads_dtype": "bf16",
        "exp_avg_dtype": "bf16",
        "exp_avg_sq_dtype": "fp16",
    },
    "hybrid": {
        **PRECISE,
        "optimizer_cpu_offload": True,
        "optimizer_offload_fraction": 0.5,
        "overlap_cpu_optimizer_d2h_h2d": True,
    },
}
IN_BF16 = {"low": {"grad_reduce_in_fp32": False}}
CLASSES = {"remainders": PreciseAdam, "low": PreciseAdam, "hybrid": HybridAdam}
GRIDS = {"dp2": ParallelLayout(2), "tp2": ParallelLayout(2, tp=2), "pp2": ParallelLayout(2, pp=2)}
AWAY = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
BEFORE, AFTER = 2, 2
CLOSE = 0.01  # of a hundred thousand weights a few are half way between two bfloat16, and rounded the other way
ROUGH = 0.2  # moments, masters and gradients of 8 to 11 bits against 24: 0.04 is found
LENGTH = 0.01  # of an update: rounding goes both ways; 1e-4 is found
MEANS = ("actor/entropy", "actor/ppo_kl", "actor/ratio_mean")  # one token's ratio or a sum near zero tells of rounding
LATER = 0.06  # of a mean once bfloat16 weights were rounded otherwise: 0.006 is found
TIE = 2 * torch.finfo(torch.float32).eps  # a master half way between two weights may be nearest to the other one
HALF = 2.0**-11  # of the largest element of a rank's part: float16, whose scale is the part's
LARGEST = torch.finfo(torch.float16).max / 2  # to which FusedAdam scales a float16 state
UNEVEN = 0.02  # ranks own equal parts of filled-up buffers


def config(kind):
    return {"dtype": "bfloat16", "megatron": {"optimizer": KINDS[kind], "ddp": IN_BF16.get(kind, {})}}


def made(kind, grid, *, actor=None, **options):
    policy = make_policy(ARCH, grid, actor={"transformer_impl": "te", **(actor or {})}, **config(kind), **options)
    policy.start_optimizer(CONSTANT)
    return policy


def loaded(kind, grid, folder, groups=None):
    policy = made(kind, grid, seed=None, groups=groups)
    checkpoint.load(folder, policy)
    return policy


def lived(kind, folder):
    """Metrics of a run with its commits and of one that goes on from the second of them; bytes on device and host."""
    policy = made(kind, GRIDS["dp2"], actor=AWAY)
    policy.offload()  # before there are moments
    assert not any(tensor.untyped_storage().nbytes() for tensor in _stepped(policy))
    checkpoint.save(folder / "first", policy)  # as every run does, before any step
    metrics = train(policy, BEFORE)
    policy.offload()
    weights = full_weights(policy)
    writing = checkpoint.Saver(policy).begin(folder / "second", async_save=True)
    went_on = train(policy, AFTER, first=BEFORE)
    writing.finish()
    again = loaded(kind, GRIDS["dp2"], folder / "second", policy._groups)
    assert all(torch.equal(tensor, weights[name]) for name, tensor in full_weights(again).items())
    resumed = train(again, AFTER, first=BEFORE)
    assert {float(step) for step in adam_steps(again)} == {BEFORE + AFTER}
    for tensor in again.named_tensors().values():
        tensor.mul_(0.6)
    again.weights_changed()
    checkpoint.save(folder / "changed", again)
    return metrics, went_on, resumed, bytes_held(policy)


def _stepped(policy):
    """What the Adams inside step: master weights, or the model's weights."""
    adams = [part.optimizer for part in policy.optimizer.chained_optimizers]
    inner = [adam for each in adams for adam in getattr(each, "sub_optimizers", [each])]
    return [parameter for adam in inner for group in adam.param_groups for parameter in group["params"]]


def bytes_held(policy):
    """Of states that are no view of a weight, on the device and on the host; there with gradients."""
    own = {tensor.untyped_storage().data_ptr() for tensor in policy.named_tensors().values()}
    found = {}
    for part in policy.optimizer.chained_optimizers:
        inner = getattr(part.optimizer, "sub_optimizers", None)
        for adam in inner or [part.optimizer]:
            on_host = bool(inner) and isinstance(adam, torch.optim.AdamW)
            for parameter, state in adam.state.items():
                tensors = [parameter, *state.values(), *([parameter.grad] if on_host else [])]
                for tensor in filter(torch.is_tensor, tensors):
                    if tensor.untyped_storage().data_ptr() not in own:
                        found[id(tensor)] = (on_host, tensor.nbytes)
    return [sum(size for where, size in found.values() if where == host) for host in (False, True)]


@pytest.fixture(scope="module")
def lives(tmp_path_factory):
    """kind -> (folder, metrics, bytes of each rank)."""
    known = {}

    def find(kind):
        if kind not in known:
            folder = tmp_path_factory.mktemp("states")
            (*first, held), (*second, others) = run_ranks(2, lived, kind, folder)
            assert first == second
            known[kind] = folder, first, (held, others)
        return known[kind]

    return find


def states(folder):
    """Every tensor of a checkpoint, by name."""
    stored = read_metadata(folder / METADATA).state_dict_metadata
    found = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in stored.items()
        if name != COMMON_STATE
    }
    dcp.load(found, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return found


def updates(folder):
    """Of all master weights in one row: what the steps between the two commits added."""
    first, second = states(folder / "first"), states(folder / "second")
    names = sorted(name for name in second if name.startswith("optimizer.state.param."))
    return torch.cat([(second[name].float() - first[name].float()).flatten() for name in names])


@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_is_the_one_that_went_on(kind, lives):
    _, (_, went_on, resumed), _ = lives(kind)
    assert resumed == went_on


@pytest.mark.parametrize("kind", CLASSES)
def test_its_steps_are_those_of_the_plain_optimizer(kind, lives):
    (folder, found, _), (plain_folder, expected, _) = lives(kind), lives("plain")
    ours, theirs = updates(folder), updates(plain_folder)
    assert (ours - theirs).norm() <= (ROUGH if kind == "low" else CLOSE) * theirs.norm() > 0
    assert math.isclose(ours.norm(), theirs.norm(), rel_tol=LENGTH)
    for step, plain_step in zip(found[0] + found[1], expected[0] + expected[1], strict=True):
        for name in MEANS:
            assert math.isclose(step[name], plain_step[name], rel_tol=LATER), name


@pytest.mark.parametrize("kind", KINDS)
def test_after_other_weights_came_masters_are_these(kind, lives):
    found = states(lives(kind)[0] / "changed")
    masters = {name.removeprefix("optimizer.state.param."): tensor for name, tensor in found.items()}
    allowed = HALF if kind == "low" else 0.0
    for name, weight in found.items():
        if not name.startswith("optimizer."):
            assert bool(((masters[name] - weight.float()).abs() <= allowed * weight.abs().max()).all()), name


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_what_a_rank_holds(kind, lives):
    (predicted,) = stage_memory(config_for(GRIDS["dp2"], **config(kind)), ARCH, GRIDS["dp2"])
    for device, host in lives(kind)[2]:
        if kind == "hybrid":  # parameters are whole on the host or not at all: not half of so few
            found = device / 12 + host / 16
            assert host and math.isclose(predicted.optimizer / 12 + predicted.states.host / 16, found, rel_tol=UNEVEN)
        else:
            assert host == 0 and math.isclose(predicted.optimizer, device, rel_tol=UNEVEN)


def moved(source, kind, grid, folder):
    """A checkpoint, loaded in another layout by another kind, and saved as it is there."""
    policy = loaded(kind, grid, source)
    checkpoint.save(folder, policy)
    return {type(adam_of(part)) for part in policy.optimizer.chained_optimizers}


MOVES = [
    # of which kind, to which kind, how it is cut there
    ("plain", "remainders", "tp2"),
    ("remainders", "plain", "pp2"),
    ("low", "low", "tp2"),
    ("plain", "low", "pp2"),
    ("hybrid", "hybrid", "tp2"),
    ("remainders", "hybrid", "pp2"),
    ("hybrid", "remainders", "dp2"),
]


@pytest.mark.parametrize(("kind", "other", "layout"), MOVES)
def test_another_layout_and_another_kind_hold_the_same_states(kind, other, layout, lives, tmp_path):
    source = lives(kind)[0] / "second"
    for adams in run_ranks(2, moved, source, other, GRIDS[layout], tmp_path / "moved"):
        assert adams == {CLASSES.get(other, Adam)}
    before, after = states(source), states(tmp_path / "moved")
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        theirs = tensor.to(after[name].dtype).float()
        ours = after[name].float()[: len(theirs)]  # tensor parallelism pads the vocabulary
        allowed = torch.zeros(())
        if other == "low" and name.startswith("optimizer."):
            allowed = HALF * theirs.abs().max()
        elif other == "remainders" and ".param." in name:
            allowed = TIE * theirs.abs()
        assert bool(((ours - theirs).abs() <= allowed).all()), name


def test_a_float16_state_that_is_saved_has_the_scale_of_one_that_is_loaded():
    """A scale is the largest element divided by 32752, which a product with 32752 does not always give back."""
    from transformer_engine.pytorch.optimizers import FusedAdam

    scales = 1.5 + torch.arange(2**14) * 2.0**-23
    unstable = scales[(scales * LARGEST) / LARGEST != scales]
    parameter = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    inner = FusedAdam([parameter], master_weights=True, exp_avg_sq_dtype=torch.float16)
    adam = adam_of(SimpleNamespace(optimizer=inner, model_param_group_index_map={parameter: (0, 0)}))
    adam.make_state()
    scale = inner._scales[parameter]["exp_avg_sq"].fill_(unstable[0])
    inner.state[parameter]["exp_avg_sq"].fill_(LARGEST)
    saved, kept = adam.read(parameter)["exp_avg_sq"], scale.clone()
    adam.write(parameter, {"exp_avg_sq": saved})
    assert float(kept) != float(unstable[0]) and torch.equal(scale, kept)
    assert bool((inner.state[parameter]["exp_avg_sq"] == LARGEST).all())
