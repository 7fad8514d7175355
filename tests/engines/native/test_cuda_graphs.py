"""Which decode steps are captured, and that a captured one still reads and writes what the engine does.

A CPU captures nothing: here a capture notes the address of all memory that a step uses and did not make itself, as a
CUDA graph would, and its replay fails where one of them has moved.
"""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mrl.config.config import RolloutConfig
from mrl.engines.base import SamplingConfig
from mrl.engines.native import latent_attention, packed_linear
from mrl.engines.native.cuda_graphs import MAX_GRAPH_SETS, DecodeGraphs
from mrl.engines.native.engine import NativeEngine
from mrl.engines.native.packed_linear import Linear
from mrl.models.presets import arch_from_preset
from mrl.resharding.regions import full_region
from mrl.resharding.weight_slice import WeightSlice
from tests.engines.native.tiny import VOCAB, make_prompts
from tests.engines.specs import spec_of

SHARED = {"prompt_length": 64, "response_length": 64, "gpu_memory_utilization": 0.01, "max_num_seqs": 16}
SHARED |= {"enforce_eager": True}  # PyTorch's operators, as on CUDA
ARCH = arch_from_preset("qwen2_tiny", {}, VOCAB)
LATENT = replace(arch_from_preset("deepseek_v3_tiny", {}, VOCAB), moe=None)
"""Without experts: a CPU computes those that were chosen, one after the other."""


class Addresses(TorchDispatchMode):
    """Notes the memory that operations read or write and that none of them made."""

    def __init__(self):
        super().__init__()
        self.used, self._made = set(), {}

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        for each in tensors:
            if each.untyped_storage()._cdata not in self._made and each.numel():
                self.used.add(each.data_ptr())
        found = function(*args, **(kwargs or {}))
        known = {each.untyped_storage()._cdata for each in tensors}
        for each in tree_leaves(found):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in known:
                self._made[each.untyped_storage()._cdata] = each  # kept, so that nothing takes its place
        return found


def capture(action):
    with Addresses() as first:
        action()

    def replay():
        with Addresses() as again:
            action()
        assert again.used == first.used, "a graph would read and write elsewhere"

    return replay


@pytest.fixture(autouse=True)
def unpacked(monkeypatch):
    """Products as on CUDA: with the stored weights."""
    for module in (packed_linear, latent_attention):
        monkeypatch.setattr(module, "packs", lambda device: False)


def make_engine(graphs=True, arch=ARCH, **config):
    engine = NativeEngine(
        spec_of(RolloutConfig(**SHARED, **config), arch, tp_group=None, dtype=torch.float32, decode=str)
    )
    if graphs:
        engine._graphs = DecodeGraphs(engine._decode_eagerly, capture)
    fill(engine)
    return engine


def fill(engine):
    """The same random weights in each update, FP8 values and their scales where they are stored so."""
    generator = torch.Generator().manual_seed(3)
    engine.begin_update()
    for name, stored in engine.layout().items():
        value = torch.randn(stored.shape, generator=generator)
        value = value.abs().add_(0.1) if "scale" in name or value.dim() == 1 else value.mul_(0.3)
        value = value.to(getattr(torch, stored.dtype))
        engine.update_weights([WeightSlice(name, full_region(value.shape), value)])
    engine.finish_update(engine.policy_version + 1)


def answers(engine, lengths=(3, 5), max_tokens=6, n=2):
    """Tokens, and how many graphs were captured for them."""
    found = engine.generate(make_prompts(lengths), SamplingConfig(n=n, max_tokens=max_tokens, greedy=True))
    return [each.response_ids for each in found], engine.stats()["captured_graphs"]


def next_step(engine):
    """What a training step does between two samplings."""
    engine.sleep()
    engine.release()
    fill(engine)
    engine.wake()


@pytest.mark.parametrize("arch", [ARCH, LATENT], ids=["heads", "latent"])
@pytest.mark.parametrize("config", [{}, {"quantization": "fp8"}, {"quantization": "fp8_per_tensor"}], ids=str)
def test_the_second_step_captures_nothing_and_reads_where_the_first_one_did(config, arch):
    expected, none = answers(make_engine(graphs=False, arch=arch, **config))
    assert none == 0
    engine = make_engine(arch=arch, **config)
    tokens, captured = answers(engine)
    assert tokens == expected and captured == 1
    for _ in range(2):
        next_step(engine)
        hole = torch.ones(1 << 22)  # what the actor allocates meanwhile
        assert answers(engine) == (expected, 0)
        del hole
    engine.close()
    assert engine._cache.allocated_bytes == engine._stored.held_bytes == 0


def test_other_prompts_of_a_step_capture_nothing_once_the_longest_was_there():
    engine = make_engine()
    for lengths, max_tokens, expected in [
        ((20, 4), 6, 1),
        ((60, 4), 12, 1),  # longer: another shape
        ((7, 30), 12, 0),
        ((60, 60), 3, 0),
    ]:
        assert answers(engine, lengths, max_tokens)[1] == expected
        next_step(engine)


def test_training_and_validation_that_do_not_fit_in_one_shape_keep_their_graphs():
    engine = make_engine()
    engine._cache.budget_bytes = 16 * engine._cache.row_bytes(32)
    train, validate = ((8,), 4, 16), ((50,), 10, 8)  # 16 rows of 16 slots, and 8 rows of 64
    seen = []
    for _ in range(4):
        for lengths, max_tokens, n in (train, validate):
            seen.append(answers(engine, lengths, max_tokens, n)[1] > 0)
            next_step(engine)
    assert seen[:2] == [True, True] and not any(seen[4:])  # once more where cache and rows grew


def test_where_an_address_changed_a_step_is_captured_again():
    engine = make_engine()
    expected, _ = answers(engine)
    engine.sleep()
    moved, engine._cache._range = engine._cache._range, None  # its addresses stay taken
    engine.wake()
    assert answers(engine) == (expected, 1) and moved.held_bytes == 0


def test_batches_and_lengths_share_graphs_and_only_used_ones_are_captured():
    ran = []

    def step(batch, length):
        ran.append((batch, length))
        return torch.full((batch, 3), float(batch))

    graphs = DecodeGraphs(step, lambda action: action)
    graphs.begin("here", 100, 1000)
    for batch, length in [(100, 30), (99, 256), (65, 257), (64, 20), (33, 256), (1, 1000), (1, 700)]:
        assert graphs.run(batch, length).shape == (batch, 3)
    assert graphs.num_captures == 4
    assert set(ran) == {(100, 256), (100, 512), (64, 256), (1, 1000)}
    large = graphs.run(100, 30)
    graphs.begin("here", 200, 1000)
    assert graphs.run(200, 30)[199, 0] == 200 and graphs.run(100, 30).data_ptr() != large.data_ptr()
    assert graphs.num_captures == 6


def test_only_the_graphs_of_the_newest_places_are_kept():
    graphs = DecodeGraphs(lambda batch, length: torch.zeros(batch, 2), lambda action: action)
    captures = []
    for place in "abab" + "cab":
        graphs.begin(place, 4, 256)
        before = graphs.num_captures
        graphs.run(4, 256)
        captures.append(graphs.num_captures - before)
    assert MAX_GRAPH_SETS == 2 and captures == [1, 1, 0, 0, 1, 1, 1]


def test_a_copy_in_another_dtype_stays_where_it_is_over_updates():
    """Such as the fp32 router of bfloat16 experts, which a captured step reads."""
    weight = torch.randn(4, 8).bfloat16()
    product = Linear(weight, None, torch.float32)
    assert product.copy == (weight.shape, torch.float32)
    place = torch.empty(4, 8)
    product.copy_into(place)
    for scale in (1.0, 2.0):
        weight.mul_(scale)
        product.refresh()
        assert [each.data_ptr() for each in product.reads] == [place.data_ptr()]
        assert torch.equal(product(torch.eye(8)), weight.float().T)
        product.free_copies()
    assert Linear(weight, None, torch.bfloat16).copy is None


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would run, and those for which the host waits."""

    VIEWS = ("slice", "view", "unbind", "select", "expand", "unsqueeze", "squeeze", "alias", "detach", "_unsafe_view")
    WAITS = ("_local_scalar_dense", "is_nonzero", "nonzero", "item")

    def __init__(self):
        super().__init__()
        self.count = self.waits = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.__name__.split(".")[0]
        self.count += name not in self.VIEWS
        self.waits += name in self.WAITS
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(("greedy", "most"), [(True, 16), (False, 65)])
def test_around_a_graph_a_step_launches_little_and_waits_once(greedy, most):
    """What a step launches beside its graph, on the way from logits to the next tokens."""
    engine, seen = make_engine(graphs=False), []
    step = engine._decode_eagerly
    launches = Launches()

    def outside(batch, length):
        launches.__exit__(None, None, None)
        seen.append((launches.count, launches.waits))
        found = step(batch, length)
        launches.count = launches.waits = 0
        launches.__enter__()
        return found

    engine._decode_eagerly = outside
    with launches:
        engine.generate(make_prompts([3, 5]), SamplingConfig(n=1, max_tokens=9, greedy=greedy, stop_token_ids=(98,)))
    assert {count <= most and waits == 0 for count, waits in seen[1:]} == {True}, seen
    assert len(seen) > 3
