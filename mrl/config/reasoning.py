"""Reasoning tags of each model family, and functions that find the reasoning in a response.

Rewards that compare or run an answer never see the reasoning, and a tool call inside it is not executed. `regex` and
`length` see the complete response, since a format reward asks for the tags. Imports no torch.
"""

from __future__ import annotations

import re

_NAMES = r"(?:seed:|mm:|longcat_)?think(?:ing)?|thoughts?|reason(?:ing)?|reflection|analysis|scratchpad"

_TAGS = (
    (rf"<(?P<name>{_NAMES})>", r"</{name}>"),
    (r"\[THINK\]", r"\[/THINK\]"),
    (r"◁think▷", r"◁/think▷"),
    (r"<\|begin_of_thought\|>", r"<\|end_of_thought\|>"),
    (r"<\|START_THINKING\|>", r"<\|END_THINKING\|>"),
    (r"<\|inner_prefix\|>", r"<\|inner_suffix\|>"),
    (r"<unused94>(?:thought\b)?", r"<unused95>"),
    (r"<\|channel>thought\b", r"<channel\|>"),
    (
        r"<\|channel\|>\s*(?:analysis|commentary)\b[^<]{0,100}<\|message\|>",
        r"(?:<\|(?:end|return|call)\|>|<\|start\|>(?:assistant)?)",
    ),
)
"""Opening and closing tag of each model family: Qwen and DeepSeek, Magistral, Kimi-VL, Sky-T1, Command A, Apertus,
MedGemma, Gemma 4, gpt-oss."""

_TAG_TOKENS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|channel>")
"""Tokens that are only a part of a tag of `_TAGS`."""

_OPENING = "|".join(opening for opening, _ in _TAGS)
_CLOSING = "|".join(closing.replace("{name}", f"(?:{_NAMES})") for _, closing in _TAGS[:-1])
_FINAL = r"(?:<\|start\|>assistant)?<\|channel\|>\s*final\b[^<]{0,100}<\|message\|>"
_MENTIONED = rf"(?:{_OPENING.replace('?P<name>', '?:')})(?:[^\n]{{0,80}}?(?:{_CLOSING}))?|{_CLOSING}"
_QUOTED = rf"(?P<quote>[\"'`])(?:{_MENTIONED})(?P=quote)"

MARK = rf"(?i:(?P<quoted>{_QUOTED})|(?P<opening>{_OPENING})|(?P<closing>{_CLOSING})|(?P<final>{_FINAL}))"
"""Regular expression of a tag outside reasoning. Groups: `quoted`, a tag that is only mentioned; `opening`; `closing`,
which ends reasoning that the prompt began; `final`, where gpt-oss begins its answer."""

_MARK = re.compile(MARK)
_OPEN_AT_END = re.compile(rf"(?i:(?P<opening>{_OPENING}))\s*$")
_PROMPT_TAIL_CHARS = 200


def without_reasoning(text: str, prompt: str = "") -> str:
    """Returns a response without its reasoning.

    Reasoning that is not closed reaches to the end. Text before a closing tag without an opening one is reasoning too:
    chat templates write the opening tag into the prompt. A tag in quotes or backticks outside reasoning is a mention.

    Args:
        text: The response.
        prompt: Text before it; where that ends with an opening tag, the response begins inside the reasoning.
    """
    kept: list[str] = []
    place = end_of_opened(text, prompt)
    while found := _MARK.search(text, place):
        if found["closing"]:
            kept.clear()
        else:
            kept.append(text[place : found.end() if found["quoted"] else found.start()])
        place = end_of_reasoning(text, found)
    return "".join([*kept, text[place:]])


def end_of_opened(text: str, prompt: str) -> int:
    """Returns the index where the reasoning ends that the prompt opened; 0 where it opened none.

    Args:
        text: The response.
        prompt: Text before it, or the end of that text.
    """
    opened = _OPEN_AT_END.search(prompt[-_PROMPT_TAIL_CHARS:])
    return 0 if opened is None else _closed(text, 0, opened["opening"])


def end_of_reasoning(text: str, mark: re.Match[str]) -> int:
    """Returns the index after a match of `MARK`: for an opening tag where its reasoning ends, else after the match."""
    return _closed(text, mark.end(), mark["opening"]) if mark["opening"] else mark.end()


def closing_in(text: str, start: int, end: int) -> int | None:
    """Returns the index after the first closing tag in text[start:end] that is not quoted; None: there is none."""
    return next((mark.end() for mark in _MARK.finditer(text, start, end) if mark["closing"]), None)


def is_tag_token(token: str) -> bool:
    """Returns whether the text of a token is a reasoning tag or a part of one."""
    return token in _TAG_TOKENS or _MARK.fullmatch(token) is not None


def _closed(text: str, place: int, opening: str) -> int:
    """Returns the index after the tag that closes `opening`, from `place` on; else the end of the text."""
    for tag, closing in _TAGS:
        if found := re.fullmatch(tag, opening, re.IGNORECASE):
            name = found.groupdict().get("name") or ""
            end = re.compile(closing.replace("{name}", name), re.IGNORECASE).search(text, place)
            return len(text) if end is None else end.end()
    raise ValueError(f"no opening tag: {opening!r}")
