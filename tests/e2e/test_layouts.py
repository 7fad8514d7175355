"""One config at every layout gives the numbers of the single process, from the command line on."""

import math

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.slow

RELATIVE = 1e-4  # fp32 sums in another order, over three steps of Adam
ABSOLUTE = 1e-6  # metrics that are zero but for rounding (mean advantage, KL at ratio 1)

DEEPER = "model.overrides.num_hidden_layers=4"
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
        ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2", DEEPER],
    ),
    "dp2_rollout_tp2": (2, ["rollout.tensor_model_parallel_size=2"]),
    "dp2_offloaded": (2, [f"actor.{part}_offload=true" for part in ("param", "grad", "optimizer")]),
    "cp2": (2, ["parallel.context_parallel_size=2"]),
    "dp4": (4, []),
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

EXPERTS = [
    "model.preset=qwen3_moe_tiny",
    "model.overrides.moe_intermediate_size=32",
    "model.overrides.head_dim=8",
    "actor.moe_z_loss_coeff=0.001",  # the auxiliary loss is a microbatch's, and microbatches follow the layout
]
EXPERT_LAYOUTS = {
    "ep2_rollout_ep2": (
        2,
        [
            "parallel.expert_model_parallel_size=2",
            "rollout.tensor_model_parallel_size=2",
            "rollout.expert_parallel_size=2",
        ],
    ),
    "tp2_ep2_sp": (
        4,
        [
            "parallel.tensor_model_parallel_size=2",
            "parallel.expert_model_parallel_size=2",
            "parallel.sequence_parallel=true",
            "rollout.tensor_model_parallel_size=4",
            "rollout.expert_parallel_size=2",
        ],
    ),
    "cp2_ep2": (2, ["parallel.context_parallel_size=2", "parallel.expert_model_parallel_size=2"]),
}

FREE = ["~algorithm.clip_low", "~algorithm.clip_high", "actor.ppo_epochs=2"]
OBJECTIVES = {
    "kl_cov over dp2": ("dp2_rollout_tp2", ["algorithm.policy_loss=kl_cov", "algorithm.kl_cov.kl_cov_ratio=0.2"]),
    "clip_cov on high entropy over pp2": (
        "pp2",
        [
            "algorithm.policy_loss=clip_cov",
            "algorithm.clip_cov={clip_cov_ratio: 0.2, clip_cov_lb: -9.0, clip_cov_ub: 9.0}",
            "algorithm.top_entropy_quantile=0.5",
        ],
    ),
    "gmpo over cp2": ("cp2", ["algorithm.policy_loss=gmpo"]),
    "rollout correction over tp2 and pp2": (
        "tp2_pp2_sp",
        [
            "algorithm.rollout_correction={loss_type: reinforce, rollout_is: sequence, rollout_rs: token_k1, "
            "rollout_is_batch_normalize: true, rollout_rs_threshold: 1.05, rollout_rs_denominator: kept}",
            "~algorithm.clip_low",
            "~algorithm.clip_high",
        ],
    ),
    "gspo over tp2 and pp2": ("tp2_pp2_sp", ["algorithm.policy_loss=gspo", "algorithm.clip_high=0.1"]),
}

TOKENS = "rollout/token_checksum"
"""Of all sampled tokens of a step: equal, not close."""
TORCHRUN = "tp2"
"""Started as a user does; the others run the same command line in ranks that are up already."""


def compared(name):
    """Mismatch metrics measure rounding itself, bytes depend on the layout."""
    return not name.startswith(("training/rollout_probs_diff", "rollout_corr/", "refit/")) and name not in (
        "step",
        "phase",
    )


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return runs.train_in_pool(tmp_path_factory.mktemp("single"), [], 1)


@pytest.fixture(scope="module")
def single_deeper(tmp_path_factory):
    return runs.train_in_pool(tmp_path_factory.mktemp("single"), [DEEPER], 1)


@pytest.fixture(scope="module")
def single_with_experts(tmp_path_factory):
    return runs.train_in_pool(tmp_path_factory.mktemp("single"), EXPERTS, 1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_metrics_equal_the_single_process(layout, request, tmp_path):
    ranks, overrides = LAYOUTS[layout]
    start = runs.train if layout == TORCHRUN else runs.train_in_pool
    single = request.getfixturevalue("single_deeper" if DEEPER in overrides else "single")
    assert_same(start(tmp_path, overrides, ranks), single)


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
def test_with_experts_too(layout, single_with_experts, tmp_path):
    ranks, overrides = EXPERT_LAYOUTS[layout]
    assert_same(runs.train_in_pool(tmp_path, [*EXPERTS, *overrides], ranks), single_with_experts)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_that_look_at_more_than_a_token_do_too(objective, tmp_path):
    layout, overrides = OBJECTIVES[objective]
    ranks, laid = LAYOUTS[layout]
    single = runs.train_in_pool(tmp_path / "single", [*FREE, *overrides], 1)
    assert_same(runs.train_in_pool(tmp_path / "laid", [*FREE, *overrides, *laid], ranks), single)


def assert_same(found, single):
    assert [(row["phase"], row["step"]) for row in found] == [(row["phase"], row["step"]) for row in single]
    for ours, theirs in zip(found, single, strict=True):
        where = f"{ours['phase']} step {ours['step']}"
        assert ours.keys() == theirs.keys(), where
        for name in filter(compared, ours):
            assert math.isclose(ours[name], theirs[name], rel_tol=RELATIVE, abs_tol=ABSOLUTE), (
                where, name, ours[name], theirs[name],
            )  # fmt: skip
    assert [row[TOKENS] for row in found if TOKENS in row] == [row[TOKENS] for row in single if TOKENS in row]
