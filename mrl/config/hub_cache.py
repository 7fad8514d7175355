"""Repositories of the Hugging Face hub in this host's cache; one process of a host downloads what the cache lacks.

Cache, endpoint, token and offline mode are those of huggingface_hub (HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN,
HF_HUB_OFFLINE). `checkpoint/formats/hub.py` uses this for models and `data/hub_files.py` for data sets.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from mrl.errors import first_line

Kind = Literal["model", "dataset"]

_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

NOT_CACHED = "it is missing or incomplete in the cache"


class MissingSnapshotError(LookupError):
    """Repository that is not in the cache and could not be downloaded; the message says why."""


def is_hub_name(text: str) -> bool:
    """Returns whether a path may be a hub name: two words with one slash, and no such local file or folder."""
    return _NAME.fullmatch(text) is not None and not os.path.exists(text)


def find_snapshot(
    repo: str,
    patterns: Sequence[str],
    is_complete: Callable[[Path], bool],
    *,
    kind: Kind = "model",
    revision: str | None = None,
    download: bool = False,
) -> Path:
    """Returns the cached folder of a repository.

    Processes of a host that call it concurrently wait for one of them to download, as do hosts that share the cache.

    Args:
        repo: OWNER/NAME.
        patterns: Shell patterns of the files that are needed.
        is_complete: Returns whether a folder has all files that are needed.
        kind: "model" or "dataset".
        revision: Branch, tag or commit; None for the newest.
        download: Download what the cache lacks.

    Returns:
        The folder. After a download it may be incomplete, if the repository is.

    Raises:
        MissingSnapshotError: The cache lacks it, and `download` is False or the download failed.
    """
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.utils import WeakFileLock

    def fetch(*, local: bool) -> Path:
        return Path(
            snapshot_download(
                repo, repo_type=kind, revision=revision, allow_patterns=list(patterns), local_files_only=local
            )
        )

    def cached() -> Path | None:
        try:
            folder = fetch(local=True)
        except Exception:  # noqa: BLE001 -- as below; a download reports problems of the cache
            return None
        return folder if is_complete(folder) else None

    if not download:
        found = cached()
        if found is None:
            raise MissingSnapshotError(NOT_CACHED)
        return found
    try:
        prefix = "" if kind == "model" else f"{kind}--"
        lock = Path(constants.HF_HUB_CACHE) / ".locks" / f"mrl--{prefix}{repo.replace('/', '--')}.lock"
        lock.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(lock):  # later processes find what the first one has downloaded
            return cached() or fetch(local=False)
    except Exception as error:  # the hub's client raises many kinds: its own, its HTTP library's, the disk's
        raise MissingSnapshotError(_refusal(error, repo, kind)) from error


def _refusal(error: Exception, repo: str, kind: Kind) -> str:
    """Returns why a download failed, with the remedy where the hub refuses access."""
    from huggingface_hub import constants
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    if isinstance(error, GatedRepoError):
        return (
            f"it is gated: accept its terms at {page}, then log in with the same account (`hf auth login`, or HF_TOKEN "
            "with a token that may read gated repositories)"
        )
    if isinstance(error, RepositoryNotFoundError):
        return f"there is no {page}, or it is private and needs the token of an account with access (HF_TOKEN)"
    return f"its download failed: {first_line(error)[:300].rstrip('.')}"


def cache_folder() -> str:
    """Returns the hub's cache, for messages."""
    from huggingface_hub import constants

    return str(constants.HF_HUB_CACHE)
