"""Token spans of the assistant's turns in a rendered conversation.

The complete conversation is rendered for its token ids, and each prefix of it is rendered for the boundaries of the
turns. Which turns are trained is decided in `sft_examples.py`.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from mrl.data.tokenizer import Tokenizer
from mrl.errors import UserError

Message = Mapping[str, Any]

ANY_TURN = "mrl-any-turn"
"""Placeholder content of an assistant message, rendered to see what the template writes around a message."""

ADVICE = (
    "Give a template that renders a message the same way regardless of later messages (data.chat_template=FILE), or "
    "set data.train_on_turns=last."
)

_END_ADVICE = (
    "If the template's token ends a response, add its id to eos_token_id in generation_config.json of the model "
    "folder. Otherwise give a template that writes an end token after each turn (data.chat_template=FILE)."
)

_SHOWN_TOKENS = 4


class RenderedConversation(NamedTuple):
    """Token ids of a conversation, with the assistant's turns.

    Attributes:
        ids: Token ids of the complete rendering.
        turns: Token span [first, end) of each requested assistant turn, in order. A span contains what the model would
            sample, up to and including the first end token.
    """

    ids: list[int]
    turns: list[tuple[int, int]]


def render_with_turns(
    messages: Sequence[Message], tokenizer: Tokenizer, *, first: int = 0, tools: Sequence[Mapping[str, Any]] = ()
) -> RenderedConversation:
    """Renders a conversation, and finds the token spans of the assistant's turns.

    A turn starts at the end of the previous messages rendered with a generation prompt, and ends at the end of the
    messages including it. Both renderings must be prefixes of the complete rendering. A token that crosses such a
    boundary belongs to the turn, as in transformers' `return_assistant_tokens_mask`.

    Args:
        messages: Chat messages; the last is the assistant's, the first is not.
        tokenizer: Tokenizer with a chat template.
        first: Index of the first message whose turn is returned.
        tools: Function schemas that the template includes.

    Raises:
        UserError: There is no chat template, or the template rejects the messages, is not append-only, or writes a turn
            without an end token.
    """
    rendering = tokenizer.render_chat(messages, add_generation_prompt=False, tools=tools)
    text = rendering.text
    ids, offsets = tokenizer.encode_with_offsets(rendering)
    begins, ends = [begin for begin, _ in offsets], [end for _, end in offsets]
    turns = []
    for index in range(first, len(messages)):
        if messages[index]["role"] != "assistant":
            continue
        start = _prefix_length(messages[:index], tokenizer, tools, text, add_generation_prompt=True)
        stop = len(text)
        if index + 1 < len(messages):
            stop = _prefix_length(messages[: index + 1], tokenizer, tools, text, add_generation_prompt=False)
        token, end = bisect_right(ends, start), bisect_left(begins, stop)
        over = next((place for place in range(token, end) if ids[place] in tokenizer.eos_ids), None)
        if over is None:
            written = tokenizer.decode(ids[max(token, end - _SHOWN_TOKENS) : end])
            raise UserError(
                f"{_no_end_token(tokenizer, written)} A model that is trained on such turns never learns to stop. "
                f"{_END_ADVICE}"
            )
        turns.append((token, over + 1))
    return RenderedConversation(ids, turns)


def end_token_warning(tokenizer: Tokenizer, tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """Returns a warning if the chat template ends assistant turns without an end token, else None.

    Args:
        tokenizer: Tokenizer with a chat template.
        tools: Function schemas that the template includes.
    """
    turn = [{"role": "user", "content": "?"}, {"role": "assistant", "content": ANY_TURN}]
    try:
        text = tokenizer.render_chat(turn, add_generation_prompt=False, tools=tools).text
    except UserError:  # a template that rejects this conversation is checked on the data's conversations
        return None
    _, found, after = text.rpartition(ANY_TURN)
    if not found or any(token in tokenizer.eos_ids for token in tokenizer.encode(after)):
        return None
    return (
        f"{_no_end_token(tokenizer, after)} Samples that end their turn like the template continue until "
        f"rollout.response_length. {_END_ADVICE}"
    )


def _no_end_token(tokenizer: Tokenizer, written: str) -> str:
    ends = ", ".join(f"{tokenizer.decode([token])!r} ({token})" for token in tokenizer.eos_ids)
    return (
        f"the chat template of '{tokenizer.name}' ends an assistant's turn with {written!r}, which contains none of "
        f"the model's end tokens ({ends})."
    )


def _prefix_length(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    text: str,
    *,
    add_generation_prompt: bool,
) -> int:
    """Returns the length, in characters, of a rendered prefix of the conversation."""
    part = tokenizer.render_chat(messages, add_generation_prompt=add_generation_prompt, tools=tools).text
    if not text.startswith(part):
        at = next((index for index, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), len(text))
        near = slice(max(0, at - 20), at + 20)
        raise UserError(
            f"the chat template of '{tokenizer.name}' is not append-only: it renders the first {len(messages)} "
            f"messages as ...{part[near]!r}, but as ...{text[near]!r} when more messages follow, so the assistant's "
            f"tokens cannot be identified. {ADVICE}"
        )
    return len(part)
