"""What the tests share: run a script as a user does, and read what it wrote."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

torch.set_num_threads(1)
# A shell in the background, and nohup, make a program and its children ignore these.
for ignored in (signal.SIGINT, signal.SIGHUP):
    if signal.getsignal(ignored) == signal.SIG_IGN:
        signal.signal(ignored, signal.SIG_DFL)
ROOT = Path(__file__).resolve().parent.parent
CONTINUOUS = [
    "spu_continuous",
    "spu_linf",
    "spu_reverse_kl",
]  # the scripts for continuous actions, which must all behave alike
QUICK = ["--no-compile", "--eval-episodes", "2"]  # most tests are about something else than speed


def command(script, *options):
    return [sys.executable, str(ROOT / f"{script}.py"), *map(str, options)]


def environment(**extra):
    quiet = {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "OMP_NUM_THREADS": "1",
    }  # a core for each test
    return os.environ | quiet | {"PYTHONPATH": str(ROOT / "tests")} | extra


def run(script, *options, cwd, code=0, **extra):
    """Run the script in the folder cwd and return what it printed; its exit code must be `code`."""
    done = subprocess.run(
        command(script, *options),
        cwd=cwd,
        env=environment(**extra),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def run_dir(cwd):
    """The only run folder under cwd."""
    (folder,) = (Path(cwd) / "runs").iterdir()
    return folder


def events(folder):
    """{tag: [(step, value), ...]} of all scalars, as TensorBoard shows them."""
    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    accumulator.Reload()
    return {
        tag: [(e.step, e.value) for e in accumulator.Scalars(tag)]
        for tag in accumulator.Tags()["scalars"]
    }


def values(folder, tag):
    return [value for _, value in events(folder)[tag]]


def without_speed(scalars):
    return {tag: points for tag, points in scalars.items() if tag != "charts/SPS"}


@pytest.fixture(params=CONTINUOUS)
def script(request):
    return request.param
