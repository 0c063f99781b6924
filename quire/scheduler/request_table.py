"""The requests of an engine, from arrival to end: which wait, which have a row, and their outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from quire.adapters.slots import AdapterSlots, NoAdapters
from quire.errors import CacheTooSmallError, ValidationError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.adapter_use import identity_start
from quire.messages.beams import Hypothesis
from quire.messages.outputs import Finished, Key, Started, StepOutputs
from quire.messages.plan import Fork, PromptLogprobs, TokenLogprobs, Vector
from quire.messages.request import NewRequest, Request, RequestState
from quire.scheduler.beam_search import BeamSearch
from quire.scheduler.drafting import Drafting, NoDrafting
from quire.scheduler.encoding import Encoding, NoEncoding
from quire.scheduler.policies.base import Policy
from quire.scheduler.policies.sharing import NoSharing, SharingPolicy
from quire.scheduler.prefix_groups import NoPrefixGroups, PrefixGroups
from quire.scheduler.rows import RowNumbers, Rows
from quire.scheduler.sessions import NoSessions, Sessions
from quire.scheduler.states import NoRowStates, RowStates
from quire.scheduler.stats import SchedulerStats
from quire.scheduler.swapping import NoSwapper, Swapper
from quire.scheduler.timelines import NoTimelines, Timelines


class RequestTable:
    """Every unfinished request, with its row and its blocks, and the outputs that were not taken yet."""

    def __init__(
        self, tables: BlockTables, policy: Policy, keys: ContentKeys, max_rows: int, groups: PrefixGroups | None = None
    ) -> None:
        self.tables = tables
        self.policy = policy
        self.sharing = policy if isinstance(policy, SharingPolicy) else NoSharing(policy)
        """The policy's part in sharing rows and blocks between tenants."""
        self.rows = Rows(max_rows, self.sharing)
        self.sharing.attach(self)
        self.prefilling: dict[Request, None] = {}
        """Requests with a row whose known tokens take more than one step to compute."""
        self.forked: set[Request] = set()
        """Sequences of one prompt whose last block may still be shared: the next write into it copies it."""
        self.searches: dict[str, BeamSearch] = {}
        """Beam searches, by request."""
        self.stats = SchedulerStats()
        # With several full groups, rows that share the blocks of one need not share those of the others.
        self.groups = groups if groups is not None and tables.num_full == 1 else NoPrefixGroups()
        """Decoding rows that share a prefix."""
        self.states: RowStates | NoRowStates = RowStates(self) if tables.state_pages else NoRowStates()
        """Recurrent states of rows, and their snapshots."""
        self.drafting: Drafting | NoDrafting = NoDrafting()
        """How many drafts rows verify, and those that are made on the host."""
        self.encoding: Encoding | NoEncoding = NoEncoding()
        """Images and other inputs that are not token ids."""
        self.untrimmed: dict[Request, None] = {}
        """Requests that may have pages behind their window since the last chunk they computed."""
        self.on_structured_end: Callable[[Request, bool], None] = lambda request, is_last: None
        """Called when a sequence with structured output ends; `is_last`: no other of its request is left."""
        self.swapper: Swapper | NoSwapper = NoSwapper()
        self.adapters: AdapterSlots | NoAdapters = NoAdapters()
        """Slots of LoRA adapters on the device."""
        self.sessions: Sessions = NoSessions()
        self.timelines: Timelines | NoTimelines = NoTimelines()
        """What happened to recent requests; engines in a process of their own note it."""
        self.arrivals = 0
        """Requests added so far."""
        self._outputs = StepOutputs()
        self._dropped: list[int] = []
        """Rows given back that the device still has."""
        self._branches: dict[int, Fork] = {}
        """By row: beams that were forked into it and that the device does not have yet."""
        self._keys = keys
        self._sequences: dict[str, list[Request]] = {}
        """Unfinished sequences, by request."""

    # Looking up

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._sequences)

    def ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._sequences)

    def sequences(self, request_id: str) -> list[Request]:
        """The unfinished sequences of a request; none if it has ended."""
        return list(self._sequences.get(request_id, ()))

    def sequence(self, key: Key) -> Request | None:
        """The unfinished sequence with this key, if there is one."""
        return next((request for request in self._sequences.get(key[0], ()) if request.index == key[1]), None)

    def has_row_for(self, request: Request) -> bool:
        """Whether a row is free, and the request may have it."""
        return self.rows.free > 0 and self.sharing.allows(request)

    # Waiting

    def add(self, source: NewRequest) -> None:
        """Queue a request. One that could never fit is refused, so that all others finish."""
        if source.id in self._sequences:
            raise ValidationError(
                f"a request with the id {source.id!r} is not finished yet; ids are unique", "id", source.id
            )
        self.encoding.check(source)
        needed = self.tables.pages_for(source.limit - 1)
        if source.num_sequences > 1:
            needed += self.tables.state_pages  # while one sequence's state is copied to another
        if self.tables.has_windows:  # which give nothing back within an image that is computed in one step
            for span in self.encoding.unsplit_spans(source):
                more = self.tables.blocks_for(span.length) + 1
                needed = max(needed, self.tables.pages_for(span.start) + more * self.tables.pages_per_block)
        if needed > self.tables.pool.capacity:
            size = self.tables.block_size
            raise CacheTooSmallError(
                f"request {source.id} may grow to {source.limit} tokens (prompt {len(source.prompt)}), which takes "
                f"{needed} blocks of {size}; the KV cache has {self.tables.pool.capacity}. Lower max_tokens, shorten "
                "the prompt, or give the cache more memory"
            )
        if source.adapters and not self.adapters.is_on:
            self.adapters.hold(source)  # raises
        self.sharing.accept(source)
        saved = self.sessions.begin(source) if source.session else 0
        sequences = [Request(source, index, self.arrivals, saved) for index in source.open_sequences]
        self.arrivals += 1
        first, *others = sequences
        if source.beams is not None:
            self.searches[source.id] = BeamSearch(source, source.beams, sequences)
        elif not source.drawn:
            first.siblings = others
        waiting = sequences if source.drawn else [first]  # sequences that differ cannot fork from the first
        if source.params.structured_outputs is not None:
            for request in waiting:
                request.move(RequestState.COMPILING)
        else:
            self._queue(waiting)  # before the table changes: a user's policy that raises leaves no request behind
        self._sequences[source.id] = sequences
        for request in waiting:
            self.timelines.note(request, request.state.value, request.known)

    def _queue(self, requests: Sequence[Request]) -> None:
        """All of these, which are of one request, wait for its adapters, or for a row; none if the policy raises."""
        if not self.adapters.hold(requests[0].source):
            for request in requests:
                request.move(RequestState.ADAPTING)
            return
        for count, request in enumerate(requests):
            try:
                self.policy.add(request)
            except BaseException:
                for queued in requests[:count]:
                    self.policy.remove(queued)
                self.adapters.release(request.id)
                raise

    def finish_complete(self, request_id: str) -> None:
        """A request that goes on: end its sequences that have all their tokens, whose end was never reported."""
        for request in self.sequences(request_id):
            source, last = request.source, request.output[-1:]
            if last and last[0] in source.stop_ids:
                self.finish(request, "stop", source.stop_reason(last[0]))
            elif request.known >= source.limit:
                self.finish(request, "length")

    def end_compiling(self, request_id: str) -> None:
        """The request's grammar is compiled, or its late mask has come: the request waits for a row."""
        compiled = [request for request in self.sequences(request_id) if request.state is RequestState.COMPILING]
        for request in compiled:
            request.move(RequestState.WAITING)
        if compiled:
            self._queue(compiled)
        for request in compiled:
            self.timelines.note(request, request.state.value, request.known)

    def end_adapting(self) -> None:
        """Requests whose adapters have been loaded wait for a row."""
        for request_id in self.adapters.take_ready():
            for request in self.sequences(request_id):
                if request.state is RequestState.ADAPTING:
                    request.move(RequestState.WAITING)
                    self.policy.add(request)
                    self.timelines.note(request, "waiting", request.known)

    def start_loading(self, request: Request) -> None:
        """The request waits for blocks from a lower tier instead of a row."""
        self.policy.remove(request)
        request.move(RequestState.LOADING)
        self.timelines.note(request, "loading")

    def stop_loading(self, request: Request) -> None:
        """The request waits for a row again, without those blocks."""
        request.move(RequestState.WAITING)
        self.policy.add(request)
        self.timelines.note(request, "waiting", request.known)

    def requeue(self, request: Request) -> None:
        """A request that lost its row waits for another; a beam that has drawn, only for the search's choice."""
        if request.beam is None or request.beam.candidates is None:
            self.policy.add(request)

    # Rows

    def start(self, request: Request, cached: int, now: float) -> None:
        """The request, whose blocks hold its first `cached` tokens, takes a row."""
        request.move(RequestState.RUNNING)
        self.rows.take(request, cached, request.known, len(request.blocks) * self.tables.block_size)
        self.drafting.start(request)
        self.timelines.note(request, "admitted", cached)
        if request.first_scheduled is None:
            request.first_scheduled = now
            self._outputs.started.append(Started(request.key, now, cached))
            self.stats.begin_prompt(request.key, request.known - cached)

    def grow(self, request: Request, tokens: int) -> list[int]:
        """Allocate the blocks the request lacks to hold `tokens` tokens; returns them."""
        fresh = self.tables.grow(request, tokens)
        if fresh:
            self.rows.set_capacity(request.row, len(request.blocks) * self.tables.block_size)
        return fresh

    def start_prefill(self, request: Request) -> None:
        """The request's known tokens take more steps than the one being planned."""
        self.prefilling[request] = None

    def own_last_blocks(self, requests: Sequence[Request]) -> None:
        """The block that each of these writes to next is not shared any more."""
        self.forked.difference_update(requests)

    def compute_chunk(self, request: Request, count: int) -> tuple[list[int], bool]:
        """The request's next `count` known tokens are in the step being planned; returns them, and whether they are
        its last ones, so that it draws."""
        start = int(self.rows.computed[request.row])
        is_last = self.rows.plan_prompt(request.row, count)
        if self.tables.has_windows:
            self.untrimmed[request] = None
        if is_last:
            self.prefilling.pop(request, None)
            self.start_decoding(request)
        return request.tokens(start, start + count), is_last

    def next_tokens(self, request: Request, count: int) -> list[int]:
        """The request's next `count` known tokens that are in no step yet."""
        start = int(self.rows.computed[request.row])
        return request.tokens(start, start + count)

    def start_decoding(self, request: Request) -> None:
        """All the request's known tokens are computed or in flight."""
        self.rows.start_decoding(request.row)
        if request.source.pooling is None:  # a pooled request ends here and reads nothing more
            # The last token is left out: a draw that yields nothing computes it again.
            self.groups.join(request.row, request.blocks[: (request.known - 1) // self.tables.block_size])

    def fork_siblings(self, parent: Request) -> list[Request]:
        """The prompt is computed: the other sequences fork from this row; those without a free row wait. Returns the
        forked ones."""
        forked = []
        for child in parent.take_siblings():
            if self.has_row_for(child) and self.states.has_room:
                child.start_like(parent)
                self._fork(parent, child)
                self.states.fork(parent, child)
                forked.append(child)
            else:
                self.policy.add(child)
        for child in forked:
            self.start_decoding(child)
        return forked

    def branch(self, parent: Request, child: Request) -> None:
        """A beam starts in a row of its own as a copy of another, one token longer; it waits if there is no row."""
        if parent.row < 0 or not self.has_row_for(child) or not self.states.has_room:
            self.policy.add(child)
            return
        row = self._fork(parent, child)
        self.states.branch(parent, child)
        if row in self._dropped:
            self._dropped.remove(row)
        self._branches[row] = Fork(parent.row, row, child.index, child.id)
        self.publish_output(child)
        self.start_decoding(child)

    def _fork(self, parent: Request, child: Request) -> int:
        """The child takes a row and shares the parent's blocks until one of them writes."""
        # What the parent has beyond its known tokens is for drafts: a child gets blocks of its own for these.
        blocks = self.tables.blocks_for(parent.known)
        self.tables.fork(parent, child, blocks)
        row = self.rows.fork(parent, child, blocks * self.tables.block_size)
        self.drafting.start(child)
        child.move(RequestState.RUNNING)
        self.timelines.note(child, "admitted", parent.known)
        self.forked.update((parent, child))
        if self.tables.has_windows:
            self.untrimmed[child] = None
        return row

    def leave_row(self, request: Request, state: RequestState | None = None, has_ended: bool = False) -> None:
        """Row and blocks are given back. `has_ended`: the request will not have another."""
        self.drafting.leave(request, has_ended)
        self.encoding.leave(request)
        self.groups.leave(request.row)
        self.states.leave(request)
        self.tables.release(request)
        self._dropped.append(self.rows.give_back(request))
        self.prefilling.pop(request, None)
        self.forked.discard(request)
        if state is not None:
            request.move(state)

    def preempt(self, request: Request, in_flight: int) -> None:
        """The request loses row and blocks and waits again; its tokens stay. `in_flight`: draws not collected yet."""
        request.in_flight = in_flight
        request.preemptions += 1
        self.stats.preemptions += 1
        self._outputs.preempted.append(request.key)
        self.timelines.note(request, "preempted", in_flight)
        self.leave_row(request, RequestState.PREEMPTED)
        self.requeue(request)

    def await_mask(self, request: Request) -> None:
        """The request waits until its grammar's mask is ready; draws in flight are ignored."""
        if request.row >= 0:
            self.timelines.note(request, "awaits mask")
            self.leave_row(request, RequestState.WAITING)
            request.move(RequestState.COMPILING)

    def restart(self, request: Request) -> None:
        """The request leaves its row and waits for another; draws in flight are ignored."""
        self.timelines.note(request, "restarted")
        self.leave_row(request, RequestState.WAITING)
        self.requeue(request)

    def trim(self, request: Request) -> None:
        """Give back the request's pages that no further query reaches."""
        # A draw that yields nothing is computed again: at the last known token, not at the last computed one.
        self.tables.trim(request, min(int(self.rows.computed[request.row]), request.known - 1))

    def trim_computed(self) -> None:
        """Give back what the chunks of the last step were the last to reach."""
        untrimmed, self.untrimmed = self.untrimmed, {}
        for request in untrimmed:
            if request.row >= 0:
                self.trim(request)

    def take_row_changes(self) -> tuple[list[int], list[Fork]]:
        """Rows that the device is to drop and beams it is to start, since the last call."""
        dropped, self._dropped = self._dropped, []
        branches, self._branches = self._branches, {}
        return dropped, list(branches.values())

    def start_over(self) -> None:
        """All requests with a row wait again, from their known tokens; what is in flight is forgotten."""
        for request in self.rows.running():
            self.restart(request)
        for sequences in self._sequences.values():
            for request in sequences:
                request.in_flight, request.discards = 0, False
        self.take_row_changes()  # the next plan resets every row

    # Collected tokens

    def append_one_each(
        self, requests: Sequence[Request], rows: RowNumbers, tokens: list[int], logprobs: Mapping[int, TokenLogprobs]
    ) -> NDArray[np.int64]:
        """One token for each of these rows; returns how many tokens each has now."""
        for request, token in zip(requests, tokens, strict=True):
            request.output.append(token)
        self._outputs.add_one_each([request.key for request in requests], tokens, logprobs)
        self.stats.generated_tokens += len(tokens)
        if self.drafting.has_host:
            self.drafting.extend(requests, tokens)
        known = self.rows.collect_one_each(rows)
        for i in np.flatnonzero((known - 1) % self.tables.block_size == 0).tolist():
            self.publish_output(requests[i])
        return known

    def append_runs(
        self,
        requests: Sequence[Request],
        rows: RowNumbers,
        tokens: list[int],
        counts: NDArray[np.int32],
        widths: NDArray[np.int64],
        logprobs: Mapping[int, TokenLogprobs],
    ) -> NDArray[np.int64]:
        """`counts` tokens for each of these rows, of `widths` that were planned; returns how many tokens each has
        now."""
        each, at = counts.tolist(), 0
        for request, count in zip(requests, each, strict=True):
            request.output += tokens[at : at + count]
            at += count
        keys = [request.key for request in requests]
        self._outputs.add_runs(keys, tokens, each, logprobs, (widths - 1).tolist())
        self.stats.generated_tokens += len(tokens)
        if self.drafting.has_host:
            self.drafting.extend(requests, tokens, each)
        known = self.rows.collect_each(rows, counts, widths)
        size = self.tables.block_size
        for i in np.flatnonzero((known - 1) // size > (known - 1 - counts) // size).tolist():
            self.publish_output(requests[i])
        return known

    def append(
        self, request: Request, tokens: list[int], logprobs: Mapping[int, TokenLogprobs], width: int = 1
    ) -> None:
        """Any number of tokens for one request, which may have been preempted since they were launched; `width`: the
        most that were expected."""
        self._outputs.add(request.key, tokens, logprobs, width - 1)
        self.stats.generated_tokens += len(tokens)
        request.output += tokens
        if self.drafting.has_host:
            self.drafting.extend([request], tokens, [len(tokens)])
        self.extend_row(request, len(tokens), width)

    def extend_row(self, request: Request, count: int, width: int = 1) -> None:
        """The request's output has `count` more tokens; its row, if it has one, continues from there."""
        if request.row >= 0:
            self.rows.collect(request.row, count, width)
            self.publish_output(request)

    def collect_stale(self, request: Request) -> bool:
        """A draw from before the request was preempted is collected; returns whether it is to be discarded."""
        request.in_flight -= 1
        is_discarded = request.discards
        request.discards = is_discarded and request.in_flight > 0
        return is_discarded

    def report_prompt_logprobs(self, request: Request, logprobs: PromptLogprobs) -> None:
        if not request.is_finished:
            self._outputs.prompt_logprobs.append((request.key, logprobs))

    def finish_pooling(self, request: Request, vector: Vector) -> None:
        """The request's prompt is computed, and this is its vector."""
        self._outputs.vectors.append((request.key, vector.tobytes()))
        self.finish(request, "stop")

    def finish_search(self, request: Request, found: list[Hypothesis]) -> None:
        """A beam search has ended with these sequences, best first."""
        self._outputs.beams.append((request.id, found))
        self.finish(request, "stop")

    def take_outputs(self) -> StepOutputs:
        """Everything reported since the last call."""
        outputs, self._outputs = self._outputs, StepOutputs()
        return outputs

    @property
    def has_outputs(self) -> bool:
        """Whether `take_outputs` has something to return."""
        return not self._outputs.is_empty

    # Ending

    def finish(
        self,
        request: Request,
        reason: str,
        stop_reason: object = None,
        message: str | None = None,
        error: str = "",
        parameter: str | None = None,
        is_seen: bool = False,
    ) -> None:
        """The only way a sequence ends: row and blocks are given back, the end is reported. A search's beams end
        together. `is_seen`: the device has ended the row itself."""
        ending = [request]
        if self.searches.pop(request.id, None) is not None:
            ending = self.sequences(request.id)
        for one in ending:
            if failure := self._end_turn(one, reason, is_seen):
                reason, message = "error", failure
            self.timelines.finished(one, reason)
            self._remove(one)
        preemptions = sum(one.preemptions for one in ending)
        key = request.key if request.beam is None else (request.id, 0)
        self._report_end(request, Finished(key, reason, stop_reason, preemptions, message, error, parameter))
        if request.params.structured_outputs is not None:
            self.on_structured_end(request, request.id not in self._sequences)
        self.stats.finished += 1

    def finish_at(self, request: Request, length: int, stop_reason: object) -> None:
        """End a sequence after its first `length` output tokens; later ones are dropped."""
        del request.output[length:]
        self.finish(request, "stop", stop_reason)

    def _end_turn(self, request: Request, reason: str, is_seen: bool) -> str | None:
        """The session of a turn keeps its KV, and its output if it ended normally. Returns the error if that failed."""
        if not request.source.session:
            return None
        is_kept = reason in ("stop", "length")
        if request.row >= 0 and reason != "error":
            self.extend_keys(request)
            # The KV of the last token was not computed: the row had already ended on the device.
            most, computed = request.known - 1 if is_kept else len(request.prompt), int(self.rows.computed[request.row])
            self.sessions.kv.keep(request, min(computed, most), request.known - 1 if is_seen else computed)
        return self.sessions.end(request, is_kept)

    def _report_end(self, request: Request, finished: Finished) -> None:
        """The end of a session's turn is reported when the session is durable."""

        def report() -> None:
            self._outputs.finished.append(finished)

        def fail(error: Exception) -> None:
            finished.reason, finished.message = "error", f"the answer is not durable: {error}"
            report()

        if request.source.session:
            self.sessions.commit(report, fail)
        else:
            report()

    def _remove(self, request: Request) -> None:
        """Take the sequence out of its row or queue, and out of the table."""
        if request.row >= 0:
            self.leave_row(request, has_ended=True)
        elif request.state is RequestState.LOADING:
            self.swapper.cancel(request)
        elif request.state not in (RequestState.COMPILING, RequestState.ADAPTING):
            self.policy.remove(request)
        self.swapper.unpin(request)
        self.encoding.end(request)
        request.move(RequestState.FINISHED)
        request.in_flight = 0
        self.stats.end_prompts((request,))
        for child in request.take_siblings():  # this sequence will not compute the prompt for them
            self.policy.add(child)
        sequences = self._sequences[request.id]
        sequences.remove(request)
        if not sequences:
            del self._sequences[request.id]
            self.adapters.release(request.id)

    def check_idle(self) -> None:
        """Raise unless every block and row was given back. Call it when no request is unfinished."""
        pool = self.tables.pool
        kept = self.sessions.kv.block_refs()
        held = [block for block, count in enumerate(pool.refs) if count != kept[block]]
        if self.unfinished or self.rows.used or pool.used != len(kept) or held or len(self.policy):
            raise RuntimeError(
                f"not idle: {self.unfinished} requests, {self.rows.used} rows, {pool.used} blocks used, "
                f"held blocks {held[:8]}, {len(self.policy)} waiting"
            )
        self.sharing.check_idle()
        self.encoding.check_idle()
        self.adapters.check_idle()

    # Content of blocks

    def extend_keys(self, request: Request) -> None:
        """Compute content keys for every full block of known tokens."""
        if not self.tables.prefix_caching and not self.swapper.is_on:
            return
        size = self.tables.block_size
        keys, full = request.keys, request.known // self.tables.block_size
        if len(keys) >= full:
            return
        if request.kv_identity:  # blocks wholly before the adapters act have the keys they have without
            before = min(full, identity_start(request.kv_identity) // size)
            if len(keys) < before:
                keys += self._next_keys(request, before)
        if len(keys) < full:
            keys += self._next_keys(request, full)

    def _next_keys(self, request: Request, end: int) -> list[bytes]:
        """Keys of the request's blocks behind those that have one, up to block `end`."""
        have, size = len(request.keys), self.tables.block_size
        tokens, spans = request.tokens(have * size, end * size), request.source.key_spans
        return self._keys.keys_after(self._parent(request, have), tokens, spans, have * size)

    def _parent(self, request: Request, block: int) -> bytes:
        """The key that the key of the request's block number `block` is made from."""
        parent = request.keys[block - 1] if block else self._keys.root(request.source.salt)
        identity = request.kv_identity
        if identity and block == identity_start(identity) // self.tables.block_size:
            return self._keys.adapted(parent, identity)
        return parent

    def partial_key(self, request: Request, tokens: int) -> bytes:
        """The content key of a partly filled last block, which holds the request's tokens up to `tokens`."""
        full = tokens // self.tables.block_size
        start = full * self.tables.block_size
        part, spans = request.tokens(start, tokens), request.source.key_spans
        return self._keys.key_after(self._parent(request, full), part, spans, start)

    def end_key(self, request: Request, tokens: int) -> bytes:
        """The content key of the request's first `tokens` tokens, whether they end within a block or not."""
        full, is_partial = divmod(tokens, self.tables.block_size)
        return self.partial_key(request, tokens) if is_partial or not full else request.keys[full - 1]

    def publish_output(self, request: Request) -> None:
        """Blocks of generated tokens enter the prefix cache once their tokens are known (the last has no KV yet)."""
        full = (request.known - 1) // self.tables.block_size
        if self.tables.prefix_caching and full > request.published:
            self.extend_keys(request)
            self.tables.publish(request, request.keys, full)
        self.states.publish(request)
