"""The keys of rows and turns that say nothing about the text: one list for data and prompts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

METADATA = {
    *(
        "id",
        "_id",
        "idx",
        "index",
        "uuid",
        "uid",
        "hash",
        "key",
        "place",
        "datasplit",
        "multiturn",
        "title",
        "type",
        "kind",
        "tag",
        "tags",
    ),
    *("source", "sources", "dataset", "data_source", "dataset_name", "origin", "split", "subset", "url", "link"),
    *("license", "version", "author", "status", "metadata", "meta", "info", "header", "views", "likes", "avatarUrl"),
    *("model", "models", "model_name", "generator", "teacher_model", "gen_input_configs", "temperature", "top_p"),
    *("timestamp", "date", "time", "created", "create_time", "created_at", "updated_at"),
    *("lang", "language", "languages", "locale", "country", "state", "hashed_ip", "markdown"),
    *("category", "categories", "subcategory", "topic", "topics", "domain", "subject", "task", "subtask", "level"),
    *("difficulty", "intent", "label", "langdetect", "problem_type", "question_type", "synthetic", "verified"),
    *("score", "scores", "rating", "ratings", "reward", "rank", "quality", "input_quality", "quality_explanation"),
    *("reward_model", "instruct_reward", "min_neighbor_distance", "min_similar_uuid", "llama_guard_2"),
    *("task_category", "other_task_category", "gen_response_configs", "pre_query_template"),
    *("turn", "turns", "turn_identifier", "length", "tokens", "skip_prompt_formatting"),
    *("toxic", "redacted", "moderation", "openai_moderation", "detoxify_moderation", "annotations", "cache_control"),
    *("prompt_cache_breakpoint", "parallel_tool_calls"),
    *("openai_id", "token_counter", "system_fingerprint", "usage", "used_in", "chosen_model", "rejected_model"),
}
_TASKS = {"task", "subtask", "info"}
_LABELS = {*_TASKS, "source", "sources", "subject", "topic", "topics", "domain"}
"""Those that hold labels in most files, and in some a passage, or (those of a task) an instruction."""
_ENDS = "。！？｡\u104b\u17d4\u17d5\u0f0d\u0f0e"
"""Signs that end a sentence in scripts that have no spaces between words: Chinese, Burmese, Khmer, Tibetan."""
_SENTENCE = re.compile(rf"\s.*[.!?:؟۔।॥։።፧]\W*\Z|[{_ENDS}]", re.DOTALL)
_SPACE_OR_END = re.compile(rf"[\s{_ENDS}]")
_OF_THE_ROW = {
    *("source", "page", "site", "home", "base", "web", "repo", "github", "paper", "article", "post", "user"),
    *("author", "creator", "owner", "worker", "annotator", "conversation", "chat", "thread", "session", "dialog"),
    *("dialogue", "message", "turn", "parent", "root", "tree", "reply", "comment", "prompt", "question", "query"),
    *("answer", "response", "completion", "instruction", "problem", "row", "sample", "example", "item", "record"),
    *("entry", "instance", "data", "dataset", "task", "test", "category", "topic", "subject", "group", "cluster"),
    *("batch", "run", "job", "request", "trace", "model", "seed", "score", "label", "original", "orig", "unique"),
    *("src", "global", "external", "public", "internal", "new", "old", "hf", "hub"),
}
_METADATA_FORM = re.compile(
    r"(?!.*(train|mask|loss|weight|image|audio|video))"
    r"((num|n|avg|score|is|has)_\w+|\w+_(hash|score|scores|rating|count|length|tokens|source|version|category|split|generator)"
    rf"|((?:{'|'.join(_OF_THE_ROW)})_)+(id|ids|url)"
    r"|Unnamed: 0(\.\d+)?|__index_level_\d+__)"  # the index of a table that pandas wrote
)
"""Keys of a row or a turn that say nothing about its text, by name, and by form where the value is short: addresses and
ids are those of `_OF_THE_ROW`, for others (`file_ids`, `gif_url`) may be of what the text is about."""


def carries_no_meaning(key: str, value: Any) -> bool:
    """Whether a key with this value is known to say nothing about the text.

    Example: `dataset_source` says nothing as `web`, and may be a passage where it holds white space.
    """
    if key in METADATA or is_empty(value):
        return not holds_text(key, value)
    return _METADATA_FORM.fullmatch(key) is not None and _is_short(value)


def is_empty(value: Any) -> bool:
    """Whether a value says nothing under any key: an empty one, or an object that holds nulls alone, at any depth.

    An object with an empty text says something: it may be a template's setting.
    """
    if isinstance(value, Mapping):
        return all(one is None or (one != "" and is_empty(one)) for one in value.values())
    return value in ("", [])


def holds_text(key: str, value: Any) -> bool:
    """Whether a key of labels holds a long text, or one of a task a sentence: `Translate to French.`"""
    texts = _texts(value, mappings=False) if key in _LABELS else ()
    return any(_is_long(text) or (key in _TASKS and _SENTENCE.search(text) is not None) for text in texts)


def notes_of(record: Mapping[str, Any]) -> list[str]:
    """The keys of a row that are passed over as notes on its text, and hold words all the same."""
    known = (key for key in record if key != "id" and (key in METADATA or _METADATA_FORM.fullmatch(key)))
    return [key for key in known if any(" " in text.strip() or _is_long(text) for text in _texts(record[key]))]


def notes_of_turns(turns: Sequence[Any]) -> list[str]:
    """The same of turns and of the parts of their texts, each key once."""
    texts = [turn.get(key) for turn in turns if isinstance(turn, Mapping) for key in ("content", "value")]
    parts = [part for text in texts if isinstance(text, list) for part in text]
    return sorted({key for one in (*turns, *parts) if isinstance(one, Mapping) for key in notes_of(one)} - {"type"})


def _is_short(value: Any) -> bool:
    """Whether a value holds numbers, booleans and short texts without white space or a sentence alone."""
    return all(len(text) < 200 and not (_is_long(text) or _SPACE_OR_END.search(text)) for text in _texts(value))


def _is_long(text: str) -> bool:
    """Whether a text has over 100 letters or, in a script that may have no spaces, 60, and is no address."""
    if " " in text:
        return len(text) > 100
    return "://" not in text and sum(not letter.isascii() for letter in text) > 60


def _texts(value: Any, mappings: bool = True) -> Iterator[str]:
    """The texts in a value, at any depth of lists and, if asked for, mappings."""
    left = [value]
    for one in left:
        if isinstance(one, str):
            yield one
        elif isinstance(one, list):
            left.extend(one)
        elif mappings and isinstance(one, Mapping):
            left.extend(one.values())
