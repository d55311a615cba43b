"""A DeepSpeed configuration beside the flags: they fill what it leaves out, and what it says otherwise is refused.

So plan, run.json and provenance, which are made from the flags, are true of what DeepSpeed does. The same holds for
what accelerate's launcher puts into the environment.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from draft_heads.inference.target.library_names import builds_lock_by_a_file
from draft_heads.train.zero_entries import check_entries

_SAME = {
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "fp16",
    "bf16.enabled": "bf16",
}
"""Entries that a flag decides."""

_REPLACED = {
    "optimizer": "--optim, --learning_rate, --weight_decay and --adam_beta1 …",
    "scheduler": "--lr_scheduler_type, --warmup_steps and --max_minutes",
    "amp": "--bf16 and --fp16",
    "torch_autocast": "--bf16 and --fp16",
    "tensor_parallel": "zero_optimization",
    "sequence_parallel_size": "--max_length",
    "elasticity": "--per_device_train_batch_size and --gradient_accumulation_steps",
    "curriculum_learning": "--max_length",
    "data_efficiency": "--tokens_per_batch",
}
"""Entries that would replace what these flags say."""

_OLD_NAMES = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
"""Entries of `zero_optimization` that DeepSpeed still reads and accelerate, which chooses the optimizer, does not."""

_WITHOUT_EFFECT = {
    "steps_per_print": "--logging_steps says how often to log",
    "wall_clock_breakdown": "it is printed every steps_per_print steps, which accelerate turns off",
    "memory_breakdown": "it is printed every steps_per_print steps, which accelerate turns off",
    "dataloader_drop_last": "DeepSpeed loads no data here",
}
"""Entries that nothing reads; a line says so."""

_DEEPSPEEDS_OWN = {
    *("zero_optimization", "zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
    *("communication_data_type", "data_types", "prescale_gradients", "gradient_predivide_factor", "disable_allgather"),
    *("fp16", "bf16", "train_batch_size", "aio", "dump_state", "comms_logger", "flops_profiler", "timers"),
    *("tensorboard", "wandb", "csv_monitor", "comet"),
}
"""Entries about what no flag says: how to share, send and measure."""

_AUTO_BY_WIDTH = {
    *("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
    "stage3_gather_16bit_weights_on_model_save",
}  # of zero_optimization; transformers and accelerate fill them


def zero_config(given: str | dict[str, Any], args: Any) -> tuple[dict[str, Any], list[str]]:
    """The configuration that DeepSpeed runs by, and lines about entries that have no effect.

    given: a path, or the configuration itself as a mapping or as JSON. ValueError for one that cannot be read, and for
    an entry that contradicts a flag, would replace one, or is not known.
    """
    config = read_zero_config(given)
    name = f"--deepspeed {given}" if isinstance(given, str) and not given.startswith("{") else "--deepspeed"
    if "bfloat16" in config:  # DeepSpeed's older name, which transformers does not know
        config["bf16"] = config.pop("bfloat16")
    for key in config:
        if key in _REPLACED:
            raise ValueError(f"{name}: the entry {key!r} would replace {_REPLACED[key]}; delete it and use those")
        if key not in {*_SAME, *_WITHOUT_EFFECT, *_DEEPSPEEDS_OWN}:
            raise ValueError(
                f"{name}: the entry {key!r} is not one for a head's training; delete it; known are "
                f"{', '.join(sorted({*_SAME, *_DEEPSPEEDS_OWN} - {'fp16.enabled', 'bf16.enabled'}))}"
            )
    lines = [
        f"{name}: {key} has no effect; {why}"
        for key, why in _WITHOUT_EFFECT.items()
        if config.pop(key, False) is not False
    ]
    zero = _mapping(config, "zero_optimization", '{"stage": 2}', name)
    for old, new in _OLD_NAMES.items():
        if zero.get(old):
            raise ValueError(
                f'{name}: zero_optimization.{old} is an old name, which accelerate does not read; write "{new}": '
                '{"device": "cpu"}, or delete it'
            )
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key) is None:
            zero.pop(key, None)  # accelerate reads into what is there
        else:
            _mapping(zero, key, '{"device": "cpu"}', name)
    for entry, flag in _SAME.items():
        _settle(config, entry, getattr(args, flag), f"--{flag}", name)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    batch = args.per_device_train_batch_size * args.gradient_accumulation_steps * processes
    what = f"--per_device_train_batch_size, --gradient_accumulation_steps and {processes} processes, together"
    _settle(config, "train_batch_size", batch, what, name)
    stage = zero.setdefault("stage", 0)  # DeepSpeed's own default
    for path, value in _values(config):
        if value == "auto" and not (path[0] == "zero_optimization" and path[-1] in _AUTO_BY_WIDTH):
            raise ValueError(f"{name}: no flag fills {'.'.join(path)} 'auto'; write a value, or delete the entry")
    if type(stage) is not int or stage not in range(4):
        raise ValueError(f"{name}: zero_optimization.stage must be 0, 1, 2 or 3; got {json.dumps(stage)}")
    gathers = "stage3_gather_16bit_weights_on_model_save"
    others = {"gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save"}  # its other names
    if stage == 3 and not others & zero.keys() and zero.get(gathers, "auto") == "auto":
        zero[gathers] = True  # else transformers saves the whole engine in place of the head, and then once more
    if args.fp16 and stage == 0:  # its optimizer divides gradients by a scale that the loss never had
        raise ValueError(
            f"{name}: with --fp16 DeepSpeed scales the loss in stages 1 to 3 only; got stage 0; take "
            "configs/deepspeed/zero1.json, or leave --deepspeed out"
        )
    offload = (zero.get("offload_optimizer") or {}).get("device", "none")
    if offload != "none" and "adam" not in str(args.optim):
        raise ValueError(
            f"{name}: offload_optimizer runs DeepSpeed's Adam whatever --optim says; got --optim {args.optim}; leave "
            "one of the two out"
        )
    check_entries(config, name)
    return config, lines


def read_zero_config(given: str | dict[str, Any]) -> dict[str, Any]:
    """The configuration as it was written; ValueError with a sentence where it cannot be read."""
    if isinstance(given, dict):
        return json.loads(json.dumps(given))
    try:
        text = given if given.startswith("{") else Path(given).read_text(encoding="utf-8")
        config = json.loads(text, object_pairs_hook=_without_repeats)
    except OSError as error:
        raise ValueError(
            f"--deepspeed {given} cannot be read ({error.strerror}); name a JSON file such as "
            "configs/deepspeed/zero2.json"
        ) from None
    except ValueError as error:
        raise ValueError(f"--deepspeed {given} must be JSON with every key once: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"--deepspeed {given} must be a JSON object; got {type(config).__name__}")
    return config


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"{name} stands in it twice")
    return dict(pairs)


def _mapping(config: dict[str, Any], key: str, example: str, name: str) -> dict[str, Any]:
    """What the entry holds, an empty mapping where it is missing; ValueError if it is no mapping."""
    value = config.setdefault(key, {})
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {key} must be a mapping such as {example}; got {json.dumps(value)}")
    return value


def _settle(config: dict[str, Any], entry: str, value: Any, flag: str, name: str) -> None:
    """Fill the entry, `a` or `a.b`, with the flag's value where it is missing or `auto`; ValueError if it differs."""
    *parents, key = entry.split(".")
    for parent in parents:
        config = _mapping(config, parent, '{"enabled": true}', name)
    if config.get(key, "auto") == "auto":
        config[key] = value
    elif config[key] != value:
        raise ValueError(
            f'{name}: {entry} {json.dumps(config[key])} contradicts {flag}, {json.dumps(value)}; write "auto" in the '
            "file, or give the flag the same value"
        )


def _values(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(config, dict):
        for key, value in config.items():
            yield from _values(value, (*path, key))
    else:
        yield path, config


def check_launcher(args: Any, environment: Mapping[str, str] = os.environ) -> None:
    """ValueError for settings of accelerate's launcher or its configuration that the flags do not have."""
    wanted = "fp16" if args.fp16 else "bf16" if args.bf16 else "no"
    found = environment.get("ACCELERATE_MIXED_PRECISION", "no").lower()
    if found not in ("no", wanted):
        raise ValueError(
            f"accelerate's configuration asks for mixed precision {found} and the flags for {wanted}; pass --bf16 or "
            "--fp16 to the trainer, or start accelerate launch with --mixed_precision no"
        )
    if environment.get("ACCELERATE_DYNAMO_BACKEND", "no").lower() != "no" and not args.torch_compile:
        raise ValueError(
            f"accelerate's configuration compiles ({environment['ACCELERATE_DYNAMO_BACKEND']}) and the flags do not; "
            "pass --torch_compile true to the trainer, or start accelerate launch with --dynamo_backend no"
        )
    ours = {"FSDP": "USE_FSDP", "Megatron-LM": "USE_MEGATRON_LM", "parallelism": "USE_PARALLELISM_CONFIG"}
    ours["DeepSpeed"] = "CONFIG_DS_FIELDS"  # set by its launcher only; a trainer sets USE_DEEPSPEED itself
    for what, variable in ours.items():
        if environment.get(f"ACCELERATE_{variable}", "false").lower() not in ("false", "0", "no"):
            raise ValueError(
                f"accelerate's configuration turns {what} on, which the trainer's flags decide: start accelerate "
                "launch without it, and pass --deepspeed FILE to the trainer"
            )


def free_buffers_at_the_end(folder: Path = Path("/dev/shm")) -> None:
    """Take the names off the shared memory of DeepSpeed's processes on a CPU: it is freed as they end, however they do.

    DeepSpeed leaves 66 MiB of each process there until the machine starts anew. Every process calls this after the
    group has started, for until then the others open the memory by its name.
    """
    dist.barrier()
    group = "_".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
    (folder / f"deepspeed_allreduce_buffer_{os.getuid()}_{group}_{dist.get_rank()}").unlink(missing_ok=True)


def check_build_locks(pause: float = 2.0) -> None:
    """ValueError for the lock of a build of DeepSpeed's operators that was killed: later runs would wait for it.

    A line says so where a build is going on.
    """
    for lock, builders in build_locks(pause).items():
        age = (time.time() - lock.stat().st_mtime) / 60
        if builders is None:
            raise ValueError(
                f"{lock} is {age:.0f} minutes old and no compiler works there: a build of DeepSpeed's operators was "
                "killed, and runs would wait for it forever; delete the file, unless another machine builds there"
            )
        if os.environ.get("RANK", "0") == "0":
            at_work = f" by {', '.join(builders)}" if builders else ""
            print(f"waiting for a build of DeepSpeed's operators{at_work} ({lock})", flush=True)


def build_locks(pause: float = 2.0) -> dict[Path, list[str] | None]:
    """Each lock of a build of DeepSpeed's operators, with the programs that work there; None for a killed build's.

    Builds run in the folder of their lock. Where there is no /proc to tell, those of more than 15 minutes were killed.
    """
    locks: dict[Path, list[str] | None] = {}
    for lock in _builds_folder().glob("**/lock") if builds_lock_by_a_file() else ():
        if not (builders := _working_in(lock.parent)):
            time.sleep(pause)  # a build has its lock for a moment before and after the compiler runs
            builders = _working_in(lock.parent)
        if lock.is_file():
            killed = builders == [] or (builders is None and time.time() - lock.stat().st_mtime > 900)
            locks[lock] = None if killed else builders or []
    return locks


def _builds_folder() -> Path:
    """Where the installed torch builds operators: a folder for this Python and accelerator, if none is named."""
    if named := os.environ.get("TORCH_EXTENSIONS_DIR"):
        return Path(named)
    from torch.utils.cpp_extension import get_default_build_root  # takes a moment

    versions = {"rocm": torch.version.hip, "cu": torch.version.cuda}
    accelerator = next((f"{name}{one.replace('.', '')}" for name, one in versions.items() if one), "cpu")
    python = f"py{sys.version_info.major}{sys.version_info.minor}{getattr(sys, 'abiflags', '')}"
    return Path(get_default_build_root()) / f"{python}_{accelerator}"


def _working_in(folder: Path) -> list[str] | None:
    """The programs whose working folder this is, None where the system does not tell."""
    if not Path("/proc/self/cwd").exists():
        return None
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended, or is another user's
            if (process / "cwd").resolve() == folder.resolve():
                found.append(f"{(process / 'comm').read_text().strip()} ({process.name})")
    return found
