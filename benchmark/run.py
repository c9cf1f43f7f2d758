"""Run the benchmark's plan, a job at a time or many at once; stop it and start it again at will.

    python benchmark/run.py linf reverse_kl                      # these groups of the plan, two jobs at once
    python benchmark/run.py spu --jobs 8                         # eight at once, one core each
    python benchmark/run.py spu --dry-run                        # only print the commands, one per line
    python benchmark/run.py spu --dry-run | xargs -P 8 -I{} sh -c "{}"        # and let something else run them

A job is a script, an environment, a seed and flags. What it leaves is benchmark/results/GROUP/ENV__SEED.csv: the mean
return of the last 100 episodes after every iteration, under a header with command, versions and wall time. Jobs whose
file is there are skipped; one that was cut off is resumed from its checkpoint, under runs/benchmark/.
"""

import csv
import os
import shlex
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path

import numpy as np
import tyro
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS, WORK = ROOT / "benchmark" / "results", ROOT / "runs" / "benchmark"
MUJOCO = ["Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum"]
MUJOCO = [f"{name}-v4" for name in (*MUJOCO, "Reacher", "Swimmer", "Walker2d")]
THREE = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"]

# group: (script, environments, seeds, flags). Seeds from 101 on are for tuning; tune_* is never reported.
PLAN = {
    "spu": ("spu_continuous", MUJOCO, [1, 2, 3], ""),
    "linf": ("spu_linf", THREE, [1, 2], ""),
    "reverse_kl": ("spu_reverse_kl", THREE, [1, 2], ""),
    "tune_linf_wide": (
        "spu_linf",
        THREE,
        [1],
        "--lam 0.5 --epsilon 1 --max-epochs 30",
    ),  # once the default; see the README
    "tune_linf_ratios": (
        "spu_linf",
        THREE,
        [101, 102],
        "--lam 1 --epsilon 0.5 --max-epochs 30 --total-timesteps 300000",
    ),
    "tune_linf_probabilities": (
        "spu_linf",
        THREE,
        [101, 102],
        "--lam 1 --epsilon 0.5 --max-epochs 30 --total-timesteps 300000 --probabilities",
    ),
}


@dataclass
class Args:
    groups: tyro.conf.Positional[list[str]] = field(default_factory=lambda: list(PLAN))  # of the plan
    jobs: int = 2  # at once, one core each
    dry_run: bool = False  # print one command per line for each job that is left, and run nothing
    only: str | None = None  # a single job of one group, as ENV__SEED (what --dry-run prints)


def left(groups):
    """The jobs that have no result yet."""
    jobs = [(group, env, seed) for group in groups for env in PLAN[group][1] for seed in PLAN[group][2]]
    return [job for job in jobs if not result(*job).exists()]


def result(group, env, seed):
    return RESULTS / group / f"{env}__{seed}.csv"


def command(group, env, seed):
    script, _, _, flags = PLAN[group]
    return [f"{script}.py", "--env-id", env, "--seed", str(seed), *shlex.split(flags)]


def run(group, env, seed):
    """Train, or go on training, in a folder of the job's own; then keep the curve."""
    folder = WORK / group / f"{env}__{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    script, *options = command(group, env, seed)
    cut_off = sorted(folder.glob("runs/*/checkpoint.pt"), key=os.path.getmtime)
    if cut_off and not (cut_off[-1].parent / "agent.pt").exists():
        options = ["--resume", str(cut_off[-1].parent)]
    start = time.time()
    if not (cut_off and (cut_off[-1].parent / "agent.pt").exists()):
        done = subprocess.run(
            [sys.executable, str(ROOT / script), *options], cwd=folder, capture_output=True, text=True
        )
        if done.returncode:
            return f"{group} {env} {seed}: {done.stderr.strip().splitlines()[-1]}"
    (run_dir,) = {path.parent for path in folder.glob("runs/*/agent.pt")}
    keep(group, env, seed, run_dir, time.time() - start)


def keep(group, env, seed, run_dir, wall_time):
    """Write the learning curve of a finished run as CSV: never half a file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir), {"scalars": 0})
    accumulator.Reload()
    episodes = [(event.step, event.value) for event in accumulator.Scalars("charts/episodic_return")]
    iterations = [event.step for event in accumulator.Scalars("spu/kl_mean")]
    returns, counts = (
        [value for _, value in episodes],
        np.searchsorted([step for step, _ in episodes], iterations, "right"),
    )
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "gymnasium", "mujoco", "numpy"))
    path = result(group, env, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.tmp", "w", newline="") as file:
        file.write(f"# command: python {shlex.join(command(group, env, seed))}\n# versions: {packages}\n")
        file.write(f"# seconds: {wall_time:.0f}, episodes: {len(returns)}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "return"])
        for step, count in zip(iterations, counts):
            if count:
                writer.writerow([step, round(float(np.mean(returns[max(0, count - 100) : count])), 2)])
    os.replace(f"{path}.tmp", path)


def main():
    args = tyro.cli(Args, description=__doc__)
    if unknown := set(args.groups) - set(PLAN):
        sys.exit(f"There is no group {', '.join(sorted(unknown))}: the plan has {', '.join(PLAN)}.")
    jobs = [job for job in left(args.groups) if args.only in (None, f"{job[1]}__{job[2]}")]
    if args.dry_run:
        for group, env, seed in jobs:
            print(f"python benchmark/run.py {group} --only {env}__{seed}")
        return
    failures = []
    with ThreadPoolExecutor(args.jobs) as pool, tqdm(total=len(jobs), unit="job") as bar:
        for failure in pool.map(lambda job: run(*job), jobs):
            bar.update()
            failures += [failure] if failure else []
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
