"""The rows that a head is trained on and those that are held out, from datasets that its target labelled."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import torch

from draft_heads.data.collate import DraftCollator, labelled_within, split_held_out
from draft_heads.data.fingerprint import check_fingerprint
from draft_heads.data.generation_config import processor_settings, settings_text
from draft_heads.data.labels.shards import DistilledDataset, load_distilled
from draft_heads.heads.config import HeadConfig
from draft_heads.inference.target.target import Target
from draft_heads.train.options import RunOptions

logger = logging.getLogger(__name__)


def load_data(
    run: RunOptions, target: Target, target_layers: Sequence[int] = (), rows_flag: str = "--held_out"
) -> tuple[Any, Any, list[DistilledDataset], DraftCollator]:
    """(rows to train on, held-out rows, the datasets they come from, their collator) for a head of these layers.

    Rows are held out by what they ask, so a conversation that several datasets hold is on one side in all of them.
    rows_flag: what the script calls --held_out
    """
    folders = [Path(folder).resolve() for folder in run.dataset]
    if twice := next((folder for folder in folders if folders.count(folder) > 1), None):
        raise ValueError(f"--dataset names each folder once, or its rows count twice; got {twice} again; leave it out")
    parts = [_load_labelled(folder, run, target) for folder in run.dataset]
    cached = {part.hidden_dtype for part in parts}
    if len(cached) > 1:
        found = ", ".join(f"{folder}: {part.hidden_dtype or 'none'}" for folder, part in zip(run.dataset, parts))
        raise ValueError(
            f"datasets trained on together must all have cached hidden states of one type, or none; got {found}; "
            "distil them alike"
        )
    contents = [(part.content, part.manifest["data"]["fingerprint"], part.manifest["counts"]) for part in parts]
    for folder, part in zip(run.dataset, parts):
        if target_layers and part.hidden_dtype and part.target_layers != list(target_layers):
            raise ValueError(
                f"cached states must be those of the head's --target_layers {' '.join(map(str, target_layers))}; "
                f"--dataset {folder} has {' '.join(map(str, part.target_layers)) or 'the last layer only'}; distil "
                "with the same --target_layers, or without --hidden_states"
            )
    if copy := next((folder for n, folder in enumerate(run.dataset) if contents[n] in contents[:n]), None):
        raise ValueError(f"a dataset is trained on once; --dataset {copy} has the rows of an earlier one; leave it out")
    if len({part.manifest.get("named_by") for part in parts}) > 1:
        logger.warning(
            "--dataset %s: written by versions that name questions in two ways, so one that is in several may be held "
            "out of one and trained on in another: distil them with one version",
            " ".join(run.dataset),
        )
    dataset = datasets.concatenate_datasets([part.dataset for part in parts])
    if len(dataset) <= run.held_out:
        raise ValueError(
            f"{rows_flag} {run.held_out} must leave rows to train on; --dataset {' '.join(run.dataset)} has "
            f"{len(dataset)}; lower it or distil more conversations"
        )
    training, held_out = split_held_out(dataset, rows=run.held_out)
    longest = run.max_length or max(int(part.manifest["settings"]["max_length"]) for part in parts)
    training, held_out = labelled_within(training, longest), labelled_within(held_out, longest, "held-out ")
    hidden = getattr(torch, parts[0].hidden_dtype) if parts[0].hidden_dtype else None
    sizes = target.config.hidden_size, target.config.hidden_size * len(target_layers)
    collator = DraftCollator(0, longest, run.packing, hidden, bool(target_layers), sizes)
    return training, held_out, parts, collator


def end_tokens(parts: Sequence[DistilledDataset]) -> list[int]:
    """The end-of-turn tokens of the datasets, after which a window has no further label."""
    return sorted({token for part in parts for token in part.manifest["end_token_ids"]})


def _load_labelled(folder: str, run: RunOptions, target: Target) -> DistilledDataset:
    """One dataset, checked to be this target's."""
    distilled = load_distilled(folder)
    made_for = distilled.manifest["target"]
    template = made_for.get("chat_template")  # None also where an older version did not note it
    dataset = f"--dataset {folder}" + (f", distilled with --chat_template {template}," if template else "")
    check_fingerprint(made_for["fingerprint"], target.fingerprint(), dataset)
    labelled_by = distilled.manifest["settings"].get("target_adapter")
    if bool(labelled_by) != bool(run.target_adapter):  # which one, the fingerprint has told
        raise ValueError(
            f"labels and head must be made with the same adapter; --dataset {folder} was distilled with "
            f"{labelled_by or 'none'}, --target_adapter is {run.target_adapter or 'none'}; pass the same to both"
        )
    warn_of_other_rules(folder, distilled, target)
    return distilled


def warn_of_own_settings(config: HeadConfig, target: Target) -> None:
    """A line where the checkpoint's own settings choose labels and answers, and are not in what is learned."""
    if config.learns_distribution and (own := processor_settings(target.model.generation_config)):
        logger.warning(
            "%s of the target's generation_config.json: in the labels and in what it answers, not in the distribution "
            "that %s learns, so it may draft worse; no answer changes",
            settings_text(own),
            config.title,
        )


def warn_of_other_rules(folder: str, distilled: DistilledDataset, target: Target) -> None:
    """A line where the checkpoint's own settings, or what ends a text, were others when the labels were chosen."""
    manifest, own = distilled.manifest, processor_settings(target.model.generation_config)
    made = manifest["settings"].get("own_generation_settings", {}), manifest["end_token_ids"]
    for what, labelled, now in zip(("generation settings", "end tokens"), made, (own, [*target.end_token_ids])):
        if labelled != json.loads(json.dumps(now)):
            logger.warning(
                "the target had other %s when --dataset %s was labelled (%s, now %s): some labels are not what it "
                "decodes; label with the checkpoint as it is served",
                what,
                folder,
                labelled or "none",
                now or "none",
            )
