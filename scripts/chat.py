"""Talk to a target in the terminal; each accepted run of drafted tokens is shown in colour, β and tokens/s below it.

    python scripts/chat.py --target Qwen/Qwen3-8B --drafters ctc=RUN/head ngram

Between messages:

    /drafter [NAME]   the drafters; switch to NAME (also any new one, as in --drafters)
    /system TEXT      begin again with this system message; without TEXT, with none
    /reset            begin again
    /help, /quit      (or Ctrl-D); Ctrl-C ends an answer, or drops a line

A message that begins with a slash is written with a blank before it. Without a terminal, lines are read from standard
input and accepted runs are written in [brackets]; the exit status is 1 if one of the lines could not be done.
"""

from __future__ import annotations

import argparse
import io
import logging
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import closing, nullcontext
from itertools import groupby

from draft_heads.configs.command_line import ends_on_ctrl_c, exit_status, expand_home, parse_with_config

from rich.console import Console
from rich.live import Live
from rich.text import Text

from draft_heads.configs.options import explain_out_of_memory, use_threads
from draft_heads.data.common.console import plain_console
from draft_heads.data.text.errors import ConversationError
from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import Generation, GenerationSettings, TextPieces
from draft_heads.inference.sampling import check_seed, seed_of
from draft_heads.inference.target.target import Target
from draft_heads.scripts.decoding_options import (
    MAX_NODES_HELP,
    check_positive,
    distinct_specs,
    load_target,
    target_parser,
)

ACCEPTED = ("bold cyan", "bold green")  # of neighbouring runs
COMMANDS = {"/drafter": True, "/system": True, "/reset": False, "/help": False, "/quit": False, "/exit": False}
"""Command → whether words may follow it."""
CUT = {"length": ", cut at --max_new_tokens", "context": ", cut at the end of the context"}

logger = logging.getLogger(__name__)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = target_parser(__doc__)
    add = parser.add_argument
    add("--drafters", nargs="+", default=["ngram"], metavar="NAME[=[KIND:]PATH[,key=value…][+…]]",
        help="the first is used first; vanilla is always available (default: ngram)")  # fmt: skip
    add("--max_nodes", type=int, default=32, help=MAX_NODES_HELP)
    add("--max_new_tokens", type=int, default=1024, help="longest answer, in tokens (default 1024)")
    add("--system", help="a system message")
    add("--temperature", type=float, default=0.0, help="above 0: sample, losslessly; 0: greedy (default)")
    add("--top_p", type=float, default=1.0, help="sample from the top tokens that make up this share; 1: all")
    add("--seed", type=int, default=0, help="of sampling; each answer adds one (default 0)")
    options = parse_with_config(parser, arguments, ("target",))
    check_positive(options, "max_nodes", "max_new_tokens")
    check_seed("--seed", options.seed)
    settings(options, 0)
    options.specs = distinct_specs(options.drafters)  # what cannot be read is told before the target is loaded
    return options


def settings(options: argparse.Namespace, turn: int) -> GenerationSettings:
    """How answer number `turn` is decoded."""
    seed = seed_of(options.seed, turn)
    return GenerationSettings(options.max_new_tokens, temperature=options.temperature, top_p=options.top_p, seed=seed)


class Chat:
    """A conversation, and the drafters it may use."""

    def __init__(self, target: Target, options: argparse.Namespace) -> None:
        self.target, self.options = target, options
        self.specs = {spec.name: spec for spec in options.specs}
        self.specs.setdefault("vanilla", DrafterSpec.parse("vanilla"))
        self.engines: dict[str, DecodingEngine] = {}
        self.use(next(iter(self.specs.values())))
        self.turns = 0
        self.reset(options.system)

    def reset(self, system: str | None) -> None:
        """Begin again."""
        self.system = system
        self.messages = [{"role": "system", "content": system}] if system is not None else []

    def use(self, spec: DrafterSpec) -> None:
        """Draft with it from now on, by an engine that is built when first needed; ValueError if it cannot be."""
        if spec.name not in self.engines:
            drafter = build_drafter(spec, self.target, self.options.max_nodes)
            self.engines[spec.name] = DecodingEngine(self.target, drafter)
        self.specs[spec.name], self.drafter = spec, spec.name

    def switch(self, text: str) -> str:
        """Use another drafter, if one is named; returns the names of all, the one in use in brackets. ValueError for
        a new one under a name that another has."""
        spec = self.specs.get(text or self.drafter) or DrafterSpec.parse(expand_home(text))
        if (known := self.specs.get(spec.name, spec)) != spec:
            name, _, words = text.partition("=")
            raise ValueError(
                f"drafters must have different names; {spec.name!r} is another's; got {text!r}; give it a name of its "
                f"own, as in new={words if name == spec.name else text}"
            )
        self.use(known)
        return ", ".join(f"({name})" if name == self.drafter else name for name in self.specs)

    def command(self, line: str) -> str | None:
        """Execute a line that begins with a slash; returns what to print, or None to end. ValueError for no command."""
        name, _, rest = line.partition(" ")
        if name not in COMMANDS or (rest and not COMMANDS[name]):
            raise ValueError(
                f"a line that begins with / must be a command, as /help lists them; got {line!r}; write a blank before "
                "a message that begins so"
            )
        if name in ("/quit", "/exit"):
            return None
        if name == "/drafter":
            return self.switch(rest.strip())
        if name == "/help":
            return (__doc__ or "").split("\n\n")[3]
        self.reset((rest.strip() or None) if name == "/system" else self.system)
        return "a new conversation"

    def answer(self, message: str) -> Generator[tuple[list[tuple[str, bool]], Generation], None, None]:
        """Of every target step: its text in parts (text, whether it was drafted), and the answer so far.

        The conversation keeps the message and its answer, also one that was interrupted, but for one that the chat
        template refuses in what follows (gpt-oss's one that ended in its thoughts), and for one that overflowed.
        """
        asked = [*self.messages, {"role": "user", "content": message}]
        result, pieces = Generation(), TextPieces(self.target.tokenizer, form=self.target.answer_form)
        steps = self.engines[self.drafter].stream(asked, settings(self.options, self.turns), result)
        try:
            for tokens in steps:
                drafted = [source >= 0 for source in result.sources[len(result.sources) - len(tokens) :]]
                parts = [(pieces.add([token]), own) for token, own in zip(result.shown(tokens), drafted)]
                if result.finish_reason:
                    parts.append((pieces.end(), False))
                yield parts, result
        except ValueError:  # of states that overflow: what was decoded is no answer
            result.tokens.clear()
            raise
        finally:
            steps.close()
            if result.tokens:
                said = [*asked, {"role": "assistant", "content": self.target.answer_text(result.tokens)}]
                self.turns += 1
                try:
                    self.target.renderer.prompt([*said, asked[-1]])
                    self.messages = said
                except ConversationError as error:
                    logger.warning("the conversation goes on without this answer and its message: %s", error)


def status(drafter: str, result: Generation, seconds: float) -> str:
    """β, speed and length of an answer so far, and what cut it."""
    tokens, steps = len(result.tokens), result.target_steps
    told = f"{drafter}: β {tokens / max(1, steps):.2f}, {tokens / max(seconds, 1e-9):.0f} tokens/s, {tokens} tokens"
    return told + CUT.get(result.finish_reason, "")


def show(chat: Chat, message: str, console: Console) -> None:
    """Print an answer while it grows: whole lines for good, the last line and the status live; Ctrl-C ends it.

    After a whole step, so that no memory is half written; a second Ctrl-C does not wait for that.
    """
    start, line, run = time.perf_counter(), Text(), 0
    result, interrupted = Generation(), True
    with (
        ends_on_ctrl_c(by_steps=True) as asked_to_end,
        Live(console=console, auto_refresh=False, transient=True) as live,
        closing(chat.answer(message)) as answer,
    ):
        for parts, result in answer:
            run += 1
            for text, drafted in parts:
                line.append(text, ACCEPTED[run % 2] if drafted else "")
            *whole, line = line.split("\n", allow_blank=True)
            for one in whole:
                live.console.print(one)
            below = Text(status(chat.drafter, result, time.perf_counter() - start), "dim")
            live.update(Text("\n").join([line, below]), refresh=True)
            if asked_to_end() and not result.finish_reason:
                break
        else:
            interrupted = False
    if interrupted:
        line.append(" (interrupted)", "dim")
    console.print(line)
    console.print(Text(status(chat.drafter, result, time.perf_counter() - start), "dim"))


def write(chat: Chat, message: str) -> None:
    """The same without a terminal: accepted runs in brackets."""
    start, summary = time.perf_counter(), ""
    for parts, result in chat.answer(message):
        for drafted, run in groupby(parts, key=lambda part: part[1]):
            text = "".join(text for text, _ in run)
            print(f"[{text}]" if drafted and text else text, end="", flush=True)
        summary = status(chat.drafter, result, time.perf_counter() - start)
    print(f"\n{summary}", flush=True)


def run() -> bool:
    """False where a line could not be done that came without a terminal."""
    options, failed = parse(), False
    use_threads(options.threads)
    chat = Chat(load_target(options), options)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # bytes that are no UTF-8 get a sentence when they are rendered
    console = plain_console()
    if console.is_terminal:
        console.print(f"{chat.target.name}; drafter {chat.drafter}; /help lists the commands", style="dim")
    while True:
        line = None
        try:
            with ends_on_ctrl_c() if console.is_terminal else nullcontext():
                line = console.input(Text("> ", "bold")) if console.is_terminal else input()
        except (EOFError, KeyboardInterrupt):
            return not failed
        if line is None:
            console.print("\n(/quit or Ctrl-D ends the chat)", style="dim")
            continue
        line = line.removeprefix("\ufeff")  # the byte order mark with which a file may begin
        try:
            if line.startswith("/"):
                reply: str | None = "interrupted"
                with ends_on_ctrl_c() if console.is_terminal else nullcontext():
                    reply = chat.command(line.strip())
                if reply is None:
                    return not failed
                print(reply)
            elif line.strip():
                with explain_out_of_memory("this answer", lambda: "shorten the conversation (/reset), or draft less"):
                    show(chat, line, console) if console.is_terminal else write(chat, line)
        except (ValueError, ConversationError, FileNotFoundError) as error:
            print(error, file=sys.stderr)
            failed = not console.is_terminal


if __name__ == "__main__":
    sys.exit(exit_status(run))
