"""Measures docstrings by the rules of CONTRIBUTING, as far as a program can: `python -m tests.prose [-v] [PATH ...]`.

- An opening: the first word of a docstring is a preposition, a conjunction or a question word.
- No verb: a function's docstring does not open with a verb ("Returns"); properties are not counted.
- An empty entry: what an entry of Args, Attributes, Returns or Raises says opens so, too, or has no word of its own.
- A private word: a docstring uses a word that the field does not use in this sense (`PRIVATE`).
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from tests.source import PACKAGE, ROOT, tree_of

WORD = re.compile("[a-z]+")
OPENINGS = set(
    WORD.findall(
        """of in on at by for from to with without into onto over under between among beside besides before after behind
        during since until till through against about above below along around as like per than that if unless because
        though although while once so and or but nor what which who whom whose where when why how whether"""
    )
)
"""First words, in lower case, that are prepositions, conjunctions or question words."""

PRONOUNS = set(WORD.findall("it its itself they their theirs them this that these those one ones such same mine own"))
SMALL = (
    OPENINGS | PRONOUNS | set(WORD.findall("a an the is are was were be been has have had not no all any each none"))
)

PRIVATE = re.compile(
    r"\b(told|tells?|telling|whole|beside|begun|stands?|standing|stood|mends?|mended|mending|hears?|heard|of now|"
    r"mixtures? of experts|a mixture|in turns|lodgers?|guests?|quaint|whoever|theirs)\b",
    re.IGNORECASE,
)

SECTIONS = ("Args", "Attributes", "Returns", "Raises", "Yields")
ENTRY = re.compile(r"^ {4}(\*{0,2}[\w.]+)(?: \([^)]*\))?: (.*)$")


@dataclass(frozen=True)
class Docstring:
    """A docstring and its place.

    Attributes:
        path: File, relative to the repository.
        line: Line number of its first line.
        name: Qualified name of the module, class or function; for a field `Class.field`.
        kind: "module", "class", "function", "property" or "field".
        text: The docstring with its indentation removed.
    """

    path: str
    line: int
    name: str
    kind: str
    text: str

    def opens_badly(self) -> bool:
        """Returns whether the first word is one of `OPENINGS`."""
        return first_word(self.text) in OPENINGS

    def lacks_verb(self) -> bool:
        """Returns whether it is a function's and does not open with a verb in the third person or "Collective over"."""
        return self.kind == "function" and not re.match(r"(Collective|[A-Z][a-z-]*s)\b", self.text)

    def private_words(self) -> list[str]:
        """Returns the words of `PRIVATE` in the text, code in backticks left out."""
        return PRIVATE.findall(re.sub(r"`[^`]*`", "", self.text))

    def entries(self) -> Iterator[tuple[str, str]]:
        """Yields (name, text) of each entry of Args, Attributes and Raises, its lines joined."""
        section, name, words = "", "", ""
        for line in [*self.text.splitlines(), "End:"]:
            if not line.startswith(" ") and line.strip():
                if name:
                    yield name, words
                section, name = line.strip().removesuffix(":"), ""
            elif section in SECTIONS and (match := ENTRY.match(line)):
                if name:
                    yield name, words
                name, words = match[1], match[2]
            elif name:
                words += " " + line.strip()


def first_word(text: str) -> str:
    """Returns the first word in lower case, "" where the text opens with code or a sign."""
    match = re.match(r"[\"'(]*([A-Za-z]+)", text)
    return match[1].lower() if match else ""


def is_empty(name: str, text: str) -> bool:
    """Returns whether an entry opens with a preposition or has only small words and the words of its name."""
    own = {word.lower() for word in re.findall(r"[A-Za-z]+", name.replace("_", " "))}
    words = [word.lower() for word in re.findall(r"[A-Za-z]+|\d+|`[^`]*`", text)]
    return first_word(text) in OPENINGS or all(word in SMALL or word in own for word in words)


def docstrings(path: Path) -> Iterator[Docstring]:
    """Yields the docstrings of modules, classes, functions and dataclass fields of a file."""
    shown = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else str(path)
    yield from _docstrings(tree_of(path), shown, "", "module")


def _docstrings(node: ast.AST, path: str, name: str, kind: str) -> Iterator[Docstring]:
    body = getattr(node, "body", [])
    text = (
        ast.get_docstring(node)
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        else None
    )
    if text:
        yield Docstring(path, body[0].lineno, name or path, kind, text)
    for before, after in pairwise(body):
        target = before.target if isinstance(before, ast.AnnAssign) else None
        if isinstance(before, ast.Assign):
            target = before.targets[0]
        value = after.value if isinstance(after, ast.Expr) and isinstance(target, ast.Name) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str) and isinstance(target, ast.Name):
            yield Docstring(path, after.lineno, f"{name}.{target.id}".lstrip("."), "field", value.value.strip())
    for child in body:
        if isinstance(child, ast.ClassDef):
            yield from _docstrings(child, path, f"{name}.{child.name}".lstrip("."), "class")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            kind = "property" if any("property" in ast.unparse(d) for d in child.decorator_list) else "function"
            yield from _docstrings(child, path, f"{name}.{child.name}".lstrip("."), kind)


@dataclass
class Shares:
    """Counts of a set of files.

    Attributes:
        docstrings: Docstrings of modules, classes and functions.
        openings: Those that open with a preposition or a question word.
        functions: Docstrings of functions and methods.
        verbless: Those that do not open with a verb.
        private: Docstrings with a private word.
        entries: Entries of Args, Attributes and Raises.
        empty: Entries that say nothing.
    """

    docstrings: int = 0
    openings: int = 0
    functions: int = 0
    verbless: int = 0
    private: int = 0
    entries: int = 0
    empty: int = 0

    def __str__(self) -> str:
        """Formats the shares in percent."""
        texts, functions, entries = (max(1, n) for n in (self.docstrings, self.functions, self.entries))
        return (
            f"{self.docstrings:5} docstrings: {self.openings / texts:6.1%} openings, {self.verbless / functions:6.1%} "
            f"of functions without a verb, {self.private / texts:6.1%} private words; {self.entries:5} entries: "
            f"{self.empty / entries:6.1%} empty"
        )


def measure(paths: list[Path], *, details: list[str] | None = None) -> Shares:
    """Measures files; with `details` it appends one line for each docstring and entry that breaks a rule."""
    found = Shares()
    for path in paths:
        for each in docstrings(path):
            place = f"{each.path}:{each.line} {each.name}"
            if each.kind == "field":
                found.entries += 1
                if is_empty(each.name, each.text):
                    found.empty += 1
                    _note(details, f"{place}: empty: {each.text[:90]}")
                continue
            found.docstrings += 1
            if each.opens_badly():
                found.openings += 1
                _note(details, f"{place}: opening: {each.text.splitlines()[0][:90]}")
            found.functions += each.kind == "function"
            if each.lacks_verb():
                found.verbless += 1
                _note(details, f"{place}: no verb: {each.text.splitlines()[0][:90]}")
            if words := each.private_words():
                found.private += 1
                _note(details, f"{place}: private words: {', '.join(words)}")
            for name, text in each.entries():
                found.entries += 1
                if is_empty(name, text):
                    found.empty += 1
                    _note(details, f"{place}: empty: {name}: {text[:90]}")
    return found


def _note(details: list[str] | None, line: str) -> None:
    if details is not None:
        details.append(line)


def class_names(paths: list[Path]) -> Counter[str]:
    """Counts the public class names of files."""
    trees = (tree_of(path) for path in paths)
    return Counter(n.name for t in trees for n in ast.walk(t) if isinstance(n, ast.ClassDef) and n.name[0] != "_")


def main(words: list[str]) -> None:
    """Prints the shares of each folder, or those of the files and folders that are named."""
    details: list[str] | None = [] if "-v" in words else None
    given = [Path(word).resolve() for word in words if word != "-v"]
    for top in given or sorted(
        [path for path in PACKAGE.iterdir() if path.suffix == ".py" or path.is_dir()] + [PACKAGE]
    ):
        files = sorted(top.rglob("*.py")) if top.is_dir() else [top]
        if files:
            print(f"{measure(files, details=details)}  {top.relative_to(ROOT)}")
    if details:
        print("\n".join(details))
    if not given:
        twice = {name: count for name, count in class_names(sorted(PACKAGE.rglob("*.py"))).items() if count > 1}
        print(f"{len(twice)} class names twice: {', '.join(sorted(twice))}")
        print(sum(len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")), "lines in mrl/")


if __name__ == "__main__":
    main(sys.argv[1:])
