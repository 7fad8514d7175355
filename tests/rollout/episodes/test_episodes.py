"""Episodes with environments in their workers: what is said, what is recorded, why they end."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from mrl.config.config import AgentConfig, MultiTurnConfig, RolloutConfig
from mrl.data.tokenizer import CharTokenizer
from mrl.engines._multiturn_base import FinishedTurn
from mrl.engines.base import SamplingConfig
from mrl.errors import UserError
from mrl.rollout.episodes.episode_state import cut
from mrl.rollout.episodes.episodes import Episodes, check_environment
from mrl.types import Prompt, Rollout
from tests.engines.native.tiny import make_checkpoint, make_engine
from tests.ranks import run_ranks
from tests.rollout.episodes.templates import FORMATS, QWEN3, chat_tokenizer

ADDER = f"{Path(__file__).parent}/worlds.py:Adder"
CALLS = {
    "hermes": ('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>', "hermes"),
    "qwen": ('<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>', "hermes"),
    "llama": ('{"name": "add", "parameters": {"a": 2, "b": 2}}', "llama3_json"),
}
"""By template: a call, and the name of its format."""
LIMIT = 4000


class Speaker:
    """In the engine's place: says given texts, and ends each turn as `ends` has it."""

    def __init__(self, tokenizer, texts, limit=LIMIT):
        self.tokenizer, self.texts, self.limit, self.prompts = tokenizer, texts, limit, []

    def generate_multi_turn(self, prompts, sampling, talk):
        self.prompts = prompts
        keys = [(place, sample) for place in range(len(prompts)) for sample in range(sampling.n)]
        said, masks, going = {key: [] for key in keys}, {key: [] for key in keys}, list(keys)
        for text in self.texts:
            for key in going:
                ids = [*self.tokenizer.encode(text), self.tokenizer.eos_ids[0]][: self.limit - len(said[key])]
                said[key] += ids
                masks[key] += [True] * len(ids)
                cut_off = "length" if ids[-1] not in self.tokenizer.eos_ids else "stop"
                talk.submit(FinishedTurn(*key, tuple(ids), cut_off))
            answers = talk.wait_for_replies(going)
            for key, answer in zip(going, answers, strict=True):
                said[key] += answer or []
                masks[key] += [False] * len(answer or [])
            going = [key for key, answer in zip(going, answers, strict=True) if answer is not None]
        return [
            Rollout(prompts[key[0]], key[1], said[key], [0.0] * len(said[key]), "stop", 0, sampled_mask=masks[key])
            for key in keys
        ]


def config_of(turns=None, **agent):
    given = {"environment": ADDER, "num_workers": 1, "memory_limit_mb": 1024, **agent}
    return RolloutConfig(
        prompt_length=3000, multi_turn=MultiTurnConfig(enable=True, **(turns or {})), agent=AgentConfig(**given)
    )


@cache
def tools_of(tokenizer):
    return check_environment(config_of(), tokenizer)


def held(tokenizer, config, texts, *, n=1, limit=LIMIT, prompts=1):
    """Rollouts of a speaker, and it."""
    tools = tools_of(tokenizer)
    question = [{"role": "user", "content": "two plus two?"}]
    ids = tuple(tokenizer.apply_chat_template(question, tools))
    asked = [Prompt(uid, ids, "", source=f"rows:{uid}", question=question) for uid in range(prompts)]
    speaker = Speaker(tokenizer, texts, limit)
    episodes = Episodes(config, tokenizer, tools, None, abort_requested=lambda: False)
    try:
        return episodes.run(speaker, asked, SamplingConfig(n=n, max_tokens=limit, seed=3)), speaker
    finally:
        episodes.close()


@pytest.fixture(scope="module", params=FORMATS)
def spoken(request, tmp_path_factory):
    """A tokenizer, a call in its format and the format's name."""
    tokenizer = chat_tokenizer(tmp_path_factory.mktemp(request.param), *FORMATS[request.param])
    return tokenizer, *CALLS[request.param]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return chat_tokenizer(tmp_path_factory.mktemp("hermes"), *FORMATS["hermes"])


def test_a_tool_is_called_and_the_tokens_are_those_of_the_whole_conversation(spoken):
    tokenizer, call, form = spoken
    config = config_of({"format": form, "max_tool_response_length": 4, "tool_response_truncate_side": "left"})
    (rollout, other), _ = held(tokenizer, config, [call, "it is 4"], n=2)
    tools = tools_of(tokenizer)
    messages = [
        *rollout.prompt.question,
        {"role": "assistant", "content": call},
        {"role": "tool", "name": "add", "content": "4..." + "...(truncated)"},
    ]
    expected = [*tokenizer.apply_chat_template(messages, tools), *tokenizer.encode("it is 4"), tokenizer.eos_ids[0]]
    assert [*rollout.prompt.prompt_ids, *rollout.response_ids] == expected
    assert [part.sampled for part in rollout.segments] == [True, False, True]
    episode = rollout.episode
    assert (episode.end, episode.num_turns, episode.num_tool_calls, episode.reward) == ("finished", 2, 1, 1.0)
    assert (episode.final_text, episode.error) == ("it is 4", None)
    assert [by for by, _ in episode.turns] == ["policy", "environment", "policy"]
    assert other.episode == episode  # the samples of a prompt have one seed


def test_a_thought_that_the_template_opened_makes_no_calls(tokenizer, tmp_path):
    template, end = FORMATS["hermes"]
    opening = "<|im_start|>assistant\\n' }}{%- endif"
    tools, tokenizer = (
        tools_of(tokenizer),
        chat_tokenizer(tmp_path, template.replace(opening, "<|im_start|>assistant\\n<think>\\n' }}{%- endif"), end),
    )
    assert tokenizer.render_chat([{"role": "user", "content": "?"}], add_generation_prompt=True).text.endswith(
        "<think>\n"
    )
    call = CALLS["hermes"][0]
    texts = [f"I could {call}.</think>{call}", f"and {call}</think>4"]
    config = config_of({"tokenization_sanity_check_mode": "disable"})
    question = [{"role": "user", "content": "two plus two?"}]
    prompt = Prompt(0, tuple(tokenizer.apply_chat_template(question)), "", question=question)
    episodes = Episodes(config, tokenizer, tools, None, abort_requested=lambda: False)
    try:
        (found,) = episodes.run(Speaker(tokenizer, texts), [prompt], SamplingConfig(n=1, max_tokens=LIMIT, seed=3))
    finally:
        episodes.close()
    assert (found.episode.end, found.episode.num_turns, found.episode.num_tool_calls) == ("finished", 2, 1)


@pytest.mark.parametrize(
    ("turns", "texts", "end", "num_turns"),
    [
        ({"max_assistant_turns": 2}, ["{call}"] * 5, "max_assistant_turns", 2),
        ({"max_user_turns": 1}, ["{call}"] * 5, "max_user_turns", 2),
        ({"max_user_turns": 3}, ["{call}", "4"], "finished", 2),
    ],
    ids=str,
)
def test_turns_are_limited(tokenizer, turns, texts, end, num_turns):
    call = CALLS["hermes"][0]
    ((rollout,), _) = held(tokenizer, config_of(turns), [text.format(call=call) for text in texts])
    assert (rollout.episode.end, rollout.episode.num_turns) == (end, num_turns)
    assert rollout.segments[-1].sampled


def test_the_last_turn_is_rewarded(tokenizer):
    ((rollout,), _) = held(tokenizer, config_of({"max_assistant_turns": 1}), ["4"])
    assert (rollout.episode.end, rollout.episode.reward) == ("finished", 1.0)


def test_parallel_calls_are_limited_and_the_policy_is_told(tokenizer):
    call = CALLS["hermes"][0]
    ((one,), _) = held(tokenizer, config_of(), [call + call, "4"])
    ((two,), _) = held(tokenizer, config_of({"max_parallel_calls": 2}), [call + call, "4"])
    assert (one.episode.num_tool_calls, one.episode.num_failed_calls) == (1, 1)
    assert (two.episode.num_tool_calls, two.episode.num_failed_calls) == (2, 0)
    assert "at most 1 in one message" in one.episode.turns[1][1]


@pytest.mark.parametrize("limit", [20, 45, 70, 100])
def test_room_ends_an_episode(tokenizer, limit):
    """Within a turn, or where what is observed leaves none."""
    ((rollout,), _) = held(tokenizer, config_of(), [CALLS["hermes"][0], "4", "4"], limit=limit)
    assert len(rollout.response_ids) <= limit
    assert rollout.segments[-1].sampled
    assert (rollout.episode.end, rollout.finish_reason) == ("response_length", "length")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rest", "end", "why"),
    [
        ("hangs", "environment_timeout", "longer than its limit of 1 s"),
        ("dies", "environment_failed", "its worker process died"),
        ("raises", "environment_failed", "no more numbers"),
        ("silent", "environment_failed", "returned no message and did not end the episode"),
        ("takes", "environment_failed", "may take 400 MiB"),
    ],
)
def test_a_failed_environment_fails_its_sample_alone_and_is_named(tokenizer, rest, end, why):
    config = config_of(environment_kwargs={"rest": rest}, time_limit_s=1.0, memory_limit_mb=400)
    texts = [CALLS["hermes"][0], "one", "4"] if rest in {"hangs", "dies"} else ["4"]
    found, _ = held(tokenizer, config, texts, prompts=2)
    for rollout in found:
        assert rollout.episode.end == end
        assert why in rollout.episode.error
        if rest != "silent":
            assert f"rows:{rollout.prompt.uid} (uid {rollout.prompt.uid}, sample 0)" in rollout.episode.error


def test_what_reset_says_joins_the_prompt(tokenizer):
    ((rollout,), _) = held(tokenizer, config_of(environment_kwargs={"says": "think"}), ["4"])
    tools = tools_of(tokenizer)
    messages = [*rollout.prompt.question, {"role": "user", "content": "think"}]
    assert list(rollout.prompt.prompt_ids) == tokenizer.apply_chat_template(messages, tools)
    config = replace(config_of(environment_kwargs={"says": "think"}), prompt_length=8)
    with pytest.raises(UserError, match="more than rollout.prompt_length=8"):
        held(tokenizer, config, ["4"])


def test_a_template_that_does_not_append_is_refused_unless_that_is_asked_for(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, QWEN3)
    with pytest.raises(UserError, match="is not append-only"):
        check_environment(config_of(), tokenizer)
    check_environment(config_of({"tokenization_sanity_check_mode": "disable"}), tokenizer)


def test_an_environment_that_cannot_be_is_refused(tokenizer):
    with pytest.raises(UserError, match="there is no 'nowhere'|no 'nowhere'|nowhere"):
        check_environment(config_of(environment="nowhere"), tokenizer)
    with pytest.raises(UserError, match="cannot be made"):
        check_environment(config_of(environment_kwargs={"wrong": 1}), tokenizer)


@pytest.mark.parametrize(
    ("side", "expected"),
    [
        ("left", "abcd...(truncated)"),
        ("right", "(truncated)...ghij"),
        ("middle", "ab...(truncated)...ij"),
    ],
)
def test_long_answers_are_cut_as_verl_cuts_them(side, expected):
    limits = MultiTurnConfig(tool_response_truncate_side=side)
    assert cut("abcdefghij", 4, limits) == expected
    assert cut("abcd", 4, limits) == "abcd"


# in the native engine -----------------------------------------------------------------------------------------------


def guesses(folder, group=None):
    """Episodes of a random model with the guessing game, every token a digit or a letter of its answers."""
    tokenizer = CharTokenizer("".join(dict.fromkeys("0123456789higherlowWtanumb. <>-#")))
    config = config_of(environment="guess", environment_kwargs={"low": 1, "high": 9, "max_guesses": 8})
    engine = make_engine(folder, tp_group=group, decode=tokenizer.decode, prompt_length=8, response_length=200)
    prompts = [
        Prompt(uid, tuple(tokenizer.encode("<1-9>")), "", question="<1-9>", row={"prompt": "x"}) for uid in range(3)
    ]
    episodes = Episodes(config, tokenizer, [], group, abort_requested=lambda: False)
    ends = (*tokenizer.eos_ids, *range(10))  # short turns
    try:
        found = episodes.run(
            engine, prompts, SamplingConfig(n=2, max_tokens=200, stop_token_ids=ends, temperature=1.5, seed=1)
        )
    finally:
        episodes.close()
    return [(r.response_ids, r.rollout_logprobs, r.sampled_mask, r.episode) for r in found]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("chars"), "qwen2", vocab_size=31, max_position_embeddings=512)


def _on_a_rank(folder):
    return guesses(folder, torch.distributed.group.WORLD)


def test_one_rank_of_two_speaks_and_both_hear_the_same(folder):
    alone = guesses(folder)
    assert max(episode.num_turns for *_, episode in alone) >= 4
    assert {episode.end for *_, episode in alone} <= {"finished", "response_length"}
    first, second = run_ranks(2, _on_a_rank, folder)
    assert [one[:3] for one in first] == [one[:3] for one in second]
    assert [one[0] for one in first] == [one[0] for one in alone]
    assert [json.dumps(one[3].turns) for one in first] == [json.dumps(one[3].turns) for one in alone]
    assert [one[3] for one in second] == [None] * len(second)
