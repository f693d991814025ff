"""Engine: the only loop. Schedule, launch, land; one call of ``step`` each time around."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from concurrent.futures import wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Sequence

import numpy as np

from minillm.attention.torch_backend import precision_name
from minillm.cache.snapshot import CacheSnapshot
from minillm.config import EngineConfig
from minillm.engine.accounts import Accounts
from minillm.engine.admission import Admission, TokenizerLike, check_tokenizer
from minillm.engine.assembly import assemble
from minillm.engine.detokenizer import Detokenizer
from minillm.engine.live import Live
from minillm.engine.overlap import Flight, Inline, OneAhead
from minillm.engine.request import Request, RequestOutput, Status
from minillm.engine.sampler import Sampled
from minillm.engine.scheduler import Scheduler
from minillm.model.transformer import Transformer
from minillm.perf.meter import Meter
from minillm.sampling_params import MAX_SEED, SamplingParams

log = logging.getLogger("minillm")


class Engine:
    """Runs any number of requests over one model. Everything it needs is handed in; two engines share nothing but weights."""

    def __init__(self, model: Transformer, tokenizer: TokenizerLike | None = None, options: EngineConfig | None = None):
        options = options or EngineConfig()
        check_tokenizer(tokenizer)
        self.model, self.tokenizer, self.options = model, tokenizer, options
        parts = assemble(model, options)
        self.max_model_len, self.pool_size, self.store = parts.max_model_len, parts.pool_size, parts.store
        self.cache, self.runner, self.speculation = parts.cache, parts.runner, parts.speculation
        self.scheduler = Scheduler.from_options(options, self.cache)
        budget = options.max_num_batched_tokens
        slots_held = partial(self.cache.most_slots, chunk=budget * (1 + options.overlap))  # a step in flight, and the next one
        self.admission = Admission(
            tokenizer, model.config.vocab_size, self.max_model_len, self.cache.capacity,
            None if self.scheduler.keep_kv else budget, slots_held,
        )  # fmt: skip
        self.pipeline = OneAhead() if options.overlap else Inline()
        self._flights: deque[Flight] = deque()
        self.meter = Meter(self.weight_bytes, self.cache.capacity * self.store.bytes_per_token)
        self.accounts = Accounts(self.meter, self.scheduler, self.store.bytes_per_token)
        self._live: dict[str, Live] = {}
        self._held: list[RequestOutput] = []
        self._names = itertools.count()
        self._seeds = np.random.Generator(np.random.Philox(options.seed))
        log.info("%s", self.description)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights held: the model's, the copy inside a compiled step, and a drafter's own."""
        compiled = self.runner.compiled.weight_bytes if self.runner.compiled else 0
        return self.model.weight_bytes() + compiled + (self.speculation.weight_bytes if self.speculation else 0)

    @property
    def description(self) -> str:
        """What was chosen, in a sentence."""
        c, size = self.model.config, self.pool_size
        pool = size.num_blocks * size.block_size * self.store.bytes_per_token
        held = precision_name(self.model.dtype) + (f" ({self.model.storage})" if self.model.storage else "")
        compiled = f"; {self.runner.compiled.description}" if self.runner.compiled else ""
        return (
            f"{c.name}: {c.num_params / 1e6:.1f} M parameters in {held} on {self.model.device} "
            f"({self.weight_bytes / 1e6:.0f} MB held); KV pool of {size.num_blocks} blocks of {size.block_size} tokens, "
            f"{pool / 1e6:.0f} MB ({size.reason}); "
            f"up to {self.options.max_num_seqs} requests at once, {self.max_model_len} tokens each{compiled}"
        )

    @property
    def has_work(self) -> bool:
        """Whether a step would produce or compute anything."""
        return self.scheduler.has_work or bool(self._flights or self._held)

    def knows(self, request_id: str) -> bool:
        """Whether a request of this id is live or has an output that nobody took yet."""
        return request_id in self._live or any(o.request_id == request_id for o in self._held)

    def add_request(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None, request_id: str | None = None,
        sibling: str | None = None,
    ) -> str:  # fmt: skip
        """Queue one request and return its id. A prompt or id that cannot be served is a ValueError that changes nothing.

        sibling: id of a request that has not ended and has the same prompt: both are samples of it and share its blocks.
        """
        params = SamplingParams() if params is None else params
        ids = self.encode(prompt)
        self.admission.check(ids, params)
        if params.n != 1:
            raise ValueError(f"a request is one sample, got n={params.n}; LLM.generate turns n samples into n requests")
        family = self._family(sibling, ids)
        if request_id is None:
            request_id = next(name for i in self._names if not self.knows(name := f"request-{i}"))
        elif not isinstance(request_id, str) or not request_id:
            raise ValueError(f"request_id must be a non-empty string, got {request_id!r}")
        elif self.knows(request_id):
            raise ValueError(f"request id {request_id!r} is in use by a request that has not ended")
        stop_ids = set(params.stop_token_ids)
        if not params.ignore_eos:
            stop_ids.update(self.model.config.eos_token_ids, self.tokenizer.eos_token_ids if self.tokenizer else ())
        seed = int(self._seeds.integers(MAX_SEED)) if params.seed is None else params.seed
        room = self.max_model_len - len(ids)
        request = Request(request_id, len(ids), ids, params, seed, frozenset(stop_ids), max_tokens=min(params.max_tokens, room))
        if self.scheduler.shares_prompts:
            request.family = family
            family.append(request)
        self._live[request_id] = Live(request, Detokenizer(self.tokenizer, params.stop_strings))
        self.scheduler.add(request)
        return request_id

    def _family(self, sibling: str | None, ids: Sequence[int]) -> list[Request]:
        if sibling is None:
            return []
        if sibling not in self._live:
            raise ValueError(f"sibling {sibling!r} is no request that has not ended")
        other = self._live[sibling].request
        if other.token_ids[: other.prompt_len] != ids:
            raise ValueError(f"sibling {sibling!r} has another prompt, of {other.prompt_len} tokens; this one has {len(ids)}")
        return other.family

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt; see Admission.encode."""
        return self.admission.encode(prompt)

    def step(self) -> list[RequestOutput]:
        """Launch one pass of the model over the scheduled tokens, and land one. Without overlap that is the same pass.

        Returns an output for every request that got a token or ended."""
        launched = self.scheduler.has_work and self._launch()
        # when the last request has ended, the step that it wasted lands as well: an idle engine has nothing in flight
        while len(self._flights) > (self.pipeline.depth if launched and self.scheduler.has_work else 0):
            self._land()
        outputs, self._held = self._held, []  # only now: a pass that raises loses nobody's output
        return outputs

    def _launch(self) -> bool:
        """Send the next step on its way; False when all that is left to do is in flight."""
        plan = self.scheduler.schedule()
        if not plan.scheduled:
            if not self._flights:
                policy = type(self.scheduler.policy).__name__
                raise RuntimeError(
                    f"nothing was scheduled for {len(self._live)} requests: batching policy {policy} granted nothing"
                )
            return False
        if self.speculation:
            plan = self.speculation.extend(plan, self.cache, self.options.max_num_batched_tokens)
        step = self.runner.prepare(plan)
        counts = self.accounts.counts(plan, step)
        before = self._flights[-1] if self._flights else None
        self.scheduler.launched(plan)
        self._flights.append(Flight(plan, counts, step, self.pipeline.submit(self.runner.run, step, before)))
        return True

    def _land(self) -> None:
        """Wait for the oldest step in flight and hand its tokens out."""
        flight = self._flights[0]
        try:
            result = flight.result()
        except BaseException:
            if flight.failed:
                self._undo()
            raise
        self._flights.popleft()
        faults, given, accepted, wasted = [], 0, 0, 0
        for close in (partial(self.scheduler.update, flight.plan), partial(self.cache.release, flight.spare)):
            try:
                close()
            except Exception as fault:  # see below
                faults.append(fault)
        for seat, tokens in zip(flight.step.seats, result.tokens.values(), strict=True):
            request, drafted, agreed = seat.request, len(seat.draft), len(tokens) - 1
            accepted, wasted = accepted + agreed, wasted + drafted - agreed
            if request.status is Status.FINISHED:
                wasted += 1
                continue
            try:
                self.scheduler.refuse(request, drafted - agreed)
                request.drafts = request.drafts.plus(drafted, agreed)
                self._offer(request)
                before = request.num_output_tokens
                self._held.append(self._advance(request, tokens))
                given += request.num_output_tokens - before
            except Exception as fault:  # a tokenizer or prefix cache of somebody's own: it ends its request, not the others'
                self._drop(request)
                faults.append(fault)
        work = flight.step.work + self.model.routed_work(result.expert_counts, self.runner.backend)
        if self.speculation:
            try:
                self.speculation.learn(flight.step.seats, result)
                work += self.speculation.take_work()
            except Exception as fault:  # a proposer of somebody's own: the step has run all the same
                faults.append(fault)
        self.meter.record(flight.counts, work, output_tokens=given, accepted=accepted, wasted=wasted)
        self.meter.route(result.expert_counts)
        self.accounts.weigh()
        if faults:
            raise faults[0]

    def cache_snapshot(self) -> CacheSnapshot:
        """Block tables of the running requests, who holds which block, and the tree of the prefix cache."""
        return self.cache.snapshot(self.scheduler.running)

    def _offer(self, request: Request) -> None:
        """Show the request's prompt to the prefix cache. Blocks that it gives up may be read by the steps in flight."""
        spare = self.cache.offer_prompt(request)
        if self._flights:
            self._flights[-1].spare.extend(spare)
        else:
            self.cache.release(spare)

    def _undo(self) -> None:
        """A step has failed, and with it those launched after it: as if none of them had been planned."""
        wait([flight.future for flight in self._flights])
        while self._flights:
            flight = self._flights.pop()
            for close in (partial(self.scheduler.undo, flight.plan), partial(self.cache.release, flight.spare)):
                with suppress(Exception):  # a prefix cache of somebody's own; the step's error is the one to raise
                    close()

    def _forget(self, request: Request) -> None:
        if self.speculation:
            self.speculation.forget(request.request_id)

    def _drop(self, request: Request) -> None:
        """Forget a request that cannot go on; it gives no output."""
        self._live.pop(request.request_id, None)
        self._forget(request)
        if request.status is not Status.FINISHED:
            with suppress(Exception):  # what failed once may fail again; the blocks come back either way
                self.scheduler.finish(request, "abort")

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now; its blocks are free again. Returns what it had, its undelivered outputs included, or None if no such
        request is live or has an output to come."""
        mine = [o for o in self._held if o.request_id == request_id]
        self._held = [o for o in self._held if o.request_id != request_id]
        live = self._live.get(request_id)
        if live is not None:
            try:
                self.scheduler.finish(live.request, "abort")
            finally:
                self.accounts.weigh()
                try:
                    mine.append(self._output(live))
                finally:
                    self._settle()
        return replace(mine[-1], delta="".join(o.delta for o in mine)) if mine else None

    def _settle(self) -> None:
        """Where no request is left, wait for what is still in flight: nobody would ask for it."""
        while self._flights and not self.scheduler.has_work:
            try:
                self._land()
            except Exception as error:
                log.warning("a step whose requests were aborted has failed: %s", error)

    def hold(self, outputs: Sequence[RequestOutput]) -> None:
        """Hand outputs back: the next step returns them again. For callers who meet other callers' results in the loop."""
        self._held.extend(outputs)

    def _advance(self, request: Request, tokens: Sequence[Sampled]) -> RequestOutput:
        """Give a request its next tokens, up to the one that ends it."""
        live = self._live[request.request_id]
        for sampled in tokens:
            reason = live.take(sampled)
            if reason is not None:
                self.scheduler.finish(request, reason)
                break
        return self._output(live)

    def _output(self, live: Live) -> RequestOutput:
        """The request as its caller sees it. A finished one is forgotten here."""
        request = live.request
        if request.status is Status.FINISHED:  # before its text is asked for: a tokenizer of somebody's own may raise
            del self._live[request.request_id]
            self._forget(request)
        return live.output()
