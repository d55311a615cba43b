"""The keys of rows and turns that say nothing about the text: one list for data and prompts."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

METADATA = {
    *("id", "_id", "idx", "index", "uuid", "uid", "hash", "key", "place", "title", "type", "kind", "tag", "tags"),
    *("source", "sources", "dataset", "data_source", "dataset_name", "origin", "split", "subset", "url", "link"),
    *("license", "version", "author", "status", "metadata", "meta", "info", "header", "views", "likes", "avatarUrl"),
    *("model", "models", "model_name", "generator", "teacher_model", "gen_input_configs", "temperature"),
    *("timestamp", "date", "time", "created", "create_time", "created_at", "updated_at"),
    *("lang", "language", "languages", "locale", "country", "state", "hashed_ip", "markdown"),
    *("category", "categories", "subcategory", "topic", "topics", "domain", "subject", "task", "subtask", "level"),
    *("difficulty", "intent", "label", "langdetect", "problem_type", "question_type", "synthetic", "verified"),
    *("score", "scores", "rating", "ratings", "reward", "rank", "quality", "input_quality", "quality_explanation"),
    *("reward_model", "instruct_reward", "min_neighbor_distance", "min_similar_uuid", "llama_guard_2"),
    *("task_category", "other_task_category", "gen_response_configs", "pre_query_template"),
    *("turn", "turns", "turn_identifier", "length", "tokens", "used_in_training", "skip_prompt_formatting"),
    *("toxic", "redacted", "moderation", "openai_moderation", "detoxify_moderation", "annotations", "cache_control"),
    *("parallel_tool_calls", "__index_level_0__"),
}
_LABELS = {"task", "subtask", "info", "source", "sources", "subject", "topic", "topics", "domain"}
"""Those that hold labels in most files, and in some an instruction or a passage."""
_SENTENCE = re.compile(r"\s.*[.!?:]\W*\Z|[。！？]", re.DOTALL)
_OF_THE_ROW = {
    *("source", "page", "site", "home", "base", "web", "repo", "github", "paper", "article", "post", "user"),
    *("author", "creator", "owner", "worker", "annotator", "conversation", "chat", "thread", "session", "dialog"),
    *("dialogue", "message", "turn", "parent", "root", "tree", "reply", "comment", "prompt", "question", "query"),
    *("answer", "response", "completion", "instruction", "problem", "row", "sample", "example", "item", "record"),
    *("entry", "instance", "data", "dataset", "task", "test", "category", "topic", "subject", "group", "cluster"),
    *("batch", "run", "job", "request", "trace", "model", "seed", "score", "label", "original", "orig", "unique"),
    *("global", "external", "public", "internal", "new", "old", "hf", "hub"),
}
_METADATA_FORM = re.compile(
    r"(?!.*(train|mask|loss|weight|image|audio|video))"
    r"((num|n|avg|score|is|has)_\w+|\w+_(hash|score|scores|rating|count|length|tokens|source|version|category|split|generator)"
    rf"|((?:{'|'.join(_OF_THE_ROW)})_)+(id|ids|url)"
    r"|Unnamed: 0(\.\d+)?)"  # the index of a table that pandas wrote
)
"""Keys of a row or a turn that say nothing about its text, by name, and by form where the value is short: addresses and
ids are those of `_OF_THE_ROW`, for others (`file_ids`, `gif_url`) may be of what the text is about."""


def carries_no_meaning(key: str, value: Any) -> bool:
    """Whether a key with this value is known to say nothing about the text.

    Example: `dataset_source` says nothing as `web`, and may be a passage where it holds white space.
    """
    if key in METADATA:
        return not holds_text(key, value)
    short = _texts_fit(value, lambda text: len(text) < 200 and not re.search(r"\s", text))
    return _METADATA_FORM.fullmatch(key) is not None and short


def holds_text(key: str, value: Any) -> bool:
    """Whether a key of labels holds a sentence or a long text: `task` does as `Translate to French.`."""
    label = _texts_fit(value, lambda text: not _SENTENCE.search(text) and (len(text) <= 100 or " " not in text))
    return key in _LABELS and not label


def _texts_fit(value: Any, fits: Callable[[str], bool]) -> bool:
    """Whether each text in a value does, at any depth."""
    if isinstance(value, (Mapping, list)):
        return all(_texts_fit(one, fits) for one in (value.values() if isinstance(value, Mapping) else value))
    return not isinstance(value, str) or fits(value)
