"""What the command line prints and returns; mistakes are in test_bad_input.py."""

import json
import shlex
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest

from mrl import __version__
from mrl.checkpoint.run_dir.manifest import FileRecord, Manifest
from mrl.checkpoint.run_dir.resume_hint import resume_hint
from mrl.commands import cli
from mrl.config.config import Config, load
from mrl.errors import UserError
from tests.own_tasks import DEFECT
from tests.source import ROOT

CONFIG = """
model: {preset: qwen2_tiny, tokenizer: "char:0123456789<>+#", dtype: float32}
train: {num_steps: 100}
data: {task: addition}
rollout: {prompt_length: 16, response_length: 8}
"""


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(CONFIG)
    return str(file)


def test_module_and_console_script_are_the_same_program():
    done = subprocess.run(
        [sys.executable, "-m", "mrl", "--version"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"mrl {__version__}\n"


def test_overrides_may_stand_before_and_after_options(config):
    arguments = cli._parse(["train", config, "train.num_steps=3", "--dry-run", "run.seed=1"])
    assert arguments.overrides == ["train.num_steps=3", "run.seed=1"] and arguments.dry_run


def test_dry_run_shows_config_ranks_and_refit_and_makes_nothing(config, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    layout = ("parallel.tensor_model_parallel_size=2", "parallel.pipeline_model_parallel_size=2")
    assert cli.main(["train", config, *layout, "--dry-run", "--world-size", "8"]) == 0
    told = capsys.readouterr().out
    assert told.index("dry run of 8 rank(s)") == 0 < told.index("# ranks") < told.index("# config")
    assert "32 prompts x 8 samples = 256 sequences of at most 24 tokens: at most 6,144 tokens" in told
    assert (
        "1 minibatch(es) of 256 sequences; 128 for each of 2 data-parallel rank(s), in about 1 microbatch(es)" in told
    )
    assert "clip_low: 0.2" in told  # the algorithm's own default, resolved
    assert "# ranks: 8 = tp 2 x dp 2 x pp 2" in told and "8 rollout replica(s) of tp 1" in told
    assert "   7     1     1     1       7" in told
    assert list(tmp_path.iterdir()) == [tmp_path / "config.yaml"]


def test_dry_run_shows_what_megatron_is_told_and_what_gpus_turn_on(config, capsys):
    fields = (
        "megatron.transformer={apply_rope_fusion: false, bias_dropout_fusion: true, hidden_dropout: 0.0, window_size: "
        "[4, 0]}"
    )
    told_by = [
        "train",
        config,
        fields,
        "model.dtype=bfloat16",
        "megatron.unchecked=true",
        "--dry-run",
        "--world-size",
        "2",
    ]
    assert cli.main(told_by) == 0
    told = capsys.readouterr().out
    assert "megatron.transformer.bias_dropout_fusion: false -> true\n" in told
    assert "hidden_dropout:" not in told.partition("# config")[0]  # it is so without it
    on = next(line for line in told.splitlines() if line.startswith("switched on with TransformerEngine: "))
    assert "transformer.bias_activation_fusion" in on and "ddp.overlap_param_gather" in on and "rope" not in on
    assert "WARNING megatron.transformer.window_size is used only because of megatron.unchecked=true" in told


def test_dry_run_counts_context_parallel_ranks(config, capsys):
    assert cli.main(["train", config, "parallel.context_parallel_size=2", "--dry-run", "--world-size", "4"]) == 0
    assert "# ranks: 4 = tp 1 x cp 2 x dp 2 x pp 1" in capsys.readouterr().out


def sent_mib(told: str) -> tuple[float, float]:
    (line,) = [line for line in told.splitlines() if line.startswith("sent between ranks")]
    words = line.split()
    return float(words[3]), float(words[7])


def test_dry_run_knows_that_equal_shards_are_not_sent(config, capsys):
    tp = "parallel.tensor_model_parallel_size=2"
    assert cli.main(["train", config, tp, "rollout.tensor_model_parallel_size=1", "--dry-run", "--world-size=2"]) == 0
    split = sent_mib(capsys.readouterr().out)
    assert cli.main(["train", config, "--dry-run", "--world-size=2"]) == 0
    whole = sent_mib(capsys.readouterr().out)
    assert split[0] == split[1] > 0 and whole == (0, 0)


def test_dry_run_refuses_what_a_run_refuses(config, capsys):
    assert cli.main(["train", config, "parallel.tensor_model_parallel_size=3", "--dry-run", "--world-size=3"]) == 2
    assert "does not divide the model's attention heads (4)" in capsys.readouterr().err


def run_with_task(config: str, tmp_path, monkeypatch, code: str) -> int:
    """`mrl train` on a data task whose module runs `code` when it is imported."""
    tmp_path.joinpath("my_task.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_task", raising=False)
    monkeypatch.chdir(tmp_path)
    return cli.main(["train", config, "data.task=my_task:Task"])


def test_an_interrupt_ends_with_130(config, tmp_path, monkeypatch, capsys):
    assert run_with_task(config, tmp_path, monkeypatch, "raise KeyboardInterrupt") == 130
    told = capsys.readouterr().err
    assert "mrl: interrupted.\nThere is no checkpoint yet, in runs/default. Start again with: mrl train " in told


TASK = """
import os, signal, time
from mrl.data.synthetic_tasks import Task
from mrl.errors import UserError

class At(Task):
    num_train, num_val = 100, 0

    def __init__(self, *, action):
        self.action, self.reads = action, 0

    def train_row(self, index):
        self.reads += index == 5
        if self.reads == 2:  # after the look at the first rows: in the third step of two rows
            if self.action == "mistake":
                raise UserError("row 5 is wrong.")
            os.kill(os.getpid(), getattr(signal, self.action))
            time.sleep(0.3)  # a thread hears it
        return {"prompt": "<1+1>", "answer": "2"}

    def val_row(self, index):
        raise IndexError
"""

TINY = (
    "model.overrides={hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}", "run.num_threads=1",
    "actor.max_tokens_per_microbatch=64", "rollout.n=2", "rollout.gpu_memory_utilization=0.01", "train.num_steps=4",
    "train.batch_size=2", "data.shuffle=false", "checkpoint.interval=1",
    "observe={console: off, tensorboard: false, report: false}",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("action", "status", "said"),
    [
        ("SIGTERM", 75, "mrl: stopped by SIGTERM after step 2; its checkpoint existed already.\n"),
        ("SIGHUP", 75, "mrl: stopped by SIGHUP after step 2; its checkpoint existed already.\n"),
        ("SIGINT", 130, "mrl: interrupted.\n"),
        ("mistake", 2, "mrl: error: row 5 is wrong.\nThis was at step 3, between phases.\n"),
    ],
)
def test_a_run_that_ends_early_names_its_last_checkpoint_and_the_command(
    action, status, said, config, request, tmp_path, monkeypatch, capsys
):
    tmp_path.joinpath("task_at.py").write_text(TASK)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    for number, heard in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        before = signal.signal(number, heard)  # a shell's background job, or one of nohup, has it ignored
        request.addfinalizer(partial(signal.signal, number, before))
    words = ["train", config, "data.task=task_at:At", f"data.task_kwargs.action={action}", *TINY, "observe.report=true"]
    assert cli.main(words) == status
    assert (tmp_path / "runs" / "default" / "report.html").exists() == (action != "mistake")
    told = capsys.readouterr().err
    last = f"The last checkpoint is of step 2, in runs/default. Continue with: {shlex.join(['mrl', *words])}\n"
    assert told.endswith(said + last)
    assert "Traceback" not in told and signal.getsignal(signal.SIGTERM) == handler


def test_a_resume_tells_changed_settings_under_a_heading_and_step_0_has_its_own_times(
    config, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    warm = ("train.warm_start={num_steps: 1, batch_size: 2}", "data.task_kwargs.num_val=2")
    words = ["train", config, *TINY, *warm]
    assert cli.main([*words, "train.num_steps=1"]) == 0
    changed = ("train.num_steps=2", "actor.lr=0.5", "actor.lr_schedule=linear", "observe.console=plain")
    assert cli.main([*words, *changed]) == 0
    told = capsys.readouterr().out
    assert (
        "\nsettings changed since the last start:\n  actor.lr: 1e-06 -> 0.5\n  actor.lr_schedule: constant -> linear\n"
        "  train.num_steps: 1 -> 2\n  actor.lr_schedule=linear is now computed for 2 steps\n" in f"\n{told}"
    )
    rows = [json.loads(line) for line in (tmp_path / "runs/default/timings.jsonl").read_text().splitlines()]
    (zero,) = [row for row in rows if row["phase"] == "train" and row["step"] == 0]
    assert {"timing_s/step", "timing_s/testing", "timing_s/save_checkpoint"} <= set(zero)
    assert "timing_s/warm_start" not in zero


def test_the_command_that_goes_on_may_resume_and_names_the_launcher(tmp_path, monkeypatch):
    config = Config(run=replace(Config().run, output_dir=str(tmp_path), resume="never"))
    assert resume_hint(config, ["train", "a b.yaml"]).endswith("Start again with: mrl train 'a b.yaml'")
    commit = tmp_path / "checkpoints" / "step-00000007" / "commit.json"
    commit.parent.mkdir(parents=True)
    commit.write_bytes(Manifest(7, None, {"state.json": FileRecord(0, "0" * 64)}).encode())
    launcher = {
        "RANK": 0,
        "WORLD_SIZE": 2,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 2,
        "MASTER_ADDR": "a",
        "MASTER_PORT": 1,
    }
    for name, value in launcher.items():
        monkeypatch.setenv(name, str(value))
    told = resume_hint(config, ["train", "a.yaml"])
    assert told.endswith(
        "of step 7, in " + str(tmp_path) + ". Continue with: the same launcher with -m mrl train a.yaml run.resume=auto"
    )


def test_a_mistake_in_the_config_is_told_without_torch():
    code = "import sys; from mrl.commands.cli import main; "
    code += "status = main(['train', 'configs/quickstart.yaml', 'train.num_step=3'])"
    code += "; print(status, 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n" and "Did you mean" in done.stderr


def test_a_defect_keeps_its_traceback(config, tmp_path, monkeypatch):
    with pytest.raises(ZeroDivisionError):
        run_with_task(config, tmp_path, monkeypatch, DEFECT)


@pytest.mark.parametrize(
    ("rank", "local_rank", "everywhere", "speaks"),
    [(0, 0, True, True), (1, 1, True, False), (2, 0, True, False), (2, 0, False, True), (3, 1, False, False)],
)
def test_one_rank_speaks_for_the_job_or_for_its_host(rank, local_rank, everywhere, speaks, monkeypatch):
    launcher = {"RANK": rank, "WORLD_SIZE": 4, "LOCAL_RANK": local_rank, "LOCAL_WORLD_SIZE": 2}
    for name, value in {**launcher, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    error = UserError("the message")
    error.on_all_ranks = everywhere
    assert cli._should_print(error) == speaks


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ([], ""),
        (["train.mode=async", "train.max_off_policy_steps=0"], ""),
        (
            ["train.mode=async"],
            "; rollout correction decoupled_token_is, the default for sampling with older weights",
        ),
        (
            ["train.mode=async", "algorithm.rollout_correction.preset=decoupled_seq_is"],
            "; rollout correction decoupled_seq_is, set by the config",
        ),
        (
            ["train.mode=async", "algorithm.rollout_correction.bypass_mode=false"],
            "; rollout correction without preset, set by the config",
        ),
    ],
)
def test_the_first_line_names_the_correction_of_a_run_that_samples_ahead(overrides, said, config):
    line = cli._start_line(load(config, overrides))
    assert line.endswith(f", 1 rank, in runs/default{said}")


def test_without_a_command_the_help_is_printed_and_the_status_is_2(capsys):
    with pytest.raises(SystemExit) as ended:
        cli.main([])
    printed = capsys.readouterr()
    assert ended.value.code == 2 and printed.out == ""
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    words = ["train", "evaluate", "serve", "plan", "rehearse", "launch", "doctor", "from-verl", "report"]
    text = capsys.readouterr().out
    assert ended.value.code == 0 and text == printed.err and [word for word in words if word not in text] == []
