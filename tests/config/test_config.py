"""The schema: files load, what is written reads back, mistakes are named in full, each field is documented."""

import ast
from dataclasses import asdict, is_dataclass, replace
from pathlib import Path
from typing import get_type_hints

import pytest
import yaml
from omegaconf import OmegaConf

from mrl.config import config as schema
from mrl.config.config import Config, load, to_yaml
from mrl.config.keys import dotted_keys, leaves, nested
from mrl.errors import MAX_MISTAKES, MistakesError, UserError
from tests.source import PACKAGE, ROOT, tree_of

CORRECTION = "algorithm.rollout_correction"
FILES = sorted((ROOT / "configs").rglob("*.yaml"))


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "c.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def message(tmp_path: Path, text: str, *overrides: str) -> str:
    with pytest.raises(UserError) as caught:
        load(write(tmp_path, text), overrides)
    return str(caught.value)


def value_at(config: Config, key: str):
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_configs_exist():
    assert ROOT / "configs" / "quickstart.yaml" in FILES


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_yaml_loads_and_reads_back(file, tmp_path):
    config = load(file)
    assert to_yaml(config) == OmegaConf.to_yaml(OmegaConf.create(asdict(config)))
    assert load(write(tmp_path, to_yaml(config))) == config


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_yaml_holds_differences_only(file):
    defaults = Config()
    given = leaves(yaml.safe_load(file.read_text(encoding="utf-8")), Config)
    plain = [(key, value) for key, value, _ in given if "[" not in key]
    repeated = [key for key, value in plain if key in dotted_keys(Config) and value_at(defaults, key) == value]
    assert repeated == []


def test_every_field_has_its_line_of_documentation():
    bare = []
    for section in (node for node in tree_of(PACKAGE / "config" / "config.py").body if isinstance(node, ast.ClassDef)):
        hints = get_type_hints(getattr(schema, section.name))
        for this, following in zip(section.body, [*section.body[1:], None], strict=True):
            if not isinstance(this, ast.AnnAssign) or is_dataclass(hints[this.target.id]):
                continue
            documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
            if not documented:
                bare.append(f"{section.name}.{this.target.id}")
    assert bare == []


def test_overrides_come_after_the_file(tmp_path):
    file = write(tmp_path, "train:\n  num_steps: 3\nactor:\n  lr: 0.1\n")
    config = load(file, ["train.num_steps=5", "actor.lr=1e-3", "data.val_files=[a.jsonl,b.jsonl]"])
    assert (config.train.num_steps, config.actor.lr, config.data.val_files) == (5, 1e-3, ["a.jsonl", "b.jsonl"])


def test_overrides_reach_into_lists_and_free_mappings(tmp_path):
    file = write(tmp_path, "reward:\n  functions:\n    - {name: length, kwargs: {target: 3}}\n    - {name: math}\n")
    config = load(file, ["reward.functions[0].kwargs.scale=2", "reward.functions[1].weight=0.5", "model.overrides.a=1"])
    first, second = config.reward.functions
    assert (first.name, first.kwargs, second.name, second.weight) == ("length", {"target": 3, "scale": 2}, "math", 0.5)
    assert config.model.overrides == {"a": 1}


MAPPING = "data:\n  task_kwargs: {min_terms: 2, max_value: 9}\ntrain:\n  warm_start: {num_steps: 5}\n"


@pytest.mark.parametrize(
    ("overrides", "left"),
    [
        (["data.task_kwargs={max_value: 5, a: 1}"], {"min_terms": 2, "max_value": 5, "a": 1}),
        (["data.task_kwargs={}"], {}),
        (["data.task_kwargs={}", "data.task_kwargs.b=1"], {"b": 1}),
        (["~data.task_kwargs"], {}),
        (["~data.task_kwargs.max_value"], {"min_terms": 2}),
        (["data.task_kwargs.a={b: 1}", "data.task_kwargs.a={}"], {"min_terms": 2, "max_value": 9, "a": {}}),
    ],
)
def test_a_mapping_is_merged_emptied_or_taken_back(overrides, left, tmp_path):
    assert load(write(tmp_path, MAPPING), overrides).data.task_kwargs == left


def test_a_field_and_a_section_are_taken_back_to_their_defaults(tmp_path):
    config = load(write(tmp_path, MAPPING), ["train.num_steps=3", "~train.warm_start", "train.warm_start.lr=0.5"])
    assert (config.train.num_steps, config.train.warm_start.num_steps, config.train.warm_start.lr) == (3, 0, 0.5)
    assert load(write(tmp_path, MAPPING), ["train.num_steps=3", "~train.num_steps"]).train == replace(
        Config().train, warm_start=replace(Config().train.warm_start, num_steps=5)
    )


def test_one_text_is_a_list_of_one_and_a_reference_is_what_it_names(tmp_path):
    config = load(write(tmp_path, "data:\n  train_files: a.jsonl\n"), ["data.val_files=${data.train_files}"])
    assert config.data.train_files == config.data.val_files == ["a.jsonl"]


def test_off_is_a_word_where_it_is_a_choice(tmp_path):
    config = load(write(tmp_path, "observe: {console: off}\n"), ["observe.tensorboard=off"])
    assert (config.observe.console, config.observe.tensorboard) == ("off", False)


def test_null_is_a_value_where_the_field_is_optional(tmp_path):
    assert (
        load(write(tmp_path, "{}"), ["train.minibatch_size=4", "train.minibatch_size=null"]).train.minibatch_size
        is None
    )


@pytest.mark.parametrize("text", ["bytes:", "char: ab", "x: {y: 1}", "a:b", "'bytes:'"])
@pytest.mark.parametrize("key", ["model.tokenizer", "data.prompt_key", "distillation.teacher_models[0].key"])
def test_a_text_with_a_colon_stays_the_text_that_was_written(key, text):
    config = load({"distillation": {"teacher_models": [{}]}}, [f"{key}={text}"])
    read = (config.model.tokenizer, config.data.prompt_key, config.distillation.teacher_models[0].key)
    assert text.strip("'") in read


@pytest.mark.parametrize("text", ["{a: 1}", "{a: b}", "[a]", "null"])
def test_a_mapping_a_list_and_null_are_no_text(text):
    with pytest.raises(UserError, match=r"data\.prompt_key.*expected a string"):
        load({}, [f"data.prompt_key={text}"])


@pytest.mark.parametrize("text", ["2.0", "0.5_5.0", "'0.5_2'", "0.01", "token_k1,seq_max_k2"])
def test_bounds_stay_the_text_that_was_written(text, tmp_path):
    config = load(write(tmp_path, "{}"), [f"{CORRECTION}.rollout_rs_threshold={text}"])
    assert config.algorithm.rollout_correction.rollout_rs_threshold == text.strip("'")


def test_thousands_are_numbers(tmp_path):
    assert load(write(tmp_path, "{}"), ["train.num_steps=1_000"]).train.num_steps == 1000


@pytest.mark.parametrize(
    ("text", "overrides", "said"),
    [
        ("train:\n  num_step: 3\n", [], "'train.num_step' is unknown. Did you mean 'train.num_steps'?"),
        ("trian:\n  num_steps: 3\n", [], "'trian' is unknown. Did you mean 'train'?"),
        ("batch_size: 3\n", [], "'batch_size' is unknown. Did you mean 'train.batch_size'?"),
        ("{}", ["rollout.temprature=1"], "Did you mean 'rollout.temperature'?"),
        ("reward:\n  functions: [{nam: x}]\n", [], "'reward.functions[0].nam' is unknown. Did you mean 'reward."),
        ("{}", ["reward.functions[0].wieght=1"], "Did you mean 'reward.functions[0].weight'?"),
        ("reward:\n  functions: [{weight: q}]\n", [], "'reward.functions[0].weight' in '"),
        ("train:\n  num_steps: many\n", [], "'train.num_steps' in '"),
        ("{}", ["train.batch_size=1.5"], "override 'train.batch_size=1.5': got 1.5, expected a whole number."),
        ("{}", ["run.resume=maybe"], "got 'maybe', expected one of auto, never, must."),
        ("{}", ["algorithm.policy_loss=geo_mean"], "or null. 'geo_mean' is verl's name for gmpo."),
        ("{}", ["train.batch_size="], "'train.batch_size' in override 'train.batch_size=': got null"),
        ("{}", ["train.num_steps"], "is not section.key=value"),
        ("{}", ["train.num_steps=["], "override 'train.num_steps=['"),
        ("{}", ["data.train_files=3"], "got 3, expected a list such as [a, b], or one string."),
        ("{}", ["data.train_files=[a,[b]]"], "expected a list such as [a, b], or one string."),
        ("data:\n  train_files: {a: b}\n", [], "got {'a': 'b'}, expected a list"),
        ("{}", ["actor.lr=abc"], "'actor.lr' in override 'actor.lr=abc': got 'abc', expected a number."),
        ("{}", ["train.minibatch_size=x"], "got 'x', expected a whole number, or null."),
        ("{}", ["reward.functions=3"], "got 3, expected a list of sections with keys name, weight, kwargs, batch."),
        ("{}", ["reward.functions[1].weight=2"], "'reward.functions' has 1 entries, counted from 0."),
        ("{}", ["data.task_kwargs=3"], "expected a mapping such as {key: value}."),
        ("{}", ["train={}"], "override 'train={}' sets nothing. Set its keys, or reset it with '~train'."),
        ("{}", ["~trian"], "'trian' is unknown. Did you mean 'train'?"),
        ("{}", ["~data.task_kwargs.a"], "there is no 'data.task_kwargs.a' to reset"),
        ("{}", ["~reward.functions[0].weight"], "is part of a list"),
        ("{}", ["~train.num_steps=3"], "write '~train.num_steps' or 'train.num_steps=3'"),
        ("{}", ["~"], "is not section.key=value"),
        ("{}", ["run.output_dir=${nowhere}"], "'nowhere' not found"),
        ("{}", [f"{CORRECTION}.rollout_rs_threshold=0.5_2"], "YAML reads 0.5_2 as one number. Write it with quotes"),
        ("train:\n  num_steps: 12_3\n", [], "YAML reads 12_3 as one number"),
        ("{}", ["data.train_weights=3:1"], "3:1': YAML reads 3:1 as the number 181 (base 60). Write [3,1]"),
        ("{}", ["data.train_weights=[1, 3:1.5]"], "YAML reads 3:1.5 as the number 181.5"),
        ("observe:\n  wandb_name: -12:30\n", [], "YAML reads -12:30 as the number -750 "),
        ("{}", ["data.train_weights=3,1"], "got '3,1', expected a list of numbers"),
        ("{}", ["algorithm.proximal=recompute"], "is algorithm.rollout_correction.bypass_mode (recompute: false)"),
        ("{}", ["algorithm.tis_clip=2"], "is algorithm.rollout_correction.rollout_is_threshold, with rollout_is=token"),
        ("{}", ["vllm_importance_sampling_mode=x"], "is TRL's name for algorithm.rollout_correction.rollout_is."),
        ("train: 3\n", [], "'train' is 3, expected a section"),
        ("train:\n", [], "'train' is empty, expected a section"),
        ("- a\n", [], "the config file is ['a'], expected a section"),
        ("a: b: c\n", [], "is not readable YAML"),
        ("train:\n  num_steps: 1\n  num_steps: 2\n", [], "duplicate key num_steps"),
    ],
)  # fmt: skip
def test_a_mistake_is_named_in_one_line(text, overrides, said, tmp_path):
    told = message(tmp_path, text, *overrides)
    assert said in told and "\n" not in told


def test_one_error_lists_all_mistakes_of_file_and_overrides(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "rollot: {n: 4}\ntrain: {num_steps: many, batchsize: 2}\ndata: [1]\nactor: {learning_rate: 1e-5}\n"
        "reward: {functions: [{nam: math}, {weight: heavy}]}\n"
    )
    with pytest.raises(MistakesError) as caught:
        load(file, ["rollout.nn=2", "train.batch_size=x", "run.seed=3", "+rollout={promptlength: 3, response_len: 4}"])
    hints = (
        "rollout", "a whole number, or null", "train.batch_size", "expected a section", "actor.lr", "functions[0].name",
        "a number", "rollout.nn", "a whole number", "rollout.prompt_length", "rollout.response_len",
    )  # fmt: skip
    assert len(caught.value.errors) == len(hints)
    said = [str(one) for one in caught.value.errors]
    assert all(any(hint in one for one in said) for hint in hints)
    assert all(one in str(caught.value) for one in said)


def test_of_very_many_mistakes_the_first_are_listed():
    with pytest.raises(MistakesError) as caught:
        load({"run": {f"key{number}": 1 for number in range(MAX_MISTAKES + 5)}})
    assert len(str(caught.value).splitlines()) == 1 + MAX_MISTAKES + 1 and "and 5 more" in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(UserError, match=r"nowhere\.yaml' does not exist"):
        load("nowhere.yaml")


def test_a_run_folder_is_refused_with_its_config(tmp_path):
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert str(tmp_path / "config.yaml") not in str(caught.value)
    (tmp_path / "config.yaml").touch()
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert str(tmp_path / "config.yaml") in str(caught.value)


def test_nested_opens_a_dotted_key():
    assert nested("a.b[0].c", 1) == {"a": {"b": {0: {"c": 1}}}}
