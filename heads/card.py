"""The model card of a head: README.md with the metadata that hubs read."""

from __future__ import annotations

import json
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, hf_hub_download, metadata_load

from draft_heads.data.common.pretrained import check_folder_or_hub_id
from draft_heads.heads.config import HeadConfig

LIBRARY = "draft-heads"
ABSOLUTE = re.compile(r"(?<![^\s=:,'\"])/(?:[^\s/,'\"]+/)*([^\s/,'\"]+)/?")
_IN_A_WORD = re.compile(r"(?:(?<=[=:])|^)/(?:[^/=:]+/)*([^/=:]+)/?")
MEASURED = {
    **{"simulated_beta": "simulated β", "simulated_answers": "answers that it is measured on"},
    **{"loss": "loss", "windows": "windows measured"},
    "outside_vocabulary": "share of labels that this draft vocabulary lacks (of CTC also one before them)",
}
USAGE = """    from draft_heads.inference.drafters.registry import DrafterSpec, build_drafter
    from draft_heads.inference.engine import DecodingEngine
    from draft_heads.inference.target.target import Target

    target = Target.from_pretrained({arguments})
    engine = DecodingEngine(target, build_drafter(DrafterSpec.parse("head=FOLDER"), target))
    for text in engine.stream_text("Name a fruit."):
        print(text, end="")"""


def target_licence(target: str) -> dict[str, Any] | None:
    """What the target's own card says of its licence (one name or several, and name and link of one that is `other`);
    {} if it says nothing, None if there is none to read here."""
    try:
        card = Path(target) / "README.md" if Path(target).is_dir() else Path(hf_hub_download(target, "README.md"))
        metadata = metadata_load(card) or {}
    except Exception:  # a card is no reason to lose a trained head
        return None
    return {key: metadata[key] for key in ("license", "license_name", "license_link") if metadata.get(key)}


def is_hub_id(source: str) -> bool:
    """Whether OWNER/NAME is a hub's here, where no folder of that name is. Where another machine asks, a relative path
    looks like one: what knows the path writes the answer down (`base_model` of the provenance)."""
    try:
        check_folder_or_hub_id("", source)
    except ValueError:
        return False
    return "/" in source and not Path(source).is_dir()


def figure(value: float) -> str:
    """A measured value as text: 2.5, 0.75, 1,234,567."""
    return f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:g}"


def shared(text: str) -> str:
    """A text without the folders of this machine: `--target /home/me/models/tiny` → `--target tiny`."""
    return ABSOLUTE.sub(r"\1", text)


def without_folders(value: Any, name: str = "") -> Any:
    """A value of a JSON file, as `shared`; of a path, and of the words of a `command`, also folders with blanks."""
    if isinstance(value, dict):
        return {key: without_folders(inner, key) for key, inner in value.items()}
    if isinstance(value, list):
        return [without_folders(inner) for inner in value]
    if not isinstance(value, str):
        return value
    if name == "command":
        return shlex.join(map(_word, shlex.split(value)))
    return _IN_A_WORD.sub(r"\1", value) if value.startswith("/") else shared(value)


def _word(word: str) -> str:
    """A word of a command without folders; one in JSON (`--deepspeed '{…}'`) by its values."""
    if word.startswith(("{", "[")):
        with suppress(ValueError):
            return json.dumps(without_folders(json.loads(word)))
    return word if "://" in word else _IN_A_WORD.sub(r"\1", word)


def model_card(config: HeadConfig, parameters: int, provenance: dict[str, Any]) -> str:
    """README.md of a head: what it is for, how it was trained, what was measured at the end, under which licence."""
    base_model = provenance.get("base_model", config.target if is_hub_id(config.target) else "")
    known = provenance.get("target_licence")
    licence = {"license": known} if isinstance(known, str) else dict(known or {})  # a name alone in older heads
    if (link := licence.get("license_link")) and "://" not in link:  # a file beside the target's card
        licence["license_link"] = f"https://huggingface.co/{base_model}/blob/main/{link}" if base_model else None
    target = without_folders(config.target)
    metadata = ModelCardData(
        base_model=base_model or None,
        library_name=LIBRARY,
        tags=["speculative-decoding", "draft-head", config.kind],
        **({} if "imported_from" in provenance else licence),  # whose authors chose their own
    )
    names = licence.get("license_name") or licence.get("license") or ()
    names = " or ".join(map(str, names if isinstance(names, list | tuple) else [names]))
    unread = "the licence of its card, which was not read here"
    unnamed = unread if known is None else "a licence that its card does not name"
    under = f"under the licence {names}" if names else f"under {unnamed}; look it up"
    return f"""---
{metadata.to_yaml()}
---

# A {config.kind} draft head for {target}

{parameters:,} parameters, for lossless speculative decoding with the target named
above. A target {compared_parts(config)} is refused when the head is
loaded, of a fine-tune a line says so. The target is {under}.

{USAGE.format(arguments=", ".join(target_arguments(target, provenance.get("options", {}))))}

{trained(provenance)}{long_texts(config)}"""


def compared_parts(config: HeadConfig) -> str:
    """What a target must not have another of, as far as the head says what it was made for."""
    of_text = {"tokenizer_hash": "another tokenizer", "chat_template_hash": "another chat template"}
    others = [words for field, words in of_text.items() if config.target_fingerprint.get(field)]
    return f"of other sizes, with {' or '.join(others)}" if others else "of other sizes"


def long_texts(config: HeadConfig) -> str:
    """A paragraph about texts longer than those that a head was trained on; "" where that is unknown."""
    if not config.trained_length:
        return ""
    return f"""
Trained on texts of up to {config.trained_length:,} tokens, question and answer together. In longer ones fewer
drafts may be accepted, the answers stay the target's; decoding says so once where a step gives fewer than 1.1 tokens.
"""


def target_arguments(target: str, options: dict[str, Any]) -> list[str]:
    """What loads the target that the head was trained for."""
    given = {"adapter": options.get("target_adapter"), "chat_template": options.get("chat_template")}
    return [f'"{target}"', *(f'{name}="{without_folders(value)}"' for name, value in given.items() if value)]


def trained(provenance: dict[str, Any]) -> str:
    """The part of a card that says where the weights come from."""
    if source := provenance.get("imported_from"):
        return f"Read from {without_folders(source)}.\n"
    if "command" not in provenance:
        return "Nothing is known of its training.\n"
    rows = [
        f"| {measured(name)} | {figure(value)} |"
        for name, value in sorted(provenance.get("metrics", {}).items())
        if not name.endswith("_seconds")
    ]
    return "\n".join(
        [
            f"Trained with\n\n    {without_folders(provenance['command'], 'command')}\n",
            f"for {trained_for(provenance)} on {trained_on(provenance)}. Measured on held-out rows",
            "at the end:\n",
            "| metric | value |\n| --- | --- |",
            *rows,
            "",
        ]
    )


def trained_for(provenance: dict[str, Any]) -> str:
    """The steps, how often they read the rows, which older heads do not know, and the minutes that they took."""
    steps, epochs, minutes = (provenance.get(name, 0) for name in ("steps", "epochs", "minutes"))
    read = f" ({epochs:{',.0f' if epochs >= 100 else '.3g'}} epochs)" if epochs else ""
    return f"{steps:,} steps{read}" + (f" in {minutes:g} minutes" if minutes else "")


def trained_on(provenance: dict[str, Any]) -> str:
    """The rows and answer tokens that were trained on, and of which datasets by name and fingerprint. Older heads know
    the sizes of the datasets only, held-out rows included. A conversation may have several rows."""
    if trained := provenance.get("trained"):
        data = " and ".join(f"{part['name']} (fingerprint {part['fingerprint']})" for part in provenance["data"])
        return (
            f"{trained['rows']:,} rows with {trained['answer_tokens']:,} answer tokens of {data}, of which "
            f"{provenance['held_out']['rows']:,} more were held out"
        )
    return " and ".join(
        f"{part['counts'].get('rows', 0):,} rows with {part['counts'].get('trained_tokens', 0):,} answer "
        f"tokens of {part.get('name', 'a dataset')} (fingerprint {part['fingerprint']})"
        for part in provenance.get("data", [])
    )


def measured(name: str) -> str:
    """A metric of the provenance in words: `eval_accuracy_1` is that of the first label, whose offset is 0."""
    name = name.removeprefix("eval_")
    label = name.removeprefix("accuracy_")
    return f"top-1 accuracy at offset {int(label) - 1}" if label != name else MEASURED.get(name, name)
