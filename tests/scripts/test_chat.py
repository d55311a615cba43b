"""The terminal chat: the engine's answers, drafters changed on the way, lines that are told apart."""

import io
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from rich.console import Console

from draft_heads.data.text.errors import ConversationError
from draft_heads.inference.drafters.base import VanillaDrafter
from draft_heads.inference.engine import DecodingEngine
from draft_heads.inference.generation import GenerationSettings
from draft_heads.inference.target.target import Target
from draft_heads.scripts import chat
from tests.inference.models import make_head
from tests.running import ROOT

FIRST, SECOND = "Name a fruit.", "Tell me a story about a cat."


@pytest.fixture(scope="module")
def target():
    return Target.from_pretrained("tests/tiny_target", device="cpu")


def told(monkeypatch, capsys, lines, *arguments):
    """What the program prints to standard output and to standard error for these lines."""
    monkeypatch.setattr(sys, "argv", ["chat.py", "--target", "tests/tiny_target", "--max_new_tokens", "24", *arguments])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    chat.run()
    return capsys.readouterr()


def answers(printed):
    """The texts of the answers, without their brackets."""
    return [re.sub(r"[\[\]]", "", text) for text in re.split(r"\n\w+: β .*\n", printed)[:-1]]


def alone(target, *conversation):
    """The engine's answers to a conversation without drafts."""
    engine, messages, texts = DecodingEngine(target, VanillaDrafter()), [], []
    for question in conversation:
        messages.append({"role": "user", "content": question})
        texts.append("".join(engine.stream_text(messages, GenerationSettings(24))))
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_a_conversation_goes_on_whatever_drafts(target, monkeypatch, capsys):
    expected = alone(target, FIRST, SECOND)
    lines = [FIRST, "/drafter vanilla", SECOND, "/reset", SECOND, "/quit", "never read"]
    printed = told(monkeypatch, capsys, lines).out
    printed = printed.replace("ngram, (vanilla)\n", "").replace("a new conversation\n", "")
    assert answers(printed) == [*expected, *alone(target, SECOND)]
    shown = re.findall(r"^(\w+): β ([\d.]+), \d+ tokens/s, (\d+) tokens(?:, cut at .*)?$", printed, re.M)
    assert [name for name, _, _ in shown] == ["ngram", "vanilla", "vanilla"]
    assert [beta for _, beta, _ in shown[1:]] == ["1.00", "1.00"]


def test_accepted_runs_stand_in_brackets(target, monkeypatch, capsys):
    printed = told(monkeypatch, capsys, [SECOND], "--drafters", "itself=draft_model:tests/tiny_target").out
    betas = [float(beta) for beta in re.findall(r"β ([\d.]+)", printed)]
    assert max(betas) > 1 and "[" in printed and printed.count("[") == printed.count("]")


def test_commands(monkeypatch, capsys):
    lines = [
        "/drafter",
        "/drafter mine=ngram,keep=1",
        "/drafter nonsense",
        "/drafter",
        "/help",
        "/what",
        "/system Be brief.",
        "",
    ]
    printed = told(monkeypatch, capsys, lines)
    first, second, third, *_ = printed.out.splitlines()
    assert first == "(ngram), vanilla" and second == third == "ngram, vanilla, (mine)"
    assert "got 'nonsense'" in printed.err
    assert "/drafter [NAME]" in printed.out
    assert "must be a command, as /help lists them; got '/what'; write a blank before" in printed.err


def test_an_empty_system_message_is_one(target):
    """A template that has a text of its own where there is no system message writes none of it then."""
    empty = chat.Chat(target, chat.parse(["--target", "t", "--system", ""]))
    assert empty.messages == [{"role": "system", "content": ""}]
    empty.command("/system")
    assert empty.messages == []
    empty.command("/system  Be brief. ")
    assert empty.messages == [{"role": "system", "content": "Be brief."}]


def test_a_name_in_use_is_no_other_drafters(target):
    chat_with = chat.Chat(target, chat.parse(["--target", "t", "--drafters", "ngram,k=3"]))
    before = chat_with.engines["ngram"]
    assert chat_with.switch("ngram,k=3") == chat_with.switch("ngram") == "(ngram), vanilla"
    for words, named in (("ngram,k=2", "new=ngram,k=2"), ("ngram=medusa:no/such/head", "new=medusa:no/such/head")):
        with pytest.raises(ValueError, match=rf"must have different names; 'ngram' is another's; .* as in {named}$"):
            chat_with.switch(words)
    assert chat_with.engines["ngram"] is before and chat_with.drafter == "ngram"
    with pytest.raises(ValueError):
        chat_with.switch("new=medusa:no/such/head")
    assert chat_with.switch("") == "(ngram), vanilla"


def test_the_path_of_a_new_drafter_may_begin_with_the_home_folder(target, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_head(target, target_fingerprint=target.fingerprint()).save_pretrained(tmp_path / "head")
    chat_with = chat.Chat(target, chat.parse(["--target", "t"]))
    assert chat_with.switch("ctc=~/head") == "ngram, vanilla, (ctc)"


@pytest.mark.parametrize(("lines", "good"), [([FIRST], True), (["bad </s>", FIRST], False), (["/what"], False)])
def test_a_message_without_an_answer_fails_the_program(target, monkeypatch, capsys, lines, good):
    monkeypatch.setattr(sys, "argv", ["chat.py", "--target", "tests/tiny_target", "--max_new_tokens", "24"])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(lines) + "\n"))
    assert chat.run() is good
    assert answers(capsys.readouterr().out) == (alone(target, FIRST) if FIRST in lines else [])


@pytest.mark.parametrize("line", ["/etc/hosts explain please", "/quit smoking, how?", "/reset a router, how?", "/"])
def test_a_message_that_begins_as_a_command_is_not_lost(target, monkeypatch, capsys, line):
    """Nothing of the conversation changes, and with a blank before it the same line is a message."""
    printed = told(monkeypatch, capsys, [FIRST, line, f" {line}"])
    assert answers(printed.out) == alone(target, FIRST, f" {line}")
    assert f"must be a command, as /help lists them; got {line!r}; write a blank" in printed.err


def test_a_byte_order_mark_is_no_text(target, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chat.py", "--target", "tests/tiny_target", "--max_new_tokens", "24"])
    lines = b"\xef\xbb\xbf" + FIRST.encode() + b"\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    assert chat.run() and answers(capsys.readouterr().out) == alone(target, FIRST)


def test_bytes_that_are_no_text_get_a_sentence_and_the_chat_goes_on(target, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["chat.py", "--target", "tests/tiny_target", "--max_new_tokens", "24"])
    lines = b"Name \xff a fruit.\n" + FIRST.encode() + b"\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines), encoding="utf-8"))
    chat.run()
    printed = capsys.readouterr()
    assert "must be valid Unicode; got '\\udcff'" in printed.err and answers(printed.out) == alone(target, FIRST)


def test_an_interrupted_answer_stays_in_the_conversation(target):
    talk = chat.Chat(target, chat.parse(["--target", "tests/tiny_target", "--max_new_tokens", "24"]))
    steps = talk.answer(SECOND)
    shown = "".join(text for parts, _ in (next(steps), next(steps)) for text, _ in parts)
    steps.close()
    assert talk.messages == [{"role": "user", "content": SECOND}, {"role": "assistant", "content": shown}]


@pytest.mark.parametrize("times", [1, 2])
def test_ctrl_c_within_a_step_waits_for_its_end_and_twice_does_not(target, monkeypatch, times):
    talk = chat.Chat(target, chat.parse(["--target", "tests/tiny_target", "--max_new_tokens", "24"]))
    stream, whole = DecodingEngine.stream, []

    def interrupted_in_its_third_step(engine, *arguments):
        for step, tokens in enumerate(stream(engine, *arguments)):
            if step == 2:
                for _ in range(times):
                    signal.raise_signal(signal.SIGINT)
            whole.append(tokens)
            yield tokens

    monkeypatch.setattr(DecodingEngine, "stream", interrupted_in_its_third_step)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    screen = Console(file=io.StringIO(), force_terminal=True)
    try:
        chat.show(talk, SECOND, screen)
    finally:
        signal.signal(signal.SIGINT, before)
    assert "(interrupted)" in screen.file.getvalue() and len(whole) == 4 - times
    said = target.answer_text([token for tokens in whole for token in tokens])
    assert said and talk.messages[1]["content"].startswith(said)
    monkeypatch.undo()
    assert [tokens for _, tokens in talk.answer(FIRST)]


def test_bad_options_get_sentences():
    for wrong in (["--max_new_tokens", "0"], ["--temperature", "-1"], ["--top_p", "0.5"], ["--seed", "-1"]):
        with pytest.raises(ValueError, match=wrong[0].lstrip("-")):
            chat.parse(["--target", "tests/tiny_target", *wrong])


class Terminal:
    """The program in a terminal of its own, whose Ctrl-C it receives."""

    def __init__(self, *arguments):
        self.screen, shell = pty.openpty()
        command = [sys.executable, "scripts/chat.py", "--target", "tests/tiny_target", *arguments]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdin=shell, stdout=shell, stderr=shell, start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "200"},
            preexec_fn=_controlled_by_its_terminal,
        )  # fmt: skip
        os.close(shell)
        self.shown = ""

    def expect(self, text, seconds=60):
        """What is shown up to and including `text`."""
        end = time.monotonic() + seconds
        while text not in self.shown:
            assert time.monotonic() < end, f"no {text!r} within {seconds} s; shown: {self.shown[-2000:]}"
            if select.select([self.screen], [], [], 0.1)[0]:
                try:
                    self.shown += os.read(self.screen, 65536).decode(errors="replace")
                except OSError:  # nobody writes to it any more
                    raise AssertionError(f"ended with {self.process.wait(20)}; shown: {self.shown[-2000:]}") from None
        before, _, self.shown = self.shown.partition(text)
        return before + text

    def type(self, text):
        os.write(self.screen, text.encode())


def _controlled_by_its_terminal():
    """As a login does: signals as they are by default, and the terminal's Ctrl-C reaches the process.

    Ctrl-C discards nothing that is still to be read or shown: a test is fast enough to lose an answer to that.
    """
    import fcntl
    import termios

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    attributes = termios.tcgetattr(0)
    attributes[3] |= termios.NOFLSH
    termios.tcsetattr(0, termios.TCSANOW, attributes)


def test_ctrl_c_ends_every_answer_that_it_meets_and_sigterm_the_program():
    terminal = Terminal("--max_new_tokens", "2000", "--drafters", "vanilla")
    try:
        for _ in range(3):
            terminal.expect("> ")
            terminal.type(f"{SECOND}\n")
            terminal.expect("β 1.00")
            terminal.type("\x03")
            terminal.expect("(interrupted)")
        terminal.expect("> ")
        terminal.type("half a line\x03")
        terminal.expect("Ctrl-D ends the chat")
        terminal.expect("> ")
        terminal.type(f"{SECOND}\n")
        terminal.expect("β 1.00")
        terminal.process.terminate()
        assert terminal.process.wait(20) == 130
    finally:
        terminal.process.kill()
        os.close(terminal.screen)


def test_an_answer_that_the_template_refuses_later_is_left_out_of_the_conversation(target, monkeypatch, caplog):
    """As gpt-oss's refuses one that ended in its thoughts: each later message would fail."""
    chat_with = chat.Chat(target, chat.parse(["--target", "t", "--max_new_tokens", "4"]))
    render = target.renderer.prompt

    def prompt(messages, *more):
        if sum(turn["role"] == "assistant" for turn in messages) == 1 and messages[0]["content"] == FIRST:
            raise ConversationError("the chat template refuses the conversation")
        return render(messages, *more)

    monkeypatch.setattr(target.renderer, "prompt", prompt)
    for message in (FIRST, SECOND, FIRST):
        results = [result for _, result in chat_with.answer(message)]
        assert len(results[-1].tokens) == 4
        assert chat.status("ngram", results[-1], 1.0).endswith("4 tokens, cut at --max_new_tokens")
    assert [turn["content"] for turn in chat_with.messages[::2]] == [SECOND, FIRST]
    assert "goes on without this answer and its message: the chat template refuses" in caplog.text
