"""GRPO on a mixture of experts that is resumed at another layout, or replays the engine's choices, or the actor's."""

import pytest

from tests.e2e import runs
from tests.e2e.test_layouts import TOKENS, assert_same

pytestmark = pytest.mark.slow

SIZES = (
    "hidden_size: 32, num_hidden_layers: 4, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16, "
    "moe_intermediate_size: 32"
)
MODELS = {
    "qwen3_moe": ["model.preset=qwen3_moe_tiny", f"model.overrides={{{SIZES}}}"],
    # the first of two pipeline stages has no experts; the routers' biases move
    "glm4_moe": [
        "model.preset=glm4_moe_tiny",
        f"model.overrides={{{SIZES}, first_k_dense_replace: 2, n_group: 2, topk_group: 2}}",
        "actor.moe_router_bias_update_rate=0.01",
    ],
    # latent attention, experts in groups
    "deepseek_v3": [
        "model.preset=deepseek_v3_tiny",
        "model.overrides={num_hidden_layers: 4, num_key_value_heads: 4, moe_intermediate_size: 32, "
        "first_k_dense_replace: 2}",
    ],
}
EP2 = ["parallel.expert_model_parallel_size=2"]
TP2_EP2 = [
    *EP2,
    "parallel.tensor_model_parallel_size=2",
    "parallel.sequence_parallel=true",
    "rollout.tensor_model_parallel_size=2",
    "rollout.expert_parallel_size=2",
]
REPLAY = ["rollout.enable_rollout_routing_replay=true", "actor.router_replay=rollout"]
RECOMPUTE = ["actor.router_replay=recompute", "algorithm.rollout_correction.preset=decoupled_token_is"]
CHANGED = "actor/moe_replay_changed_frac"
PP2 = ["parallel.pipeline_model_parallel_size=2"]


@pytest.fixture(scope="module", params=MODELS)
def model(request):
    return MODELS[request.param]


@pytest.fixture(scope="module")
def single(model, tmp_path_factory):
    return runs.train_in_pool(tmp_path_factory.mktemp("single"), model, 1)


def test_a_run_resumes_where_the_experts_lie_otherwise(model, single, tmp_path):
    runs.train_in_pool(tmp_path, [*model, *TP2_EP2, "train.num_steps=2"], 4)
    found = runs.train_in_pool(tmp_path, [*model, *PP2, "run.resume=must"], 2)
    assert_same(updates(found), updates(single))


def test_replayed_experts_give_the_same_updates(model, single, tmp_path):
    """The choices travel with the samples from the ranks that drew them to those that train on them."""
    short = [*model, *REPLAY, "train.num_steps=1", "train.warm_start.num_steps=1"]
    alone = runs.train_in_pool(tmp_path / "alone", short, 1)
    assert_same(runs.train_in_pool(tmp_path / "spread", [*short, *TP2_EP2], 4), alone)
    assert {name for row in alone for name in row} == {name for row in single for name in row} | {CHANGED}


def test_recomputed_experts_are_replayed_at_any_layout_and_after_a_resume(model, tmp_path):
    """Two optimizer steps on each rollout: by the second the routers would have chosen others."""
    both = [*model, *RECOMPUTE, "train.warm_start.num_steps=1", "actor.lr=0.02"]
    alone = runs.train_in_pool(tmp_path / "alone", [*both, "train.num_steps=2"], 1)
    runs.train_in_pool(tmp_path / "spread", [*both, *TP2_EP2, "train.num_steps=1"], 4)
    spread = runs.train_in_pool(tmp_path / "spread", [*both, *PP2, "train.num_steps=2", "run.resume=must"], 2)
    assert_same(updates(spread), updates(alone))
    assert all(row[CHANGED] > 0 for row in updates(alone))


def updates(rows):
    """The training steps, without the evaluation that ended the first run."""
    return [{name: row[name] for name in row if not name.startswith("val")} for row in rows if TOKENS in row]
