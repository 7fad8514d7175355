"""Mutated configs: YAML that is broken as text, as a tree or in a value, and broken overrides."""

# ruff: noqa: E501 -- tables of odd things
from __future__ import annotations

import random
from collections.abc import Callable

import yaml

from mrl.config.config import Config
from mrl.config.keys import dotted_keys
from tests.fuzz.cases import BASE, COMMANDS, Case

KEYS = list(dotted_keys(Config))
PATHS = (
    "run.output_dir", "model.path", "model.tokenizer", "reference.path", "rollout.engine_dir", "data.train_files",
    "data.val_files", "data.chat_template",
)  # fmt: skip
WORDS = (
    "", " ", "~", "~/x", "~nobody/x", "$HOME/x", "$NOWHERE/x", "${run.seed}", "${nothing}", "${", "${oc.env:HOME}",
    "${run}", "\0", "a\0b", "\ud800", "\udcff\udcfe", "\u202e", "\x1b[31m", "\ufeff", "😀" * 50, "a" * 300, "a" * 5000,
    "/".join(["a" * 200] * 30), "/" * 300, "../" * 2000, "x" * 100_000, "/proc/self/mem", "/dev/zero", "/dev/stdin",
    "/", ".", "..", "///", "/etc/passwd", "char:", "char:aa", "char:\ud800a", ":", ".:", "a:b:c", "..a", "os:system",
    "mrl", "mrl.commands.cli:main", "builtins:exec", "nan", "1e400", "0x10", "1_000", "yes", "null", "[", "{", "- a", "!!set {a}",
    "&a", "*a", "%s%n", "{folder}", "'", '"', "#", "\n", "\t", "\r\n",
)  # fmt: skip
NUMBERS = (
    0, -1, 1, 2, 7, 255, 2**31 - 1, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63), 10**400, 0.5, -0.5, 1e-30,
    1e-300, 1e30, 1e300, -1e30, float("nan"), float("inf"), -float("inf"),
)  # fmt: skip


def case(number: int) -> Case:
    """The mutated config of a number."""
    draw = random.Random(f"config {number}")
    command = draw.choice([*COMMANDS, "dry run", "dry run", "train"])
    if draw.random() < 0.15:
        return Case(
            f"config {number}", command=command, overrides=tuple(_override(draw) for _ in range(draw.choice((1, 2))))
        )
    if draw.random() < 0.35:
        text = draw.choice(TEXTS)(draw, BASE.encode())
    else:
        tree = yaml.safe_load(BASE)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            draw.choice(TREES)(draw, tree)
        text = _dumped(tree)
    return Case(f"config {number}", {"config.yaml": text}, command)


def value(draw: random.Random, depth: int = 0) -> object:
    """Anything that YAML can say."""
    roll = draw.random()
    if roll < 0.35:
        return draw.choice(WORDS)
    if roll < 0.6:
        return draw.choice(NUMBERS)
    if roll < 0.7:
        return draw.choice((None, True, False, [], {}, b"bytes\xff"))
    if depth > 3:
        return "deep"
    if roll < 0.85:
        return [value(draw, depth + 1) for _ in range(draw.choice((1, 2, 5)))]
    if roll < 0.97:
        return {_name(draw): value(draw, depth + 1) for _ in range(draw.choice((1, 2)))}
    return nested(draw.choice((10, 50, 150, 300)), draw.random() < 0.5)


def nested(depth: int, mapping: bool) -> object:
    """A list in a list in a list, or mappings."""
    found: object = 1
    for _ in range(depth):
        found = {"a": found} if mapping else [found]
    return found


def _name(draw: random.Random) -> object:
    return draw.choice(("a", "name", "path", 1, None, 0.5, True, "", "a.b", "a[0]", "\ud800", "\0", "x" * 5000, "~a"))


def _override(draw: random.Random) -> str:
    """A word of the command line; an argument cannot hold a NUL, nor what the file system's encoding lacks."""
    key = draw.choice((*KEYS, *KEYS, "model.overrides.hidden_size", "data.task_kwargs.x", "reward.functions[0].name"))
    said = draw.choice((*WORDS, *map(str, NUMBERS), "[" * 2000, "{a: " * 500, "[[1], {a: [2]}]", "9" * 5000, "&a [*a]"))
    form = draw.choice(
        (
            "{key}={said}",
            "{key}={said}",
            "{key}={said}",
            "~{key}",
            "{key}",
            "{said}",
            "{said}={key}",
            "{key}[0]={said}",
            "{key}.x={said}",
        )
    )
    word = form.format(key=key, said=said).replace("\0", "")
    word = word.encode("utf-8", "surrogateescape" if "\udcff" in word else "ignore").decode("utf-8", "surrogateescape")
    return word if not word.startswith("-") else f"x{word}"


def _set(tree: dict, key: str, new: object) -> None:
    *above, last = key.split(".")
    for part in above:
        if not isinstance(tree.get(part), dict):
            tree[part] = {}
        tree = tree[part]
    tree[last] = new


def _set_any(draw: random.Random, tree: dict) -> None:
    _set(tree, draw.choice(KEYS), value(draw))


def _set_path(draw: random.Random, tree: dict) -> None:
    word = draw.choice(WORDS)
    key = draw.choice(PATHS)
    _set(tree, key, [word] if key.endswith("_files") else word)


def _set_name(draw: random.Random, tree: dict) -> None:
    key = draw.choice(("rollout.name", "algorithm.name", "data.task", "model.preset", "reward.functions"))
    _set(
        tree,
        key,
        [{"name": draw.choice(WORDS), "kwargs": value(draw)}] if key == "reward.functions" else draw.choice(WORDS),
    )


def _set_mapping(draw: random.Random, tree: dict) -> None:
    key = draw.choice(("model.overrides", "data.task_kwargs"))
    if key == "data.task_kwargs":
        _set(tree, "data.train_files", [])
        _set(tree, "data.task", "addition")
        names = (
            "min_terms",
            "max_terms",
            "max_value",
            "num_train",
            "num_val",
            "held_out_frac",
            "wrong_frac",
            "seed",
            "x",
        )
    else:
        names = (
            "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
            "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_parameters", "head_dim", "x",
        )  # fmt: skip
    _set(tree, f"{key}.{draw.choice(names)}", value(draw))


def _drop(draw: random.Random, tree: dict) -> None:
    tree.pop(draw.choice(list(tree)), None) if tree else None


def _unknown(draw: random.Random, tree: dict) -> None:
    target = draw.choice([tree, *(part for part in tree.values() if isinstance(part, dict))])
    target[_name(draw)] = value(draw)


def _section(draw: random.Random, tree: dict) -> None:
    tree[draw.choice(list(tree) or ["run"])] = value(draw)


TREES: tuple[Callable[[random.Random, dict], None], ...] = (
    _set_any, _set_any, _set_any, _set_path, _set_path, _set_name, _set_mapping, _set_mapping, _drop, _unknown, _section,
)  # fmt: skip


def _dumped(tree: object) -> bytes:
    """As YAML, with escapes for what UTF-8 cannot hold."""
    text = yaml.dump(tree, allow_unicode=False, sort_keys=False)
    return text.encode("utf-8", "backslashreplace")


def _cut(draw: random.Random, text: bytes) -> bytes:
    return text[: draw.randrange(len(text))]


def _flipped(draw: random.Random, text: bytes) -> bytes:
    content = bytearray(text)
    for _ in range(draw.choice((1, 3, 10))):
        content[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(content)


def _inserted(draw: random.Random, text: bytes) -> bytes:
    at = draw.randrange(len(text))
    junk = draw.choice((
        b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"\t", b"\r", b"---\n", b"...\n", b"[" * 3000, b"{a: " * 3000, b"- " * 3000,
        b"&a ", b"*a ", b"!!python/object/apply:os.system [ls] ", b"!x ", b"? ", b"<<: ", b"\xed\xa0\x80", b"'", b'"',
        b"a: " * 400, b"%YAML 9.9\n", b"x" * 100_000, b"\xc2\x85", b"\xe2\x80\xa8", bytes(range(256)),
    ))  # fmt: skip
    return text[:at] + junk + text[at:]


def _appended(draw: random.Random, text: bytes) -> bytes:
    bomb = "\n".join(f"l{i}: &l{i} [{', '.join([f'*l{i - 1}' if i else 'x'] * 10)}]" for i in range(12))
    return text + draw.choice((
        b"model: &m {preset: *m}\n", b"data: &d\n  task_kwargs: *d\n", b"extra: &a [*a, *a]\n", bomb.encode(),
        b"data: {task_kwargs: &k {a: &l [1, *l]}}\n", b"---\nrun: {}\n", b"run: {seed: 1}\nrun: {seed: 2}\n",
        b"run: {seed: !!int '3', output_dir: !!binary aGVsbG8=}\n", b"run: {seed: 2001-01-01}\n", b"run: !!set {a, b}\n",
        b"run: !!omap [a: 1]\n", b'run: {output_dir: "\\ud800"}\n', b'run: {output_dir: "a\\0b"}\n', b"<<: {run: 1}\n",
        b"run:\n  <<: [1, 2]\n", b"? {a: 1}\n: 2\n", b"? [a]\n: 2\n", b"run: {seed: 1e400}\n", b"run: {seed: 0x" + b"f" * 5000 + b"}\n",
        b"run: {seed: " + b"9" * 6000 + b"}\n", b"reward: {functions: [&f {name: x, kwargs: {a: *f}}]}\n",
        b"model: {overrides: {hidden_size: ${run.seed}, x: '${model.overrides}'}}\n", b"run: {output_dir: '${run.output_dir}'}\n",
        b"run: {output_dir: '" + b"${" * 500 + b"run.seed" + b"}" * 500 + b"'}\n",
    ))  # fmt: skip


def _replaced(draw: random.Random, text: bytes) -> bytes:
    return draw.choice((
        b"", b"\n", b"null", b"3", b"text", b"[]", b"[1, 2]", b"- a\n- b\n", b"{}", b"\0" * 100, b"\xff" * 100, b"{" * 5000,
        b"[" * 100_000, text.decode().encode("utf-16"), text.decode().encode("utf-32"), b"\xef\xbb\xbf" + text,
        text.replace(b"\n", b"\r\n"), text.replace(b"  ", b"\t"), text * 3, b"%TAG ! tag:x,2000:\n---\n" + text,
        b"PK\x03\x04" + bytes(200), text.upper(), text[::-1], b"a: b: c\n", b"a:\n- b\n c\n", b"|", b">\n x", b"--- !!map\n",
    ))  # fmt: skip


TEXTS: tuple[Callable[[random.Random, bytes], bytes], ...] = (
    _cut,
    _flipped,
    _inserted,
    _appended,
    _appended,
    _replaced,
)
