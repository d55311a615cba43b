"""Measure β on recorded answers, in a small part of the time of decoding: greedy decoding takes the same steps.

Drafters that read only text (ngram, prompt_lookup, rest, …) need the tokenizer; with --target, one forward over each
answer gives the hidden states that heads read.

    python scripts/replay.py --answers mt_bench_answers.jsonl --tokenizer TOKENIZER --questions mt_bench.jsonl \\
        --drafters ngram tree=ngram,branches=2 kept=ngram,keep=1 prompt_lookup rest=DATASTORE --output runs/replay
    python scripts/replay.py --answers runs/report/answers/vanilla.jsonl --target NAME --questions mt_bench.jsonl \\
        --drafters ctc=runs/ctc/head hybrid=ctc:runs/ctc/head+ngram --max_nodes 8 --output runs/replay

A prompt is the conversation so far in the tokenizer's chat template; a --tokenizer without one takes Vicuna's. Without
--questions the prompt is only the earlier answers of the conversation. The answers are replayed in the order of the
file, so a drafter that keeps earlier texts (keep=1) profits from them. Writes report.html,
report.md, report.json and accepted_length.png to --output.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from draft_heads.configs.command_line import exit_status, own_command, parse_with_config

from transformers import PreTrainedTokenizerBase

from draft_heads.configs.options import dtype_name, use_threads
from draft_heads.data.common.console import plain_console
from draft_heads.data.common.files import checksum
from draft_heads.data.common.progress import progress_bar
from draft_heads.data.fingerprint import tokenizer_hash
from draft_heads.data.labels.labeller import checked_ids
from draft_heads.data.text.benchmarks import prompts_checksum, questions_checksum
from draft_heads.data.text.chat_template import load_chat_tokenizer, load_tokenizer, tell_of_the_date
from draft_heads.data.text.rendering import ChatRenderer
from draft_heads.inference.evaluation.answer_files import Answer, check_answers, read_answers
from draft_heads.inference.evaluation.comparison import CHECKSUMS, FINGERPRINT, LOADED, PROMPTS
from draft_heads.inference.evaluation.decoded import TurnRecord
from draft_heads.inference.evaluation.meter import devices_of
from draft_heads.inference.evaluation.replay import (
    AnswerStates,
    end_of_answer,
    match_questions,
    no_states,
    recorded_turns,
    replay_all,
    replayed_drafters,
    text_drafters,
)
from draft_heads.inference.evaluation.report import build_report, check_output, clear_output
from draft_heads.scripts.decoding_options import (
    MAX_NODES_HELP,
    answered_questions,
    check_positive,
    distinct_specs,
    load_target,
    loaded_by,
    loaded_checksums,
    target_parser,
)
from draft_heads.scripts.terminal import show_report

logger = logging.getLogger(__name__)

OF_TARGET = ("target_adapter", "dtype", "device")
"""Flags that say how --target runs."""


def run(options: argparse.Namespace) -> None:
    console = plain_console()
    check_positive(options, "limit", "max_nodes")
    check_model(options)
    use_threads(options.threads)
    specs = distinct_specs(options.drafters)
    check_output(options.output, options.overwrite)
    check_answers(options.output, options.overwrite, answers=False)
    answers = dict(islice(read_answers(options.answers).items(), options.limit))
    asked = answered_questions(options.questions, answers)[1] if options.questions else None
    questions = match_questions(answers, asked)
    target = load_target(options) if options.target else None
    if target is not None:
        tokenizer, drafters = target.tokenizer, replayed_drafters(specs, target, options.max_nodes)
    else:
        tokenizer = load_tokenizer_of(options)
        drafters = text_drafters(specs, tokenizer, options.max_nodes)
    states = AnswerStates(target, drafters.values()) if target else None
    renderer = (target.renderer if target else ChatRenderer(tokenizer)) if options.questions else None
    if options.questions:
        tell_of_the_date(tokenizer, "answers that were recorded on another day are replayed after prompts of today")
    tell_of_another_tokenizer(answers.values(), tokenizer)
    tell_of_lossy_answers(answers.values())
    check_output(options.output, options.overwrite)  # again: another run may have ended meanwhile
    clear_output(options.output)
    with progress_bar(console, "tokenising") as progress:
        name = options.answers.stem
        turns = list(recorded_turns(name, answers, questions, tokenizer, renderer, end_of_answer(tokenizer)))
        for turn in turns if target is not None else ():
            checked_ids(target, turn.generation.tokens, f"the answer to question {turn.question_id}")
        tell_of_other_lengths(answers.values(), turns)
        if options.questions:
            tell_of_other_prompts(answers.values(), turns)
        evaluation = replay_all(name, drafters, questions, turns, progress, states or no_states)
    files = {name: Path(path).name if (path := getattr(options, name)) else None for name in ("answers", "questions")}
    files["answers_checksum"] = checksum(options.answers)
    given = {name: getattr(options, name) for name in ("tokenizer", "chat_template", "max_nodes", "limit")}
    if options.questions:
        asked_first = prompts_checksum(turn.prompt for turn in turns if turn.turn == 0)
        given |= {CHECKSUMS: {name: questions_checksum(questions)}, PROMPTS: {name: asked_first}}
    loaded = {drafter: loaded_by(drafter) for drafter in options.drafters}
    given |= {"drafters": " ".join(options.drafters), LOADED: loaded_checksums(loaded)}
    if target is not None and states is not None:
        given |= {"target": options.target, FINGERPRINT: target.fingerprint()}
        given |= {"target_adapter": options.target_adapter, "dtype": dtype_name(target.dtype)}
        given |= {"device": ", ".join(map(str, devices_of(target))), "not_greedy": states.note()}
    settings = {**files, **given, "max_new_tokens": None, "temperature": None, "seed": None}
    check_output(options.output, options.overwrite)  # again: another run may have ended meanwhile
    show_report(console, options.output, build_report(evaluation, None, settings, 0, own_command()))
    if settings.get("not_greedy"):
        console.print(settings["not_greedy"])


def tell_of_another_tokenizer(answers: Iterable[Answer], tokenizer: PreTrainedTokenizerBase) -> None:
    """Log a line where the answers' token ids are of another tokenizer, so that their texts are replayed."""
    if (known := {answer.tokenizer for answer in answers} - {None}) and known != {tokenizer_hash(tokenizer)}:
        logger.warning("the answers were written with another tokenizer: their texts are tokenised with this one")


def tell_of_other_lengths(answers: Iterable[Answer], turns: Sequence[TurnRecord]) -> None:
    """Log a line where texts have by far another number of tokens than was recorded, as with another tokenizer."""
    recorded = sum(turn.new_tokens for answer in answers for turn in answer.turns)
    replayed = sum(len(turn.generation.tokens) for turn in turns)
    if abs(replayed - recorded) > 0.25 * recorded:
        logger.warning(
            "the answers have %d tokens with this tokenizer and %d as recorded: give the tokenizer of the model that "
            "wrote them",
            replayed,
            recorded,
        )


def tell_of_lossy_answers(answers: Iterable[Answer]) -> None:
    """Log a line where our own files say that an answer is not the target's own (`report_text`)."""
    if lossy := sorted({answer.model for answer in answers if answer.model and "LOSSY" in answer.model}):
        logger.warning("the answers of %s are not the target's own, and are replayed as if they were", ", ".join(lossy))


def tell_of_other_prompts(answers: Iterable[Answer], turns: Sequence[TurnRecord]) -> None:
    """Log how many prompts are of another length than those that were answered, as far as the answers say it."""
    recorded = [turn.prompt_tokens for answer in answers for turn in answer.turns]
    others = sum(length not in (0, len(turn.prompt)) for length, turn in zip(recorded, turns, strict=True))
    if others:
        logger.warning(
            "%d of %d prompts have another number of tokens than those that were answered, whose drafts would be "
            "others: give the --questions and the --chat_template of that evaluation",
            others,
            len(turns),
        )


def check_model(options: argparse.Namespace) -> None:
    """ValueError unless there is one of --tokenizer and --target, and flags of a target come with it."""
    if (options.target is None) == (options.tokenizer is None):
        got = "both" if options.target else "neither"
        raise ValueError(f"a replay reads --tokenizer, or that of --target; got {got}; give one of them")
    given = [f"--{name}" for name in OF_TARGET if getattr(options, name) is not None]
    if given and not options.target:
        raise ValueError(f"{given[0]} says how --target runs, which is not given; name the target, or leave it out")
    if options.target and not options.questions:
        raise ValueError("--target needs the prompts that were answered, --questions; got none; name their file")
    if options.chat_template and not options.questions:
        raise ValueError(
            f"--chat_template renders the prompts of --questions, which is not given; got {options.chat_template}; "
            "give both or neither"
        )


def load_tokenizer_of(options: argparse.Namespace) -> PreTrainedTokenizerBase:
    """The tokenizer of --tokenizer, with a chat template where prompts are rendered."""
    if options.questions:
        return load_chat_tokenizer(options.tokenizer, options.chat_template)
    return load_tokenizer(options.tokenizer, option="--tokenizer")


def main(arguments: list[str] | None = None) -> int:
    parser = target_parser(__doc__, attention=False)
    add = parser.add_argument
    add("--answers", type=Path, metavar="FILE.jsonl", help="recorded answers in FastChat form")
    add("--tokenizer", metavar="DIR|ID", help="the tokenizer of the model that wrote them, where only text is read")
    add("--questions", metavar="[NAME=]FILE.jsonl|NAME", help="the questions that were answered")
    add("--drafters", nargs="+", metavar="NAME[=[KIND:]PATH[,key=value…]]", help="as in scripts/evaluate.py")
    add("--output", type=Path, help="folder for the results")
    add("--overwrite", action="store_true", help="replace a finished run in --output")
    add("--limit", type=int, help="only the first N answered questions")
    add("--max_nodes", type=int, default=32, help=MAX_NODES_HELP)
    required = ("answers", "drafters", "output")
    return exit_status(lambda: run(parse_with_config(parser, arguments, required)))


if __name__ == "__main__":
    sys.exit(main())
