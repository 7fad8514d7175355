"""Which prompts every engine refuses, and what it says; that each engine asks is in its own tests."""

import pytest

from mrl.config.config import RolloutConfig
from mrl.engines._prompt_checks import check_prompts
from mrl.engines.base import SamplingConfig
from mrl.errors import UserError
from mrl.types import Prompt
from tests.engines.specs import spec_of
from tests.resharding.archs import ODD_VOCAB, small

ONE_PASS = {"enable_chunked_prefill": False}
CASES = {
    "most": ((1,) * 12, {}, {}, None),
    "empty": ((), {}, {}, "has no tokens."),
    "with its response": (
        (1,) * 13,
        {},
        {},
        "has 13 tokens; with a response of 8 it exceeds the engine's limit of 20. Raise",
    ),
    "longer than built for": ((1,) * 9, {}, {"longest": 8}, "has 9 tokens; the engine's limit is 8. Raise"),
    "as long as built for": ((1,) * 8, {}, {"longest": 8}, None),
    "in parts": ((1,) * 11, {}, {}, None),
    "in one pass": ((1,) * 11, ONE_PASS, {}, "max_num_batched_tokens=10, and chunked prefill is off. Raise it, or set"),
    "never in parts": (
        (1,) * 11,
        {},
        {"chunked_prefill": False},
        "chunked prefill is off. Raise it, or shorten the prompt.",
    ),
    "last token": ((0, ODD_VOCAB - 1), {}, {}, None),
    "behind the last": ((0, ODD_VOCAB), {}, {}, f"token id outside the model's vocabulary of {ODD_VOCAB}"),
    "negative": ((-1, 1), {}, {}, "token id outside the model's vocabulary"),
}


@pytest.mark.parametrize(("ids", "config", "engine", "message"), CASES.values(), ids=CASES)
@pytest.mark.parametrize(("source", "name"), [("train.jsonl:3", "prompt train.jsonl:3 "), ("", "prompt 7 ")])
def test_a_prompt_that_cannot_be_answered_is_named(ids, config, engine, message, source, name):
    rollout = RolloutConfig(prompt_length=12, response_length=8, max_num_batched_tokens=10, **config)
    prompts = [Prompt(uid=6, prompt_ids=(1, 2), text=""), Prompt(uid=7, prompt_ids=ids, text="", source=source)]
    given = prompts, spec_of(rollout, small("qwen2_tiny")), SamplingConfig(n=1, max_tokens=8)
    if message is None:
        check_prompts(*given, **engine)
        return
    with pytest.raises(UserError) as caught:
        check_prompts(*given, **engine)
    assert str(caught.value).startswith(name) and message in str(caught.value)
