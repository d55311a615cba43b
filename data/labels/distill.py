"""Conversations → the frozen target's greedy tokens in the assistant's turns, in resumable Arrow shards.

A row: `id`; `conversation`, a digest of the prompt for its first answer (`questions`); `input_ids` [L];
`assistant_mask` [L], true on the tokens heads are trained on; `greedy_ids` [L], the target's own token at each of those
given the text before it (-100 elsewhere); when cached, `hidden` [L, H] and `aux_hidden` [L, k·H], the outputs of k
`target_layers`.

`labels="argmax"` keeps the recorded conversations. `labels="generate"` lets the target answer every user turn itself,
greedily; after an answer that does not end, or that the template refuses, no more is asked (`unasked`). The ids it
generates are kept as they are, and the next turn's prompt is those ids followed by what the chat template adds after
them. Where that is not the prompt that inference would have, as the template rewrites earlier turns (it drops thoughts)
or strips an answer, the turn begins a row of the same id with that prompt. A conversation with the same prompts as an
earlier one and the same turns to train on would give the same rows: it is left out and counted (`repeated`).

The manifest: format_version, target {path, chat_template, fingerprint}, labels, settings, data {source, split, rows,
repeated, fingerprint, bad_rows [{place, reason, detail, kept_turns}]}, end_token_ids, named_by (what `conversation` is
a digest of), programs (those that made it, in their order, and the model that a server answered with), shards [{file,
rows, first_row, source_rows, skipped [{row, place, id, reason}], trimmed [the same with kept_turns], cut, …}], counts
{rows, tokens, trained_tokens, agreeing_tokens, agreement, skipped, cut, unfinished,
loops, unasked (questions after an answer that did not end, or without room for one), without_end (trained recorded
answers whose last token ends none), shortened (those to earlier questions of which the template leaves out a part)},
complete.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from draft_heads.configs.command_line import on_interrupt

import datasets
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from draft_heads.configs.options import dtype_name, explain_out_of_memory
from draft_heads.data.common.console import plain_console
from draft_heads.data.common.processes import Processes
from draft_heads.data.common.program import this_program
from draft_heads.data.common.progress import progress_bar
from draft_heads.data.generation_config import processor_settings
from draft_heads.data.labels.answer_server import AnswerServer
from draft_heads.data.labels.answers import Answerer
from draft_heads.data.labels.distill_options import DistillOptions
from draft_heads.data.labels.distiller import Distiller, Row
from draft_heads.data.labels.hidden_cache import STATE_COLUMNS, check_disk
from draft_heads.data.labels.labeller import Labeller
from draft_heads.data.labels.questions import QuestionNames
from draft_heads.data.labels.shards import ShardFolder, check_apart
from draft_heads.data.text.chat_template import template_source, template_variables
from draft_heads.data.text.conversations import (
    BadRow,
    Conversations,
    conversation_of,
    count_by_reason,
    read_conversations,
)

logger = logging.getLogger(__name__)

_TRAINED = "black on green"
_OF_ONE_MODEL = 0.9
"""The least share of equal tokens of a server and the target that serve one model, in whatever precisions."""


def distill(
    target: Labeller,
    source: str | Conversations,
    output: str,
    options: DistillOptions,
    overwrite: bool = False,
    show_progress: bool = True,
    answerer: Answerer | None = None,
) -> dict[str, Any]:
    """Label the conversations of `source` with `target` into `output`; returns the finished manifest.

    source: a file, dataset folder or hub id, or what `select_conversations` read of one with these `options` and
        the target's tokenizer.
    answerer: writes the answers of `labels="generate"` (`inference.answers.TargetAnswerer`); None: the server of
        `options`.
    A run that was killed continues where it was when it is called again with the same arguments: finished shards are
    kept, and of others the answers that had ended (`answer_journal`); `skip_bad_rows` may be added. ValueError for a
    finished output, or one of which other arguments made a part, unless `overwrite`, for one that another run writes,
    and where every conversation is left out.
    Processes that torchrun or accelerate started share the shards out; the first one collects them.
    """
    distiller = Distiller(target, options, answerer)
    loaded = source if isinstance(source, Conversations) else select_conversations(source, options, target.tokenizer)
    processes = Processes.from_environment()
    header = _header(distiller, loaded)
    check_apart(header["data"]["source"], output)
    data = {name: value for name, value in header["data"].items() if name != "source"}  # paths, which nodes may have
    program = this_program()
    if isinstance(distiller.answerer, AnswerServer):
        program["model"] = distiller.answerer.model
    same = {name: program.get(name) for name in ("sources", "packages", "model")}
    processes.check_same({**header, "target": header["target"]["fingerprint"], "data": data, "program": same})
    with processes.first_alone() as first:
        folder = ShardFolder.open(output, header, overwrite, program) if first else None
        if folder is not None:
            if distiller.hidden_dtype is not None:
                missing = folder.missing(len(loaded.dataset), options.shard_rows)
                rest = loaded.dataset.select([row for rows in missing for row in rows])
                width = folder.manifest["target"]["fingerprint"]["hidden_size"] * (1 + len(options.target_layers))
                tokens = distiller.count_tokens(rest)
                exact, freed = options.labels == "argmax", folder.space_to_free()
                print(check_disk(tokens, exact, width, distiller.hidden_dtype, output, freed))
            folder.begin()
    processes.check_shared(Path(output), "output")
    folder = folder or ShardFolder.join(output)
    distiller.named_by = folder.manifest.get("named_by")
    missing_rows = folder.missing(len(loaded.dataset), options.shard_rows)
    all_rows = sum(map(len, missing_rows)) == len(loaded.dataset)
    if processes.rank == 0 and all_rows and len(missing_rows) < min(processes.count, len(loaded.dataset)):
        logger.warning(
            "%d processes share %d shards, so some have nothing to do: --overwrite --shard_rows %d makes enough",
            processes.count,
            len(missing_rows),
            len(loaded.dataset) // processes.count or 1,
        )
    own = missing_rows[processes.rank :: processes.count]
    shards = [loaded.dataset.select(rows) for rows in own]
    sizes = [sum(map(distiller.count_units, shard)) for shard in shards]
    total, done = sum(sizes), 0
    show_progress = show_progress and processes.rank == 0
    resume_hint = folder.resume_hint if processes.rank == 0 else lambda: ""  # the first process collects

    def remedy() -> str:
        remedies = "lower batch_size, or use device auto in one process, or a smaller dtype and another output"
        return f"{remedies}; {resume_hint()}".removesuffix("; ")

    out_of_memory = explain_out_of_memory("distillation", remedy)
    with out_of_memory, on_interrupt(resume_hint), progress_bar(first="distilling", show=show_progress) as show:

        def advance(units: int) -> None:
            nonlocal done
            done += units
            show(distiller.unit, done, total)

        distiller.advance = advance
        distiller.show_labelled = lambda rows, of: show("answered rows labelled", rows, of)
        for number, shard in enumerate(shards):
            done = sum(sizes[:number])  # conversations that end early leave answers out
            advance(0)
            _write_shard(folder, distiller, shard, own[number].start)
        done = total
        advance(0)
        processes.wait()
        if processes.rank == 0:
            folder.finish()
        processes.wait()
    if processes.rank == 0:
        _report_left_out(folder.manifest, distiller)
        return folder.manifest
    return ShardFolder.join(output).manifest  # as the first process has finished it


def _report_left_out(manifest: dict[str, Any], distiller: Distiller) -> None:
    """Log each reason for which conversations were dropped or trimmed, and what answers lack; ValueError where no row
    is left."""
    dropped = [row for shard in manifest["shards"] for row in shard["skipped"]]
    trimmed = [row for shard in manifest["shards"] for row in shard.get("trimmed", ())]
    bad_rows = [BadRow.of(row["place"], row["reason"], row.get("kept_turns", 0)) for row in [*dropped, *trimmed]]
    for line in count_by_reason(bad_rows):
        logger.warning("%s: %s", manifest["data"]["source"], line)
    if shortened := manifest["counts"].get("shortened"):
        logger.warning(
            "%d answers to earlier questions are trained on without a part that the chat template leaves out, as their "
            "thoughts: use labels generate to train on all that the target writes",
            shortened,
        )
    if manifest["counts"].get("unfinished", 0) * 5 > manifest["counts"]["rows"]:
        thinks = "enable_thinking" in template_variables(template_source(distiller.target.tokenizer))
        logger.warning(
            "%d of %d rows end before their answer does, at --max_new_tokens %d: raise it%s",
            manifest["counts"]["unfinished"],
            manifest["counts"]["rows"],
            distiller.options.max_new_tokens,
            ", or answer without thoughts: --chat_template NAME,enable_thinking=false of all commands, NAME being "
            "`own` or what is given now"
            if thinks
            else "",
        )
    if unasked := manifest["counts"].get("unasked"):
        logger.warning(
            "%d questions were not asked: the answer before them ended at --max_new_tokens or in a loop, or is refused "
            "by the chat template, or the conversation had no room in --max_length for another, or the target's states "
            "of it overflow; other answers are followed by all questions",
            unasked,
        )
    agreement = manifest["counts"].get("agreement")
    if distiller.options.engine == "openai" and agreement is not None and agreement < _OF_ONE_MODEL:
        logger.warning(
            "%.1f %% of the tokens that the server wrote are what the target would write; of the same model it is "
            "nearly all: serve the model that is the target, without settings of its own",
            100 * agreement,
        )
    if without := manifest["counts"].get("without_end"):
        logger.warning(
            "%d recorded answers have no end token, and a head does not learn where they end: the chat template closes "
            "them with no token of %s; pass a chat_template that does",
            without,
            manifest["end_token_ids"],
        )
    if dropped and not manifest["counts"]["rows"]:
        raise ValueError(
            f"no row is left: all {len(dropped)} are left out, the first, {dropped[0]['place']}, because "
            f"{dropped[0]['reason']}; take other rows, or settings that do not leave them out, and set overwrite"
        )


def select_conversations(
    source: str, options: DistillOptions, tokenizer: PreTrainedTokenizerBase | None
) -> Conversations:
    """The conversations `options` ask for: repeated questions left out (`generate`), shuffled, limited.

    tokenizer: the target's, with the chat template in use, which may make one question of several rows; None: only rows
        that ask the same word for word are one
    No row after the last of `options.limit` is read, unless rows are shuffled first.
    """
    shuffled, generate = options.shuffle_seed is not None, options.labels == "generate"
    first, asked = None if shuffled else options.limit, None
    if generate:
        asked = attrgetter("key") if tokenizer is None else QuestionNames(tokenizer).all_asked
    loaded = read_conversations(source, options.split, options.skip_bad_rows, first, asked, options.dataset_config)
    if shuffled:
        loaded.dataset = loaded.dataset.shuffle(seed=options.shuffle_seed)
        loaded.dataset = loaded.dataset.select(range(min(options.limit or len(loaded.dataset), len(loaded.dataset))))
    return loaded


def _write_shard(folder: ShardFolder, distiller: Distiller, conversations: datasets.Dataset, first: int) -> None:
    counts = dict.fromkeys(_COUNTED, 0)
    entry: dict[str, Any] = {"first_row": first, "source_rows": len(conversations), "skipped": [], "cut": []}
    trimmed: dict[int, dict[str, Any]] = {}  # by the number of the row
    cut: list[tuple[int, str]] = []  # number and id
    unasked = distiller.unasked

    def rows() -> Iterator[Row]:
        for row in distiller.rows(conversations, first, folder.journal(first)):
            place = {"row": row.number, "place": row.place, "id": row.id}
            counts["skipped"] += row.skipped is not None
            if row.skipped is not None:
                entry["skipped"].append(place | {"reason": row.skipped})
                continue
            counts["rows"] += 1
            counts["tokens"] += len(row.ids)
            counts["trained_tokens"] += sum(row.mask)
            counts["cut"] += row.cut
            counts["unfinished"] += row.finish == "limit" and not row.cut
            counts["loops"] += row.finish == "loop"
            counts["without_end"] += row.without_end
            counts["shortened"] += row.shortened
            if row.trimmed is not None:
                trimmed[row.number] = place | {"reason": row.trimmed, "kept_turns": len(row.messages)}
            if row.cut:
                cut.append((row.number, row.id))
            yield row

    def records() -> Iterator[dict[str, Any]]:
        for record in distiller.records(rows()):
            columns = record["assistant_mask"], record["input_ids"], record["greedy_ids"]
            counts["agreeing_tokens"] += sum(m and x == y for m, x, y in zip(*columns))
            yield record
        counts["unasked"] = distiller.unasked - unasked
        entry["skipped"].sort(key=lambda left_out: left_out["row"])
        entry["cut"] = [row_id for _, row_id in sorted(cut)]
        entry["trimmed"] = [trimmed[number] for number in sorted(trimmed)]

    states = 0 if distiller.hidden_dtype is None else 1 + bool(distiller.options.target_layers)
    folder.write(records(), entry, counts, STATE_COLUMNS[:states])


_COUNTED = (
    "rows",
    "tokens",
    "trained_tokens",
    "agreeing_tokens",
    "skipped",
    "cut",
    "unfinished",
    "loops",
    "unasked",
    "without_end",
    "shortened",
)


def _header(distiller: Distiller, loaded: Conversations) -> dict[str, Any]:
    """The part of the manifest that must be equal for a second run to continue this one."""
    target, options = distiller.target, distiller.options
    digest = hashlib.sha256()
    for record in loaded.dataset:
        messages, extra = conversation_of(record)
        content = [record["id"], messages, extra] if extra else [record["id"], messages]
        digest.update(json.dumps(content, ensure_ascii=True).encode())
    settings = asdict(options)
    for name in ("labels", "split", "batch_size", "drafter", "base_url", "model_name", "concurrency"):
        del settings[name]
    settings["max_length"] = distiller.max_length
    settings["dtype"] = dtype_name(target.dtype)
    settings["target_adapter"] = target.adapter
    if own := processor_settings(target.model.generation_config):
        settings["own_generation_settings"] = own
    if distiller.hidden_dtype is not None:
        settings["hidden_states"] = dtype_name(distiller.hidden_dtype)
    return {
        "target": {"path": target.name, "chat_template": target.chat_template, "fingerprint": target.fingerprint()},
        "labels": options.labels,
        "settings": settings,
        "data": {
            "source": loaded.source,
            "split": options.split,
            "rows": len(loaded.dataset),
            "repeated": loaded.repeated,
            "fingerprint": digest.hexdigest()[:16],
            "bad_rows": [asdict(bad) for bad in loaded.bad_rows],
        },
        "end_token_ids": list(target.end_token_ids),
    }


def preview(
    target: Labeller, loaded: Conversations, count: int, options: DistillOptions, answerer: Answerer | None = None
) -> None:
    """Print the first `count` rows that `distill` would write with `options`; nothing is written."""
    chosen = loaded.dataset.select(range(min(count, len(loaded.dataset))))
    console = plain_console()
    for row in sorted(Distiller(target, options, answerer).rows(chosen), key=lambda row: row.number):
        console.rule(f"{row.id}: {len(row.ids)} tokens, {sum(row.mask)} trained")
        if row.skipped is not None:
            console.print(f"skipped: {row.skipped}")
            continue
        console.print(mark_trained(target.tokenizer, row.ids, row.mask), soft_wrap=True)
    console.print(Text.assemble(("⟦trained tokens⟧", _TRAINED)))


_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def mark_trained(tokenizer: PreTrainedTokenizerBase, ids: list[int], mask: list[bool]) -> Text:
    """The text of `ids`, special tokens shown, runs of `mask` between ⟦ ⟧ and in colour where there is one."""
    text = Text()
    for trained, run in groupby(zip(mask, ids), key=itemgetter(0)):
        part = [token for _, token in run]
        decoded = tokenizer.decode(part, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        decoded = _CONTROL.sub(lambda found: repr(found[0])[1:-1], str(decoded))  # a terminal would follow or drop it
        text.append(f"⟦{decoded}⟧" if trained else decoded, style=_TRAINED if trained else "")
    return text
