"""Names of the Hugging Face hub: found in a cache, downloaded once for a host, refused with the way out."""

import subprocess
import sys

import pytest
import torch.distributed as dist

from mrl.checkpoint.formats.hub import check_same_models, resolve_hub_models, resolve_model_path
from mrl.config.config import Config, ModelConfig, ReferenceConfig
from mrl.config.hub_cache import is_hub_name
from mrl.errors import UserError
from mrl.models.hf_config import arch_from_folder
from mrl.models.presets import arch_from_preset
from mrl.trainer.run_plan import load_arch_and_tokenizer
from tests import hub_server
from tests.checkpoint.formats.test_hf import write_folder
from tests.data.folders import byte_bpe_folder
from tests.ranks import run_ranks

NAME = "acme/tiny-1.5"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_folder(arch_from_preset("qwen2_tiny", {"num_hidden_layers": 1}, 320), folder)
    (folder / "README.md").write_text("no part of a run")
    return byte_bpe_folder(folder)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The folder that huggingface_hub takes for its cache; nothing is downloaded."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def fill(cache, model, *, without=()):
    """The cache as a download leaves it."""
    root = cache / f"models--{NAME.replace('/', '--')}"
    snapshot = root / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text(COMMIT)
    for path in model.iterdir():
        if path.name not in without:
            (snapshot / path.name).write_bytes(path.read_bytes())
    return snapshot


def named(**model):
    return Config(model=ModelConfig(**model))


@pytest.mark.parametrize("download", [False, True])
def test_a_name_whose_model_is_in_the_cache_becomes_its_folder(download, cache, model):
    snapshot = str(fill(cache, model))
    config = Config(model=ModelConfig(path=NAME, tokenizer=NAME), reference=ReferenceConfig(path=NAME))
    found = resolve_hub_models(config, download=download)
    assert (found.model.path, found.model.tokenizer, found.reference.path) == (snapshot,) * 3


@pytest.mark.parametrize("download", [False, True])
@pytest.mark.parametrize("without", [None, "model.safetensors", "config.json"])
def test_what_the_cache_lacks_is_refused_with_the_command_that_downloads_it(without, download, cache, model):
    if without is not None:
        fill(cache, model, without=(without,))
    with pytest.raises(UserError) as refusal:
        resolve_hub_models(named(path=NAME), download=download)
    message = str(refusal.value)
    assert message.startswith(f"model.path: the folder '{NAME}' does not exist.")
    assert f"hf download {NAME}" in message and str(cache) in message


def test_a_run_reads_structure_and_tokenizer_of_a_name(cache, model):
    fill(cache, model)
    arch, tokenizer = load_arch_and_tokenizer(named(path=NAME))
    assert arch == arch_from_folder(model) and tokenizer.decode(tokenizer.encode("two")) == "two"


def test_a_tokenizer_needs_no_weights(cache, model):
    snapshot = fill(cache, model, without=("model.safetensors", "config.json"))
    assert resolve_hub_models(named(preset="qwen2_tiny", tokenizer=NAME)).model.tokenizer == str(snapshot)


@pytest.mark.parametrize("text", ["char:0123/+", "models", "./acme/tiny", "/acme/tiny", "a/b/c", "acme/", "~/tiny"])
def test_other_texts_are_no_names(text, cache):
    assert not is_hub_name(text)


def test_a_folder_that_is_there_is_no_name(tmp_path, monkeypatch):
    (tmp_path / "acme" / "tiny").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert is_hub_name(NAME) and not is_hub_name("acme/tiny")


def agree(names):
    try:
        check_same_models(named(path=names[dist.get_rank()]))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_with_other_states_of_a_model_are_refused_on_every_rank():
    assert run_ranks(2, agree, ["/a/snapshots/01", "/b/snapshots/01"]) == ["", ""]
    first, second = run_ranks(2, agree, ["/a/snapshots/01", "/a/snapshots/02"])
    assert first == second and first.startswith("rank 1 has another revision of a model")


@pytest.fixture
def hub(model):
    with hub_server.serve("models", NAME, COMMIT, {path.name: path.read_bytes() for path in model.iterdir()}) as server:
        yield server


RANK = """
from mrl.config.config import Config, ModelConfig
from mrl.checkpoint.formats.hub import resolve_hub_models
print(resolve_hub_models(Config(model=ModelConfig(path="acme/tiny-1.5")), download=True).model.path)
"""


@pytest.mark.slow
def test_ranks_of_a_host_download_once_what_a_run_needs(hub, tmp_path):
    asked = hub_server.client_environment(hub, tmp_path / "home")
    ranks = [
        subprocess.Popen([sys.executable, "-c", RANK], env=asked, stdout=subprocess.PIPE, text=True) for _ in range(2)
    ]
    folders = {rank.communicate()[0].strip() for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert len(folders) == 1 and COMMIT in folders.pop()
    assert sorted(hub.sent) == sorted(set(hub.files) - {"README.md"})


def test_a_mistyped_folder_is_said_not_to_exist_and_the_nearest_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "models" / "qwen2").mkdir(parents=True)
    for name in ("models/qwn2", "modles/qwen2"):
        with pytest.raises(UserError, match=rf"the folder '{name}' does not exist. Did you mean 'models/qwen2'\?"):
            resolve_model_path("model.path", name)
