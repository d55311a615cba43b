"""The HTTP side: chat completions, completions, models, health and metrics in the forms of the OpenAI API."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draft_heads.data.text.errors import ConversationError
from draft_heads.data.text.json_files import RepeatedKey, parse_json
from draft_heads.inference.generation import ContextError
from draft_heads.inference.serving.errors import CLIENT_LEFT, APIError, add_error_handlers
from draft_heads.inference.serving.forms import ChatForm, CompletionForm, Form, event
from draft_heads.inference.serving.prometheus import ServerMetrics
from draft_heads.inference.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DecodingRequest,
    ServerLimits,
    unusable,
)
from draft_heads.inference.serving.worker import Job, Piece, Worker


class CountedApp(FastAPI):
    """Counts its responses, those of errors that no handler foresees among them."""

    metrics: ServerMetrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""

        async def send_counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self.metrics.count(scope, message["status"])
            await send(message)

        await super().__call__(scope, receive, send_counted)


class BodyLimit:
    """Middleware: refuses a body larger than `limit` bytes before it is read whole."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self.app, self.limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        read = 0

        async def receive_limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                raise HTTPException(413, f"a request may have {self.limit} bytes; this one has more; send less text")
            return message

        await self.app(scope, receive_limited, send)


class EventStream(StreamingResponse):
    """Server-sent events; the work ends when the client leaves, even before the first event."""

    def __init__(self, answers: Answers, form: Form) -> None:
        at_once = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # of nginx, which would send blocks
        super().__init__(answers.events(form), headers=at_once, media_type="text/event-stream")
        self._end = partial(answers.end, form)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


def guarded_route(api_key: str | None) -> type[APIRoute]:
    """Routes that check the API key before they read a request's body, in which no key may come twice."""

    class GuardedRoute(APIRoute):
        def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
            handle = super().get_route_handler()

            async def guarded(request: Request) -> Response:
                scheme, _, given = request.headers.get("authorization", "").partition(" ")
                right = hmac.compare_digest(given.strip().encode(), (api_key or "").encode())
                if api_key and not (right and scheme.lower() == "bearer"):
                    message = "the API key is missing or wrong; send `Authorization: Bearer KEY`"
                    raise APIError(401, message, "invalid_api_key")
                body = await request.body()
                try:
                    parse_json(body.decode(json.detect_encoding(body), "surrogatepass"))  # as FastAPI reads it
                except RepeatedKey as error:  # FastAPI would keep the last value
                    raise APIError(400, f"the body's JSON: {error}") from error
                except RecursionError:
                    raise APIError(
                        400, "the body's JSON is nested too deeply; take out what is not asked for"
                    ) from None
                except json.JSONDecodeError:  # the route says what is wrong with it
                    pass
                except UnicodeDecodeError as error:
                    told = f"the body must be text in UTF-8, not compressed; {error.reason} at byte {error.start + 1}"
                    raise APIError(400, f"{told}; send it as UTF-8") from None
                except ValueError as error:  # a number of thousands of digits
                    raise APIError(400, f"the body's JSON cannot be read: {error}; write it otherwise") from None
                return await handle(request)

            return guarded

    return GuardedRoute


def create_app(
    worker: Worker, name: str, limits: ServerLimits, api_key: str | None = None, max_body_bytes: int = 2**20
) -> FastAPI:
    """The server of one engine; `name` is the model's in the API. Its shutdown closes the worker."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.close)

    app = CountedApp(title="draft-heads", lifespan=lifespan)
    app.metrics = worker.metrics
    app.add_middleware(BodyLimit, limit=max_body_bytes)
    add_error_handlers(app)
    api = APIRouter(prefix="/v1", route_class=guarded_route(api_key))
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "draft-heads"}

    @app.api_route("/health", methods=["GET", "HEAD"])
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if worker.alive else JSONResponse({"status": "closed"}, 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return PlainTextResponse(worker.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @api.get("/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [model]}

    @api.get("/models/{model_id:path}")
    async def one_model(model_id: str) -> dict[str, Any]:
        check_model(model_id)
        return model

    def check_model(asked: str) -> None:
        if asked != name:
            raise APIError(404, f"the model must be {name!r}; got {asked!r}; write it so", "model_not_found", "model")

    async def answer(request: Request, body: DecodingRequest, form: type[Form]) -> Response:
        started = time.perf_counter()
        check_model(body.model)
        target = worker.engine.target
        try:
            prompts = await asyncio.to_thread(body.prompts, target)
            settings = [body.settings(target, prompt, limits) for prompt in prompts]
        except ContextError as error:
            raise APIError(400, str(error), "context_length_exceeded", body.source) from error
        except (ValueError, ConversationError, RecursionError) as error:
            raise unusable(body.source, str(error)) from error
        work = [(prompt, one) for prompt, n in zip(prompts, settings) for one in n]
        answers = Answers(work, body, worker, started)
        tokens = sum(map(len, prompts))
        worker.submit(answers.jobs)
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        written = form(name, tokens, bool(body.return_token_ids), bool(body.stream) and usage)
        return EventStream(answers, written) if body.stream else await answers.whole(request, written)

    @api.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body, ChatForm)

    @api.post("/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body, CompletionForm)

    app.include_router(api)
    return app


class Answers:
    """The answers to one request: their jobs, and the pieces that the engine's thread delivers.

    started: when the request came, of `time.perf_counter`
    """

    def __init__(
        self, work: list[tuple[list[int], Any]], asked: DecodingRequest, worker: Worker, started: float
    ) -> None:
        self._worker, self._started, self._failed = worker, started, False
        self._pieces = [asyncio.Queue[Piece | APIError]() for _ in work]
        loop = asyncio.get_running_loop()

        def deliver(queue: asyncio.Queue[Piece | APIError], piece: Piece | APIError) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        self.jobs = [
            Job(
                prompt,
                settings,
                asked.stops,
                partial(deliver, queue),
                continues=asked.continues,
                skips_special=bool(asked.skip_special_tokens),
                submitted=started,
            )
            for (prompt, settings), queue in zip(work, self._pieces)
        ]

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) of all answers, one after another; APIError where the engine failed or the server ends."""
        for index, queue in enumerate(self._pieces):
            while True:
                piece = await queue.get()
                if isinstance(piece, APIError):
                    self._failed = True
                    raise piece
                yield index, piece
                if piece.finish_reason:
                    break

    async def events(self, form: Form) -> AsyncIterator[str]:
        """The body of an event stream."""
        tokens = 0
        try:
            for opening in form.openings(len(self.jobs)):
                yield event(opening)
            async for index, piece in self.pieces():
                tokens += len(piece.tokens)
                if piece.text or piece.finish_reason or form.token_ids:
                    yield event(form.chunk(index, piece))
            if form.streams_usage:
                yield event(form.last(tokens))
            yield "data: [DONE]\n\n"
        except APIError as error:
            yield event(error.body())

    async def whole(self, request: Request, form: Form) -> Response:
        """All answers in one response; a client that leaves ends the work."""
        collected = asyncio.create_task(self._collect())
        try:
            while not collected.done():
                await asyncio.wait({collected}, timeout=0.25)
                if await request.is_disconnected():
                    return Response(status_code=CLIENT_LEFT)
            return JSONResponse(form.whole(await collected))
        finally:
            collected.cancel()
            self.end(form)

    async def _collect(self) -> list[Piece]:
        whole = [Piece("", []) for _ in self.jobs]
        async for index, piece in self.pieces():
            before = whole[index]
            whole[index] = Piece(before.text + piece.text, before.tokens + piece.tokens, piece.finish_reason)
        return whole

    def end(self, form: Form) -> None:
        """Forget what is not finished."""
        self._worker.cancel(self.jobs, self._failed)
        self._worker.metrics.seconds.labels(form.path).observe(time.perf_counter() - self._started)
