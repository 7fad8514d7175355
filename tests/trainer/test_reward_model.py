"""A reward model's scores are those of transformers' sequence classifier, in every layout of the actor."""

import json
import math

import pytest
import torch
import transformers

from mrl.config.config import load
from mrl.data.tokenizer import CharTokenizer
from mrl.errors import UserError
from mrl.megatron import parallel_state
from mrl.megatron.actor import Actor
from mrl.trainer.reward_model import RunRewardModel
from mrl.trainer.run_plan import build_run_plan, check_run, resolve
from mrl.types import Prompt, Rollout
from tests.data.folders import byte_bpe_folder
from tests.e2e.runs import CONFIG
from tests.ranks import run_ranks
from tests.reward_models import CHARACTERS, scores_of, write_reward_model

SCORE = 1e-5  # fp32 on both sides, scores of order 1
NUM_PROMPTS, SAMPLES = 5, 3
DENSE = {
    "tp1": ([], 1),
    "dp2": ([], 2),
    "tp2": (["parallel.tensor_model_parallel_size=2", "parallel.sequence_parallel=true"], 2),
    "pp2": (["parallel.pipeline_model_parallel_size=2"], 2),
    "pp2_vpp2": (
        ["parallel.pipeline_model_parallel_size=2", "parallel.virtual_pipeline_model_parallel_size=2"],
        2,
    ),
    "cp2": (["parallel.context_parallel_size=2"], 2),
}
MIXTURE = {
    **{name: DENSE[name] for name in ("tp1", "tp2", "pp2", "cp2")},
    "ep2": (["parallel.expert_model_parallel_size=2"], 2),
}
CASES = [
    *(("qwen2_tiny", name) for name in DENSE),
    *(("qwen3_tiny", name) for name in ("tp1", "tp2", "pp2", "cp2")),
    *(("llama_tiny", name) for name in ("tp1", "tp2", "pp2", "cp2")),
    *(("qwen3_moe_tiny", name) for name in MIXTURE),
]
LAYERS = {"num_hidden_layers": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("reward_models")


@pytest.fixture(scope="module")
def model_of(folder):
    known = {}

    def found(preset):
        if preset not in known:
            known[preset] = write_reward_model(folder / preset, preset, **LAYERS)
        return known[preset]

    return found


def config_of(folder, preset, *overrides):
    """Of a run with this reward model; the actor is of the same kind, and of another width."""
    (folder / "config.yaml").write_text(CONFIG)
    kind = "qwen2_moe_tiny" if "moe" in preset else "qwen2_tiny"
    actor = f"model={{preset: {kind}, overrides: {{num_hidden_layers: 4}}}}"
    named = f"reward.model.path={folder / preset}"
    return load(folder / "config.yaml", ["~model.overrides", actor, named, f"run.output_dir={folder}/run", *overrides])


def samples():
    """Ragged samples, several of each prompt; one ends with its end token, one is a single token."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for uid in range(NUM_PROMPTS):
        length = int(torch.randint(1, 9, (), generator=generator))
        prompt = Prompt(uid, tuple(torch.randint(0, 14, (length,), generator=generator).tolist()), "", None, {}, "t")
        for index in range(SAMPLES):
            ids = torch.randint(0, 14, (1 + (uid + 2 * index) % 5,), generator=generator).tolist()
            made.append(Rollout(prompt, index, ids, [0.0] * len(ids), "stop", 0))
    return made


def score(config):
    """The scores of this rank's replica."""
    plan = build_run_plan(config)
    groups = parallel_state.initialize(plan.grid, seed=0)
    device = torch.device("cpu")
    policy = Actor(plan.config, plan.arch, groups, device)
    scorer = RunRewardModel(plan, plan.reward, groups, device, policy)
    own = groups.grid.replica(groups.rank)
    mine = [one for one in samples() if one.prompt.uid % groups.grid.num_replicas == own]
    return scorer.score(mine), scorer.score(mine[:1]), scorer.score([])


@pytest.mark.parametrize(("preset", "layout"), CASES, ids=[f"{preset}-{layout}" for preset, layout in CASES])
def test_scores_are_those_of_transformers(preset, layout, folder, model_of):
    overrides, ranks = {**DENSE, **MIXTURE}[layout]
    wanted = scores_of(model_of(preset), [[*one.prompt.prompt_ids, *one.response_ids] for one in samples()])
    assert wanted.std() > 0.1
    found, of_first = {}, {}
    for every, first, none in run_ranks(ranks, score, config_of(folder, preset, *overrides)):
        found |= every
        of_first |= first
        assert none == {}
    keys = [(one.prompt.uid, one.sample_index) for one in samples()]
    given = torch.tensor([found[key].value for key in keys])
    torch.testing.assert_close(given, wanted, rtol=0, atol=SCORE)
    for key, outcome in of_first.items():
        assert math.isclose(outcome.value, found[key].value, abs_tol=SCORE)


TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"


def rollout_of(tokenizer, question, response, uid=0, end=True):
    text = question if isinstance(question, str) else "".join(turn["content"] for turn in question)
    ids = [*tokenizer.encode(response), *(tokenizer.eos_ids[:1] if end else ())]
    prompt = Prompt(uid, tuple(tokenizer.encode(text)), text, None, {}, "f:1", question=question)
    return Rollout(prompt, 0, ids, [0.0] * len(ids), "stop", 0)


@pytest.fixture(scope="module")
def stranger(folder):
    """A reward model with a byte-level tokenizer of its own and a chat template."""
    model = write_reward_model(
        folder / "stranger", "qwen2_tiny", characters="", vocab_size=320, max_position_embeddings=64, **LAYERS
    )
    byte_bpe_folder(folder / "stranger")
    (folder / "stranger" / "chat_template.jinja").write_text(TEMPLATE)
    return model


def score_texts(config):
    plan = build_run_plan(config)
    groups = parallel_state.initialize(plan.grid, seed=0)
    policy = Actor(plan.config, plan.arch, groups, torch.device("cpu"))
    scorer = RunRewardModel(plan, plan.reward, groups, torch.device("cpu"), policy)
    return scorer.score([rollout_of(plan.tokenizer, *one, uid) for uid, one in enumerate(TEXTS)])


CHAT = [{"role": "user", "content": "1+2"}]
TEXTS = [(CHAT, "3"), ("<4+5>", "9#"), (CHAT, ""), ("<1>", "1234"), (CHAT, "1357924680" * 40)]


def test_a_model_with_another_tokenizer_reads_the_text_anew(folder, stranger):
    found = run_ranks(1, score_texts, config_of(folder, "stranger"))[0]
    own = transformers.AutoTokenizer.from_pretrained(folder / "stranger")
    assert own.chat_template == TEMPLATE
    for uid, (question, response) in enumerate(TEXTS[:-1]):
        answer = response.replace("#", "")  # the actor's end token is no text
        if isinstance(question, str):
            ids = own(question + answer, add_special_tokens=False)["input_ids"]
        else:
            chat = [*question, {"role": "assistant", "content": answer}]
            ids = own(own.apply_chat_template(chat, tokenize=False), add_special_tokens=False)["input_ids"]
        (wanted,) = scores_of(stranger, [ids]).tolist()
        assert math.isclose(found[uid, 0].value, wanted, abs_tol=SCORE)
    assert "more than its 64 positions" in found[4, 0].error and math.isnan(found[4, 0].value)


def test_padding_at_the_end_is_not_read_as_in_transformers(folder, model_of):
    model_of("qwen2_tiny")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder / "qwen2_tiny")
    model.config.pad_token_id = 13
    model.save_pretrained(folder / "padded")
    tokenizer = CharTokenizer(CHARACTERS)
    tokenizer.save(folder / "padded")
    reader = resolve(config_of(folder, "padded"), 1).reward_encoder
    sequences = [rollout_of(tokenizer, "<1+2>", "3"), rollout_of(tokenizer, "<1+2>", "#3", end=False)]
    whole = [[*one.prompt.prompt_ids, *one.response_ids] for one in sequences]
    assert reader.pad_id == 13 and whole[0][-1] == 13
    read = [reader.encode(one) for one in sequences]
    assert [len(ids) - len(own) for ids, own in zip(whole, read, strict=True)] == [1, 0]
    with torch.no_grad():
        last = [model(input_ids=torch.tensor([ids])).logits for ids in whole]
        state = [model.score(model.model(input_ids=torch.tensor([ids])).last_hidden_state[0, -1]) for ids in read]
    torch.testing.assert_close(torch.cat(last)[:, 0], torch.stack(state)[:, 0], rtol=0, atol=SCORE)


@pytest.mark.parametrize(
    ("preset", "overrides", "message"),
    [
        ("two", [], "two has 2 labels .id2label in config.json., expected 1"),
        ("headless", [], "headless' lacks 1 tensors.*first 'score.weight'"),
        ("qwen2_tiny", ["reward.model.path=null", "reward.model.weight=2"], "reward.model.weight is set, but would"),
        ("qwen2_tiny", ["reward.model.weight=.nan"], "reward.model.weight=nan"),
        ("short", [], "reward.model.path=.*has positions for 8 tokens, fewer than the 16"),
        ("bare", [], "bare' contains no tokenizer.*reward.model.retokenize=false to use the actor's token ids"),
        ("small", ["reward.model.retokenize=false"], "has embeddings for 5 tokens, but the actor's tokenizer has 14"),
        ("qwen2_tiny", ["parallel.pipeline_model_parallel_size=3"], "does not divide"),
        ("mixture_moe", ["model.preset=qwen2_tiny"], "is an MoE model and the other is dense"),
        ("qwen2_tiny", ["reward.functions=[]", "reward.model.weight=0"], "every weight is 0"),
        ("nowhere", [], "reward.model.path: model folder '.*nowhere' does not exist"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(preset, overrides, message, folder, model_of):
    model_of("qwen2_tiny")
    makes = {
        "two": lambda: write_reward_model(folder / "two", labels=2, **LAYERS),
        "short": lambda: write_reward_model(folder / "short", max_position_embeddings=8, **LAYERS),
        "bare": lambda: write_reward_model(folder / "bare", characters="", vocab_size=14, **LAYERS),
        "small": lambda: write_reward_model(folder / "small", characters="01234", **LAYERS),
        "mixture_moe": lambda: write_reward_model(folder / "mixture_moe", "qwen2_moe_tiny", **LAYERS),
        "headless": lambda: headless(folder / "headless"),
    }
    if preset in makes:
        makes[preset]()
    with pytest.raises(UserError, match=message):
        check_run(config_of(folder, preset, *overrides), 3 if "=3" in "".join(overrides) else 1)


def headless(folder):
    model = write_reward_model(folder, **LAYERS)
    transformers.AutoModelForCausalLM.from_config(model.config).save_pretrained(folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | {"id2label": {"0": "LABEL_0"}}))
