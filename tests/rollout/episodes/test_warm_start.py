"""What a warm start imitates of a conversation is the ledger of an episode that goes like it, ids and mask."""

import json
import random

import pytest

from mrl.config.config import AgentConfig, DataConfig, MultiTurnConfig, RolloutConfig
from mrl.data.prompts import load_training
from mrl.data.sft_examples import SftEncoder
from mrl.data.synthetic_tasks import Calculating, Guessing
from mrl.data.tokenizer import CharTokenizer
from mrl.environments.base import Action
from mrl.environments.calculator import Calculator
from mrl.environments.formats import base as formats
from mrl.environments.guess import Guess
from mrl.rollout.episodes.rendering import ChatRendering, PlainRendering
from mrl.rollout.episodes.token_record import Ledger
from mrl.types import Prompt
from tests.rollout.episodes.templates import FORMATS, chat_tokenizer
from tests.source import ROOT

CHARACTERS = '0123456789+-*/<>{}_": ,.abcdefghijklmnopqrstuvwxyzW#'
ROLLOUT = RolloutConfig(
    response_length=200, multi_turn=MultiTurnConfig(enable=True), agent=AgentConfig(environment="calculator")
)


def encoded(tokenizer, row, tools=(), **data):
    """The prompt of a row, and what is imitated of it."""
    config = DataConfig(task="calculating", task_kwargs={}, response_key="response", **data)
    source = load_training(config, tokenizer, prompt_length=500, seed=0, tools=tools)
    source._rows.row = lambda index: row
    (prompt,) = source.next(1)
    return prompt, SftEncoder(tokenizer, config, ROLLOUT, tools).supervised(prompt)


def ledger(rendering, prompt, turns, answers):
    """Of an episode in which the policy says `turns`, and hears `answers` between them."""
    kept, said = Ledger(ROLLOUT.response_length), rendering._tokenizer
    for turn, answer in zip(turns, [*answers, None], strict=True):
        ids = [*said.encode(turn), said.eos_ids[0]]
        kept.append_sampled(ids)
        if answer is not None:
            kept.append_observed(rendering.observation_ids(ids, answer))
    return [*prompt.prompt_ids, *kept.ids], [False] * len(prompt.prompt_ids) + list(kept.sampled_mask)


def played(environment, seed, row):
    """The response's turns, and what the environment answers to each but the last."""
    environment.reset(seed, row)
    turns = [message["content"] for message in row["response"] if message["role"] == "assistant"]
    heard = []
    for turn in turns[:-1]:
        seen = environment.step(formats.parse_action(turn, formats.find_format("hermes"), [], 1))
        assert not seen.done
        heard.append(list(seen.messages))
    return turns, heard


def is_the_ledger(example, expected):
    ids, trained = expected
    return (
        example.prompt_ids + example.response_ids == ids
        and [False] * len(example.prompt_ids) + example.response_mask == trained
    )


def test_a_calculation_is_imitated_without_what_the_calculator_says():
    tokenizer, task = CharTokenizer(CHARACTERS), Calculating(calls_frac=0.7)
    lengths = set()
    for index in range(20):
        row = task.train_row(index)
        prompt, example = encoded(tokenizer, row)
        turns, heard = played(Calculator(), 0, row)
        assert is_the_ledger(example, ledger(PlainRendering(tokenizer), prompt, turns, heard))
        lengths.add(len(turns))
    assert lengths == {1, 2}


def test_a_game_is_imitated_without_its_answers():
    """The seed that the environment would need for the same number is looked for."""
    tokenizer, task, most = CharTokenizer(CHARACTERS), Guessing(low=1, high=3, num_guesses=3), 3
    found = 0
    for index in range(30):
        row = task.train_row(index)
        prompt, example = encoded(tokenizer, row)
        said = [message["content"] for message in row["response"] if message["role"] != "assistant"]
        for seed in range(20):
            number = random.Random(seed).randint(1, 3)
            guesses = [int(message["content"]) for message in row["response"] if message["role"] == "assistant"]
            if number in guesses[:-1] or ["higher" if guess < number else "lower" for guess in guesses[:-1]] != said:
                continue
            turns, heard = played(Guess(low=1, high=3, max_guesses=most), seed, row)
            assert is_the_ledger(example, ledger(PlainRendering(tokenizer), prompt, turns, heard))
            found += len(said) > 0
            break
    assert found > 5


@pytest.mark.parametrize("name", FORMATS)
def test_messages_are_imitated_in_the_prompt_that_offers_the_tools(name, tmp_path):
    tokenizer = chat_tokenizer(tmp_path, *FORMATS[name])
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
    turns = ["<tool_call>add</tool_call>", "the answer is four."]
    heard = [[{"role": "tool", "name": "add", "content": "four"}]]
    row = {
        "prompt": [{"role": "user", "content": "two plus two?"}],
        "answer": "four",
        "response": [{"role": "assistant", "content": turns[0]}, *heard[0], {"role": "assistant", "content": turns[1]}],
    }
    prompt, example = encoded(tokenizer, row, tools)
    assert isinstance(prompt, Prompt) and isinstance(prompt.question, list)
    assert is_the_ledger(example, ledger(ChatRendering(tokenizer, tools), prompt, turns, heard))
    _, last = encoded(tokenizer, row, tools, train_on_turns="last")
    assert last.prompt_ids + last.response_ids == example.prompt_ids + example.response_ids
    assert tokenizer.decode(last.response_ids).startswith(turns[1])


def test_the_row_of_the_docs_is_imitated_so():
    docs = (ROOT / "mrl" / "docs" / "episodes.md").read_text(encoding="utf-8")
    row = json.loads(docs.split("<!-- imitated -->\n```json\n")[1].split("\n```")[0])
    tokenizer = CharTokenizer(CHARACTERS)
    prompt, example = encoded(tokenizer, row)
    turns, heard = played(Calculator(), 0, row)
    assert is_the_ledger(example, ledger(PlainRendering(tokenizer), prompt, turns, heard))


def test_an_action_is_read_from_what_is_imitated():
    (call, *_) = Calculating(calls_frac=1.0).train_row(0)["response"]
    action = formats.parse_action(call["content"], formats.find_format("hermes"), [], 1)
    assert isinstance(action, Action) and action.tool_calls[0].name == "calculator"
