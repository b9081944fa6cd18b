"""Networks on the Hugging Face Hub, by the name `hf:OWNER/NAME` or `hf:OWNER/NAME@REVISION`.

Only files of ours with known names are fetched, none of which can hold code. Cache, resumed downloads, tokens and
environment variables such as HF_ENDPOINT, HF_TOKEN, HF_HOME and HF_HUB_OFFLINE are those of `huggingface_hub`.
"""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType

from harp.errors import CheckpointError, MissingExtra, RecipeError
from harp.system import files
from harp.system.files import reason

PREFIX = "hf:"
MANIFEST = "digests.json"
SPARSE = "network.harp"
WEIGHTS = "model.safetensors"
FILES = ("recipe.yaml", "summary.json", WEIGHTS, "masks.safetensors", "slim.json", SPARSE)
"""The files of a network beside the manifest, which holds their digests. The hub's page, README.md, is not read."""

_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN"


def is_name(target: object) -> bool:
    """Whether a text names a network on the hub."""
    return isinstance(target, str) and target.startswith(PREFIX)


def repository(target: str) -> tuple[str, str | None]:
    """OWNER/NAME and the revision of a name; None for the newest one."""
    match = _NAME.fullmatch(target)
    if match is None:
        raise RecipeError(f"{target} is no name on the hub: write hf:OWNER/NAME or hf:OWNER/NAME@REVISION")
    return match[1], match[2]


def fetch(target: str) -> Path:
    """The folder of a network on the hub, in the local cache, with all digests checked.

    Without a network, the folder as it was fetched last.
    """
    name, revision = repository(target)
    library = _library()
    with _explained(target, library):
        wanted = [MANIFEST, *FILES]
        folder = Path(library.snapshot_download(name, revision=revision, allow_patterns=wanted))
    _check(target, folder)
    return folder


def publish(target: str, content: Mapping[str, Path | bytes], *, private: bool = False) -> str:
    """Write files to a repository in one commit, make the repository if it is not there; give the commit's address.

    The manifest with the digests of our files is added.
    """
    name, revision = repository(target)
    library = _library()
    digests = {file: _digest(where) for file, where in content.items() if file in FILES}
    manifest = json.dumps({"format": 1, "files": digests}, indent=2).encode()
    with _explained(target, library):
        api = library.HfApi()
        api.create_repo(name, private=private or None, exist_ok=True)
        parts = [
            library.CommitOperationAdd(path_in_repo=file, path_or_fileobj=where)
            for file, where in {**content, MANIFEST: manifest}.items()
        ]
        done = api.create_commit(name, parts, commit_message="Add a pruned network", revision=revision)
    return str(done.commit_url)


def _library() -> ModuleType:
    try:
        return import_module("huggingface_hub")
    except ImportError as error:
        raise MissingExtra(f'the hub needs huggingface_hub ({reason(error)}): pip install "harp-prune[hub]"') from error


def _check(target: str, folder: Path) -> None:
    """Refuse a folder that `harp push` did not write, or whose files are not those that it wrote."""
    if not (folder / MANIFEST).is_file():
        raise CheckpointError(f"{target} is no network of harp: there is no {MANIFEST} in it, which `harp push` writes")
    manifest = files.read_json(folder / MANIFEST)
    digests = manifest.get("files")
    if manifest.get("format") != 1 or not isinstance(digests, dict):
        raise CheckpointError(f"{target}: {MANIFEST} is of another version of harp, or damaged")
    here = [file for file in FILES if (folder / file).is_file()]
    for file in sorted({*here, *digests} & {*FILES}):
        if file not in here:
            raise CheckpointError(f"{target} has no {file}, which its {MANIFEST} lists: push it again")
        if digests.get(file) != _digest(folder / file):
            raise CheckpointError(
                f"{target}: {file} is not the one that was pushed, by its digest in {MANIFEST}; if the download is "
                f"damaged, delete {folder}"
            )


def _digest(content: Path | bytes) -> str:
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest()
    with content.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _explained(target: str, library: ModuleType) -> Iterator[None]:
    """Turn errors of the hub's library into one line each."""
    errors = import_module(f"{library.__name__}.errors")
    try:
        yield
    except (errors.HFValidationError, errors.LocalTokenNotFoundError) as error:
        raise RecipeError(f"{target}: {reason(error)}") from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"{target}: there is no such revision in the repository") from error
    except errors.GatedRepoError as error:
        raise CheckpointError(f"{target} is gated: ask for access on its page, then {_LOGIN}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(f"{target}: there is no such repository, or it is private: {_LOGIN}") from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise CheckpointError(f"{target}: the hub does not permit this ({status}): {_LOGIN}") from error
        raise CheckpointError(f"{target}: the hub refuses ({status}): {_message(error)}") from error
    except (OSError, errors.OfflineModeIsEnabled) as error:
        raise CheckpointError(
            f"{target}: the hub can't be reached, nor is it in the cache: {_message(error)}"
        ) from error
    except RuntimeError as error:
        failed = re.search(r"uploading ('.+?')", str(error))
        if failed is None:
            raise
        raise CheckpointError(f"{target}: the upload of {failed[1]} failed: {_message(error)}") from error
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # the library lets errors of its HTTP client through
            raise
        raise CheckpointError(f"{target}: the hub can't be reached: {_message(error)}") from error


def _message(error: BaseException) -> str:
    """The first sentence of an error and of its cause."""
    lines = [line.strip() for line in str(error.__cause__ or error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]
