"""What stands within the sections of a DeepSpeed configuration: names and values that DeepSpeed reads.

Of some sections DeepSpeed takes the names that it knows and ignores the rest; of others it refuses the rest when it
starts, in its own words. Here both are refused at once. What it knows is asked of the installed version.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, get_args


def check_entries(config: dict[str, Any], name: str) -> None:
    """ValueError for an entry within a section that DeepSpeed does not read or whose value it does not take; name: what
    --deepspeed was given, for errors."""
    from pydantic import ValidationError  # installed with DeepSpeed

    for section, known in _read_by_name():
        entries = config.get(section) or {}
        if not isinstance(entries, dict):
            raise ValueError(_no_mapping(name, config, section))
        for key in entries:
            if key not in known:
                raise ValueError(_unknown(name, f"{section}.{key}", known))
    for section, read in _read_as_models().items():
        if (top := section.partition(".")[0]) not in config:
            continue
        try:
            read(config)
        except TypeError:
            raise ValueError(_no_mapping(name, config, top)) from None
        except ValidationError as error:
            first = error.errors()[0]
            path = [str(part) for part in first["loc"] if part != section]
            entry = ".".join([section, *path])
            if first["type"] == "extra_forbidden":
                raise ValueError(_unknown(name, entry, _fields(read({section: {}}), path[:-1]))) from None
            value = json.dumps(first["input"], default=str)
            raise ValueError(f"{name}: {entry} cannot be {value} ({first['msg']}); correct it or delete it") from None
    _check_types(config.get("data_types", {}), name)


def _unknown(name: str, entry: str, known: list[str]) -> str:
    return f"{name}: DeepSpeed reads no entry {entry}; correct its name or delete it; known are {', '.join(known)}"


def _no_mapping(name: str, config: dict[str, Any], section: str) -> str:
    return f"{name}: {section} must be a mapping of names to values; got {json.dumps(config[section])}; correct it"


def _read_by_name() -> Iterator[tuple[str, list[str]]]:
    """The sections of which DeepSpeed ignores what it does not know, and the names that it knows."""
    from deepspeed.profiling.config import DeepSpeedFlopsProfilerConfig  # takes seconds
    from deepspeed.runtime import constants
    from deepspeed.runtime.swap_tensor.aio_config import AIO_DEFAULT_DICT

    types = ("GRAD_ACCUM_DTYPE", "PARAM_DTYPE", "BUFFER_DTYPE", "KEEP_IN_FP32_MODULES")
    yield "data_types", [getattr(constants, name) for name in types if hasattr(constants, name)]
    yield "aio", list(AIO_DEFAULT_DICT)
    yield "flops_profiler", list(vars(DeepSpeedFlopsProfilerConfig({})))
    yield "timers", ["throughput"]


def _read_as_models() -> dict[str, Callable[[dict[str, Any]], Any]]:
    """The sections that DeepSpeed checks itself, and what makes its model of a configuration."""
    from deepspeed.comm.config import DeepSpeedCommsConfig
    from deepspeed.monitor.config import get_monitor_config
    from deepspeed.runtime.precision_config import get_bfloat16_config, get_float16_config
    from deepspeed.runtime.zero.config import get_zero_config
    from deepspeed.utils.config import get_timers_config

    def monitor(name: str) -> Callable[[dict[str, Any]], Any]:
        return lambda config: getattr(get_monitor_config({name: config[name]}), name)

    return {
        "zero_optimization": get_zero_config,
        "fp16": get_float16_config,
        "bf16": get_bfloat16_config,
        "comms_logger": lambda config: DeepSpeedCommsConfig(config).comms_logger,
        "timers.throughput": get_timers_config,
        **{name: monitor(name) for name in ("tensorboard", "wandb", "csv_monitor", "comet")},
    }


def _fields(model: Any, path: list[str]) -> list[str]:
    """The names of a model's fields, of the model that lies at `path` within it."""
    fields = type(model).model_fields
    for part in path:
        hint = fields[part].annotation
        fields = next(x for x in (*get_args(hint), hint) if hasattr(x, "model_fields")).model_fields
    return sorted(fields)


def _check_types(types: dict[str, Any], name: str) -> None:
    from deepspeed.runtime.config import DtypeEnum

    for key, value in types.items():
        if key.endswith("_dtype") and value is not None:
            try:
                DtypeEnum(value)
            except ValueError:
                raise ValueError(
                    f"{name}: data_types.{key} must be one of fp32, bf16, fp16; got {json.dumps(value)}; correct it or "
                    "delete it"
                ) from None
