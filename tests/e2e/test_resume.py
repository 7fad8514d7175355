"""kill -9 at any moment, the same command again: the numbers of a run that was never interrupted."""

import json
import math
import os
import random
import shutil
import signal
import time

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.slow

KL_IN_LOSS = ["algorithm.kl_in=loss", "algorithm.kl_coef=0.05"]
LORA = ["actor.lora.rank=4", "actor.lora.alpha=8", "actor.lr=0.01"]
STEPS = ["train.num_steps=8", "checkpoint.interval=2", "train.eval_interval=2", "reference.update_interval=3"]


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return runs.train_in_pool(tmp_path_factory.mktemp("whole"), STEPS, 1)


def kill_after(process, folder, num_lines):
    """SIGKILL to the whole session once metrics.jsonl has so many lines."""
    file = folder / "run" / "metrics.jsonl"
    deadline = time.monotonic() + runs.TIMEOUT_S
    while time.monotonic() < deadline and process.is_alive():
        if file.exists() and file.read_bytes().count(b"\n") >= num_lines:
            break
        time.sleep(0.005)
    time.sleep(random.random() * 0.3)
    if process.is_alive():
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


@pytest.mark.parametrize("num_lines", [1, 5, 9])
def test_a_killed_run_continues_as_if_nothing_had_happened(num_lines, uninterrupted, tmp_path):
    kill_after(runs.fork(tmp_path, STEPS), tmp_path, num_lines)
    assert runs.train_in_pool(tmp_path, STEPS, 1) == uninterrupted
    references = [folder.name for folder in (tmp_path / "run" / "checkpoints").glob("reference-*")]
    assert references == ["reference-00000006"]  # of the two commits that are kept


@pytest.mark.parametrize("num_lines", [2, 6])
def test_a_killed_run_with_adapters_continues_likewise(num_lines, tmp_path):
    """The reference follows the actor every third step, so it has adapters of its own."""
    settings = [*STEPS, *LORA, *KL_IN_LOSS, "checkpoint.export_hf=true"]
    whole = runs.train_in_pool(tmp_path / "whole", settings, 1)
    kill_after(runs.fork(tmp_path / "killed", settings), tmp_path / "killed", num_lines)
    assert runs.train_in_pool(tmp_path / "killed", settings, 1) == whole
    found = tmp_path / "killed" / "run" / "checkpoints" / "step-00000008"
    assert {file.name for file in (found / "adapter").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    assert (found / "hf" / "config.json").is_file()
    kl = [row["actor/kl_loss"] for row in whole if "actor/kl_loss" in row]
    assert min(kl) >= 0 and max(kl) > 0


def test_the_reference_of_given_adapters_is_the_same_after_a_resume(tmp_path):
    """A run that starts from a PEFT folder measures its KL against that, and goes on doing so."""
    first = ["train.num_steps=3", "checkpoint.export_hf=true", "train.warm_start.num_steps=2", *LORA]
    runs.train_in_pool(tmp_path / "first", first, 1)
    made = tmp_path / "first" / "run" / "checkpoints" / "step-00000003"
    base = ["~model.preset", "~model.overrides", f"model.path={tmp_path / 'base'}"]
    runs.train_in_pool(
        tmp_path / "whole_model", ["train.num_steps=1", "checkpoint.export_hf=true", "train.warm_start.num_steps=0"], 1
    )
    shutil.copytree(tmp_path / "whole_model" / "run" / "checkpoints" / "step-00000000" / "hf", tmp_path / "base")
    settings = [*STEPS, *LORA, *KL_IN_LOSS, *base, f"actor.lora.adapter_path={made / 'adapter'}"]
    settings += ["train.warm_start.num_steps=0", "reference.update_interval=0"]
    whole = runs.train_in_pool(tmp_path / "whole", settings, 1)
    kill_after(runs.fork(tmp_path / "killed", settings), tmp_path / "killed", 5)
    assert runs.train_in_pool(tmp_path / "killed", settings, 1) == whole
    kl = [row["actor/kl_loss"] for row in whole if "actor/kl_loss" in row]
    assert 0 <= kl[0] < kl[-1]
    from_folder = [word for word in settings if word not in LORA[:2]]  # rank and alpha
    named = [*from_folder, f"reference.path={made / 'adapter'}"]
    assert runs.train_in_pool(tmp_path / "named", named, 1) == whole


@pytest.mark.parametrize("size", [2, 4])
def test_adapters_resume_at_another_layout_with_the_same_numbers(size, tmp_path):
    layout = [
        "parallel.tensor_model_parallel_size=2",
        *(["parallel.pipeline_model_parallel_size=2"] if size == 4 else []),
    ]
    whole = runs.train_in_pool(tmp_path / "whole", [*STEPS, *LORA], 1)
    runs.train_in_pool(tmp_path / "moved", [*STEPS, *LORA, "train.num_steps=4", *layout], size)
    found = runs.train_in_pool(tmp_path / "moved", [*STEPS, *LORA], 1)
    assert found[-1]["step"] == 8
    for ours, theirs in zip(found[:3], whole[:3], strict=True):
        assert math.isclose(ours.get("actor/grad_norm", 0), theirs.get("actor/grad_norm", 0), rel_tol=1e-3)


def test_a_run_resumes_at_another_layout_with_the_same_prompts(uninterrupted, tmp_path):
    layout = ["parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2"]
    runs.train_in_pool(tmp_path, [*STEPS, "train.num_steps=4", *layout], 4)
    found = runs.train_in_pool(tmp_path, STEPS, 1)
    assert [row["training/epoch"] for row in found if "training/epoch" in row] == [
        row["training/epoch"] for row in uninterrupted if "training/epoch" in row
    ]
    last, expected = found[-1], uninterrupted[-1]
    assert last["step"] == expected["step"] == 8
    assert last["prompt_length/mean"] == expected["prompt_length/mean"]


CHANGES = [
    ["algorithm.kl_in=none", "algorithm.kl_coef=0.001"],
    KL_IN_LOSS,
    [*KL_IN_LOSS, "reference.update_interval=1"],
    [
        *KL_IN_LOSS,
        "algorithm.rollout_correction.preset=decoupled_token_is",
        "reference.path={folder}/run/checkpoints/step-00000001/hf",
    ],
    ["algorithm.kl_in=none", "algorithm.kl_coef=0.001", "algorithm.dynamic_sampling=true"],
    [*KL_IN_LOSS, "train.minibatch_size=8"],
]
"""Settings of each start of one run; each does one step more."""


def test_a_resume_may_change_how_the_run_goes_on(tmp_path):
    """The KL is measured from the step that turns it on, and from the named folder where one is named."""
    for number, settings in enumerate(CHANGES, 1):
        given = [text.format(folder=tmp_path) for text in settings]
        fixed = [f"train.num_steps={number}", "checkpoint.export_hf=true", "checkpoint.keep_last=9"]
        rows = runs.train_in_pool(tmp_path, ["train.minibatch_size=8", *fixed, *given], 1)
    kl = [row.get("actor/kl_loss") for row in rows if "actor/pg_loss" in row]
    assert [value is None for value in kl] == [True, False, False, False, True, False]
    assert kl[1] == pytest.approx(0, abs=1e-9)  # one minibatch: the actor is still its reference
    assert min(kl[2], kl[3], kl[5]) > 1e-6
    named = str(tmp_path / "run/checkpoints/step-00000001/hf")
    states = [json.loads((tmp_path / f"run/checkpoints/step-0000000{step}/state.json").read_text()) for step in (3, 4)]
    assert [state["reference"] == named for state in states] == [False, True]


def test_a_run_folder_that_was_moved_goes_on_with_its_reference(tmp_path):
    runs.train_in_pool(tmp_path / "here", [*KL_IN_LOSS, "train.num_steps=1"], 1)
    (tmp_path / "here").rename(tmp_path / "there")
    rows = runs.train_in_pool(tmp_path / "there", [*KL_IN_LOSS, "train.num_steps=2"], 1)
    assert rows[-1]["step"] == 2 and "actor/kl_loss" in rows[-1]


def test_the_reference_of_a_run_from_a_folder_is_that_folder(tmp_path):
    """Nothing is written for it; the numbers are those of the folder named, and of a run that was resumed."""
    plain = ["algorithm.kl_in=none", "algorithm.kl_coef=0.001"]
    runs.train_in_pool(tmp_path / "made", [*plain, "checkpoint.export_hf=true", "train.num_steps=1"], 1)
    model = str(tmp_path / "made/run/checkpoints/step-00000001/hf")
    given = [*KL_IN_LOSS, "~model.preset", "~model.overrides", "~train.warm_start"]
    given += [f"model.path={model}", "train.eval_interval=1"]
    named = runs.train_in_pool(tmp_path / "named", [*given, f"reference.path={model}", "train.num_steps=2"], 2)
    runs.train_in_pool(tmp_path / "run", [*given, "train.num_steps=1"], 2)
    assert runs.train_in_pool(tmp_path / "run", [*given, "train.num_steps=2"], 2) == named
    commits = tmp_path / "run/run/checkpoints"
    assert not list(commits.glob("reference-*"))
    assert json.loads((commits / "step-00000002/state.json").read_text())["reference"] == model
