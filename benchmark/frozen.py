"""Do today's scripts compute what the reported runs computed? To the bit, or it says so.

    python benchmark/frozen.py                        # some minutes
    python benchmark/frozen.py --results FOLDER       # of other results

Every reported CSV names the commit and the command that it comes from. Each such script is run
twice with these options, but only for some iterations of Hopper or Pong: as it was at that commit,
and as it is here. All that the two log, but for their speed, must be the same. A + after a commit
says that its tree had changes of its own; it is compared without them.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tyro
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

ROOT = Path(__file__).resolve().parent.parent
MUJOCO = "--env-id Hopper-v4 --eval-episodes 1 --no-compile --total-timesteps"
ATARI = "--env-id Pong --eval-episodes 1 --total-timesteps"
DEPENDS_ON_THE_RUN = ["--env-id", "--seed", "--total-timesteps"]


@dataclass
class Args:
    results: Path = ROOT / "benchmark" / "results" / "reported"  # folders of CSV files
    hopper_steps: int = 20_480  # of each run: ten batches
    pong_steps: int = 12_288  # three


def reported(results):
    """(commit, script, flags) of all runs, once each."""
    found = set()
    for path in results.glob("*/*.csv"):
        command, commit, *_ = path.read_text().splitlines()
        if not commit.startswith("# commit: "):  # of a library, which is not here
            continue
        words = shlex.split(command)
        start = next(i for i, word in enumerate(words) if word.endswith(".py"))
        script, *options = words[start:]
        for option in DEPENDS_ON_THE_RUN:
            if option in options:
                at = options.index(option)
                del options[at : at + 2]
        found.add((commit.removeprefix("# commit: ").rstrip("+"), script, shlex.join(options)))
    return sorted(found)


def logged(script, options, tree):
    """{tag: [(step, value), ...]} of a short run of this script, as it is in the tree."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(tree / script), *shlex.split(options)]
        settings = {"cwd": folder, "env": os.environ | {"OMP_NUM_THREADS": "1"}}
        done = subprocess.run(command, capture_output=True, text=True, **settings)
        if done.returncode:
            sys.exit(f"{shlex.join(command)}:\n{done.stderr}")
        (run,) = Path(folder).glob("runs/*")
        events = EventAccumulator(str(run), {"scalars": 0})
        events.Reload()
        tags = set(events.Tags()["scalars"]) - {"charts/SPS"}
        return {tag: [(x.step, x.value) for x in events.Scalars(tag)] for tag in tags}


def main():
    args = tyro.cli(Args, description=__doc__)
    here = {}
    all_the_same = True
    for commit, script, flags in reported(args.results):
        short = f"{MUJOCO} {args.hopper_steps}"
        if "atari" in script:
            short = f"{ATARI} {args.pong_steps}"
        options = f"{short} {flags}"
        if (script, options) not in here:
            here[script, options] = logged(script, options, ROOT)
        with tempfile.TemporaryDirectory() as tree:
            git = ["git", "-C", str(ROOT), "archive", commit, "*.py"]
            archive = subprocess.run(git, capture_output=True, check=True).stdout
            subprocess.run(["tar", "-x", "-C", tree], input=archive, check=True)
            before = logged(script, options, Path(tree))
        same = before == here[script, options]
        all_the_same &= same
        numbers = sum(map(len, before.values()))
        verdict = f"the same {numbers} numbers" if same else "OTHER NUMBERS"
        print(f"{commit} {script} {flags}: {verdict}", flush=True)
    sys.exit(not all_the_same)


if __name__ == "__main__":
    main()
