"""Where a checkpoint's files are: a local folder, or a download from the hub.

Knows paths and the hub's client; does not read what is in the files.
"""

from __future__ import annotations

from pathlib import Path

from outrider.errors import CheckpointError, OutriderError
from outrider.models.presets import is_preset

_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "*.txt")


def resolve_checkpoint(model: str, revision: str | None = None) -> Path:
    """The folder that holds the checkpoint `model`.

    An existing folder is returned as it is and the network is never touched, and so is the name
    of a preset, behind which there are no files. Anything else that can be a hub id (`name` or
    `owner/name`) is downloaded, or found in the hub's local cache.

    Args:
        model: folder, hub id or preset.
        revision: branch, tag or commit, for hub ids.

    Raises:
        CheckpointError: a path that does not exist or is not a folder, a revision of what has
            none, or a download that failed.
    """
    path = user_path(CheckpointError, "model", model)
    try:
        is_folder, exists = path.is_dir(), path.exists()
    except OSError as error:
        raise CheckpointError(f"model cannot be looked at ({error.strerror})", got=model) from error
    if is_folder or is_preset(model):
        if revision is not None:
            raise CheckpointError(
                "revision of a local folder or a preset",
                got=revision,
                allowed="None: only models on the hub have revisions",
                hint="leave the revision out, or name the model by its hub id",
            )
        return path
    if exists:
        raise CheckpointError(
            "model is a file", got=model, allowed="a folder", hint="name the folder that holds it"
        )
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise CheckpointError(
            "model folder does not exist",
            got=model,
            allowed="an existing folder, or a hub id of the form owner/name",
            hint="check the path",
        )
    return _download(model, revision)


def user_path(error: type[OutriderError], what: str, name: str) -> Path:
    """A path in which ~ and ~user stand for home folders; an error where there is no such user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as reason:
        raise error(
            f"{what}: there is no home folder for this user",
            got=name,
            hint="write the path out",
        ) from reason


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        folder = snapshot_download(model, revision=revision, allow_patterns=list(_PATTERNS))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model is no local folder and could not be fetched from the hub ({error})",
            got=model if revision is None else f"{model} at {revision}",
            hint="check the name and the connection, or give a local folder",
        ) from error
    return Path(folder)
