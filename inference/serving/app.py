"""The HTTP side: chat completions, completions, models, health and metrics in the forms of the OpenAI API."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from functools import partial
from socket import socket
from typing import Any

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from draft_heads.data.rendering import ConversationError
from draft_heads.inference.generation import ContextError
from draft_heads.inference.serving.metrics import ServerMetrics
from draft_heads.inference.serving.requests import (
    ChatRequest,
    CompletionRequest,
    DecodingRequest,
    ParameterError,
    ServerLimits,
)
from draft_heads.inference.serving.worker import ClosedError, Job, Piece, QueueFullError, Worker

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499  # as nginx names it; nobody receives it


class APIError(Exception):
    """An answer in the API's form of errors."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.param = status, code, param

    def body(self) -> dict[str, Any]:
        """The JSON of it."""
        kinds = {401: "authentication_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        """As a response."""
        again = {"Retry-After": "1"} if self.status in (429, 503) else None
        return JSONResponse(self.body(), self.status, again)


class Watched:
    """Counts responses, and refuses a body larger than `limit` bytes before it is read whole."""

    def __init__(self, app: ASGIApp, limit: int, metrics: ServerMetrics) -> None:
        self.app, self.limit, self.metrics = app, limit, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        read = 0

        async def limited() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                raise HTTPException(413, f"a request may have {self.limit} bytes; this one has more; send less text")
            return message

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                path = getattr(scope.get("route"), "path", "other")
                self.metrics.requests.labels(path, message["status"]).inc()
            await send(message)

        await self.app(scope, limited, counted)


class EventStream(StreamingResponse):
    """Server-sent events; the work ends when the client leaves, even before the first event."""

    def __init__(self, answers: Answers, form: Form, usage: bool) -> None:
        super().__init__(answers.events(form, usage), media_type="text/event-stream")
        self._end = partial(answers.end, form)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI interface."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._end()


class Server(uvicorn.Server):
    """Told to exit, it lets running answers go on for `seconds`, then ends them with the API's error."""

    def __init__(self, app: ASGIApp, worker: Worker, seconds: float, **options: Any) -> None:
        # The extra time is for clients that are slow to read the error.
        super().__init__(uvicorn.Config(app, timeout_graceful_shutdown=int(seconds) + 5, **options))
        self._worker, self._seconds = worker, seconds

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """uvicorn calls it once, when it begins to exit."""
        late = asyncio.get_running_loop().call_later(self._seconds, self._worker.stop)
        await super().shutdown(sockets)
        late.cancel()


def create_app(
    worker: Worker, name: str, limits: ServerLimits, api_key: str | None = None, max_body_bytes: int = 2**20
) -> FastAPI:
    """The server of one engine; `name` is the model's in the API. Its shutdown closes the worker."""

    @contextlib.asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        await asyncio.to_thread(worker.close)

    async def authorised(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        right = hmac.compare_digest(given.strip().encode(), (api_key or "").encode())
        if api_key and not (right and scheme.lower() == "bearer"):
            raise APIError(401, "the API key is missing or wrong; send `Authorization: Bearer KEY`", "invalid_api_key")

    app = FastAPI(title="draft-heads", lifespan=lifespan)
    app.add_middleware(Watched, limit=max_body_bytes, metrics=worker.metrics)
    add_error_handlers(app)
    api = APIRouter(prefix="/v1", dependencies=[Depends(authorised)])
    model = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "draft-heads"}

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": "ok"}) if worker.alive else JSONResponse({"status": "closed"}, 503)

    @app.get("/metrics")
    async def prometheus() -> Response:
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
            raise APIError(404, f"the model must be {name!r}; got {asked!r}", "model_not_found", "model")

    async def answer(request: Request, body: DecodingRequest, form: type[Form]) -> Response:
        check_model(body.model)
        target = worker.engine.target
        try:
            prompts = await asyncio.to_thread(body.prompts, target)
            settings = [body.settings(target, prompt, limits) for prompt in prompts]
        except ContextError as error:
            raise APIError(400, str(error), "context_length_exceeded") from error
        except ParameterError as error:
            raise APIError(400, str(error), "invalid_value", error.param) from error
        except (ValueError, ConversationError) as error:
            raise APIError(400, str(error)) from error
        work = [(prompt, one) for prompt, n in zip(prompts, settings) for one in n]
        answers = Answers(work, body, worker)
        tokens = sum(map(len, prompts))
        try:
            worker.submit(answers.jobs)
        except QueueFullError as error:
            raise APIError(429, f"{error}; try again later", "queue_full") from error
        except ClosedError as error:
            raise APIError(503, str(error)) from error
        written = form(name, tokens, bool(body.return_token_ids))
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return EventStream(answers, written, usage)
        return await answers.whole(request, written)

    @api.post("/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await answer(request, body, ChatForm)

    @api.post("/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await answer(request, body, CompletionForm)

    app.include_router(api)
    return app


def add_error_handlers(app: FastAPI) -> None:
    """Every error in the API's form."""

    @app.exception_handler(APIError)
    async def ours(_: Request, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        parts = map(str, first["loc"][1:])
        where = ".".join(part for part in parts if part != "str" and "[" not in part)  # without types of a union
        message = first["msg"].removeprefix("Value error, ")
        if not where and first["type"] != "value_error":
            message = "the body must be a JSON object, sent with `Content-Type: application/json`"
        if first["type"] == "json_invalid":
            where, message = "", f"the body must be JSON; {first.get('ctx', {}).get('error', 'it is not')}"
        return APIError(400, f"{where}: {message}" if where else message, "invalid_request", where or None).response()

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        return APIError(error.status_code, str(error.detail)).response()

    @app.exception_handler(Exception)
    async def internal(_: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return APIError(500, "the server failed; its log has the reason").response()


class Answers:
    """The answers to one request: their jobs, and the pieces that the engine's thread delivers."""

    def __init__(self, work: list[tuple[list[int], Any]], asked: DecodingRequest, worker: Worker) -> None:
        self._worker, self._started = worker, time.perf_counter()
        self._pieces = [asyncio.Queue[Piece | Exception]() for _ in work]
        loop = asyncio.get_running_loop()

        def deliver(queue: asyncio.Queue[Piece | Exception], piece: Piece | Exception) -> None:
            with contextlib.suppress(RuntimeError):  # the server has stopped
                loop.call_soon_threadsafe(queue.put_nowait, piece)

        self.jobs = [
            Job(prompt, settings, asked.stops, partial(deliver, queue), asked.continues)
            for (prompt, settings), queue in zip(work, self._pieces)
        ]

    async def pieces(self) -> AsyncIterator[tuple[int, Piece]]:
        """(choice, piece) of all answers, one after another; APIError where the engine failed or the server ends."""
        for index, queue in enumerate(self._pieces):
            while True:
                piece = await queue.get()
                if isinstance(piece, ClosedError):
                    raise APIError(503, str(piece)) from piece
                if isinstance(piece, Exception):
                    raise APIError(500, f"decoding failed: {piece}") from piece
                yield index, piece
                if piece.finish_reason:
                    break

    async def events(self, form: Form, usage: bool) -> AsyncIterator[str]:
        """The body of an event stream."""
        tokens = 0
        try:
            for opening in form.openings(len(self.jobs)):
                yield event(opening)
            async for index, piece in self.pieces():
                tokens += len(piece.tokens)
                if piece.text or piece.finish_reason or form.token_ids:
                    yield event(form.chunk(index, piece))
            if usage:
                yield event({**form.head(), "choices": [], "usage": form.usage(tokens)})
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
        self._worker.cancel(self.jobs)
        self._worker.metrics.seconds.labels(form.path).observe(time.perf_counter() - self._started)


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data, ensure_ascii=False)}\n\n"


class Form(ABC):
    """How one endpoint writes its answers."""

    path, prefix, kind, chunk_kind = "", "", "", ""

    def __init__(self, model: str, prompt_tokens: int, token_ids: bool) -> None:
        self._prompt_tokens, self.token_ids = prompt_tokens, token_ids
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    def head(self, kind: str = "") -> dict[str, Any]:
        """The fields that all parts of an answer share."""
        return {**self._head, "object": kind or self.chunk_kind}

    def usage(self, tokens: int) -> dict[str, int]:
        """The tokens of prompts and answers."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": tokens,
            "total_tokens": self._prompt_tokens + tokens,
        }

    def openings(self, choices: int) -> list[dict[str, Any]]:
        """The chunks before the first text."""
        return []

    def chunk(self, index: int, piece: Piece) -> dict[str, Any]:
        """One event of a stream."""
        return {**self.head(), "choices": [self._choice(index, piece, streamed=True)]}

    def whole(self, answers: list[Piece]) -> dict[str, Any]:
        """The response of all answers."""
        written = [self._choice(index, answer, streamed=False) for index, answer in enumerate(answers)]
        tokens = sum(len(answer.tokens) for answer in answers)
        return {**self.head(self.kind), "choices": written, "usage": self.usage(tokens)}

    def _choice(self, index: int, piece: Piece, streamed: bool) -> dict[str, Any]:
        ids = {"token_ids": piece.tokens} if self.token_ids else {}
        return {
            "index": index,
            **self._text(piece.text, streamed),
            "logprobs": None,
            "finish_reason": piece.finish_reason,
            **ids,
        }

    @abstractmethod
    def _text(self, text: str, streamed: bool) -> dict[str, Any]:
        """The text of a choice in the endpoint's own fields."""


class ChatForm(Form):
    """`chat.completion`."""

    path, prefix = "/v1/chat/completions", "chatcmpl"
    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def openings(self, choices: int) -> list[dict[str, Any]]:
        return [
            {**self.head(), "choices": [{"index": index, "delta": {"role": "assistant", "content": ""}}]}
            for index in range(choices)
        ]

    def _text(self, text: str, streamed: bool) -> dict[str, Any]:
        return {"delta": {"content": text}} if streamed else {"message": {"role": "assistant", "content": text}}


class CompletionForm(Form):
    """`text_completion`."""

    path, prefix = "/v1/completions", "cmpl"
    kind = chunk_kind = "text_completion"

    def _text(self, text: str, streamed: bool) -> dict[str, Any]:
        return {"text": text}
