"""A pretrained chat model with real tokenizer and chat template, SmolLM2-135M-Instruct: mrl against transformers.

Needs the packages that `tools/real_model.py` names; `.ci/run` installs them for the slow tests.
"""

import json
import runpy
import sys

import pytest
import real_model
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.commands.cli import main
from mrl.engines.base import SamplingConfig
from mrl.types import Prompt
from tests.e2e.runs import metrics
from tests.engines.native.tiny import make_engine
from tests.source import ROOT

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(real_model.package_folder() is None, reason=f"needs a model: {real_model.PACKAGES}"),
]

NUM_PROMPTS = 50
MAX_TOKENS = 12
TOPICS = ("the sea", "prime numbers", "Paris", "a cat", "gravity", "bread", "1984", "tea", "the moon", "Python")
QUESTIONS = (
    "What is {}?", "Write one sentence about {}.", "Name three facts about {}", "Why do people like {}?",
    "Translate '{}' to French.",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    target = tmp_path_factory.mktemp("real") / "model"
    real_model.write_model(real_model.package_folder(), target)
    return target


@pytest.fixture(scope="module")
def prompts(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [question.format(topic) for question in QUESTIONS for topic in TOPICS]
    chats = [[{"role": "user", "content": text}] for text in texts]
    ids = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"] for chat in chats
    ]
    assert len(ids) == NUM_PROMPTS
    return [Prompt(uid=uid, prompt_ids=tuple(tokens), text="") for uid, tokens in enumerate(ids)]


@torch.no_grad()
def logits_of(model, rollout):
    """Float32 logits before each response token [num_tokens, vocab], from transformers."""
    tokens = torch.tensor([[*rollout.prompt.prompt_ids, *rollout.response_ids]])
    return model(tokens).logits[0, len(rollout.prompt.prompt_ids) - 1 : -1].float()


def logprobs(logits, rollout, temperature=1.0):
    chosen = torch.tensor(rollout.response_ids)[:, None]
    return (logits / temperature).log_softmax(-1).gather(-1, chosen)[:, 0]


def transformers_model(folder, dtype):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()


def test_greedy_and_sampled_responses_in_float32_are_those_of_transformers(folder, prompts):
    engine = make_engine(folder, response_length=MAX_TOKENS)
    model = transformers_model(folder, torch.float32)
    for rollout in engine.generate(prompts, SamplingConfig(n=1, max_tokens=MAX_TOKENS, greedy=True)):
        logits = logits_of(model, rollout)
        chosen = logits.gather(-1, torch.tensor(rollout.response_ids)[:, None])[:, 0]
        assert (logits.max(-1).values - chosen).max() < 1e-3
        assert torch.allclose(torch.tensor(rollout.rollout_logprobs), logprobs(logits, rollout), atol=1e-4)
    for rollout in engine.generate(prompts, SamplingConfig(n=1, max_tokens=MAX_TOKENS, temperature=0.6)):
        expected = logprobs(logits_of(model, rollout), rollout, 0.6)
        assert torch.allclose(torch.tensor(rollout.rollout_logprobs), expected, atol=2e-4)


def test_bfloat16_is_as_near_to_float32_as_transformers_is(folder, prompts):
    engine = make_engine(folder, dtype=torch.bfloat16, response_length=MAX_TOKENS)
    exact, rounded = (transformers_model(folder, dtype) for dtype in (torch.float32, torch.bfloat16))
    own, theirs = [], []
    for rollout in engine.generate(prompts, SamplingConfig(n=1, max_tokens=MAX_TOKENS)):
        truth = logprobs(logits_of(exact, rollout), rollout)
        own.append(torch.tensor(rollout.rollout_logprobs) - truth)
        theirs.append(logprobs(logits_of(rounded, rollout), rollout) - truth)
    assert torch.cat(own).abs().mean() <= 1.1 * torch.cat(theirs).abs().mean()


@pytest.fixture
def convert(monkeypatch):
    """Runs a conversion tool in this process and expects success."""

    def run(tool, source, target, *flags):
        monkeypatch.setattr(
            sys, "argv", [tool, "--model_dir", str(source), "--output_dir", str(target), *map(str, flags)]
        )
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(ROOT / "tools" / f"{tool}.py"), run_name="__main__")
        assert end.value.code == 0

    return run


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (3, 1), (1, 3), (3, 3)])
def test_conversions_to_megatron_and_back_change_no_byte(folder, tmp_path, convert, tp, pp):
    sizes = ("--tensor-model-parallel-size", tp, "--pipeline-model-parallel-size", pp)
    convert("convert_hf_to_megatron", folder, tmp_path / "megatron", *sizes)
    convert("convert_megatron_to_hf", tmp_path / "megatron", tmp_path / "hf", "--like", folder)
    one, two = (load_file(each / "model.safetensors") for each in (folder, tmp_path / "hf"))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)


@pytest.mark.parametrize("config", ["sums_smollm2", "sums_smollm2_lora"])
def test_the_actor_scores_what_the_engine_sampled(config, folder, tmp_path):
    rows = list(real_model.sums(seed=1))
    for name, part in (("train", rows[:16]), ("val", rows[16:20])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    overrides = [
        f"run.output_dir={tmp_path}/run", f"model.path={folder}", "model.dtype=float32", "run.num_threads=1",
        f"data.train_files={tmp_path}/train.jsonl", f"data.val_files={tmp_path}/val.jsonl", "train.num_steps=2",
        "train.batch_size=4", "train.minibatch_size=4", "rollout.n=4", "rollout.temperature=1.0", "observe.console=off",
    ]  # fmt: skip
    assert main(["train", str(ROOT / "configs" / f"{config}.yaml"), *overrides]) == 0
    steps = [row for row in metrics(tmp_path) if "training/rollout_probs_diff_max" in row]
    assert len(steps) == 2
    assert all(row["training/rollout_probs_diff_max"] < 1e-4 for row in steps)
