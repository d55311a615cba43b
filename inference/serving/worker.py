"""One engine serves many clients: a thread decodes their requests one after another, each text by itself."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from prometheus_client import Counter

from draft_heads.data.text.token_spans import PLAIN, AnswerForm
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.evaluation.meter import devices_of
from draft_heads.inference.generation import Generation, GenerationSettings, TextPieces
from draft_heads.inference.serving.errors import APIError
from draft_heads.inference.serving.prometheus import ServerMetrics

logger = logging.getLogger(__name__)

FINISH_REASONS = {"eos": "stop", "stop": "stop", "length": "length", "context": "length"}
SHUTTING_DOWN = "the server is shutting down; ask again when it is back"


@dataclass(frozen=True)
class Piece:
    """What a target step, or the end of an answer, adds to a text.

    tokens         the new tokens, EOS included; their text may come with a later piece
    finish_reason  of the last piece: "stop" or "length"
    """

    text: str
    tokens: list[int]
    finish_reason: str | None = None


@dataclass(eq=False)
class Job:
    """One answer that a client waits for.

    prompt     token ids
    stops      texts that end the answer; they are not part of it
    deliver    receives every piece, or the error that ended the work; called in the engine's thread
    continues  the answer goes on with the prompt's own text, as a space may show
    skips_special  special tokens inside the answer are no part of its text
    cancelled_as   counts it when it ends so; None: it is counted already
    """

    prompt: list[int]
    settings: GenerationSettings
    stops: tuple[str, ...]
    deliver: Callable[[Piece | APIError], None]
    continues: bool = False
    skips_special: bool = False
    cancelled: threading.Event = field(default_factory=threading.Event)
    cancelled_as: Counter | None = None
    submitted: float = field(default_factory=time.perf_counter)


class AnswerText:
    """The text of an answer as it grows, up to the first of its stop texts.

    The end of a text is held back while it may be the beginning of a stop text.
    """

    def __init__(
        self,
        tokenizer: object,
        stops: tuple[str, ...],
        before: Sequence[int] = (),
        form: AnswerForm = PLAIN,
        skips_special: bool = False,
    ) -> None:
        """before, form, skips_special: see `TextPieces`."""
        self._pieces, self._stops = TextPieces(tokenizer, before, form, skips_special), stops
        self._held = ""
        self.stopped = False

    def add(self, token: int) -> str:
        """The text that this token completes."""
        return self._release(self._pieces.add([token]))

    def end(self) -> str:
        """The text that was held back."""
        text = self._release(self._pieces.end())
        return text if self.stopped else text + self._held

    def _release(self, text: str) -> str:
        """What of the text so far and `text` cannot be the beginning of a stop text; the rest is held back."""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            return self._held[: min(found)]
        lengths = range(1, 1 + min(len(self._held), max(map(len, self._stops), default=0)))
        held = max((n for n in lengths if any(stop.startswith(self._held[-n:]) for stop in self._stops)), default=0)
        text, self._held = self._held[: len(self._held) - held], self._held[len(self._held) - held :]
        return text


def takes_work(device: torch.device | str) -> bool:
    """Whether a device still computes: torch raises a lasting CUDA error at every later call."""
    try:
        return torch.ones(1, device=device).add(1).item() == 2
    except RuntimeError:
        return False


def lost_device(error: Exception, devices: Sequence[torch.device | str]) -> str:
    """Why no later answer can be decoded either; "" where one may, as after a lack of memory."""
    told = str(error).partition("\n")[0]
    of_device = isinstance(error, torch.AcceleratorError) or told.startswith("CUDA error")
    if not of_device or all(map(takes_work, devices)):
        return ""
    return f"the server's device must take work; it fails with {told!r}; restart the server"


class Worker:
    """The thread that owns an engine, and the queue in front of it."""

    def __init__(self, engine: DecodingEngine, metrics: ServerMetrics, max_waiting: int = 64) -> None:
        self.engine = engine
        self.metrics, self._max_waiting = metrics, max_waiting
        self._waiting: deque[Job] = deque()
        self._running: Job | None = None
        self._changed, self._closed = threading.Condition(), ""  # why it takes no more work
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it takes work."""
        return self._thread.is_alive() and not self._closed

    def submit(self, jobs: list[Job]) -> None:
        """Queue all of a request's jobs or none; APIError if too many wait or it takes no more work."""
        with self._changed:
            if not self.alive:
                raise APIError(503, self._closed or SHUTTING_DOWN)
            busy = len(self._waiting) + (self._running is not None)
            if busy and len(self._waiting) + len(jobs) > self._max_waiting:
                rule = f"at most {self._max_waiting} answers may wait, and this request asks for {len(jobs)} more"
                raise APIError(429, f"{rule}, {len(self._waiting)} wait already; try again later", "queue_full")
            self._waiting += jobs
            self._changed.notify()
            self._count()

    def cancel(self, jobs: list[Job], failed: bool = False) -> None:
        """Forget jobs that wait; a running one ends with its current step.

        failed: another answer to the same request has, else the client has left
        """
        with self._changed:
            for job in jobs:
                if job.cancelled.is_set():
                    continue  # counted by `stop`
                job.cancelled_as = self.metrics.failed if failed else self.metrics.abandoned
                job.cancelled.set()
                if job in self._waiting:
                    self._waiting.remove(job)
                    job.cancelled_as.inc()
            self._count()

    def stop(self, reason: str = SHUTTING_DOWN) -> None:
        """Take no more work; the running answer, the waiting ones and later requests end with an APIError."""
        with self._changed:
            self._closed = reason
            for job in [*self._waiting, *([self._running] if self._running else [])]:
                if not job.cancelled.is_set():
                    self.metrics.failed.inc()
                job.cancelled.set()
                job.deliver(APIError(503, reason))
            self._waiting.clear()
            self._changed.notify()

    def close(self) -> None:
        """`stop`; returns when the thread has ended."""
        self.stop()
        self._thread.join()

    def _count(self) -> None:
        self.metrics.waiting.set(len(self._waiting))
        self.metrics.running.set(self._running is not None)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._running = None
                self._count()
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                job = self._running = self._waiting.popleft()
                self._count()
            try:
                self._answer(job)
            except Exception as error:
                logger.exception("a request failed")
                self.metrics.failed.inc()
                if reason := lost_device(error, devices_of(self.engine.target)):
                    logger.error(reason)
                    self._running = None  # counted above, told below
                    self.stop(reason)
                job.deliver(APIError(500, f"decoding failed: {error}"))

    def _answer(self, job: Job) -> None:
        target = self.engine.target
        before, form = (job.prompt, PLAIN) if job.continues else ((), target.answer_form)
        result, text = Generation(), AnswerText(target.tokenizer, job.stops, before, form, job.skips_special)
        steps = self.engine.stream(job.prompt, job.settings, result)
        try:
            for step in steps:
                if len(result.accept_lengths) == 1:
                    self.metrics.first_token.observe(time.perf_counter() - job.submitted)
                shown, tokens, read = "", [], len(result.shown(step))
                for count, token in enumerate(step, start=1):
                    shown += text.add(token) if count <= read else ""
                    tokens.append(token)
                    if text.stopped:
                        break
                if text.stopped:
                    result.drop(len(step) - len(tokens))
                if job.cancelled.is_set() or text.stopped:
                    break
                if not result.finish_reason:
                    job.deliver(Piece(shown, tokens))
        finally:
            steps.close()
            self.metrics.add(len(job.prompt), result)
        if job.cancelled.is_set():
            if job.cancelled_as is not None:
                job.cancelled_as.inc()
            return
        reason = "stop" if text.stopped else FINISH_REASONS[result.finish_reason]
        if not text.stopped:  # a stop text in what is shown only now cuts it, but has ended nothing
            shown += text.end()
        job.deliver(Piece(shown, tokens, reason))
