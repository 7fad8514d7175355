"""Docstrings keep the rules of prose that a program can check (`tests/prose.py`), in every package."""

import pytest

from tests import prose
from tests.source import PACKAGE

OPENINGS = 0.01
VERBLESS = 0.05
PRIVATE = 0.04
EMPTY = 0.05
"""Largest shares of a package's docstrings and entries."""

PARTS = sorted(path.name for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())


@pytest.mark.parametrize("name", PARTS)
def test_docstrings_are_plain(name):
    details: list[str] = []
    path = PACKAGE / name
    found = prose.measure(sorted(path.rglob("*.py")) if path.is_dir() else [path], details=details)
    shares = {
        "opening": (found.openings, OPENINGS * found.docstrings),
        "no verb": (found.verbless, VERBLESS * found.functions),
        "private words": (found.private, PRIVATE * found.docstrings),
        "empty": (found.empty, EMPTY * found.entries),
    }
    over = {rule: count for rule, (count, limit) in shares.items() if count > limit}
    assert over == {}, "\n".join(line for line in details if any(f": {rule}: " in line for rule in over))


def test_no_public_class_name_twice():
    names = prose.class_names(sorted(PACKAGE.rglob("*.py")))
    assert {name: count for name, count in names.items() if count > 1} == {}


def test_the_package_has_at_most_sixteen_folders():
    assert len([path for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"]) <= 16


PLANTED = '''
"""What is told of it."""


def told(uid):
    """Of the prompt.

    Args:
        uid: Of the prompt.
    """


def whole(uid: int) -> int:
    """Returns the number of samples.

    Args:
        uid: Index of the prompt in the data.
    """
'''


def test_planted_mistakes_are_found(tmp_path):
    file = tmp_path / "planted.py"
    file.write_text(PLANTED.lstrip())
    found = prose.measure([file])
    assert (found.docstrings, found.openings, found.verbless, found.private, found.empty) == (3, 2, 1, 1, 1)
    assert (found.functions, found.entries) == (2, 2)
