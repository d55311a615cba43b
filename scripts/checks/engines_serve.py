"""vLLM's server with a draft head, asked once by OpenAI's client."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from contextlib import closing
from pathlib import Path

from openai import APIConnectionError, OpenAI

SERVED = 16
"""Tokens that the server is asked for."""


def free_port() -> int:
    with closing(socket.socket()) as asked:
        asked.bind(("127.0.0.1", 0))
        port: int = asked.getsockname()[1]
    return port


def served_answer(
    python: str,
    target: str,
    head: str,
    plugin: str,
    tokens: int,
    prompt: list[int],
    longest: int,
    environment: dict[str, str],
    log: Path,
) -> list[int]:
    """16 greedy tokens after a prompt, streamed; ValueError where the server does not start within ten minutes."""
    port = free_port()
    speculative = {"method": "custom_class", "model": plugin, "num_speculative_tokens": tokens}
    command = [
        python, "-m", "vllm.entrypoints.openai.api_server", "--model", target, "--max-model-len", str(longest),
        "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8",
        "--speculative-config", json.dumps(speculative), "--additional-config", json.dumps({"draft_head": head}),
    ]  # fmt: skip
    with (
        log.open("wb") as written,
        subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, env=environment) as server,
    ):
        try:
            client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)
            for _ in range(1200):
                if server.poll() is not None:
                    raise ValueError(f"vLLM's server ended (status {server.returncode}); {log} says why")
                try:
                    client.models.list()
                    break
                except APIConnectionError:
                    time.sleep(0.5)
            else:
                raise ValueError(f"vLLM's server did not answer within ten minutes; {log} says why")
            stream = client.completions.create(
                model=target, prompt=prompt, max_tokens=SERVED, temperature=0, stream=True,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            return [token for chunk in stream for token in getattr(chunk.choices[0], "token_ids", None) or ()]
        finally:
            server.terminate()
