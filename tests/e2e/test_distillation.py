"""Runs with teachers from folders: routed by a column, of another size and vocabulary, resumed, at another layout."""

import json
import shutil

import pytest
from safetensors.torch import save_file

from mrl.checkpoint.formats.hf import SINGLE, write_metadata_files
from mrl.commands.cli import main
from mrl.data.tokenizer import CharTokenizer
from mrl.models.presets import arch_from_preset
from mrl.resharding.dtypes import allocate
from mrl.resharding.hf import hf_layout
from mrl.resharding.random_init import random_init
from tests.e2e import runs

pytestmark = pytest.mark.slow

RELATIVE, ABSOLUTE = 1e-4, 1e-6  # fp32 over three steps
CHARACTERS = "0123456789<>+#"
SIZES = {"hidden_size": 32, "num_hidden_layers": 4, "intermediate_size": 64, "num_attention_heads": 4}
QUIET = (
    "observe.console=off",
    "train={num_steps: 2, batch_size: 4, minibatch_size: 2, warm_start: {num_steps: 0}}",
    "algorithm={kl_in: none, entropy_coef: 0}",
    "~algorithm.kl_coef",
    "~algorithm.clip_low",
    "~algorithm.clip_high",
    "data.task=null",
    "data.task_kwargs={}",
    "distillation.enabled=true",
    "distillation.distillation_loss={loss_mode: reverse_kl, use_task_rewards: false}",
)


def write_teacher(folder, preset, seed, characters=CHARACTERS, **overrides):
    arch = arch_from_preset(preset, {**SIZES, "num_key_value_heads": 2, **overrides}, len(characters))
    layout = hf_layout(arch, "float32")
    tensors = allocate(layout)
    random_init(arch, layout, tensors, seed)
    folder.mkdir()
    save_file({name: tensor * 5 for name, tensor in tensors.items()}, folder / SINGLE, metadata={"format": "pt"})
    write_metadata_files(folder, arch, {SINGLE: layout}, None)
    CharTokenizer(characters).save(folder)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Teachers `near` (the student's layers) and `far`, one with another tokenizer, rows of both schools and of one."""
    made = tmp_path_factory.mktemp("teachers")
    write_teacher(made / "near", "qwen2_tiny", 5)
    write_teacher(made / "far", "qwen3_tiny", 6, hidden_size=48, num_hidden_layers=4, vocab_size=19)
    write_teacher(made / "stranger", "qwen2_tiny", 7, characters="9876543210<>+#")
    for name, schools in (("both", "ab"), ("one", "b")):
        rows = [{"prompt": f"<{i}+1>", "answer": str(i + 1), "school": schools[i % len(schools)]} for i in range(8)]
        (made / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return made


def routed(files, rows):
    teachers = ", ".join(f"{{key: {key}, model_path: {files / name}}}" for key, name in (("a", "near"), ("b", "far")))
    return [
        *QUIET,
        f"data.train_files={files / rows}.jsonl",
        f"distillation.teacher_models=[{teachers}]",
        "distillation.teacher_key=school",
    ]


def told(lines):
    """Each step's distillation and gradient."""
    kept = [{k: v for k, v in line.items() if "distillation" in k or k == "actor/grad_norm"} for line in lines]
    return [line for line in kept if line]


def start(folder, words):
    assert main(runs.arguments(folder, words)) == 0
    return told(runs.metrics(folder))


@pytest.fixture(scope="module")
def single(files, tmp_path_factory):
    return start(tmp_path_factory.mktemp("single"), routed(files, "both"))


def test_two_teachers_of_different_sizes_are_the_same_at_another_layout(files, single, tmp_path):
    layout = ["parallel={tensor_model_parallel_size: 2, pipeline_model_parallel_size: 2, sequence_parallel: true}"]
    found = told(runs.train_in_pool(tmp_path, [*routed(files, "both"), *layout], 4))
    assert len(found) == len(single) == 2
    for ours, expected in zip(found, single, strict=True):
        assert ours == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE)
        assert expected["distillation/loss"] > 0.01


def test_a_prompt_is_the_teachers_whose_key_it_has(files, single, tmp_path):
    """With rows of one school alone, the run is that of its teacher alone."""
    by_key = start(tmp_path / "routed", routed(files, "one"))
    rows = f"data.train_files={files / 'one'}.jsonl"
    alone = [*QUIET, rows, f"distillation.teacher_models=[{{model_path: {files / 'far'}}}]"]
    assert by_key == start(tmp_path / "alone", alone)
    assert by_key != single


def test_a_run_with_teachers_resumes_as_if_it_had_not_stopped(files, single, tmp_path):
    words = [*routed(files, "both"), "checkpoint.interval=1"]
    start(tmp_path, [*words, "train.num_steps=1"])
    assert start(tmp_path, words) == single


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["distillation.teacher_models=[{{model_path: {files}/stranger}}]"], "has another tokenizer than the student"),
        (["distillation.teacher_key=answer"], "column 'answer' (distillation.teacher_key) is '1'"),
        (["distillation.teacher_models[1].model_path={files}"], "config.json"),
    ],
)
def test_teachers_that_cannot_teach_are_refused_before_a_rank_starts(files, tmp_path, capsys, words, said):
    given = [word.format(files=files) for word in words]
    key = [] if "key" in given[0].partition("=")[0] or "[1]" in given[0] else ["~distillation.teacher_key"]
    assert main(runs.arguments(tmp_path, [*routed(files, "both"), *key, *given])) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("loss", ["reverse_kl", "k3"])
def test_the_model_under_adapters_teaches_as_a_copy_of_it_would(loss, files, tmp_path):
    """The student has adapters; a teacher that is its own model needs no second set of weights."""
    shutil.copytree(files / "near", tmp_path / "copy")
    adapters = [
        f"model.path={files / 'near'}",
        "~model.preset",
        "~model.overrides",
        f"model.tokenizer={files / 'near'}",
        "actor.lora={rank: 4, alpha: 16}",
        "actor.lr=0.02",
        f"data.train_files={files / 'one'}.jsonl",
        "train.warm_start={num_steps: 2, batch_size: 4}",
    ]
    found = []
    for teacher in (files / "near", tmp_path / "copy"):
        words = [*QUIET, *adapters, f"distillation.teacher_models=[{{model_path: {teacher}}}]"]
        lossy = [word.replace("reverse_kl", loss) for word in words]
        found.append(start(tmp_path / teacher.name / "run", lossy))
    assert found[0] == found[1]
    assert min(abs(line["distillation/loss"]) for line in found[0]) > 1e-4
