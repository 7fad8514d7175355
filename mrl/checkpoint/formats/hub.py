"""Models named as on the Hugging Face hub, `organisation/name`: their folders in the hub's cache.

It decides which files of a repository a run needs, and lets only one process of a host download them. Cache, endpoint,
token and offline mode are those of huggingface_hub (HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN, HF_HUB_OFFLINE).
"""

from __future__ import annotations

import hashlib
import os.path
import re
from dataclasses import replace
from pathlib import Path

from mrl.checkpoint.formats.hf import INDEX, SINGLE
from mrl.config.config import Config
from mrl.config.did_you_mean import did_you_mean_path
from mrl.errors import UserError, first_line
from mrl.models.hf_config import TOKENIZER_FILES, read_json

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
TEACHERS = "distillation.teacher_models"
_WEIGHTS = ("*.safetensors", INDEX)
_FILES = ("config.json", *TOKENIZER_FILES)


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


def is_hub_name(text: str) -> bool:
    """Returns whether a path may be a hub name: two words with one slash, and no such local folder."""
    return _NAME.fullmatch(text) is not None and not os.path.exists(text)


def check_same_models(config: Config) -> None:
    """Collective over the job: checks that hosts with separate caches have the same revision of each model.

    Raises:
        UserError: The ranks' folders, which the hub's cache names after the revision, differ.
    """
    import torch

    from mrl.distributed.collectives import all_gather_ragged, world_group

    paths = [config.model.path, config.model.tokenizer, config.reference.path, config.critic.path]
    paths.append(config.reward.model.path)
    paths += [teacher.model_path for teacher in config.distillation.teacher_models]
    folders = [Path(path).name for path in paths if path]
    digest = int.from_bytes(hashlib.sha256("\n".join(folders).encode()).digest()[:7], "big")
    found = all_gather_ragged(torch.tensor([digest]), world_group()).tolist()
    other = [rank for rank, value in enumerate(found) if value != found[0]]
    if other:
        error = UserError(
            f"rank {other[0]} has another revision of a model from the Hugging Face hub than rank 0 (model.path, "
            "model.tokenizer, reference.path, critic.path, reward.model.path or a teacher's). Download it again on "
            "every host, or give a folder that all hosts share."
        )
        error.on_all_ranks = True
        raise error


def _resolve(key: str, name: str, *, weights: bool, download: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import WeakFileLock

    if not download:
        cached = _cached(name, weights=weights)
        if cached is None:
            raise _not_found_error(key, name, "it is missing or incomplete in the cache")
        return cached
    try:
        lock = Path(constants.HF_HUB_CACHE) / ".locks" / f"mrl--{name.replace('/', '--')}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):  # later processes find what the first one has downloaded
            folder = _cached(name, weights=weights)
            if folder is None:
                folder = Path(snapshot_download(name, allow_patterns=_patterns(weights=weights)))
    except Exception as error:  # the hub's client raises many kinds: its own, its HTTP library's, the disk's
        raise _not_found_error(key, name, f"its download failed: {first_line(error)[:300].rstrip('.')}") from error
    if not _is_complete(folder, weights=weights):
        raise _not_found_error(key, name, f"it has no {'config.json or safetensors' if weights else 'tokenizer'}")
    return folder


def _patterns(*, weights: bool) -> list[str]:
    return [*_FILES, *(_WEIGHTS if weights else ())]


def _cached(name: str, *, weights: bool) -> Path | None:
    """Returns the newest cached snapshot if it has all files, else None."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(name, allow_patterns=_patterns(weights=weights), local_files_only=True))
    except Exception:  # noqa: BLE001 -- as in `_resolve`; a download reports problems of the cache
        return None
    return folder if _is_complete(folder, weights=weights) else None


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
    from huggingface_hub import constants

    return UserError(
        f"{key}: the folder '{name}' does not exist.{did_you_mean_path(name)} As a name on the Hugging Face hub, "
        f"{reason}. Run `hf download {name}` where the hub can be reached, with this cache "
        f"({constants.HF_HUB_CACHE}; HF_HUB_CACHE selects another one), or give a local folder with the model."
    )
