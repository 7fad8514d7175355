"""Replaces output redirections in a shell script, which restricted bash refuses.

Contains a small scanner of bash's syntax: a `>` is a redirection only outside quotes, comments, here-documents, `[[ ]]`
and arithmetic.
"""

from __future__ import annotations

import re

from mrl.errors import UserError

NOWHERE = 57
"""Descriptor that is open on /dev/null when the script is expanded."""

_STREAMS = {"/dev/stdout": 1, "/dev/stderr": 2}
_OPERATOR = re.compile(r"&>>?|(?:\{\w+\})?\d*(?:>>|>\||<>|>)")
_DUPLICATE = re.compile(r"&(?:\d+-?|-)")  # duplicates a descriptor, which restricted bash allows
_HEREDOC = re.compile(r"<<(-?)[ \t]*(?:'([^'\n]+)'|\"([^\"\n]+)\"|\\?([^\s'\"\\;&|<>()]+))")
_WORD = re.compile(r"[^\s;&|<>()\"'`$\\]+")
_STARTS_A_WORD = set(" \t\n;&|()`{")


def without_redirections(script: str) -> str:
    """Returns the script with redirections into files sent to descriptor NOWHERE and those into processes removed.

    Raises:
        UserError: The script is nested too deeply.
    """
    try:
        return _Scanner(script).scan()
    except RecursionError as error:
        raise UserError(
            "the script nests quotations and substitutions too deeply. Give its command line instead."
        ) from error


class _Scanner:
    def __init__(self, text: str) -> None:
        self.text, self.at, self.end = text, 0, ""
        self.out: list[str] = []
        self.heredocs: list[tuple[str, bool]] = []

    def scan(self) -> str:
        self._commands("")
        return "".join(self.out)

    def _commands(self, end: str) -> None:
        """Copies commands up to and including `end`, a bracket or a backquote; "" is the end of the text."""
        outer, self.end, cases = self.end, end, 0
        while self.at < len(self.text):
            char = self.text[self.at]
            begins = self.at == 0 or self.text[self.at - 1] in _STARTS_A_WORD
            if char == end and not (end == ")" and cases):
                self._copy(1)
                break
            if char == "\n":
                self._copy(1)
                self._bodies()
            elif char == "#" and begins:
                self._copy_to("\n", after=False)
            elif self._quoted(char) or (self._heredoc() if char == "<" else False):
                continue
            elif self.text.startswith("((", self.at) and begins:
                self._arithmetic()
            elif self.text.startswith("[[", self.at) and begins:
                self._copy_to("]]")
            elif self.text.startswith(("<(", ">("), self.at):
                self._nested(2, ")")
            elif char == "(" and not self.text.startswith("()", self.at):
                self._nested(1, ")")
            elif (operator := _OPERATOR.match(self.text, self.at)) and (char in "&<>" or begins):
                self._redirection(operator.end())
            else:
                word = _WORD.match(self.text, self.at)
                if begins and word and word[0] in ("case", "esac"):
                    cases += 1 if word[0] == "case" else -(cases > 0)
                self._copy(len(word[0]) if word and not char.isdigit() else 1)
        self.end = outer

    def _quoted(self, char: str) -> bool:
        """Copies an escape, a quotation or a substitution; returns False if there is none here."""
        if char == "\\":
            self._copy(2)
        elif char == "'":
            self._copy_to("'", start=1)
        elif char == '"':
            self._double()
        elif char == "`":
            self._nested(1, "`")
        elif self.text.startswith("$'", self.at):
            quotation = re.compile(r"\$'(?:[^'\\]|\\.)*'?", re.DOTALL).match(self.text, self.at)
            self._copy(len(quotation[0]) if quotation else 2)
        elif self.text.startswith("$((", self.at):
            self._copy(1)
            self._arithmetic()
        elif self.text.startswith("$(", self.at):
            self._nested(2, ")")
        elif self.text.startswith("${", self.at):
            self._braces()
        else:
            return False
        return True

    def _double(self) -> None:
        self._copy(1)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == '"':
                self._copy(1)
                return
            if char in "'" or not (char in "\\`$" and self._quoted(char)):
                self._copy(1)

    def _braces(self) -> None:
        """Copies `${...}`."""
        self._copy(2)
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "}":
                self._copy(1)
                return
            if not self._quoted(char):
                self._copy(1)

    def _nested(self, length: int, end: str) -> None:
        self._copy(length)
        self._commands(end)

    def _arithmetic(self) -> None:
        """Copies `((...))`."""
        depth = 0
        for end in range(self.at, len(self.text)):
            depth += {"(": 1, ")": -1}.get(self.text[end], 0)
            if depth == 0:
                break
        self._copy(end + 1 - self.at)

    def _heredoc(self) -> bool:
        if self.text.startswith("<<<", self.at):
            self._copy(3)
            return True
        start = _HEREDOC.match(self.text, self.at)
        if start is None:
            return False
        self.heredocs.append((start[2] or start[3] or start[4], bool(start[1])))
        self._copy(len(start[0]))
        return True

    def _bodies(self) -> None:
        """Copies the here-documents that start after this line end."""
        for word, strips in self.heredocs:
            while self.at < len(self.text):
                stop = self.text.find("\n", self.at)
                line = self.text[self.at :] if stop < 0 else self.text[self.at : stop]
                self._copy(len(line) + 1)
                if (line.lstrip("\t") if strips else line) == word:
                    break
        self.heredocs.clear()

    def _redirection(self, after: int) -> None:
        """Replaces a redirection: the operator and the word after it."""
        operator = self.text[self.at : after]
        if duplicate := _DUPLICATE.match(self.text, after):
            self._copy(duplicate.end() - self.at)
            return
        kept, self.out = self.out, []
        of_both = operator.startswith("&") or self.text.startswith("&", after)
        self.at = after + self.text.startswith("&", after)
        while self.text[self.at : self.at + 1] in (" ", "\t"):
            self.at += 1
        into_a_process = self.text.startswith((">(", "<("), self.at)
        if into_a_process:
            self._nested(2, ")")
        else:
            stops = " \t\n;&|<>()" + ("`" if self.end == "`" else "")
            while self.at < len(self.text) and self.text[self.at] not in stops:
                if not self._quoted(self.text[self.at]):
                    self._copy(1)
        target, self.out = "".join(self.out).strip("\"'"), kept
        if into_a_process or "<>" in operator or "{" in operator:
            self.out.append(" ")
        elif of_both:
            self.out.append(f">&{NOWHERE} 2>&{NOWHERE}")
        else:
            descriptor = re.match(r"\d*", operator)
            self.out.append(f"{descriptor[0] if descriptor else ''}>&{_STREAMS.get(target, NOWHERE)}")

    def _copy(self, length: int) -> None:
        self.out.append(self.text[self.at : self.at + length])
        self.at += length

    def _copy_to(self, end: str, *, start: int = 0, after: bool = True) -> None:
        """Copies up to `end`, searched from offset `start`, and including it if `after`; else to the text's end."""
        found = self.text.find(end, self.at + start)
        self._copy((len(self.text) if found < 0 else found + (len(end) if after else 0)) - self.at)
