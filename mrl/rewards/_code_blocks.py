"""Extraction of the Python program of a response from its fenced Markdown blocks. Imports no torch."""

from __future__ import annotations

import ast
import re
import textwrap
import warnings
from dataclasses import dataclass

from markdown_it import MarkdownIt

_MARKDOWN = MarkdownIt("zero").enable(["fence", "blockquote", "list"])
"""Parser without HTML, whose blocks would hide a fence below <answer>, and without indented code blocks, because a
fence may be indented."""

_FLAT = MarkdownIt("zero").enable(["fence"])
_PYTHON = re.compile(r"\{?\s*\.?(?:python|py)[\d.]*(?![\w+#-])", re.IGNORECASE)
_INDENTED_FENCE = re.compile(r"^(?=[ \t]{4,}(?:```|~~~))", re.MULTILINE)  # would be a line of the paragraph above
_MAX_PARSED_CHARS = 1 << 16


@dataclass(frozen=True)
class Block:
    """Fenced code block of a response.

    Attributes:
        label: Info string of the fence, such as "python title=x".
        text: Lines of the block, without the indentation of the fence.
        closed: True if it has a closing fence; the last block of a truncated response has none.
    """

    label: str
    text: str
    closed: bool

    @property
    def is_python(self) -> bool:
        """True if the label is Python's."""
        return _PYTHON.match(self.label) is not None


def fenced_blocks(response: str, *, lists: bool = True) -> list[Block]:
    """Returns the fenced blocks of a Markdown text, in order.

    Args:
        response: Markdown text.
        lists: True to parse lists and quotes; False so that a block in a list item may contain unindented lines.
    """
    markdown, text = (_MARKDOWN, response) if lists else (_FLAT, _INDENTED_FENCE.sub("\n", response))
    source = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    found = []
    for token in markdown.parse("\n".join(source) + "\n"):
        if token.type == "fence" and token.map is not None:
            first, end = token.map
            inner = token.content
            lines = inner.count("\n")
            if not lists:
                inner = textwrap.dedent("".join(f"{line}\n" for line in source[first + 1 : first + 1 + lines]))
            found.append(Block(token.info.strip(), inner, end - first == lines + 2))
    return found


def extract_program(response: str) -> str | None:
    """Returns the program of a response; None if no block can be Python.

    Chooses the last block labelled as Python, preferring closed blocks. Without one, the last unlabelled block that
    parses as a Python program, then the last unlabelled block. Ignores blocks of other languages.
    """
    chosen = _chosen(fenced_blocks(response))
    if chosen is not None and _is_program(chosen.text):
        return chosen.text
    flat = _chosen(fenced_blocks(response, lists=False))
    if flat is not None and (chosen is None or (flat.is_python >= chosen.is_python and _is_program(flat.text))):
        return flat.text
    return None if chosen is None else chosen.text


def _chosen(blocks: list[Block]) -> Block | None:
    labelled = [block for block in blocks if block.is_python]
    if labelled:
        return max(labelled, key=lambda block: (block.closed, labelled.index(block)))
    plain = [block for block in blocks if not block.label]
    found = [block for block in plain if _is_program(block.text)] or plain
    return found[-1] if found else None


def _is_program(text: str) -> bool:
    """Returns whether a text parses as Python with a statement or call, not only a value such as "6" or "[1, 2]".

    A text above `_MAX_PARSED_CHARS` is not parsed and counts as a program.
    """
    if len(text) > _MAX_PARSED_CHARS:
        return True
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in the model's strings
            statements = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(not isinstance(one, ast.Expr) or isinstance(one.value, (ast.Call, ast.Await)) for one in statements)
