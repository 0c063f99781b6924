"""The slots of a rank: reads adapters, keeps some in host memory, copies them into slots while steps run."""

from __future__ import annotations

import atexit
import logging
import queue
import re
import threading
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quire.adapters.adapter import Adapter, ExpertLowRank, LowRank
from quire.adapters.peft_folder import read_adapter
from quire.errors import AdapterError
from quire.kernels.adapters import SlotTokens
from quire.kernels.gates import has_gate
from quire.layers.adapter_extras import (
    EmbeddingSlots,
    ExpertChange,
    ExpertSlots,
    HeadSlots,
    TableChange,
    TableSlots,
    local_table,
)
from quire.layers.adapters import AdapterScope, MatrixChange, MatrixSlot, MatrixSlots, SlotSpace, make_slots
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.expert_weights import ROUTER
from quire.layers.moe import SparseMLP
from quire.messages.adapter_use import AdapterUse
from quire.messages.plan import AdapterLoad, AdapterLoaded

logger = logging.getLogger(__name__)

_OUTSIDE = ("lm_head", "embed_out", "gate", "router")
"""Modules whose matrices are in no slots: heads, and routers."""
COPY_BYTES = 4 << 20
"""A copy to the device is made in pieces of this size, so that those of running steps come between them."""


@dataclass
class SlotContent:
    """Adapters as the layers of this rank hold them, in host memory."""

    matrices: dict[int, MatrixSlot] = field(default_factory=dict)
    """By number of the layer's slots."""
    tables: dict[int, TableChange] = field(default_factory=dict)
    experts: dict[int, ExpertChange] = field(default_factory=dict)

    is_special: bool = False
    """Whether steps with it cannot be captured: all pipeline stages agree on that."""


class DeviceAdapters:
    """The adapted layers of one rank's model, and what is in their slots."""

    def __init__(self, model: Any, space: SlotSpace, host_slots: int, max_rank: int) -> None:
        """`host_slots`: contents that are kept in host memory. `max_rank`: of one adapter."""
        self.scope = AdapterScope()
        self.space = space
        self.version = 0
        """Rises when what a captured graph computes would be incomplete: the first bias or DoRA of a layer."""
        self.special: frozenset[int] = frozenset()
        """Slots whose steps cannot be captured."""
        self._model = model
        self._max_rank = max_rank
        self._layers: list[MatrixSlots] = []
        self._tables: list[TableSlots] = []
        self._mixtures: list[ExpertSlots] = []
        self._parts: dict[str, list[tuple[int, int]]] = defaultdict(list)
        """By module: the layers, and their parts, that its matrix is in."""
        self._named_tables: dict[str, int] = {}
        self._named_experts: dict[str, int] = {}
        self._head: int | None = None
        self._attach(model)
        self._host: OrderedDict[bytes, SlotContent] = OrderedDict()
        self._host_slots = host_slots
        self._held: dict[int, bytes] = {}
        """Slot → content."""
        self._jobs: queue.SimpleQueue[tuple[AdapterLoad, Any] | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[AdapterLoaded] = queue.SimpleQueue()
        self._pending = 0
        """Loads that `take_done` has not reported."""
        self._thread: threading.Thread | None = None
        self._stream = torch.cuda.Stream(space.device) if space.device.type == "cuda" else None

    def _attach(self, model: nn.Module) -> None:
        """Give every layer of the model its slots."""
        for path, module in list(model.named_modules()):
            owner = path.rpartition(".")[0]
            full = f"{owner}." if owner else ""
            if (made := make_slots(module, self.scope, self.space)) is not None:
                for index, part in enumerate(made.parts):
                    self._parts[full + part.name].append((len(self._layers), index))
                self._layers.append(made)
            elif isinstance(module, VocabEmbedding):
                self._named_tables[full + module.part.name] = len(self._tables)
                self._tables.append(EmbeddingSlots(module, self.scope))
            elif isinstance(module, LMHead):
                is_tied = self._model.build.config.tie_embeddings
                self._head = len(self._tables)
                self._named_tables["lm_head" if is_tied else full + module.part.name] = self._head
                self._tables.append(HeadSlots(module, self.scope))
            elif isinstance(module, SparseMLP):
                self._named_experts[full] = len(self._mixtures)
                self._mixtures.append(ExpertSlots(module, self.scope))

    @property
    def layers(self) -> Sequence[MatrixSlots]:
        """The slots of each layer."""
        return self._layers

    @property
    def nbytes(self) -> int:
        """Bytes of all slots on the device."""
        return sum(layer.nbytes for layer in self._layers)

    # During a step

    def enter(self, slots: torch.Tensor | None, present: Sequence[int] = ()) -> None:
        """The next pass computes tokens with these slots; None: without adapters."""
        self.scope.tokens = None if slots is None else SlotTokens(slots, present)

    # Loading

    def start(self, loads: Sequence[AdapterLoad]) -> None:
        """Read adapters and fill their slots, in a thread. A content that is in its slot already is only reported."""
        for load in loads:
            self._pending += 1
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="adapters", daemon=True)
                self._thread.start()
                # Python ends daemon threads at its exit, and one that is inside torch then aborts the process.
                atexit.register(self.close)
            event = None
            if self._stream is not None:  # steps launched so far may read what was in the slot
                event = torch.cuda.Event()
                event.record()
            self._jobs.put((load, event))

    @property
    def is_loading(self) -> bool:
        """Whether loads have not been reported."""
        return self._pending > 0

    @property
    def can_report(self) -> bool:
        """Whether `take_done` has something to return."""
        return not self._done.empty()

    def take_done(self) -> list[AdapterLoaded]:
        """Loads that have ended since the last call."""
        done = []
        while not self._done.empty():
            done.append(self._done.get())
        self._pending -= len(done)
        return done

    def close(self) -> None:
        """End the thread once it has done what it was given."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout=10.0)
            self._thread = None
            atexit.unregister(self.close)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            load, event = job
            error = ""
            try:
                with torch.inference_mode():
                    self._load(load, event)
            except AdapterError as refusal:
                error = str(refusal)
            except Exception as failure:
                logger.exception("cannot load adapter %s", _names(load.uses))
                error = f"adapter {_names(load.uses)} cannot be loaded: {type(failure).__name__}: {failure}"
            self._done.put(AdapterLoaded(load.slot, load.key, error))

    def _load(self, load: AdapterLoad, event: Any) -> None:
        if self._held.get(load.slot) == load.key:
            return
        content = self._host.get(load.key)
        if content is None:
            content = self.prepare(load.uses)
            self._host[load.key] = content
            while len(self._host) > self._host_slots:
                self._host.popitem(last=False)
        self._host.move_to_end(load.key)
        self._held.pop(load.slot, None)
        if self._stream is None:
            made = self._write(load.slot, content, _copy)
        else:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(event)
                made = self._write(load.slot, content, _copy_in_pieces)
                self._stream.synchronize()
        for layer, tables in made:
            for name, table in tables.items():
                setattr(layer, name, table)
        self.version += len(made) > 0
        self._held[load.slot] = load.key

    def _write(
        self, slot: int, content: SlotContent, copy: Callable[[torch.Tensor, torch.Tensor], None]
    ) -> list[tuple[MatrixSlots, dict[str, torch.Tensor]]]:
        """Fill a slot; returns the first biases and factors of layers."""
        made = []
        for number, layer in enumerate(self._layers):
            if (own := content.matrices.get(number)) is None:
                layer.clear(slot)
            elif tables := layer.write(slot, own, copy):
                made.append((layer, tables))
        device = self.space.device
        # Steps read these mappings meanwhile: each is replaced, not changed.
        for number, table in enumerate(self._tables):
            changes = {other: change for other, change in table.changes.items() if other != slot}
            table.changes = changes | ({slot: content.tables[number].to(device)} if number in content.tables else {})
        for number, mixture in enumerate(self._mixtures):
            kept = {other: change for other, change in mixture.changes.items() if other != slot}
            own_experts = {slot: content.experts[number].to(device)} if number in content.experts else {}
            mixture.changes = kept | own_experts
        self.special = (self.special - {slot}) | ({slot} if content.is_special else set())
        return made

    # Reading

    def prepare(self, uses: Sequence[AdapterUse]) -> SlotContent:
        """Read adapters, and make what a slot holds of them; raises `AdapterError` for what cannot be."""
        adapters = [self._read(use) for use in uses]
        return _Combination(self, uses, adapters).content()

    def _read(self, use: AdapterUse) -> Adapter:
        adapter = read_adapter(Path(use.path), self._max_rank)
        if adapter.digest != use.digest:
            raise AdapterError(
                f"adapter {use.name!r}: the files in {use.path} have changed since it was registered; load it again"
            )
        return adapter

    def layer(self, number: int) -> MatrixSlots:
        return self._layers[number]

    def table(self, number: int) -> TableSlots:
        return self._tables[number]

    def mixture(self, number: int) -> ExpertSlots:
        return self._mixtures[number]

    @property
    def head(self) -> int | None:
        """Number of the head among the tables, if this rank has it."""
        return self._head

    def parts_of(self, module: str) -> list[tuple[int, int]]:
        """The layers that a module's matrix is in, and which parts of them it is."""
        return next((self._parts[name] for name in _spellings(module) if name in self._parts), [])

    def table_of(self, module: str) -> int | None:
        """The number of an embedding or of the head."""
        return next((self._named_tables[name] for name in _spellings(module) if name in self._named_tables), None)

    def experts_of(self, parameter: str) -> int | None:
        """The number of the mixture that a stack of experts belongs to."""
        names = _spellings(parameter)
        owners = (owner for name in names for owner in self._named_experts if name.startswith(owner))
        return next((self._named_experts[owner] for owner in owners), None)

    def router_of(self, module: str) -> int | None:
        """The number of the mixture whose router this is, where it routes as mixtures commonly do."""
        for owner, number in self._named_experts.items():
            layer = self._mixtures[number].layer
            names = {ROUTER, *(naming.router for naming in layer.namings)}
            is_common = type(layer).mix is SparseMLP.mix and not hasattr(layer, "mixed")
            if is_common and module.startswith(owner) and f"{module.removeprefix(owner)}.weight" in names:
                return number
        return None

    def is_elsewhere(self, module: str) -> bool:
        """Whether another pipeline stage has this module."""
        return self._model.build.ranks.pp_size > 1 and any(
            self._model.ignores(f"{name}.weight") for name in _spellings(module)
        )


class _Combination:
    """Adapters of one slot, whose changes add up."""

    def __init__(self, device: DeviceAdapters, uses: Sequence[AdapterUse], adapters: Sequence[Adapter]) -> None:
        self._device = device
        self._uses = uses
        self._adapters = adapters
        self._changes: dict[int, dict[int, list[MatrixChange]]] = defaultdict(lambda: defaultdict(list))
        self._content = SlotContent()

    def content(self) -> SlotContent:
        if len({None if a.invocation is None else tuple(a.invocation) for a in self._adapters}) > 1:
            raise AdapterError(
                f"adapters {_names(self._uses)} cannot be used together: they act from different places of a prompt on"
            )
        for use, adapter in zip(self._uses, self._adapters, strict=True):
            self._add(use, adapter)
        self._content.is_special = any(map(_is_special, self._adapters))
        for number, parts in self._changes.items():
            layer = self._device.layer(number)
            self._check_rank(layer, parts)
            self._content.matrices[number] = layer.prepare([parts[index] for index in range(len(layer.parts))])
        return self._content

    def _add(self, use: AdapterUse, adapter: Adapter) -> None:
        for parameter, tensor in adapter.replaced.items():  # first: low-rank changes are of these
            self._replace(use, adapter, parameter, tensor)
        for module, low in adapter.matrices.items():
            self._add_matrix(use, adapter, module, low)
        for module, low in adapter.embeddings.items():
            self._add_embedding(use, module, low)
        for module, (tokens, rows) in adapter.token_rows.items():
            self._add_rows(use, adapter, module, tokens, rows)
        for parameter, stack in adapter.experts.items():
            self._add_experts(use, parameter, stack)

    # Matrices

    def _add_matrix(self, use: AdapterUse, adapter: Adapter, module: str, low: LowRank) -> None:
        if (table := self._device.table_of(module)) is not None:
            self._add_to_head(use, adapter, module, low, table)
            return
        if (number := self._device.router_of(module)) is not None:
            self._add_to_router(use, module, low, number)
            return
        change = MatrixChange(low.a, low.b.float() * low.scale, low.bias, low.magnitude, use.weight)
        self._add_change(use, module, change, low.shape)

    def _add_to_router(self, use: AdapterUse, module: str, low: LowRank, number: int) -> None:
        layer = self._device.mixture(number).layer
        shape = (layer.routing.num_experts, layer.router.shape[1])
        if low.shape != shape:
            raise _refused(
                use, f"is for another model: {module} is {list(shape)} here, and {list(low.shape)} in the adapter"
            )
        if low.bias is not None or low.magnitude is not None or layer.dispatch is not None:
            raise _refused(use, f"changes the router {module} by DoRA or a bias, or under enable_expert_parallel")
        change = self._content.experts.setdefault(number, ExpertChange())
        dtype = self._device.space.dtype
        pair = (low.a.to(dtype), (low.b.float() * (low.scale * use.weight)).to(dtype))
        before = change.router
        change.router = (
            pair if before is None else (torch.cat([before[0], pair[0]]), torch.cat([before[1], pair[1]], 1))
        )

    def _add_change(self, use: AdapterUse, module: str, change: MatrixChange, shape: tuple[int, int] | None) -> None:
        places = self._device.parts_of(module)
        if not places and not self._device.is_elsewhere(module):
            raise _refused(
                use, f"changes {module}, which this model does not have as a matrix of its own that can be changed"
            )
        for number, index in places:
            part = self._device.layer(number).parts[index]
            if shape is not None and shape != part.shape:
                raise _refused(
                    use, f"is for another model: {module} is {list(part.shape)} here, and {list(shape)} in the adapter"
                )
            self._changes[number][index].append(change)

    def _check_rank(self, layer: MatrixSlots, parts: Mapping[int, list[MatrixChange]]) -> None:
        for index, changes in parts.items():
            rank = sum(len(change.a) for change in changes)
            if rank > layer.space.rank:
                raise AdapterError(
                    f"adapters {_names(self._uses)} together have the rank {rank} in {layer.parts[index].name}; at "
                    f"most {layer.space.rank} fits: raise max_lora_rank"
                )

    def _replace(self, use: AdapterUse, adapter: Adapter, parameter: str, tensor: torch.Tensor) -> None:
        module, _, kind = parameter.rpartition(".")
        table = self._device.table_of(module)
        if kind == "weight" and table is not None:
            self._check_table(use, adapter, module, tensor, table)
            change = self._table(use, table, module)
            change.replaced = local_table(self._device.table(table).layer, tensor, self._dtype(table))
        elif kind == "bias" and self._device.parts_of(module):
            number, index = self._device.parts_of(module)[0]
            layer = self._device.layer(number)
            out, width = layer.parts[index].shape
            if getattr(layer.layer, "bias", None) is None or tensor.shape != (out,):
                raise _refused(use, f"has a bias for {module}, which has none, or another size, in this model")
            empty = MatrixChange(tensor.new_zeros(0, width), tensor.new_zeros(out, 0), None, None, use.weight, tensor)
            self._add_change(use, module, empty, None)
        elif not self._device.is_elsewhere(module):
            raise _refused(
                use,
                f"replaces {parameter} (modules_to_save): only embeddings, the head, and biases of matrices can be "
                "replaced for single requests",
            )

    # Tables

    def _dtype(self, table: int) -> torch.dtype:
        return self._device.table(table).layer.weight.dtype

    def _table(self, use: AdapterUse, number: int, module: str, only: bool = True) -> TableChange:
        """The slot's change of a table. `only`: no other adapter may change it, nor in part."""
        if only and (use.weight != 1 or len(self._uses) > 1):
            raise _refused(
                use, f"replaces values of {module}: it can be used alone only, with the weight 1, not {use.weight:g}"
            )
        return self._content.tables.setdefault(number, TableChange())

    def _check_table(self, use: AdapterUse, adapter: Adapter, module: str, tensor: torch.Tensor, number: int) -> None:
        shape = self._device.table(number).layer.part.shape
        if tuple(tensor.shape) != tuple(shape):
            raise _refused(
                use, f"is for another model: {module} is {list(shape)} here, and {list(tensor.shape)} in the adapter"
            )
        if number == self._device.head:
            _check_invocation(use, adapter)

    def _add_to_head(self, use: AdapterUse, adapter: Adapter, module: str, low: LowRank, number: int) -> None:
        layer = self._device.table(number).layer
        if number != self._device.head or low.bias is not None or low.shape != layer.part.shape:
            what = "a bias" if low.bias is not None else f"a matrix {list(low.shape)}"
            raise _refused(use, f"has {what} for {module}, which is {list(layer.part.shape)} here and takes none")
        _check_invocation(use, adapter)
        tall = local_table(layer, low.b.float() * low.scale, torch.float32)
        if low.magnitude is not None:
            self._rescale_head(use, module, low, number, tall)
            return
        change = self._table(use, number, module, only=False)
        dtype = self._device.space.dtype
        change.low_rank.append(((tall * use.weight).to(dtype), low.a.t().contiguous().to(dtype)))

    def _rescale_head(self, use: AdapterUse, module: str, low: LowRank, number: int, tall: torch.Tensor) -> None:
        """DoRA of the head: a head of its own."""
        layer = self._device.table(number).layer
        assert low.magnitude is not None
        change, base = self._table(use, number, module), layer.weight
        if change.replaced is not None:
            base = change.replaced
        elif not isinstance(base, torch.Tensor):
            base = base.dequantize()
        whole = base.float().cpu() + tall @ low.a.float()
        share = local_table(layer, low.magnitude.float(), torch.float32) / whole.norm(dim=1).clamp(min=1e-30)
        change.replaced = (whole * share[:, None]).to(self._dtype(number))

    def _add_embedding(self, use: AdapterUse, module: str, low: LowRank) -> None:
        number = self._device.table_of(module)
        if number is None and self._device.is_elsewhere(module):
            return
        if number is None or number == self._device.head:
            raise _refused(use, f"changes the embedding {module}, which this model does not have")
        layer = self._device.table(number).layer
        if (low.a.shape[1], low.b.shape[0]) != layer.part.shape:
            raise _refused(
                use,
                f"is for another model: {module} is {list(layer.part.shape)} here, and "
                f"{[low.a.shape[1], low.b.shape[0]]} in the adapter",
            )
        if low.magnitude is not None:
            raise _refused(use, f"has DoRA of the embedding {module}, which is not implemented")
        dtype = self._device.space.dtype
        tall = local_table(layer, low.a.t().contiguous(), dtype)
        wide = (low.b.float() * (low.scale * use.weight)).to(dtype)
        self._table(use, number, module, only=False).low_rank.append((tall, wide))

    def _add_rows(self, use: AdapterUse, adapter: Adapter, module: str, tokens: list[int], rows: torch.Tensor) -> None:
        number = self._device.table_of(module)
        if number is None and not self._device.is_elsewhere(module):
            raise _refused(use, f"has rows for single tokens of {module}, which this model does not have")
        numbers = [] if number is None else [number]
        is_tied = self._device._model.build.config.tie_embeddings
        if is_tied and self._device.head is not None and number != self._device.head:
            _check_invocation(use, adapter)
            numbers.append(self._device.head)
        for each in numbers:
            layer = self._device.table(each).layer
            vocab, hidden = layer.part.shape
            if rows.shape[1] != hidden or max(tokens) >= vocab:
                raise _refused(use, f"has rows for tokens that {module} {[vocab, hidden]} does not have")
            own = [(token - layer.kept.start, i) for i, token in enumerate(tokens) if token in layer.kept]
            change = self._table(use, each, module)
            change.ids = torch.tensor([local for local, _ in own], dtype=torch.int64)
            change.rows = rows[[i for _, i in own]].to(self._dtype(each))

    # Experts

    def _add_experts(self, use: AdapterUse, parameter: str, stack: ExpertLowRank) -> None:
        number = self._device.experts_of(parameter)
        if number is None:
            if self._device.is_elsewhere(parameter.rpartition(".experts.")[0]):
                return
            raise _refused(use, f"changes {parameter}, and this model has no experts there")
        layer = self._device.mixture(number).layer
        if layer.dispatch is not None:
            raise _refused(use, "changes experts, which is not implemented with enable_expert_parallel")
        if getattr(layer, "alternating", False):
            raise _refused(use, f"changes {parameter}, whose rows alternate in this model: not implemented")
        share, hidden = layer.share, layer.router.shape[1]
        is_down = parameter.endswith("down_proj")
        if not is_down and not has_gate(layer.variant.activation):
            experts = parameter.rpartition(".")[0]
            raise _refused(use, f"changes up_proj of {experts}, which have no gates: not implemented")
        shape = (hidden, share.total_width) if is_down else (2 * share.total_width, hidden)
        if (stack.b.shape[1], stack.a.shape[2]) != shape or len(stack.a) > share.total:
            raise _refused(
                use,
                f"is for another model: {parameter} has {share.total} experts of {list(shape)} here, and "
                f"{len(stack.a)} of {[stack.b.shape[1], stack.a.shape[2]]} in the adapter",
            )
        dtype, features, width = self._device.space.dtype, share.features, share.total_width
        b = stack.b.float() * (stack.scale * use.weight)
        a = stack.a[:, :, features] if is_down else stack.a
        if not is_down:
            b = torch.cat([b[:, features], b[:, width + features.start : width + features.stop]], 1)
        change = self._content.experts.setdefault(number, ExpertChange())
        name = "down" if is_down else "gate_up"
        before = getattr(change, name)
        pair = (a.to(dtype), b.to(dtype))
        setattr(change, name, pair if before is None else _joined(before, pair))


def _joined(
    first: tuple[torch.Tensor, torch.Tensor], second: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two low-rank changes of the same experts as one."""
    count = max(len(first[0]), len(second[0]))
    a, b = (
        [torch.cat([t, t.new_zeros(count - len(t), *t.shape[1:])]) for t in pair]
        for pair in zip(first, second, strict=True)
    )
    return torch.cat(a, 1), torch.cat(b, 2)


def _is_special(adapter: Adapter) -> bool:
    """Whether it changes more than matrices of layers."""
    tables = any(name.endswith(".weight") for name in adapter.replaced)
    head = any(module.rpartition(".")[2] in _OUTSIDE for module in adapter.matrices)
    return bool(adapter.embeddings or adapter.experts or adapter.token_rows or tables or head)


def _check_invocation(use: AdapterUse, adapter: Adapter) -> None:
    if adapter.invocation is not None:
        raise _refused(use, "changes the head from a place of the prompt on (aLoRA), which is not implemented")


def _refused(use: AdapterUse, reason: str) -> AdapterError:
    return AdapterError(f"adapter {use.name!r} {reason}")


def _names(uses: Sequence[AdapterUse]) -> str:
    return ", ".join(repr(use.name) for use in uses)


def _spellings(module: str) -> list[str]:
    """A module's name, and how it may be called where the model is a part of another, or the other way round. In models
    that see, the text part is nested; Nemotron-H's layers are in `backbone` in its files, and in `model` in memory."""
    nested = _NESTED.match(module)
    inner = [f"model.{module[nested.end() :]}", module[nested.end() :]] if nested else []
    after = module.partition(".")[2]
    return [module, after, f"model.{module}", f"transformer.{module}", f"backbone.{after}", *inner]


_NESTED = re.compile(r"(model\.)?(language_model|text_model)\.(model\.)?")


def _copy(into: torch.Tensor, content: torch.Tensor) -> None:
    into.copy_(content)


def _copy_in_pieces(into: torch.Tensor, content: torch.Tensor) -> None:
    flat, source = into.view(-1), content.to(into.dtype).contiguous().view(-1)
    size = max(1, COPY_BYTES // source.element_size())
    for start in range(0, len(source), size):
        part = source[start : start + size].pin_memory()
        flat[start : start + size].copy_(part, non_blocking=True)
