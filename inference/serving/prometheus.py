"""The metrics that a server exposes to Prometheus."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draft_heads.inference.generation import Generation

TIMED_OUT = "draft_heads.timed_out"
"""In the ASGI scope of a request whose body did not arrive in time, so that nobody receives its response."""
SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServerMetrics:
    """The counters of one server; β over any time is Δ new tokens / Δ target steps."""

    def __init__(self, max_depth: int) -> None:
        self.registry = CollectorRegistry()
        own: Any = {"namespace": "draft_heads", "registry": self.registry}
        self.requests = Counter("requests", "Requests answered", ("path", "status"), **own)
        self.abandoned = Counter("abandoned", "Answers whose client left first", **own)
        self.failed = Counter("failed", "Answers that ended with an error, also in a stream that began well", **own)
        self.prompt_tokens = Counter("prompt_tokens", "Tokens of prompts, for each answer to one", **own)
        self.new_tokens = Counter("new_tokens", "Tokens of answers", **own)
        self.steps = Counter("target_steps", "Forwards of the target", **own)
        depths = tuple(range(max_depth + 1))
        self.accepted = Histogram("accepted_tokens", "Drafted tokens accepted in a target step", buckets=depths, **own)
        self.beta = Gauge("beta", "New tokens per target step since the start", **own)
        self.beta.set_function(lambda: self._tokens / max(1, self._steps))
        self.waiting = Gauge("waiting", "Answers that wait for the engine", **own)
        self.running = Gauge("running", "Answers that the engine decodes", **own)
        told = "From a request to the first token of each answer to it"
        self.first_token = Histogram("first_token_seconds", told, buckets=SECONDS, **own)
        self.seconds = Histogram("request_seconds", "From a request to its end", ("path",), buckets=SECONDS, **own)
        self._tokens = self._steps = 0

    def add(self, prompt_tokens: int, answer: Generation) -> None:
        """Count an answer, whole or not, by the new tokens of its steps."""
        accept_lengths = answer.accept_lengths
        self._tokens, self._steps = self._tokens + sum(accept_lengths), self._steps + len(accept_lengths)
        self.prompt_tokens.inc(prompt_tokens)
        self.new_tokens.inc(sum(accept_lengths))
        self.steps.inc(len(accept_lengths))
        for accepted in answer.accepted:
            self.accepted.observe(accepted)

    def count(self, scope: Mapping[str, Any], status: int) -> None:
        """Count a response to the request of an ASGI scope."""
        path = getattr(scope.get("route"), "path", "other")
        self.requests.labels(path, 408 if TIMED_OUT in scope else status).inc()

    def text(self) -> bytes:
        """All metrics in the exposition format."""
        return generate_latest(self.registry)
