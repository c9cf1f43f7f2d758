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
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # as many jobs as cores, a core each
MUJOCO = ["Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum"]
MUJOCO = [f"{name}-v4" for name in (*MUJOCO, "Reacher", "Swimmer", "Walker2d")]
THREE = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"]
ATARI = """
AirRaid Alien Amidar Assault Asterix Asteroids Atlantis BankHeist BattleZone BeamRider Berzerk Bowling Boxing
Breakout Carnival Centipede ChopperCommand CrazyClimber DemonAttack DoubleDunk ElevatorAction Enduro FishingDerby
Freeway Frostbite Gopher Gravitar Hero IceHockey Jamesbond JourneyEscape Kangaroo Krull KungFuMaster
MontezumaRevenge MsPacman NameThisGame Phoenix Pitfall Pong Pooyan PrivateEye Qbert Riverraid RoadRunner Robotank
Seaquest Skiing Solaris SpaceInvaders StarGunner Tennis TimePilot Tutankham UpNDown Venture VideoPinball WizardOfWor
YarsRevenge Zaxxon
""".split()
FOUR, FIVE = [*THREE, "Swimmer-v4"], [*THREE, "Swimmer-v4", "Reacher-v4"]
SIX = [*FOUR, "Ant-v4", "InvertedDoublePendulum-v4"]  # with two where TRPO, or PPO, was once far ahead of SPU
REGION = "--epsilon 0.05 --delta 0.0416666667"  # the trust region that the paper prints
PAPER = f"{REGION} --lam 1.3 --max-epochs 30"
CLIP_AND_REWARDS = "--normalize-rewards --clip-actions --max-epochs 30"
MINIBATCH_256 = "--minibatch-size 256 --learning-rate 1e-3 --max-epochs 30"
REVERSE = "--accept 0.03 --delta 0.02 --max-epochs 10"
REVERSE_FIRST = "--max-advantage 1000 --epsilon 0.1 --accept 0.05 --delta 0.04 --max-epochs 30"
FAST = "--learning-rate 5e-4 --max-epochs 4 --total-timesteps 160000"  # Atari, so that a short run shows something
SHORT = "--lam 1 --epsilon 0.5 --max-epochs 30 --total-timesteps 300000"

# group: (script, environments, seeds, flags). Seeds from 101 on are for tuning: no tune_* or detail_* is a result.
PLAN = {
    "spu": ("spu_continuous", MUJOCO, [1, 2, 3], ""),
    "ppo": ("benchmark/ppo_continuous", MUJOCO, [1, 2, 3], ""),
    "sb3_ppo": ("benchmark/peers", MUJOCO, [1, 2], "--algorithm ppo"),
    "trpo": ("benchmark/peers", MUJOCO, [1, 2], "--algorithm trpo"),
    "spu_paper": ("spu_continuous", MUJOCO, [1, 2], f"{PAPER} --no-bootstrap-truncation"),
    "spu_30_epochs": ("spu_continuous", MUJOCO, [1, 2], "--max-epochs 30"),  # once the default
    "no_kl_term": ("spu_continuous", THREE, [1, 2], "--max-epochs 30 --no-kl-term"),
    "no_dynamic_stopping": ("spu_continuous", THREE, [1, 2], "--max-epochs 30 --no-dynamic-stopping"),
    "no_per_state_acceptance": ("spu_continuous", THREE, [1, 2], "--max-epochs 30 --no-per-state-acceptance"),
    "linf": ("spu_linf", FIVE, [1, 2], ""),
    "reverse_kl": ("spu_reverse_kl", FIVE, [1, 2], ""),
    "linf_first": ("spu_linf", THREE, [1], "--lam 1 --epsilon 0.3 --max-epochs 10"),  # once the default
    "reverse_kl_first": ("spu_reverse_kl", THREE, [1], REVERSE_FIRST),  # once the default
    "spu_3m": ("spu_continuous", ["Walker2d-v4"], [1, 2], "--total-timesteps 3000000"),
    "trpo_3m": ("benchmark/peers", ["Walker2d-v4"], [1, 2], "--algorithm trpo --total-timesteps 3000000"),
    "atari": ("spu_atari", ["Pong", "Breakout"], [1], "--total-timesteps 1000000"),  # a pilot
    "atari_ppo": ("benchmark/peers", ["Pong", "Breakout"], [1], "--algorithm ppo --total-timesteps 1000000"),
    "atari_rate_5e-4": ("spu_atari", ["Breakout"], [1], FAST),
    "tune_default": ("spu_continuous", SIX, [101, 102], ""),
    "tune_paper_10_epochs": ("spu_continuous", FOUR, [101, 102], REGION),
    "tune_half_region": ("spu_continuous", FOUR, [101, 102], "--epsilon 0.015 --delta 0.01"),
    "detail_clip_actions": ("spu_continuous", FOUR, [101, 102], "--clip-actions"),
    "detail_normalize_rewards": ("spu_continuous", FOUR, [101, 102], "--normalize-rewards"),
    "detail_orthogonal_init": ("spu_continuous", FOUR, [101, 102], "--orthogonal-init"),
    "detail_no_anneal": ("spu_continuous", FOUR, [101, 102], "--no-anneal-lr"),
    "detail_no_bootstrap": ("spu_continuous", FOUR, [101, 102], "--no-bootstrap-truncation"),
    "tune_30_default": ("spu_continuous", SIX, [101, 102], "--max-epochs 30"),
    "tune_30_paper": ("spu_continuous", FOUR, [101, 102], PAPER),
    "tune_30_delta_03": ("spu_continuous", FOUR, [101, 102], "--epsilon 0.04 --delta 0.03 --max-epochs 30"),
    "tune_30_normalize_rewards": ("spu_continuous", FOUR, [101, 102], "--normalize-rewards --max-epochs 30"),
    "tune_30_no_anneal": ("spu_continuous", ["HalfCheetah-v4", "Ant-v4"], [101], "--no-anneal-lr --max-epochs 30"),
    "tune_30_clip_actions": ("spu_continuous", ["HalfCheetah-v4"], [101], "--clip-actions --max-epochs 30"),
    "tune_30_clip_no_anneal": ("spu_continuous", ["Ant-v4"], [101], "--clip-actions --no-anneal-lr --max-epochs 30"),
    "tune_30_clip_and_rewards": ("spu_continuous", ["Ant-v4"], [101], CLIP_AND_REWARDS),
    "tune_30_minibatch_256": ("spu_continuous", ["Ant-v4"], [101], MINIBATCH_256),
    "tune_atari": ("spu_atari", ["Breakout"], [101, 102], FAST),
    "tune_atari_entropy_0": ("spu_atari", ["Breakout"], [101, 102], f"--entropy-coefficient 0 {FAST}"),
    "tune_atari_value_half": ("spu_atari", ["Breakout"], [101, 102], f"--value-coefficient 0.5 {FAST}"),
    "tune_atari_value_quarter": ("spu_atari", ["Breakout"], [101, 102], f"--value-coefficient 0.25 {FAST}"),
    "tune_linf_wide": ("spu_linf", THREE, [1], "--lam 0.5 --epsilon 1 --max-epochs 30"),  # once the default
    "tune_linf_1_1": ("spu_linf", THREE, [101, 102], "--lam 1 --epsilon 1 --max-epochs 10"),
    "tune_linf_1_05": ("spu_linf", THREE, [101, 102], "--lam 1 --epsilon 0.5 --max-epochs 10"),
    "tune_reverse_2_03": ("spu_reverse_kl", THREE, [101], f"--max-advantage 2 --epsilon 0.3 {REVERSE}"),
    "tune_reverse_1000_03": ("spu_reverse_kl", THREE, [101], f"--max-advantage 1000 --epsilon 0.3 {REVERSE}"),
    "tune_linf_ratios": ("spu_linf", THREE, [101, 102], SHORT),
    "tune_linf_probabilities": ("spu_linf", THREE, [101, 102], f"{SHORT} --probabilities"),
}
# The screening of levers that PROTOCOL.md describes.
TUNING = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Reacher-v4", "Humanoid-v4"]
LEVERS = {
    "base": "",
    "recompute": "--recompute-advantages",
    "log_std_05": "--initial-log-std -0.5",
    "rewards": "--normalize-rewards",
    "standard_values": "--standard-values",
    "log_std_1": "--initial-log-std -1",
    "floor": "--relative-floor",
    "follow": "--follow-region --no-anneal-lr",
    "combined_rewards": "--initial-log-std -1 --normalize-rewards --relative-floor",
    "combined_values": "--initial-log-std -1 --standard-values --relative-floor",
}
for lever, flags in LEVERS.items():
    flags = f"--scale-actions --value-all-epochs {flags}"
    PLAN[f"tuning/screen_{lever}"] = ("benchmark/screening", TUNING, [101, 102], flags)
    PLAN[f"tuning/screen_{lever}/more"] = ("benchmark/screening", ["HalfCheetah-v4"], [103, 104], flags)
# The paper's sensitivity analysis: random vectors from its ranges for delta, epsilon, lambda and the epochs.
for number, vector in enumerate(np.random.default_rng(0).random((8, 4)), 1):
    delta, epsilon, lam, epochs = np.array([0.05, 0.01, 1.0, 5]) + vector * [0.02, 0.06, 0.2, 26]
    flags = f"--delta {delta:.4f} --epsilon {epsilon:.4f} --lam {lam:.3f} --max-epochs {int(epochs)}"
    PLAN[f"sensitivity_{number}"] = ("spu_continuous", ["Hopper-v4", "Walker2d-v4"], [1], flags)
# And an Atari experiment of its size, 60 games x 20 seeds x 10 million steps: about 1400 days of a core. Not run.
PLAN["atari_paper"] = ("spu_atari", ATARI, list(range(1, 21)), "")


@dataclass
class Args:
    groups: tyro.conf.Positional[list[str]] = field(default_factory=lambda: list(PLAN))  # of the plan
    jobs: int = 2  # at once, one core each
    dry_run: bool = False  # print one command per line for each job that is left, and run nothing
    seeds: list[int] | None = None  # only these
    only: str | None = None  # a single job of one group, as ENV__SEED (what --dry-run prints)


def left(groups):
    """The jobs that have no result yet."""
    jobs = [(group, env, seed) for group in groups for seed in PLAN[group][2] for env in PLAN[group][1]]
    return [job for job in jobs if not result(*job).exists()]


def result(group, env, seed):
    return RESULTS / group.removesuffix("/more") / f"{env}__{seed}.csv"


def command(group, env, seed):
    script, _, _, flags = PLAN[group]
    return [f"{script}.py", "--env-id", env, "--seed", str(seed), *shlex.split(flags)]


def run(group, env, seed):
    """Train, or go on training, in a folder of the job's own; then keep the curve. Returns what went wrong."""
    folder, start = WORK / group / f"{env}__{seed}", time.time()
    folder.mkdir(parents=True, exist_ok=True)
    script, *options = command(group, env, seed)
    checkpoints = sorted(folder.glob("runs/*/checkpoint.pt"), key=os.path.getmtime)
    if script == "benchmark/peers.py":  # it cannot be resumed, and writes its curve itself
        options += ["--output", str(result(group, env, seed))]
    elif checkpoints:
        options = ["--resume", str(checkpoints[-1].parent)]
    if not list(folder.glob("runs/*/agent.pt")):
        process = [sys.executable, str(ROOT / script), *options]
        done = subprocess.run(process, cwd=folder, capture_output=True, text=True, env=os.environ | ONE_THREAD)
        if done.returncode:
            return f"{group} {env} {seed}: {(done.stderr.strip().splitlines() or ['killed'])[-1]}"
    for agent in folder.glob("runs/*/agent.pt"):
        keep(group, env, seed, agent.parent, time.time() - start)


def keep(group, env, seed, run_dir, wall_time):
    """Write the learning curve of a finished run as CSV: never half a file."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir), {"scalars": 0})
    accumulator.Reload()
    episodes = [(event.step, event.value) for event in accumulator.Scalars("charts/episodic_return")]
    iterations, returns = [event.step for event in accumulator.Scalars("charts/SPS")], [value for _, value in episodes]
    counts = np.searchsorted([step for step, _ in episodes], iterations, "right")  # episodes finished by then
    summary = f"# seconds: {wall_time:.0f}, episodes: {len(returns)}"
    for tag in (tag for tag in ("spu/kl_mean", "spu/epochs_used") if tag in accumulator.Tags()["scalars"]):
        values = [event.value for event in accumulator.Scalars(tag)]
        summary += f", mean of {tag}: {np.mean(values):.3g}, median {np.median(values):.3g}, most {max(values):.3g}"
    packages = ", ".join(f"{name} {version(name)}" for name in ("torch", "gymnasium", "mujoco", "numpy"))
    path = result(group, env, seed)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.tmp", "w", newline="") as file:
        file.write(f"# command: python {shlex.join(command(group, env, seed))}\n# versions: {packages}\n")
        file.write(f"{summary}\n")
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
    jobs = [job for job in jobs if args.seeds is None or job[2] in args.seeds]
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
