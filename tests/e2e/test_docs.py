"""What mrl/docs shows works: the example of a model and data of one's own trains, the glossary knows every metric."""

import json
import re
import shlex

import pytest

from mrl.commands.cli import main
from tests.data.folders import byte_bpe_folder
from tests.e2e import runs
from tests.e2e.test_dpo import DPO
from tests.e2e.test_episodes import GUESSING
from tests.reward_models import write_reward_model
from tests.source import PACKAGE, ROOT

pytestmark = pytest.mark.slow

OWN_DATA = (ROOT / "mrl" / "docs" / "own_data.md").read_text(encoding="utf-8")
GLOSSARY = (ROOT / "mrl" / "docs" / "metrics.md").read_text(encoding="utf-8")
QUIET = ("observe.console=off", "observe.tensorboard=false", "observe.report=false", "train.num_steps=1")


def shown(name):
    """The block of own_data.md below a marker."""
    return re.search(rf"<!-- {name} -->\n```\w+\n(.*?)```", OWN_DATA, re.DOTALL)[1]


def model_folder(folder):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    byte_bpe_folder(folder)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    Qwen2ForCausalLM(Qwen2Config(vocab_size=320, **sizes, **heads)).save_pretrained(str(folder))


SMALL = (
    "run.num_threads=1", "model.dtype=float32", "train.batch_size=2", "train.minibatch_size=1", "rollout.n=2",
    "rollout.prompt_length=96", "rollout.response_length=8", "rollout.max_num_seqs=8",
    "rollout.gpu_memory_utilization=0.01",
)  # fmt: skip


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A folder with the model, data, reward and config that the page shows."""
    monkeypatch.chdir(tmp_path)
    model_folder(tmp_path / "models" / "my-model")
    (tmp_path / "my_rewards.py").write_text(shown("reward"))
    (tmp_path / "my_run.yaml").write_text(shown("config"))
    (tmp_path / "data").mkdir()
    for name in ("train", "val"):
        (tmp_path / "data" / f"{name}.jsonl").write_text(shown("row") * 4)
    (tmp_path / "data" / "pairs.jsonl").write_text(shown("pair").splitlines()[0] + "\n")
    return tmp_path


def test_the_example_of_a_model_and_data_of_ones_own_trains(own):
    assert main(["train", "my_run.yaml", *SMALL, *QUIET]) == 0
    run = own / "runs" / "my_run"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["reward/failed_frac"] == 0 and "reward/ends_with_answer/mean" in rows[-1]
    assert (run / "checkpoints" / "step-00000001" / "hf" / "model.safetensors").is_file()


def test_the_example_of_pairs_trains(own):
    words = shlex.split(shown("dpo"))
    assert words[:3] == ["mrl", "train", "my_run.yaml"]
    assert main([*words[1:], *SMALL, "train.batch_size=1", "train.minibatch_size=null", *QUIET]) == 0
    rows = (own / "runs" / "my_run" / "metrics.jsonl").read_text().splitlines()
    assert "rewards/margins" in json.loads(rows[-1])


TEACHER = (
    "distillation.enabled=true",
    "distillation.teacher_models=[{preset: qwen2_tiny, overrides: {num_hidden_layers: 4}}]",
)
VARIANTS = [
    [
        "algorithm.rollout_correction={bypass_mode: false, rollout_is: token, rollout_is_threshold: 0.5_5.0, "
        "rollout_is_batch_normalize: true, rollout_rs: 'token_k1,seq_mean_k3', rollout_rs_threshold: '0.5_2.0,0.1'}",
        "algorithm.dynamic_sampling=true",
        "rollout.val_kwargs={n: 2, do_sample: true}",
    ],
    ["algorithm.name=reinforce_pp", "algorithm.kl_in=reward", "rollout.top_p=0.9", "rollout.over_sample_rate=0.5"],
    ["algorithm.name=ppo", "train.mode=async"],
    GUESSING,
    [
        *TEACHER,
        "distillation.distillation_loss={loss_mode: forward_kl_topk, topk: 4}",
    ],
    [*TEACHER, "distillation.distillation_loss={loss_mode: k1, use_policy_gradient: true}"],
    DPO,
    [
        "algorithm={name: sft, kl_in: none, kl_coef: 0.001, entropy_coef: 0.0}",
        "~algorithm.clip_low",
        "~algorithm.clip_high",
        "train.minibatch_size=null",
    ],
]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """Names of all metrics that runs of these kinds write."""
    names = set()
    reward = tmp_path_factory.mktemp("models") / "reward"
    write_reward_model(reward, num_hidden_layers=4)
    for variant in [*VARIANTS, [f"reward.model.path={reward}"]]:
        folder = tmp_path_factory.mktemp("variant")
        assert main(runs.arguments(folder, [*QUIET, "train.eval_interval=1", *variant])) == 0
        for file in ("metrics.jsonl", "timings.jsonl"):
            for line in (folder / "run" / file).read_text().splitlines():
                names |= set(json.loads(line))
    return names - {"step", "phase"}


def told():
    rows = [line.split("|")[1] for line in GLOSSARY.splitlines() if line.startswith("| `")]
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def pattern(name):
    return re.sub("<[a-z]+>", "[^/]+", re.escape(name)).replace("@n", r"@\d+")


def test_every_metric_that_a_run_writes_is_in_the_glossary(written):
    patterns = [pattern(name) for name in told()]
    assert {name for name in written if not any(re.fullmatch(one, name) for one in patterns)} == set()


def test_the_glossary_tells_of_no_metric_that_is_not_there(written):
    """Those of other engines and devices than here are looked for in the source."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py"))
    source = source.replace("{self.section}/", "actor/")
    assert {
        name
        for name in told()
        if not any(re.fullmatch(pattern(name), one) for one in written)
        and f'"{name.removeprefix("perf/rollout/")}"' not in source
    } == set()


def test_the_terminals_words_are_in_the_glossary():
    from mrl.observability.loggers.console import PLAIN, WATCHED

    cells = {}
    for line in GLOSSARY.splitlines():
        if line.startswith("| `") and line.count("|") == 4:
            for name in re.findall(r"`([^`]+)`", line.split("|")[1]):
                cells[name] = {word.strip() for word in line.split("|")[3].split(",")}
    for word, name in (*WATCHED, *(item for group in PLAIN for item in group)):
        assert word in cells[name]
