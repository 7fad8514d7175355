"""What becomes of the distillation of a verl run, and of what verl ignores beside it."""

import yaml

from mrl.commands.from_verl.translate import translate


def test_a_distillation_is_translated_with_its_teachers():
    section = "distillation."
    given = {
        "algorithm.adv_estimator": "grpo",
        f"{section}enabled": True,
        f"{section}teacher_models.teacher_model1.key": "openai/gsm8k",
        f"{section}teacher_models.teacher_model1.model_path": "Qwen/Qwen3-4B",
        f"{section}teacher_models.teacher_model1.num_replicas": 2,
        f"{section}teacher_models.teacher_model1.inference.tensor_model_parallel_size": 2,
        f"{section}teacher_models.other.key": "geometry",
        f"{section}teacher_models.other.model_path": "/models/other",
        f"{section}distillation_loss.loss_mode": "low_var_kl",
        f"{section}distillation_loss.use_task_rewards": False,
        f"{section}distillation_loss.loss_max_clamp": 10.0,
        f"{section}n_gpus_per_node": 4,
    }
    found = translate(given)
    distilled = yaml.safe_load(found.text)["distillation"]
    assert distilled == {
        "enabled": True,
        "teacher_models": [
            {"key": "openai/gsm8k", "model_path": "Qwen/Qwen3-4B"}, {"key": "geometry", "model_path": "/models/other"}
        ],
        "distillation_loss": {"use_task_rewards": False, "loss_max_clamp": 10.0},
    }  # fmt: skip
    assert [one for one in found.missing if section in one] == []
    assert sum("alternating with it" in one for one in found.moot) == 2
    one = {key: value for key, value in given.items() if "other" not in key} | {
        f"{section}distillation_loss.loss_mode": "forward_kl_topk",
        f"{section}distillation_loss.use_policy_gradient": True,
    }
    found = translate(one)
    distilled = yaml.safe_load(found.text)["distillation"]
    assert distilled["teacher_models"] == [{"model_path": "Qwen/Qwen3-4B"}]
    assert distilled["distillation_loss"]["loss_mode"] == "forward_kl_topk"
    assert [one for one in found.missing if "0 on average" in one]
    assert "distillation" not in translate(one | {f"{section}enabled": False}).text


def test_without_task_rewards_what_only_the_task_reads_is_left_out(tmp_path):
    """verl computes no policy loss then, and ignores these; mrl refuses them."""
    actor, correction, loss = (
        "actor_rollout_ref.actor.",
        "algorithm.rollout_correction.",
        "distillation.distillation_loss.",
    )
    given = {
        "algorithm.adv_estimator": "grpo",
        "actor_rollout_ref.rollout.n": 4,
        f"{actor}use_kl_loss": True,
        f"{actor}entropy_coeff": 0.01,
        f"{actor}clip_ratio_high": 0.28,
        f"{actor}policy_loss.loss_mode": "gspo",
        f"{correction}rollout_is": "token",
        f"{correction}rollout_is_threshold": 2.0,
        f"{correction}rollout_rs": "token_k1",
        f"{correction}rollout_rs_threshold": "0.5_2.0",
        "distillation.enabled": True,
        "distillation.teacher_models.teacher_model.model_path": str(tmp_path),
        f"{loss}use_task_rewards": False,
    }
    found = translate(given)
    algorithm = yaml.safe_load(found.text)["algorithm"]
    assert algorithm.keys() == {"loss_aggregation", "rollout_correction"}
    assert algorithm["rollout_correction"] == {
        "bypass_mode": False, "rollout_rs": "token_k1", "rollout_rs_threshold": "0.5_2.0"
    }  # fmt: skip
    said = "left out: only the distillation loss is minimized"
    left = {one.partition(":")[0].partition("=")[0] for one in found.missing if said in one}
    names = ("policy_loss", "kl_in", "entropy_coef", "rollout_correction.rollout_is")
    assert left == {f"algorithm.{name}" for name in names}
    by_gradient = translate(given | {f"{loss}use_policy_gradient": True})
    assert yaml.safe_load(by_gradient.text)["algorithm"]["rollout_correction"]["rollout_is"] == "token"
