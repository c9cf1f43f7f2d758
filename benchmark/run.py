"""Run the benchmark's plan, a job at a time or many at once; stop it and start it again at will.

    python benchmark/run.py reported/spu reported/ppo      # these groups of the plan, two at once
    python benchmark/run.py reported/spu --jobs 8          # eight at once, one core each
    python benchmark/run.py tuning/spu_1 --seeds 102       # another seed than the plan's
    python benchmark/run.py reported/spu --dry-run         # only print the commands, one per line
    python benchmark/run.py reported/spu --dry-run | xargs -P 8 -I{} sh -c "{}"   # xargs runs them

A job is a script, an environment, a seed and flags. Seed 1 of all groups comes first, then seed 2,
so that wherever it stops the groups can be compared. What a job leaves is
benchmark/results/GROUP/ENV__SEED.csv: after every iteration the mean return of the last 100
episodes and the mean KL, under a header with command, commit, versions and time. Jobs whose file is
there are skipped; one that was cut off goes on from its last iteration, under runs/benchmark/, and
its header counts the sittings.
"""

import csv
import math
import os
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
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
# Their actions are from -1 to 1, so that the libraries act in the same units as the scripts.
OTHER_UNITS = ["Humanoid-v4", "HumanoidStandup-v4", "InvertedPendulum-v4"]
WITHIN_1 = [task for task in MUJOCO if task not in OTHER_UNITS]
TWO = ["Hopper-v4", "Walker2d-v4"]
LONG = ["HalfCheetah-v4", "Walker2d-v4"]
TUNING = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Humanoid-v4", "Reacher-v4"]
GAMES = ["Qbert", "SpaceInvaders", "BeamRider", "Enduro", "Seaquest"]
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
TARGET_KL = "--max-epochs 10 --value-epochs 10 --target-kl 0.03"
MILLIONS = "--total-timesteps {}000000"
SEEDS = list(range(1, 11))

# group: (script, environments, seeds, flags). The groups of the first version are not in it any
# more, as their options are gone: `git show c58677d:benchmark/run.py` has them.
PLAN = {
    "reported/spu": ("spu_continuous", MUJOCO, SEEDS, ""),
    "reported/ppo": ("benchmark/ppo_continuous", MUJOCO, SEEDS, ""),
    "reported/trpo": ("benchmark/trpo_continuous", MUJOCO, SEEDS, ""),
    "reported/ppo_target_kl": ("benchmark/ppo_continuous", MUJOCO, SEEDS[:3], TARGET_KL),
    "reported/linf": ("spu_linf", MUJOCO, SEEDS[:3], ""),
    "reported/reverse_kl": ("spu_reverse_kl", MUJOCO, SEEDS[:3], ""),
    "reported/spu_paper": ("spu_continuous", MUJOCO, SEEDS[:3], PAPER),
    "reported/no_kl_term": ("spu_continuous", TUNING, SEEDS[:3], "--no-kl-term"),
    "reported/no_delta": ("spu_continuous", TUNING, SEEDS[:3], "--delta inf"),
    "reported/no_epsilon": ("spu_continuous", TUNING, SEEDS[:3], "--epsilon inf"),
    "reported/joint_stopping": ("spu_continuous", TUNING, SEEDS[:3], "--joint-stopping"),
    "reported/spu_3m": ("spu_continuous", LONG, SEEDS[:2], MILLIONS.format(3)),
    "reported/trpo_3m": ("benchmark/trpo_continuous", LONG, SEEDS[:2], MILLIONS.format(3)),
    "reported/sb3_ppo": ("benchmark/peers", WITHIN_1, SEEDS[:2], "--algorithm ppo"),
    "reported/sb3_trpo": ("benchmark/peers", WITHIN_1, SEEDS[:2], "--algorithm trpo"),
    "reported/pong_spu": ("spu_atari", ["Pong"], SEEDS[:3], MILLIONS.format(1)),
    "reported/pong_ppo": ("benchmark/ppo_atari", ["Pong"], SEEDS[:3], MILLIONS.format(1)),
    "reported/breakout_spu": ("spu_atari", ["Breakout"], SEEDS[:1], MILLIONS.format(2)),
    "reported/breakout_ppo": ("benchmark/ppo_atari", ["Breakout"], SEEDS[:1], MILLIONS.format(2)),
    "reported/games_spu": ("spu_atari", GAMES, SEEDS[:1], MILLIONS.format(1)),
    "reported/games_ppo": ("benchmark/ppo_atari", GAMES, SEEDS[:1], MILLIONS.format(1)),
}
# Which of four changes makes Atari play? Each run is without one of them, or without two that need
# each other, to 450,000 steps.
WITHOUT = {
    "inputs": "--no-standardize-inputs",
    "inputs_and_step_size": "--no-standardize-inputs --no-adapt-lr --learning-rate 1e-4",
    "step_size": "--no-adapt-lr --learning-rate 1e-4",
    "games": "--num-envs 8 --num-steps 256 --minibatch-size 512",
    "region": "--delta 0.02 --epsilon 0.0154",
}
for name, flags in WITHOUT.items():
    flags = f"{flags} --total-timesteps 450000"
    PLAN[f"reported/pong_without_{name}"] = ("spu_atari", ["Pong"], SEEDS[:1], flags)
# Is our TRPO a TRPO? With the settings that peers.py gives sb3-contrib's, as far as it has them.
# Where TRPO's KL is a sum over the dimensions of the action, the library takes their mean: so what
# it calls 0.01, and its damping of 0.1, are as many times more here as there are dimensions.
DIMENSIONS = {
    1: ["InvertedDoublePendulum-v4"],
    2: ["Reacher-v4", "Swimmer-v4"],
    3: ["Hopper-v4"],
    6: ["HalfCheetah-v4", "Walker2d-v4"],
    8: ["Ant-v4"],
}
LIKE_SB3 = "--max-epochs 5 --learning-rate 1e-3 --no-anneal-lr --initial-log-std 0 --clip-actions"
for n, tasks in DIMENSIONS.items():
    flags = f"--delta {n / 100:g} --damping {n / 10:g} {LIKE_SB3}"
    PLAN[f"reported/trpo_check_{n}"] = ("benchmark/trpo_continuous", tasks, SEEDS[:2], flags)
# Two processes share Pong's batches.
PLAN["reported/pong_processes"] = ("spu_atari", ["Pong"], SEEDS[:3], "--total-timesteps 450000")
LAUNCHERS = {"reported/pong_processes": "-m torch.distributed.run --standalone --nproc-per-node 2"}
# Part 2 of PROTOCOL.md: six settings of each algorithm's own constants. Seeds from 101 on are for
# tuning, and no result.
PPO_EPOCHS = "--max-epochs {} --value-epochs {}"
SETTINGS = {
    ("spu", "spu_continuous", "--delta {} --epsilon {} --lam {} --max-epochs {}"): [
        (0.02, 0.03, 1.3, 10),
        (0.01, 0.015, 1.3, 10),
        (0.03, 0.045, 1.3, 10),
        (0.02, 0.03, 0.8, 10),
        (0.02, 0.03, 2.0, 10),
        (0.02, 0.03, 1.3, 20),
    ],
    ("ppo", "benchmark/ppo_continuous", f"--clip {{}} {PPO_EPOCHS} --target-kl {{}}"): [
        (0.2, 10, 10, "inf"),
        (0.1, 10, 10, "inf"),
        (0.3, 10, 10, "inf"),
        (0.2, 4, 4, "inf"),
        (0.2, 10, 10, 0.01),
        (0.2, 10, 10, 0.03),
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
# Parts 4 and 5: PPO with all of SPU's epochs for the value function; TRPO without annealing, and
# with larger steps; PPO without the lever that gained SPU most.
AFTERWARDS = {
    "ppo_7": ("benchmark/ppo_continuous", "--max-epochs 4 --value-epochs 10"),
    "trpo_7": ("benchmark/trpo_continuous", "--delta 0.03 --no-anneal-lr"),
    "trpo_8": ("benchmark/trpo_continuous", "--delta 0.06"),
    "trpo_9": ("benchmark/trpo_continuous", "--delta 0.06 --damping 0.5"),
}
for name, (script, flags) in AFTERWARDS.items():
    PLAN[f"tuning/{name}"] = (script, TUNING, [101, 102], flags)
LOG_STD_0 = "--value-epochs 10 --initial-log-std 0"  # 10 was PPO's default when it was run
PLAN["tuning/ppo_log_std_0"] = ("benchmark/ppo_continuous", TUNING, [101], LOG_STD_0)
PPO_512 = "--minibatch-size 512 --total-timesteps 400000"
PLAN["tuning/pong_ppo_512"] = ("benchmark/ppo_atari", ["Pong"], [101], PPO_512)
# L-infinity without and with a brake, on two tasks.
BRAKE = ["Reacher-v4", "Hopper-v4"]
PLAN["tuning/linf_1"] = ("spu_linf", BRAKE, [101, 102], "--max-kl inf")
PLAN["tuning/linf_2"] = ("spu_linf", BRAKE, [101, 102], "--max-kl 0.05")
# The paper's sensitivity analysis: 12 random vectors from its ranges, and 12 from ranges around our
# default that are as wide in proportion.
RANGES = {
    "paper": [(0.05, 0.07), (0.01, 0.07), (1.0, 1.2), (5, 31)],
    "default": [(0.017, 0.023), (0.008, 0.052), (1.18, 1.42), (4, 17)],
}
for name, ranges in RANGES.items():
    low, high = np.array(ranges).T
    for number, vector in enumerate(np.random.default_rng(0).uniform(low, high, (12, 4)), start=1):
        flags = "--delta {:.4f} --epsilon {:.4f} --lam {:.3f} --max-epochs {}"
        flags = flags.format(*vector[:3], int(vector[3]))
        PLAN[f"reported/sensitivity_{name}_{number}"] = ("spu_continuous", TWO, SEEDS[:1], flags)
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
    jobs.sort(key=lambda job: job[2])  # by seed; else in the order given
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
    folder = WORK / group / f"{env}__{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    script, *options = command(group, env, seed)
    agent = newest_agent(folder)
    if script == "benchmark/peers.py":  # it cannot be resumed, and writes its curve itself
        options += ["--output", str(result(group, env, seed))]
    elif agent:
        options = ["--env-id", env, "--resume", str(agent.parent)]
    if agent is None or not is_finished(agent):
        launcher = LAUNCHERS.get(group, "").split()
        process = [sys.executable, *launcher, str(ROOT / script), *options]
        settings = {"cwd": folder, "env": os.environ | ONE_THREAD}
        done = subprocess.run(process, capture_output=True, text=True, **settings)
        if done.returncode:
            return f"{group} {env} {seed}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}"
    agent = newest_agent(folder)
    if agent:
        keep(group, env, seed, agent.parent)


@cache  # `main` asks before the first job: by the end of one the tree may have moved on
def commit():
    """Of the scripts that run, with a + if they are not as committed."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    status = [*git, "status", "--porcelain", "--untracked-files=no", "*.py"]
    changed = subprocess.run(status, capture_output=True, text=True).stdout
    return (head.stdout.strip() or "unknown") + "+" * bool(changed)


def training_time(run_dir):
    """Seconds of training, and in how many sittings: each has an event file of its own, from its
    start to its last iteration."""
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    seconds = []
    for path in run_dir.glob("events.out.tfevents.*"):
        times = [event.wall_time for event in EventFileLoader(str(path)).Load()]
        seconds.append(max(times) - min(times))
    return sum(seconds), len(seconds)


def keep(group, env, seed, run_dir):
    """Write the learning curve of a finished run as CSV: never half a file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir), {"scalars": 0})
    accumulator.Reload()
    episodes = accumulator.Scalars("charts/episodic_return")
    returns = [event.value for event in episodes]
    kls = accumulator.Scalars("spu/kl_mean")
    # How many episodes had ended by then.
    counts = np.searchsorted([x.step for x in episodes], [x.step for x in kls], "right")
    evaluation = math.nan  # a run that was cut off in it
    if "eval/episodic_return" in accumulator.Tags()["scalars"]:
        evaluation = accumulator.Scalars("eval/episodic_return")[-1].value
    seconds, sittings = training_time(run_dir)
    names = ("torch", "gymnasium", "ale-py" if "atari" in PLAN[group][0] else "mujoco", "numpy")
    path = result(group, env, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.tmp", "w", newline="") as file:
        words = [*LAUNCHERS.get(group, "").split(), *command(group, env, seed)]
        file.write(f"# command: python {shlex.join(words)}\n")
        file.write(f"# commit: {commit()}\n")
        file.write(f"# versions: {', '.join(f'{name} {version(name)}' for name in names)}\n")
        file.write(f"# seconds: {seconds:.0f}, sittings: {sittings}, episodes: {len(returns)}\n")
        file.write(f"# evaluation: {evaluation:.2f}\n")
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["step", "return", "kl"])
        for event, count in zip(kls, counts):
            if count:
                last = returns[max(0, count - 100) : count]
                writer.writerow([event.step, round(float(np.mean(last)), 2), f"{event.value:.5f}"])
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
    commit()
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
