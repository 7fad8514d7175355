"""Each rule refuses what breaks it, names the keys, and lets a good config pass."""

from dataclasses import replace
from typing import get_args

import pytest
import yaml

from mrl.config import Config, RewardFunctionConfig
from mrl.errors import UserError
from mrl.models.base import ArchSpec
from mrl.models.presets import arch_from_preset
from mrl.preflight.preflight import RANGES, check, check_config, grid_of, max_model_len
from mrl.schema.keys import dotted_keys

ARCH = arch_from_preset("qwen2_tiny", {}, None)
"""4 layers, 4 heads, 2 key/value heads, MLP 128, 512 positions, 128 tokens."""


def changed(config, key: str, value):
    """A copy with one field, at a dotted key, replaced; no types are checked, as `load` does that."""
    first, _, rest = key.partition(".")
    return replace(config, **{first: changed(getattr(config, first), rest, value) if rest else value})


def make(*overrides: str) -> Config:
    config = Config()
    for item in (
        "model.preset=qwen2_tiny",
        "model.tokenizer=char:0123456789+#",
        "data.task=addition",
        "train.num_steps=100",
        "rollout.prompt_length=16",
        "rollout.response_length=8",
        *overrides,
    ):
        key, _, text = item.partition("=")
        config = changed(config, key, yaml.safe_load(text))
    return config


def refusal(config: Config, world_size: int = 1, arch: ArchSpec = ARCH, tokenizer_vocab_size: int = 12) -> str:
    with pytest.raises(UserError) as caught:
        check(config, arch, world_size=world_size, tokenizer_vocab_size=tokenizer_vocab_size)
    return str(caught.value)


def test_a_good_config_passes():
    check(make(), ARCH, world_size=1, tokenizer_vocab_size=128)
    layout = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
    more = ("parallel.virtual_pipeline_model_parallel_size=2", "parallel.sequence_parallel=true")
    config = make(*layout, *more, "rollout.tensor_model_parallel_size=4")
    check(config, ARCH, world_size=8, tokenizer_vocab_size=128)
    grid = grid_of(config, 8)
    assert (grid.tp, grid.pp, grid.vpp, grid.dp, grid.num_replicas) == (2, 2, 2, 2, 2)
    assert max_model_len(config) == 24


def test_every_number_outside_algorithm_has_a_range():
    def is_number(kind) -> bool:
        return kind in (int, float) or bool({int, float} & set(get_args(kind)))

    numbers = {key for key, kind in dotted_keys(Config).items() if is_number(kind) and not key.startswith("algorithm.")}
    assert numbers == set(RANGES)


def test_numbers_below_their_ranges_are_refused():
    bounded = [key for key, allowed in RANGES.items() if not allowed.startswith("[-1e9")]
    told = refusal(make(*(f"{key}=-2" for key in bounded)))
    assert [key for key in bounded if f"{key}=-2 is out of range; expected {RANGES[key]}" not in told] == []


def test_numbers_above_their_ranges_are_refused():
    highest = {key: allowed[1:-1].split(", ")[1] for key, allowed in RANGES.items() if "inf)" not in allowed}
    told = refusal(make(*(f"{key}={float(high) + 0.5}" for key, high in highest.items())))
    assert [key for key in highest if f"{key}={float(highest[key]) + 0.5} is out of range" not in told] == []


@pytest.mark.parametrize(
    ("key", "edge", "allowed"),
    [
        ("reward.num_workers", 1024, True),
        ("reward.num_workers", 100_000, False),
        ("train.batch_size", 10**30, False),
        ("run.collective_timeout_s", 1e9, False),
        ("parallel.context_parallel_size", 10**9, False),
        ("rollout.temperature", 0.0, False),
        ("rollout.top_p", 1.0, True),
        ("rollout.top_p", 0.0, False),
        ("rollout.min_p", 0.0, True),
        ("rollout.min_p", 1.0, False),
        ("rollout.gpu_memory_utilization", 1.0, False),
        ("rollout.top_k", -1, True),
        ("rollout.top_k", 0, False),
        ("rollout.top_k", 1, True),
        ("actor.adam_beta1", 1.0, False),
        ("actor.clip_grad", 0.0, True),
        ("checkpoint.keep_last", 0, False),
    ],
)
def test_edges_of_ranges(key, edge, allowed):
    config = make(f"{key}={edge}")
    if allowed:
        check_config(config, world_size=1)
    else:
        assert f"{key}={edge} is out of range" in refusal(config)


@pytest.mark.parametrize("key", ["actor.lr", "rollout.temperature", "reward.error_value"])
@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_not_a_number_and_infinity_are_refused(key, value):
    assert f"{key}={value[1:]} is out of range" in refusal(make(f"{key}={value}"))


def test_a_weight_that_is_not_finite_is_refused():
    config = make()
    broken = changed(config, "reward.functions", [RewardFunctionConfig(), RewardFunctionConfig(weight=float("nan"))])
    assert "reward.functions[1].weight=nan" in refusal(broken)


TP, PP = "parallel.tensor_model_parallel_size", "parallel.pipeline_model_parallel_size"
VPP, ROLLOUT_TP = "parallel.virtual_pipeline_model_parallel_size", "rollout.tensor_model_parallel_size"
VAL = "rollout.val_kwargs"

RULES = [
    # overrides, ranks, what the message says
    ([f"{TP}=2"], 1, f"{TP}=2 does not divide the 1 rank"),
    ([f"{TP}=2"], 1, "torchrun --nproc-per-node 2 -m mrl ... (launch/torchrun.sh); only look at it: mrl train"),
    ([f"{TP}=2", f"{ROLLOUT_TP}=3"], 1, f"--world-size 6; or do with one process: {TP}=1 {ROLLOUT_TP}=1"),
    ([f"{ROLLOUT_TP}=2"], 1, f"--world-size 2; or do with one process: {ROLLOUT_TP}=1"),
    ([f"{TP}=2", "parallel.sequence_parallel=true"], 1, f"one process: {TP}=1 parallel.sequence_parallel=false"),
    ([f"{TP}=2", f"{PP}=2"], 6, "= 4 does not divide the 6 rank"),
    ([f"{TP}=3"], 3, f"{TP}=3 does not divide the model's attention heads (4)"),
    ([f"{ROLLOUT_TP}=3"], 3, f"{ROLLOUT_TP}=3 does not divide the model's attention heads (4)"),
    ([f"{ROLLOUT_TP}=2"], 3, f"{ROLLOUT_TP}=2 does not divide the 3 rank"),
    ([f"{PP}=3"], 3, f"{PP}=3 does not divide the model's 4 layers"),
    ([f"{PP}=2", f"{VPP}=4"], 2, "x virtual_pipeline_model_parallel_size=4 does not divide the model's 4 layers"),
    ([f"{VPP}=2"], 1, f"{VPP}=2 needs {PP} above 1"),
    (["parallel.sequence_parallel=true"], 1, f"parallel.sequence_parallel=true needs {TP} above 1"),
    (["parallel.context_parallel_size=2"], 3, "parallel.context_parallel_size=2 does not divide the 3 rank(s)"),
    (["rollout.pipeline_model_parallel_size=2"], 2, "only built TensorRT-LLM engines (rollout.name=trtllm_engine)"),
    (["rollout.repetition_penalty=1.1"], 1, "rollout.repetition_penalty=1.1 is refused; it must be 1.0"),
    (["rollout.calculate_log_probs=false"], 1, "rollout.calculate_log_probs=False is refused"),
    (["rollout.name=vllm"], 1, "rollout.name=vllm is no engine of this version"),
    (["train.batch_size=10", "train.minibatch_size=4"], 1, "train.minibatch_size=4 does not divide"),
    (["train.batch_size=1", "rollout.n=2"], 4, "is smaller than the data-parallel size 4"),
    (["train.warm_start.num_steps=1", "train.warm_start.batch_size=2"], 4, "train.warm_start.batch_size=2 is below"),
    (["train.num_steps=0"], 1, "there is nothing to do"),
    (["actor.lr=0.01", "actor.min_lr=0.1", "actor.lr_schedule=cosine"], 1, "actor.min_lr=0.1 is above actor.lr"),
    (["actor.lr_schedule=linear", "actor.lr_warmup_steps=100"], 1, "leaves nothing of the run's 100 optimizer steps"),
    (["rollout.max_model_len=20"], 1, "rollout.max_model_len=20 is below"),
    (["rollout.max_model_len=600"], 1, "exceed the model's max_position_embeddings=512"),
    (["rollout.response_length=500"], 1, "sequences of 516 tokens"),
    (["actor.max_tokens_per_microbatch=23"], 1, "actor.max_tokens_per_microbatch=23 is below the longest sequence"),
    (["rollout.max_num_batched_tokens=8", "rollout.enable_chunked_prefill=false"], 1, "such a prompt could"),
    (["rollout.do_sample=false"], 1, "makes rollout.n=8 equal samples"),
    (["rollout.val_kwargs.n=4"], 1, "rollout.val_kwargs.n=4 with do_sample=false"),
    ([f"{VAL}.n=4", f"{VAL}.do_sample=true", f"{VAL}.temperature=0"], 1, "with temperature=0 scores the same answer"),
    (["rollout.stop=['']"], 1, "rollout.stop holds an empty string"),
    (["rollout.stop=['#']", "rollout.ignore_eos=true"], 1, "rollout.stop is set, but would have no effect"),
    (["model.path=nowhere"], 1, "both of model.path and model.preset"),
    (["model.path=nowhere", "model.preset=null"], 1, "model.path=nowhere is not a folder"),
    (["model.preset=null"], 1, "neither of model.path and model.preset"),
    (["model.tokenizer=null"], 1, "a preset has no tokenizer"),
    (["reference.path=nowhere", "algorithm.kl_in=loss"], 1, "reference.path=nowhere is not a folder"),
    (["reference.update_interval=5"], 1, "would have no effect because algorithm.kl_in is none"),
    (["data.task=null"], 1, "there are no prompts"),
    (["data.train_files=[a.jsonl]"], 1, "makes its own rows"),
    (["data.task=null", "data.train_files=[a.jsonl]"], 1, "data.train_files: 'a.jsonl' does not exist"),
    (["data.chat_template=a.jinja"], 1, "data.chat_template='a.jinja' does not exist"),
    (["data.task=null", "data.task_kwargs={a: 1}"], 1, "data.task_kwargs is set, but would have no effect"),
    (["reward.functions=[]"], 1, "reward.functions is empty"),
    (["data.task=null", "train.eval_interval=5"], 1, "train.eval_interval=5 needs held-out prompts"),
    (["checkpoint.keep_best=1"], 1, "ranks checkpoints by evaluations"),
    (["checkpoint.best_metric=loss"], 1, "checkpoint.best_metric=loss is no evaluation metric"),
    (["parallel.num_layers_in_last_pipeline_stage=2"], 1, "because parallel.pipeline_model_parallel_size is 1"),
    (["actor.min_lr=0.0000001"], 1, "actor.min_lr is set, but would have no effect"),
    (["rollout.val_kwargs.temperature=0.5"], 1, "because rollout.val_kwargs.do_sample is false"),
    ([f"{VAL}.min_p=0.5"], 1, f"top_p or min_p is set, but would have no effect because {VAL}.do_sample is false"),
    ([f"{VAL}.do_sample=true", f"{VAL}.temperature=0", f"{VAL}.top_k=2"], 1, f"because {VAL}.temperature is 0"),
    (["data.prompt_key=question"], 1, "data.prompt_key is set, but would have no effect because data.task"),
    (["data.answer_key=solution"], 1, "data.answer_key is set, but would have no effect because data.task"),
    (["checkpoint.best_metric=val/reward/mean"], 1, "because checkpoint.keep_best is 0"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), RULES, ids=[rule[2] for rule in RULES])
def test_a_broken_rule_is_named(overrides, world_size, said):
    assert said in refusal(make(*overrides), world_size)


SUPERVISED = [
    (["train.minibatch_size=8"], 1, "train.minibatch_size=8 is set, but would have no effect because algorithm"),
    (["actor.ppo_epochs=2"], 1, "actor.ppo_epochs=2 is set, but would have no effect because algorithm"),
    (["rollout.temperature=0.7"], 1, "rollout.temperature=0.7 is set, but would have no effect because algorithm"),
    (["rollout.top_k=5"], 1, "rollout.top_k=5 is set, but would have no effect because algorithm"),
    (["train.batch_size=2"], 4, "a batch of 2 examples is smaller than the data-parallel size 4"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "world_size", "said"), SUPERVISED, ids=[rule[2][:30] for rule in SUPERVISED])
def test_what_supervised_steps_would_ignore_is_named(overrides, world_size, said):
    config = make("algorithm.name=sft", *overrides)
    with pytest.raises(UserError) as caught:
        check(config, ARCH, world_size=world_size, tokenizer_vocab_size=12, supervised=True)
    assert said in str(caught.value)
    check(config, ARCH, world_size=1, tokenizer_vocab_size=12)  # steps that sample have a use for them


def test_a_batch_that_is_its_only_minibatch_is_no_mistake():
    config = make("algorithm.name=sft", "train.batch_size=8", "train.minibatch_size=8")
    check(config, ARCH, world_size=1, tokenizer_vocab_size=12, supervised=True)


def test_rewards_that_all_weigh_nothing_are_refused_and_one_of_several_is_only_measured():
    both = [RewardFunctionConfig(weight=0.0), RewardFunctionConfig(name="length", weight=0.5)]
    check_config(changed(make(), "reward.functions", both), world_size=1)
    assert "every weight is 0" in refusal(changed(make(), "reward.functions", both[:1]))


def test_greedy_evaluations_are_verls_default():
    check_config(make(f"{VAL}.temperature=0"), world_size=1)
    check_config(make(f"{VAL}.temperature=0", f"{VAL}.do_sample=true"), world_size=1)


def test_key_value_heads_split_or_are_copied():
    check(make(f"{TP}=4"), ARCH, world_size=4, tokenizer_vocab_size=12)
    three = replace(ARCH, num_heads=12, num_kv_heads=3)
    assert "3 key/value heads: one must be a multiple" in refusal(make(f"{TP}=2"), 2, three)


def test_a_tokenizer_with_more_ids_than_the_model_is_refused():
    assert "gives ids up to 128, the model has embeddings for 128" in refusal(make(), tokenizer_vocab_size=129)


def test_all_broken_rules_are_told_at_once():
    told = refusal(make("parallel.sequence_parallel=true", "rollout.max_model_len=20", "data.task=null"))
    assert told.startswith("the config breaks 3 rules:\n  - ")


def test_rules_that_need_no_model_come_without_one():
    with pytest.raises(UserError, match="sequence_parallel"):
        check_config(make("parallel.sequence_parallel=true"), world_size=1)


@pytest.mark.parametrize("name", ["cpu", "auto"])
def test_bfloat16_is_allowed_on_a_cpu(name):
    config = make(f"run.device={name}", "model.dtype=bfloat16")
    check(config, ARCH, world_size=1, tokenizer_vocab_size=12)
