"""Resolves a model name (an alias, a path, or a Hugging Face Hub id) to files on this machine."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quire.config import EngineConfig
from quire.errors import ModelNotFoundError
from quire.loading.files import ModelFiles, local_files
from quire.loading.pinned import SMOLLM2_135M, PinnedFile, fetch
from quire.paths import cache_dir

DEFAULT_MODEL = "smollm2-135m"

PINNED: dict[str, PinnedFile] = {DEFAULT_MODEL: SMOLLM2_135M}

ALIASES: dict[str, str] = {
    "smollm2-360m": "HuggingFaceTB/SmolLM2-360M-Instruct",
    "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B-Instruct",
    "mistral-7b": "mistralai/Mistral-7B-Instruct-v0.3",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
}

_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_ID = re.compile(rf"(?P<repo>{_PART}(?:/{_PART})?)(?::(?P<file>[A-Za-z0-9][A-Za-z0-9._/-]{{0,199}}))?")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,199}")
_TIMEOUT = 5.0
# The small files a model may need; weights are added once the repository's format is known.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
# The best all-round quantization first, for repositories that offer many.
_GGUF_PREFERENCE = ("Q4_K_M", "Q8_0", "Q5_K_M", "Q6_K", "Q4_1", "Q4_0", "BF16", "F16", "F32")


def resolve(
    model: str,
    *,
    revision: str | None = None,
    download_dir: str | os.PathLike[str] | None = None,
    offline: bool | None = None,
    token: str | None = None,
    progress: bool = True,
    trust_remote_code: bool = False,
) -> ModelFiles:
    """Find a model; download it if necessary.

    `model` is a folder, a GGUF file, an alias, or a Hub id (`org/name`, `org/name:file.gguf`, `org/name:Q4_K_M`).
    `offline` None: as HF_HUB_OFFLINE says. Python files of a repository are downloaded only with `trust_remote_code`.
    """
    if not isinstance(model, str) or not model.strip():
        raise ModelNotFoundError(f"the model name {model!r} is empty. Try {DEFAULT_MODEL!r}, a folder, or a Hub id")
    offline = _offline_by_environment() if offline is None else offline
    path = _existing(model)
    if path is not None:
        return local_files(model, path)
    if _looks_like_path(model):
        raise ModelNotFoundError(
            f"there is no file or folder {model!r} (looked at {Path(model).expanduser().absolute()})"
        )
    name = model.lower()
    if name in PINNED:
        folder = Path(download_dir) if download_dir is not None else cache_dir("models")
        path = fetch(PINNED[name], folder, offline=offline, token=token, progress=progress)
        return ModelFiles(model, path, gguf=path)
    match = _HUB_ID.fullmatch(ALIASES.get(name, model))
    if match is None or ".." in model or "--" in match["repo"]:
        raise ModelNotFoundError(
            f"there is no model {model!r}: not an existing path, not an alias ({_known_aliases()}), "
            "and not a Hub id ('org/name' of letters, digits, '.', '_', '-', or 'org/name:file.gguf')"
        )
    if revision is not None and (not _REVISION.fullmatch(revision) or ".." in revision):
        raise ModelNotFoundError(f"{revision!r} is not a revision: give a branch, a tag or a commit")
    return _from_hub(
        model, match["repo"], match["file"], revision, download_dir, offline, token, progress, trust_remote_code
    )


def find_model(config: EngineConfig) -> ModelFiles:
    """The files of the configured model."""
    return resolve(
        config.model,
        revision=config.revision,
        download_dir=config.download_dir,
        token=config.hf_token,
        trust_remote_code=config.trust_remote_code,
    )


def _existing(model: str) -> Path | None:
    try:
        path = Path(model).expanduser()
        return path if path.exists() else None
    except (OSError, ValueError, RuntimeError):  # Too long, a null byte, or an unknown ~user.
        return None


def _looks_like_path(model: str) -> bool:
    return (
        model.startswith(("/", "./", "../", "~"))
        or model in (".", "..")
        or (model.endswith(".gguf") and ":" not in model)
    )


def _offline_by_environment() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").lower() in ("1", "true", "yes", "on") for name in names)


def _known_aliases() -> str:
    return ", ".join(sorted([*PINNED, *ALIASES]))


def _from_hub(
    model: str,
    repo: str,
    file: str | None,
    revision: str | None,
    download_dir: str | os.PathLike[str] | None,
    offline: bool,
    token: str | None,
    progress: bool,
    code: bool,
) -> ModelFiles:
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    where: dict[str, Any] = {"revision": revision, "cache_dir": download_dir, "token": token}
    failures: list[str] = []
    if offline:
        failures.append("Hub: skipped, downloads are disabled (offline=True or HF_HUB_OFFLINE)")
    else:
        try:
            # Unlike a download, this fails at once without a network.
            info = HfApi(token=token).model_info(repo, revision=revision, timeout=_TIMEOUT)
            names = [sibling.rfilename for sibling in info.siblings or []]
            patterns = _wanted(repo, names, file, code)
            with hub_progress_bars(progress):
                folder = Path(snapshot_download(repo, allow_patterns=patterns, etag_timeout=_TIMEOUT, **where))
            return _in_snapshot(model, folder, patterns[0] if patterns[0].endswith(".gguf") else None)
        except ModelNotFoundError:
            raise
        except HfHubHTTPError as error:
            raise ModelNotFoundError(_refusal(model, repo, revision, error)) from None
        except Exception as error:  # No network, in one of many forms; the model may still be in the cache.
            failures.append(f"Hub {repo}: {type(error).__name__}: {' '.join(str(error).split())[:300]}")
    try:
        # Only part of a repository is ever downloaded, and newer huggingface_hub refuses a snapshot that lacks a
        # requested file: so request none. A file that is really missing is reported when it is opened.
        folder = Path(snapshot_download(repo, local_files_only=True, allow_patterns=["-"], **where))
    except (LocalEntryNotFoundError, OSError, ValueError):
        failures.append("local Hub cache: not found")
    else:
        return _in_snapshot(model, folder, _match_gguf(repo, _names_in(folder), file) if file else None)
    raise ModelNotFoundError(
        f"could not get the model {model!r}. Tried:"
        f"\n  - it is not a file or folder here, nor an alias ({_known_aliases()})"
        + "".join(f"\n  - {failure}" for failure in failures)
        + "\nWhat to do: check the spelling and the network (HF_ENDPOINT selects a mirror), "
        "or give a folder that has the model."
    )


def _names_in(folder: Path) -> list[str]:
    return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]


def _in_snapshot(model: str, folder: Path, gguf: str | None) -> ModelFiles:
    # Not resolved: snapshot files are links to blobs, whose names are hashes.
    if gguf is not None:
        return ModelFiles(model, folder / gguf, gguf=folder / gguf)
    found = ModelFiles(model, folder, folder=folder)
    if found.kind is not None:
        return found
    names = [name for name in _names_in(folder) if name.endswith(".gguf")]
    if names:
        path = folder / _match_gguf(model, names, None)
        return ModelFiles(model, path, gguf=path)
    return local_files(model, folder)


def _wanted(repo: str, names: list[str], file: str | None, code: bool) -> list[str]:
    """File patterns to download; the first is the GGUF file if one was chosen."""
    small = [*_SMALL_FILES, *(["*.py"] if code else [])]
    if file is not None:
        return [_match_gguf(repo, names, file)]
    top = [name for name in names if "/" not in name]
    for suffix in (".safetensors", ".bin"):
        weights = [name for name in top if name.endswith(suffix)]
        chosen = [name for name in weights if not name.startswith("consolidated")] or weights
        if chosen:
            return [*small, *chosen]
    if any(name.endswith(".gguf") for name in names):
        return [_match_gguf(repo, names, None), *small]
    raise ModelNotFoundError(
        f"the Hub repository {repo} has no weights that quire can read (safetensors, .bin or GGUF)"
    )


def _match_gguf(repo: str, names: list[str], wanted: str | None) -> str:
    """The GGUF file for a file name or a tag such as Q4_K_M; without either, the preferred one."""
    ggufs = sorted(name for name in names if name.endswith(".gguf") and "mmproj" not in name)
    listed = ", ".join(ggufs[:12]) or "none"
    if wanted is None:
        tags: tuple[str, ...] = ("", *_GGUF_PREFERENCE) if len(ggufs) == 1 else _GGUF_PREFERENCE
    elif wanted in ggufs:
        return wanted
    elif wanted.endswith(".gguf"):
        raise ModelNotFoundError(f"{repo} has no file {wanted!r}; GGUF files there: {listed}")
    else:
        tags = (wanted,)
    for tag in tags:
        hits = [name for name in ggufs if re.search(rf"(^|[-._/]){re.escape(tag)}([-._]|$)", name, re.I)]
        if len(hits) == 1:
            return hits[0]
    raise ModelNotFoundError(f"{repo}: choose one GGUF file as '{repo}:FILE' (files there: {listed})")


def _refusal(model: str, repo: str, revision: str | None, error: Exception) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if isinstance(error, GatedRepoError):
        return (
            f"{repo} is gated: accept its terms at https://huggingface.co/{repo}, then give a token "
            "(HF_TOKEN or `hf auth login`)"
        )
    if isinstance(error, RepositoryNotFoundError):
        return (
            f"there is no model {model!r}: not a file or folder here, not an alias ({_known_aliases()}), "
            f"and the Hub has no repository {repo} (a private one needs HF_TOKEN)"
        )
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision!r}"
    return f"the Hub refused {repo}: {' '.join(str(error).split())[:300]}"


@contextmanager
def hub_progress_bars(shown: bool) -> Iterator[None]:
    """Show huggingface_hub's progress bars only on a terminal."""
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    quiet = not (shown and sys.stderr is not None and sys.stderr.isatty())
    change = quiet and not are_progress_bars_disabled()
    if change:
        disable_progress_bars()
    try:
        yield
    finally:
        if change:
            enable_progress_bars()
