"""PPO end to end: killed and resumed, at another layout, with a critic from a folder."""

import pytest

from tests.e2e import runs
from tests.e2e.test_resume import kill_after
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

PPO = [
    "algorithm={name: ppo, lam: 0.95, kl_in: reward, kl_coef: 0.01, "
    "kl_ctrl: {type: adaptive, target_kl: 0.01, horizon: 400}, "
    "entropy_ctrl: {type: adaptive, target_entropy: 5.0, delta: 0.01}}",
    "critic={lr: 1.0e-2, param_offload: true, grad_offload: true, optimizer_offload: true}",
    "actor.param_offload=true",
    "checkpoint={interval: 2, export_hf: true}",
]
STEPS = [*PPO, "train.num_steps=5"]
RELATIVE = 1e-3  # fp32 sums in another order, through steps of Adam


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ppo")
    return folder, runs.train_in_pool(folder, STEPS, 1)


def losses(rows):
    return [row["critic/vf_loss"] for row in rows if "critic/vf_loss" in row]


@pytest.mark.parametrize("num_lines", [5, 7])
def test_a_killed_run_with_a_critic_continues_as_if_nothing_had_happened(num_lines, uninterrupted, tmp_path):
    kill_after(runs.fork(tmp_path, STEPS), tmp_path, num_lines)
    assert runs.train_in_pool(tmp_path, STEPS, 1) == uninterrupted[1]


def test_the_critic_learns_and_its_metrics_are_told(uninterrupted):
    rows = [row for row in uninterrupted[1] if "critic/vf_loss" in row]
    assert len(rows) == 5 and rows[0]["critic/values/max"] == 0 == rows[0]["critic/values/min"]
    assert rows[-1]["critic/values/mean"] != 0
    told = {"critic/vf_clipfrac", "critic/vpred_mean", "critic/grad_norm", "critic/lr", "critic/vf_explained_var"}
    told |= {f"critic/{name}/{what}" for name in ("returns", "advantages") for what in ("mean", "max", "min")}
    assert told <= rows[0].keys()
    coefs = [row["actor/reward_kl_penalty_coeff"] for row in rows]
    assert coefs[0] == pytest.approx(0.01) and len(set(coefs)) == 5  # the KL is not at its target
    assert rows[0]["critic/advantages/mean"] == pytest.approx(0, abs=1e-6)  # whitened


def test_a_commit_holds_the_critic_and_goes_on_at_another_layout(uninterrupted, tmp_path):
    """TP2 with sequence parallelism, then PP2: the losses are those of the single process."""
    tp2 = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    runs.train_in_pool(tmp_path, [*PPO, "train.num_steps=2", *tp2], 2)
    assert (tmp_path / "run/checkpoints/step-00000002/critic/config.json").is_file()
    found = runs.train_in_pool(tmp_path, [*PPO, "train.num_steps=3", "parallel.pipeline_model_parallel_size=2"], 2)
    assert losses(found) == pytest.approx(losses(uninterrupted[1])[:3], rel=RELATIVE)


def test_a_critic_begins_from_a_folder_and_learns_before_the_actor_does(uninterrupted, tmp_path):
    folder, _ = uninterrupted
    path = f"critic.path={folder}/run/checkpoints/step-00000004/hf"
    rows = runs.train_in_pool(tmp_path, ["algorithm.name=vapo", "train.critic_warmup=1", "train.num_steps=2", path], 1)
    rows = [row for row in rows if "critic/vf_loss" in row]
    assert ["actor/pg_loss" in row for row in rows] == [False, True]
    assert rows[0]["critic/values/mean"] == 0 != rows[1]["critic/values/mean"]


def evaluated(folder):
    from mrl.config.config import load
    from mrl.distributed import launch
    from mrl.megatron import parallel_state
    from mrl.train import evaluate

    parallel_state.destroy()
    launch.shutdown_distributed()
    try:
        return evaluate(load(f"{folder}/config-given.yaml", [f"run.output_dir={folder}/run", *STEPS]))
    finally:
        launch.init_distributed("cpu", num_threads=1)


def test_an_evaluation_needs_no_critic(uninterrupted):
    folder, rows = uninterrupted
    (found,) = run_ranks(1, evaluated, str(folder))
    assert found["val/accuracy"] == [row["val/accuracy"] for row in rows if "val/accuracy" in row][-1]


ADAPTERS = ["actor.lora={rank: 4, alpha: 8}", "critic.lora={rank: 4, alpha: 8}", "critic.lr=0.05", "actor.lr=0.01"]


@pytest.mark.parametrize("own", [False, True], ids=["shared", "from a folder"])
def test_a_critic_with_adapters_is_killed_resumed_and_moved(own, uninterrupted, tmp_path):
    """It shares the actor's frozen weights, or has those of a folder; its checkpoint has neither."""
    path = [f"critic.path={uninterrupted[0] / 'run/checkpoints/step-00000004/hf'}"] if own else []
    adapters = [*(ADAPTERS[1:] if own else ADAPTERS), *path]
    settings = [*STEPS, *adapters]
    whole = runs.train_in_pool(tmp_path / "whole", settings, 1)
    kill_after(runs.fork(tmp_path / "killed", settings), tmp_path / "killed", 6)
    assert runs.train_in_pool(tmp_path / "killed", settings, 1) == whole
    tp2 = ["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"]
    runs.train_in_pool(tmp_path / "moved", [*PPO, *adapters, "train.num_steps=2", *tp2], 2)
    found = runs.train_in_pool(tmp_path / "moved", [*PPO, *adapters, "train.num_steps=3"], 1)
    assert losses(found) == pytest.approx(losses(whole)[:3], rel=1e-2)
    assert min(losses(whole)) > 0
