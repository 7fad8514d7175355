"""A file has one noun and a function one thought: what is too long to read has two."""

import ast
import io
import tokenize

from tests.source import PACKAGE, ROOT, tree_of

FILE_LIMIT = 600
"""Lines of code; blank lines, comments and docstrings do not count."""

FUNCTION_LIMIT = 60
"""Lines, its docstring with them."""

TOP_LIMIT = 8
"""Modules beside the rooms of mrl/: what one reads first."""

NOT_CODE = {getattr(tokenize, name) for name in ("COMMENT", "NL", "NEWLINE", "INDENT", "DEDENT", "ENDMARKER")}

FILES = sorted(path for top in ("mrl", "tools", "tests") for path in (ROOT / top).rglob("*.py"))


def relative(path):
    return path.relative_to(ROOT).as_posix()


def lines_of_code(text: str) -> int:
    texts = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    docs = [node for node in texts if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)]
    tokens = [token for token in tokenize.generate_tokens(io.StringIO(text).readline) if token.type not in NOT_CODE]
    code = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    return len(code - {line for node in docs for line in range(node.lineno, (node.end_lineno or 0) + 1)})


def test_files_are_short_enough_to_read():
    lengths = {relative(path): lines_of_code(path.read_text(encoding="utf-8")) for path in FILES}
    assert {name: length for name, length in lengths.items() if length > FILE_LIMIT} == {}
    assert lengths["mrl/train.py"] > 50


def test_functions_are_short_enough_to_read():
    lengths = {}
    for path in FILES:
        for node in ast.walk(tree_of(path)) if relative(path).split("/")[0] != "tests" else ():
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                lengths[f"{relative(path)}:{node.lineno} {node.name}"] = (node.end_lineno or 0) - node.lineno + 1
    assert {name: length for name, length in lengths.items() if length > FUNCTION_LIMIT} == {}
    assert len(lengths) > 1000


def test_the_top_of_the_package_is_what_one_reads_first():
    assert len(list(PACKAGE.glob("*.py"))) <= TOP_LIMIT


def test_comments_docstrings_and_blank_lines_are_no_code():
    assert lines_of_code('"""What.\n\nWhy.\n"""\n\n# so\nx = """a\n\nb"""  # three\n"""Of x."""\n') == 3
