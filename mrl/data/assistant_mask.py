"""Where the assistant speaks in a conversation, in tokens.

Owns the search by rendering: the whole conversation gives the ids, and its beginnings say where each turn lies in them.
It knows no row and no config; what is trained of the turns is `sft_examples.py`'s.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mrl.data.tokenizer import Tokenizer
from mrl.errors import UserError

Message = Mapping[str, Any]

ANY_TURN = "mrl-any-turn"
"""Content of an assistant's message that is looked for in a rendering, to see what the template writes around it."""

ADVICE = (
    "Give a template that renders what was said before in the same way whatever comes after "
    "(data.chat_template=FILE), or set data.train_on_turns=last."
)

_END_ADVICE = (
    "If the template's token is to end a response, add its id to eos_token_id in generation_config.json of the model "
    "folder; else give a template that writes an end token after each turn (data.chat_template=FILE)."
)

_SHOWN_TOKENS = 4


class Conversation(NamedTuple):
    """A rendered conversation.

    Attributes:
        ids: Of all of it, as the chat template renders it once.
        turns: Token span [first, end) of each requested turn of the assistant, in order: what a model would sample
            there, up to and with the first end token.
    """

    ids: list[int]
    turns: list[tuple[int, int]]


def rendered(
    messages: Sequence[Message], tokenizer: Tokenizer, *, first: int = 0, tools: Sequence[Mapping[str, Any]] = ()
) -> Conversation:
    """Renders a conversation, and finds the assistant's turns in it.

    A turn begins where the conversation before it, rendered up to where the assistant begins to answer, ends; and it
    ends where the conversation with it ends, so both must be beginnings of the whole. A token that stands for
    characters on both sides of such a place belongs to the turn, as in transformers' `return_assistant_tokens_mask`.

    Args:
        messages: Up to and with one of the assistant's, and not beginning with one.
        tokenizer: Has the chat template.
        first: Index of the first message whose turn is wanted.
        tools: Schemas that the template offers.

    Raises:
        UserError: There is no chat template, or it refuses the messages, is not append-only, or writes no end token in
            a turn.
    """
    rendered_text = tokenizer.render_chat(messages, begins_answer=False, tools=tools)
    whole = rendered_text.text
    ids, places = tokenizer.encode_with_places(rendered_text)
    begins, ends = [begin for begin, _ in places], [end for _, end in places]
    turns = []
    for index in range(first, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        start = _length(messages[:index], tokenizer, tools, whole, begins_answer=True)
        stop = len(whole)
        if index + 1 < len(messages):
            stop = _length(messages[: index + 1], tokenizer, tools, whole, begins_answer=False)
        token, end = bisect_right(ends, start), bisect_left(begins, stop)
        over = next((place for place in range(token, end) if ids[place] in tokenizer.eos_ids), None)
        if over is None:
            written = tokenizer.decode(ids[max(token, end - _SHOWN_TOKENS) : end])
            raise UserError(
                f"{_no_end_token(tokenizer, written)} A model that is trained on such turns never learns to stop. "
                f"{_END_ADVICE}"
            )
        turns.append((token, over + 1))
    return Conversation(ids, turns)


def end_token_warning(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """Returns a warning where the chat template ends the assistant's turns without an end token; None: it does not.

    Args:
        tokenizer: Has the chat template.
        tools: Schemas that the template offers.
    """
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANY_TURN}]
    try:
        text = tokenizer.render_chat(turn, begins_answer=False, tools=tools).text
    except UserError:  # a template that refuses this conversation is judged by those of the data
        return None
    _, found, after = text.rpartition(ANY_TURN)
    if not found or any(token in tokenizer.eos_ids for token in tokenizer.encode(after)):
        return None
    return (
        f"{_no_end_token(tokenizer, after)} Samples that end their turn as the template does go on until "
        f"rollout.response_length. {_END_ADVICE}"
    )


def _no_end_token(tokenizer: Tokenizer, written: str) -> str:
    ends = ", ".join(f"{tokenizer.decode([token])!r} ({token})" for token in tokenizer.eos_ids)
    return (
        f"the chat template of '{tokenizer.name}' ends an assistant's turn with {written!r}, which holds no end token "
        f"of the model ({ends})."
    )


def _length(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    whole: str,
    *,
    begins_answer: bool,
) -> int:
    """Characters of a beginning of the conversation."""
    part = tokenizer.render_chat(messages, begins_answer=begins_answer, tools=tools).text
    if not whole.startswith(part):
        at = next((index for index, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), len(whole))
        near = slice(max(0, at - 20), at + 20)
        raise UserError(
            f"the chat template of '{tokenizer.name}' is not append-only: it renders the first {len(messages)} "
            f"messages as ...{part[near]!r}, but as ...{whole[near]!r} with those after them, so that what the "
            f"assistant said cannot be told apart. {ADVICE}"
        )
    return len(part)
