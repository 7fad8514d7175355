"""Removes the reasoning that a model writes before its answer, so that rewards read the answer only.

Reasoning is the text between certain tags. Rewards that compare or run an answer never read it; `regex` and `length`
see the complete response, since a format reward asks for the tags. Imports no torch.
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
    (r"<unused94>", r"<unused95>"),
    (r"<\|channel>thought\b", r"<channel\|>"),
    (r"<\|channel\|>\s*(?:analysis|commentary)\b[^<]{0,100}<\|message\|>", r"<\|(?:end|return|call|start)\|>"),
)
"""Opening and closing tag of each model family: Qwen and DeepSeek, Magistral, Kimi-VL, Sky-T1, Command A, Apertus,
MedGemma, Gemma 4, gpt-oss."""

_OPENING = "|".join(opening for opening, _ in _TAGS)
_CLOSING = "|".join(closing.replace("{name}", f"(?:{_NAMES})") for _, closing in _TAGS[:-1])
_MENTIONED = rf"(?:{_OPENING.replace('?P<name>', '?:')})(?:[^\n]{{0,80}}?(?:{_CLOSING}))?|{_CLOSING}"
_QUOTED = rf"(?P<quote>[\"'`])(?:{_MENTIONED})(?P=quote)"

_OPEN_AT_END = re.compile(rf"(?:{_OPENING})\s*$", re.IGNORECASE)
_NEXT = re.compile(rf"(?P<quoted>{_QUOTED})|(?P<opening>{_OPENING})|(?P<closing>{_CLOSING})", re.IGNORECASE)
_MARKS_OF_FINAL = re.compile(r"(?:<\|start\|>assistant)?<\|channel\|>\s*final\b[^<]{0,100}<\|message\|>")
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
    opened = _OPEN_AT_END.search(prompt[-_PROMPT_TAIL_CHARS:])
    closing = None if opened is None else _closing_of(opened)
    place = 0
    while True:
        if closing is not None:
            end = closing.search(text, place)
            if end is None:
                break
            place, closing = end.end(), None
        found = _NEXT.search(text, place)
        if found is None:
            kept.append(text[place:])
            break
        if found["quoted"]:
            kept.append(text[place : found.end()])
        elif found["closing"]:
            kept.clear()
        else:
            kept.append(text[place : found.start()])
            closing = _closing_of(found)
        place = found.end()
    return _MARKS_OF_FINAL.sub("", "".join(kept))


def _closing_of(opened: re.Match[str]) -> re.Pattern[str]:
    """The tag that closes this opening tag, which its text ends with."""
    tag = opened["opening"] if "opening" in opened.re.groupindex else opened[0].strip()
    for opening, closing in _TAGS:
        if found := re.fullmatch(opening, tag, re.IGNORECASE):
            return re.compile(closing.replace("{name}", found.groupdict().get("name") or ""), re.IGNORECASE)
    raise ValueError(f"no opening tag: {tag!r}")
