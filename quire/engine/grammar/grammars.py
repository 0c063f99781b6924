"""`Grammars`: structured output, as the loop uses it."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from quire.engine.grammar.drafts import PlanDrafts
from quire.engine.grammar.fork_server import ForkServerClient
from quire.engine.grammar.matcher import EXITED, MatcherClient
from quire.engine.grammar.tenants import TenantForms
from quire.engine.grammar.wire import ForkServerSpec, Op, allows, encode
from quire.errors import ValidationError
from quire.messages.histogram import COMPILE_BOUNDS, Histogram
from quire.messages.outputs import Key
from quire.messages.plan import StepMasks, StepPlan
from quire.messages.request import NewRequest, Request
from quire.resource_limits import as_resource_error
from quire.sleeping import sleep_until

logger = logging.getLogger(__name__)

MAX_MATCHERS = 32
"""Compiled grammars kept, used or not, each in a sleeping process…"""
IDLE_BYTES = 512 << 20
"""…and the memory that unused ones may take together."""
MAX_REFUSED = 256
"""Forms remembered as not compiling."""
STEP_WAIT_SECONDS = 0.03
"""How long a step waits for masks. A sequence whose mask is later is suspended until it comes."""
MASK_CPU_SECONDS = 1.0
"""CPU time a matcher may take for one reply…"""
FREE_CPU_SECONDS = 2.0
EACH_CPU_SECONDS = 0.01
"""…and for all replies: FREE_CPU_SECONDS, plus this much per reply and per mask along drafts."""
CERTAIN_WAIT_SECONDS = 0.002
"""How long an idle device waits for certain drafts."""


class Unavailable(str):
    """A refusal for lack of resources: the form is not at fault, and may be tried again."""


class MatchedSequence:
    """A running sequence, its matcher and its slot for masks."""

    __slots__ = (
        "cpu_when_late", "late_since", "matcher", "number", "position", "proposed", "request", "slot", "wanted",
    )  # fmt: skip

    def __init__(self, request: Request, matcher: MatcherClient, number: int) -> None:
        self.request = request
        self.matcher = matcher
        self.number = number
        self.position = 0
        """Output tokens sent to the matcher."""
        self.slot = -1
        """The slot of its next masks, present or requested; -1: none."""
        self.wanted: list[int] = []
        """The drafts along which masks were requested; none: along the certain tokens."""
        self.proposed: list[int] = []
        """What the device proposed after its last draw."""
        self.late_since = 0.0
        """When its mask was late for a step; `cpu_when_late`: the CPU time its matcher had used then."""
        self.cpu_when_late = 0.0


class Grammars:
    """Compiles forms in matcher processes, sends them the sampled tokens, collects masks. Starts them on demand."""

    def __init__(self, spec: ForkServerSpec, timeout: float, most_of_tenant: int | None = None) -> None:
        """`timeout`: seconds that compiling a form, or a single mask, may take. `most_of_tenant`: forms that one tenant
        may have, waiting or in use."""
        self._spec = spec
        self._timeout = timeout
        self._shape = (spec.rows, spec.places, -(-spec.vocab_size // 32))
        self._nothing = np.zeros((1, self._shape[2]), np.int32)
        """A mask that allows no token."""
        self._fork_server: ForkServerClient | None = None
        self._matchers: OrderedDict[bytes, MatcherClient] = OrderedDict()
        """By form, least recently used first."""
        self._waiting: dict[str, MatcherClient] = {}
        """By request: the matcher it waits for."""
        self._in_use: dict[str, MatcherClient] = {}
        self._sequences: dict[Key, MatchedSequence] = {}
        self._late: dict[Key, MatchedSequence] = {}
        """Suspended sequences, whose mask did not come in time."""
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._resolved: list[tuple[str, str]] = []
        self._tenants = TenantForms(most_of_tenant)
        self._numbers = 0
        self.compile_times = Histogram(COMPILE_BOUNDS)
        """Seconds of successful compilations."""
        self._max_compiling = max(1, min(4, (os.cpu_count() or 1) // 2))

    # Before the first request

    def prepare(self, end_ids: Sequence[int]) -> None:
        """A request with a grammar may come: start the fork server, whose vocabulary takes longer to load than most
        grammars to compile. `end_ids`: the model's end-of-sequence tokens."""
        if not end_ids:
            return
        self._set_ends(end_ids)
        if self._fork_server is not None:
            self._fork_server.poll()
            if not self._fork_server.death:
                self._fork_server.stay()
                return
        try:
            self._fork_server = ForkServerClient(self._spec)
        except OSError as error:
            logger.warning("the grammar fork server was not started ahead of need: %s", error)

    @property
    def end_ids(self) -> list[int]:
        """The end-of-sequence tokens of requests with a grammar; empty: there has been none."""
        return self._spec.end_ids

    def _set_ends(self, end_ids: Sequence[int]) -> None:
        if not self._spec.end_ids:
            self._spec = msgspec.structs.replace(self._spec, end_ids=list(end_ids))

    # Requests that wait for their grammar

    def add(self, source: NewRequest) -> None:
        """Compile the request's grammar, or find it compiled; `poll` returns the request when that is done."""
        if not source.eos_ids:
            raise ValidationError(
                "structured_outputs need a model with an end-of-sequence token: nothing else could end the output",
                "structured_outputs",
            )
        form = encode(source.params.structured_outputs)
        if (refusal := self._refused.get(form)) is not None:
            self._resolved.append((source.id, refusal))
            return
        self._tenants.add(source.id, source.tenant, form)
        self._set_ends(source.eos_ids)
        matcher = self._matchers.get(form)
        if matcher is not None and matcher.is_compiled:
            matcher.read()  # it may have exited while idle
        if matcher is not None and matcher.is_dead:
            self._drop(matcher)
            matcher = None
        matcher = matcher or self._make_matcher(form)
        self._matchers.move_to_end(form)
        matcher.users.add(source.id)
        if matcher.is_compiled:
            self._send_users(matcher)
        self._waiting[source.id] = matcher

    def poll(self) -> list[tuple[str, str]]:
        """Requests that no longer wait: (id, empty or why the request is refused)."""
        if self._waiting:
            self._read()
            self._start_matchers()
            for request_id, matcher in list(self._waiting.items()):
                if matcher.refusal:
                    self._resolve(request_id, matcher.refusal)
                elif matcher.is_compiled and matcher.is_confirmed:
                    self._resolve(request_id, "")
        if self._late:
            self._resume_late()
        resolved, self._resolved = self._resolved, []
        return resolved

    @property
    def is_active(self) -> bool:
        """Whether any unfinished request has a grammar."""
        return bool(self._in_use or self._waiting or self._resolved)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar, or for a late mask."""
        return len(self._waiting) + len({key[0] for key in self._late})

    def wait(self, seconds: float, wakes: Sequence[int] = ()) -> None:
        """Sleep until a message comes that a request waits for, one of the descriptors `wakes` is readable, or
        `seconds` have passed."""
        if self._resolved:
            return
        matchers = {matcher for matcher in self._waiting.values() if matcher.is_open and matcher.is_started}
        matchers |= {sequence.matcher for sequence in self._late.values() if sequence.matcher.is_open}
        files = [*wakes, *(matcher.fileno() for matcher in matchers)]
        server = self._fork_server
        if self._waiting and server is not None and not server.death and not server.is_ready:
            files.append(server.fileno())
        for matcher in matchers:
            if matcher.pid and not matcher.is_compiled:
                seconds = min(seconds, matcher.compiling_since + self._timeout - time.monotonic())
        sleep_until(files, seconds)

    def _resolve(self, request_id: str, refusal: str) -> None:
        matcher = self._waiting.pop(request_id)
        self._resolved.append((request_id, refusal))
        if refusal:
            matcher.users.discard(request_id)
        else:
            self._in_use[request_id] = matcher

    def _send_users(self, matcher: MatcherClient) -> None:
        """Send the number of users; the reply confirms that the matcher is alive."""
        matcher.is_confirmed = False
        matcher.add(Op.SET_USERS, len(matcher.users))
        matcher.flush()

    # Matchers

    def _make_matcher(self, form: bytes) -> MatcherClient:
        self._numbers += 1
        matcher = self._matchers[form] = MatcherClient(self._numbers, form, self._shape)
        return matcher

    def _read(self) -> None:
        """Read the messages of the fork server and of the matchers that requests wait for."""
        if self._fork_server is not None and not self._fork_server.death:
            self._fork_server.poll()
        for matcher in dict.fromkeys(self._waiting.values()):
            if matcher.is_started:
                self._read_matcher(matcher)

    def _read_matcher(self, matcher: MatcherClient) -> None:
        """Read a matcher's messages; refuse its form, or replace the matcher, if it failed."""
        was_compiled = matcher.is_compiled
        matcher.read()
        seconds = time.monotonic() - matcher.compiling_since
        if matcher.is_compiled and not was_compiled:
            self.compile_times.add(seconds)
            self._send_users(matcher)
        if matcher.refusal:
            self._refuse(matcher, f"it cannot be compiled: {matcher.refusal}")
        elif matcher.is_dead:
            self._replace(matcher)
        elif matcher.pid and not matcher.is_compiled and seconds > self._timeout:
            is_its_fault = matcher.cpu_seconds() > self._timeout / 2  # otherwise the machine was busy
            reason = f"it takes longer to compile than {self._timeout:g} s (grammar_timeout)"
            self._refuse(matcher, reason, is_its_fault)

    def _start_matchers(self) -> None:
        """Fork matchers for forms that wait for one, in turns between tenants, up to the limits."""
        unstarted = [m for m in dict.fromkeys(self._waiting.values()) if m.is_open and not m.is_started]
        if not unstarted:
            return
        if self._fork_server is None or self._fork_server.death:
            if self._fork_server is not None and not self._fork_server.is_ready:
                for matcher in unstarted:  # it failed to start: another would fail too
                    self._refuse(matcher, self._fork_server.death, remember=False)
                self._fork_server = None
                return
            try:
                self._fork_server = ForkServerClient(self._spec)
            except OSError as error:
                self._refuse_for_now(unstarted, error)
                return
        if not self._fork_server.is_ready:
            return
        while unstarted:
            started = [matcher for matcher in self._matchers.values() if matcher.is_started]
            chosen = self._tenants.choose(unstarted, started, self._max_compiling, MAX_MATCHERS)
            if chosen is None or not self._make_room():
                return
            unstarted.remove(chosen)
            self._fork_server.start(chosen.number, len(chosen.form), chosen.files())
            chosen.mark_started()
            chosen.attempts += 1

    def _refuse_for_now(self, matchers: Sequence[MatcherClient], error: OSError) -> None:
        """The system has no process or file for these matchers."""
        reason = Unavailable(as_resource_error(error) or f"the grammar fork server cannot be started: {error}")
        for matcher in matchers:
            matcher.refusal = reason
            self._drop(matcher)

    def _make_room(self) -> bool:
        """Drop idle matchers until one more process is within the limits; False if all matchers are in use."""
        idle = [matcher for matcher in self._matchers.values() if not matcher.users]
        count = sum(matcher.is_started for matcher in self._matchers.values())
        idle_bytes = sum(matcher.memory for matcher in idle)
        for matcher in idle:
            if count < MAX_MATCHERS and idle_bytes <= IDLE_BYTES:
                break
            count, idle_bytes = count - 1, idle_bytes - matcher.memory
            self._drop(matcher)
        return count < MAX_MATCHERS

    def _drop(self, matcher: MatcherClient) -> None:
        if self._matchers.get(matcher.form) is matcher:
            del self._matchers[matcher.form]
        if self._fork_server is not None and matcher.is_started:
            self._fork_server.kill(matcher.number)
        matcher.close()

    def _refuse(self, matcher: MatcherClient, reason: str, remember: bool = True) -> None:
        """Requests with this form fail with the reason; `remember`: later ones at once."""
        matcher.refusal = f"structured_outputs: {reason}"
        logger.info("refused a form of %d bytes: %s", len(matcher.form), reason)
        if remember:
            self._refused[matcher.form] = matcher.refusal
            while len(self._refused) > MAX_REFUSED:
                self._refused.popitem(last=False)
        self._drop(matcher)

    def _replace(self, matcher: MatcherClient) -> None:
        """A matcher that requests wait for has exited, by itself, with the fork server or killed: start another, unless
        it has failed to compile twice."""
        if not matcher.is_compiled and matcher.attempts >= 2:
            limit = self._spec.memory_bytes >> 20
            self._refuse(matcher, f"it cannot be compiled: that takes more than {limit} MiB of memory, or crashes")
            return
        try:
            again = self._make_matcher(matcher.form)
        except OSError as error:
            self._refuse_for_now([matcher], error)
            return
        again.attempts = 1 if matcher.is_compiled else matcher.attempts
        for request_id, waited in self._waiting.items():
            if waited is matcher:
                self._waiting[request_id] = again
                again.users.add(request_id)
        if self._fork_server is not None and matcher.is_started:
            self._fork_server.kill(matcher.number)
        matcher.close()

    # Masks

    def note_proposed(self, draws: Sequence[Request], proposed: Sequence[list[int]]) -> None:
        """These draws are collected, and the device has these drafts for the next step of their rows; none: no draft
        for any."""
        for index, request in enumerate(draws):
            if (sequence := self._sequences.get(request.key)) is not None:
                sequence.proposed = proposed[index] if proposed else []

    def advance(self) -> None:
        """After a step was collected: send the matchers its tokens, so that they prepare the next masks meanwhile."""
        for sequence in self._sequences.values():
            if sequence.request.row >= 0 and len(sequence.request.output) > sequence.position:
                self._advance(sequence)
        self._flush()

    def masks(
        self, plan: StepPlan, draws: Sequence[Request]
    ) -> tuple[StepMasks, list[Request], list[tuple[Request, str]]]:
        """(masks for the places of a step, all earlier tokens being known; requests whose masks are late, to be
        suspended; requests that failed, and why)."""
        widths = plan.widths
        drafts = PlanDrafts(plan)
        wanted = [
            (first, self._request_masks(request, drafts, width))
            for request, width, first in zip(draws, widths.tolist(), (np.cumsum(widths) - widths).tolist(), strict=True)
            if request.params.structured_outputs is not None and request.row >= 0
        ]
        self._flush()
        self._await({sequence.matcher for _, (sequence, _) in wanted})
        places: list[int] = []
        bits: list[NDArray[np.int32]] = []
        late: list[Request] = []
        failed: list[tuple[Request, str]] = []
        for first, (sequence, run) in wanted:
            matcher = sequence.matcher
            failure = matcher.take_failure(sequence.number) or matcher.refusal or (EXITED if matcher.is_dead else "")
            if failure:
                failed.append((sequence.request, failure))
            elif matcher.unanswered:
                late.append(sequence.request)
                sequence.late_since, sequence.cpu_when_late = time.monotonic(), matcher.cpu_seconds()
                self._late[sequence.request.key] = sequence
            else:
                # Behind a draft that the grammar refuses nothing counts: the mask before it excludes the draft.
                count = 1 + _common(run, matcher.runs.get(sequence.number, []))
                places += range(first, first + count)
                bits.append(matcher.masks[sequence.slot, :count])
                if count <= len(run) and allows(bits[-1][-1], run[count - 1]):  # it leads to a dead end
                    places.append(first + count)
                    bits.append(self._nothing)
        stacked = np.concatenate(bits) if bits else np.empty((0, self._shape[2]), np.int32)
        return StepMasks(plan.step, np.array(places, np.int32), stacked), late, failed

    def _request_masks(self, request: Request, drafts: PlanDrafts, width: int) -> tuple[MatchedSequence, list[int]]:
        """The request's sequence, the mask of its next token and those along its drafts present or requested; and
        these drafts."""
        sequence = self._sequences.get(request.key)
        if sequence is None:
            self._numbers += 1
            sequence = self._sequences[request.key] = MatchedSequence(request, self._in_use[request.id], self._numbers)
            sequence.slot = self._take_slot(sequence.matcher)
            sequence.matcher.follow(sequence.number)
            source = request.source
            sequence.matcher.add(Op.BEGIN, sequence.number, sequence.slot, source.params.min_tokens, source.stop_ids)
        run = drafts.of(request, width, sequence.proposed)
        along = sequence.wanted or self.certain_drafts(request.key) or []
        if len(request.output) > sequence.position:
            self._advance(sequence)
            along = sequence.wanted
        if sequence.slot < 0 or along[: len(run)] != run:
            self._fill(sequence, run)
        return sequence, run

    def _fill(self, sequence: MatchedSequence, run: list[int]) -> None:
        """Request the mask of the next token, and those along the drafts."""
        if sequence.slot < 0:
            sequence.slot = self._take_slot(sequence.matcher)
        sequence.matcher.add(Op.FILL, sequence.number, sequence.slot, run)
        sequence.wanted = run

    def _take_slot(self, matcher: MatcherClient) -> int:
        """A free slot, or that of a sequence without a row: there are as many slots as rows."""
        if matcher.free_slots:
            return matcher.free_slots.pop()
        sequences = (s for s in self._sequences.values() if s.matcher is matcher and s.slot >= 0)
        owner = next(sequence for sequence in sequences if sequence.request.row < 0)
        slot, owner.slot = owner.slot, -1
        return slot

    def _advance(self, sequence: MatchedSequence) -> None:
        output = sequence.request.output
        if sequence.slot < 0:
            sequence.slot = self._take_slot(sequence.matcher)
        sequence.matcher.add(Op.ADVANCE, sequence.number, sequence.slot, output[sequence.position :])
        sequence.position = len(output)
        sequence.wanted = []
        if sequence.proposed:  # most likely verified next
            self._fill(sequence, sequence.proposed)

    def _flush(self) -> None:
        for matcher in dict.fromkeys(self._in_use.values()):
            matcher.flush()

    def _await(self, matchers: set[MatcherClient], seconds: float | None = None) -> None:
        """Wait until all have replied, at most `seconds`, or STEP_WAIT_SECONDS."""
        deadline = time.monotonic() + (STEP_WAIT_SECONDS if seconds is None else seconds)
        for matcher in matchers:
            matcher.read()
        while pending := [matcher for matcher in matchers if matcher.unanswered and matcher.is_open]:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            sleep_until([matcher.fileno() for matcher in pending], left)
            for matcher in pending:
                matcher.read()

    def _resume_late(self) -> None:
        """Resume sequences whose mask has come. A matcher that takes too long is killed; its requests fail."""
        for matcher in {sequence.matcher for sequence in self._late.values()}:
            matcher.read()
        for key, sequence in list(self._late.items()):
            matcher = sequence.matcher
            if matcher.unanswered and matcher.is_open:
                self._check_time(sequence)
            if not matcher.unanswered or not matcher.is_open:
                del self._late[key]
                self._resolved.append((key[0], ""))  # a failure shows when its next mask is requested

    def _check_time(self, sequence: MatchedSequence) -> None:
        matcher = sequence.matcher
        cpu = matcher.cpu_seconds()
        total = cpu - matcher.compile_cpu_seconds
        limit = FREE_CPU_SECONDS + EACH_CPU_SECONDS * matcher.num_masks
        if cpu - sequence.cpu_when_late > MASK_CPU_SECONDS or total > limit:
            self._refuse(matcher, "it takes too long to match: it is ambiguous, or has too many repetitions")
        elif time.monotonic() - sequence.late_since > self._timeout:  # the machine may be busy
            reason = f"the allowed next tokens are not known after {self._timeout:g} s (grammar_timeout)"
            self._refuse(matcher, reason, remember=False)

    # Drafts that are certain

    def certain_drafts(self, key: Key) -> list[int] | None:
        """The tokens that a sequence most likely draws after those that are known, because its grammar leaves no other
        text; as far as its matcher has found them already. None: the sequence verifies no drafts."""
        sequence = self._sequences.get(key)
        if sequence is None:
            return []
        if sequence.late_since:
            return None  # a grammar this slow is not asked for masks along drafts
        if sequence.matcher.unanswered or sequence.position != len(sequence.request.output):
            return []
        return sequence.matcher.certain.get(sequence.number, [])

    def await_certain(self) -> None:
        """Wait for the certain drafts of the tokens sent last, a moment at most."""
        if self._shape[1] > 1:
            self._await({sequence.matcher for sequence in self._sequences.values()}, CERTAIN_WAIT_SECONDS)

    # Requests that finish

    def forget(self, request: Request, is_last: bool) -> None:
        """A sequence has finished; `is_last`: so has its request."""
        sequence = self._sequences.pop(request.key, None)
        self._late.pop(request.key, None)
        if sequence is not None:
            sequence.matcher.forget(sequence.number)
        if sequence is not None and sequence.matcher.is_open:
            sequence.matcher.add(Op.DROP, sequence.number)
            if sequence.slot >= 0:
                sequence.matcher.free_slots.append(sequence.slot)
        if is_last:
            self._resolved = [entry for entry in self._resolved if entry[0] != request.id]
            self._release(request.id)

    def _release(self, request_id: str) -> None:
        """Keep the request's matcher for later requests if it is compiled."""
        self._tenants.remove(request_id)
        matcher = self._waiting.pop(request_id, None) or self._in_use.pop(request_id, None)
        if matcher is None:
            return
        matcher.users.discard(request_id)
        if matcher.is_dead or not (matcher.is_compiled or matcher.users):
            self._drop(matcher)
        elif matcher.is_compiled:
            self._send_users(matcher)

    def drop_idle(self) -> None:
        """End the processes of compiled grammars that no request uses: memory is short."""
        for matcher in [matcher for matcher in self._matchers.values() if not matcher.users]:
            self._drop(matcher)

    def shutdown(self) -> None:
        """End every process."""
        for matcher in list(self._matchers.values()):
            matcher.close()
        self._matchers.clear()
        if self._fork_server is not None:
            self._fork_server.close()
            self._fork_server = None


def _common(one: list[int], other: list[int]) -> int:
    """How many leading tokens are the same."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
