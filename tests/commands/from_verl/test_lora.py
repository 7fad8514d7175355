"""LoRA of verl's two actors becomes `actor.lora`, with verl's defaults; what mrl lacks of it is listed."""

import json

import pytest
import yaml

from mrl.commands.from_verl.translate import translate
from mrl.config.config import load
from mrl.errors import UserError

MODEL = "actor_rollout_ref.model."
MEGATRON = {"actor_rollout_ref.actor.strategy": "megatron"}
GRPO = {"algorithm.adv_estimator": "grpo", f"{MODEL}path": "base"}
PEFT = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "use_rslora": True, "target_modules": ["q_proj", "v_proj"]}


def translated(given):
    """Returns the adapters of the translation, and the translation itself."""
    found = translate(GRPO | given)
    return load(yaml.safe_load(found.text) or {}).actor.lora, found


def keys(lines):
    return {line.partition("=")[0].partition(":")[0].removeprefix(MODEL) for line in lines}


def test_defaults_are_those_of_the_actor():
    assert (translated({f"{MODEL}lora_rank": 8})[0].alpha, translated({})[0].rank) == (16.0, 0)
    adapters, found = translated(MEGATRON | {f"{MODEL}lora.rank": 8})
    assert (adapters.alpha, adapters.target_modules, adapters.init) == (32.0, ["all-linear"], "kaiming")
    assert {"lora.type", "lora.lora_A_init_method"} <= keys(found.differs)  # verl's: one lora_A of q, k and v; xavier


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["linear_qkv"], ["q_proj", "k_proj", "v_proj"]),
        (["linear_q", "linear_fc1_up"], ["q_proj", "up_proj"]),
        (["linear_proj", "linear_fc1", "linear_fc2"], ["o_proj", "gate_proj", "up_proj", "down_proj"]),
        (["linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_up", "linear_fc1_gate", "linear_fc2"],
         ["all-linear"]),
        ([], ["all-linear"]),
    ],
)  # fmt: skip
def test_modules_of_megatron_become_those_of_hugging_face(names, expected):
    adapters, found = translated(MEGATRON | {f"{MODEL}lora.rank": 8, f"{MODEL}lora.target_modules": names})
    assert adapters.target_modules == expected and found.lost == translated(MEGATRON)[1].lost


@pytest.mark.parametrize(
    ("actor", "given", "lost"),
    [
        ({}, {"lora_rank": 8, "target_modules": ".*_proj"}, {"target_modules"}),
        ({}, {"lora_rank": 8, "target_modules": ["q_proj", "lm_head"]}, {"target_modules"}),
        ({}, {"lora_rank": 8, "exclude_modules": ".*visual.*"}, {"exclude_modules"}),
        ({}, {"lora_rank": 8, "exclude_modules": ["k_proj"]}, set()),
        ({}, {"lora.rank": 8}, {"lora.rank"}),
        ({}, {"lora_adapter_path": "nowhere"}, {"lora_adapter_path"}),
        (MEGATRON, {"lora_rank": 8}, {"lora_rank"}),
        (MEGATRON, {"lora.rank": 8, "lora.target_modules": ["linear_q", "router"]}, {"lora.target_modules"}),
        (MEGATRON, {"lora.rank": 8, "lora.target_modules": ["*.layers.0.*.linear_q"]}, {"lora.target_modules"}),
        (MEGATRON, {"lora.rank": 8, "lora.adapter_path": "nowhere"}, {"lora.adapter_path"}),
        (MEGATRON, {"lora.rank": 8, "lora.dtype": "fp8"}, {"lora.dtype"}),
        (MEGATRON, {"lora.rank": 8, "lora.lora_B_init_method": "normal"}, {"lora.lora_B_init_method"}),
        *((MEGATRON, {"lora.rank": 8, "lora.type": kind}, {"lora.type"}) for kind in ("dora", "vlm_lora")),
        (MEGATRON, {"lora.rank": 8, "lora.dtype": "bfloat16", "lora.merge": True, "lora.a2a_experimental": True,
                    "lora.fully_sharded_loras": True, "lora.freeze_vision_model": False}, set()),
        (MEGATRON, {"lora.rank": 0, "lora.type": "dora", "lora.dropout": 0.1}, set()),
    ],
)  # fmt: skip
def test_what_mrl_lacks_is_lost_once(actor, given, lost):
    _, found = translated(actor | {f"{MODEL}{key}": value for key, value in given.items()})
    for lines in (found.lost, found.missing):
        assert sorted(key for key in (line.partition("=")[0] for line in lines) if key.startswith(MODEL)) == sorted(
            f"{MODEL}{key}" for key in lost
        )


@pytest.mark.parametrize(
    ("given", "engine", "merge"), [({}, "vllm", True), ({"lora.merge": False}, "vllm", False),
                                   ({"lora.merge": True}, "vllm", True), ({"lora.merge": False}, "trtllm", True)]
)  # fmt: skip
def test_adapters_are_merged_unless_verl_says_otherwise(given, engine, merge):
    settings = {f"{MODEL}{key}": value for key, value in given.items()}
    for actor, rank in (({}, "lora_rank"), (MEGATRON, "lora.rank")):
        own = {f"{MODEL}{rank}": 8, "actor_rollout_ref.rollout.name": engine}
        assert translated(actor | own | settings)[0].merge is merge


@pytest.mark.parametrize("actor", [{}, MEGATRON])
def test_a_folder_of_adapters_has_its_own_rank_and_modules(actor, tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps(PEFT))
    path = "lora.adapter_path" if actor else "lora_adapter_path"
    kl = {"actor_rollout_ref.actor.use_kl_loss": True}
    adapters, found = translated(actor | kl | {f"{MODEL}{path}": str(tmp_path), f"{MODEL}lora_alpha": 2})
    assert (adapters.rank, adapters.alpha, adapters.use_rslora) == (4, 8.0, True)
    assert adapters.target_modules == PEFT["target_modules"] and adapters.adapter_path == str(tmp_path)
    assert not {key for key in keys(found.missing) if key.startswith("lora")}
    # verl's reference is the model without adapters
    assert yaml.safe_load(found.text)["reference"] == {"path": "base"}


@pytest.mark.parametrize("section", ["actor.lora", "critic.lora"])
@pytest.mark.parametrize(("theirs", "own"), [("r", "rank"), ("lora_rank", "rank"), ("lora_alpha", "alpha")])
def test_names_of_peft_are_refused_with_the_key_that_they_have_here(theirs, own, section, tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("{}\n")
    with pytest.raises(UserError, match=f"{section}.{own}"):
        load(path, [f"{section}.{theirs}=8"])
