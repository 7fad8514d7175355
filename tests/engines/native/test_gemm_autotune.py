"""The forms of a product: right each, and chosen so that a resumed run has the numbers of one that never stopped."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mrl.engines.native import gemm_autotune
from mrl.engines.native.gemm_autotune import (
    FORMS,
    PACKED,
    PLAIN,
    ROW_BY_ROW,
    TRANSPOSED,
    candidates,
    kernel_for,
    row_by_row,
)
from mrl.engines.native.packed_linear import packs
from mrl.models.kernels import bindings, build_cache
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(not packs(torch.device("cpu")), reason="this processor has one form"),
]

SHAPE = (512, 600)
ATOL = 5e-5
"""fp32 sums of 600 products of size 1/24."""


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    gemm_autotune._chosen.cache_clear()
    yield tmp_path
    gemm_autotune._chosen.cache_clear()


@pytest.fixture
def measured(monkeypatch):
    """The forms that were measured, and what is said of their times."""
    calls = []
    times = {PACKED: 1.0, PLAIN: 0.5, TRANSPOSED: 0.8}
    monkeypatch.setattr(build_cache, "best_times", lambda given: calls.append(list(given)) or times)
    return calls, times


def again():
    """As another process would."""
    gemm_autotune._chosen.cache_clear()
    return kernel_for(SHAPE, torch.float32)


@pytest.mark.parametrize("name", [*FORMS, ROW_BY_ROW])
@pytest.mark.parametrize("with_bias", [False, True])
def test_each_form_multiplies(name, with_bias):
    form = candidates(SHAPE[0], torch.float32, compiled=name == ROW_BY_ROW)[name]
    weight = torch.randn(SHAPE) / SHAPE[1] ** 0.5
    bias = torch.randn(SHAPE[0]) if with_bias else None
    packed = form.pack(weight, None)
    for rows in (1, 2, 15, 16, 17, 100):
        x = torch.randn(rows, SHAPE[1])
        expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        torch.testing.assert_close(form(x, packed, bias).double(), expected, atol=ATOL, rtol=0)


def test_the_fastest_is_taken_and_measured_once_on_a_machine(measured):
    calls, times = measured
    assert kernel_for(SHAPE, torch.float32) is PLAIN
    times[TRANSPOSED] = 0.1
    assert again() is PLAIN
    assert calls == [list(FORMS.values())] * len(gemm_autotune.ROWS)
    assert kernel_for((SHAPE[0] + 16, SHAPE[1]), torch.float32) is TRANSPOSED  # another product


def test_other_compiled_functions_are_measured_again(measured, monkeypatch):
    calls, times = measured
    times[row_by_row(SHAPE[0], torch.float32)] = 0.4
    for key in ("one", "one", "another"):
        monkeypatch.setattr(bindings.required(torch.float32), "key", key)
        gemm_autotune._chosen.cache_clear()
        assert kernel_for(SHAPE, torch.float32, compiled=True).name == ROW_BY_ROW
    assert len(calls) == 2 * len(gemm_autotune.ROWS)


def test_a_lead_that_noise_could_make_decides_nothing(measured):
    _, times = measured
    times.update({PLAIN: 0.95, TRANSPOSED: 0.91})
    assert kernel_for(SHAPE, torch.float32) is PACKED


def test_a_form_in_which_a_row_depends_on_the_others_is_not_taken(measured, monkeypatch):
    def leaks(x, weight, bias):
        return F.linear(x, weight, bias) + x.sum() * 1e-6

    leaking = replace(PLAIN, name="leaking", product=leaks)
    monkeypatch.setattr(gemm_autotune, "FORMS", {**FORMS, "leaking": leaking})
    measured[1][leaking] = 0.01
    assert not gemm_autotune.is_batch_invariant(leaking, torch.randn(SHAPE))
    assert kernel_for(SHAPE, torch.float32) is PLAIN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2816, 512), (512, 1408), (128, 1408), (96, 64)])
def test_rows_do_not_depend_on_each_other_in_any_form_that_is_taken(shape, dtype):
    """On processors with AMX all but the compiled form fail in bfloat16."""
    form = kernel_for(shape, dtype, compiled=True)
    weight, x = torch.randn(shape).to(dtype), torch.randn(400, shape[1]).to(dtype)
    packed = form.pack(weight, None)
    whole = form(x, packed, None)
    for first, last in ((0, 1), (7, 15), (100, 133), (0, 300)):
        assert torch.equal(form(x[first:last], packed, None), whole[first:last])


@pytest.mark.parametrize("shape", [SHAPE, (64, 600)])
def test_a_packed_form_whose_rows_depend_on_each_other_gives_way(measured, monkeypatch, shape):
    _, times = measured
    compiled = row_by_row(shape[0], torch.bfloat16)
    times |= {PLAIN: 3.0, TRANSPOSED: 2.0, compiled: 4.0}
    monkeypatch.setattr(gemm_autotune, "is_batch_invariant", lambda form, weight: form is compiled)
    assert kernel_for(shape, torch.bfloat16, compiled=True) is compiled
    assert kernel_for(shape, torch.bfloat16) is PACKED  # nothing else is there


def test_small_products_and_machines_without_a_cache_are_not_measured(measured, monkeypatch):
    assert kernel_for((128, 160), torch.float32) is PACKED
    for dtype in (torch.float32, torch.bfloat16):
        assert kernel_for((128, 160), dtype, compiled=True) is row_by_row(128, dtype)
    monkeypatch.setattr(build_cache, "cache_file", lambda _: None)
    assert kernel_for(SHAPE, torch.float32) is PACKED
    assert measured[0] == []


def test_what_the_job_takes_is_kept(measured, monkeypatch):
    monkeypatch.setattr(build_cache, "first_rank_value", lambda *_: "transposed")
    assert kernel_for(SHAPE, torch.float32) is TRANSPOSED
    monkeypatch.setattr(build_cache, "first_rank_value", lambda _, own: own)
    assert again() is TRANSPOSED


def test_what_is_kept_and_unknown_is_not_followed(measured, home):
    kernel_for(SHAPE, torch.float32)
    (kept,) = home.rglob("float32-*x600")
    kept.write_text("of another version")
    assert again() is PACKED


@pytest.mark.parametrize("compiled", [False, True])
def test_measuring_takes_milliseconds(compiled):
    form = gemm_autotune.measure_fastest(SHAPE, torch.float32, compiled=compiled)
    assert form in candidates(SHAPE[0], torch.float32, compiled=compiled).values()


def test_what_the_job_compiles_is_measured_where_the_job_compiles(measured):
    _, times = measured
    compiled = row_by_row(SHAPE[0], torch.float32)
    times[compiled] = 0.4
    assert kernel_for(SHAPE, torch.float32, compiled=True) is compiled
    assert kernel_for(SHAPE, torch.float32) is PLAIN  # and the choice of the one is not that of the other
    assert kernel_for(SHAPE, torch.float32, compiled=True) is compiled


def test_a_compiled_form_is_taken_at_few_rows_though_it_wins_nothing_at_many(monkeypatch):
    compiled = row_by_row(SHAPE[0], torch.float32)
    found = iter(
        [
            {PACKED: 1.0, PLAIN: 2.0, TRANSPOSED: 2.0, compiled: 0.7},
            {PACKED: 4.0, compiled: 4.0, PLAIN: 5.0, TRANSPOSED: 5.0},
        ]
    )
    monkeypatch.setattr(build_cache, "best_times", lambda _: next(found))
    assert kernel_for(SHAPE, torch.float32, compiled=True) is compiled


def agree():
    return [
        build_cache.first_rank_value("form", f"rank {dist.get_rank()}"),
        build_cache.first_rank_value("other", "same"),
    ]


def test_ranks_take_what_the_first_to_ask_has():
    one, other = run_ranks(2, agree)
    assert one == other
    assert one[0] in ("rank 0", "rank 1")
    assert one[1] == "same"
