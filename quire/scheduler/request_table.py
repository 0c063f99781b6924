"""The requests of an engine and what they hold: who waits, who has a row, and the one way out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.errors import CacheTooSmallError, ValidationError
from quire.kvcache.block_tables import BlockTables
from quire.kvcache.prefix_cache import ContentKeys
from quire.messages.outputs import Finished, Key, StepOutputs
from quire.messages.plan import Fork
from quire.messages.request import NewRequest, Request, RequestState
from quire.scheduler.beams import BeamSearch
from quire.scheduler.groups import PrefixGroups
from quire.scheduler.policies.base import Policy
from quire.scheduler.policies.sharing import SharingPolicy
from quire.scheduler.rows import Rows
from quire.scheduler.stats import SchedulerStats
from quire.sessions.keeper import SessionKeeper

if TYPE_CHECKING:
    from quire.scheduler.swapping import Swapper


class RequestTable:
    """Every unfinished request, with its row and its blocks; and what its caller is still to be told."""

    def __init__(
        self, tables: BlockTables, policy: Policy, keys: ContentKeys, max_rows: int, groups: PrefixGroups | None = None
    ) -> None:
        self.tables = tables
        self.policy = policy
        self.rows = Rows(max_rows)
        self.sharing = policy if isinstance(policy, SharingPolicy) else None
        """The policy, if it shares out rows and blocks."""
        if self.sharing is not None:
            self.sharing.attach(self)
            self.rows.watcher = self.sharing
        self.prefilling: dict[Request, None] = {}
        """Requests with a row whose known tokens take more steps than the one they joined in."""
        self.forked: set[Request] = set()
        """Samples of one prompt whose last block may still be shared: the next write into it copies it."""
        self.dropped: list[int] = []
        """Rows given back that the device has not been told of."""
        self.searches: dict[str, BeamSearch] = {}
        """Beam searches, by request."""
        self.branches: dict[int, Fork] = {}
        """Rows that beams have begun in and the device has not been told of."""
        self.outputs = StepOutputs()
        self.stats = SchedulerStats()
        self.groups = groups
        """Decoding rows that begin alike; None if nobody is to be told."""
        self.on_guided_end: Callable[[Request, bool], None] | None = None
        """Told when a sample whose output has a form ends, and whether it was the last of its request."""
        self.moving: Swapper | None = None
        """Requests and blocks on their way between tiers, where there are any below the device's."""
        self.sessions: SessionKeeper | None = None
        """Whose turns some requests are."""
        self._keys = keys
        self._groups: dict[str, list[Request]] = {}
        self.arrivals = 0
        """Requests that have come in all."""

    # Who there is

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._groups)

    def ids(self) -> list[str]:
        """Ids of all unfinished requests."""
        return list(self._groups)

    def samples(self, request_id: str) -> list[Request]:
        """The unfinished samples of a request; none if it has ended."""
        return list(self._groups.get(request_id, ()))

    def sample(self, key: Key) -> Request | None:
        """One unfinished sample."""
        return next((request for request in self._groups.get(key[0], ()) if request.index == key[1]), None)

    def add(self, source: NewRequest) -> None:
        """Queue a request. One that could never fit is refused, so that any other always finishes."""
        if source.id in self._groups:
            raise ValidationError(
                f"a request with the id {source.id!r} is not finished yet; ids are unique", "id", source.id
            )
        needed = self.tables.blocks_for(source.limit - 1)
        if needed > self.tables.pool.capacity:
            size = self.tables.block_size
            raise CacheTooSmallError(
                f"request {source.id} may grow to {source.limit} tokens (prompt {len(source.prompt)}), which takes "
                f"{needed} blocks of {size}; the KV cache has {self.tables.pool.capacity}. Lower max_tokens, shorten "
                "the prompt, or give the cache more memory"
            )
        if self.sharing is not None:
            self.sharing.accept(source)
        saved = self._begin_turn(source)
        samples = [Request(source, index, self.arrivals) for index in range(source.num_sequences)]
        samples[0].saved = saved
        self.arrivals += 1
        if source.beams is not None:
            self.searches[source.id] = BeamSearch(source, source.beams, samples)
        else:
            samples[0].siblings = samples[1:]
        if source.params.structured_outputs is not None:
            samples[0].move(RequestState.COMPILING)
        else:
            self.policy.add(samples[0])  # first: a policy of the user's that fails leaves no request behind
        self._groups[source.id] = samples

    def _begin_turn(self, source: NewRequest) -> int:
        """How many of the request's tokens the tiers below may have, where it is a session's turn."""
        if not source.session:
            return 0
        if self.sessions is None:
            raise ValidationError("this engine keeps no sessions", "session", source.session)
        return self.sessions.begin(source)

    def end_compiling(self, request_id: str) -> None:
        """The request's grammar is there: it waits like any other."""
        for request in self.samples(request_id):
            if request.state is RequestState.COMPILING:
                request.move(RequestState.WAITING)
                self.policy.add(request)

    def has_row_for(self, request: Request) -> bool:
        """Whether a row is free, and the request may have it."""
        return self.rows.free > 0 and (self.sharing is None or self.sharing.allows(request))

    def note_decoding(self, request: Request) -> None:
        """All the request's known tokens are computed: from here on it may share its beginning's reading."""
        if self.groups is not None and request.source.pooling is None:  # who is done reads nothing any more
            # The last token is left out: a draw that yields nothing computes it again.
            self.groups.join(request.row, request.blocks[: (request.known - 1) // self.tables.block_size])

    # How they leave

    def leave_row(self, request: Request) -> None:
        """Row and blocks come back."""
        if self.groups is not None:
            self.groups.leave(request.row)
        self.tables.release(request)
        self.dropped.append(self.rows.give_back(request))
        self.prefilling.pop(request, None)
        self.forked.discard(request)

    def finish(
        self, request: Request, reason: str, stop_reason: object = None, message: str | None = None, error: str = ""
    ) -> None:
        """The one way out: row and blocks come back, the caller is told. Beams of a search end together."""
        together = [request]
        if self.searches.pop(request.id, None) is not None:
            together = self.samples(request.id)
        for one in together:
            if wrong := self._end_turn(one, reason):
                reason, message = "error", wrong
            self._take_out(one, reason, stop_reason)
        group = self._groups.get(request.id)
        preemptions = sum(one.preemptions for one in together)
        key = request.key if request.beam is None else (request.id, 0)
        self._tell_end(request, Finished(key, reason, stop_reason, preemptions, message, error))
        if self.on_guided_end is not None and request.params.structured_outputs is not None:
            self.on_guided_end(request, not group)
        self.stats.finished += 1

    def _end_turn(self, request: Request, reason: str) -> str | None:
        """What a session's turn has computed stays with the session; what it said, if it came to its end.

        Returns why the session could not have it, if it could not."""
        if self.sessions is None or not request.source.session:
            return None
        is_kept = reason in ("stop", "length")
        if request.row >= 0 and reason != "error":
            self.extend_keys(request)
            # Where a row has ended on the device, its last token is not computed, whatever was launched since.
            most = request.known - 1 if is_kept else len(request.prompt)
            self.sessions.kv.keep(request, min(int(self.rows.computed[request.row]), most))
        return self.sessions.end(request, is_kept)

    def _tell_end(self, request: Request, finished: Finished) -> None:
        """A session's answer is told when it is durable."""
        if self.sessions is None or not request.source.session:
            self.outputs.finished.append(finished)
        else:

            def fail(error: Exception) -> None:
                finished.reason, finished.message = "error", f"the answer is not durable: {error}"
                self.outputs.finished.append(finished)

            self.sessions.commit(lambda: self.outputs.finished.append(finished), fail)

    def _take_out(self, request: Request, reason: str, stop_reason: object) -> None:
        if request.row >= 0:
            self.leave_row(request)
        elif request.state is RequestState.LOADING and self.moving is not None:
            self.moving.give_up(request)
        elif request.state is not RequestState.COMPILING:
            self.policy.remove(request)
        if self.moving is not None:
            self.moving.disown(request)
        request.move(RequestState.FINISHED)
        request.in_flight = 0
        request.finish_reason, request.stop_reason = reason, stop_reason
        for child in request.siblings:  # its prompt was never computed: they wait for nothing no longer
            if not child.is_finished:
                self.policy.add(child)
        request.siblings = []
        group = self._groups[request.id]
        group.remove(request)
        if not group:
            del self._groups[request.id]

    def start_over(self) -> None:
        """Everyone with a row waits again, from the tokens that are known; what is in flight is forgotten."""
        for request in self.rows.running():
            self.leave_row(request)
            request.move(RequestState.WAITING)
            self.queue(request)
        for group in self._groups.values():
            for request in group:
                request.in_flight = 0
        self.dropped = []
        self.branches = {}

    def queue(self, request: Request) -> None:
        """Who has lost its row waits for another; a beam that has drawn, for the choice alone."""
        if request.beam is None or request.beam.candidates is None:
            self.policy.add(request)

    # What their blocks contain

    def extend_keys(self, request: Request) -> None:
        """Content keys for every full block of known tokens."""
        if not self.tables.prefix_caching and self.moving is None:
            return
        size = self.tables.block_size
        keys, full = request.keys, request.known // self.tables.block_size
        if len(keys) < full:
            parent = keys[-1] if keys else self._keys.root(request.source.salt)
            keys += self._keys.after(parent, request.tokens(len(keys) * size, full * size))

    def partial_key(self, request: Request, tokens: int) -> bytes:
        """The content key of a last block that holds the request's tokens up to `tokens` and has room for more."""
        full = tokens // self.tables.block_size
        parent = request.keys[full - 1] if full else self._keys.root(request.source.salt)
        return self._keys.following(parent, request.tokens(full * self.tables.block_size, tokens))

    def publish_output(self, request: Request) -> None:
        """Blocks of generated tokens are findable once their tokens are known (the last token has no KV yet)."""
        full = (request.known - 1) // self.tables.block_size
        if self.tables.prefix_caching and full > request.published:
            self.extend_keys(request)
            self.tables.publish(request, request.keys, full)

    # What is to be told

    @property
    def has_outputs(self) -> bool:
        """Whether something happened that `take_outputs` has not told yet."""
        outputs = self.outputs
        return bool(outputs.keys or outputs.finished or outputs.started or outputs.preempted or outputs.prompt_logprobs)

    def take_outputs(self) -> StepOutputs:
        """What happened to requests since this was asked last."""
        outputs, self.outputs = self.outputs, StepOutputs()
        return outputs

    def check_idle(self) -> None:
        """Raise unless every block and row has come back; to be called when nothing is unfinished."""
        pool = self.tables.pool
        kept = Counter[int]() if self.sessions is None else self.sessions.kv.held()
        held = [block for block, count in enumerate(pool.refs) if count != kept[block]]
        if self.unfinished or self.rows.used or pool.used != len(kept) or held or len(self.policy):
            raise RuntimeError(
                f"not idle: {self.unfinished} requests, {self.rows.used} rows, {pool.used} blocks used, "
                f"held blocks {held[:8]}, {len(self.policy)} waiting"
            )
        if self.sharing is not None:
            self.sharing.check_idle()
