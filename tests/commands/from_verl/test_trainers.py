"""Which programs are translated: verl's RL and SFT trainers; every other is refused by its name."""

import pytest
import yaml

from mrl.commands.from_verl.command_line import read_settings
from mrl.commands.from_verl.translate import translate
from mrl.config.config import load
from mrl.config.verl_keys.trainer_programs import REFUSED
from mrl.errors import UserError

RL = (
    "verl.trainer.main_ppo", "verl.trainer.main_ppo_sync", "recipe.dapo.main_dapo", "recipe.dapo.src.main_dapo",
    "recipe.dapo.dapo_transfer_queue.main_dapo", "recipe.entropy.main_entropy", "recipe.partial_rollout.main_ppo",
    "verl.experimental.one_step_off_policy.main_ppo", "recipe/dapo/main_dapo.py", "./main_ppo_split.py",
)  # fmt: skip
OTHERS = {
    "recipe.prime.main_prime": "PRIME", "recipe.spin.main_spin": "dpo", "recipe.sppo.main_sppo": "dpo",
    "main_gkd": "distillation", "verl.trainer.main_generation": "mrl evaluate",
    "verl.trainer.main_eval": "mrl evaluate",
    "verl.trainer.main_generation_server": "mrl evaluate", "recipe.flowrl.main_flowrl": "FlowRL",
    "verl.experimental.vla.main_ppo": "robots", "recipe.spo.spo_main_ppo": "SPO", "recipe.gvpo.gvpo_main_ppo": "GVPO",
    "verl.trainer.main": "EasyR1", "recipe.some.main_new": "does not know", "other.project.train": "does not know",
}  # fmt: skip


@pytest.mark.parametrize("program", RL)
def test_a_trainer_with_the_keys_of_verls_own_is_translated(program):
    start = ["python3", program] if program.endswith(".py") else ["python3", "-m", program]
    given = read_settings([*start, "algorithm.adv_estimator=grpo", "data.train_batch_size=8"])
    assert given["data.train_batch_size"] == 8 and given.notes == []
    assert load(yaml.safe_load(translate(given).text)).train.batch_size == 8


def test_a_copy_of_a_trainer_is_translated_and_told():
    given = read_settings(["python3", "-m", "agent_system.trainer.main_ppo", "algorithm.adv_estimator=grpo"])
    assert [note for note in translate(given).missing if note.startswith("agent_system.trainer.main_ppo")]


@pytest.mark.parametrize("program", OTHERS)
def test_another_trainer_is_refused_by_name_with_what_mrl_has(program, tmp_path):
    (tmp_path / "run.sh").write_text(f"set -x\npython3 -m {program} data.train_batch_size=8 2>&1 | tee log\n")
    for words in (["python3", "-m", program, "data.train_batch_size=8"], [str(tmp_path / "run.sh")]):
        with pytest.raises(UserError) as caught:
            read_settings(words)
        assert program in str(caught.value)
    with pytest.raises(UserError) as caught:
        read_settings(["python3", "-m", program, "data.train_batch_size=8"])
    assert OTHERS[program] in str(caught.value)
    assert REFUSED


def test_the_keys_of_dapo_are_translated():
    actor = "actor_rollout_ref.actor."
    line = (
        "ray job submit --no-wait -- python3 -m recipe.dapo.main_dapo algorithm.adv_estimator=grpo "
        "algorithm.filter_groups.enable=True algorithm.filter_groups.metric=acc "
        "algorithm.filter_groups.max_num_gen_batches=10 data.train_batch_size=512 data.gen_batch_size=1536 "
        f"{actor}clip_ratio_low=0.2 {actor}clip_ratio_high=0.28 {actor}clip_ratio_c=10.0 "
        f"{actor}loss_agg_mode=token-mean "
        "reward_model.reward_manager=dapo +reward_model.reward_kwargs.overlong_buffer_cfg.enable=True "
        "+reward_model.reward_kwargs.overlong_buffer_cfg.len=4096 data.train_files=a.parquet "
        "+reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 data.max_response_length=20480 "
        "+reward_model.reward_kwargs.overlong_buffer_cfg.log=False +reward_model.reward_kwargs.max_resp_len=20480"
    )
    found = translate(read_settings(line.split()))
    algorithm = load(yaml.safe_load(found.text)).algorithm
    assert (algorithm.dynamic_sampling, algorithm.max_sampling_rounds) == (True, 10)
    assert (algorithm.clip_high, algorithm.dual_clip, algorithm.loss_aggregation) == (0.28, 10.0, "token_mean")
    assert (algorithm.overlong.buffer_length, algorithm.overlong.penalty) == (4096, 1.0)
    assert not found.missing


@pytest.mark.parametrize(("is_token_level", "mode"), [(True, "token_mean"), (False, "seq_mean_token_mean")])
def test_the_token_level_loss_of_earlier_versions_keeps_its_meaning(is_token_level, mode):
    words = ["recipe.dapo.main_dapo", "algorithm.adv_estimator=grpo"]
    words.append(f"actor_rollout_ref.actor.use_token_level_loss={is_token_level}")
    algorithm = load(yaml.safe_load(translate(read_settings(["python3", "-m", *words])).text)).algorithm
    assert algorithm.loss_aggregation == mode or (mode == "seq_mean_token_mean" and algorithm.loss_aggregation is None)


SFT = (
    "data.train_files=a.parquet data.val_files=b.parquet data.train_batch_size=32 optim.lr=2e-5 "
    "trainer.total_epochs=2 trainer.total_training_steps=50 trainer.default_local_dir=out trainer.logger=console "
)


@pytest.mark.parametrize(
    ("program", "more", "expected"),
    [
        (
            "verl.trainer.fsdp_sft_trainer",
            "model.partial_pretrain=tiny data.prompt_key=extra_info data.response_key=extra_info "
            "+data.prompt_dict_keys=['question'] +data.response_dict_keys=['answer'] data.max_length=512 "
            "ulysses_sequence_parallel_size=2 data.micro_batch_size_per_gpu=2 data.truncation=right",
            {"prompt_key": "extra_info.question", "answer_key": "extra_info.answer", "schedule": "cosine",
             "overlong": "truncate_right", "lengths": (512, 512), "cp": 2, "betas": (0.9, 0.95)},
        ),
        (
            "verl.trainer.fsdp_sft_trainer",
            "model.partial_pretrain=tiny data.multiturn.enable=true data.multiturn.messages_key=talk "
            "data.max_length=513",
            {"messages_key": "talk", "schedule": "cosine", "lengths": (256, 257), "betas": (0.9, 0.95)},
        ),
        (
            "verl.trainer.sft_trainer",
            "engine=megatron model.path=tiny data.messages_key=talk engine.tensor_model_parallel_size=2 "
            "engine.pipeline_model_parallel_size=2 optim=megatron optim.lr_decay_style=constant data.max_length=1024",
            {"messages_key": "talk", "schedule": "constant", "lengths": (512, 512), "tp": 2, "betas": (0.9, 0.999)},
        ),
    ],
)  # fmt: skip
def test_an_sft_run_is_translated(program, more, expected):
    line = f"torchrun --standalone --nnodes=1 --nproc_per_node=8 -m {program} {SFT} {more}"
    found = translate(read_settings(line.split()))
    config = load(yaml.safe_load(found.text))
    data, actor = config.data, config.actor
    assert (config.algorithm.name, config.model.path, config.train.batch_size) == ("sft", "tiny", 32)
    assert (config.train.num_steps, config.train.minibatch_size, found.gpus_per_node) == (50, None, 8)
    assert actor.lr == 2e-5 and (actor.adam_beta1, actor.adam_beta2) == expected["betas"]
    assert actor.lr_schedule == expected["schedule"]
    assert (config.rollout.prompt_length, config.rollout.response_length) == expected["lengths"]
    for name in ("prompt_key", "answer_key", "messages_key"):
        assert getattr(data, name) == expected.get(name, getattr(type(data)(), name))
    assert data.overlong_responses == expected.get("overlong", "error")
    assert config.parallel.tensor_model_parallel_size == expected.get("tp", 1)
    assert config.parallel.context_parallel_size == expected.get("cp", 1)
    assert [one for one in found.missing if one.startswith("data.val_files")] and data.val_files == []


def test_what_sft_has_no_place_for_is_listed():
    given = {
        "model.mtp.enable_train": True,
        "data.tools_key": "tools",
        "data.custom_cls.path": "own.py",
        "optim.unheard_of": 1,
    }
    line = f"torchrun -m verl.trainer.sft_trainer {SFT} " + " ".join(f"{key}={value}" for key, value in given.items())
    said = "\n".join(translate(read_settings(line.split())).missing)
    assert [key for key in given if key not in said] == []


def test_sft_with_adapters_is_translated():
    words = f"torchrun -m verl.trainer.sft_trainer {SFT} model.lora_rank=8 model.target_modules=[q_proj]".split()
    found = translate(read_settings(words))
    adapters = load(yaml.safe_load(found.text)).actor.lora
    assert (adapters.rank, adapters.alpha, adapters.target_modules) == (8, 16.0, ["q_proj"])
    assert not [line for line in found.missing if "lora" in line]


@pytest.mark.parametrize(
    ("program", "words", "key"),
    [
        ("sft_trainer", "model.path=tiny trainer.save_freq=5", "trainer.max_ckpt_to_keep=null"),
    ],
)
def test_an_sft_run_is_listed_by_the_keys_of_its_trainer(program, words, key):
    found = translate(read_settings(f"torchrun -m verl.trainer.{program} data.train_files=a.parquet {words}".split()))
    lines = [*found.missing, *found.moot, *found.differs]
    assert [one for one in lines if one.startswith(key)]
    assert not [one for one in lines if "actor_rollout_ref." in one]


@pytest.mark.parametrize(
    ("program", "words", "frac"),
    [
        ("fsdp_sft_trainer", "model.partial_pretrain=tiny", 0.1),
        ("fsdp_sft_trainer", "model.partial_pretrain=tiny optim.lr_warmup_steps_ratio=0.2", 0.2),
        ("sft_trainer", "model.path=tiny optim.lr_warmup_steps_ratio=0.2", 0.2),
        ("sft_trainer", "model.path=tiny optim.lr_warmup_steps_ratio=0.2 optim.lr_warmup_steps=4", 0.0),
        ("sft_trainer", "model.path=tiny optim.lr_warmup_steps_ratio=0.2 trainer.total_training_steps=50", 0.0),
    ],
)
def test_the_warm_up_ratio_of_a_run_of_unknown_length_stays_a_fraction(program, words, frac):
    found = translate(read_settings(f"torchrun -m verl.trainer.{program} data.train_files=a.parquet {words}".split()))
    actor = yaml.safe_load(found.text)["actor"]
    assert actor.get("lr_warmup_frac", 0.0) == frac
    assert ("lr_warmup_steps" in actor) is (frac == 0.0)


def test_an_error_of_an_sft_run_has_the_key_of_its_trainer():
    words = "torchrun -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=tiny optim.lr_warmup_steps=few"
    with pytest.raises(UserError, match=r"^optim\.lr_warmup_steps=few"):
        translate(read_settings(words.split()))
