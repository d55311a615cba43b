"""Every error in the form of the OpenAI API."""

from __future__ import annotations

import logging
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from draft_heads.inference.serving.fields import BROKEN_RULE, shown

logger = logging.getLogger(__name__)

CLIENT_LEFT = 499
"""nginx's status for a client that disconnected; nobody receives it."""


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
        again = {"Retry-After": "1"}
        headers = {401: {"WWW-Authenticate": "Bearer"}, 429: again, 503: again}.get(self.status)
        return JSONResponse(self.body(), self.status, headers)


def add_error_handlers(app: FastAPI) -> None:
    """Every error in the API's form."""

    @app.exception_handler(APIError)
    async def ours(_: Request, error: APIError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> Response:
        first = error.errors()[0]
        kind, where = first["type"], ".".join(map(str, first["loc"][1:]))
        message = f"{where}: {first['msg'].removeprefix('Value error, ')}"
        if kind == BROKEN_RULE:
            message = f"{where} {first['msg']}"
        elif kind == "extra_forbidden":
            message = f"{where} is not supported; got {shown(first['input'])}; leave it out"
        elif kind == "missing" and where:
            message = f"{where} must be given; got none; add it"
        elif kind == "json_invalid":
            where, message = "", f"the body must be JSON; {first.get('ctx', {}).get('error', 'it is not')}"
        elif not where and kind == "string_unicode":
            message = "the body's keys must be valid Unicode; leave out the one that is not"
        elif not where:
            message = "the body must be a JSON object, sent with `Content-Type: application/json`"
        return APIError(400, message, "invalid_request", where or None).response()

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: HTTPException) -> Response:
        response = APIError(error.status_code, str(error.detail)).response()
        response.headers.update(error.headers or {})  # `Allow` of a wrong method
        return response

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, __: ClientDisconnect) -> Response:
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(Exception)
    async def internal(_: Request, error: Exception) -> Response:
        logger.error("a request failed", exc_info=error)
        return APIError(500, "the server failed; its log has the reason").response()
