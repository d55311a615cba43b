"""pass@1: whether the code of an answer passes the test of its task, in a process of its own under limits.

Code from a model runs on this machine, so nothing here is called unless the user asks for it (`--run_code`). Each
program has an empty temporary folder, no input, a short environment, and limits on wall time, processor time, memory,
processes and the sizes of files (`code_runner`). Its process group is killed and its folder removed at the end.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from draft_heads.data.text.benchmarks import CodeTask

_RUNNER = Path(__file__).with_name("code_runner.py")
_UNLIMITED, _NOBODY = b"unlimited", 65534  # as in the runner, whose module must not be loaded here
_COMPLETED, _FAILED, _UNENFORCED = "completed", "failed", "unenforced"
_INDENT = "    "
_FENCED = re.compile(r"^[ \t]*```[^\n`]*\n(.*?)(?:^[ \t]*```|\Z)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class CodeLimits:
    """What one program may use: seconds, bytes of memory (address space), bytes of each file that it writes."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


def pass_at_1(answer: str, task: CodeTask, limits: CodeLimits | None = None) -> float:
    """1.0 if the answer's code passes the task's test, else 0.0; ValueError if this machine cannot limit programs."""
    check_machine()
    return float(_outcome(program_of(answer, task), limits or CodeLimits()) == _COMPLETED)


def program_of(answer: str, task: CodeTask) -> str:
    """The program that ends without an error if the answer is right.

    An answer that has the function replaces the prompt from its `def` on, so that the prompt's imports and helpers are
    kept; any other continues the prompt, as base models do.
    """
    function = re.compile(rf"^(?:async )?def {re.escape(task.entry_point)}\b", re.MULTILINE)
    code, asked = code_of(answer, function), function.search(task.prompt)
    if not function.search(code):
        before, code = task.prompt, _continuation(task.prompt, code)
    else:
        before = task.prompt[: asked.start()] if asked else task.prompt
    return f"{before}\n{code}\n\n{task.test}\n\ncheck({task.entry_point})\n"


def code_of(answer: str, function: re.Pattern[str]) -> str:
    """The first fenced block of an answer that defines the function, also one that is not closed; else the first block,
    and the whole text if there is none."""
    blocks = [textwrap.dedent(block) for block in _FENCED.findall(answer)]
    return next((block for block in blocks if function.search(block)), blocks[0] if blocks else answer)


def _continuation(prompt: str, code: str) -> str:
    """The body of the prompt's function, indented again where the answer lost that of its first line, or of all."""
    if code[:1].isspace():
        return code
    for body in (_INDENT + code, textwrap.indent(code, _INDENT)):
        with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
            compile(f"{prompt}\n{body}", "answer", "exec", dont_inherit=True)
            return body
    return code


@cache
def check_machine() -> None:
    """ValueError unless a sound program completes here and the kernel keeps it from starting processes."""
    found = _outcome("import collections, math, typing\nassert math.gcd(4, 6) == 2\n", CodeLimits())
    if found != _COMPLETED:
        reasons = {_UNENFORCED: "the limit on processes is not enforced", _FAILED: "Python does not start there"}
        reasons[_FAILED] += ": in place of root it runs as nobody, who must be able to read it" * (os.geteuid() == 0)
        raise ValueError(
            "--run_code runs the model's code in a process under limits, which this machine does not support "
            f"({reasons[found]}); run as another user than root, or leave it out and score the answer files elsewhere"
        )


def _outcome(program: str, limits: CodeLimits) -> str:
    """How a program ended: one of the three words above."""
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="draft-heads-code-", ignore_cleanup_errors=True) as folder:
        file, inside = Path(folder, "answer.py"), Path(folder, "work")
        file.write_text(program, encoding="utf-8", errors="replace")
        inside.mkdir()
        if os.geteuid() == 0:  # the runner leaves root
            with suppress(OSError):  # in a container without that user
                os.chown(inside, _NOBODY, _NOBODY)
            Path(folder).chmod(0o711)
        bounds = {"cpu_seconds": limits.cpu_seconds, "memory_bytes": limits.memory_bytes}
        options = json.dumps(bounds | {"file_bytes": limits.file_bytes})
        read, write = os.pipe()
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-B", str(_RUNNER), str(file), str(write), token, options],
                cwd=inside,
                env={"PATH": os.defpath, "HOME": str(inside), "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(write,),
                start_new_session=True,
            )
            try:
                with suppress(subprocess.TimeoutExpired):
                    process.wait(limits.wall_seconds)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
            os.set_blocking(read, False)
            said = b""
            with suppress(BlockingIOError):  # nothing was written
                said = os.read(read, 64)
            return {token.encode(): _COMPLETED, _UNLIMITED: _UNENFORCED}.get(said, _FAILED)
        finally:
            os.close(read)
            os.close(write)
