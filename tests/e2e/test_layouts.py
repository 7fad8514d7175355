"""One config at every layout gives the numbers of the single process, from the command line on."""

import math

import pytest

from tests.e2e import runs

RELATIVE = 1e-4  # fp32 sums in another order, over three steps of Adam
ABSOLUTE = 1e-6  # metrics that are zero but for rounding (mean advantage, KL at ratio 1)

LAYOUTS = {
    "tp2": (2, ["parallel.tensor_model_parallel_size=2"]),
    "tp2_sp_rollout_tp2": (
        2,
        [
            "parallel.tensor_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "rollout.tensor_model_parallel_size=2",
        ],
    ),
    "pp2": (2, ["parallel.pipeline_model_parallel_size=2"]),
    "pp2_vpp2": (
        2,
        ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2"],
    ),
    "dp2_rollout_tp2": (2, ["rollout.tensor_model_parallel_size=2"]),
    "dp2": (2, []),
    "tp2_pp2_sp": (
        4,
        [
            "parallel.tensor_model_parallel_size=2",
            "parallel.pipeline_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "rollout.tensor_model_parallel_size=2",
        ],
    ),
}


TOKENS = "rollout/token_checksum"
"""Of all sampled tokens of a step: equal, not close."""
TORCHRUN = {"tp2", "tp2_pp2_sp"}
"""Started as a user does; the others run the same command line in ranks that are up already."""


def compared(name):
    """Mismatch metrics measure rounding itself, bytes depend on the layout."""
    return not name.startswith(("training/rollout_probs_diff", "rollout_corr/", "refit/")) and name not in (
        "step",
        "phase",
    )


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return runs.train(tmp_path_factory.mktemp("single"))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_equal_the_single_process(layout, single, tmp_path):
    ranks, overrides = LAYOUTS[layout]
    start = runs.train if layout in TORCHRUN else runs.train_in_pool
    found = start(tmp_path, overrides, ranks)
    assert [(row["phase"], row["step"]) for row in found] == [(row["phase"], row["step"]) for row in single]
    for ours, theirs in zip(found, single, strict=True):
        where = f"{ours['phase']} step {ours['step']}"
        assert ours.keys() == theirs.keys(), where
        for name in filter(compared, ours):
            assert math.isclose(ours[name], theirs[name], rel_tol=RELATIVE, abs_tol=ABSOLUTE), (
                where, name, ours[name], theirs[name],
            )  # fmt: skip
    assert [row[TOKENS] for row in found if TOKENS in row] == [row[TOKENS] for row in single if TOKENS in row]
