"""The planning half's heart: what the next step computes, and what the last one means.

There is no prefill phase and no decode phase. A request has tokens and a number of them that is computed; a step moves
that number forward, by one for most rows, by a chunk for those whose prompt is not done.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.errors import CacheTooSmallError, ValidationError
from quire.memory.prefix import ContentKeys
from quire.memory.tables import BlockTables
from quire.messages.outputs import Finished, Key, Started, StepOutputs
from quire.messages.plan import Fork, Ints, NewRow, StepPlan, StepResult
from quire.messages.request import NewRequest, Request, State
from quire.scheduler.draft import Draft, Flight
from quire.scheduler.policies.base import Policy
from quire.scheduler.rows import Rows
from quire.scheduler.stats import SchedulerStats


class Scheduler:
    """Plans steps under a token budget and a row budget, and applies their results."""

    def __init__(
        self,
        tables: BlockTables,
        policy: Policy,
        keys: ContentKeys,
        max_rows: int,
        token_budget: int,
        chunked_prefill: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.tables = tables
        self.policy = policy
        self.rows = Rows(max_rows)
        self.stats = SchedulerStats()
        self._keys = keys
        self._budget = token_budget
        self._chunked = chunked_prefill
        self._clock = clock
        self._groups: dict[str, list[Request]] = {}
        self._prefilling: dict[Request, None] = {}
        self.forked: set[Request] = set()
        """Samples of one prompt whose last block may still be shared: the next write into it copies it."""
        self._suspects: deque[Request] = deque()
        self._flights: deque[Flight] = deque()
        self._outputs = StepOutputs()
        self._dropped: list[int] = []
        self._reset = False
        self._step = 0
        self._arrivals = 0

    # Requests come and go

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
        samples = [Request(source, index, self._arrivals) for index in range(source.params.n)]
        self._arrivals += 1
        self._groups[source.id] = samples
        samples[0].siblings = samples[1:]
        self.policy.add(samples[0])

    def abort(self, request_id: str, reason: str = "abort", message: str | None = None) -> None:
        """End every sample of a request, wherever it is. An unknown id is no error: it may just have finished."""
        for request in list(self._groups.get(request_id, ())):
            self._finish(request, reason, message=message)

    def abort_all(self) -> None:
        """End everything that is unfinished."""
        for request_id in list(self._groups):
            self.abort(request_id)

    def finish(self, key: Key, at: int, stop_reason: str | None = None) -> None:
        """The caller found the end of a sample after its first `at` output tokens; what came after is forgotten."""
        for request in self._groups.get(key[0], ()):
            if request.index == key[1]:
                del request.output[at:]
                self._finish(request, "stop", stop_reason)
                return

    @property
    def unfinished(self) -> int:
        """Requests that have not ended."""
        return len(self._groups)

    @property
    def in_flight(self) -> int:
        """Steps launched and not collected."""
        return len(self._flights)

    @property
    def waiting(self) -> int:
        return len(self.policy)

    @property
    def has_outputs(self) -> bool:
        """Whether something happened that `take_outputs` has not told yet."""
        outputs = self._outputs
        return bool(outputs.keys or outputs.finished or outputs.started or outputs.prompt_logprobs)

    def take_outputs(self) -> StepOutputs:
        """What happened to requests since this was asked last."""
        outputs, self._outputs = self._outputs, StepOutputs()
        return outputs

    # A step is planned

    def schedule(self) -> StepPlan | None:
        """The next step, or None if there is nothing to compute now."""
        draft = Draft()
        if self._suspects:
            return self._schedule_suspect(draft)
        decodes = self._schedule_decodes(draft)
        budget = self._continue_prompts(draft, self._budget - len(decodes))
        if not draft.preempted:
            self._admit(draft, budget)
        decodes = decodes[self.rows.decoding[decodes]]  # some may have lost their row since
        if not len(decodes) and not draft.prompts:
            return None
        return self._launch(draft, decodes)

    def _schedule_decodes(self, draft: Draft) -> NDArray[np.int64]:
        """Every row that waits for its next token, each with a slot to write to."""
        rows = self.rows
        ready = np.flatnonzero(rows.decoding & (rows.bound < rows.limit))
        if len(ready) > self._budget:
            ready = np.array(sorted(ready.tolist(), key=self._rank_of_row)[: self._budget], np.int64)
        short = ready[rows.bound[ready] > rows.capacity[ready]]
        if not len(short) and not self.forked:
            return ready
        scheduled = {rows.requests[row] for row in ready.tolist()}
        in_need = {rows.requests[row] for row in short.tolist()} | (self.forked & scheduled)
        self._give_slots(draft, sorted(in_need, key=self.policy.rank))
        return ready

    def _rank_of_row(self, row: int) -> Any:
        return self.policy.rank(self.rows.requests[row])  # type: ignore[arg-type]

    def _give_slots(self, draft: Draft, requests: list[Request]) -> None:
        """Room for one more token each. Whoever must leave leaves first: a block that is copied from in this step is
        then never one that is copied to, and copies need no order."""
        while self._slots_cost(requests) > self.tables.pool.free:
            self._preempt_one(draft)
        for request in requests:
            if request.row >= 0:
                self._give_slot(draft, request)

    def _slots_cost(self, requests: list[Request]) -> int:
        """Blocks it takes to give each request that still has its row one more slot."""
        fresh, shared = 0, Counter[int]()
        for request in requests:
            index = self._next_block(request) if request.row >= 0 else -1
            if index >= len(request.blocks):
                fresh += 1
            elif index >= 0:
                shared[request.blocks[index]] += 1
        # The last one to hold a block need not copy it.
        return fresh + sum(min(count, self.tables.pool.refs[block] - 1) for block, count in shared.items())

    def _next_block(self, request: Request) -> int:
        """Which of its blocks the row's next decode writes to."""
        return (int(self.rows.bound[request.row]) - 1) // self.tables.block_size

    def _give_slot(self, draft: Draft, request: Request) -> None:
        """The next token goes to a block that is the request's alone."""
        row, index = request.row, self._next_block(request)
        if index >= len(request.blocks):
            self._grow(draft, request, int(self.rows.bound[row]))
        elif self.tables.is_shared(request, index):
            source, own = self.tables.copy_on_write(request, index)
            draft.copies.append((row, source, own))
            draft.assign(row, index, [own])
        self.forked.discard(request)

    def _continue_prompts(self, draft: Draft, budget: int) -> int:
        """Rows whose known tokens are not all computed go on, best-ranked first."""
        for request in sorted(self._prefilling, key=self.policy.rank):
            if budget <= 0:
                break
            if request.row >= 0:
                budget -= self._schedule_chunk(draft, request, budget)
        for request in draft.prompts:
            self._publish_chunk(draft, request)
        return budget

    def _schedule_chunk(self, draft: Draft, request: Request, budget: int) -> int:
        """As many of the row's known tokens as budget and blocks allow; returns how many."""
        computed, bound = int(self.rows.computed[request.row]), int(self.rows.bound[request.row])
        count = min(bound - computed, budget)
        if self.tables.missing(request, computed + count) > self.tables.pool.free:
            room = int(self.rows.capacity[request.row]) + self.tables.pool.free * self.tables.block_size - computed
            if room > 0:
                count = min(count, room)
            elif self._make_room(draft, request, 1):
                count = min(count, self.tables.block_size)
            else:
                return 0
        self._grow(draft, request, computed + count)
        draft.prompts[request] = count
        return count

    def _admit(self, draft: Draft, budget: int) -> None:
        """Waiting requests join in the policy's order, as long as rows, blocks and budget last."""
        while budget > 0 and self.rows.free:
            request = self.policy.next()
            if request is None or request.in_flight:
                return
            admitted = self._admit_one(draft, request, budget)
            if not admitted:
                return
            budget -= admitted

    def _admit_one(self, draft: Draft, request: Request, budget: int, alone: bool = False) -> int:
        """Give the request a row and schedule its first chunk; returns the chunk's tokens, 0 if it does not fit."""
        tables, known = self.tables, request.known
        self._extend_keys(request)
        hit = tables.match(request.keys, known) if request.source.reads_cache else []
        cached = len(hit) * tables.block_size
        needed = tables.blocks_for(known) - len(hit) + tables.cost_of_sharing(hit)
        spare = 0 if alone else self._promised() + self._headroom()
        if needed + spare > tables.pool.free:
            return 0
        count = min(known - cached, budget)
        if count < known - cached <= self._budget and not self._chunked:
            return 0  # a later step has room for all of it; what exceeds any step goes in chunks all the same
        self.policy.remove(request)
        request.move(State.RUNNING)
        tables.adopt(request, hit)
        row = self.rows.take(request, computed=cached, bound=known)
        self.rows.capacity[row] = cached
        draft.assign(row, 0, hit)
        self._grow(draft, request, cached + count)
        draft.prompts[request] = count
        draft.add.append(_new_row(request, cached))
        self._prefilling[request] = None
        self._publish_chunk(draft, request)
        self._note_start(draft, request, cached)
        return count

    def _promised(self) -> int:
        """Blocks that admitted prompts will still ask for."""
        return sum(self.tables.missing(request, request.known) for request in self._prefilling)

    def _headroom(self) -> int:
        """Blocks left alone at admission, so that running rows can grow a while before anyone must be preempted."""
        return min(self.rows.used, self.tables.pool.capacity // 16)

    def _grow(self, draft: Draft, request: Request, tokens: int) -> None:
        index = len(request.blocks)
        fresh = self.tables.grow(request, tokens)
        if fresh:
            draft.assign(request.row, index, fresh)
            self.rows.capacity[request.row] = len(request.blocks) * self.tables.block_size

    def _publish_chunk(self, draft: Draft, request: Request) -> None:
        """Blocks this step fills can be hit by requests of this very step: all KV is written before it is read."""
        filled = int(self.rows.computed[request.row]) + draft.prompts[request]
        draft.published += self.tables.publish(request, request.keys, filled // self.tables.block_size)

    def _note_start(self, draft: Draft, request: Request, cached: int) -> None:
        draft.cached_tokens += cached
        draft.queried_tokens += request.known
        if request.first_scheduled is None:
            request.first_scheduled = self._clock()
            request.num_cached = cached
            self._outputs.started.append(Started(request.key, request.first_scheduled, cached))

    # A shortage

    def _make_room(self, draft: Draft, request: Request, blocks: int) -> bool:
        """Preempt until `blocks` are free; False if that cost the request itself its row."""
        while self.tables.pool.free < blocks:
            if self._preempt_one(draft) is request:
                return False
        return True

    def _preempt_one(self, draft: Draft) -> Request:
        """The policy names who must leave, never the best-ranked: it always goes on, so everyone finishes in turn."""
        running = self.rows.running()
        first = min(running, key=self.policy.rank)
        others = [other for other in running if other is not first]
        if not others:
            pool = self.tables.pool
            raise RuntimeError(
                f"{first} runs alone and lacks blocks: {pool.free} of {pool.capacity} free, {len(first.blocks)} held"
            )
        victim = self.policy.victim(others)
        self._preempt(draft, victim)
        return victim

    def _preempt(self, draft: Draft, victim: Request) -> None:
        """Take row and blocks; the tokens stay, and are computed again when there is room."""
        epoch = int(self.rows.epoch[victim.row])
        victim.in_flight = sum(flight.draws_for(victim.row, epoch) for flight in self._flights)
        victim.preemptions += 1
        self.stats.preemptions += 1
        draft.withdraw(victim)
        draft.preempted.append(victim)
        self._leave_row(victim)
        victim.move(State.PREEMPTED)
        self.policy.add(victim)

    def _leave_row(self, request: Request) -> None:
        self.tables.release(request)
        self._dropped.append(self.rows.give_back(request))
        self._prefilling.pop(request, None)
        self.forked.discard(request)

    # The plan is written down

    def _launch(self, draft: Draft, decodes: NDArray[np.int64]) -> StepPlan:
        rows = self.rows
        rows.computed[decodes] += 1
        rows.bound[decodes] += 1
        requests: list[Request] = [rows.requests[row] for row in decodes.tolist()]
        draws, samples, sample_rows = list(requests), list(range(len(decodes))), decodes.tolist()
        tokens: list[int] = []
        for request, count in draft.prompts.items():
            row = request.row
            start = int(rows.computed[row])
            tokens += request.tokens(start, start + count)
            rows.computed[row] = start + count
            if start + count == rows.bound[row]:
                self._prefilling.pop(request)
                rows.bound[row] += 1
                rows.decoding[row] = True
                for drawer in (request, *self._fork_siblings(draft, request)):
                    draws.append(drawer)
                    samples.append(len(requests))
                    sample_rows.append(drawer.row)
            requests.append(request)
        scheduled = _ints([request.row for request in requests]) if draft.prompts else decodes.astype(np.int32)
        targets = _ints(sample_rows)
        plan = StepPlan(
            step=self._step,
            rows=scheduled,
            counts=_ints([1] * len(decodes) + list(draft.prompts.values())),
            num_decodes=len(decodes),
            tokens=_ints(tokens),
            samples=_ints(samples),
            sample_rows=targets,
            block_rows=_ints(draft.block_rows),
            block_indices=_ints(draft.block_indices),
            blocks=_ints(draft.blocks),
            max_context=int(rows.computed[scheduled].max()),
            reset=self._reset,
            drop=self._dropped,
            add=draft.add,
            forks=draft.forks,
            copies=[(source, own) for _, source, own in draft.copies],
        )
        self._flights.append(Flight(plan.step, requests, draws, targets, rows.epoch[targets], draft.published))
        self._step += 1
        self._dropped = []
        self._reset = False
        self.stats.note_step(plan, draft, self)
        return plan

    def _fork_siblings(self, draft: Draft, parent: Request) -> list[Request]:
        """The prompt is computed: its other samples fork from this row, or queue up if rows run out."""
        forked = []
        for child in parent.siblings:
            if child.is_finished:
                continue
            if self.rows.free:
                self.tables.fork(parent, child)
                row = self.rows.take(child, computed=parent.known, bound=parent.known + 1)
                self.rows.capacity[row] = self.rows.capacity[parent.row]
                self.rows.decoding[row] = True
                child.move(State.RUNNING)
                child.first_scheduled, child.num_cached = parent.first_scheduled, parent.num_cached
                child.keys = list(parent.keys)
                draft.forks.append(Fork(parent.row, row, child.index, child.id))
                forked.append(child)
            else:
                self.policy.add(child)
        if forked:
            self.forked.update((parent, *forked))
        parent.siblings = []
        return forked

    # A result is applied

    def update(self, result: StepResult) -> None:
        """Append the tokens of the oldest step in flight, end requests, release their blocks."""
        flight = self._flights.popleft()
        if result.step != flight.step:
            raise RuntimeError(f"the result of step {result.step} came where that of step {flight.step} was due")
        if self._suspects and self._suspects[0] in flight.draws:
            self._suspects.popleft().failures = 0
        for index, entry in result.prompt_logprobs.items():
            if not flight.requests[index].is_finished:
                self._outputs.prompt_logprobs.append((flight.requests[index].key, entry))
        live = self.rows.epoch[flight.rows] == flight.epochs
        if live.all() and (result.counts == 1).all() and not result.invalid.any():
            self._append_all(flight, result)
        else:
            self._append_each(flight, result, live)

    def _append_all(self, flight: Flight, result: StepResult) -> None:
        """The common case: one token for every row of the step."""
        rows, tokens = flight.rows, result.tokens.tolist()
        for request, token in zip(flight.draws, tokens, strict=True):
            request.output.append(token)
        outputs = self._outputs
        outputs.logprobs.update({len(outputs.keys) + i: entry for i, entry in result.logprobs.items()})
        if outputs.counts is not None:
            outputs.counts += [1] * len(tokens)
        outputs.keys += [request.key for request in flight.draws]
        outputs.tokens += tokens
        known = self.rows.known[rows] + 1
        self.rows.known[rows] = known
        for i in np.flatnonzero((known - 1) % self.tables.block_size == 0).tolist():
            self._publish_output(flight.draws[i])
        for i in np.flatnonzero(result.stopped | (known >= self.rows.limit[rows])).tolist():
            self._end(flight.draws[i], tokens[i], bool(result.stopped[i]))
        self.stats.generated_tokens += len(tokens)

    def _append_each(self, flight: Flight, result: StepResult, live: NDArray[np.bool_]) -> None:
        """Some rows ended, were preempted or failed since the launch, or yielded other than one token."""
        ends = np.cumsum(result.counts).tolist()
        for i, request in enumerate(flight.draws):
            if request.is_finished or not (live[i] or request.in_flight):
                continue
            if not live[i]:
                request.in_flight -= 1
            if result.invalid[i]:
                self.tables.withdraw(request.blocks)  # nobody else shall read what led here
                self._finish(request, "error", message="the model's logits are not numbers (NaN)")
                continue
            tokens = result.tokens[ends[i] - int(result.counts[i]) : ends[i]].tolist()
            self._append(request, tokens, result, i)

    def _append(self, request: Request, tokens: list[int], result: StepResult, index: int) -> None:
        outputs = self._outputs
        if outputs.counts is None:
            outputs.counts = [1] * len(outputs.keys)
        if index in result.logprobs:
            outputs.logprobs[len(outputs.keys)] = result.logprobs[index]
        outputs.keys.append(request.key)
        outputs.counts.append(len(tokens))
        outputs.tokens += tokens
        request.output += tokens
        self.stats.generated_tokens += len(tokens)
        if request.row >= 0:
            self.rows.known[request.row] = request.known
            # One token was counted on at launch. All but a row's last token are computed, however many came.
            self.rows.bound[request.row] += len(tokens) - 1
            self.rows.computed[request.row] += len(tokens) - 1
            self._publish_output(request)
        if tokens and (result.stopped[index] or request.known >= request.source.limit):
            self._end(request, tokens[-1], bool(result.stopped[index]))

    def _publish_output(self, request: Request) -> None:
        """Blocks of generated tokens are findable once their tokens are known (the last token has no KV yet)."""
        full = (request.known - 1) // self.tables.block_size
        if self.tables.prefix_caching and full > request.published:
            self._extend_keys(request)
            self.tables.publish(request, request.keys, full)

    def _extend_keys(self, request: Request) -> None:
        """Content keys for every full block of known tokens."""
        size = self.tables.block_size
        keys = request.keys
        while self.tables.prefix_caching and len(keys) < request.known // size:
            parent = keys[-1] if keys else self._keys.root(request.source.salt)
            keys.append(self._keys.following(parent, request.tokens(len(keys) * size, (len(keys) + 1) * size)))

    def _end(self, request: Request, token: int, stopped: bool) -> None:
        source = request.source
        if not stopped:
            self._finish(request, "length")
        elif token in source.eos_ids and not source.params.ignore_eos:
            self._finish(request, "stop")
        else:
            self._finish(request, "stop", token)

    def _finish(self, request: Request, reason: str, stop_reason: object = None, message: str | None = None) -> None:
        """The one way out: row and blocks come back, the caller is told."""
        if request.row >= 0:
            self._leave_row(request)
        else:
            self.policy.remove(request)
        if request in self._suspects:
            self._suspects.remove(request)
        request.move(State.FINISHED)
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
        self._outputs.finished.append(Finished(request.key, reason, stop_reason, request.preemptions, message))
        self.stats.finished += 1

    # A step failed

    def reset(self, message: str, step: int | None = None) -> None:
        """Step `step` (if None the oldest in flight) failed: all start again from known tokens, suspects first."""
        failed = self._part_of(self._flights[0].step if step is None and self._flights else step)
        for flight in self._flights:
            self.tables.withdraw(flight.published)
        self._flights.clear()
        for request in self.rows.running():
            self._leave_row(request)
            request.move(State.WAITING)
            self.policy.add(request)
        for group in self._groups.values():
            for request in group:
                request.in_flight = 0
        self._dropped = []
        self._reset = True
        self._blame(failed, message)

    def _part_of(self, step: int | None) -> list[Request]:
        """Unfinished requests of the steps in flight up to `step`: a device may tell of a failure only a step later."""
        flights = [flight for flight in self._flights if step is not None and flight.step <= step]
        part = dict.fromkeys(request for flight in flights for request in (*flight.requests, *flight.draws))
        return [request for request in part if not request.is_finished]

    def _blame(self, failed: list[Request], message: str) -> None:
        """A request that failed alone after it had failed before is ended; the others will be tried one by one."""
        for request in failed:
            request.failures += 1
        is_proven = len({request.id for request in failed}) == 1 and any(request.failures > 1 for request in failed)
        for request in failed:
            if is_proven:
                for sample in (request, *request.siblings):
                    if not sample.is_finished:
                        self._finish(sample, "error", message=message)
            elif request not in self._suspects:
                self._suspects.append(request)

    def _schedule_suspect(self, draft: Draft) -> StepPlan | None:
        """The first suspect alone, until it has drawn a token: if a step fails again, it was the one."""
        if self._flights:
            return None
        suspect = self._suspects[0]
        if suspect.row >= 0:
            self._schedule_chunk(draft, suspect, self._budget)
            self._publish_chunk(draft, suspect)
        elif not (self.rows.free and self._admit_one(draft, suspect, self._budget, alone=True)):
            for passed in self.rows.running():
                self._preempt(draft, passed)
            self._admit_one(draft, suspect, self._budget, alone=True)
        return self._launch(draft, np.empty(0, np.int64))

    # Housekeeping

    def reset_prefix_cache(self) -> bool:
        """Forget cached content; False if requests are running (their blocks stay, and theirs alone)."""
        self.tables.reset_prefix()
        return self.rows.used == 0

    def check_idle(self) -> None:
        """Raise unless every block and row has come back; to be called when nothing is unfinished."""
        pool = self.tables.pool
        held = [block for block, count in enumerate(pool.refs) if count]
        if self.unfinished or self.rows.used or pool.used or held or len(self.policy):
            raise RuntimeError(
                f"not idle: {self.unfinished} requests, {self.rows.used} rows, {pool.used} blocks used, "
                f"held blocks {held[:8]}, {len(self.policy)} waiting"
            )


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int32)


def _new_row(request: Request, cached: int) -> NewRow:
    source = request.source
    return NewRow(
        row=request.row,
        request=request.id,
        prompt_len=len(request.prompt),
        num_tokens=request.known,
        num_computed=cached,
        limit=source.limit,
        seed=source.seed,
        sample=request.index,
        params=source.params,
        stop_ids=source.stop_ids,
        bad_words=source.bad_words,
    )
