"""EngineLoop: one thread owns the engine; the event loop hands it work and gets each step's outputs in one message."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from dataclasses import dataclass, replace
from functools import partial
from typing import Callable, Protocol, Sequence

from minillm.engine.engine import Engine
from minillm.engine.request import RequestOutput
from minillm.perf.workers import release_workers
from minillm.sampling_params import SamplingParams
from minillm.server.errors import ApiError, closing, failed, overloaded

log = logging.getLogger("minillm")
Work = Sequence[tuple[list[int], SamplingParams]]


@dataclass(frozen=True)
class Load:
    """What the engine holds after a step. kv_used and kv_total: blocks."""

    running: int
    waiting: int
    kv_used: int
    kv_total: int
    preemptions: int


@dataclass(frozen=True)
class Report:
    """One step, as the event loop hears of it. at: when it ended, in seconds of time.perf_counter."""

    at: float
    outputs: list[RequestOutput]
    failures: dict[str, BaseException]
    load: Load
    dead: BaseException | None = None  # what ended the thread


class Job:
    """One HTTP request: its samples, and what they have produced that its reader has not taken. Lives in the event loop.

    A reader that is slow finds all that has come since in one piece: nothing piles up but the text itself.
    """

    def __init__(self, names: Sequence[str], every_step: bool):
        self.names = list(names)
        self.arrived = time.perf_counter()
        self.began: list[float | None] = [None] * len(self.names)  # when each sample's first token came
        self.last: list[RequestOutput | None] = [None] * len(self.names)
        self._fresh: dict[int, RequestOutput] = {}
        self._unfinished = len(self.names)
        self._error: ApiError | None = None
        self._every_step = every_step
        self._news = asyncio.Event()

    def take(self, index: int, output: RequestOutput, at: float) -> None:
        """Keep a sample's newest output. Its delta joins what was not read yet."""
        self.last[index] = output
        if self.began[index] is None:
            self.began[index] = at
        unread = self._fresh.get(index)
        self._fresh[index] = replace(output, delta=unread.delta + output.delta) if unread else output
        self._unfinished -= output.finished
        if self._every_step or not self._unfinished:
            self._news.set()

    def fail(self, error: ApiError) -> None:
        """End the reader's wait with an error; what came before it can still be read."""
        self._error = self._error or error
        self._news.set()

    async def grown(self) -> list[tuple[int, RequestOutput]]:
        """Wait for news: (sample, output) of each that grew since the last call, delta being all of its new text.
        Empty when all have ended."""
        while not self._fresh:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return []
            self._news.clear()
            await self._news.wait()
        fresh, self._fresh = self._fresh, {}
        return list(fresh.items())

    async def outputs(self) -> list[RequestOutput]:
        """The last outputs of all samples, when all have ended."""
        while await self.grown():
            pass
        return [output for output in self.last if output is not None]


class Watcher(Protocol):
    """Who counts what passes: a sample's new output (previous: the one before), and each report once its jobs have it."""

    def sample(self, job: Job, index: int, previous: RequestOutput | None, output: RequestOutput, at: float) -> None: ...
    def step(self, report: Report) -> None: ...


class EngineLoop:
    """Runs an engine in a thread of its own. All methods belong to the event loop that called ``start``."""

    def __init__(self, engine: Engine, max_waiting: int, watch: Watcher):
        self.engine, self.limit, self._watch = engine, engine.options.max_num_seqs + max_waiting, watch
        self.fault: BaseException | None = None  # of the last step, if it failed
        self.closing = self.dead = False
        self._readers: dict[str, tuple[Job, int]] = {}  # by engine request, until it ends
        self._idle = asyncio.Event()
        self._inbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="minillm-engine", daemon=True)
        self._mine: set[str] = set()  # the engine thread's: requests of ours that the engine holds
        self._refused: dict[str, BaseException] = {}  # the engine thread's, until the next report

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def check_room(self, count: int) -> None:
        """Raise the 429 or 503 that submitting so many samples now would meet."""
        if self.closing or self.dead:
            raise closing()
        if len(self._readers) + count > self.limit:
            raise overloaded(len(self._readers), count, self.limit)

    def submit(self, name: str, work: Work, every_step: bool) -> Job:
        """Queue the samples of one HTTP request, all or none. every_step: wake the reader for each step, not only at the end."""
        self.check_room(len(work))
        job = Job([f"{name}-{i}" for i in range(len(work))], every_step)
        self._readers.update({n: (job, i) for i, n in enumerate(job.names)})
        self._inbox.put(partial(self._add, job.names, work))
        return job

    def abort(self, job: Job) -> int:
        """Forget what has not ended of a job and say how many samples that is; the engine's blocks are free within a step."""
        gone = [name for name in job.names if self._readers.pop(name, None)]
        if gone:
            self._inbox.put(partial(self._abort, gone))
        self._note_idle()
        return len(gone)

    async def drain(self, seconds: float) -> None:
        """Take no more work; let what runs go on for so long, then end it with a 503."""
        self.closing = True
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except asyncio.TimeoutError:
            self._fail_all(closing())

    async def stop(self) -> None:
        """End the thread; the engine then holds nothing of ours."""
        self.closing = True
        self._fail_all(closing())
        self._inbox.put(None)
        await asyncio.to_thread(self._thread.join)

    def _note_idle(self) -> None:
        if self.closing and not self._readers:
            self._idle.set()

    def _fail_all(self, error: ApiError) -> None:
        for job in {job for job, _ in self._readers.values()}:
            job.fail(error)
            self.abort(job)

    def _deliver(self, report: Report) -> None:
        for output in report.outputs:
            reader = self._readers.get(output.request_id)
            if reader is None:
                continue  # its client has gone
            job, index = reader
            previous = job.last[index]
            job.take(index, output, report.at)
            if output.finished:
                del self._readers[output.request_id]
            self._watch.sample(job, index, previous, output, report.at)
        if report.outputs:
            self.fault = None
        for name, fault in report.failures.items():
            self.fault = fault
            if reader := self._readers.get(name):
                reader[0].fail(failed(fault))
                self.abort(reader[0])  # its other samples are of no use to anybody
        if report.dead:
            self.dead = True
            self._fail_all(failed(report.dead))
        self._note_idle()
        self._watch.step(report)

    # --- the engine's thread

    def _run(self) -> None:
        try:
            while self._take_orders():
                self._report(*self._step())
        except BaseException as fault:  # nothing is left that could serve: say so instead of hanging
            log.exception("the engine's thread has ended")
            self._report([], dict.fromkeys(self._mine, fault), fault)
        finally:
            self._abort(list(self._mine))

    def _take_orders(self) -> bool:
        """Do what the event loop asked for; wait for it when there is nothing to compute. False: the end."""
        wait = not self.engine.has_work
        if wait:
            release_workers()  # whoever computes meanwhile in this process needs them
        while True:
            try:
                order = self._inbox.get(block=wait)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            wait = False

    def _step(self) -> tuple[list[RequestOutput], dict[str, BaseException]]:
        """One step. When it raises, the requests that the engine dropped for it have failed; if there are none, all have."""
        failures, self._refused = self._refused, {}
        try:
            outputs = self.engine.step()
        except Exception as fault:
            log.exception("a step of the engine failed")
            outputs = []
            dropped = [name for name in self._mine if not self.engine.knows(name)] or list(self._mine)
            failures |= dict.fromkeys(dropped, fault)
            self._abort(dropped)
        self._mine.difference_update(o.request_id for o in outputs if o.finished)
        return outputs, failures

    def _report(
        self, outputs: list[RequestOutput], failures: dict[str, BaseException], dead: BaseException | None = None
    ) -> None:
        report = Report(time.perf_counter(), outputs, failures, self._load(), dead)
        try:
            self._loop.call_soon_threadsafe(self._deliver, report)
        except RuntimeError:  # the event loop was closed without stopping us; nobody listens any more
            log.debug("a report found no event loop")

    def _load(self) -> Load:
        scheduler, pool = self.engine.scheduler, self.engine.cache.pool
        preemptions = getattr(scheduler, "num_preemptions", 0)  # a scheduler of somebody's own may not count them
        return Load(len(scheduler.running), len(scheduler.waiting), pool.num_referenced, pool.num_blocks, preemptions)

    def _add(self, names: Sequence[str], work: Work) -> None:
        first: tuple[list[int], str] | None = None
        for name, (ids, params) in zip(names, work, strict=True):
            try:
                # the samples of a prompt stand together and have one list of ids: they share its blocks
                sibling = first[1] if first is not None and first[0] is ids and first[1] in self._mine else None
                self.engine.add_request(ids, params, name, sibling=sibling)
                self._mine.add(name)
                first = (ids, name) if sibling is None else first
            except Exception as fault:
                self._refused[name] = fault

    def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            try:
                self.engine.abort(name)
            except Exception:  # a cache of somebody's own may fail to take blocks back; the others must still be freed
                log.exception("aborting %s failed", name)
            self._mine.discard(name)
