"""A user's mistake ends in one clear message and status 2, without a traceback, and the run folder can go on.

Every case calls the command line as a user does; most of them in this process, which is the same code and faster. What
`mrl train` refuses before its ranks meet, every other command that takes a config refuses in the same words, or
NOT_KNOWN says why it cannot know.
"""

import gc
import json
import os
import subprocess
import sys

import pytest

from mrl.commands.cli import main
from tests.source import ROOT

REWARDS = """
import time

def raises(*, prompt, response, answer, extra):
    raise KeyError("no such thing")

def hangs(*, prompt, response, answer, extra):
    time.sleep(60)

def text(*, prompt, response, answer, extra):
    return "very good"
"""

CONFIG = """
run: {{output_dir: {folder}/run, device: cpu, num_threads: 1}}
train: {{num_steps: 1, batch_size: 2}}
model:
  preset: qwen2_tiny
  overrides: {{hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2}}
  tokenizer: "char:0123456789+<>#"
  dtype: float32
actor: {{max_tokens_per_microbatch: 256}}
rollout: {{n: 2, prompt_length: 12, response_length: 4, max_num_seqs: 8, gpu_memory_utilization: 0.01}}
reward: {{functions: [{{name: exact_match}}], time_limit_s: 5}}
data: {{train_files: ["{folder}/train.jsonl"], shuffle: false}}
observe: {{console: "off", tensorboard: false, report: false}}
"""

ROWS = [{"prompt": f"<{i}+1>", "answer": str(i + 1)} for i in range(4)]


COMMANDS = {
    "train --dry-run": ("train", "--dry-run", "--world-size", "1"),
    "launch": ("launch", "--via", "torchrun"),
    "plan": ("plan", "--world-size", "1"),
    "rehearse": ("rehearse", "--world-size", "1", "--dry-run", "--output-dir", "rehearsal"),
}

HINT = "\nTo go on without files that exist only on the cluster ("
"""What a dry run, `mrl plan` and `mrl rehearse` add where files are not here."""

STARTED = "is found while ranks train"
DEVICES = "the GPUs are those of another machine, or of another time"
FOLDER = "asks whether the config can work, not whether this run can go on"
LATER = "what the run folder holds when the job starts is known then"

NOT_KNOWN = {
    "reward that raises": dict.fromkeys(COMMANDS, STARTED),
    "reward that hangs": dict.fromkeys(COMMANDS, STARTED),
    "reward that is no number": dict.fromkeys(COMMANDS, STARTED),
    "no room for the cache": dict.fromkeys(COMMANDS, "how much memory is free is measured when the engine starts"),
    "no cuda": dict.fromkeys(COMMANDS, DEVICES),
    "nothing to resume": {"launch": LATER, "plan": FOLDER, "rehearse": FOLDER},
}
"""Mistake -> command -> why it cannot know."""

REHEARSED = "the rehearsal failed in its stage 'check': "


class Case:
    """A folder with a config and data that work, and the command line to run on them."""

    def __init__(self, folder, capfd):
        self.folder, self.capfd = folder, capfd
        self.write("config.yaml", CONFIG.format(folder=folder))
        self.write_rows("train.jsonl", ROWS)

    def write(self, name: str, text: str) -> str:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    def write_rows(self, name: str, rows: list) -> str:
        return self.write(name, "".join(json.dumps(row) + "\n" for row in rows))

    def run(self, *arguments: str, command: str = "train") -> tuple[int, str]:
        self.capfd.readouterr()
        try:
            status = main([command, str(self.folder / "config.yaml"), *arguments])
        except SystemExit as ended:  # argparse
            status = int(ended.code)
        return status, self.capfd.readouterr().err

    def refused(self, *arguments: str, command: str = "train") -> str:
        """The one message of a run that must end in status 2."""
        return message_of(*self.run(*arguments, command=command))

    def refused_by_all(self, *overrides: str, name: str = "") -> str:
        """The one message, of every command that can know the mistake `name`."""
        told = self.refused(*overrides)
        for command, (verb, *options) in COMMANDS.items():
            if command not in NOT_KNOWN.get(name, {}):
                said = self.refused(*overrides, *options, command=verb).removeprefix(REHEARSED)
                assert said.partition(HINT)[0] == told, command
        return told

    def works(self, *arguments: str, command: str = "train") -> None:
        status, told = self.run(*arguments, command=command)
        assert status == 0, told


def message_of(status: int, told: str) -> str:
    assert status == 2, told
    assert told.count("mrl: error: ") == 1 and "Traceback" not in told
    return told.partition("mrl: error: ")[2].strip()


@pytest.fixture
def case(tmp_path, capfd, monkeypatch):
    tmp_path.joinpath("my_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 1)  # as it is, and a run counts by walking through all of them
    return Case(tmp_path, capfd)


TP = "parallel.tensor_model_parallel_size"
WARM = ("train.warm_start.num_steps=1", "train.warm_start.batch_size=2")
STOP = ("train.early_stopping.patience=1", "train.early_stopping.metric=val/acuracy")
BEST = ("data.val_files=train.jsonl", "train.eval_interval=1", "checkpoint.keep_best=1")

OVERRIDES = [
    # what is given instead, what the message says
    ("unknown key", ["train.num_step=3"], "Did you mean 'train.num_steps'?"),
    ("key of another section", ["rollout.num_samples=3"], "'observe.num_samples'? Keys of 'rollout': name, "),
    ("unknown key in a list", ["reward.functions[0].nam=math"], "'reward.functions[0].nam' is unknown"),
    ("wrong type", ["train.num_steps=many"], "got 'many', expected a whole number"),
    ("unknown choice", ["run.resume=maybe"], "expected one of auto, never, must"),
    ("no value", ["train.num_steps"], "is not section.key=value"),
    ("more ranks than there are", [f"{TP}=2"], "does not divide the 1 rank"),
    ("sequence parallel alone", ["parallel.sequence_parallel=true"], f"needs {TP} above 1"),
    ("chunks without stages", ["parallel.virtual_pipeline_model_parallel_size=2"], "above 1"),
    ("experts on one rank", ["parallel.expert_model_parallel_size=2"], "does not divide the 1 rank(s) of a pipeline"),
    ("minibatch does not divide", ["train.batch_size=3", "train.minibatch_size=2"], "does not divide train.batch"),
    ("zero temperature", ["rollout.temperature=0"], "rollout.temperature=0.0 is out of range"),
    ("top_p above 1", ["rollout.top_p=1.5"], "rollout.top_p=1.5 is out of range"),
    ("no such engine", ["rollout.name=trtlm"], "rollout.name=trtlm is unknown"),
    ("too long", ["rollout.response_length=600", "actor.max_tokens_per_microbatch=999"], "max_position_embeddings"),
    ("microbatch too small", ["actor.max_tokens_per_microbatch=8"], "a sequence is never split"),
    ("no cuda", ["run.device=cuda"], "torch sees no CUDA device"),
    ("no model folder", ["model.preset=null", "model.overrides={}", "model.path=nowhere"], "nowhere"),
    ("unknown preset", ["model.preset=qwen2_tinny"], "Did you mean 'qwen2_tiny'?"),
    ("unknown config.json key", ["model.overrides.hiden_size=3"], "Did you mean 'hidden_size'?"),
    ("heads do not divide", ["model.overrides.hidden_size=30"], "num_attention_heads (4)"),
    ("no tokenizer", ["model.tokenizer=null"], "tokenizer"),
    ("tokenizer folder missing", ["model.tokenizer=nowhere"], "'nowhere' is not a folder"),
    ("tokenizer larger than the model", ["model.overrides.vocab_size=8"], "8 tokens"),
    ("no data file", ["data.train_files=[nowhere.jsonl]"], "'nowhere.jsonl'"),
    ("no data at all", ["data.train_files=[]"], "data.train_files"),
    ("unknown task", ["data.train_files=[]", "data.task=additon"], "data.task: unknown 'additon'. Known: addition"),
    ("task takes no such argument", ["data.train_files=[]", "data.task=addition", "data.task_kwargs={a: 1}"], "'a'"),
    ("no such column", ["data.prompt_key=question"], "no column 'question'"),
    ("unknown algorithm", ["algorithm.name=gprs"], "there is no 'gprs'"),
    ("one sample in a group", ["rollout.n=1"], "rollout.n=1"),
    ("value without effect", ["algorithm.kl_coef=0.5"], "would have no effect"),
    ("clip out of range", ["algorithm.clip_low=2"], "algorithm.clip_low=2.0 is out of range"),
    ("unknown reward", ["reward.functions[0].name=exact_mach"], "Did you mean 'exact_match'?"),
    ("reward argument", ["reward.functions[0].kwargs={colour: red}"], "colour"),
    ("reward that does not import", ["reward.functions[0].name=nowhere.rewards:f"], "nowhere.rewards:f' does not"),
    ("reward that raises", ["reward.functions[0].name=my_rewards:raises"], "no such thing"),
    ("reward that hangs", ["reward.functions[0].name=my_rewards:hangs", "reward.time_limit_s=0.2"], "0.2"),
    ("reward that is no number", ["reward.functions[0].name=my_rewards:text"], "expected a number"),
    ("no room for the cache", ["rollout.gpu_memory_utilization=1e-9"], "MiB for the KV cache"),
    ("nothing to resume", ["run.resume=must"], "has no checkpoint"),
    ("run folder is a file", ["run.output_dir=config.yaml"], "which is a file"),
    ("run folder below a file", ["run.output_dir=config.yaml/run"], "'config.yaml' is a file"),
    ("no such metric to rank by", [*BEST, "checkpoint.best_metric=val/acuracy"], "Did you mean 'val/accuracy'?"),
    ("no such metric to stop by", [*BEST[:2], *STOP], "train.early_stopping.metric=val/acuracy is not a metric"),
    ("a metric of several samples", [*BEST, "checkpoint.best_metric=val/accuracy/best@4"], "Known: val/accuracy,"),
    ("evaluation without prompts", ["train.eval_interval=1"], "needs held-out prompts"),
    ("task that does not import", ["data.train_files=[]", "data.task=nowhere:Task"], "nowhere"),
    ("task that is none", ["data.train_files=[]", "data.task=os.path:join"], "expected a subclass of mrl.data.syn"),
    ("engine that does not import", ["rollout.name=nowhere.engines:Engine"], "nowhere.engines"),
    ("engine that is none", ["rollout.name=os.path:join"], "expected a subclass of mrl.engines.base.RolloutEngine"),
    ("algorithm that is none", ["algorithm.name=os.path:join"], "expected a subclass of mrl.algorithms.base.Algo"),
    ("reward that is not there", ["reward.functions[0].name=os.path:nothing"], "no 'nothing'"),
    ("reward that is no function", ["reward.functions[0].name=os.path:sep"], "expected a function"),
    ("no template", ["data.chat_template=nowhere.jinja"], "cannot be used with the tokenizer"),
    ("no reference folder", ["reference.path=nowhere", "algorithm.kl_in=loss"], "reference.path=nowhere"),
    ("no response to imitate", [*WARM, "data.response_key=worked"], "data.response_key=worked gives NoneType"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "overrides", "said"), OVERRIDES, ids=[item[0] for item in OVERRIDES])
def test_a_wrong_override_is_refused_by_every_command(case, name, overrides, said):
    assert said in case.refused_by_all(*overrides, name=name)


def test_what_a_command_cannot_know_does_not_end_it(case):
    """Else the list of exceptions would hide a refusal."""
    overrides = {name: given for name, given, _ in OVERRIDES}
    for name in ("no cuda", "nothing to resume", "reward that raises"):
        for command in ("train --dry-run", "plan"):
            if command in NOT_KNOWN[name]:
                verb, *options = COMMANDS[command]
                case.works(*overrides[name], *options, command=verb)


ROWS_REFUSED = [
    ("empty file", "", "contains no rows"),
    ("not JSON", '{"prompt": "<1+1>"\n', "train.jsonl:1: not JSON"),
    ("not an object", "[1, 2]\n", "train.jsonl:1: the line is a JSON list"),
    ("answer is a list", '{"prompt": "<1+1>", "answer": [2]}\n', "expected a string or a number"),
    ("prompt is a number", '{"prompt": 3, "answer": "2"}\n', "expected a string or a list of chat messages"),
    ("character that the tokenizer lacks", '{"prompt": "<1*1>", "answer": "1"}\n', "does not know '*'"),
    ("prompt too long", '{"prompt": "<1+1+1+1+1+1+1>", "answer": "7"}\n', "more than rollout.prompt_length=12"),
]


@pytest.mark.parametrize(("text", "said"), [item[1:] for item in ROWS_REFUSED], ids=[item[0] for item in ROWS_REFUSED])
def test_bad_data_is_refused_by_every_command(case, text, said):
    case.write("train.jsonl", text)
    assert said in case.refused_by_all()


def test_data_of_another_kind_is_refused(case):
    broken = case.write("train.parquet", "PAR1 and nothing else")
    assert "not a readable parquet file" in case.refused(f"data.train_files=[{broken}]")
    table = case.write("train.csv", "prompt,answer\n")
    assert "expected .jsonl or .parquet" in case.refused(f"data.train_files=[{table}]")


def test_a_warm_start_without_answers_is_refused(case):
    case.write_rows("train.jsonl", [{"prompt": "<1+1>"}] * 4)
    assert "supervised steps need a response to imitate" in case.refused_by_all(*WARM, "data.answer_key=''")


def model_folder(case: Case, **changes) -> dict:
    config = {
        "model_type": "llama", "vocab_size": 14, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 64, **changes,
    }  # fmt: skip
    case.write("model/config.json", json.dumps(config))
    return config


def without_preset(case: Case) -> None:
    text = CONFIG.format(folder=case.folder)
    first, last = text.index("  preset:"), text.index("  tokenizer:")
    case.write("config.yaml", text[:first] + "  path: model\n" + text[last:])


def test_a_model_folder_that_is_not_one_is_refused(case):
    without_preset(case)
    case.folder.joinpath("model").mkdir()
    assert "has no config.json" in case.refused_by_all()
    case.write("model/config.json", "{")
    assert "config.json' cannot be read" in case.refused_by_all()
    model_folder(case, model_type="mamba")
    assert "model_type is 'mamba'" in case.refused_by_all()
    model_folder(case, num_attention_heads="four")
    assert "num_attention_heads" in case.refused_by_all()


def test_weights_that_do_not_fit_are_refused(case):
    import torch
    from safetensors.torch import save_file

    without_preset(case)
    model_folder(case)
    assert "safetensors" in case.refused()
    weights = case.write("model/model.safetensors", "no such header")
    assert "model.safetensors" in case.refused_by_all()
    save_file({"model.norm.weight": torch.ones(32)}, weights)
    assert "lacks" in case.refused_by_all()


def test_a_checkpoint_that_was_changed_is_named_and_the_one_before_goes_on(case):
    case.works("checkpoint.interval=1")
    first, last = sorted((case.folder / "run" / "checkpoints").glob("step-*"))[-2:]
    victim = max((file for file in last.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    assert "run.resume=never" in case.refused("run.resume=never")
    case.works("train.num_steps=2")
    notes = (case.folder / "run" / "notes.jsonl").read_text()
    assert f"{last} is damaged" in notes and f"the run resumes from {first.name}" in notes


def test_another_run_in_the_folder_is_refused(case):
    case.works()
    assert "another config: run.seed" in case.refused("run.seed=1", "train.num_steps=2")
    case.write_rows("train.jsonl", [*ROWS, *ROWS])
    assert "the training data changed" in case.refused("train.num_steps=2")


def test_evaluate_without_prompts_or_checkpoint_is_refused(case):
    assert "no held-out prompts" in case.refused(command="evaluate")
    held_out = case.write_rows("val.jsonl", ROWS)
    files = f"data.val_files=[{held_out}]"
    assert "7" in case.refused(files, "--checkpoint", "7", command="evaluate")
    assert "is not a checkpoint" in case.refused(files, "--checkpoint", str(case.folder), command="evaluate")


def test_evaluate_continues_nothing(case):
    case.works("checkpoint.interval=1")
    held_out = case.write_rows("val.jsonl", ROWS)
    case.works(f"data.val_files=[{held_out}]", "run.resume=never", command="evaluate")


def test_a_logger_without_its_package_is_found_before_ranks_start(case, monkeypatch):
    """A plan or a rehearsal may be made on a machine that needs no W&B: told, not refused."""
    monkeypatch.setitem(sys.modules, "wandb", None)  # Python's own way to say that there is no such module
    project, told = "observe.wandb_project=mine", "the package 'wandb' is not installed. Run `pip install wandb`"
    assert told in case.refused(project) and told in case.refused(project, "--dry-run")
    for command in ("plan", "rehearse"):
        verb, *options = COMMANDS[command]
        case.works(project, *options, command=verb)


def test_a_report_of_no_run_is_refused(case):
    case.capfd.readouterr()
    status = main(["report", str(case.folder / "nowhere")])
    assert "nowhere" in message_of(status, case.capfd.readouterr().err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "mended"),
    [
        (["reward.functions[0].name=my_rewards:raises"], []),
        (["reward.functions[0].name=my_rewards:hangs", "reward.time_limit_s=0.2"], []),
        (["rollout.prompt_length=6"], ["rollout.prompt_length=12"]),
    ],
    ids=["reward raises", "reward hangs", "prompt too long"],
)
def test_a_run_that_failed_goes_on_when_the_mistake_is_mended(case, mistake, mended):
    case.write_rows("train.jsonl", [*ROWS[:2], {"prompt": "<1+1+1>", "answer": "3"}, ROWS[3]])
    steps = ("train.num_steps=2", "checkpoint.interval=1")
    case.refused(*steps, *mistake)
    case.works(*steps, *mended)
    lines = (case.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["training/global_step"] == 2


def process(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    command = [sys.executable, "-m", "mrl", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["train", "nowhere.yaml"], {}, "config file 'nowhere.yaml' does not exist"),
        (["train", "README.md"], {}, "README.md"),
        (["train", "configs/quickstart.yaml"], {"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR"),
    ],
    ids=["no config file", "not a config file", "half a launcher"],
)
def test_a_process_ends_with_one_message_and_status_2(arguments, environment, said):
    done = process(*arguments, **environment)
    assert said in message_of(done.returncode, done.stderr)
    assert done.stdout == ""


@pytest.mark.parametrize("arguments", [["tain"], ["train"], ["train", "c.yaml", "--steps", "3"]])
def test_a_wrong_command_line_ends_with_usage_and_status_2(arguments, capfd):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capfd.readouterr().err
    assert ended.value.code == 2
    assert told.startswith("usage: mrl") and told.count("error: ") == 1
