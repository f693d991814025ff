"""The routes: from a body to samples for the engine, and from its outputs to an answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, AsyncIterator

from fastapi import FastAPI, Request
from fastapi.responses import Response

from minillm.llm import LLM
from minillm.server.answers import Answer, ChatAnswer, CompletionAnswer, event
from minillm.server.door import Door, Receive, Send
from minillm.server.errors import ApiError, Json, add_handlers, failed, invalid
from minillm.server.loop import EngineLoop, Job, Work
from minillm.server.metrics import Metrics
from minillm.server.options import ServerOptions
from minillm.server.schema import Body, ChatBody, CompletionBody, blame


class Service:
    """One model behind the interface: its engine's loop, its metrics, and a thread that turns text into tokens."""

    def __init__(self, llm: LLM, options: ServerOptions):
        self.llm, self.options = llm, options
        self.name = options.name or llm.model.config.name
        self.metrics = Metrics()
        self.loop = EngineLoop(llm.engine, options.max_waiting, self.metrics)
        self.created = int(time.time())
        self._encoder = ThreadPoolExecutor(1, "minillm-encoder")

    async def stop(self) -> None:
        await self.loop.stop()
        self._encoder.shutdown(cancel_futures=True)

    def check_model(self, name: str) -> None:
        if name != self.name:
            raise ApiError(
                404, f"model {name!r:.80} is not here; this server has {self.name!r}", param="model", code="model_not_found"
            )

    async def accept(self, body: Body, prompts: list[Any], kind: type[Answer]) -> tuple[Job, Answer]:
        """Check everything, then queue the samples of all prompts."""
        self.check_model(body.model)
        limit, count = min(self.options.max_choices, self.loop.limit), len(prompts) * body.n
        if count > limit:
            raise invalid(f"{len(prompts)} prompts with n={body.n} are {count} samples, the limit is {limit}", "n")
        self.loop.check_room(count)  # before any work is done for it
        work = await asyncio.get_running_loop().run_in_executor(self._encoder, self._prepare, body, prompts)
        name = f"{'chatcmpl' if kind is ChatAnswer else 'cmpl'}-{uuid.uuid4().hex}"
        answer = kind(body, name, self.llm.tokenizer, len(work))
        return self.loop.submit(name, work, every_step=body.stream), answer

    def _prepare(self, body: Body, prompts: list[Any]) -> Work:
        admission = self.llm.engine.admission
        work = []
        for prompt in prompts:
            try:
                ids = self.llm.encode(prompt)
                params = body.sampling_params(max(1, admission.longest_answer(len(ids))))
                admission.check(ids, params)
            except ValueError as error:
                raise blame(error, "messages" if isinstance(body, ChatBody) else "prompt") from error
            work += [(ids, one) for one in params.samples()]
        return work

    def give_up(self, job: Job) -> None:
        """The client has gone, or has all it wanted."""
        gone = self.loop.abort(job)
        if gone:
            self.metrics.ended.labels("abort").inc(gone)


class EventStream(Response):
    """Server-sent events as a job grows; a client that leaves, or that stops reading, ends the job."""

    media_type = "text/event-stream"

    def __init__(self, service: Service, job: Job, answer: Answer):
        super().__init__(None, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._service, self._job, self._answer = service, job, answer

    async def __call__(self, scope: Any, receive: Receive, send: Send) -> None:
        tasks = [asyncio.ensure_future(self._write(send)), asyncio.ensure_future(left(receive))]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            self._service.give_up(self._job)
        if isinstance(results[0], Exception):
            raise results[0]

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async for events in self._events():
                async with asyncio.timeout(self._service.options.stall_seconds):
                    await send({"type": "http.response.body", "body": events, "more_body": True})
        except TimeoutError:  # the reader has stopped; what it did not read is lost to it, and the connection with it
            return
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _events(self) -> AsyncIterator[bytes]:
        if opening := self._answer.opening():
            yield opening
        try:
            while grown := await self._job.grown():
                if pieces := self._answer.pieces(grown):
                    yield pieces
            yield self._answer.closing(await self._job.outputs())
        except ApiError as error:  # too late for a status
            yield event(error.content)


async def left(receive: Receive) -> None:
    """Return when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def answer_whole(service: Service, job: Job, answer: Answer, request: Request) -> Response:
    """The answer in one piece; a client that leaves before it is there ends the job."""
    outputs, gone = asyncio.ensure_future(job.outputs()), asyncio.ensure_future(left(request.receive))
    try:
        await asyncio.wait({outputs, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not outputs.done():
            return Response(status_code=499)  # nobody reads it
        return Json(answer.whole(outputs.result()))
    finally:
        outputs.cancel()
        gone.cancel()
        service.give_up(job)


def create_app(llm: LLM, options: ServerOptions | None = None) -> FastAPI:
    """The interface around a model. Its engine belongs to the app from start-up to shut-down: use it nowhere else meanwhile."""
    options = options or ServerOptions()
    service = Service(llm, options)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.loop.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="minillm", lifespan=lifespan)
    app.state.service = service

    def refused(status: int) -> None:
        service.metrics.refused.labels(status).inc()

    app.add_middleware(Door, options=options, refused=refused)
    add_handlers(app, refused)
    _add_routes(app, service)
    return app


def _add_routes(app: FastAPI, service: Service) -> None:
    async def serve(request: Request, body: Body, prompts: list[Any], kind: type[Answer]) -> Response:
        job, answer = await service.accept(body, prompts, kind)
        return EventStream(service, job, answer) if body.stream else await answer_whole(service, job, answer, request)

    @app.post("/v1/completions")
    async def completions(body: CompletionBody, request: Request) -> Response:
        return await serve(request, body, body.prompts, CompletionAnswer)

    @app.post("/v1/chat/completions")
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        return await serve(request, body, [body.conversation], ChatAnswer)

    def card() -> dict[str, Any]:
        length = service.llm.engine.max_model_len
        return {"id": service.name, "object": "model", "created": service.created, "owned_by": "minillm", "max_model_len": length}

    @app.get("/v1/models")
    async def models() -> Response:
        return Json({"object": "list", "data": [card()]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return Json(card())

    @app.get("/health")
    async def health() -> Response:
        loop = service.loop
        if loop.fault is not None:
            what = "the engine has stopped" if loop.dead else "the last step failed"
            return Json({"status": what, "error": failed(loop.fault).detail}, 503)
        return Json({"status": "shutting down"}, 503) if loop.closing else Json({"status": "ok"})

    @app.get("/metrics")
    async def metrics() -> Response:
        page, kind = service.metrics.page()
        return Response(page, media_type=kind)
