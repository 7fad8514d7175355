"""Every key of verl's trainer config maps or is told why not; its command lines give configs that resolve."""

import json
from dataclasses import fields

import pytest
import yaml
from trl import GRPOConfig, SFTConfig

from mrl.algorithms._policy_loss import LOSSES
from mrl.algorithms.base import build
from mrl.commands import launch
from mrl.commands.cli import _parse, main
from mrl.commands.from_verl.command_line import read_settings
from mrl.commands.from_verl.objective import BY_SEQUENCE, UNCLIPPED
from mrl.commands.from_verl.translate import translate
from mrl.commands.launch import LaunchOptions
from mrl.config.config import Config, RolloutConfig, load
from mrl.config.keys import dotted_keys
from mrl.config.verl_keys.docs_page import tables
from mrl.config.verl_keys.foreign_names import MEGATRON, NEMO_RL, TRL, key_hint
from mrl.config.verl_keys.loss_names import ABSENT_ESTIMATORS, VERL_ESTIMATORS, VERL_LOSSES
from mrl.config.verl_keys.translated_keys import MAPS, MISSING, is_harmless, verdict
from mrl.errors import UserError
from mrl.trainer.run_plan import resolve
from mrl.trainer.validation.parallel import check_ranks
from tests.source import ROOT

VERL = json.loads((ROOT / "tests" / "config" / "verl_keys" / "verl-0.9.1.json").read_text())
"""Key -> default, of the trainer config of verl 0.9.1 with each of its four actors (`_generated_ppo_*.yaml`)."""

LINES = json.loads((ROOT / "tests" / "config" / "verl_keys" / "verl_lines.json").read_text())
"""Words of the command lines that verl's examples/grpo_trainer start."""

VLLM_LINES = json.loads((ROOT / "tests" / "config" / "verl_keys" / "verl_vllm_lines.json").read_text())
"""The same of other examples, which tell vLLM more: their words from verl.trainer.main_ppo on."""

STAND_IN = (
    "model.path=null", "model.tokenizer='char:0123456789+'",
    "model.overrides={num_attention_heads: 32, num_key_value_heads: 32, num_hidden_layers: 48, "
    "max_position_embeddings: 1000000}",
)  # fmt: skip
"""A model that every layout of the examples divides."""


def test_each_key_maps_or_is_told_why_not_and_is_answered_in_a_config():
    known = dotted_keys(Config)
    for key, default in VERL.items():
        found = verdict(key)
        refers = isinstance(default, str) and default.startswith("${")
        if found.kind == "maps":
            assert found.to in known and (MAPS[key][1] == default or refers), key
        else:
            assert found.text, key
            assert found.kind == "moot" or is_harmless(key, default), key
        assert found.to in key_hint(key) and found.text in key_hint(key), key


def test_what_memory_depends_on_and_is_not_the_same_is_told():
    memory = "actor_rollout_ref.rollout.gpu_memory_utilization"
    engine = {"actor_rollout_ref.rollout.name": "vllm"}
    given = {"algorithm.adv_estimator": "grpo", memory: 0.6, "trainer.n_gpus_per_node": 4, **engine}
    of_engine, of_actor = translate(given).differs
    assert of_engine.startswith(f"{memory}=0.6: fraction of the free memory at start")
    assert "all 4 GPUs; in mrl each GPU has all weights unless `parallel` shards them" in of_actor
    alone = {"trainer.n_gpus_per_node": 1, "actor_rollout_ref.rollout.tensor_model_parallel_size": 1}
    assert translate({"algorithm.adv_estimator": "grpo", **engine, **alone}).differs == []
    assert translate(given | {"actor_rollout_ref.actor.strategy": "megatron"}).differs == [of_engine]


def test_that_fewer_checkpoints_are_kept_is_told_where_any_are_written():
    given = {"algorithm.adv_estimator": "grpo", "trainer.n_gpus_per_node": 2}
    kept = "trainer.max_actor_ckpt_to_keep"
    told = translate(given | {"trainer.save_freq": 5}).differs
    assert any(one.startswith(f"{kept}=null: verl keeps all checkpoints") for one in told)
    assert not [one for one in translate(given | {"trainer.save_freq": 5, kept: 3}).differs if kept in one]


def test_defaults_alone_list_nothing():
    given = {key: value for key, value in VERL.items() if value != "???"} | {"algorithm.adv_estimator": "grpo"}
    assert not translate(given).missing


def test_patterns_without_a_counterpart_list_another_value():
    for key in (
        "critic.model.lora_rank",
        "data.trust_remote_code",
        "trainer.val_before_train",
        "trainer.val_only",
    ):
        other = not VERL[key] if isinstance(VERL[key], bool) else 7
        (told,) = [one for one in translate({"algorithm.adv_estimator": "grpo", key: other}).missing if key in one]
        assert told == f"{key}={other}: {verdict(key).text}"
    assert MISSING


def test_the_page_holds_the_table():
    assert (ROOT / "mrl" / "docs" / "verl.md").read_text().endswith(tables())


def resolved(found, folder, *overrides):
    """The translation with another model and other data, which mrl's checks allow."""
    rows = folder / "rows.jsonl"
    rows.write_text('{"prompt": "1", "answer": "1"}\n' * 2)
    (folder / "run.yaml").write_text(found.text)
    preset = "qwen3_moe_tiny" if "expert" in found.text else "qwen3_tiny"
    changed = [f"model.preset={preset}", f"data.train_files={rows}", f"data.val_files={rows}", *STAND_IN]
    config = load(folder / "run.yaml", [*changed, *overrides])
    resolve(config, found.num_nodes * found.gpus_per_node)
    return config


@pytest.mark.parametrize("name", LINES)
def test_a_command_line_of_an_example_resolves(name, tmp_path):
    config = resolved(translate(read_settings(LINES[name])), tmp_path)
    assert config.rollout.name == "vllm"
    assert config.algorithm.dual_clip == 3.0 and config.algorithm.loss_aggregation == "token_mean"
    assert config.algorithm.kl_in == "loss" and config.algorithm.rollout_correction.bypass_mode is False


@pytest.mark.parametrize(
    ("given", "section"),
    [
        ("", {"bypass_mode": False}),
        (
            "rollout_is=token rollout_is_threshold=0.5_5.0 rollout_rs_threshold=3",
            {"bypass_mode": False, "rollout_is": "token", "rollout_is_threshold": "0.5_5.0"},
        ),
        ("bypass_mode=True rollout_is=token rollout_is_threshold=2.0", {"bypass_mode": True}),
        (
            "bypass_mode=True loss_type=reinforce rollout_rs=token_k1,seq_max_k3 rollout_rs_threshold=0.5_2.0,0.1",
            {
                "bypass_mode": True,
                "loss_type": "reinforce",
                "rollout_rs": "token_k1,seq_max_k3",
                "rollout_rs_threshold": "0.5_2.0,0.1",
            },
        ),
    ],
)
def test_a_rollout_correction_keeps_its_meaning(given, section):
    words = ["algorithm.adv_estimator=grpo", *(f"algorithm.rollout_correction.{item}" for item in given.split())]
    found = translate(read_settings(words))
    assert yaml.safe_load(found.text)["algorithm"].get("rollout_correction") == section
    assert len([one for one in found.missing if "rollout_correction" in one]) == (section == {"bypass_mode": True})


def test_values_are_translated():
    line = (
        "algorithm.adv_estimator=grpo data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=16 "
        "+actor_rollout_ref.actor.clip_ratio_c=5.0 actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm "
        "algorithm.norm_adv_by_std_in_grpo=False actor_rollout_ref.actor.optim.lr_warmup_steps=10 "
        "actor_rollout_ref.rollout.n=4 actor_rollout_ref.rollout.val_kwargs.do_sample=True "
        "actor_rollout_ref.rollout.val_kwargs.temperature=0.6 trainer.total_training_steps=9 trainer.save_freq=-1 "
        "trainer.test_freq=5 trainer.resume_mode=disable trainer.logger=['console','wandb'] trainer.project_name=p "
        "trainer.experiment_name=e actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 data.truncation=left "
        "custom_reward_function.path=r.py ++custom_reward_function.reward_kwargs.bonus=2"
    )
    found = yaml.safe_load(translate(read_settings(["python3", "-m", "verl.trainer.main_ppo", *line.split()])).text)
    assert found["train"] == {
        "batch_size": 64, "minibatch_size": 16, "num_epochs": 30, "num_steps": 9, "eval_interval": 5,
    }  # fmt: skip
    assert found["actor"]["lr_warmup_steps"] == 40  # of the optimizer, four in a step
    assert found["actor"]["max_tokens_per_microbatch"] == 2 * 1024
    assert (found["algorithm"]["dual_clip"], found["algorithm"]["advantage_std"]) == (5.0, "none")
    assert found["algorithm"]["loss_aggregation"] == "seq_mean_token_sum_norm"
    assert found["rollout"]["val_kwargs"] == {"do_sample": True, "temperature": 0.6}
    assert found["reward"] == {"functions": [{"name": "r.py:compute_score", "kwargs": {"bonus": 2}}]}


@pytest.mark.parametrize("mode", VERL_LOSSES)
def test_each_policy_loss_is_translated_with_its_settings(mode):
    actor = "actor_rollout_ref.actor."
    line = (
        f"algorithm.adv_estimator=grpo {actor}policy_loss.loss_mode={mode} {actor}clip_ratio_low=10 "
        f"{actor}clip_ratio_high=0.3 {actor}clip_ratio_c=7.0 {actor}tau_neg=2.0 "
        f"{actor}policy_loss.dro_beta=0.3 data.train_files=rows.jsonl"
    )
    if mode != "cispo":
        line = line.replace("=10", "=0.25")
    found = translate(read_settings(line.split()))
    assert not [one for one in found.missing if actor in one]
    config = build(load(yaml.safe_load(found.text)).algorithm, RolloutConfig()).config
    loss = VERL_LOSSES[mode]
    reads = LOSSES[loss].reads
    assert config.policy_loss == loss and (config.clip_low is None) is (loss in UNCLIPPED) is ("clip_low" not in reads)
    low = 1.0 if mode == "cispo" else 0.25
    assert loss in UNCLIPPED or (config.clip_low, config.clip_high) == (low, 0.3)
    assert config.dual_clip == {"vanilla": 7.0, "gspo": 0.0}.get(loss) or "dual_clip" not in reads
    assert config.dppo.ratio_cap == (7.0 if "dppo" in loss else 20.0)
    assert config.sapo.tau_neg == (2.0 if loss == "sapo" else 1.05)
    assert config.dro.dro_beta == (0.3 if loss == "dro" else 1.0)
    assert config.loss_aggregation == ("seq_mean_token_mean" if loss in BY_SEQUENCE else "token_mean")


def test_a_policy_loss_that_is_not_there_is_listed():
    line = "algorithm.adv_estimator=gpg actor_rollout_ref.actor.policy_loss.loss_mode=tomorrow"
    told = "\n".join(translate(read_settings(line.split())).missing)
    assert (
        "loss_mode=tomorrow: mrl has vanilla, gspo" in told and "adv_estimator=gpg: advantages are multiplied" in told
    )


def test_megatrons_own_fields_keep_their_names():
    megatron, optimizer = "actor_rollout_ref.actor.megatron.", "actor_rollout_ref.actor.optim."
    line = (
        "algorithm.adv_estimator=grpo model_engine=megatron "
        f"{megatron}override_transformer_config.apply_rope_fusion=True "
        f"{megatron}override_transformer_config.recompute_granularity=selective "
        f"{megatron}override_transformer_config.recompute_modules=[mlp,layernorm] "
        f"{megatron}override_transformer_config.persist_layer_norm=True "
        f"{megatron}override_transformer_config.hidden_dropout=0.0 "
        f"{megatron}override_transformer_config.moe_token_dispatcher_type=flex "
        f"{megatron}override_transformer_config.nonsense=3 {megatron}override_ddp_config.bucket_size=1000 "
        f"{megatron}override_ddp_config.overlap_grad_reduce=True "
        f"{optimizer}override_optimizer_config.decoupled_weight_decay=False "
        f"{optimizer}override_optimizer_config.optimizer_cpu_offload=True "
        f"{optimizer}override_optimizer_config.sgd_momentum=0.5 "
        f"{optimizer}use_precision_aware_optimizer=True {optimizer}main_grads_dtype=bf16 {optimizer}exp_avg_dtype=bf16"
    )
    found = translate(read_settings(line.split()))
    config = yaml.safe_load(found.text)
    assert config["megatron"] == {
        "transformer": {
            "apply_rope_fusion": True, "recompute_granularity": "selective", "recompute_modules": ["mlp", "layernorm"],
        },
        "ddp": {"bucket_size": 1000, "grad_reduce_in_fp32": False},
        "optimizer": {
            "decoupled_weight_decay": False, "optimizer_cpu_offload": True, "use_precision_aware_optimizer": True,
            "main_grads_dtype": "bf16", "exp_avg_dtype": "bf16",
        },
    }  # fmt: skip
    assert config["actor"]["overlap_grad_reduce"] and config["actor"]["moe_token_dispatcher_type"] == "flex"
    assert "recompute" not in config["actor"]
    missing, moot = "\n".join(found.missing), "\n".join(found.moot)
    assert "nonsense=3: Megatron has no such field" in missing and "the optimizer is adam" in missing
    assert "persist_layer_norm: it would have no effect" in moot and "hidden_dropout: it is the default" in moot


@pytest.mark.parametrize(
    ("fields", "recompute"),
    [
        ("recompute_granularity=full recompute_method=uniform recompute_num_layers=1", "full"),
        ("recompute_granularity=selective recompute_modules=[core_attn]", "selective"),
        ("recompute_granularity=full recompute_method=block recompute_num_layers=2", None),
    ],
)
def test_recompute_is_said_by_mrls_key_where_that_can_say_it(fields, recompute):
    prefix = "actor_rollout_ref.actor.megatron.override_transformer_config."
    words = ["algorithm.adv_estimator=grpo", "model_engine=megatron", *(f"{prefix}{item}" for item in fields.split())]
    config = yaml.safe_load(translate(read_settings(words)).text)
    assert config.get("actor", {}).get("recompute") == recompute
    passed = config.get("megatron", {}).get("transformer", {})
    assert set(passed) == (set() if recompute else {item.split("=")[0] for item in fields.split()})


@pytest.mark.parametrize(
    ("given", "rollout"), [("R2", "recompute"), ("R3", "rollout"), ("disabled", None)], ids=lambda word: str(word)
)
def test_router_replay_keeps_its_meaning(given, rollout):
    line = f"algorithm.adv_estimator=grpo actor_rollout_ref.actor.megatron.router_replay.mode={given}"
    found = translate(read_settings(line.split()))
    config = yaml.safe_load(found.text)
    assert config.get("actor", {}).get("router_replay") == rollout
    assert config["algorithm"]["rollout_correction"]["bypass_mode"] is False  # verl's own default, which R2 needs
    assert not [one for one in found.missing if "router_replay" in one]


SCRIPT = """
set -xeuo pipefail
MODEL=${MODEL:-models/tiny}
KIND=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)
DATA=(data.train_files="['a.parquet', 'b c.parquet']" algorithm.adv_estimator=grpo)
case "$KIND" in gpu) DATA+=(trainer.n_gpus_per_node=1) ;; *) DATA+=(trainer.n_gpus_per_node=16) ;; esac
mkdir -p made; touch made/file
python3 -m verl.trainer.main_ppo "${DATA[@]}" actor_rollout_ref.model.path=$MODEL \\
    trainer.total_epochs=$((1 + 1)) "$@" 2>&1 | tee run.log
"""


@pytest.mark.parametrize("words", [["run.sh", "-o", "run.yaml"], ["-o", "run.yaml", "run.sh"]], ids=["behind", "first"])
def test_a_script_is_expanded_and_nothing_in_it_is_started(words, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.sh").write_text(SCRIPT)
    assert main(["from-verl", *words]) == 0
    config = load(tmp_path / "run.yaml")
    assert config.data.train_files[1].endswith("b c.parquet") and config.train.num_epochs == 2
    assert "--gpus-per-node 2 run.yaml" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.sh", "run.yaml"]


def test_the_line_of_readme_works(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=a.parquet"
    assert main(["from-verl", "-o", "my_run.yaml", *line.split(), "actor_rollout_ref.model.path=tiny"]) == 0
    assert load(tmp_path / "my_run.yaml").algorithm.name == "grpo"


def test_gae_and_its_critic_are_translated():
    words = (
        "data.train_files=a.parquet actor_rollout_ref.model.path=tiny critic.model.path=other critic.optim.lr=2e-5 "
        "actor_rollout_ref.actor.ppo_epochs=2 critic.optim.lr_warmup_steps=3 critic.cliprange_value=0.2 "
        "algorithm.lam=0.95 critic.loss_agg_mode=seq-mean-token-mean trainer.critic_warmup=5 "
        "actor_rollout_ref.actor.strategy=megatron critic.megatron.param_offload=True critic.ppo_mini_batch_size=8"
    )
    found = translate(read_settings(words.split()))
    config = load(yaml.safe_load(found.text))
    critic = config.critic
    assert (config.algorithm.name, config.algorithm.lam, config.train.critic_warmup) == ("ppo", 0.95, 4)
    assert (critic.path, critic.lr, critic.lr_warmup_steps) == ("other", 2e-5, 3 * 4 * 2)
    assert (critic.cliprange_value, critic.loss_aggregation, critic.adam_beta2) == (0.2, "seq_mean_token_mean", 0.999)
    assert critic.param_offload and not critic.optimizer_offload
    assert [one for one in found.missing if "critic" in one] == [
        "critic.ppo_mini_batch_size=8: the critic has the actor's minibatches"
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to translate"),
        (["nowhere.sh"], "'nowhere.sh' cannot be read"),
        (["nowhere.yaml"], "'nowhere.yaml' cannot be read"),
        (["algorithm.adv_estimator=remax"], "remax is not in mrl. Choose one of gae"),
        (["algorithm.adv_estimator=grpo", "data.train_batch_size=many"], "data.train_batch_size=many came, expected"),
        (["algorithm.adv_estimator=grpo", "trainer.nnodes=x"], "trainer.nnodes=x came, expected an integer"),
        (["algorithm.adv_estimator=grpo", "--force"], "'--force' is not a setting"),
    ],
)
def test_what_cannot_be_translated_is_one_message(words, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=said):
        translate(read_settings(words))


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.train_batch_size=4", "'data.train_batch_size' is verl's name for train.batch_size"),
        ("actor_rollout_ref.rollout.n=4", "'actor_rollout_ref.rollout.n' is verl's name for rollout.n;"),
        ("+trainer.total_epochs=4", "verl's name for train.num_epochs"),
        ("actor_rollout_ref.model.lora_rank=8", "is verl's name for actor.lora.rank"),
        ("actor_rollout_ref.model.lora.dropout=0.1", "of verl has no place here: no dropout of adapters"),
        ("actor.lora.rnk=8", "Did you mean 'actor.lora.rank'"),
        ("train.num_generations=4", "'num_generations' is TRL's name for rollout.n"),
        ("train.global_batch_size=4", "'global_batch_size' is Megatron's name for train.batch_size"),
    ],
)
def test_an_unknown_key_of_another_trainer_is_answered_with_its_name_here(override, said):
    with pytest.raises(UserError) as caught:
        load(ROOT / "configs" / "quickstart.yaml", [override])
    assert said in str(caught.value)


def test_a_key_that_is_near_none_gets_no_hint_and_hydras_plus_sets():
    with pytest.raises(UserError) as caught:
        load(ROOT / "configs" / "quickstart.yaml", ["data.train_things=4"])
    assert "Did you mean" not in str(caught.value)
    assert load(ROOT / "configs" / "quickstart.yaml", ["++train.batch_size=7"]).train.batch_size == 7


def test_names_of_trl_are_its_and_lead_to_keys():
    own = {field.name for config in (GRPOConfig, SFTConfig) for field in fields(config)} | {
        "reward_funcs",
        "max_prompt_length",
    }
    assert set(TRL) - own == set()
    assert {*TRL.values(), *MEGATRON.values(), *NEMO_RL.values()} <= set(dotted_keys(Config))
    keys = json.loads((ROOT / "tests" / "config" / "verl_keys" / "nemo_rl_grpo_keys.json").read_text())
    assert set(NEMO_RL) <= {key.rpartition(".")[2] for key in keys}
    for name, to in NEMO_RL.items():
        assert to in key_hint(f"grpo.{name}")


@pytest.mark.parametrize(
    ("key", "feature"),
    [
        *((key, "LoRA") for key in (
            "model.lora_rank", "model.lora", "actor.lora_alpha", "actor.target_modules", "use_peft", "peft_config.r",
            "policy.dtensor_cfg.lora_cfg.enabled", "policy.megatron_cfg.peft.dim", "model.lora_rnk", "lora_r",
            "model.load_in_4bit", "modules_to_save")),
        *((key, "images") for key in (
            "data.image_key", "data.images", "data.video_key", "model.vision_tower", "data.audio_column",
            "rollout.limit_mm_per_prompt", "rollout.limit_images", "actor_rollout_ref.actor.freeze_vision_tower")),
        ("train.exploration", ""), ("run.container_image", ""), ("data.comments", ""),
    ],
)  # fmt: skip
def test_a_key_of_a_feature_that_mrl_does_not_have_is_refused_by_its_name(key, feature):
    with pytest.raises(UserError) as caught:
        load(ROOT / "configs" / "quickstart.yaml", [f"{key}=8"])
    said = str(caught.value)
    assert key.partition(".")[0] in said
    assert [word for word in ("LoRA", "images") if word in said] == ([feature] if feature else [])


def test_an_estimator_that_mrl_does_not_have_is_refused_with_the_nearest():
    assert not {*ABSENT_ESTIMATORS} & {*VERL_ESTIMATORS}
    for estimator in (*ABSENT_ESTIMATORS, "own"):
        with pytest.raises(
            UserError, match=rf"adv_estimator={estimator} is not in mrl.*{estimator}: .*(grpo|algorithm)"
        ):
            translate({"algorithm.adv_estimator": estimator})


_IS = "algorithm.rollout_is"


@pytest.mark.parametrize(
    ("given", "correction", "lost"),
    [
        ({_IS: True, f"{_IS}_threshold": 3.0}, {"rollout_is": "token", "rollout_is_threshold": "3.0"}, []),
        ({_IS: True, f"{_IS}_threshold": 3.0, f"{_IS}_level": "sequence", f"{_IS}_threshold_lower": None},
         {"rollout_is": "sequence", "rollout_is_threshold": "3.0"}, []),
        ({_IS: True, f"{_IS}_threshold": 3.0, f"{_IS}_mode": "mask"}, {}, [_IS]),
        ({_IS: True, f"{_IS}_threshold": 3.0, f"{_IS}_level": "geometric"}, {}, [_IS]),
        ({_IS: True, f"{_IS}_threshold": None, f"{_IS}_level": "token"}, {}, []),
        ({_IS: False, f"{_IS}_threshold": None, f"{_IS}_veto_threshold": None}, {}, []),
        ({f"{_IS}_veto_threshold": 1e-4}, {}, [f"{_IS}_veto_threshold"]),
        ({"actor_rollout_ref.actor.tis_imp_ratio_cap": 2}, {"rollout_is": "token", "rollout_is_threshold": "2"}, []),
        ({"actor_rollout_ref.actor.tis_imp_ratio_cap": -1}, {}, []),
        ({"algorithm.rollout_correction.bypass_old_logprob_for_rollout": True,
          "algorithm.rollout_correction.use_policy_gradient": True},
         {"bypass_mode": True, "loss_type": "reinforce"}, []),
    ],
)  # fmt: skip
def test_the_corrections_of_earlier_versions_keep_their_meaning(given, correction, lost):
    found = translate({"algorithm.adv_estimator": "grpo", **given})
    section = yaml.safe_load(found.text)["algorithm"]["rollout_correction"]
    assert section == {"bypass_mode": False} | correction
    assert [line.partition("=")[0] for line in found.lost] == lost


def test_values_of_earlier_configs_that_are_off_lose_nothing():
    given = {
        "actor_rollout_ref.rollout.use_fire_sampling": False, "actor_rollout_ref.rollout.skip_rollout": False,
        "actor_rollout_ref.actor.load_weight": True, "actor_rollout_ref.rollout.layer_name_map.qkv_layer_name": "qkv",
        "actor_rollout_ref.actor.router_replay.mode": "disabled", "reward_manager.name": "naive",
        "reward_model.model.external_lib": "${actor_rollout_ref.model.external_lib}", "data.tool_config_path": None,
    }  # fmt: skip
    assert translate({"algorithm.adv_estimator": "grpo", **given}).lost == []


@pytest.mark.parametrize("key", [
    "data.apply_chat_template_kwargs.enable_thinking", "actor_rollout_ref.model.override_config.tie_word_embeddings",
])  # fmt: skip
def test_a_value_that_is_false_may_be_lost_too(key):
    assert [line.partition("=")[0] for line in translate({"algorithm.adv_estimator": "grpo", key: False}).lost] == [key]


def test_columns_of_images_are_lost_where_the_command_line_names_them(tmp_path):
    key = "data.image_key"
    (tmp_path / "run.yaml").write_text("algorithm: {adv_estimator: grpo}\ndata: {image_key: images}\n")
    for words, listed in (
        ([], False),
        ([f"{key}=images"], True),
        ([f"{key}=null"], False),
        ([f"{key}=pictures"], True),
    ):
        found = translate(read_settings([str(tmp_path / "run.yaml"), *words]))
        lost, moot = ([line for line in lines if line.startswith(key)] for lines in (found.lost, found.moot))
        assert (len(lost), len(moot)) == (int(listed), int(not listed))


@pytest.mark.parametrize("section", ["critic", "actor_rollout_ref.ref", "actor_rollout_ref.actor", "trainer"])
def test_an_unknown_key_is_lost_in_every_section(section):
    found = translate({"algorithm.adv_estimator": "gae", f"{section}.unheard_of": 1})
    assert [line.partition("=")[0] for line in found.lost] == [f"{section}.unheard_of"]


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("actor_rollout_ref.actor.ppo_mini_batchsize", "actor_rollout_ref.actor.ppo_mini_batch_size"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("actor_rollout_ref.rolout.temperature", "actor_rollout_ref.rollout.temperature"),
        ("rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        ("trainer.save_frequ", "trainer.save_freq"),
        ("trainer.unheard_of", None),
    ],
)
def test_an_unknown_key_is_listed_with_the_nearest_of_verls(given, meant):
    (line,) = translate({"algorithm.adv_estimator": "grpo", given: 1}).lost
    assert line.startswith(f"{given}=1: ")
    assert f"'{meant}'" in line if meant else "Did you mean" not in line


def test_the_reference_of_a_fork_keeps_its_weights():
    found = translate({"algorithm.adv_estimator": "grpo", "actor_rollout_ref.ref.model.path": "other"})
    assert yaml.safe_load(found.text)["reference"] == {"path": "other"} and found.lost == []


def test_prompts_that_are_filtered_by_length_are_never_truncated():
    given = {"algorithm.adv_estimator": "grpo", "data.truncation": "middle"}
    assert [line.partition("=")[0] for line in translate(given).lost] == ["data.truncation"]
    assert translate(given | {"data.filter_overlong_prompts": True}).lost == []


def test_a_run_of_another_trainer_with_the_same_name_is_refused():
    keys = [f"trainer.policy.own_{index}" for index in range(9)]
    words = ["python3", "-m", "other.main_dapo", *(f"{key}=1" for key in keys), "data.train_files=a.parquet"]
    with pytest.raises(UserError, match=r"9 of 10 settings are no keys of verl"):
        translate(read_settings(words))
    assert (
        len(translate(read_settings([*words, "actor_rollout_ref.rollout.n=4", "algorithm.adv_estimator=grpo"])).lost)
        == 10
    )


def test_tools_of_verl_are_the_environment_that_runs_them():
    turns = "actor_rollout_ref.rollout.multi_turn."
    given = {f"{turns}tool_config_path": "tools.yaml", f"{turns}max_assistant_turns": 5, f"{turns}format": "hermes"}
    told = translate({"algorithm.adv_estimator": "grpo", f"{turns}enable": True, **given})
    section = yaml.safe_load(told.text)["rollout"]
    assert section["agent"] == {
        "environment": "verl_tools", "environment_kwargs": {"tool_config_path": "tools.yaml"},
    }  # fmt: skip
    assert section["multi_turn"] == {"enable": True, "max_assistant_turns": 5}
    assert not [one for one in told.missing if "multi_turn" in one]
    assert "agent" not in yaml.safe_load(translate({"algorithm.adv_estimator": "grpo", **given}).text)["rollout"]


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (
            "trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=1",
            "mrl train run.yaml",
        ),
        (
            "trainer.n_gpus_per_node=1 actor_rollout_ref.rollout.tensor_model_parallel_size=2",
            "mrl launch --via torchrun --nodes 1 --gpus-per-node 2 run.yaml",
        ),
        (
            "trainer.n_gpus_per_node=1 actor_rollout_ref.actor.strategy=megatron "
            "actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
            "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2",
            "mrl launch --via torchrun --nodes 1 --gpus-per-node 4 run.yaml",
        ),
        ("trainer.n_gpus_per_node=8", "mrl launch --via torchrun --nodes 1 --gpus-per-node 8 run.yaml"),
        (
            "trainer.nnodes=2 trainer.n_gpus_per_node=8",
            "mrl launch --via torchrun --nodes 2 --gpus-per-node 8 --master-addr FIRST_HOST --node-rank K run.yaml",
        ),
    ],
)
def test_the_command_that_is_printed_starts_as_many_ranks_as_the_layout_needs(
    words, command, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    line = f"algorithm.adv_estimator=grpo data.train_files=a.parquet actor_rollout_ref.model.path=tiny {words}"
    assert main(["from-verl", "-o", "run.yaml", *line.split()]) == 0
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.partition(" (on every host")[0].endswith(f": {command}")
    started = _parse(command.replace(" K ", " 0 ").split()[1:])
    if command.startswith("mrl launch"):
        start = LaunchOptions(started.via, started.nodes, started.gpus_per_node, node_rank=started.node_rank,
                      master_addr=started.master_addr)  # fmt: skip
        assert launch.launch_command(start, ["train", "run.yaml"])
        check_ranks(load(tmp_path / "run.yaml"), started.nodes * started.gpus_per_node)
