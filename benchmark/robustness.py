"""The same small task in many units: what do SPU, our PPO and Stable-Baselines3's PPO make of it?

A point in the plane is to be moved to the origin in 30 steps (Point, in tests/toy_envs.py). Only
the units change: of actions, observations or rewards. Returns are divided by the reward's unit, so
that every row should read the same: random actions give about -27, a good policy -1 to -3.

    python benchmark/robustness.py            # run what is missing in results/robustness.csv
    python benchmark/robustness.py --table    # print the table of what is there

Each cell is the mean of three seeds, 20,480 steps each, played with the mean action.
"""

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmark" / "results" / "robustness.csv"
sys.path.insert(0, str(ROOT / "tests"))
from toy_envs import POINTS  # noqa: E402

STEPS = 20_480
SEEDS = [1, 2, 3]
SCRIPTS = {
    "SPU": "spu_continuous.py",
    "our PPO": "benchmark/ppo_continuous.py",
    "SB3 PPO": "benchmark/robustness.py",
}


def play_sb3(units, seed):
    """Stable-Baselines3's PPO as it comes; print the return with the mean action."""
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.monitor import Monitor

    torch.set_num_threads(1)
    env = Monitor(gym.make(f"Point{units}-v0"))
    model = PPO("MlpPolicy", env, seed=seed, device="cpu")
    model.learn(STEPS)
    mean, _ = evaluate_policy(model, env, n_eval_episodes=20)
    print(f"return {mean} ±")


def run(job):
    """Train once; returns the row of the table of results."""
    name, units, seed = job
    if name == "SB3 PPO":
        options = ["--sb3", units, "--seed", str(seed)]
    else:
        options = ["--env-id", f"toy_envs:Point{units}-v0", "--seed", str(seed), "--no-compile"]
        options += ["--total-timesteps", str(STEPS), "--eval-episodes", "20"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "tests"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(ROOT / SCRIPTS[name]), *options]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    score = float(re.search(r"return (\S+) ±", done.stdout).group(1))
    return [name, units, seed, score / POINTS[units].get("reward_scale", 1.0)]


def read():
    if not RESULTS.exists():
        return {}
    with open(RESULTS) as file:
        return {(row["algorithm"], row["units"], int(row["seed"])): float(row["return"])
                for row in csv.DictReader(file)}  # fmt: skip


def table(scores):
    print(f"| units | {' | '.join(SCRIPTS)} |")
    print("|---" * (len(SCRIPTS) + 1) + "|")
    for units, changes in POINTS.items():
        cells = []
        for name in SCRIPTS:
            found = [scores[name, units, seed] for seed in SEEDS if (name, units, seed) in scores]
            cells.append(f"{sum(found) / len(found):.1f}" if found else "-")
        said = (
            ", ".join(f"{key} {value:g}" for key, value in changes.items()) or "as they should be"
        )
        print(f"| {said} | {' | '.join(cells)} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="print what is there, run nothing")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--sb3", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.sb3:
        return play_sb3(args.sb3, args.seed)
    if not args.table:
        jobs = [(name, units, seed) for seed in SEEDS for units in POINTS for name in SCRIPTS]
        missing = [job for job in jobs if job not in read()]
        new = not RESULTS.exists()
        with open(RESULTS, "a", newline="") as file, ThreadPoolExecutor(args.jobs) as pool:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(["algorithm", "units", "seed", "return"])
            for row in pool.map(run, missing):
                writer.writerow([*row[:3], f"{row[3]:.4f}"])
                file.flush()
    table(read())


if __name__ == "__main__":
    main()
