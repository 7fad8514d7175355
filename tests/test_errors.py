"""What a message quotes cannot steer a terminal."""

import re
import unicodedata

from hypothesis import given
from hypothesis import strategies as st

from mrl.commands.doctor.versions import ranges
from mrl.errors import UserError, printable
from tests.source import ROOT

CONTROLS = {"Cc", "Cf", "Cs", "Zl", "Zp"}  # control, format (bidi overrides), half surrogate pairs, line separators


@given(st.text(st.characters(exclude_categories=[])))  # half surrogate pairs too: a path or a YAML escape may hold them
def test_a_message_holds_no_control_characters_and_can_be_written(text):
    message = str(UserError(text))
    assert not {c for c in message if c not in "\n\t" and unicodedata.category(c) in CONTROLS}
    message.encode("utf-8")


@given(st.text(st.characters(codec="utf-8", exclude_categories=["C", "Z"], include_characters=" \n\t")))
def test_what_can_be_printed_stays_as_it_is(text):
    assert printable(text) == text


def test_an_escape_sequence_is_shown_in_words():
    assert str(UserError("name \x1b[31mred\x07\r")) == r"name \x1b[31mred\x07\r"


def test_messages_name_extras_that_setup_has():
    """By the command that a checkout understands: mrl is on no index, so that `pip install mrl[...]` finds nothing."""
    sources = "\n".join(path.read_text() for path in (ROOT / "mrl").rglob("*.py"))
    asked = set(re.findall(r"""to_install\(['"]([a-z0-9-]+)""", sources))
    assert "vllm" in asked and asked <= set(ranges(ROOT).extras)
    assert re.findall(r"""pip install ['"]?mrl\[""", sources) == []
