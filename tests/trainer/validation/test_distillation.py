"""What is refused of `distillation` before any rank starts; which prompt is whose."""

import pytest

from mrl.config.config import DistillationConfig, TeacherConfig, load
from mrl.errors import UserError
from mrl.trainer.run_plan import resolve
from mrl.trainer.validation.distillation import teacher_index
from mrl.types import Prompt
from tests.observed import CONFIG

LOSS = "distillation.distillation_loss"
SIZES = "hidden_size: 24, num_hidden_layers: 1, intermediate_size: 16, num_attention_heads: 2, num_key_value_heads: 2"
ONE = f"distillation.teacher_models=[{{preset: qwen2_tiny, overrides: {{{SIZES}}}}}]"
ON = ("distillation.enabled=true", ONE)
REFUSED = {
    "idle": ((ONE,), "teacher_models is set, but would have no effect because distillation.enabled is false"),
    "none": (("distillation.enabled=true",), "teacher_models is empty"),
    "neither": (("distillation.enabled=true", "distillation.teacher_models=[{key: a}]"), "neither of model_path"),
    "no preset": (
        ("distillation.enabled=true", "distillation.teacher_models=[{model_path: mrl, overrides: {a: 1}}]"),
        "preset is null",
    ),
    "twice": (
        (
            "distillation.enabled=true",
            "distillation.teacher_models=[{key: a, preset: qwen2_tiny}, {key: a, preset: llama_tiny}]",
        ),
        "two teachers have the same key",
    ),
    "one key": ((*ON, "distillation.teacher_models[0].key=a"), "there is only one teacher"),
    "sft": ((*ON, "algorithm.name=sft", "train.minibatch_size=null"), "algorithm.name=sft does not sample"),
    "k1": ((*ON, f"{LOSS}.loss_mode=k1"), "has a gradient that does not depend on the teacher"),
    "policy gradient": (
        (*ON, f"{LOSS}={{loss_mode: forward_kl, use_policy_gradient: true}}"),
        "does not depend on the sampled token",
    ),
    "topk idle": ((*ON, f"{LOSS}.topk=4"), "topk=4 would have no effect because loss_mode is k3"),
    "topk": ((*ON, f"{LOSS}={{loss_mode: forward_kl_topk, topk: 99}}"), "more than the 14 tokens"),
    "beta": ((*ON, f"{LOSS}.beta=0.3"), "would have no effect because loss_mode is k3"),
    "beta out of range": ((*ON, f"{LOSS}={{loss_mode: jsd, beta: 1.0}}"), "is out of range"),
    "clip": ((*ON, f"{LOSS}.clip_ratio_low=0.1"), "because use_policy_gradient is false"),
    "coef": (
        (*ON, f"{LOSS}={{use_task_rewards: false, distillation_loss_coef: 2}}"),
        "because use_task_rewards is false",
    ),
    "kl": ((*ON, f"{LOSS}.use_task_rewards=false", "algorithm.kl_in=loss"), "algorithm.kl_in would have no effect"),
    "weights": (
        (*ON, f"{LOSS}.use_task_rewards=false", "algorithm.rollout_correction={bypass_mode: false, rollout_is: token}"),
        "algorithm.rollout_correction.rollout_is would have no effect because",
    ),
    "reinforce": (
        (*ON, f"{LOSS}.use_task_rewards=false", "algorithm.rollout_correction.loss_type=reinforce"),
        "algorithm.rollout_correction.loss_type would have no effect because",
    ),
    "off-policy mask": (
        (*ON, f"{LOSS}.use_task_rewards=false", "algorithm.rollout_correction.off_policy_mask_threshold=0.1"),
        "algorithm.rollout_correction.off_policy_mask_threshold would have no effect because",
    ),
    "policy loss": (
        (*ON, f"{LOSS}.use_task_rewards=false", "algorithm.policy_loss=sapo"),
        "algorithm.policy_loss=sapo would have no effect because",
    ),
    "clip of the task": (
        (*ON, f"{LOSS}.use_task_rewards=false", "algorithm.clip_high=0.3"),
        "algorithm.clip_high=0.3 would have no effect because",
    ),
    "section of a loss": (
        (*ON, f"{LOSS}.use_task_rewards=false", "algorithm={name: sapo, sapo: {tau_pos: 2}}"),
        "algorithm.sapo would have no effect because",
    ),
    "advantages": (
        (*ON, f"{LOSS}.use_task_rewards=false", "algorithm.advantage_std=none"),
        "algorithm.advantage_std=none would have no effect because",
    ),
    "critic": ((*ON, f"{LOSS}.use_task_rewards=false", "algorithm.name=ppo"), "algorithm.name=ppo would have no"),
    "vocabulary": (
        ("distillation.enabled=true", "distillation.teacher_models=[{preset: qwen2_tiny, overrides: {vocab_size: 9}}]"),
        "has 9 tokens, but the student has 14",
    ),
    "experts": (
        ("distillation.enabled=true", "distillation.teacher_models=[{preset: qwen3_moe_tiny}]"),
        "is an MoE model and the other is dense",
    ),
    "positions": (
        (
            "distillation.enabled=true",
            "distillation.teacher_models=[{preset: qwen2_tiny, overrides: {max_position_embeddings: 8}}]",
        ),
        "has positions for 8 tokens",
    ),
    "heads": (
        (
            "distillation.enabled=true",
            ONE.replace("heads: 2", "heads: 3"),
        ),
        "distillation.teacher_models[0].preset=qwen2_tiny: parallel.tensor_model_parallel_size=2",
    ),
    "a preset that is none": (
        ("distillation.enabled=true", "distillation.teacher_models=[{preset: qwen2_tin}]"),
        "distillation.teacher_models[0]: model.preset: there is no 'qwen2_tin'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_teach_is_refused_with_the_reason(case, tmp_path):
    overrides, said = REFUSED[case]
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    with pytest.raises(UserError) as caught:
        ranks = 2 if case == "heads" else 1
        layout = ("parallel.tensor_model_parallel_size=2",) if case == "heads" else ()
        resolve(load(file, [*overrides, *layout]), ranks)
    assert said in str(caught.value)


ALLOWED = {
    "tests": ("algorithm.rollout_correction={rollout_rs: token_k1, rollout_rs_threshold: '1.3'}",),
    "weights of a policy gradient": (
        "algorithm.rollout_correction.preset=decoupled_token_is",
        f"{LOSS}.loss_mode=k1",
        f"{LOSS}.use_policy_gradient=true",
    ),
    "what decides which tokens count": ("algorithm={name: dapo, dynamic_sampling: false}",),
    "one sample of a prompt": ("rollout.n=1", "algorithm.singleton_group=zero"),
}


@pytest.mark.parametrize("case", ALLOWED)
def test_what_acts_on_the_distance_is_allowed_without_the_task(case, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    found = resolve(load(file, [*ON, f"{LOSS}.use_task_rewards=false", *ALLOWED[case]]), 1)
    assert resolve(found.config, 1).config == found.config


def prompt(**row):
    return Prompt(1, (1,), "1", source="rows.jsonl:1", data_source="sums", row=row)


def test_a_prompt_is_the_teachers_whose_key_its_column_holds():
    several = [TeacherConfig(key="maths"), TeacherConfig(key="sums")]
    assert teacher_index(DistillationConfig(True, several), prompt()) == 1
    assert teacher_index(DistillationConfig(True, several, "school"), prompt(school="maths")) == 0
    assert teacher_index(DistillationConfig(True, several[:1]), prompt()) == 0
    for wrong in (prompt(school="law"), prompt()):
        with pytest.raises(UserError, match=r"rows\.jsonl:1: column 'school' .*maths, sums"):
            teacher_index(DistillationConfig(True, several, "school"), wrong)
