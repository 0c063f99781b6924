"""Adapters by name: what a front knows of them, and checks before an engine reads them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from quire.adapters.folder import AdapterFacts, describe_adapter, digest_adapter
from quire.adapters.peft_config import CONFIG
from quire.config import EngineConfig
from quire.errors import AdapterError, AdapterNotFoundError, ValidationError, short_repr
from quire.loading.model_config import ModelConfig
from quire.messages.adapter_use import AdapterUse
from quire.messages.lora import LoRARequest

MAX_ADAPTERS_PER_REQUEST = 8
LoRAChoice = LoRARequest | Sequence[LoRARequest] | None
"""The adapter of one request, or several whose changes add up."""

_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")
_READS_HIDDEN = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
_WRITES_HIDDEN = ("o_proj", "down_proj")


class AdapterEntry(msgspec.Struct, frozen=True):
    """An adapter that requests can name."""

    name: str
    path: str
    """Its folder, resolved."""
    digest: bytes
    rank: int
    nbytes: int
    """Of its tensors."""
    invocation: list[int] | None = None
    base_model_name: str | None = None
    number: int = 0
    """The caller's number of it, as vLLM has them."""
    pinned: bool = False
    """It leaves the device only if no other adapter can make room."""

    def use(self, weight: float = 1.0) -> AdapterUse:
        """The adapter as a request takes it."""
        return AdapterUse(self.name, self.path, self.digest, weight, self.invocation, self.number, self.pinned)


class AdapterCatalog:
    """Adapters by name. An adapter's content is what its folder had when it was added: files may not change later.

    Adding reads files, which takes time: thread-safe, so that an event loop can leave it to a thread.
    """

    def __init__(self, config: EngineConfig, model: ModelConfig) -> None:
        self._config, self._model = config, model
        self._entries: dict[str, AdapterEntry] = {}
        self._by_folder: dict[tuple[object, ...], AdapterEntry] = {}
        """What was read of folders, by their files' identity."""
        self._lock = threading.Lock()

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[AdapterEntry]:
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, name: str) -> AdapterEntry | None:
        return self._entries.get(name)

    def add(self, request: LoRARequest, replaces: bool = False) -> AdapterEntry:
        """Check an adapter and list it. A name that has another content already raises, unless `replaces` or the
        request's `load_inplace` is set."""
        if not self._config.enable_lora:
            raise ValidationError("this engine serves no adapters: set enable_lora (--enable-lora)", "lora_request")
        name = request.name
        read = self._read(name, Path(request.path))
        entry = msgspec.structs.replace(
            read, name=name, base_model_name=request.base_model_name, number=request.lora_int_id, pinned=request.pinned
        )
        with self._lock:
            known = self._entries.get(name)
            is_other = known is not None and (known.digest, known.path) != (entry.digest, entry.path)
            if is_other and not replaces and not request.load_inplace:
                raise ValidationError(
                    f"the adapter {short_repr(name)} is loaded with another content: unload it first, or replace it "
                    "(load_inplace)",
                    "lora_name",
                    name,
                )
            self._entries[name] = entry
        return entry

    def remove(self, name: str | int) -> AdapterEntry:
        """Requests cannot name it any more; those that do go on. A number stands for the adapter that has it."""
        with self._lock:
            return self._entries.pop(self._find(name).name)

    def pin(self, name: str | int) -> AdapterEntry:
        """From its next request on it leaves the device only if no other adapter can make room."""
        with self._lock:
            found = self._find(name)
            self._entries[found.name] = pinned = msgspec.structs.replace(found, pinned=True)
            return pinned

    def _find(self, name: str | int) -> AdapterEntry:
        found = next((entry for entry in self._entries.values() if name in (entry.name, entry.number)), None)
        if found is None:
            raise AdapterNotFoundError(f"there is no adapter {short_repr(name)}")
        return found

    def set(self, entries: Sequence[AdapterEntry]) -> None:
        """Take the list of another process, which has checked them."""
        self._entries = {entry.name: entry for entry in entries}

    def uses(self, choice: LoRAChoice) -> list[AdapterUse]:
        """The adapters of a request, read and listed if they are not."""
        if choice is None or (not isinstance(choice, LoRARequest) and not choice):
            return []
        requests = [choice] if isinstance(choice, LoRARequest) else list(choice)
        uses = []
        for request in requests:
            if not isinstance(request, LoRARequest):
                raise ValidationError(
                    f"lora_request must be a LoRARequest, got {type(request).__name__}", "lora_request", request
                )
            known = self._entries.get(request.name)
            if known is None or known.path != _resolved(request.path) or request.load_inplace:
                known = self.add(request, replaces=True)
            uses.append(known.use(request.weight))
        return check_uses(uses)

    def _read(self, name: str, folder: Path) -> AdapterEntry:
        """What is in the folder; read once as long as its files are the same."""
        facts = describe_adapter(folder, self._config.max_lora_rank)
        check_base(facts, self._model, folder)
        identity = _identity(facts.folder)
        known = self._by_folder.get(identity)
        if known is None:
            known = AdapterEntry(
                name, str(facts.folder), digest_adapter(folder), facts.rank, facts.nbytes, facts.settings.invocation
            )
            if _identity(facts.folder) != identity:
                raise AdapterError(f"{folder} was changed while it was read: try again")
            self._by_folder[identity] = known
        return known


def check_uses(uses: list[AdapterUse]) -> list[AdapterUse]:
    """Raise for adapters that one request cannot have together."""
    if len(uses) > MAX_ADAPTERS_PER_REQUEST:
        raise ValidationError(
            f"a request has {len(uses)} adapters; at most {MAX_ADAPTERS_PER_REQUEST}", "lora_request", len(uses)
        )
    if len({use.digest for use in uses}) < len(uses):
        raise ValidationError("a request names the same adapter twice: give it one weight", "lora_request")
    if len({tuple(use.invocation or ()) for use in uses}) > 1:
        raise ValidationError(
            "adapters of one request must have the same invocation tokens (aLoRA), or none", "lora_request"
        )
    return uses


def check_base(facts: AdapterFacts, model: ModelConfig, folder: Path) -> None:
    """Raise for an adapter of another base model, as far as names and the model's sizes tell; the engine, which has the
    matrices, checks each."""
    for name, (out, width) in facts.shapes.items():
        if any(tower in name for tower in ("vision", "visual", "audio")):
            continue
        layer = _LAYER.search(name)
        if layer is not None and int(layer[1]) >= model.num_layers:
            raise AdapterError(
                f"{folder} is for another base model: it has {name}, and {model.architecture} has {model.num_layers} "
                "layers"
            )
        last, hidden = name.rpartition(".")[2], model.hidden_size
        for side, names, size in (("input", _READS_HIDDEN, width), ("output", _WRITES_HIDDEN, out)):
            if last in names and size != hidden and "experts" not in name:
                base = facts.settings.base
                raise AdapterError(
                    f"{folder} is for another base model{f' ({base})' if base else ''}: its {name} is "
                    f"[{out}, {width}], and here the {side} of that matrix has {hidden} values"
                )


def _identity(folder: Path) -> tuple[object, ...]:
    """Changes when one of the folder's files does."""
    identity: list[object] = [str(folder)]
    for name in (CONFIG, "adapter_model.safetensors", "adapter_model.bin"):
        try:
            facts = (folder / name).stat()
        except OSError:
            continue
        identity.append((name, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))
    return tuple(identity)


def _resolved(path: str) -> str:
    try:
        return str(Path(path).resolve())
    except (OSError, RuntimeError, ValueError):
        return path
