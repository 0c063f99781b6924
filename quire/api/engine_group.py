"""The engines behind an `AsyncLLM`: one, or several with a router in front.

One engine is asked directly. With several, a request goes where the router says, a session's turns to the session's
home; when an engine dies, requests that nobody has seen anything of begin again at another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from functools import partial
from typing import Any

from quire.api.lockstep_group import LockstepGroup
from quire.api.output_stream import OutputStream
from quire.api.replica import Replica, aside
from quire.api.router_feed import RouterFeed, as_routed
from quire.api.session_affinity import SessionAffinity
from quire.config import EngineConfig
from quire.engine import ipc
from quire.engine.device_split import replica_config, warn_of_orphans
from quire.engine.engine_info import EngineInfo
from quire.engine.remote import RemoteEngine, error_of
from quire.engine.session_calls import SessionAnswer, SessionOp
from quire.errors import SHUT, EngineDeadError
from quire.loading.files import ModelFiles
from quire.loading.model_config import ModelConfig
from quire.messages.experts import Rebalanced
from quire.messages.request import NewRequest
from quire.output.processor import OutputProcessor
from quire.router import RoutedRequest, Router

MOST_MOVES = 2
"""A request that was there when so many engines died is not given another one: it may be why they did."""


class EngineGroup:
    """Starts the engines, sends requests to them, and knows who lives."""

    def __init__(
        self, config: EngineConfig, files: ModelFiles, model: ModelConfig, module: str, outputs: OutputProcessor
    ) -> None:
        self._config, self._files, self._model, self._module = config, files, model, module
        self._outputs = outputs
        size = config.data_parallel_size
        self.replicas = [Replica(number, partial(self.start_engine, number), outputs) for number in range(size)]
        self.router: Router | None = None
        """Where there are several."""
        self.company = LockstepGroup(self.replicas) if config.steps_together else None
        """Where they step together, all of them or none."""
        self._restarting = asyncio.Lock()
        self.homes = SessionAffinity(self, config.kv_disk is not None)
        self.on_ready: Callable[[], None] = lambda: None
        """An engine has taken the place of another."""
        for replica in self.replicas:
            replica.on_ready = self._welcome
        if size > 1:
            self._connect()

    def _connect(self) -> None:
        self.router = Router(self._config.block_size)
        for replica in self.replicas:
            replica.title = f"replica {replica.number} of {len(self.replicas)}"
            replica.on_lost, replica.rescue = self._lose, self._rescue
            if self.company is not None:
                replica.restart_all = self._restart_together

    # Starting

    def start(self) -> None:
        """Start all processes at once; nothing is waited for."""
        warn_of_orphans(self._config)
        try:
            for replica in self.replicas:
                replica.start()
        except BaseException:
            self.kill()
            raise

    def start_engine(self, number: int) -> RemoteEngine:
        """The process of one of them."""
        return RemoteEngine(
            replica_config(self._config, number), self._files, self._model, self._module, number, len(self.replicas),
            "" if self.company is None else self.company.meeting(number),
        )  # fmt: skip

    def wait_until_ready(self) -> None:
        """Blocks until all engines are made. If one cannot be, none stays, and its error is raised."""
        try:
            if len(self.replicas) == 1:
                self.replicas[0].wait_until_ready()
            else:
                self._wait_for_all()
        except BaseException:
            self.kill()
            raise
        for replica in self.replicas:
            replica.adopt()

    def _wait_for_all(self) -> None:
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            waits = [pool.submit(replica.wait_until_ready) for replica in self.replicas]
            try:
                done, _ = wait(waits, return_when=FIRST_EXCEPTION)
                for one in done:
                    one.result()
            except BaseException:
                self.kill()  # also ends the threads' waits
                raise

    def kill(self) -> None:
        """End every process that is being started."""
        for replica in self.replicas:
            if replica.coming is not None:
                replica.coming.kill()

    # Who lives

    @property
    def living(self) -> list[Replica]:
        """Those that can be asked."""
        return [replica for replica in self.replicas if not replica.death]

    @property
    def errored(self) -> bool:
        """Whether all engines are dead."""
        return all(replica.death for replica in self.replicas)

    @property
    def dead_error(self) -> EngineDeadError:
        """What every call raises once all engines are dead."""
        if len(self.replicas) == 1:
            return self.replicas[0].dead_error
        return EngineDeadError("; ".join(str(replica.dead_error) for replica in self.replicas))

    @property
    def facts(self) -> EngineInfo:
        """What the engines turned out to be; where they differ, the smallest: what fits there fits all."""
        return min((replica.facts for replica in self.replicas), key=lambda facts: facts.num_blocks)

    def attach(self) -> None:
        """Let the running event loop hear all of them; raises if none lives."""
        if self.errored:
            raise self.dead_error
        for replica in self.replicas:
            replica.engine.attach()

    # Requests

    def choose(self, request: NewRequest) -> Replica:
        """The engine that a request should go to; raises if that is dead."""
        if self.router is None:
            chosen = self.replicas[0]
        elif request.session:
            chosen = self.homes.replica_of(request.session)
        else:
            self.attach()
            chosen = self.replicas[int(self.router.choose(as_routed(request)))]
        chosen.attach()
        return chosen

    def choose_for(self, tokens: list[int], salt: str) -> Replica:
        """The engine that a session which begins so should live at."""
        assert self.router is not None
        self.attach()
        keys = self.facts.keys.of(tokens, salt) if self._config.enable_prefix_caching else []
        routed = RoutedRequest("", keys, len(tokens))
        name = self.router.choose(routed)
        # It will be work there: the next one may live elsewhere.
        self.router.finished(self.router.launched(routed, name))
        return self.replicas[int(name)]

    def launch(self, replica: Replica, box: OutputStream, request: NewRequest, message: bytes) -> None:
        """Send a request there; `message` is its `Add`. The only way a request reaches an engine."""
        box.request = request
        if replica.traffic is not None:
            replica.traffic.launch(request)
        replica.add(box, message)
        if self.company is not None:
            self.company.rouse()

    # Coming and going

    def _welcome(self, replica: Replica) -> None:
        """An engine is there, with nothing cached."""
        if self.router is not None:
            name, facts = str(replica.number), replica.facts
            self.router.add(name, facts.num_blocks, facts.max_num_seqs)
            replica.traffic = RouterFeed(self.router, name, facts.keys, self._outputs)
        self.on_ready()

    def _lose(self, replica: Replica) -> None:
        """An engine is dead: nothing goes there any more. Its requests are rescued, or fail, next."""
        assert self.router is not None
        self.router.remove(str(replica.number))
        replica.traffic = None
        self.homes.lose(replica)
        if self.company is not None and not replica.is_shut:
            self.company.follow(replica)

    def _rescue(self, box: OutputStream) -> bool:
        """Let a request of a dead engine begin again elsewhere, unseen; False if that cannot be."""
        lost, request = box.replica, box.request
        assert lost is not None and request is not None
        if lost.is_shut or not box.is_untouched or request.session or box.moves >= MOST_MOVES:
            return False
        try:
            chosen = self.choose(request)
        except EngineDeadError:  # nobody is left
            return False
        box.moves += 1
        del lost.boxes[box.key]
        self._outputs.begin_again(box.key)
        self.launch(chosen, box, request, ipc.encode(ipc.Add(request)))
        return True

    # Questions

    async def ask_all(self, question: Callable[[int], ipc.Down]) -> list[Any]:
        """What all that live answer, in their order; raises if none does."""
        self.attach()
        answers = await asyncio.gather(*(replica.ask(question) for replica in self.living), return_exceptions=True)
        good = [answer for answer in answers if not isinstance(answer, BaseException)]
        if not good:
            raise next(answer for answer in answers if isinstance(answer, BaseException))
        return good

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached blocks everywhere; True if none had to stay with a running request."""
        if self.router is not None:
            self.router.forget_blocks()
        return all(report.is_empty for report in await self.ask_all(ipc.ResetPrefixCache))

    async def rebalance_experts(self) -> Rebalanced:
        """Move experts to where the load is; raises where they have no other place to go."""
        down = next((replica for replica in self.replicas if replica.death), None)
        if self.company is not None and down is not None:
            raise down.dead_error  # those that live would wait for it
        number = 0 if self.company is None else self.company.next_rebalance()
        reports = await self.ask_all(lambda question: ipc.RebalanceExperts(question, number))
        if (error := reports[0].error) is not None:
            raise error_of(error)
        outcome: Rebalanced = reports[0].outcome
        return outcome

    async def ask_sessions(self, op: SessionOp) -> SessionAnswer:
        """Ask something about sessions. What it changed is durable when this returns."""
        return await (self.replicas[0] if self.router is None else self.homes).ask_sessions(op)

    def tell_sessions(self, key: str, op: SessionOp) -> None:
        """The same of one session, where nobody waits for what comes of it."""
        replica = self.replicas[0] if self.router is None else self.homes.known(key)
        if replica is not None:
            replica.tell_sessions(op)

    async def wait_until_dead(self) -> str:
        """Returns once all engines are dead, with the reason."""
        if len(self.replicas) == 1:
            return await self.replicas[0].wait_until_dead()
        while not self.errored:
            await asyncio.gather(*(replica.wait_until_dead() for replica in self.living))
        return str(self.dead_error)

    # Ending, and beginning again

    async def restart(self, only_if_dead: bool) -> None:
        """Make new engines in place of those that died, or of all."""
        if all(replica.is_shut for replica in self.replicas):
            raise EngineDeadError(SHUT)
        if self.company is not None:
            await self._restart_together(only_if_dead)
        else:
            restarts = (replica.restart(only_if_dead) for replica in self.replicas)
            outcomes = await asyncio.gather(*restarts, return_exceptions=True)  # none is left halfway
            if (failed := next((one for one in outcomes if one is not None), None)) is not None:
                raise failed

    async def _restart_together(self, only_if_dead: bool) -> None:
        """All or none: one that waits for another that will not come is not waited for."""
        async with self._restarting:
            if not only_if_dead or len(self.living) < len(self.replicas):
                await self._restart_each(only_if_dead)
                assert self.company is not None
                self.company.rouse()  # one may have got a request before the last was there to hear of it

    async def _restart_each(self, only_if_dead: bool) -> None:
        restarts = [asyncio.ensure_future(replica.restart_alone(only_if_dead)) for replica in self.replicas]
        try:
            _, waiting = await asyncio.wait(restarts, return_when=asyncio.FIRST_EXCEPTION)
            while waiting:
                self.kill()
                _, waiting = await asyncio.wait(waiting, timeout=0.1)
        except asyncio.CancelledError:  # nor does any of them go on alone
            for each in restarts:
                each.cancel()
            await asyncio.gather(*restarts, return_exceptions=True)
            raise
        failed = next((error for each in restarts if (error := each.exception()) is not None), None)
        if failed is not None:
            self.kill_engines(f"not all engines could be started again: {failed}")
            raise failed

    def kill_engines(self, reason: str) -> None:
        """End all processes at once. Open requests fail with the reason."""
        for replica in self.replicas:
            replica.is_shut, was_shut = True, replica.is_shut  # nothing moves to one that is next
            replica.kill_engine(reason)
            replica.is_shut = was_shut

    def shut(self) -> None:
        """Close all of them for good; `stop` comes next."""
        for replica in self.replicas:
            replica.is_shut = True
        for replica in self.replicas:
            replica.shut()
        if self.company is not None:
            self.company.close()

    def stop(self) -> None:
        """End the processes of engines that are shut, and wait for that. Blocks."""
        if len(self.replicas) == 1:
            self.replicas[0].engine.stop()
            return
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            list(pool.map(lambda replica: replica.engine.stop(), self.replicas))

    async def stop_aside(self) -> None:
        """The same, for an event loop."""
        await aside(self.stop)
