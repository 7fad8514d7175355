"""Broken model folders, and what must hold of each: mrl reads it, or refuses it in one message, soon.

    python -m tests.models.folder_fuzz 700 [first]      # so many folders; prints those that went wrong

Owns the damage to config.json, the safetensors header and index, and the tokenizer's files.
"""

from __future__ import annotations

import copy
import json
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from mrl.checkpoint.formats.hf import INDEX, HfSource, HfTarget, load_from_hf
from mrl.commands.convert.convert import convert
from mrl.config.config import Config, ModelConfig
from mrl.errors import UserError
from mrl.models.presets import arch_from_preset
from mrl.resharding.dtypes import allocate
from mrl.resharding.native import native_layout
from mrl.trainer.run_plan import load_arch_and_tokenizer
from tests.checkpoint.formats.test_hf import write_folder
from tests.data.folders import byte_bpe_folder

LIMIT_S = 20
"""A good folder takes 0.05 s alone."""
MAX_MESSAGE = 2000
"""Characters that anybody would look at."""
PRESETS = ("llama_tiny", "qwen2_tiny", "qwen3_tiny", "phi3_tiny", "mixtral_tiny", "qwen2_moe_tiny", "qwen3_moe_tiny")
SMALL = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 3, 7, 1.5, -0.0, 1e-300, 1e300, float("nan"), float("inf"), 2**31, 2**31 - 1, 2**63,
    10**400, 100_000, 10**9, "", "silu", "2", "\ud800", "\0", "x" * 10_000, [], [1], [[]], ["full_attention"], {},
    ["sliding_attention"], {"rope_type": "yarn"}, {"rope_type": ["llama3"]}, {"rope_type": {}}, {"rope_theta": -1},
    {"rope_type": "llama3", "factor": "8"}, {"rope_type": float("nan")}, {"0": {}},
)  # fmt: skip
TEXTS = (
    b"", b" ", b"null", b"3", b"[]", b'""', b"{", b"{}", b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe{}", b"NaN",
    b'{"a": 1e999}', b'{"vocab_size": ' + b"9" * 5000 + b"}", b"\0" * 64, b"\xef\xbb\xbf{}", b'{"model_type": "llama"}',
    b'{"model_type": ["llama"]}',
)  # fmt: skip


class TooLongError(BaseException):
    """Reading took more than `LIMIT_S`."""


@cache
def originals(preset: str) -> dict[str, bytes]:
    """The files of a whole folder in two parts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "in").mkdir()
        write_folder(arch_from_preset(preset, SMALL, 320), folder / "in")
        byte_bpe_folder(folder / "in", chat_template=None)
        with HfSource(folder / "in") as source:
            convert(source, HfTarget(source.arch, "float32", like=folder / "in", max_file_bytes=30_000), folder / "out")
        return {path.name: path.read_bytes() for path in (folder / "out").iterdir() if path.name != "manifest.json"}


def damaged(number: int) -> dict[str, bytes]:
    """The files of the broken folder of a number."""
    draw = random.Random(f"model folder {number}")
    files = dict(originals(draw.choice(PRESETS)))
    for _ in range(draw.choice((1, 1, 2))):
        draw.choice((_keys, _keys, _keys, _header, _header, _index, _bytes, _bytes, _text, _tokenizer))(draw, files)
    return files


def _keys(draw: random.Random, files: dict[str, bytes], name: str = "config.json") -> None:
    content = _parsed(files.get(name, b"{}"))
    if not isinstance(content, dict):
        return
    for _ in range(draw.choice((1, 1, 2, 4))):
        place = draw.choice([content, *(item for item in content.values() if isinstance(item, dict))])
        key = draw.choice([*place, "sliding_window", "eos_token_id", "rope_scaling", "layer_types", "\ud800", "x"])
        if draw.random() < 0.2:
            place.pop(key, None)
        else:
            place[key] = copy.deepcopy(draw.choice(VALUES))
    files[name] = json.dumps(content).encode()


def _tokenizer(draw: random.Random, files: dict[str, bytes]) -> None:
    _keys(draw, files, draw.choice(("tokenizer.json", "tokenizer_config.json", "generation_config.json")))


def _weights(draw: random.Random, files: dict[str, bytes]) -> str | None:
    names = sorted(name for name in files if name.endswith(".safetensors"))
    return draw.choice(names) if names else None


def _header(draw: random.Random, files: dict[str, bytes]) -> None:
    name = _weights(draw, files)
    if name is None:
        return
    data = files[name]
    end = 8 + int.from_bytes(data[:8], "little")
    header = _parsed(data[8:end])
    if not isinstance(header, dict) or not header:
        return
    key = draw.choice(sorted(header))
    how = draw.randrange(4)
    if how == 0:
        header[key] = copy.deepcopy(draw.choice(VALUES))
    elif how == 1 and isinstance(header[key], dict) and header[key]:
        header[key][draw.choice(sorted(header[key]))] = draw.choice(
            (*VALUES, [0, -4], [2**63, 2**63], [0, 10**30], "F4", "I8")
        )
    elif how == 2:
        header[draw.choice(("", "lm_head.weight", "\ud800", "x" * 5000, "__metadata__"))] = header.pop(key)
    else:
        del header[key]
    text = json.dumps(header).encode()
    files[name] = len(text).to_bytes(8, "little") + text + data[end:]


def _index(draw: random.Random, files: dict[str, bytes]) -> None:
    content = _parsed(files.get(INDEX, b"{}"))
    parts = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(parts, dict) or not parts:
        return
    key = draw.choice(sorted(parts))
    wrong = (*VALUES, "../config.json", "/etc/passwd", "config.json", ".", "..", "a" * 300, "model\n.safetensors")
    if draw.random() < 0.3:
        del parts[key]
    elif draw.random() < 0.2:
        content["weight_map"] = copy.deepcopy(draw.choice(VALUES))
    else:
        parts[key] = copy.deepcopy(draw.choice(wrong))
    files[INDEX] = json.dumps(content).encode()


def _bytes(draw: random.Random, files: dict[str, bytes]) -> None:
    name = draw.choice(sorted(files))
    content = bytearray(files[name])
    how = draw.randrange(4)
    if how == 0 or not content:
        files.pop(name)
    elif how == 1:
        files[name] = bytes(content[: draw.randrange(len(content))])
    elif how == 2:
        files[name] = bytes(content) + draw.randbytes(draw.choice((1, 100)))
    else:
        for _ in range(draw.choice((1, 4, 16))):
            content[draw.randrange(min(len(content), 4000))] = draw.randrange(256)
        files[name] = bytes(content)


def _text(draw: random.Random, files: dict[str, bytes]) -> None:
    files[draw.choice(sorted(files))] = draw.choice(TEXTS)


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def outcome(files: Mapping[str, bytes]) -> tuple[str, str]:
    """How reading such a folder ends: ("read" or "refused" or what is wrong, what was said)."""
    folder = Path(tempfile.mkdtemp(prefix="mrl-folder-"))
    before = signal.signal(signal.SIGALRM, _too_long)
    try:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        signal.alarm(LIMIT_S)
        _read(folder)
    except UserError as error:
        text = str(error)
        if str(folder) not in text:
            return "a message that names no folder", text
        return ("refused", text) if len(text) <= MAX_MESSAGE else ("a long message", text)
    except TooLongError:
        return "hangs", traceback.format_exc()
    except BaseException:  # noqa: BLE001 -- it is what is looked for
        return "traceback", traceback.format_exc()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        shutil.rmtree(folder)
    return "read", ""


def warm_up() -> None:
    """Reads whole folders, so that no import counts as a hang; they must be whole."""
    for preset in PRESETS:
        with tempfile.TemporaryDirectory() as name:
            for file, content in originals(preset).items():
                (Path(name) / file).write_bytes(content)
            _read(Path(name))


def _read(folder: Path) -> None:
    """As `mrl train` reads a model folder."""
    arch, tokenizer = load_arch_and_tokenizer(Config(model=ModelConfig(path=str(folder), dtype="float32")))
    tokenizer.decode(tokenizer.encode("two plus two", prompt=True))
    with HfSource(folder, arch) as source:
        source.check()
    layout = native_layout(arch, 1, 0, "float32")
    load_from_hf(folder, arch, layout, allocate(layout))


def _too_long(number: int, frame: object) -> None:
    raise TooLongError


def main() -> int:
    """Status 1 where anything went wrong."""
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    warm_up()
    began, seen = time.monotonic(), Counter()
    for number in range(first, first + count):
        how, said = outcome(damaged(number))
        seen[how] += 1
        if how not in ("read", "refused"):
            print(f"folder {number}: {how}\n{said[-2500:]}", flush=True)  # noqa: T201
    print(f"{count} folders in {time.monotonic() - began:.0f} s: {dict(seen)}")  # noqa: T201
    return int(bool(set(seen) - {"read", "refused"}))


if __name__ == "__main__":
    sys.exit(main())
