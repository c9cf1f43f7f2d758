"""Run the tuning jobs of tune_atari.py, one at a time on one core; stop and start it at will.

    python benchmark/run_atari_tuning.py                                 # all jobs, in order
    python benchmark/run_atari_tuning.py pong_ppo_follow pong_spu_4_epochs
    python benchmark/run_atari_tuning.py --partial       # run nothing, write what there is so far

A job has a folder of its own, runs/tuning/NAME/, and leaves results/NAME.csv: a row per iteration,
under a header with the command, the wall time and the first step at which the mean of the last 100
games was 18. A finished job is skipped, and one that was cut off goes on from its last checkpoint.
With --partial the file of an unfinished job says so in its header. Two of these can run side by
side, one for each core: a job that another one is running is skipped.
"""

import argparse
import csv
import fcntl
import os
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

ROOT = Path(__file__).resolve().parent.parent
WORK, RESULTS = ROOT / "runs" / "tuning", ROOT / "results"
SCRIPT, STEPS = "benchmark/tune_atari.py", 400_000
ONE_CORE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
UNFINISHED = "# unfinished"
ANNEAL = "--algorithm ppo --no-follow-region --learning-rate 2.5e-4"
REGION_02 = "--delta 0.02 --epsilon 0.06"

# name: (environment, seed, flags). Seeds from 101 on are for tuning: nothing here is a result.
JOBS = {
    "pong_spu_4_epochs": ("Pong", 101, ""),
    "breakout_spu_4_epochs": ("Breakout", 101, ""),
    "pong_spu_2_epochs": ("Pong", 101, "--max-epochs 2"),
    "pong_ppo_follow": ("Pong", 101, "--algorithm ppo"),
    "pong_ppo_anneal": ("Pong", 101, ANNEAL),
    "breakout_ppo_follow": ("Breakout", 101, "--algorithm ppo"),
    "pong_spu_delta_02": ("Pong", 101, REGION_02),
    "pong_spu_minibatch_512": ("Pong", 101, "--minibatch-size 512"),
    "breakout_spu_delta_02": ("Breakout", 101, REGION_02),
    "breakout_ppo_anneal": ("Breakout", 101, ANNEAL),
    "pong_ppo_minibatch_512": ("Pong", 101, f"--algorithm ppo {REGION_02} --minibatch-size 512"),
    "pong_ppo_clip_02": ("Pong", 101, f"--algorithm ppo {REGION_02} --clip 0.2"),
    "pong_ppo_delta_02": ("Pong", 101, f"--algorithm ppo {REGION_02}"),
}


def command(name):
    env, seed, flags = JOBS[name]
    options = ["--env-id", env, "--seed", str(seed), "--total-timesteps", str(STEPS)]
    return [SCRIPT, *options, *shlex.split(flags)]


def is_finished(name):
    """Whether the results of the whole run are there."""
    path = RESULTS / f"{name}.csv"
    return path.exists() and UNFINISHED not in path.read_text()


def last_run(name, file):
    """The job's newest run folder that has such a file, or None."""
    found = sorted((WORK / name).glob(f"runs/*/{file}"), key=os.path.getmtime)
    return found[-1].parent if found else None


def run(name):
    """Train, or go on training. Returns the exit code, or None if somebody else is at it."""
    folder = WORK / name
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock, open(folder / "output.txt", "a") as output:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        if last_run(name, "agent.pt"):  # all done but the results
            return 0
        script, *options = command(name)
        if run_dir := last_run(name, "checkpoint.pt"):
            options = ["--resume", str(run_dir.relative_to(folder))]
        process = [sys.executable, str(ROOT / script), *options]
        where = {"cwd": folder, "stdout": output, "stderr": output, "env": os.environ | ONE_CORE}
        # The training inherits the lock: it holds as long as either of us lives
        return subprocess.run(process, **where, pass_fds=[lock.fileno()]).returncode


def wall_time(run_dir):
    """Seconds of training over all sittings, and how many there were. Each sitting has an event
    file of its own, from its start to its last iteration: neither the evaluation at the end is in
    it, nor what a kill left unwritten."""
    seconds, files = 0.0, sorted(run_dir.glob("events.out.tfevents.*"))
    for path in files:
        times = [event.wall_time for event in EventFileLoader(str(path)).Load()]
        seconds += max(times) - min(times) if times else 0.0
    return seconds, len(files)


def write_results(name, run_dir):
    """The learning curve as CSV, never half a file. Returns a sentence about it."""
    accumulator = EventAccumulator(str(run_dir), {"scalars": 0})
    accumulator.Reload()
    tags = accumulator.Tags()["scalars"]

    def scalars(tag):
        events = accumulator.Scalars(tag) if tag in tags else []
        return [(event.step, event.value) for event in events]

    if not scalars("spu/epochs_used"):
        return "no iteration yet"
    games = scalars("charts/episodic_return")
    steps, returns = [step for step, _ in games], [value for _, value in games]

    def mean_return(count):  # of the last 100 of the first `count` games
        return float(np.mean(returns[max(0, count - 100) : count])) if count else float("nan")

    full = range(100, len(returns) + 1)  # nothing is said before 100 games
    reached = next((steps[count - 1] for count in full if mean_return(count) >= 18), "never")
    seconds, sittings = wall_time(run_dir)
    columns = ("charts/SPS", "spu/kl_mean", "charts/learning_rate", "spu/epochs_used")
    # An iteration that was cut off while it was written lacks the last of them: zip leaves it out
    iterations = list(zip(*(scalars(tag) for tag in columns)))
    last_step = iterations[-1][0][0]
    last_return = mean_return(np.searchsorted(steps, last_step, "right"))
    packages = [f"{package} {version(package)}" for package in ("torch", "ale-py", "numpy")]
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.csv"
    with open(f"{path}.tmp", "w", newline="") as file:
        file.write(f"# command: OMP_NUM_THREADS=1 python {shlex.join(command(name))}\n")
        file.write(f"# versions: {', '.join(packages)}\n")
        file.write(f"# seconds: {seconds:.0f}, sittings: {sittings}, games: {len(games)}\n")
        file.write(f"# first step with a mean of 18 over the last 100 games: {reached}\n")
        if not (run_dir / "agent.pt").exists():
            file.write(f"{UNFINISHED}: {last_step} of {STEPS} steps\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "return", "kl", "learning_rate", "epochs"])
        for (step, _), (_, kl), (_, rate), (_, epochs) in iterations:
            score = mean_return(np.searchsorted(steps, step, "right"))
            writer.writerow([step, f"{score:.2f}", f"{kl:.6f}", f"{rate:.4g}", int(epochs)])
    os.replace(f"{path}.tmp", path)
    return f"{last_return:.1f} after {last_step} steps and {seconds:.0f} s; 18 reached: {reached}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(JOBS)}")
    parser.add_argument("--partial", action="store_true", help="write what there is, run nothing")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in JOBS]:
        parser.error(f"there is no job {', '.join(unknown)}: the jobs are {', '.join(JOBS)}")
    # Ctrl-C reaches the training too: it stops after its iteration, with a checkpoint
    signal.signal(signal.SIGINT, lambda *_: None)
    failed = False
    for name in args.names or JOBS:
        if is_finished(name):
            print(f"{name}: finished before", flush=True)
            continue
        if args.partial:
            run_dir = last_run(name, "checkpoint.pt")
            print(f"{name}: {write_results(name, run_dir) if run_dir else 'not begun'}", flush=True)
            continue
        print(f"{name}: python {shlex.join(command(name))}", flush=True)
        code = run(name)
        if code is None:
            print(f"{name}: another process is at it", flush=True)
        elif code == 130:
            sys.exit(f"{name}: stopped; start this again to go on")
        elif code:
            failed = True
            print(f"{name}: failed with {code}, see {WORK / name / 'output.txt'}", flush=True)
        else:
            print(f"{name}: {write_results(name, last_run(name, 'agent.pt'))}", flush=True)
    sys.exit(failed)


if __name__ == "__main__":
    main()
