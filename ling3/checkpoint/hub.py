"""Finds a checkpoint: the one in the package, a directory, or a repository on the Hugging Face hub."""

import importlib.resources
import os
import pathlib
import re
from collections.abc import Sequence

from ling3.checkpoint import replacing

GGUF = ".gguf"
"""The ending of the names of GGUF files."""
CONFIGS = ("tiny", "flash")
"""Published models whose `config.json` is in the package, without weights."""


def resolve(path: str | os.PathLike[str], allow_patterns: Sequence[str], revision: str | None = None) -> pathlib.Path:
    """The local directory of the checkpoint that `path` names, downloaded first when it is only on the hub.

    A GGUF file is a checkpoint too, on disk, or on the hub as `owner/name:file.gguf` (of a split set the first file).
    Its directory is a temporary one (`gguf_checkpoint.directory`, whose errors this raises, too).

    `"nano"` is always the checkpoint in the package (write `"./nano"` for a directory of that name). Otherwise an
    existing directory is used, or for `"tiny"` and `"flash"` the package's copy of the published `config.json`. A path
    that does not exist and cannot be a hub id (a `pathlib.Path`, a leading `.`, `/` or `~`, more than one slash) is an
    error, without network access. Anything else is a hub id, `owner/name`: only its files that match `allow_patterns`
    are fetched, into the hub's cache, with progress on stderr, at `revision` (a branch, tag or commit; `main` by
    default). If a `save` to a local directory was killed while it moved its files, it is first completed or undone.

    Raises FileNotFoundError if nothing has that name or the hub cannot be reached, NotADirectoryError if `path` is a
    file, PermissionError if the repository is gated, ValueError for an invalid name or for a `revision` of a local
    directory, and other OSErrors if a killed `save` can be neither completed nor undone.
    """
    place = _local(path)
    if place is not None and revision is not None:
        raise ValueError(f"revision: found {revision!r} for {place}, which is no hub repository; leave it out")
    if place is None:
        place = _fetched(path, allow_patterns, revision)[1]
    if place.is_dir():
        return place
    # Only a GGUF file pays for this import.
    from ling3.checkpoint import gguf_checkpoint  # noqa: PLC0415

    return gguf_checkpoint.directory(place)


def pin(path: str | os.PathLike[str], revision: str | None = None) -> str | None:
    """The commit that `revision` of the hub repository `path` points to now; None if `path` is local.

    Files fetched one after the other at this commit belong to one snapshot even if the branch moves in between.
    Fetches `config.json`, or the GGUF file. Raises what `resolve` raises.
    """
    if _local(path) is None:
        return _fetched(path, ("config.json",), revision)[0].name
    resolve(path, ("config.json",), revision)
    return None


def _fetched(
    path: str | os.PathLike[str], allow_patterns: Sequence[str], revision: str | None
) -> tuple[pathlib.Path, pathlib.Path]:
    """The snapshot of a hub id, and the place in it that the id names: itself, or a GGUF file."""
    repository, _, file = os.fspath(path).partition(":")
    # A split set is given by its first file, and fetched as a whole.
    patterns = [re.sub(r"-00001-of-(?=\d{5}\.gguf$)", "-?????-of-", file)] if file else list(allow_patterns)
    snapshot = _download(repository, patterns, revision)
    if file and not (snapshot / file).is_file():
        raise FileNotFoundError(f"the hub repository {repository!r} has no file {file!r}: correct its name")
    return snapshot, snapshot / file


def lasting(path: str | os.PathLike[str]) -> str:
    """The name of a checkpoint that holds in every working directory: an absolute path, or its hub id."""
    directory = _local(path)
    return os.fspath(path) if directory is None else str(directory.absolute())


def _local(path: str | os.PathLike[str]) -> pathlib.Path | None:
    """The directory or the GGUF file that `path` names; None for a hub id."""
    name = os.fspath(path)
    if name == "nano":
        return _packaged(name)
    if not name or "\0" in name:
        raise ValueError(f"{name!r} names no checkpoint: give a directory, a hub id such as 'owner/name', or 'nano'")

    # Unlike pathlib's methods, these do not raise for an unknown user or a name that is too long.
    directory = pathlib.Path(os.path.expanduser(name))  # noqa: PTH111
    if os.path.isdir(directory):  # noqa: PTH112
        replacing.recover(directory)
        return directory
    if name in CONFIGS:
        return _packaged(name)
    if os.path.exists(directory):  # noqa: PTH110
        if directory.suffix == GGUF:
            return directory
        raise NotADirectoryError(
            f"{directory} is a file: give the directory that holds config.json and the weights, or a {GGUF} file"
        )
    repository, _, file = name.partition(":")
    # On Windows a path has backslashes, which no hub id has.
    local = isinstance(path, os.PathLike) or name.startswith((".", "/", "~")) or "\\" in name
    if local or repository.count("/") > 1 or repository.endswith(GGUF):
        kind = "GGUF file" if name.endswith(GGUF) else "checkpoint directory"
        raise FileNotFoundError(f"no {kind} at {directory.absolute()}")
    if file and not file.endswith(GGUF):
        raise ValueError(f"{name!r}: names the file {file!r} of a hub repository; expected one that ends in {GGUF}")
    return None


def _packaged(name: str) -> pathlib.Path:
    directory = pathlib.Path(str(importlib.resources.files("ling3") / "checkpoints" / name))
    if not directory.is_dir():
        raise FileNotFoundError(f"the {name!r} checkpoint is missing from this installation ({directory}): reinstall")
    return directory


def _download(repo_id: str, allow_patterns: list[str], revision: str | None) -> pathlib.Path:
    if revision == "":
        raise ValueError("revision: found '', expected a branch, a tag or a commit")
    # Only a download pays for this import.
    import huggingface_hub  # noqa: PLC0415
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        return pathlib.Path(
            huggingface_hub.snapshot_download(repo_id, revision=revision, allow_patterns=allow_patterns)
        )
    except errors.HFValidationError as error:
        raise ValueError(
            f"{repo_id!r} is neither a directory (looked for it in {pathlib.Path.cwd()}) nor a hub id: {error}"
        ) from error
    except errors.GatedRepoError as error:
        raise PermissionError(
            f"the hub repository {repo_id!r} is gated: accept its terms at https://huggingface.co/{repo_id} "
            "and log in with `hf auth login`"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"no directory {repo_id!r} (looked for it in {pathlib.Path.cwd()}) and no such repository on the hub; "
            "a private one needs `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"the hub repository {repo_id!r} has no revision {revision or 'main'!r}: give one of its branches, tags or "
            "commits"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"no directory {repo_id!r} (looked for it in {pathlib.Path.cwd()}), and the hub cannot be reached for a "
            "repository of that name, nor is it in the hub's cache: check the name and the network"
        ) from error
    except (errors.HfHubHTTPError, OSError) as error:
        raise FileNotFoundError(f"downloading {repo_id!r} from the hub failed: {error}") from error
