"""Any layout into any other: every element lands where it must, and no byte moves that need not."""

import itertools
import math
import random
from collections import Counter

import pytest
import torch

from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.buckets import buckets, round_bytes, rounds
from mrl.resharding.hf import hf_layout
from mrl.resharding.layout import Piece, StoredTensor
from mrl.resharding.megatron import megatron_layouts
from mrl.resharding.native import native_layouts
from mrl.resharding.plan import make_plan
from mrl.resharding.regions import slices
from mrl.resharding.vllm import vllm_layouts
from tests.resharding.archs import ARCHS, counted, filled

ACTORS = [(1, 1, 1), (2, 1, 1), (4, 1, 1), (1, 2, 1), (1, 4, 1), (2, 2, 1), (1, 2, 2), (2, 2, 2), (4, 2, 1)]
"""(tp, pp, vpp) on 8 ranks; the rest is data parallel."""

PAIRS = list(itertools.product(ACTORS, (1, 2, 4, 8)))


def carried_out(copies, sources, targets):
    """The copies done in this process: rank -> tensors; what no copy writes stays NaN, padding is zero."""
    done = {
        rank: {name: torch.full(stored.shape, torch.nan) for name, stored in layout.items()}
        for rank, layout in targets.items()
    }
    for rank, layout in targets.items():
        for name, stored in layout.items():
            for region in stored.padding:
                done[rank][name][slices(region)] = 0
    for copy in copies:
        place = done[copy.target_rank][copy.target_name][slices(copy.target_region)]
        assert place.isnan().all(), "written twice"
        place.copy_(sources[copy.source_rank][copy.source_name][slices(copy.source_region)])
    return done


def assert_same(ours, theirs):
    for rank, tensors in theirs.items():
        assert ours[rank].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(ours[rank][name], tensor), (rank, name)


def lacking_bytes(stored, wanted, hf):
    """What each rank wants and does not hold, element by element: each has a value of its own (`counted`)."""
    count, last = 0, sum(tensor.numel() for tensor in hf.values())

    def marked(tensors):
        marks = torch.zeros(last + 1, dtype=torch.bool)
        for tensor in tensors.values():
            marks[tensor.long()] = True
        return marks[1:]  # the first is padding

    for rank, tensors in wanted.items():
        count += int((marked(tensors) & ~marked(stored[rank])).sum())
    return 4 * count


def refitted(arch, grid, hf, *, te=False, host_of=None, engine=native_layouts):
    """The plan of a refit, with the engines' layouts and tensors: every element landed, no byte moved that need not."""
    sources = megatron_layouts(arch, grid, dtype="float32", te=te)
    targets = engine(arch, grid, "float32")
    plan = make_plan(sources, targets, host_of=host_of)
    stored = {rank: filled(layout, hf) for rank, layout in sources.items()}
    wanted = {rank: filled(layout, hf) for rank, layout in targets.items()}
    assert_same(carried_out(plan.copies, stored, targets), wanted)
    assert plan.bytes_moved == plan.lower_bound_bytes == lacking_bytes(stored, wanted, hf), grid
    return plan, targets, wanted


@pytest.mark.parametrize("engine", [native_layouts, vllm_layouts])
@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
def test_megatron_to_an_engine_equals_hugging_face_to_it(arch, engine):
    """All pairs of layouts for the weights; moved bytes meet the bound for each."""
    hf = counted(arch)
    for (tp, pp, vpp), rollout_tp in PAIRS:
        plan, targets, wanted = refitted(arch, ParallelLayout(8, tp, pp, vpp, rollout_tp=rollout_tp), hf, engine=engine)
        total = sum(
            tensor.numel() - sum(tensor[slices(region)].numel() for region in targets[rank][name].padding)
            for rank, tensors in wanted.items()
            for name, tensor in tensors.items()
        )
        assert plan.bytes_local + plan.bytes_moved == 4 * total


@pytest.mark.parametrize("arch", ARCHS.values(), ids=ARCHS)
@pytest.mark.parametrize("actor", ACTORS, ids=str)
def test_hugging_face_to_megatron_and_back_is_the_same(arch, actor):
    hf = counted(arch)
    whole = {0: hf_layout(arch, "float32")}
    megatron = megatron_layouts(arch, ParallelLayout(8, *actor), dtype="float32", te=True)
    there = carried_out(make_plan(whole, megatron).copies, {0: hf}, megatron)
    assert_same(carried_out(make_plan(megatron, whole).copies, there, whole), {0: hf})


def test_a_rank_that_holds_what_it_needs_moves_nothing():
    arch = ARCHS["no biases, untied, one kv head per query head"]
    grid = ParallelLayout(4)
    plan = make_plan(megatron_layouts(arch, grid, dtype="float32", te=False), native_layouts(arch, grid, "float32"))
    assert plan.bytes_moved == plan.lower_bound_bytes == 0
    assert plan.link_bytes == {}


def test_the_bound_counts_what_is_lacking():
    """By hand: rank 0 holds rows 0..4 of 10 and wants 2..8 in bf16; it lacks 4 rows of 3 columns at 2 bytes."""
    low = StoredTensor((4, 3), "float32", (Piece("w", ((0, 4), (0, 3)), ((0, 4), (0, 3))),))
    high = StoredTensor((6, 3), "float32", (Piece("w", ((4, 10), (0, 3)), ((0, 6), (0, 3))),))
    want = StoredTensor((6, 3), "bfloat16", (Piece("w", ((2, 8), (0, 3)), ((0, 6), (0, 3))),))
    plan = make_plan({0: {"a": low}, 1: {"b": high}}, {0: {"c": want}})
    assert plan.lower_bound_bytes == plan.bytes_moved == 4 * 3 * 2
    assert plan.bytes_local == 2 * 3 * 2
    assert plan.link_bytes == {(1, 0): 24}


def test_the_nearest_copy_is_taken_and_the_load_is_spread():
    arch = ARCHS["no biases, untied, one kv head per query head"]
    grid = ParallelLayout(8, tp=2, rollout_tp=4)  # four data-parallel copies, two on each host of four ranks
    plan = make_plan(
        megatron_layouts(arch, grid, dtype="float32", te=False),
        native_layouts(arch, grid, "float32"),
        host_of=lambda rank: rank // 4,
    )
    assert all(sender // 4 == receiver // 4 for sender, receiver in plan.link_bytes)
    sent = [sum(size for (sender, _), size in plan.link_bytes.items() if sender == rank) for rank in range(8)]
    assert max(sent) <= 1.2 * sum(sent) / 8, sent  # whole tensors are dealt out, so not exactly even


def test_a_hole_in_the_sources_is_named():
    arch = ARCHS["biases, tied"]
    sources = megatron_layouts(arch, ParallelLayout(2, tp=2), dtype="float32", te=False)
    with pytest.raises(RuntimeError, match=r"'model\.embed_tokens\.weight'.*which no source layout contains"):
        make_plan({0: sources[0]}, native_layouts(arch, ParallelLayout(1), "float32"))


ROWS = ((0, 4), (0, 3))
BROKEN = {
    "overlap": (StoredTensor((6, 3), "float32", (Piece("w", ROWS, ROWS), Piece("w", ROWS, ((2, 6), (0, 3))))), "same"),
    "hole": (StoredTensor((6, 3), "float32", (Piece("w", ROWS, ROWS),)), "6 of 18 elements have no piece"),
    "outside": (StoredTensor((3, 3), "float32", (Piece("w", ROWS, ROWS),)), "outside"),
    "stretched": (StoredTensor((4, 3), "float32", (Piece("w", ((0, 2), (0, 3)), ROWS),)), "different extents"),
    "padding over data": (StoredTensor((4, 3), "float32", (Piece("w", ROWS, ROWS),), (((3, 4), (0, 3)),)), "same"),
}


@pytest.mark.parametrize("stored, message", BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("side", ["source", "target"])
def test_a_layout_that_is_no_exact_cover_is_named(stored, message, side):
    good = {0: {"good": StoredTensor((4, 3), "float32", (Piece("w", ROWS, ROWS),))}}
    bad = {0: {"bad": stored}}
    with pytest.raises(RuntimeError, match=f"'bad'.*{message}"):
        make_plan(*((bad, good) if side == "source" else (good, bad)))


def test_random_overlapping_sources_fill_random_targets():
    """Sources that hold overlapping regions, as no real layout does: still each element once, and no byte too many."""
    draw = random.Random(0)

    def band(rows):
        start, stop = sorted(draw.sample(range(rows + 1), 2))
        return (start, stop)

    for _ in range(50):
        truth = torch.arange(1.0, 12 * 9 + 1).view(12, 9)
        sources, targets = {}, {}
        for rank in range(5):
            region = ((0, 12), (0, 9)) if rank == 4 else (band(12), band(9))
            for layouts, held in ((sources, region), (targets, (band(12), band(9)))):
                shape = tuple(stop - start for start, stop in held)
                zero = tuple((0, extent) for extent in shape)
                layouts[rank] = {"t": StoredTensor(shape, "float32", (Piece("w", held, zero),))}
        plan = make_plan(sources, targets)
        assert plan.bytes_moved == plan.lower_bound_bytes
        stored = {rank: filled(layout, {"w": truth}) for rank, layout in sources.items()}
        wanted = {rank: filled(layout, {"w": truth}) for rank, layout in targets.items()}
        assert_same(carried_out(plan.copies, stored, targets), wanted)


@pytest.mark.parametrize("bucket_bytes", [8, 36, 1000, 1 << 20])
def test_rounds_stay_within_the_bucket_and_hold_every_copy(bucket_bytes):
    arch = ARCHS["biases, tied"]
    hf = counted(arch)
    grid = ParallelLayout(4, tp=2, pp=2, rollout_tp=4)
    sources = megatron_layouts(arch, grid, dtype="float32", te=False)
    targets = native_layouts(arch, grid, "float32")
    plan = make_plan(sources, targets)
    parts = []
    staged = [[0] * 4 for _ in range(4)]  # of each rank: two buffers to send, two to receive
    for number, batch in enumerate(rounds(plan.copies, bucket_bytes)):
        parts += batch
        sent = [sum(copy.num_bytes for copy in batch if copy.source_rank == rank) for rank in range(4)]
        received = [sum(copy.num_bytes for copy in batch if copy.target_rank == rank) for rank in range(4)]
        assert max(sent + received) <= bucket_bytes
        for rank, sizes in enumerate(zip(sent, received, strict=True)):
            for way, size in enumerate(sizes):
                staged[rank][2 * way + number % 2] = max(staged[rank][2 * way + number % 2], size)
    assert plan.peak_staging_bytes(bucket_bytes) == max(map(sum, staged))
    for rank in range(4):
        local = [copy for copy in plan.copies if copy.source_rank == copy.target_rank == rank]
        for bucket in buckets(local, bucket_bytes):
            assert sum(copy.num_bytes for copy in bucket) <= bucket_bytes
            parts += bucket
    stored = {rank: filled(layout, hf) for rank, layout in sources.items()}
    assert_same(carried_out(parts, stored, targets), {rank: filled(layout, hf) for rank, layout in targets.items()})


def test_pipeline_stages_send_side_by_side():
    """Every receiver begins with the first layers; a stage that had to wait for them would send long after them."""
    arch = arch_from_preset("llama3.1_8b", {"num_hidden_layers": 8}, None)
    grid = ParallelLayout(8, tp=2, pp=4, rollout_tp=2)
    plan = make_plan(megatron_layouts(arch, grid, dtype="bfloat16", te=True), native_layouts(arch, grid, "bfloat16"))
    busy = Counter()
    for copy in plan.copies:
        if copy.source_rank != copy.target_rank:
            busy["sends", copy.source_rank] += copy.num_bytes
            busy["receives", copy.target_rank] += copy.num_bytes
    bucket = round_bytes(plan.copies, 512 << 20)
    assert len(rounds(plan.copies, bucket)) <= 2 * math.ceil(max(busy.values()) / bucket)


def test_a_large_job_is_planned_without_walking_every_pair_of_ranks():
    """128 ranks, 80 layers: copies are counted, not timed, since this machine is shared."""
    arch = arch_from_preset("llama3.1_8b", {"num_hidden_layers": 80}, None)
    grid = ParallelLayout(128, tp=8, pp=4, rollout_tp=8)
    plan = make_plan(
        megatron_layouts(arch, grid, dtype="bfloat16", te=True),
        native_layouts(arch, grid, "bfloat16"),
        host_of=lambda rank: rank // 8,
    )
    assert plan.bytes_moved == plan.lower_bound_bytes
    assert len(plan.copies) == 128 * (80 * 9 + 3)  # equal shards: each piece of the engine has one source
