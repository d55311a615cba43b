"""pass@1: whether the code of an answer passes the test of its task, in a process of its own under limits.

Code from a model runs on this machine, so nothing here is called unless the user asks for it (`--run_code`). Each
program has an empty temporary folder, no input, a short environment, and limits on wall time, processor time, memory,
processes and the sizes of files (`code_runner`). Its process group is killed and its folder removed at the end.
"""

from __future__ import annotations

import ast
import json
import os
import re
import secrets
import signal
import subprocess
import symtable
import sys
import tempfile
import textwrap
import warnings
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TypeGuard

from draft_heads.data.text.benchmarks import CodeTask

_RUNNER = Path(__file__).with_name("code_runner.py")
_UNLIMITED, _NOBODY = b"unlimited", 65534  # as in the runner, whose module must not be loaded here
_COMPLETED, _FAILED, _UNENFORCED = "completed", "failed", "unenforced"
_INDENT = "    "
_FENCED = re.compile(r"^[^\n`]*?(`{3,}|~{3,})[^\n`]*\n(.*?)(?:^[> \t]*\1|\1[ \t]*$|\Z)", re.DOTALL | re.MULTILINE)
_QUOTED = re.compile(r"^[ \t]*>(?!>> ) ?", re.MULTILINE)
_INDENTED = re.compile(r"(?:^(?: {4}|\t).*\n?|^[ \t]*\n)+", re.MULTILINE)
_FUTURE = re.compile(r"^[ \t]*from __future__ import [\w, ]+$", re.MULTILINE)
_DEFINITIONS = ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass(frozen=True)
class CodeLimits:
    """What one program may use: seconds, bytes of memory (address space), bytes of each file that it writes."""

    wall_seconds: float = 10.0
    cpu_seconds: int = 5
    memory_bytes: int = 1 << 30
    file_bytes: int = 1 << 20


def pass_at_1(answer: str, task: CodeTask, limits: CodeLimits | None = None, cut: bool = False) -> float:
    """1.0 if the answer's code passes the task's test, else 0.0; ValueError if this machine cannot limit programs."""
    check_machine()
    return float(_outcome(program_of(answer, task, cut), limits or CodeLimits()) == _COMPLETED)


def program_of(answer: str, task: CodeTask, cut: bool = False) -> str:
    """The program that ends without an error if the answer is right.

    An answer that has the function replaces the prompt from its `def` on, so that the prompt's imports and helpers are
    kept; any other continues the prompt, as base models do. What does not compile after either is left out, and so are
    the examples that are run after it. What is set there is kept where the function needs it, and may fail.
    Of several versions in one block the last counts, as in Python, but not one that an answer `cut` at its limit is in.
    """
    name = re.escape(task.entry_point)
    function = re.compile(rf"^(?:(?:async )?def {name}\b|{name}[ \t]*(?::[^=\n]+)?=(?!=))", re.MULTILINE)
    first = "".join(f"{line.strip()}\n" for line in _FUTURE.findall(answer))  # Python wants them above all else
    answer, asked = _FUTURE.sub("", answer), function.search(task.prompt)
    if cut:
        answer = _before_the_cut(task.prompt, answer, function)
    if (code := code_of(answer, function)) is None:
        before, code = task.prompt, _continuation(task.prompt, answer, function)
    else:
        before = task.prompt[: asked.start()] if asked else task.prompt
    code = _without_examples(f"{before}\n{code}", function)
    return f"{first}{code}\n\n{task.test}\n\ncheck({task.entry_point})\n"


def _before_the_cut(prompt: str, answer: str, function: re.Pattern[str]) -> str:
    """A cut answer without the function that its end begins once more; any other as it is."""
    last = next(reversed([*function.finditer(answer)]), None)
    if last is None or re.search(r"\n[^\s)]", answer[last.end() :]):  # more than the function follows
        return answer
    before = answer[: last.start()]
    body = f"{prompt}\n{_continuation(prompt, before, function)}"
    begins = _wrong_line(body, function) is None and _returns(body, function, complete=False)
    return before if begins or code_of(before, function) else answer


def code_of(answer: str, function: re.Pattern[str]) -> str | None:
    """The longest run of lines that compiles and gives the function a body, in the first fenced block that has one, or
    else in the text; before it the imports, definitions and constants of the other blocks. None without one. A block
    may lack its end, stand in a quotation (`> `), or be indented instead of fenced."""
    fenced, unquoted = _fenced(answer), _QUOTED.sub("", answer)
    indented = [textwrap.dedent(block) for block in _INDENTED.findall(unquoted)]
    for blocks, whole in ((fenced, answer), (fenced, unquoted), (indented, "")):
        for index, text in enumerate((*blocks, whole)):
            if run := _run_with(text.split("\n"), function):
                others = [node for block in blocks[:index] + blocks[index + 1 :] for node in _statements(block)]
                return _kept(others, _statements(run), function) + run
    return None


def _fenced(answer: str) -> list[str]:
    """The fenced blocks of an answer."""
    return [textwrap.dedent(_unquoted(block)) for _, block in _FENCED.findall(answer)]


def _unquoted(text: str) -> str:
    """A text of which each line is in a quotation, without its marks; any other as it is."""
    return _QUOTED.sub("", text) if all(map(_QUOTED.match, text.strip().split("\n"))) else text


def _run_with(lines: list[str], function: re.Pattern[str]) -> str | None:
    """The longest run of lines that compiles and gives the function a body; the first one of several."""
    tried = set[int]()  # an answer may repeat itself a hundred times
    for at in (at for at, line in enumerate(lines) if function.match(line)):
        for start in range(at + 1):
            if start in tried or not lines[start].strip():
                continue
            above = "\n".join([*lines[start:at], "def _(): 0"])  # decorators need a function
            if _wrong_line(above) is None:
                tried.add(start)
                if run := _longest(lines[start:], function):
                    return run
    return None


def _continuation(prompt: str, answer: str, function: re.Pattern[str]) -> str:
    """The body of the prompt's function: of the answer and its blocks the first that compiles there and cannot fall off
    its end, or that returns something at all, or else the longest, indented again where the answer lost that of its
    first line, or of all."""
    texts = [re.sub(r"\A(?:[ \t]*\n)+", "", text) for text in (_unquoted(answer), *_fenced(answer))]
    found = list[list[str]]()
    for text in texts:
        bodies = (text, _INDENT + text.lstrip(), textwrap.indent(textwrap.dedent(text), _INDENT))
        runs = [run for body in bodies if (run := _longest(body.split("\n"), function, f"{prompt}\n"))]
        found.append(sorted(runs, key=lambda run: -run.count("\n")))
    for complete in (True, False):
        for run in (run for runs in found for run in runs):
            if _returns(f"{prompt}\n{run}", function, complete):
                return run
    return max((run for runs in found for run in runs), key=lambda run: run.count("\n"), default=answer)


def _returns(code: str, function: re.Pattern[str], complete: bool) -> bool:
    """Whether the last function itself returns or yields something, not one inside it; `complete`: on every way."""
    last = next((node for node in reversed(ast.parse(code).body) if _is(node, function)), None)
    if not isinstance(last, ast.FunctionDef | ast.AsyncFunctionDef):
        return False
    inside: list[ast.AST] = list(ast.iter_child_nodes(last))
    kinds = set[type]()
    while inside:
        node = inside.pop()
        kinds.add(type(node))
        if not isinstance(node, _DEFINITIONS | ast.Lambda):
            inside += ast.iter_child_nodes(node)
    if kinds & {ast.Yield, ast.YieldFrom}:
        return True
    return ast.Return in kinds and (not complete or _ends(last.body))


def _ends(body: list[ast.stmt]) -> bool:
    """Whether nothing that follows these statements is reached."""
    last = body[-1] if body else ast.Pass()
    if isinstance(last, ast.If):
        return _ends(last.body) and _ends(last.orelse)
    if isinstance(last, ast.With | ast.AsyncWith):
        return _ends(last.body)
    if isinstance(last, ast.Try):
        ways = (last.orelse or last.body, *(handler.body for handler in last.handlers))
        return _ends(last.finalbody) or all(map(_ends, ways))
    if isinstance(last, ast.Match):
        return all(_ends(case.body) for case in last.cases)
    return isinstance(last, ast.Return | ast.Raise | ast.While) and (
        not isinstance(last, ast.While) or isinstance(last.test, ast.Constant)
    )


def _longest(lines: list[str], function: re.Pattern[str], before: str = "") -> str | None:
    """The longest prefix of the lines that compiles after `before` and gives the function a body."""
    end = len(lines)
    while end > 0:
        wrong = _wrong_line(before + "\n".join(lines[:end]), function)
        if wrong is None:
            return "\n".join(lines[:end])
        end = min(end - 1, wrong - 1 - before.count("\n"))
    return None


def _wrong_line(code: str, function: re.Pattern[str] | None = None) -> int | None:
    """The line, from 1, at which code is no program or a word of prose, or gives the function no body (0: it has no
    such function); None if all is well. Nothing is run."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
            compile(tree, "answer", "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return getattr(error, "lineno", None) or 0
    for node in tree.body:
        if isinstance(node, ast.Expr) and not isinstance(node.value, ast.Call | ast.Constant):
            return node.lineno  # `Done`
        if isinstance(node, ast.AnnAssign) and node.value is None:
            return node.lineno  # `Note: sorted`
    if function is None:
        return None
    without = 0  # the line of the first of the last functions, where these have no body
    for node in (node for node in reversed(tree.body) if _is(node, function)):
        if isinstance(node, ast.Assign | ast.AnnAssign) or not all(map(_does_nothing, node.body)):
            return without or None
        without = node.lineno
    return 0


def _does_nothing(node: ast.stmt) -> bool:
    nothing = isinstance(node, ast.Pass | ast.Import | ast.ImportFrom | ast.Raise)
    return nothing or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))


def _is(
    node: ast.stmt, function: re.Pattern[str]
) -> TypeGuard[ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign]:
    """Whether a statement defines the function, by `def` or by an assignment, as of a lambda or of `Solution().f`."""
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        named = any(function.match(f"def {target.id}") for target in targets if isinstance(target, ast.Name))
        return named and not _calls(node.value, function)
    return isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and bool(function.match(f"def {node.name}"))


def _calls(node: ast.AST | None, function: re.Pattern[str]) -> bool:
    """Whether an expression is a call of the function."""
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and bool(function.match(f"def {node.func.id}"))
    )


def _without_examples(code: str, function: re.Pattern[str]) -> str:
    """`code` to the end of the function, and what it needs of the rest; all of it if it is no program."""
    with suppress(SyntaxError, ValueError, RecursionError, MemoryError):
        body = ast.parse(code).body
        after = next((i for i in range(len(body), 0, -1) if _is(body[i - 1], function)), len(body))
        if after < len(body):
            end, column = body[after - 1].end_lineno or 0, body[after - 1].end_col_offset
            lines = code.split("\n")
            last = lines[end - 1].encode()[:column].decode()
            later = _statements(ast.unparse(ast.Module(body[after:], [])))
            return "\n".join([*lines[: end - 1], last, _kept(later, body[:after], function)])
    return code


def _statements(block: str) -> list[ast.stmt]:
    """The statements of a block; none of one that is no program."""
    return ast.parse(block).body if _wrong_line(block) is None else []


def _kept(others: list[ast.stmt], own: list[ast.stmt], function: re.Pattern[str]) -> str:
    """Of the statements beside the function's `own`: imports and definitions, and what sets a name that the function
    reads, or that what it reads reads in turn. Each may fail, or try to end the program: it may be of an example."""
    needed, nodes = set[str](), [(node, *_names(node)) for node in (*own, *others)]
    more = {name for node, sets, _ in nodes if _is(node, function) for name in sets}
    while more:
        needed |= more
        more = {name for _, sets, reads in nodes if sets & needed for name in reads} - needed
    handler = ast.ExceptHandler(ast.Name("BaseException"), None, [ast.Pass()])
    kept = [ast.Try([node], [handler], [], []) for node in others if _defines(node, function, needed)]
    return "".join(f"{ast.unparse(node)}\n" for node in kept)


def _names(node: ast.stmt) -> tuple[set[str], set[str]]:
    """The global names that a statement sets (also a part of what they name), and those that it reads."""
    with warnings.catch_warnings(action="ignore"):
        scopes = [symtable.symtable(ast.unparse(node), "answer", "exec")]
    sets = {symbol.get_name() for symbol in scopes[0].get_symbols() if symbol.is_assigned() or symbol.is_imported()}
    for part in ast.walk(node):
        stored = isinstance(part, ast.Attribute | ast.Subscript) and isinstance(part.ctx, ast.Store)
        whole: ast.AST | None = part if stored else None
        while isinstance(whole, ast.Attribute | ast.Subscript):
            whole = whole.value
        if isinstance(whole, ast.Name):
            sets.add(whole.id)
    reads = {symbol.get_name() for symbol in scopes[0].get_symbols() if symbol.is_referenced()}
    while scopes:
        scope = scopes.pop()
        reads |= {symbol.get_name() for symbol in scope.get_symbols() if symbol.is_global()}
        scopes += scope.get_children()
    return sets, reads


def _defines(node: ast.stmt, function: re.Pattern[str], needed: set[str]) -> bool:
    """Whether a statement imports, defines or sets what is `needed`, no example of the function among it."""
    if isinstance(node, _DEFINITIONS) or _is(node, function):
        return not _is(node, function)
    asks = ast.walk(node.test) if isinstance(node, ast.If) else ()
    return (
        not isinstance(node, ast.Expr | ast.Assert)
        and bool(_names(node)[0] & needed)
        and not any(isinstance(part, ast.Name) and part.id == "__name__" for part in asks)
        and not any(_calls(part, function) for part in ast.walk(node))
    )


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
