"""YAML files that cannot be read are refused with the line and the cause."""

import pytest

from mrl.config.config import load
from mrl.config.did_you_mean import did_you_mean_path
from mrl.errors import UserError

TEXT = "run:\n  output_dir: café\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (TEXT.encode("utf-16"), "is not UTF-8 text: byte 0xff at position 0"),
        (TEXT.encode("latin-1"), "is not UTF-8 text: byte 0xe9"),
        (b"run:\n\toutput_dir: x\n", "line 2 is indented with a tab"),
        (b"run:\n  output_dir: x\n \tseed: 1\n", "line 3 is indented with a tab"),
        (b"run: [\n", "is not readable YAML: while parsing"),
    ],
)
def test_the_cause_is_named(tmp_path, content, message):
    file = tmp_path / "a.yaml"
    file.write_bytes(content)
    with pytest.raises(UserError, match=message):
        load(file)
    file.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert load(file).run.output_dir == "café"


def test_the_nearest_path_is_offered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "qwen2-0.5b").mkdir(parents=True)
    (tmp_path / "models" / "llama").mkdir()
    offered = {
        "models/qwen-0.5b": "models/qwen2-0.5b",
        "model/llama": "models/llama",
        "modls/lama": "models/llama",
        f"{tmp_path}/models/lama": f"{tmp_path}/models/llama",
        "models/Llama": "models/llama",
    }
    for path, near in offered.items():
        assert did_you_mean_path(path) == f" Did you mean '{near}'?"
    for path in ("zzz", "models/zzz", "", "models/llama"):
        assert did_you_mean_path(path) == ""
    with pytest.raises(UserError, match="Did you mean 'run.yaml'"):
        (tmp_path / "run.yaml").write_text("{}")
        load("rnu.yaml")
