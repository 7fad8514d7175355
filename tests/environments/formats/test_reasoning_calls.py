"""A call inside the reasoning of any model family is not made, and one after it is."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.environments.formats import base
from tests.environments.formats.test_formats import FORMATS, IDEA, REAL, TOOLS, filled, written
from tests.reasoning_families import CLOSED_BY_ANY_TURN, FAMILIES

prose = st.lists(st.sampled_from(["{idea}", "{tag}", "text ", "\n", "'", "`", "<b>", "[x] ", "< 3 "]), max_size=5)
every_family = pytest.mark.parametrize("family", FAMILIES)
every_format = pytest.mark.parametrize("form", FORMATS)


def read(form, text, prompt=""):
    found = base.parse_action(filled(form, text), base.find_format(form), TOOLS, 100, prompt=prompt)
    return found.tool_calls, found.errors


@given(prose.map("".join))
@settings(max_examples=15, deadline=None)
@every_family
@every_format
def test_only_calls_after_the_reasoning_are_made(form, family, inside):
    opening, closing = FAMILIES[family]
    inside = f"{inside} {{idea}} "
    assert read(form, f"{opening}{inside}{closing}{{real}}") == ((REAL,), ())
    assert read(form, f"{opening}{inside}{closing}It is 5.") == ((), ())
    assert read(form, f"{opening}{inside}") == ((), ())  # cut off
    assert read(form, f"{inside}{closing}{{real}}", prompt=f"Q{opening}") == ((REAL,), ())
    assert read(form, inside, prompt=f"Q{opening}") == ((), ())


@every_family
@every_format
def test_a_call_before_the_reasoning_is_made(form, family):
    opening, closing = FAMILIES[family]
    assert read(form, f"{{real}}{opening}{{idea}}{closing}") == ((REAL,), ())
    assert read(form, "{real}", prompt=f"{opening}{closing}") == ((REAL,), ())


@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in CLOSED_BY_ANY_TURN])
@every_format
def test_a_closing_tag_alone_ends_reasoning(form, family):
    _, closing = FAMILIES[family]
    assert read(form, f"I could {{idea}}, or {{tag}}. {closing}{{real}}") == ((REAL,), ())


@every_family
@every_format
def test_an_argument_may_hold_a_tag(form, family):
    for tag in map(str.strip, FAMILIES[family]):
        call = base.ToolCall("f", {"text": f"a {tag} b"})
        assert read(form, written(form, call) + "{real}") == ((call, REAL), ())


@every_family
@every_format
def test_a_quoted_tag_is_a_mention(form, family):
    if family in CLOSED_BY_ANY_TURN:
        return
    opening, closing = map(str.strip, FAMILIES[family])
    assert read(form, f"I write `{opening}` first and '{closing}' last. {{real}}") == ((REAL,), ())


@every_format
def test_the_answer_channel_may_begin_with_a_call_that_cannot_be_read(form):
    _, errors = read(form, "<|channel|>final<|message|>{tag}")
    assert len(errors) == 1


def test_the_prompt_is_read_where_its_tokens_are_characters():
    opening = "<|channel|>commentary to=functions.lookup <|message|>"
    ids = [ord(one) for one in "x" * 1000 + opening]
    prompt = base.prompt_tail(ids, lambda some: "".join(map(chr, some)))
    assert len(prompt) < 1000 and read("hermes", "{idea}", prompt=prompt) == ((), ())
    assert IDEA not in read("hermes", "{idea}<|end|>{real}", prompt=prompt)[0]
