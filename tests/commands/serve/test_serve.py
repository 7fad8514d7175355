"""`mrl serve`, asked by OpenAI's own client; what it answers is held against transformers."""

import asyncio
import os

import httpx
import openai
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from mrl.commands.serve.batching import ROUND_TOKENS, RequestQueue, serve_rounds
from mrl.commands.serve.serve import INITIAL, resolve_model
from mrl.commands.serve.stream_state import Sampling, StreamedAnswer
from mrl.distributed import launch
from mrl.distributed.local_ranks import free_port
from mrl.megatron import parallel_state
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from tests.commands.serve.server import FIELDS, Server
from tests.data.folders import byte_bpe_folder
from tests.engines.native.tiny import make_checkpoint, reference
from tests.ranks import run_ranks

pytestmark = pytest.mark.slow

EXACT = 5e-4
"""Nats; both are fp32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = make_checkpoint(tmp_path_factory.mktemp("serve") / "tiny", vocab_size=320)
    byte_bpe_folder(folder)
    return folder


@pytest.fixture(scope="module")
def server(model):
    started = Server(model.parent, ["serve", str(model), *FIELDS, "--port", "0"])
    yield started
    assert started.stop() == 130, started.output
    assert "Traceback" not in started.output


@pytest.fixture(scope="module")
def client(server):
    return server.client()


def reference_answer(model, ids, count):
    """transformers' greedy tokens, and the log-probability of each."""
    judge, found, logprobs = reference(model), list(ids), []
    with torch.no_grad():
        for _ in range(count):
            row = judge(torch.tensor([found])).logits[0, -1].log_softmax(-1)
            found.append(int(row.argmax()))
            logprobs.append(float(row.max()))
    return found[len(ids) :], logprobs


def test_a_greedy_completion_is_transformers_own(client, model):
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer("what is two")["input_ids"]
    more = {"ignore_eos": True, "return_token_ids": True}
    for prompt in ("what is two", ids):
        found = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=40, temperature=0, logprobs=0, extra_body=more
        )
        (choice,) = found.choices
        wanted, logprobs = reference_answer(model, ids, 40)
        assert choice.token_ids == wanted and choice.prompt_token_ids == ids
        assert choice.logprobs.token_logprobs == pytest.approx(logprobs, abs=EXACT)
        assert choice.finish_reason == "length"
        assert found.usage.total_tokens == len(ids) + 40 == found.usage.prompt_tokens + found.usage.completion_tokens
        text = tokenizer.decode(wanted, skip_special_tokens=True)
        assert choice.text == text
        assert len(choice.logprobs.text_offset) == 40


def test_a_chat_is_its_template(client, model):
    messages = [{"role": "user", "content": "two plus two?"}]
    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    more = {"ignore_eos": True, "return_token_ids": True}
    found = client.chat.completions.create(
        model="tiny", messages=messages, temperature=0, max_completion_tokens=8, logprobs=True, extra_body=more
    )
    wanted, logprobs = reference_answer(model, ids, 8)
    assert found.choices[0].token_ids == wanted
    assert [one.logprob for one in found.choices[0].logprobs.content] == pytest.approx(logprobs, abs=EXACT)
    assert found.choices[0].message.role == "assistant"


@pytest.mark.parametrize("seed", [1, 2])
def test_a_stream_is_the_whole_in_pieces(client, seed):
    asked = {
        "model": "tiny", "messages": [{"role": "user", "content": "four"}], "seed": seed, "n": 2, "max_tokens": 90,
        "stop": ["q#"], "extra_body": {"ignore_eos": True},
    }  # fmt: skip
    whole = client.chat.completions.create(**asked)
    texts, reasons, usage, num_chunks = ["", ""], {}, None, 0
    for chunk in client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            num_chunks += 1
            texts[choice.index] += choice.delta.content
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
    assert texts == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1]
    assert reasons == {choice.index: choice.finish_reason for choice in whole.choices}
    assert usage == whole.usage
    assert num_chunks > 4  # not one chunk for each answer


def test_an_answer_is_the_same_alone_and_in_company(server, client):
    def asked(seed):
        length = 7 * seed % 50 + 1
        return {
            "model": "tiny", "prompt": "the answer" if seed % 2 else "is", "max_tokens": length, "seed": seed % 9,
            "temperature": 0.7 + 0.3 * (seed % 2), "extra_body": {"return_token_ids": True},
        }  # fmt: skip

    async def together():
        many = openai.AsyncOpenAI(base_url=server.url, api_key="none", max_retries=0)
        found = await asyncio.gather(*(many.completions.create(**asked(seed)) for seed in range(24)))
        await many.close()
        return [one.choices[0].token_ids for one in found]

    alone = [client.completions.create(**asked(seed)).choices[0].token_ids for seed in range(24)]
    assert asyncio.run(together()) == alone


def test_several_prompts_are_answered_in_their_order(client):
    found = client.completions.create(
        model="tiny", prompt=["two", "four", "is"], n=2, max_tokens=3, seed=5, extra_body={"return_token_ids": True}
    )
    alone = [
        client.completions.create(
            model="tiny", prompt=one, n=2, max_tokens=3, seed=5, extra_body={"return_token_ids": True}
        )
        for one in ("two", "four", "is")
    ]
    assert [c.token_ids for c in found.choices] == [c.token_ids for one in alone for c in one.choices]
    assert [choice.index for choice in found.choices] == list(range(6))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model": "other"}, "model 'other' is not served here; 'tiny' is"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"frequency_penalty": 0.5}, "frequency_penalty"),
        ({"max_tokens": 1000}, "together above the 160 of this server"),
        ({"prompt": [5, 999]}, "the prompt has token 999; the tokenizer's ids end at"),
        ({"prompt": ""}, "the prompt has no tokens"),
        ({"temperature": -1}, "temperature"),
        ({"extra_body": {"nonsense": 1}}, "nonsense"),
        ({"best_of": 3}, "best_of"),
        ({"stream_options": {"include_usage": True}}, "without stream=true"),
    ],
)
def test_what_cannot_be_done_is_refused_in_words(client, fields, words):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(**{"model": "tiny", "prompt": "is", "max_tokens": 4, **fields})
    assert words in refused.value.message


def test_a_broken_request_is_refused(server):
    for body, status in (("{", 400), ("[]", 400), ('{"model": "tiny"}', 400)):
        found = httpx.post(f"{server.url}/completions", content=body, headers={"content-type": "application/json"})
        assert found.status_code == status and found.json()["error"]["message"]
    assert httpx.get(f"{server.url}/nothing").json()["error"]["message"] == "Not Found"


def test_a_page_that_renamed_itself_is_turned_away(server):
    assert httpx.get(f"{server.url}/models", headers={"host": "evil.example"}).status_code == 400


def test_an_answer_that_nobody_waits_for_is_given_up(server, client):
    asked = {"model": "tiny", "prompt": "is", "max_tokens": 150, "n": 200, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**asked, stream=True) as stream:
        next(iter(stream))
    found = client.completions.create(model="tiny", prompt="is", max_tokens=1, temperature=0)
    assert found.choices[0].finish_reason in ("length", "stop")
    assert client.models.list().data[0].id == "tiny"


def test_a_run_is_served_by_its_folder_with_a_key(tmp_path):
    from tests.e2e import runs

    runs.train_in_pool(tmp_path, ["train.num_steps=1"], 1)
    started = Server(
        tmp_path, ["serve", str(tmp_path / "run"), "--host", "0.0.0.0", "--port", "0"], MRL_API_KEY="secret"
    )
    try:
        started.url = started.url.replace("0.0.0.0", "127.0.0.1")
        assert "step-00000001 as 'run'" in started.output
        with pytest.raises(openai.AuthenticationError):
            started.client().models.list()
        client = started.client("secret")
        assert client.completions.create(model="run", prompt="<1+2>", max_tokens=4, temperature=0).choices
        assert client.completions.create(model="run", prompt="<1+2>").choices  # 16 tokens where they fit
        with pytest.raises(openai.BadRequestError, match="has no chat template"):
            client.chat.completions.create(model="run", messages=[{"role": "user", "content": "1"}])
    finally:
        started.stop()


def _answers(model, fields, ports):
    """What the ranks answer to some prompts; on the ranks of `tests/ranks.py`."""
    parallel_state.destroy()  # what an earlier test of these ranks left
    launch.shutdown_distributed()
    os.environ["MASTER_PORT"] = str(ports[0])
    found = {}
    try:
        config, checkpoint = resolve_model(model, [*FIELDS, *fields], None)
        assert checkpoint == INITIAL
        with open_trainer(build_run_plan(config, resumes=False), log=False, trains=False) as trainer:
            trainer.weights.load_initial()
            trainer.sync_weights_if_stale()
            request_queue = None
            if trainer.groups.rank == 0:
                request_queue = RequestQueue(160, ROUND_TOKENS, 2, trainer.tokenizer.eos_ids)
                for number in range(5):
                    sampling = Sampling(40 + number, temperature=number % 2, seed=number, ignore_eos=True)
                    pieces = found.setdefault(number, [])
                    request_queue.submit([StreamedAnswer([5 + number, 7], sampling, 0, str, pieces.append)])
                request_queue.finish()
            with trainer.rollout_worker.awake() as engine:
                serve_rounds(engine, trainer.groups, request_queue)
    finally:
        os.environ["MASTER_PORT"] = str(ports[1])
        launch.init_distributed("cpu", num_threads=1)
    return {
        number: (pieces[-1].error, pieces[-1].status)
        if pieces[-1].error
        else [t for piece in pieces for t in piece.ids]
        for number, pieces in found.items()
    }


def test_ranks_answer_together(model):
    alone = run_ranks(1, _answers, str(model), [], [free_port(), free_port()])[0]
    assert [len(alone[number]) for number in range(5)] == [40, 41, 42, 43, 44]
    for fields in (["rollout.tensor_model_parallel_size=2"], []):
        found = run_ranks(2, _answers, str(model), fields, [free_port(), free_port()])
        assert found == [alone, {}]


def test_a_prompt_that_the_engine_fails_at_fails_alone(tmp_path):
    """The embedding of token 9, which begins the prompt of answer 4, is no number."""
    folder = make_checkpoint(tmp_path / "tiny", "qwen2_untied", vocab_size=320)
    byte_bpe_folder(folder)
    right = run_ranks(1, _answers, str(folder), [], [free_port(), free_port()])[0]
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][9] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    for num_ranks, fields in ((1, []), (2, ["rollout.tensor_model_parallel_size=2"]), (2, [])):
        found = run_ranks(num_ranks, _answers, str(folder), fields, [free_port(), free_port()])[0]
        assert "not finite" in found[4][0] and found[4][1] == 400
        unharmed = [number for number in range(4) if 9 not in right[number]]  # the others drew the token themselves
        assert len(unharmed) > 1 and all(found[number] == right[number] for number in unharmed)


def test_an_engine_that_can_generate_nothing_ends_the_server(tmp_path):
    folder = make_checkpoint(tmp_path / "tiny", vocab_size=320)
    byte_bpe_folder(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = torch.nan
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match="not finite"):
        run_ranks(1, _answers, str(folder), [], [free_port(), free_port()])


def test_others_are_not_let_in_without_a_key(capsys, model, monkeypatch):
    from mrl.commands import cli

    monkeypatch.delenv("MRL_API_KEY", raising=False)
    assert cli.main(["serve", str(model), "--host", "0.0.0.0"]) == 2
    assert "Set the environment variable MRL_API_KEY" in capsys.readouterr().err


def test_what_is_nothing_to_serve_is_said(capsys, tmp_path):
    from mrl.commands import cli

    assert cli.main(["serve", str(tmp_path)]) == 2
    assert "is neither a config file, nor a run folder" in capsys.readouterr().err
