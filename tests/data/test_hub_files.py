"""Data files named as on the hub: found in a cache, downloaded once for a host, refused with the way out."""

import subprocess
import sys

import pytest

from mrl.config.config import DataConfig
from mrl.data.hub_files import fetch_data_files, is_hub_location, is_local, parse_location, with_paths
from mrl.errors import UserError
from tests import hub_server

NAME = "acme/sums"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROWS = b'{"prompt": "1+1", "answer": "2"}\n'


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that huggingface_hub takes for its cache; nothing is downloaded."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def fill(cache, *paths, name=NAME):
    root = cache / f"datasets--{name.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for path in paths:
        file = root / "snapshots" / COMMIT / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(ROWS)
    return root / "snapshots" / COMMIT


def found(train, val=(), **kwargs):
    data = DataConfig(train_files=[train], val_files=list(val))
    fetch_data_files(data, **kwargs)
    data = with_paths(data)
    return data.train_files, data.val_files


@pytest.mark.parametrize(
    "paths",
    [
        ["train.jsonl", "test.jsonl"],
        ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet", "data/test-00000-of-00001.parquet"],
        ["train/0000.parquet", "train/0001.parquet", "validation/0000.parquet"],
        ["sums_train.txt", "train.json", "test.json", "validation.json", "dev/a.csv"],
    ],
)
def test_a_name_becomes_the_files_of_its_split(paths, cache):
    folder = fill(cache, *paths)
    train, val = found(NAME, [f"hf://datasets/{NAME}"])
    readable = [path for path in paths if not path.endswith((".txt", ".csv"))]
    held_out = [path for path in readable if "validation" in path] or [path for path in readable if "test" in path]
    assert train == [str(folder / path) for path in readable if "train" in path]
    assert val == [str(folder / path) for path in held_out]


@pytest.mark.parametrize("location", ["main/train-*.parquet", "*/train-*", "main/train-00000-of-00001.parquet"])
@pytest.mark.parametrize("revision", ["", "@main", f"@{COMMIT}"])
def test_a_pattern_names_files_and_may_have_a_revision(location, revision, cache):
    folder = fill(cache, "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet")
    assert found(f"hf://datasets/{NAME}{revision}/{location}")[0] == [str(folder / "main/train-00000-of-00001.parquet")]


def test_the_files_of_a_public_set_are_known(cache):
    files = [f"{config}/{side}-00000-of-00001.parquet" for config in ("main", "socratic") for side in ("train", "test")]
    folder = fill(cache, *files, name="openai/gsm8k")
    train, val = found("openai/gsm8k", ["openai/gsm8k"])
    assert (train, val) == ([str(folder / files[0])], [str(folder / files[1])])


def test_local_files_stay_and_keep_their_place(cache, tmp_path):
    (tmp_path / "acme").mkdir()
    (tmp_path / "acme" / "sums").write_bytes(ROWS)
    data = DataConfig(train_files=["b.jsonl", NAME, "data/a.parquet"])
    assert with_paths(data) == data


@pytest.mark.parametrize("text", ["a.jsonl", "data/train.jsonl", "/data/train", "./data/x", "a/b/c", "data/x.parquet"])
def test_other_texts_are_paths(text, cache):
    assert not is_hub_location(text)


@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize(
    "paths", [None, ["test.jsonl"], ["data/train-00000-of-00002.parquet"], ["a/train.csv"]], ids=str
)
def test_what_the_cache_lacks_is_refused_with_the_command_that_downloads_it(paths, download, cache):
    if paths is not None:
        fill(cache, *paths)
    with pytest.raises(UserError) as refusal:
        found(NAME, download=download)
    message = str(refusal.value)
    assert message.startswith(f"data.train_files: '{NAME}'")
    assert f"hf download --repo-type dataset {NAME}" in message and str(cache) in message
    assert not is_local("data.train_files", NAME)


def test_several_versions_are_listed(cache):
    fill(cache, "hard/train.jsonl", "easy/train.jsonl")
    with pytest.raises(UserError, match=rf"hf://datasets/{NAME}/easy/\*, hf://datasets/{NAME}/hard/\*"):
        found(NAME)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hf://acme/sums", "hf://datasets/OWNER/NAME"),
        ("hf://datasets/acme", "hf://datasets/OWNER/NAME"),
        ("hf://datasets/acme/sums/../../x", "hf://datasets/OWNER/NAME"),
        ("hiyouga/geometry3k", "images"),
        ("math-ai/aime25", "no training rows"),
    ],
)
def test_locations_that_cannot_be_used_are_refused(text, said, cache):
    with pytest.raises(UserError, match=said):
        found(text)


def test_the_parts_of_a_location_are_read():
    where = parse_location("data.train_files", f"hf://datasets/{NAME}@v1.0/a/b-*.parquet")
    assert (where.repo, where.revision, where.pattern) == (NAME, "v1.0", "a/b-*.parquet")


RANK = """
from mrl.config.config import DataConfig
from mrl.data.hub_files import fetch_data_files, with_paths
fetch_data_files(data := DataConfig(train_files=["acme/sums"]), download=True)
print(*with_paths(data).train_files)
"""


@pytest.mark.slow
def test_ranks_of_a_host_download_once_the_files_of_a_side(tmp_path):
    stored = dict.fromkeys(("data/train.jsonl", "data/test.jsonl", "README.md"), ROWS)
    with hub_server.serve("datasets", NAME, COMMIT, stored) as server:
        asked = hub_server.client_environment(server, tmp_path / "home")
        ranks = [
            subprocess.Popen([sys.executable, "-c", RANK], env=asked, stdout=subprocess.PIPE, text=True)
            for _ in range(2)
        ]
        files = {rank.communicate()[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(files) == 1 and files.pop().endswith(f"snapshots/{COMMIT}/data/train.jsonl")
    assert server.sent == ["data/train.jsonl"]
