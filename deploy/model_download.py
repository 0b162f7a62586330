"""Fetches models from the hub: those of a cluster, once, before its processes start, or one into a directory.

The processes of a cluster then read the local copy and ask the hub nothing, so that all of them, and those restarted
later, have the same revision.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from pathlib import Path

from common.errors import ConfigError
from common.pod.config import ADAPTER_FILES
from deploy.cluster_config import ModelSource
from deploy.terminal import Terminal

MODEL_FILES = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]  # those that pods and router ask for
_LOCAL_COPY_ONLY = {"HF_HUB_OFFLINE": "1"}


def fetch_models(sources: Sequence[ModelSource], terminal: Terminal) -> dict[str, str]:
    """Downloads what is not there yet. Returns what to add to the environment of the processes.

    Raises ConfigError for a model that is neither a directory nor on the hub.
    """
    remote = [source for source in sources if not _is_directory(source.model, source.setting)]
    for source in remote:
        _download(source, terminal)
    return _LOCAL_COPY_ONLY if remote else {}


def check_models(sources: Sequence[ModelSource]) -> None:
    """Raises ConfigError for a model that can be neither a directory nor on the hub, which is not asked."""
    for source in sources:
        _is_directory(source.model, source.setting)


def fetch_to(source: ModelSource, directory: Path, terminal: Terminal) -> None:
    """Downloads a model into `directory`; files that are there already and have not changed are kept.

    Raises ConfigError for one that is not on the hub, and for a directory that cannot be written.
    """
    if _is_directory(source.model, source.setting):
        raise ConfigError(f"{source.setting}: expected the id of a model on the hub, got the directory {source.model}")
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--directory: cannot make {directory}: {error.strerror}", param="directory") from error
    _download(source, terminal, directory)


def _is_directory(model: str, option: str) -> bool:
    """Whether it is one; False: a hub id. Raises ConfigError, which names `option`, if it can be neither."""
    path = Path(model).expanduser()
    if path.is_dir():
        return True
    if path.exists():
        raise ConfigError(f"{option}: {path} is not a directory", param="model")
    if model.startswith((".", "/", "~")) or model.count("/") > 1:
        raise ConfigError(f"{option}: {model} does not exist", param="model")
    return False


def _download(source: ModelSource, terminal: Terminal, into: Path | None = None) -> None:
    """`into` is a directory for the files; None: the hub library's cache."""
    option = source.setting
    from huggingface_hub import snapshot_download  # only now: it is not needed for a local model
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not terminal.shows_progress:
        disable_progress_bars()
    name = source.model if source.revision is None else f"{source.model} at {source.revision}"
    terminal.say(f"Fetching {name}")
    started = time.monotonic()
    try:
        directory = snapshot_download(
            source.model,
            revision=source.revision,
            allow_patterns=ADAPTER_FILES if source.is_adapter else MODEL_FILES,
            local_dir=into,
        )
    except RepositoryNotFoundError as error:
        raise ConfigError(
            f"{option}: {source.model} is neither a local directory nor a model on the hub that HF_TOKEN may read",
            param="model",
        ) from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"--revision: {source.model} has none named {source.revision}", param="revision") from error
    except Exception as error:  # third-party code over a network: any exception means that there is no model
        detail = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{option}: {name} cannot be fetched from the hub: {detail}", param="model") from error
    gc.collect()  # the library's progress bars draw their last line when they are collected
    terminal.say(f"  in {time.monotonic() - started:.1f} s: {directory}")
