"""`Grammars`: what the loop knows of structured output."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from quire.engine.grammar.fork_server import ForkServerClient
from quire.engine.grammar.matcher import GONE, MatcherClient
from quire.engine.grammar.wire import Op, Setup, encode
from quire.errors import ValidationError
from quire.messages.histogram import COMPILE_BOUNDS, Histogram
from quire.messages.outputs import Key
from quire.messages.plan import StepMasks
from quire.messages.request import NewRequest, Request
from quire.sleeping import sleep_until

logger = logging.getLogger(__name__)

MOST_GUIDES = 32
"""Grammars kept compiled, used or not, each in a process that sleeps…"""
CACHE_BYTES = 512 << 20
"""…and the memory that those nobody uses may take together."""
MOST_REFUSALS = 256
"""Forms that are known not to compile."""
STEP_WAIT = 0.03
"""Seconds a step waits for masks. Who has none by then is set aside until it has."""
MASK_SECONDS = 1.0
"""CPU time a guide may take for one answer…"""
FREE_SECONDS = 2.0
ANSWER_SECONDS = 0.01
"""…and for all of them: so much, and so much more for each."""


class Follower:
    """A running sequence and its guide."""

    __slots__ = ("asked", "guide", "number", "position", "request", "slot", "used")

    def __init__(self, request: Request, guide: MatcherClient, number: int) -> None:
        self.request = request
        self.guide = guide
        self.number = number
        self.position = 0
        """Output tokens the guide knows."""
        self.slot = -1
        """Where its mask for the next one is, or will be; -1: nowhere."""
        self.asked = 0.0
        """Once it is set aside: since when, and the CPU time its guide had used by then."""
        self.used = 0.0


class Grammars:
    """Has forms compiled, tells their guides what is drawn, and collects masks. Starts nothing before it is needed."""

    def __init__(self, setup: Setup, timeout: float) -> None:
        """`timeout`: seconds a form may take to compile, and to say what may come next."""
        self._setup = setup
        self._timeout = timeout
        self._words = -(-setup.vocab_size // 32)
        self._nursery: ForkServerClient | None = None
        self._guides: OrderedDict[bytes, MatcherClient] = OrderedDict()
        """By form, those needed last at the end."""
        self._waiting: dict[str, MatcherClient] = {}
        """By request: what it waits for."""
        self._in_use: dict[str, MatcherClient] = {}
        self._followers: dict[Key, Follower] = {}
        self._aside: dict[Key, Follower] = {}
        """Those whose mask did not come in time."""
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._settled: list[tuple[str, str]] = []
        self._numbers = 0
        self.compile_times = Histogram(COMPILE_BOUNDS)
        """Seconds that forms which compiled took to."""
        self._compiles_at_once = max(1, min(4, (os.cpu_count() or 1) // 2))

    # A request comes, and waits

    def add(self, source: NewRequest) -> None:
        """The request needs its grammar; `poll` tells when it has it."""
        if not source.eos_ids:
            raise ValidationError(
                "structured_outputs need a model with an end-of-sequence token: nothing else could end the output",
                "structured_outputs",
            )
        form = encode(source.params.structured_outputs)
        if (refusal := self._refused.get(form)) is not None:
            self._settled.append((source.id, refusal))
            return
        if not self._setup.end_ids:
            self._setup = msgspec.structs.replace(self._setup, end_ids=source.eos_ids)
        guide = self._guides.get(form)
        if guide is not None and guide.is_compiled:
            guide.read()  # it may have left
        if guide is not None and guide.is_dead:
            self._drop(guide)
            guide = None
        guide = guide or self._make_guide(form)
        self._guides.move_to_end(form)
        guide.users.add(source.id)
        if guide.is_compiled:
            self._hold(guide)
        self._waiting[source.id] = guide

    def poll(self) -> list[tuple[str, str]]:
        """Requests that wait no longer: their ids, and what is wrong where they cannot be served."""
        if self._waiting:
            self._read()
            self._start_some()
            for request_id, guide in list(self._waiting.items()):
                if guide.refusal:
                    self._settle(request_id, guide.refusal)
                elif guide.is_compiled and guide.is_held:
                    self._settle(request_id, "")
        if self._aside:
            self._call_back()
        settled, self._settled = self._settled, []
        return settled

    @property
    def is_active(self) -> bool:
        """Whether any unfinished request has a form to keep."""
        return bool(self._in_use or self._waiting or self._settled)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for their grammar, or for a mask that is late."""
        return len(self._waiting) + len({key[0] for key in self._aside})

    def wait(self, seconds: float, wakes: Sequence[int] = ()) -> None:
        """Sleep until something has come for those who wait, or at one of the files `wakes`, or time is up."""
        if self._settled:
            return
        guides = {guide for guide in self._waiting.values() if guide.is_open and guide.is_started}
        guides |= {follower.guide for follower in self._aside.values() if follower.guide.is_open}
        files = [*wakes, *(guide.fileno() for guide in guides)]
        if self._nursery is not None and not self._nursery.death and not self._nursery.is_ready:
            files.append(self._nursery.fileno())
        for guide in guides:
            if guide.pid and not guide.is_compiled:
                seconds = min(seconds, guide.begun + self._timeout - time.monotonic())
        sleep_until(files, seconds)

    def _settle(self, request_id: str, refusal: str) -> None:
        guide = self._waiting.pop(request_id)
        self._settled.append((request_id, refusal))
        if refusal:
            guide.users.discard(request_id)
        else:
            self._in_use[request_id] = guide

    def _hold(self, guide: MatcherClient) -> None:
        """Tell it how many need it; that it answers shows that it is there."""
        guide.is_held = False
        guide.ask(Op.HOLD, len(guide.users))
        guide.flush()

    # Guides come and go

    def _make_guide(self, form: bytes) -> MatcherClient:
        self._numbers += 1
        guide = self._guides[form] = MatcherClient(self._numbers, form, self._setup.rows, self._words)
        return guide

    def _read(self) -> None:
        """What nursery and guides have said to those who wait."""
        if self._nursery is not None and not self._nursery.death:
            self._nursery.poll()
        for guide in dict.fromkeys(self._waiting.values()):
            if not guide.is_started:
                continue
            was_compiled = guide.is_compiled
            guide.read()
            if guide.is_compiled and not was_compiled:
                self.compile_times.add(time.monotonic() - guide.begun)
                self._hold(guide)
            if guide.refusal:
                self._refuse(guide, f"it cannot be compiled: {guide.refusal}")
            elif guide.is_dead:
                self._lose(guide)
            elif guide.pid and not guide.is_compiled and time.monotonic() - guide.begun > self._timeout:
                is_its_fault = guide.cpu_seconds() > self._timeout / 2  # and not a busy machine's
                self._refuse(
                    guide, f"it takes longer to compile than {self._timeout:g} s (grammar_timeout)", is_its_fault
                )

    def _start_some(self) -> None:
        """Fork guides for forms that wait for one, as many as may be at once."""
        unstarted = [g for g in dict.fromkeys(self._waiting.values()) if g.is_open and not g.is_started]
        if not unstarted:
            return
        if self._nursery is None or self._nursery.death:
            if self._nursery is not None and not self._nursery.is_ready:
                for guide in unstarted:  # it never came so far: another would not either
                    self._refuse(guide, self._nursery.death, remember=False)
                self._nursery = None
                return
            self._nursery = ForkServerClient(self._setup)
        if not self._nursery.is_ready:
            return
        compiling = sum(guide.is_started and not guide.is_compiled for guide in self._guides.values())
        for guide in unstarted[: max(0, self._compiles_at_once - compiling)]:
            if self._make_room():
                self._nursery.start(guide.number, len(guide.form), guide.take_files())
                guide.started()
                guide.attempts += 1

    def _make_room(self) -> bool:
        """One process more, and no more bytes than may be; False if all there are are in use."""
        idle = [guide for guide in self._guides.values() if not guide.users]
        count = sum(guide.is_started for guide in self._guides.values())
        held = sum(guide.memory for guide in idle)
        for guide in idle:
            if count < MOST_GUIDES and held <= CACHE_BYTES:
                break
            count, held = count - 1, held - guide.memory
            self._drop(guide)
        return count < MOST_GUIDES

    def _drop(self, guide: MatcherClient) -> None:
        """Nobody needs it any more."""
        if self._guides.get(guide.form) is guide:
            del self._guides[guide.form]
        if self._nursery is not None and guide.is_started:
            self._nursery.kill(guide.number)
        guide.close()

    def _refuse(self, guide: MatcherClient, reason: str, remember: bool = True) -> None:
        """Whoever waits for this form is told why there will be nothing."""
        guide.refusal = f"structured_outputs: {reason}"
        logger.info("a form of %d bytes is refused: %s", len(guide.form), reason)
        if remember:
            self._refused[guide.form] = guide.refusal
            while len(self._refused) > MOST_REFUSALS:
                self._refused.popitem(last=False)
        self._drop(guide)

    def _lose(self, guide: MatcherClient) -> None:
        """Its process has ended while someone waits for it: of itself, or with the nursery, or somebody ended it."""
        if guide.is_compiled or guide.attempts < 2:  # it had left, or there may have been no fault of its own
            again = self._make_guide(guide.form)
            again.attempts = 1 if guide.is_compiled else guide.attempts
            for request_id, waited in self._waiting.items():
                if waited is guide:
                    self._waiting[request_id] = again
                    again.users.add(request_id)
            if self._nursery is not None and guide.is_started:
                self._nursery.kill(guide.number)
            guide.close()
        else:
            limit = self._setup.memory_bytes >> 20
            self._refuse(guide, f"it cannot be compiled: that takes more than {limit} MiB of memory, or crashes")

    # Masks

    def follow(self) -> None:
        """Tokens have been collected: tell the guides, who prepare the next masks while the loop goes on."""
        for follower in self._followers.values():
            if follower.request.row >= 0 and len(follower.request.output) > follower.position:
                self._advance(follower)
        self._flush()

    def masks(self, step: int, draws: Iterable[Request]) -> tuple[StepMasks, list[Request], list[tuple[Request, str]]]:
        """Masks for a step's draws, every token before them being known; requests whose mask is late, to be set aside;
        and requests that cannot go on, and why."""
        wanted = [
            (index, self._follower(request))
            for index, request in enumerate(draws)
            if request.params.structured_outputs is not None and request.row >= 0
        ]
        self._flush()
        self._await({follower.guide for _, follower in wanted})
        kept: list[tuple[int, Follower]] = []
        late: list[Request] = []
        failed: list[tuple[Request, str]] = []
        for index, follower in wanted:
            guide = follower.guide
            failure = guide.failure_of(follower.number) or guide.refusal or (GONE if guide.is_dead else "")
            if failure:
                failed.append((follower.request, failure))
            elif guide.unanswered:
                late.append(follower.request)
                follower.asked, follower.used = time.monotonic(), guide.cpu_seconds()
                self._aside[follower.request.key] = follower
            else:
                kept.append((index, follower))
        bits = np.empty((len(kept), self._words), np.int32)
        for i, (_, follower) in enumerate(kept):
            bits[i] = follower.guide.masks[follower.slot]
        return StepMasks(step, np.array([index for index, _ in kept], np.int32), bits), late, failed

    def _follower(self, request: Request) -> Follower:
        """The request's follower, its mask there or on the way."""
        follower = self._followers.get(request.key)
        if follower is None:
            self._numbers += 1
            follower = self._followers[request.key] = Follower(request, self._in_use[request.id], self._numbers)
            follower.slot = self._take_slot(follower.guide)
            source = request.source
            follower.guide.ask(Op.BEGIN, follower.number, follower.slot, source.params.min_tokens, source.stop_ids)
        had_slot = follower.slot >= 0
        if not had_slot:
            follower.slot = self._take_slot(follower.guide)
        if len(request.output) > follower.position:
            self._advance(follower)
        elif not had_slot:
            follower.guide.ask(Op.FILL, follower.number, follower.slot)
        return follower

    def _take_slot(self, guide: MatcherClient) -> int:
        """There are as many as rows: if none is free, someone has one who has no row."""
        if guide.free_slots:
            return guide.free_slots.pop()
        owner = next(f for f in self._followers.values() if f.guide is guide and f.slot >= 0 and f.request.row < 0)
        slot, owner.slot = owner.slot, -1
        return slot

    def _advance(self, follower: Follower) -> None:
        output = follower.request.output
        if follower.slot < 0:
            follower.slot = self._take_slot(follower.guide)
        follower.guide.ask(Op.ADVANCE, follower.number, follower.slot, output[follower.position :])
        follower.position = len(output)

    def _flush(self) -> None:
        for guide in dict.fromkeys(self._in_use.values()):
            guide.flush()

    def _await(self, guides: set[MatcherClient]) -> None:
        """Until all have answered, or it has been long enough."""
        deadline = time.monotonic() + STEP_WAIT
        for guide in guides:
            guide.read()
        while late := [guide for guide in guides if guide.unanswered and guide.is_open]:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            sleep_until([guide.fileno() for guide in late], left)
            for guide in late:
                guide.read()

    def _call_back(self) -> None:
        """Those whose mask has come since may go on. Guides that take too long are ended, with all who need them."""
        for guide in {follower.guide for follower in self._aside.values()}:
            guide.read()
        for key, follower in list(self._aside.items()):
            guide = follower.guide
            if guide.unanswered and guide.is_open:
                self._check_time(follower)
            if not guide.unanswered or not guide.is_open:
                del self._aside[key]
                self._settled.append((key[0], ""))  # what went wrong, if it did, shows when it draws again

    def _check_time(self, follower: Follower) -> None:
        guide = follower.guide
        used = guide.cpu_seconds()
        total = used - guide.compile_cpu
        if used - follower.used > MASK_SECONDS or total > FREE_SECONDS + ANSWER_SECONDS * guide.answers:
            self._refuse(guide, "it takes too long to follow: it is ambiguous, or has too many repetitions")
        elif time.monotonic() - follower.asked > self._timeout:  # the machine may be busy with others
            reason = f"what may come next is not known after {self._timeout:g} s (grammar_timeout)"
            self._refuse(guide, reason, remember=False)

    # Requests leave

    def forget(self, request: Request, is_last: bool) -> None:
        """A sample has ended; `is_last`: and with it its request."""
        follower = self._followers.pop(request.key, None)
        self._aside.pop(request.key, None)
        if follower is not None and follower.guide.is_open:
            follower.guide.ask(Op.DROP, follower.number)
            if follower.slot >= 0:
                follower.guide.free_slots.append(follower.slot)
        if is_last:
            self._settled = [entry for entry in self._settled if entry[0] != request.id]
            self._release(request.id)

    def _release(self, request_id: str) -> None:
        """The request's guide stays for the next who needs it, if it is compiled."""
        guide = self._waiting.pop(request_id, None) or self._in_use.pop(request_id, None)
        if guide is None:
            return
        guide.users.discard(request_id)
        if guide.is_dead or not (guide.is_compiled or guide.users):
            self._drop(guide)
        elif guide.is_compiled:
            self._hold(guide)

    def shutdown(self) -> None:
        """End every process."""
        for guide in list(self._guides.values()):
            guide.close()
        self._guides.clear()
        if self._nursery is not None:
            self._nursery.close()
            self._nursery = None
