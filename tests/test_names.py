"""One name for one thing: synonyms of a name of mrl appear nowhere, and no file is a drawer for leftovers."""

import ast
import re

from tests.source import ROOT, modules, tree_of

SYNONYMS = {
    r"(old|behaviou?r|sampling|sampler|generation)_?log_?probs?": "rollout_logprobs",
    r"(prox|proximal)_log_probs?": "proximal_logprobs",
    r"(ref|reference)_log_probs?|reference_logprobs?": "ref_logprobs",
    r"log_probs?|logps?|per_token_logps": "logprobs",
    r"completions?_(ids|mask|length)": "response_*",
    r"loss_mask|action_mask": "response_mask",
    r"weight_version|model_version": "policy_version",
    r"prompt_group|group_index": "group_id",
    r"lodgers?|guests?|desk|quaint|mixtures?": "shared-weight teacher, separate teacher, request queue, MoE",
    r"(n|nb)_[a-z]+s": "num_*",
    r"\w+_(seconds?|secs?|millis|ms)": "*_s",
    r"\w+_(pct|percent|fraction)": "*_frac",
}
"""Pattern of an identifier -> the name in mrl."""

ALLOWED = {("mrl/algorithms/functional", "old_logprobs_R"), ("mrl/algorithms", "old_logprobs_R")}
"""Folder and name: the maths of a ratio takes either rollout_logprobs or proximal_logprobs as its denominator."""

DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "base_utils"}


def is_like(pattern: str, name: str) -> bool:
    return re.fullmatch(f"_?({pattern})(_[A-Z]+)?", name) is not None


def identifiers(tree: ast.Module):
    """Names that the file itself gives: variables, arguments, attributes it sets, functions and classes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name, node.lineno


def test_no_synonym_of_a_glossary_word():
    given = {
        (path.parent.relative_to(ROOT).as_posix(), name): f"{path.relative_to(ROOT)}:{line}"
        for path in modules()
        for name, line in identifiers(tree_of(path))
    }
    assert len(given) > 1000
    names = {name for _, name in given}
    words = {name: word for pattern, word in SYNONYMS.items() for name in names if is_like(pattern, name)}
    found = [
        f"{place}: '{name}' is called '{words[name]}' here"
        for (folder, name), place in given.items()
        if name in words and (folder, name) not in ALLOWED
    ]
    assert found == []


def test_no_file_is_a_drawer():
    drawers = [p for top in ("mrl", "tests", "tools") for p in (ROOT / top).rglob("*.py") if p.stem in DRAWERS]
    assert drawers == []


def test_the_pattern_finds_a_planted_synonym():
    planted = ast.parse("old_log_probs_R = 1\ndef f(lodger): pass")
    names = {name for name, _ in identifiers(planted)}
    assert sum(any(is_like(pattern, name) for pattern in SYNONYMS) for name in names) == 2
