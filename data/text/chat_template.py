"""Tokenizers with a chat template: their own, a .jinja file, or one that is bundled in configs/chat_templates."""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping
from contextlib import suppress
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any
from unicodedata import normalize

from jinja2 import TemplateError, TemplateSyntaxError, meta, nodes
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from transformers.utils import cached_file, chat_template_utils

from draft_heads.data.common.pretrained import MAY_BE_MISSING
from draft_heads.data.text.refused_keys import TEMPLATE_FLAGS
from draft_heads.data.text.thoughts import KNOWN_MARKS

logger = logging.getLogger(__name__)

BUNDLED = Path(__file__).resolve().parents[2] / "configs" / "chat_templates"
OWN = "own"
"""Names the tokenizer's own chat template, to give it settings."""

CHAT_TEMPLATE_HELP = (
    "chat template in place of the tokenizer's own: a .jinja file, or the name of a bundled one (vicuna, llama-2); "
    "with settings for it or for the tokenizer's `own`, as own,enable_thinking=false"
)

_UNDATED = "{% macro strftime_now(form) %}{{ form }}{% endmacro %}"
_SWITCHES = {"true", "false", "yes", "no", "on", "off", "none", "null"}
_OF_THOUGHTS = ("enable_thinking", "thinking")
_QUOTED = re.compile(r'[^=,]*="(?:[^"\\]|\\.)*"')
_SET = re.compile(r"\{% set (\w+) = (.*) %\}")
_COMMENT = re.compile(r"\{#.*?#\}", re.DOTALL)
_GENERATION_BLOCK = re.compile(r"\{%-?\+?\s*generation\s*[-+]?%\}")
_OF_CONVERSATIONS = frozenset({"messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"})
"""What a chat template reads of each conversation or of the tokenizer, and has no setting for."""
_KNOWS_THOUGHTS = re.compile("think|thought|reason|" + "|".join(map(re.escape, KNOWN_MARKS)), re.IGNORECASE)
"""What stands in the chat template of a model that may think: a mark, a setting or a key of turns."""

TEMPLATE_ERRORS = (TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError)
"""What a chat template that refuses a conversation raises, of its own or of Jinja's."""

PROBE_TEXT = "Don't split 1234.5 apples\n\n\tinto  three:  naïve café ≈ 日本 😀 def f(x):\n    return x_1 + 20"
"""Two vocabularies with equal entries may still split text differently: this one is split to compare them. A tokenizer
that does not give it back loses such characters of any text."""


def read_chat_template(name_or_path: str) -> str:
    """The text of a bundled chat template, by its bare name, or of a .jinja file; ValueError for anything else."""
    bundled = {path.stem: path for path in sorted(BUNDLED.glob("*.jinja"))}
    path = bundled.get(name_or_path, Path(name_or_path))
    if not _is_file(str(path)):
        raise ValueError(
            f"chat_template {name_or_path} is neither a file nor a bundled template; pass a .jinja file or one of "
            f"{', '.join(bundled)}"
        )
    try:
        template = path.read_text(encoding="utf-8-sig")  # without the mark that some editors put in front
    except UnicodeDecodeError as error:
        raise ValueError(
            f"chat_template {name_or_path} is a text in UTF-8; this file has other bytes at {error.start}; save it "
            "as UTF-8"
        ) from None
    try:
        known = json.loads(template)
    except ValueError:  # no JSON, as it should be
        known = None
    if isinstance(known, dict):  # a processor's chat_template.json, or tokenizer_config.json
        if not isinstance(known.get("chat_template"), str):
            raise ValueError(
                f"chat_template {name_or_path} is JSON without a text under chat_template; pass the template's text as "
                "a .jinja file"
            )
        template = known["chat_template"]
    if not template.strip():
        raise ValueError(
            f"chat_template {name_or_path} is empty; pass a file with a chat template, or leave it out for "
            "the tokenizer's own"
        )
    return template


def split_settings(chat_template: str | None) -> tuple[str | None, dict[str, Any]]:
    """(the name or file, None for the tokenizer's own; settings) of a --chat_template, whose values are as in JSON, or
    else texts; in quotes they may have commas. Example: `own,enable_thinking=false,style=short` → None,
    {"enable_thinking": False, "style": "short"}.
    """
    if chat_template is None or _is_file(chat_template):
        return chat_template, {}
    name, comma, rest = chat_template.partition(",")
    settings: dict[str, Any] = {}
    while comma:
        quoted = _QUOTED.match(rest)
        end = quoted.end() if quoted else 0
        after, comma, following = rest[end:].partition(",")
        pair, rest = rest[:end] + after, following
        key, equals, text = pair.partition("=")
        if not (equals and key.isidentifier()) or key in settings:
            raise ValueError(
                f"chat_template takes settings as name=value, each once; got {pair!r} in {chat_template}; write for "
                f"example {OWN},enable_thinking=false"
            )
        try:
            settings[key] = json.loads(text, strict=False)  # with line breaks
        except ValueError:
            settings[key] = text
        finite = not isinstance(settings[key], float) or math.isfinite(settings[key])
        if isinstance(settings[key], list | dict) or not finite:
            raise ValueError(f"a setting of a chat template is a word, a number, true or false; got {pair}; write one")
        if settings[key] == text and text.startswith('"'):
            raise ValueError(f"a setting of a chat template in quotes is a text as in JSON; got {pair}; repair it")
        flag = key in TEMPLATE_FLAGS and not isinstance(settings[key], bool)
        if flag or (settings[key] == text and text.lower() in _SWITCHES):
            raise ValueError(
                f"settings of a chat template are written as in JSON, {key if flag else 'switches'} as true or false; "
                f"got {pair}; write for example {key}=false, or a word that looks so in quotes"
            )
    return None if name == OWN and not Path(OWN).is_file() else name, settings


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except OSError:  # too long for a name
        return False


def with_settings(tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any]) -> PreTrainedTokenizerBase:
    """The tokenizer, whose chat template sets what it reads of these names itself; ValueError for one it does not read.

    So whoever reads the template, its hash too, has the settings with it.
    """
    if not settings:
        return tokenizer
    own = tokenizer.chat_template
    texts = own if isinstance(own, dict) else {"default": str(own or "")}
    known = frozenset[str]().union(*map(template_variables, texts.values())) - _OF_CONVERSATIONS
    if unread := [name for name in settings if name not in known]:
        raise ValueError(
            f"chat_template must read the settings that it is given; this one does not read {unread[0]!r}, but "
            f"{', '.join(sorted(known)) or 'none'}; leave it out"
        )
    lines = "".join(f"{{% set {name} = {_in_jinja(value)} %}}\n" for name, value in sorted(settings.items()))
    set_in = {name: lines + text for name, text in texts.items()}
    tokenizer.chat_template = set_in if isinstance(own, dict) else set_in["default"]
    return tokenizer


def _in_jinja(value: Any) -> str:
    return "none" if value is None else json.dumps(value, ensure_ascii=False)


def _settings_in(template: str) -> dict[str, Any]:
    """What `with_settings` has written into a template, or it came with in the same form."""
    own: dict[str, Any] = {}
    for line in template.removeprefix(_UNDATED).split("\n"):
        if (match := _SET.fullmatch(line)) is None:
            break
        with suppress(ValueError):  # of another form
            own[match[1]] = None if match[2] == "none" else json.loads(match[2])
    return own


def reads_setting(template: str, name: str, value: Any) -> bool:
    """Whether a chat template heeds a word, a number or a boolean of one conversation: it reads it, or was made to set
    it to the same (`with_settings`), or it is asked for no thoughts (by `reasoning_effort`: none) and was made to give
    none, or knows none."""
    own, read = _settings_in(template), template_variables(template)
    if name in own:
        return bool(own[name] == value)
    no_thoughts = value is False if name in _OF_THOUGHTS else (name, value) == ("reasoning_effort", "none")
    if name in read or not no_thoughts:
        return name in read
    if flags := [own[flag] for flag in _OF_THOUGHTS if flag in own]:
        return not any(flags)
    return _KNOWS_THOUGHTS.search(template) is None


def has_generation_block(template: str) -> bool:
    """Whether a chat template has `{% generation %}`, not in a comment."""
    return _GENERATION_BLOCK.search(_COMMENT.sub("", template)) is not None


def template_source(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of a tokenizer's chat template; of several (`default`, `tool_use`) all texts, that by default first."""
    own = tokenizer.chat_template
    if not isinstance(own, dict):
        return str(own)
    return "\n".join(own[name] for name in sorted(own, key=lambda name: (name != "default", name)))


def tell_of_the_date(tokenizer: PreTrainedTokenizerBase, what_follows: str) -> None:
    """Log what follows from it that the chat template writes the day into prompts, if it does."""
    source = template_source(tokenizer)
    if "strftime_now" in source and "date_string" not in _settings_in(source):
        logger.warning("the chat template writes the date into prompts: %s", what_follows)


def without_date(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, or a copy whose chat template writes the form of a date, as `%d %b`, in place of today's."""
    own = tokenizer.chat_template
    if "strftime_now" not in template_source(tokenizer):
        return tokenizer
    undated = copy(tokenizer)
    texts = {name: _UNDATED + text for name, text in own.items()} if isinstance(own, dict) else _UNDATED + str(own)
    undated.chat_template = texts
    return undated


@cache
def template_variables(template: str) -> frozenset[str]:
    """The names that a chat template reads of what it is given; those that it sets itself are none of them, nor the
    functions that it may call.

    Example: of `{% if thinking %}{% for name in names %}{{ name.id }}{% endfor %}{% endif %}` thinking and names.
    """
    environment = chat_template_utils._compile_jinja_template(template).environment  # knows `{% generation %}`
    return frozenset(meta.find_undeclared_variables(environment.parse(template)) - environment.globals.keys())


@cache
def blocks_in_buffers(template: str) -> bool:
    """Whether a `{% generation %}` block is in a part that jinja renders by itself, as a macro: transformers counts the
    places of blocks from where that begins, and not from the beginning of the text."""
    tree = chat_template_utils._compile_jinja_template(template).environment.parse(template)
    apart = [*tree.find_all((nodes.Macro, nodes.AssignBlock, nodes.FilterBlock, nodes.CallBlock))]
    apart += [loop for loop in tree.find_all(nodes.For) if loop.recursive]
    inside = (block.call for part in apart for block in part.find_all(nodes.CallBlock))
    return any(isinstance(call.node, nodes.ExtensionAttribute) for call in inside)


def check_usable(tokenizer: PreTrainedTokenizerBase) -> None:
    """ValueError without a chat template, for one that is no Jinja, and without token offsets."""
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path!r} has no chat template; pass as chat_template "
            "the one the target was trained on: a .jinja file, or the name of a bundled one (vicuna, llama-2)"
        )
    if not tokenizer.is_fast:
        raise ValueError(
            f"the assistant mask needs token offsets and {type(tokenizer).__name__} has none; load the fast "
            "tokenizer (a folder with tokenizer.json)"
        )
    try:
        tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template of {tokenizer.name_or_path!r} is no Jinja template (line {error.lineno}: {error}); "
            "mend it, or pass another chat_template"
        ) from None
    except TEMPLATE_ERRORS:
        pass  # it may refuse this sample


def load_tokenizer(path: str, chat_template: str | None = None, option: str = "--target") -> PreTrainedTokenizerBase:
    """The tokenizer of a folder or hub id; `chat_template` (a name or a file, without settings) replaces its own.

    ValueError, which names the `option`, if there is no tokenizer, or it is not that of its tokenizer.json.
    """
    template = None if chat_template is None else read_chat_template(chat_template)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"{option} {path} is no tokenizer's folder or hub id ({reason}); give one with tokenizer.json"
        ) from None
    _check_its_file(tokenizer, path, option)
    kept = normalize("NFC", str(tokenizer.decode(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])))
    if lost := [letter for letter in dict.fromkeys(PROBE_TEXT) if letter.strip() and letter not in kept]:
        logger.warning(
            "%s %s: its tokenizer does not keep every character, for example %s: heads learn texts without them, as "
            "the target reads them",
            option,
            path,
            " ".join(lost),
        )
    if template is not None:
        tokenizer.chat_template = template
    return tokenizer


def with_whole_offsets(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """The tokenizer, or a copy whose offsets hold the white space of a token, as those of ` There` from the space on.

    The byte-level tokenizers of GPT-NeoX and RoBERTa leave it out (`trim_offsets` of their post-processor).
    """
    own = tokenizer.backend_tokenizer
    if own.post_processor is None or b'"trim_offsets":true' not in own.post_processor.__getstate__():
        return tokenizer
    state = json.loads(own.to_str())
    steps = state["post_processor"]
    for step in (steps, *steps.get("processors", ())):
        step |= {"trim_offsets": False} if "trim_offsets" in step else {}
    other = copy(tokenizer)
    other._tokenizer = Tokenizer.from_str(json.dumps(state))
    return other


def _check_its_file(tokenizer: PreTrainedTokenizerBase, path: str, option: str) -> None:
    """ValueError where text that tokenizer.json keeps is lost in the tokenizer that transformers made of it: some
    versions make another kind of tokenizer from the name of a class in tokenizer_config.json."""
    file = cached_file(path, "tokenizer.json", **MAY_BE_MISSING)
    if file is None:
        return
    own = Tokenizer.from_file(file)
    ids = list(tokenizer(PROBE_TEXT, add_special_tokens=False)["input_ids"])
    right = own.encode(PROBE_TEXT, add_special_tokens=False).ids
    if ids != right and own.decode(right) == PROBE_TEXT != own.decode(ids):
        raise ValueError(
            f"{option} {path} must be loaded as its tokenizer.json says; this version of transformers makes a "
            f"{type(tokenizer).__name__} of it, which reads {PROBE_TEXT[:12]!r}… as {own.decode(ids)[:12]!r}…; update "
            'transformers, or write "tokenizer_class": "PreTrainedTokenizerFast" in its tokenizer_config.json'
        )


def load_chat_tokenizer(path: str, chat_template: str | None = None) -> PreTrainedTokenizerBase:
    """As `load_tokenizer`, for --tokenizer, with settings too; one without a chat template gets Vicuna's, which a line
    says."""
    name, settings = split_settings(chat_template)
    template = read_chat_template("vicuna" if name is None else name)
    tokenizer = load_tokenizer(path, option="--tokenizer")
    if name is None and not tokenizer.chat_template:
        logger.warning("--tokenizer %s has no chat template: the bundled vicuna is taken", path)
    if name is not None or not tokenizer.chat_template:
        tokenizer.chat_template = template
    return with_settings(tokenizer, settings)
