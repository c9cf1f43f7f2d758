"""Run the benchmark's plan, a job at a time or many at once; stop it and start it again at will.

    python benchmark/run.py linf reverse_kl             # these groups of the plan, two jobs at once
    python benchmark/run.py spu --jobs 8                # eight at once, one core each
    python benchmark/run.py tuning/spu_1 --seeds 102    # another seed than the plan's
    python benchmark/run.py spu --dry-run               # only print the commands, one per line
    python benchmark/run.py spu --dry-run | xargs -P 8 -I{} sh -c "{}"   # let xargs run them

A job is a script, an environment, a seed and flags. What it leaves is
benchmark/results/GROUP/ENV__SEED.csv: the mean return of the last 100 episodes after every
iteration, under a header with command, versions and wall time. Jobs whose file is there are
skipped; one that was cut off goes on from its last iteration, under runs/benchmark/.
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
RESULTS = ROOT / "benchmark" / "results"
WORK = ROOT / "runs" / "benchmark"
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # a core for each job
MUJOCO = """
Ant HalfCheetah Hopper Humanoid HumanoidStandup InvertedDoublePendulum InvertedPendulum Reacher
Swimmer Walker2d
"""
MUJOCO = [f"{name}-v4" for name in MUJOCO.split()]
THREE = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"]
FIVE = [*THREE, "Swimmer-v4", "Reacher-v4"]
TUNING = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Humanoid-v4", "Reacher-v4"]
ATARI = """
AirRaid Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk
Bowling Boxing Breakout Carnival Centipede ChopperCommand CrazyClimber DemonAttack DoubleDunk
ElevatorAction Enduro FishingDerby Freeway Frostbite Gopher Gravitar Hero IceHockey Jamesbond
JourneyEscape Kangaroo Krull KungFuMaster MontezumaRevenge MsPacman NameThisGame Phoenix Pitfall
Pong Pooyan PrivateEye Qbert Riverraid RoadRunner Robotank Seaquest Skiing Solaris SpaceInvaders
StarGunner Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor YarsRevenge Zaxxon
""".split()
PAPER = (
    "--lam 1.3 --epsilon 0.05 --delta 0.0416666667 --max-epochs 30 --joint-stopping "
    "--initial-log-std 0 --no-scale-actions --no-bootstrap-truncation"
)
MILLIONS_3 = "--total-timesteps 3000000"
MILLION = "--total-timesteps 1000000"

# group: (script, environments, seeds, flags). The searches of the first version (tune_*, detail_*,
# *_first and tuning/screen_* in results/) are not in it any more, as their options are gone: a CSV
# has the command that made it, and `git show c58677d:benchmark/run.py` all those groups.
PLAN = {
    "spu": ("spu_continuous", MUJOCO, [1, 2, 3], ""),
    "ppo": ("benchmark/ppo_continuous", MUJOCO, [1, 2, 3], ""),
    "sb3_ppo": ("benchmark/peers", MUJOCO, [1, 2], "--algorithm ppo"),
    "trpo": ("benchmark/peers", MUJOCO, [1, 2], "--algorithm trpo"),
    "spu_paper": ("spu_continuous", MUJOCO, [1, 2], PAPER),
    "spu_30_epochs": ("spu_continuous", MUJOCO, [1, 2], "--max-epochs 30"),
    "no_kl_term": ("spu_continuous", THREE, [1, 2], "--max-epochs 30 --no-kl-term"),
    "no_dynamic_stopping": ("spu_continuous", THREE, [1, 2], "--max-epochs 30 --delta inf"),
    "no_per_state_acceptance": ("spu_continuous", THREE, [1, 2], "--max-epochs 30 --epsilon inf"),
    "linf": ("spu_linf", FIVE, [1, 2], ""),
    "reverse_kl": ("spu_reverse_kl", FIVE, [1, 2], ""),
    "spu_3m": ("spu_continuous", ["Walker2d-v4"], [1, 2], MILLIONS_3),
    "trpo_3m": ("benchmark/peers", ["Walker2d-v4"], [1, 2], f"--algorithm trpo {MILLIONS_3}"),
    "atari": ("spu_atari", ["Pong", "Breakout"], [1], MILLION),  # a pilot
    "atari_ppo": ("benchmark/peers", ["Pong", "Breakout"], [1], f"--algorithm ppo {MILLION}"),
}
# Part 2 of PROTOCOL.md: six settings of each algorithm's own constants. Seeds from 101 on are for
# tuning, and no result.
SETTINGS = {
    ("spu", "spu_continuous", "--delta {} --epsilon {} --lam {} --max-epochs {}"): [
        (0.02, 0.03, 1.3, 10),
        (0.01, 0.015, 1.3, 10),
        (0.03, 0.045, 1.3, 10),
        (0.02, 0.03, 0.8, 10),
        (0.02, 0.03, 2.0, 10),
        (0.02, 0.03, 1.3, 20),
    ],
    ("ppo", "benchmark/ppo_continuous", "--clip {} --max-epochs {} --target-kl {}"): [
        (0.2, 10, "inf"),
        (0.1, 10, "inf"),
        (0.3, 10, "inf"),
        (0.2, 4, "inf"),
        (0.2, 10, 0.01),
        (0.2, 10, 0.03),
    ],
    ("trpo", "benchmark/trpo_continuous", "--delta {} --max-epochs {}"): [
        (0.01, 10),
        (0.005, 10),
        (0.02, 10),
        (0.03, 10),
        (0.01, 5),
        (0.01, 20),
    ],
}
for (name, script, flags), settings in SETTINGS.items():
    for number, constants in enumerate(settings, start=1):
        PLAN[f"tuning/{name}_{number}"] = (script, TUNING, [101], flags.format(*constants))
# The paper's sensitivity analysis: random vectors from its ranges for four constants.
for number, vector in enumerate(np.random.default_rng(0).random((8, 4)), start=1):
    delta, epsilon, lam, epochs = np.array([0.05, 0.01, 1.0, 5]) + vector * [0.02, 0.06, 0.2, 26]
    flags = f"--delta {delta:.4f} --epsilon {epsilon:.4f} --lam {lam:.3f}"
    flags += f" --max-epochs {int(epochs)}"
    PLAN[f"sensitivity_{number}"] = ("spu_continuous", ["Hopper-v4", "Walker2d-v4"], [1], flags)
# And an Atari experiment of its size, 60 games x 20 seeds x 10 million steps: about 1400 days of a
# core. Not run.
PLAN["atari_paper"] = ("spu_atari", ATARI, list(range(1, 21)), "")

Groups = tyro.conf.Positional[list[str]]


@dataclass
class Args:
    groups: Groups = field(default_factory=lambda: list(PLAN))  # of the plan
    jobs: int = 2  # at once, one core each
    dry_run: bool = False  # print one command per line for each job that is left, and run nothing
    seeds: list[int] | None = None  # these instead of the plan's
    only: str | None = None  # a single job of one group, as ENV__SEED (what --dry-run prints)


def left(groups, seeds=None, only=None):
    """The jobs (group, environment, seed) that have no result yet."""
    jobs = []
    for group in groups:
        _, envs, plan_seeds, _ = PLAN[group]
        if only:
            env, seed = only.rsplit("__", 1)
            jobs.append((group, env, int(seed)))
        else:
            jobs += [(group, env, seed) for seed in seeds or plan_seeds for env in envs]
    return [job for job in jobs if not result(*job).exists()]


def result(group, env, seed):
    return RESULTS / group / f"{env}__{seed}.csv"


def command(group, env, seed):
    script, _, _, flags = PLAN[group]
    return [f"{script}.py", "--env-id", env, "--seed", str(seed), *shlex.split(flags)]


def newest_agent(folder):
    """The agent.pt of the last run under this folder that got through an iteration, or None."""
    return max(folder.glob("runs/*/agent.pt"), key=os.path.getmtime, default=None)


def is_finished(agent):
    """Whether a run whose agent.pt this is has all its iterations."""
    import torch

    saved = torch.load(agent, weights_only=True)
    batch = saved["args"]["num_steps"] * saved["args"].get("num_envs", 1)
    return saved["iterations_done"] == saved["args"]["total_timesteps"] // batch


def run(group, env, seed):
    """Train, or go on training, in a folder of the job's own; then keep the curve. Returns what
    went wrong."""
    start = time.time()
    folder = WORK / group / f"{env}__{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    script, *options = command(group, env, seed)
    agent = newest_agent(folder)
    if script == "benchmark/peers.py":  # it cannot be resumed, and writes its curve itself
        options += ["--output", str(result(group, env, seed))]
    elif agent:
        options = ["--env-id", env, "--resume", str(agent.parent)]
    if agent is None or not is_finished(agent):
        process = [sys.executable, str(ROOT / script), *options]
        settings = {"cwd": folder, "env": os.environ | ONE_THREAD}
        done = subprocess.run(process, capture_output=True, text=True, **settings)
        if done.returncode:
            return f"{group} {env} {seed}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}"
    agent = newest_agent(folder)
    if agent:
        keep(group, env, seed, agent.parent, time.time() - start)


def keep(group, env, seed, run_dir, wall_time):
    """Write the learning curve of a finished run as CSV: never half a file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir), {"scalars": 0})
    accumulator.Reload()
    episodes = accumulator.Scalars("charts/episodic_return")
    returns = [event.value for event in episodes]
    iterations = [event.step for event in accumulator.Scalars("charts/SPS")]
    # How many episodes had ended by then.
    counts = np.searchsorted([event.step for event in episodes], iterations, "right")
    summary = f"# seconds: {wall_time:.0f}, episodes: {len(returns)}"
    for tag in ("spu/kl_mean", "spu/epochs_used"):
        if tag in accumulator.Tags()["scalars"]:
            x = [event.value for event in accumulator.Scalars(tag)]
            summary += f", mean of {tag}: {np.mean(x):.3g}, median {np.median(x):.3g}"
            summary += f", most {max(x):.3g}"
    names = ("torch", "gymnasium", "mujoco", "numpy")
    packages = ", ".join(f"{name} {version(name)}" for name in names)
    path = result(group, env, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.tmp", "w", newline="") as file:
        file.write(f"# command: python {shlex.join(command(group, env, seed))}\n")
        file.write(f"# versions: {packages}\n")
        file.write(f"{summary}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "return"])
        for step, count in zip(iterations, counts):
            if count:
                last = returns[max(0, count - 100) : count]
                writer.writerow([step, round(float(np.mean(last)), 2)])
    os.replace(f"{path}.tmp", path)


def main():
    args = tyro.cli(Args, description=__doc__)
    if unknown := set(args.groups) - set(PLAN):
        plan = ", ".join(PLAN)
        sys.exit(f"There is no group {', '.join(sorted(unknown))}: the plan has {plan}.")
    jobs = left(args.groups, args.seeds, args.only)
    if args.dry_run:
        for group, env, seed in jobs:
            print(f"python benchmark/run.py {group} --only {env}__{seed}")
        return
    failures = []
    with ThreadPoolExecutor(args.jobs) as pool, tqdm(total=len(jobs), unit="job") as bar:
        for failure in pool.map(lambda job: run(*job), jobs):
            bar.update()
            if failure:
                failures.append(failure)
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
