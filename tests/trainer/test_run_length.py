"""A run of so many epochs passes over the data so often, however its prompts are spent, stopped or resumed."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.config.config import Config, TrainConfig
from mrl.errors import UserError
from mrl.trainer.run_length import with_num_steps
from tests.e2e.runs import train_in_pool


@settings(max_examples=50, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    num_epochs=st.one_of(st.integers(1, 4).map(float), st.integers(1, 40).map(lambda tenths: tenths / 10)),
    num_steps=st.none() | st.integers(0, 30),
)
def test_steps_are_the_batches_in_the_epochs_and_at_most_those_asked_for(num_rows, batch_size, num_epochs, num_steps):
    config = replace(Config(), train=TrainConfig(num_steps=num_steps, num_epochs=num_epochs, batch_size=batch_size))
    prompts = round(num_epochs * 10) * num_rows // 10
    if prompts < batch_size:
        with pytest.raises(UserError, match="fewer than one batch of train.batch_size"):
            with_num_steps(config, num_rows)
        return
    made = with_num_steps(config, num_rows)
    steps = made.train.num_steps
    assert steps == min(num_steps if num_steps is not None else prompts, prompts // batch_size)
    assert with_num_steps(made, num_rows) == made  # the run folder's config.yaml starts the same run


ROWS = 11
SHORT = {"prompt": "<1+2>", "answer": "3"}
LONG = {"prompt": "<10+20+30+40>", "answer": "100"}

EPOCHS = (
    "train={num_steps: null, batch_size: 4, minibatch_size: null}", "train.warm_start.num_steps=0",
    "data.task=null", "data.task_kwargs={}", "reward.functions=[{name: exact_match}]",
    "checkpoint.interval=1", "checkpoint.keep_last=9",
)  # fmt: skip
SUPERVISED = ("algorithm={name: sft, kl_in: none}", "~algorithm.kl_coef", "~algorithm.entropy_coef",
              "~algorithm.clip_low", "~algorithm.clip_high")  # fmt: skip


def epochs(folder, rows, *overrides):
    """The lines of a run over a file of rows, 4 a step."""
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    files = [f"data.{side}_files={folder}/rows.jsonl" for side in ("train", "val")]
    return train_in_pool(folder, [*EPOCHS, *files, *overrides], 1)


@pytest.mark.slow
def test_two_passes_over_eleven_rows_are_five_steps_of_four_and_a_resume_adds_the_third(tmp_path):
    rows = [SHORT] * ROWS
    lines = epochs(tmp_path, rows, "train.num_epochs=2", *SUPERVISED)
    assert [line["step"] for line in lines if "actor/nll" in line] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "val/accuracy" in line] == [0, 5]
    assert (tmp_path / "run" / "checkpoints" / "step-00000005").is_dir()
    more = epochs(tmp_path, rows, "train.num_epochs=3", *SUPERVISED)
    assert [line["step"] for line in more if "actor/nll" in line] == [1, 2, 3, 4, 5, 6, 7, 8]


@pytest.mark.slow
def test_dropped_prompts_and_dynamic_sampling_use_the_epochs_up(tmp_path):
    """Of 11 rows 3 are too long: two passes hold 16 prompts, 4 steps; untrained answers are all wrong, so that every
    group is dropped and a step of two rounds uses up 8 rows of the 22: three steps, the last one begun with 6 left."""
    rows = [SHORT, SHORT, LONG, SHORT, SHORT, LONG, SHORT, SHORT, LONG, SHORT, SHORT]
    drop = ("data.overlong_prompts=drop", "train.num_epochs=2")
    lines = epochs(tmp_path / "drop", rows, *drop, *SUPERVISED)
    assert [line["step"] for line in lines if "actor/nll" in line] == [1, 2, 3, 4]
    assert [line["step"] for line in lines if "val/accuracy" in line] == [0, 4]
    assert (tmp_path / "drop" / "run" / "checkpoints" / "step-00000004").is_dir()

    dynamic = ("algorithm.dynamic_sampling=true", "algorithm.max_sampling_rounds=2", "train.num_epochs=2")
    lines = epochs(tmp_path / "dynamic", [SHORT] * ROWS, *dynamic)
    steps = [line for line in lines if "training/epoch" in line]
    assert [line["rollout/num_dropped_groups"] for line in steps] == [8, 8, 8]
    assert [line["step"] for line in lines if "val/accuracy" in line] == [0, 3]
