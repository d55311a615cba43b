"""Small training runs from the command line: in this process, on two, or by two launchers that pose as nodes."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from draft_heads.train.command import trainer_script
from tests.running import ROOT, free_port, run_script

TARGET = str(ROOT / "tests" / "tiny_target")


SMALL = shlex.split(
    "--anchors 6 --max_steps 6 --logging_steps 1 --save_steps 2 "
    "--eval_strategy no --held_out 8 --simulate_rows 2 --per_device_eval_batch_size 4 --warmup_steps 2 --threads 1"
)


FEW = {
    "ctc": ("--frames", "4", "--labels", "2"),
    "chimera": ("--heads", "2"),
    "medusa": ("--heads", "2"),
    "hydra": ("--heads", "2", "--dropout", "0"),
    "eagle3": ("--passes", "3"),
}


def command(dataset, output, *extra, batch=4, kind="ctc"):
    return [
        *trainer_script(kind), "--target", TARGET, "--dataset", dataset, "--output_dir", str(output),
        *SMALL, *FEW.get(kind, ()), *(["--per_device_train_batch_size", str(batch)] if batch else []), *extra,
    ]  # fmt: skip


def without(words, *flags):
    """A command without flags that have one value."""
    places = {words.index(flag) + i for flag in flags for i in (0, 1)}
    return [word for place, word in enumerate(words) if place not in places]


def run(*arguments, **options):
    return run_script(*command(*arguments, **options))


def launch(*arguments, **options):
    """As `run`, on two processes, whose shared memory is freed at the end."""
    port = free_port()
    deepspeed = [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", "2", "--master_port", port]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*deepspeed, *command(*arguments, **options)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert not list(Path("/dev/shm").glob(f"deepspeed_*_{port}_*"))
    return done.returncode, done.stdout + done.stderr


def launch_two_nodes(hostfile, *arguments, **options):
    """As `launch`, by two launchers that pose as two nodes: (status, all that was printed) of each."""
    hostfile.write_text("node-a slots=1\nnode-b slots=1\n")
    deepspeed = [str(Path(sys.executable).parent / "deepspeed"), "--hostfile", str(hostfile), "--no_ssh"]
    deepspeed += ["--master_addr", "127.0.0.1", "--master_port", free_port()]
    nodes = [
        subprocess.Popen(
            [*deepspeed, "--node_rank", str(rank), *command(*arguments, **options)],
            cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    told = [node.communicate()[0] for node in nodes]
    return [(node.returncode, text) for node, text in zip(nodes, told)]


def losses(output, name="loss"):
    newest = max(Path(output).glob("checkpoint-*"), key=lambda path: int(path.name.split("-")[1]))
    history = json.loads((newest / "trainer_state.json").read_text())["log_history"]
    found = [entry[name] for entry in history if name in entry]
    assert found, name
    return found
