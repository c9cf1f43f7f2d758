"""The same small task in many units: what do SPU, our PPO and Stable-Baselines3's PPO make of it?

A point in the plane is to be moved to the origin in 30 steps (Point, in tests/toy_envs.py). Only
the units change: of actions, observations or rewards. Returns are divided by the reward's unit, so
that every row should read the same.

    python benchmark/robustness.py            # run what is missing in results/robustness.csv

Three seeds, 20,480 steps each, played with the mean action; report.py makes a table of it.
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
    "random": "benchmark/robustness.py",
    "SPU": "spu_continuous.py",
    "our PPO": "benchmark/ppo_continuous.py",
    "SB3 PPO": "benchmark/robustness.py",
}


def play_random(units, seed):
    """Uniform actions; print the mean return of 100 episodes."""
    import gymnasium as gym

    env = gym.make(f"Point{units}-v0")
    env.action_space.seed(seed)
    env.reset(seed=seed)
    total = 0.0
    for _ in range(100):
        env.reset()
        ended = False
        while not ended:
            _, reward, terminated, truncated, _ = env.step(env.action_space.sample())
            total += float(reward)
            ended = terminated or truncated
    print(f"return {total / 100} ±")


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
    if "robustness" in SCRIPTS[name]:
        options = ["--play", name, "--units", units, "--seed", str(seed)]
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


def finished():
    """The jobs whose results are there."""
    if not RESULTS.exists():
        return set()
    with open(RESULTS) as file:
        rows = csv.DictReader(file)
        return {(row["algorithm"], row["units"], int(row["seed"])) for row in rows}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one core each")
    parser.add_argument("--play", choices=["random", "SB3 PPO"], help=argparse.SUPPRESS)
    parser.add_argument("--units", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.play:
        play = play_random if args.play == "random" else play_sb3
        play(args.units, args.seed)
        return
    jobs = [(name, units, seed) for seed in SEEDS for units in POINTS for name in SCRIPTS]
    missing = [job for job in jobs if job not in finished()]
    new = not RESULTS.exists()
    with open(RESULTS, "a", newline="") as file, ThreadPoolExecutor(args.jobs) as pool:
        writer = csv.writer(file, lineterminator="\n")
        if new:
            writer.writerow(["algorithm", "units", "seed", "return"])
        for row in pool.map(run, missing):
            writer.writerow([*row[:3], f"{row[3]:.4f}"])
            file.flush()


if __name__ == "__main__":
    main()
