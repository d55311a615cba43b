"""The metrics that a server exposes to Prometheus."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from draft_heads.inference.generation import Generation

SECONDS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100, 300)


class ServerMetrics:
    """The counters of one server; β over any time is Δ new tokens / Δ target steps."""

    def __init__(self, max_depth: int) -> None:
        self.registry = registry = CollectorRegistry()
        self.requests = Counter("draft_heads_requests", "Requests answered", ("path", "status"), registry=registry)
        self.abandoned = Counter("draft_heads_abandoned", "Answers whose client left first", registry=registry)
        self.prompt_tokens = Counter("draft_heads_prompt_tokens", "Tokens of prompts", registry=registry)
        self.new_tokens = Counter("draft_heads_new_tokens", "Tokens of answers", registry=registry)
        self.steps = Counter("draft_heads_target_steps", "Forwards of the target", registry=registry)
        self.accepted = Histogram(
            "draft_heads_accepted_tokens",
            "Drafted tokens accepted in a target step",
            buckets=tuple(range(max_depth + 1)),
            registry=registry,
        )
        self.beta = Gauge("draft_heads_beta", "New tokens per target step since the start", registry=registry)
        self.beta.set_function(lambda: self._tokens / max(1, self._steps))
        self.waiting = Gauge("draft_heads_waiting", "Answers that wait for the engine", registry=registry)
        self.running = Gauge("draft_heads_running", "Answers that the engine decodes", registry=registry)
        self.first_token = Histogram(
            "draft_heads_first_token_seconds", "From a request to its first token", buckets=SECONDS, registry=registry
        )
        self.seconds = Histogram(
            "draft_heads_request_seconds", "From a request to its end", ("path",), buckets=SECONDS, registry=registry
        )
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

    def text(self) -> bytes:
        """All metrics in the exposition format."""
        return generate_latest(self.registry)
