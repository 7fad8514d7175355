"""Models named as on the Hugging Face hub, `organisation/name`: their folders in the hub's cache.

It decides which files of a repository a run needs; `config/hub_cache.py` finds or downloads them. Names of data sets
are those of `data/hub_files.py`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from mrl.checkpoint.formats.hf import INDEX, SINGLE
from mrl.config.config import Config
from mrl.config.did_you_mean import did_you_mean_path
from mrl.config.hub_cache import MissingSnapshotError, cache_folder, find_snapshot, is_hub_name
from mrl.config.json_file import read_json
from mrl.data.hub_files import fetch_data_files
from mrl.errors import UserError
from mrl.models.hf_config import TOKENIZER_FILES

TEACHERS = "distillation.teacher_models"
_WEIGHTS = ("*.safetensors", INDEX)
_FILES = ("config.json", *TOKENIZER_FILES)


def resolve_hub_names(config: Config, *, download: bool = False) -> Config:
    """Replaces the hub names of models in a config by local folders, and checks that the data files are cached.

    Args:
        config: Config as loaded.
        download: Download what the cache lacks; False: refuse it.

    Raises:
        UserError: The cache lacks something, and `download` is False or the download failed.
    """
    fetch_data_files(config.data, download=download)
    return resolve_hub_models(config, download=download)


def resolve_hub_models(config: Config, *, download: bool = False, weights: bool = True) -> Config:
    """Replaces the hub names in a config by local folders.

    Processes of a host that call it concurrently wait for one of them to download, as do hosts that share the cache.

    Args:
        config: `model.path`, `model.tokenizer`, `reference.path`, `critic.path`, `reward.model.path` and teachers'
            `model_path` may be hub names; an existing folder takes precedence.
        download: Download models that the cache lacks; False: refuse them.
        weights: Models need their weights; False: only config.json and tokenizer.

    Raises:
        UserError: The cache lacks the model, and `download` is False or the download failed.
    """

    def folder(key: str, text: str | None, *, needs_weights: bool = weights) -> str | None:
        return resolve_model_path(key, text, download=download, weights=needs_weights)

    model, reference, critic, scorer = config.model, config.reference, config.critic, config.reward.model
    path = folder("model.path", model.path)
    model = replace(model, path=path, tokenizer=folder("model.tokenizer", model.tokenizer, needs_weights=False))
    reference = replace(reference, path=folder("reference.path", reference.path))
    critic = replace(critic, path=folder("critic.path", critic.path))
    scorer = replace(scorer, path=folder("reward.model.path", scorer.path))
    teachers = [
        replace(teacher, model_path=folder(f"{TEACHERS}[{index}].model_path", teacher.model_path))
        for index, teacher in enumerate(config.distillation.teacher_models)
    ]
    distillation = replace(config.distillation, teacher_models=teachers)
    reward = replace(config.reward, model=scorer)
    return replace(config, model=model, reference=reference, critic=critic, distillation=distillation, reward=reward)


def resolve_model_path(key: str, text: str | None, *, download: bool = False, weights: bool = True) -> str | None:
    """Returns the local folder of one of the paths of `resolve_hub_models`; other paths are returned unchanged.

    Args:
        key: Config key, for messages.
        text: Value of the key.
        download: Download a model that the cache lacks; False: refuse it.
        weights: Require weights; False: only the tokenizer.

    Raises:
        UserError: The cache lacks the model, and `download` is False or the download failed.
    """
    if text is None or not is_hub_name(text):
        return text
    return str(_resolve(key, text, weights=weights, download=download))


def check_same_models(config: Config) -> None:
    """Collective over the job: checks that hosts with separate caches have the same revision of each model.

    Raises:
        UserError: The ranks' folders, which the hub's cache names after the revision, differ.
    """
    from mrl.distributed.collectives import check_same_on_all_ranks

    paths = [config.model.path, config.model.tokenizer, config.reference.path, config.critic.path]
    paths.append(config.reward.model.path)
    paths += [teacher.model_path for teacher in config.distillation.teacher_models]
    check_same_on_all_ranks(
        "\n".join(Path(path).name for path in paths if path),
        "has another revision of a model from the Hugging Face hub than rank 0 (model.path, model.tokenizer, "
        "reference.path, critic.path, reward.model.path or a teacher's)",
        "Download it again on every host, or give a folder that all hosts share.",
    )


def _resolve(key: str, name: str, *, weights: bool, download: bool) -> Path:
    def is_complete(folder: Path) -> bool:
        return _is_complete(folder, weights=weights)

    try:
        folder = find_snapshot(name, [*_FILES, *(_WEIGHTS if weights else ())], is_complete, download=download)
    except MissingSnapshotError as error:
        raise _not_found_error(key, name, str(error)) from error
    if not is_complete(folder):
        raise _not_found_error(key, name, f"it has no {'config.json or safetensors' if weights else 'tokenizer'}")
    return folder


def _is_complete(folder: Path, *, weights: bool) -> bool:
    if not weights:
        return any((folder / file).is_file() for file in TOKENIZER_FILES)
    return (folder / "config.json").is_file() and ((folder / SINGLE).is_file() or _has_all_parts(folder))


def _has_all_parts(folder: Path) -> bool:
    if not (folder / INDEX).is_file():
        return False
    parts = read_json(folder / INDEX).get("weight_map")
    return isinstance(parts, dict) and all((folder / str(part)).is_file() for part in parts.values())


def _not_found_error(key: str, name: str, reason: str) -> UserError:
    return UserError(
        f"{key}: the folder '{name}' does not exist.{did_you_mean_path(name)} As a name on the Hugging Face hub, "
        f"{reason}. Run `hf download {name}` where the hub can be reached, with this cache "
        f"({cache_folder()}; HF_HUB_CACHE selects another one), or give a local folder with the model."
    )
