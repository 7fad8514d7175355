"""An answer that is told in pieces is the answer, wherever it was cut."""

from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.commands.serve.stream_state import REPLACEMENT_CHAR, Sampling, StreamedAnswer

ALPHABET = ["a", "b", "ab", "#", b"\xc3", b"\xa9", "é"]
"""Tokens; two of them are the halves of a character."""


def decode(ids):
    return b"".join(ALPHABET[i] if isinstance(ALPHABET[i], bytes) else ALPHABET[i].encode() for i in ids).decode(
        "utf-8", errors="replace"
    )


def told(parts, *, ended=False, **sampling):
    """The pieces of an answer that gets these parts, and whether each was its last."""
    pieces = []
    answer = StreamedAnswer([1], Sampling(**{"max_tokens": 1000, **sampling}), 0, decode, pieces.append)
    for number, part in enumerate(parts):
        is_last = ended and number == len(parts) - 1
        if answer.add_tokens(part, [-float(token) for token in part], ended=is_last):
            break
    return pieces


tokens = st.lists(st.integers(0, len(ALPHABET) - 1), min_size=1, max_size=24)


@st.composite
def cut(draw):
    """Tokens, and a cut of them into parts."""
    ids = draw(tokens)
    at = sorted(draw(st.sets(st.integers(1, len(ids) - 1)))) if len(ids) > 1 else []
    return ids, [ids[a:b] for a, b in zip([0, *at], [*at, len(ids)], strict=True)]


@settings(max_examples=300, deadline=None)
@given(cut(), st.lists(st.sampled_from(["aa", "b#", "é", "aba", "##", "b"]), max_size=2), st.integers(1, 30))
def test_pieces_join_to_the_whole(case, stop, max_tokens):
    ids, parts = case
    how = {"stop": tuple(stop), "max_tokens": max_tokens, "ended": True}
    whole = told([ids], **how)
    pieces = told(parts, **how)
    assert len(whole) == 1 and pieces[-1].finish_reason == whole[0].finish_reason is not None
    assert "".join(piece.text for piece in pieces) == whole[0].text
    assert tuple(token for piece in pieces for token in piece.ids) == whole[0].ids
    assert tuple(value for piece in pieces for value in piece.logprobs) == whole[0].logprobs
    assert not any(word in whole[0].text for word in stop)
    assert all(REPLACEMENT_CHAR not in piece.text for piece in pieces[:-1] if REPLACEMENT_CHAR not in whole[0].text)


def test_what_may_become_a_stop_string_is_held_back():
    pieces = told([[0], [1], [0], [3]], stop=("aba",))
    assert [piece.text for piece in pieces] == ["", "", ""]
    assert pieces[-1].finish_reason == "stop" and pieces[-1].ids == (0,)
    pieces = told([[0], [1], [3]], stop=("aba",))
    assert [piece.text for piece in pieces] == ["", "", "ab#"] and pieces[-1].finish_reason is None


def test_tokens_behind_a_stop_string_are_dropped():
    (piece,) = told([[0, 3, 1, 1]], stop=("#",))
    assert piece.text == "a" and piece.ids == (0, 3) and piece.logprobs == (0.0, -3.0)


def test_an_answer_ends_at_its_length_whatever_came_behind():
    (piece,) = told([[0, 1, 2, 3]], max_tokens=2, ended=True)
    assert (piece.text, piece.ids, piece.finish_reason) == ("ab", (0, 1), "length")
    (piece,) = told([[0, 1]], max_tokens=2, ended=True)
    assert piece.finish_reason == "stop"


def test_parts_have_random_numbers_of_their_own_by_seed_and_index():
    def uids(seed, index):
        answer = StreamedAnswer([1], Sampling(9, seed=seed), index, decode, print)
        return [answer.next_uid() for _ in range(3)]

    assert uids(1, 0) == uids(1, 0)
    assert len({*uids(1, 0), *uids(1, 1), *uids(2, 0)}) == 9
