"""A model's files on disk: a folder in the Hub's layout, one GGUF file, or a bundle."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.errors import CheckpointError, ModelNotFoundError
from quire.loading.bundle import Bundle, is_bundle, read_bundle

GGUF_MAGIC = b"GGUF"

SAFETENSORS_INDEX = "model.safetensors.index.json"
TORCH_INDEX = "pytorch_model.bin.index.json"
_MAX_JSON_BYTES = 64 << 20
# Folders of training runs contain pickles that are not weights.
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "adapter_model", "trainer_state")


@dataclass(frozen=True)
class ModelFiles:
    """A model found on this machine."""

    name: str
    """The name the user gave."""
    path: Path
    """The resolved GGUF file or folder."""
    gguf: Path | None = None
    folder: Path | None = None
    """The folder with config.json and tokenizer files, if there is one."""
    bundle: Path | None = None
    """The bundle that has the weights; `folder` is then where its small files were unpacked."""

    @property
    def kind(self) -> str | None:
        """The format `auto` picks: safetensors, gguf or pt; None when no weights were found."""
        return next((kind for kind in ("safetensors", "gguf", "pt") if self.weight_files(kind)), None)

    def weight_files(self, kind: str) -> tuple[Path, ...]:
        """The weight files of one kind (safetensors, pt or gguf), sorted; empty when there are none."""
        if kind == "gguf":
            return () if self.gguf is None else (self.gguf,)
        if self.bundle is not None:
            return read_bundle(self.bundle).weights if kind == "safetensors" and self.gguf is None else ()
        if self.folder is None:
            return ()
        if kind == "safetensors":
            return _pick(self.folder, "*.safetensors", "model.safetensors", "consolidated")
        if kind == "pt":
            return _pick(self.folder, "*.bin", "pytorch_model.bin", "consolidated")
        return ()

    def to_plain(self) -> dict[str, str | None]:
        """As plain data, to send to another process."""
        places = {"path": self.path, "gguf": self.gguf, "folder": self.folder, "bundle": self.bundle}
        return {"name": self.name, **{name: None if path is None else str(path) for name, path in places.items()}}

    @classmethod
    def from_plain(cls, fields: Mapping[str, str | None]) -> ModelFiles:
        """The inverse of `to_plain`."""
        gguf, folder, bundle = (
            None if (place := fields.get(name)) is None else Path(place) for name in ("gguf", "folder", "bundle")
        )
        if bundle is not None and folder is not None and not folder.is_dir():
            folder = read_bundle(bundle).unpack()  # another machine
        return cls(str(fields["name"]), Path(str(fields["path"])), gguf, folder, bundle)

    def weight_index(self, kind: str) -> Path | None:
        """The JSON file that maps tensors to shards, if there is one."""
        name = {"safetensors": SAFETENSORS_INDEX, "pt": TORCH_INDEX}.get(kind)
        if name is None or self.folder is None or self.bundle is not None or not (self.folder / name).is_file():
            return None
        return self.folder / name

    def file(self, name: str) -> Path | None:
        """A file of the model's folder, or None when it is not there."""
        if self.folder is None or not (self.folder / name).is_file():
            return None
        return self.folder / name


def _pick(folder: Path, pattern: str, single: str, doubled: str) -> tuple[Path, ...]:
    if (folder / single).is_file():
        return (folder / single,)
    found = [p for p in sorted(folder.glob(pattern)) if p.is_file() and not p.name.startswith(_NOT_WEIGHTS)]
    # Some repositories contain the weights twice, the second time in the author's own layout.
    return tuple([p for p in found if not p.name.startswith(doubled)] or found)


def local_files(name: str, path: Path) -> ModelFiles:
    """The model in a folder or a GGUF file that exists."""
    path = path.resolve()
    if path.is_file() and is_bundle(path):
        return _bundled(name, read_bundle(path))
    if path.is_file():
        return ModelFiles(name, path, gguf=_checked_gguf(path))
    folder = ModelFiles(name, path, folder=path)
    if folder.kind is not None:
        return folder
    ggufs = [p for p in sorted(path.glob("*.gguf")) if not p.name.startswith("mmproj")]
    if len(ggufs) > 1:
        listed = ", ".join(p.name for p in ggufs[:10])
        raise ModelNotFoundError(f"{path} has {len(ggufs)} GGUF files: give the path of one ({listed})")
    if ggufs:
        return ModelFiles(name, ggufs[0], gguf=ggufs[0], folder=path)
    if (path / "config.json").is_file():
        return folder  # Enough for dummy weights; loading real ones reports what is missing.
    raise ModelNotFoundError(f"{path} has no model: it contains neither config.json nor a .gguf file")


def _bundled(name: str, bundle: Bundle) -> ModelFiles:
    """The model in a bundle."""
    weights = bundle.weights
    if not weights:
        raise CheckpointError(f"{bundle.path}: the bundle has no weights")
    bundle.check(always=False)
    gguf = next((path for path in weights if path.suffix == ".gguf"), None)
    return ModelFiles(name, bundle.path, gguf, bundle.unpack() if bundle.small else None, bundle.path)


def _checked_gguf(path: Path) -> Path:
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == GGUF_MAGIC:
        return path  # The header's reader reports what is wrong with a damaged .gguf.
    raise ModelNotFoundError(
        f"{path} is not a GGUF file (it starts with {magic!r}); for safetensors or .bin weights give the folder "
        f"that holds config.json: {path.parent}"
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file."""
    try:
        size = path.stat().st_size
        if size > _MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size:,} bytes of JSON; the limit is {_MAX_JSON_BYTES:,}")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is needed, got a {type(value).__name__}")
    return value
