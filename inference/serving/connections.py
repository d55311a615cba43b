"""uvicorn with two more time limits: for a request to arrive whole, and for running answers when the server ends."""

from __future__ import annotations

import asyncio
import json
from socket import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from draft_heads.inference.serving.errors import APIError
from draft_heads.inference.serving.prometheus import TIMED_OUT, ServerMetrics
from draft_heads.inference.serving.worker import Worker

REQUEST_SECONDS = 60.0


class TimedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Ends a connection whose request, headers and body, is not there `request_seconds` after it was awaited.

    uvicorn itself limits only the time between two requests.
    """

    request_seconds = REQUEST_SECONDS
    metrics: ServerMetrics
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch()

    @property
    def _awaits_request(self) -> bool:
        """Whether the client has to send more before there is a whole request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _watch(self) -> None:
        awaits = self._awaits_request and not self.transport.is_closing()
        if self._deadline is None and awaits:
            self._deadline = self.loop.call_later(self.request_seconds, self._give_up)
        elif self._deadline is not None and not awaits:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if not self._awaits_request or self.transport.is_closing():
            return
        if self.cycle is None or not self.cycle.response_started or self.cycle.response_complete:
            if self.cycle is None or self.cycle.response_complete:
                self.metrics.count({}, 408)
            else:  # the server still waits for the body; it counts this
                self.cycle.scope[TIMED_OUT] = True
            message = f"a request must arrive whole within {self.request_seconds:g} seconds; send it again"
            body = json.dumps(APIError(408, message).body()).encode()
            head = "HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json\r\nConnection: close\r\n"
            self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()


class Server(uvicorn.Server):
    """At shutdown, running answers may go on for `seconds`; then they end with the API's error."""

    def __init__(
        self, app: ASGIApp, worker: Worker, seconds: float, request_seconds: float = REQUEST_SECONDS, **options: Any
    ) -> None:
        protocol = type("Protocol", (TimedProtocol,), {"request_seconds": request_seconds, "metrics": worker.metrics})
        # The extra time is for clients that are slow to read the error.
        super().__init__(uvicorn.Config(app, http=protocol, timeout_graceful_shutdown=int(seconds) + 5, **options))
        self._worker, self._seconds = worker, seconds

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        """uvicorn calls it once, when it begins to exit."""
        deadline = asyncio.get_running_loop().call_later(self._seconds, self._worker.stop)
        await super().shutdown(sockets)
        deadline.cancel()
