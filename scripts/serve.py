"""Serve a target with a drafter under the OpenAI API: `http://127.0.0.1:8000/v1`.

    python scripts/serve.py --target Qwen/Qwen3-8B --drafter ctc=RUN/head

Paths: /v1/chat/completions, /v1/completions (both also as server-sent events), /v1/models, /health, /metrics
(Prometheus, with β and accepted lengths). Answers are the target's own, whatever drafts, up to near ties, which are
rare in float32; requests are decoded one after another, in the order in which they come. On Ctrl-C or SIGTERM, running
requests have --shutdown_seconds to finish; the rest get an error.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from draft_heads.configs.command_line import exit_status, parse_with_config

from draft_heads.configs.options import explain_out_of_memory, use_threads
from draft_heads.inference.drafters.base import forget_all
from draft_heads.inference.drafters.registry import DrafterBuilder, DrafterSpec
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings, TextPieces
from draft_heads.inference.target.labels import Overflow
from draft_heads.inference.target.loading import LESS_MEMORY
from draft_heads.scripts.decoding_options import MAX_NODES_HELP, check_positive, load_target, target_parser

API_KEY = "DRAFT_HEADS_API_KEY"


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The flags, checked."""
    parser = target_parser(__doc__)
    add = parser.add_argument
    add("--drafter", default="vanilla", metavar="NAME[=[KIND:]PATH[,key=value…][+…]]",
        help="as in scripts/evaluate.py (default: vanilla, no drafts)")  # fmt: skip
    add("--max_nodes", type=int, default=32, help=MAX_NODES_HELP)
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=int, default=8000, help="0: any free port (default 8000)")
    add("--api_key", help=f"clients must send it; default: the environment's {API_KEY}, or none")
    add("--served_model_name", help="the model's name in the API (default: the hub id, or the folder's own name)")
    add("--max_new_tokens", type=int, default=2048, help="longest answer that may be asked for (default 2048)")
    add("--temperature", type=float, default=0.0, help="default for requests (0: greedy)")
    add("--max_waiting", type=int, default=64, help="answers that may wait; more are refused with 429 (default 64)")
    add("--max_body_kib", type=int, default=1024, help="largest request, in KiB (default 1024)")
    add("--shutdown_seconds", type=int, default=30, help="time that running requests have to end (default 30)")
    options = parse_with_config(parser, arguments, ("target",))
    check_positive(options, "max_nodes", "max_new_tokens", "max_waiting", "max_body_kib", "shutdown_seconds")
    if not 0 <= options.port < 2**16:
        raise ValueError(f"--port must lie in 0…65535; got {options.port}; write for example 8000")
    GenerationSettings(temperature=options.temperature)
    return options


def run() -> bool:
    options = parse()
    try:
        from draft_heads.inference.serving.app import create_app
        from draft_heads.inference.serving.connections import Server
        from draft_heads.inference.serving.prometheus import ServerMetrics
        from draft_heads.inference.serving.requests import ServerLimits
        from draft_heads.inference.serving.worker import Worker
    except ImportError as error:
        raise ValueError(
            f"the server needs further packages ({error}); run `pip install -e '.[serve]'` in the clone"
        ) from error

    key = api_key(options)
    check_free(options.host, options.port)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    for name in ("httpx", "httpx2"):  # huggingface_hub's, by its version: a line per request
        logging.getLogger(name).setLevel(logging.WARNING)
    use_threads(options.threads)
    spec = DrafterSpec.parse(options.drafter)
    target = load_target(options)
    TextPieces(target.tokenizer)  # a target without a fast tokenizer is refused now
    drafter = DrafterBuilder(target, options.max_nodes).build(spec)
    engine = DecodingEngine(target, drafter)
    with explain_out_of_memory("the first text", lambda: f"{LESS_MEMORY}; or draft fewer nodes (--max_nodes)"):
        warm_up(engine)
    if not target.tokenizer.chat_template:
        print(
            "the target's tokenizer has no chat template: /v1/chat/completions refuses every request, /v1/completions "
            "works; --chat_template gives it one",
            file=sys.stderr,
        )
    folder = Path(options.target)
    called = folder.resolve().name if folder.name in ("", "..") else folder.name  # of a link the name that was given
    name = called if folder.is_dir() else options.target
    name = name if options.served_model_name is None else options.served_model_name
    if not key and options.host not in ("127.0.0.1", "localhost", "::1"):
        print(f"anyone who reaches {options.host} can use this server; --api_key asks for a key", file=sys.stderr)
    limits = ServerLimits(max_new_tokens=options.max_new_tokens, temperature=options.temperature)
    worker = Worker(engine, ServerMetrics(drafter.max_depth), options.max_waiting)
    app = create_app(worker, name, limits, key, options.max_body_kib * 1024)
    print(f"model {name!r}, drafter {options.drafter}", flush=True)
    server = Server(app, worker, options.shutdown_seconds, host=options.host, port=options.port, access_log=False)
    with contextlib.suppress(KeyboardInterrupt):  # uvicorn has ended by then
        server.run()
    return server.started


def warm_up(engine: DecodingEngine) -> None:
    """Decode a dummy text, so that the first request does not wait for what is made once: compiled code, graphs."""
    with contextlib.suppress(Overflow):  # of this text alone
        engine.generate([engine.target.end_token_ids[0] if engine.target.end_token_ids else 0], GenerationSettings(8))
    forget_all(engine.drafter)


def api_key(options: argparse.Namespace) -> str | None:
    """The key that clients must send, None for none; ValueError for one that no HTTP header can carry."""
    given = {"--api_key": options.api_key, API_KEY: os.environ.get(API_KEY)}
    for name, key in given.items():
        if key is not None and not (key and key == key.strip() and key.isascii() and key.isprintable()):
            raise ValueError(
                f"an API key has printable ASCII characters and no blank at its ends; {name} is "
                f"{'empty' if not key else 'another text'}; change it, or leave it out"
            )
    return options.api_key or given[API_KEY]


def check_free(host: str, port: int) -> None:
    """ValueError for an address that cannot be listened on; raised before the target is loaded."""
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (")[0]
        raise ValueError(
            f"the server must be able to listen on --host and --port; {host} port {port}: {reason}; stop what uses it, "
            "or pick another (--port 0: any free one)"
        ) from None


if __name__ == "__main__":
    sys.exit(exit_status(run))
