"""The page for users of TRL: its names lead to keys that exist, and its scripts train."""

import json
import os
import re
import subprocess
import sys
from dataclasses import fields

import pytest

from mrl.config.config import Config
from mrl.config.keys import dotted_keys
from mrl.config.verl_keys.foreign_names import TRL
from tests.data.folders import byte_bpe_folder
from tests.e2e import runs
from tests.source import PACKAGE, ROOT

PAGE = (PACKAGE / "docs" / "from_trl.md").read_text(encoding="utf-8")
SCRIPTS = dict(re.findall(r"<!-- trl: (\w+) -->\n```python\n(.*?)```", PAGE, re.DOTALL))
ROWS = re.findall(r"^\| `(\w+)` \| ([\w, ]+) \| `([\w.]+)` \|(.*)\|$", PAGE, re.MULTILINE)

MESSAGES = [{"role": "user", "content": "What is two plus two?"}]
ANSWER = {"role": "assistant", "content": "four"}
DATA = {
    "prompts.jsonl": {"prompt": MESSAGES, "answer": "four"},
    "chats.jsonl": {"messages": [*MESSAGES, ANSWER]},
    "pairs.jsonl": {"prompt": MESSAGES, "chosen": [ANSWER], "rejected": [{**ANSWER, "content": "two"}]},
}


def test_names_lead_to_keys_as_error_messages_have_them():
    assert len(ROWS) == PAGE.count("\n| `")
    keys = set(dotted_keys(Config))
    assert [to for _, _, to, _ in ROWS if to not in keys] == []
    noted = re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)(?:=\w+)?`", "".join(text for *_, text in ROWS))
    assert noted and set(noted) <= keys
    own = {name: to for name, trainers, to, _ in ROWS if trainers != "DPO"}
    assert {name: to for name, to in own.items() if TRL.get(name, to) != to} == {}
    assert set(TRL) - set(own) == set()


def test_the_names_are_fields_of_trl():
    try:
        from trl import DPOConfig, GRPOConfig, SFTConfig
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"TRL does not import: {error}")
    configs = {"GRPO": GRPOConfig, "SFT": SFTConfig, "DPO": DPOConfig}
    for name, trainers, _, _ in ROWS:
        for trainer in configs if trainers == "all" else trainers.split(", "):
            known = {field.name for field in fields(configs[trainer])} | {"reward_funcs", "max_prompt_length"}
            assert name in known, (name, trainer)


def test_scripts_have_ten_lines_at_most():
    assert SCRIPTS.keys() == {"grpo", "sft", "dpo"}
    assert max(len([line for line in text.splitlines() if line.strip()]) for text in SCRIPTS.values()) <= 10


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCRIPTS)
def test_a_script_trains(kind, tmp_path):
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 2048}
    config = Qwen2Config(vocab_size=320, num_attention_heads=4, num_key_value_heads=2, **sizes)
    Qwen2ForCausalLM(config).save_pretrained(str(byte_bpe_folder(tmp_path / "model")))
    for file, row in DATA.items():
        (tmp_path / file).write_text(f"{json.dumps(row)}\n" * 16)
    script = SCRIPTS[kind].replace("Qwen/Qwen2.5-0.5B-Instruct", "model").replace('"num_steps": 100', '"num_steps": 2')
    script = script.replace('"rollout": {"n": 8}', '"rollout": {"n": 2, "response_length": 8}')
    (tmp_path / "script.py").write_text(script.replace("config = {", 'config = {"run": {"output_dir": "run"}, ', 1))
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=runs.TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [row for row in runs.metrics(tmp_path) if row["phase"] == "train"]
    assert [row["step"] for row in rows] == [1, 2]
    assert ("reward/brief/mean" in rows[-1]) == (kind == "grpo")
