"""How many environment steps per second, against Stable-Baselines3 PPO: alternately, one thread each, in one run.

    pip install -r benchmark/requirements.txt
    python benchmark/speed.py                       # HalfCheetah-v4; writes benchmark/results/speed.csv
    python benchmark/speed.py --env-id Hopper-v4 --rounds 5

SPU does its full update, 30 epochs in every iteration (--no-dynamic-stopping), where PPO does 10. Each round runs both
in turn, so that a machine that is slow for a while is slow for both; compilation and the first iteration are
left out. Absolute numbers depend on the machine, the ratio hardly does. Let nothing else run meanwhile.
"""

import csv
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tyro

ROOT = Path(__file__).resolve().parent.parent
ITERATIONS = 8  # of 2048 steps, timed after a first one that is not


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # a gymnasium environment
    rounds: int = 5  # each times both programs once
    peer: bool = False  # (what this program starts itself with: time Stable-Baselines3 and print steps per second)


def time_peer(env_id):
    import torch
    from stable_baselines3 import PPO

    torch.set_num_threads(1)
    model = PPO("MlpPolicy", env_id, n_steps=2048, batch_size=64, n_epochs=10, device="cpu")
    model.learn(2048)
    start = time.perf_counter()
    model.learn(2048 * ITERATIONS, reset_num_timesteps=False)
    return 2048 * ITERATIONS / (time.perf_counter() - start)


def run_peer(env_id):
    command = [sys.executable, __file__, "--peer", "--env-id", env_id]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    return float(done.stdout.split()[-1])


def run_spu(env_id):
    """Train for 1 + ITERATIONS iterations and take the speed from the event file, and the memory from the kernel."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = 2048 * (1 + ITERATIONS)
    options = ["--env-id", env_id, "--total-timesteps", str(steps), "--no-dynamic-stopping", "--eval-episodes", "1"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / "spu_continuous.py"), *options]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(process.stderr.read().decode())
        accumulator = EventAccumulator(str(next((Path(folder) / "runs").iterdir())), {"scalars": 0})
        accumulator.Reload()
        epochs = [event.value for event in accumulator.Scalars("spu/epochs_used")]
        speeds = [event.value for event in accumulator.Scalars("charts/SPS")][1:]
    assert set(epochs) == {30} and len(speeds) == ITERATIONS
    return len(speeds) / sum(1 / speed for speed in speeds), usage.ru_maxrss / 1024


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.peer:
        return print(time_peer(args.env_id))
    rows = []
    for number in range(1, args.rounds + 1):
        (spu, memory), peer = run_spu(args.env_id), run_peer(args.env_id)
        rows.append([args.env_id, number, round(spu), round(peer), round(spu / peer, 2), round(memory)])
        print(f"round {number}: SPU {spu:.0f}, SB3 PPO {peer:.0f} steps/s, ratio {spu / peer:.2f}, {memory:.0f} MB")
    ratios = [row[4] for row in rows]
    print(
        f"{args.env_id}: {np.median(ratios):.2f} times Stable-Baselines3 PPO (median; {min(ratios)} to {max(ratios)})"
    )
    path = ROOT / "benchmark" / "results" / "speed.csv"
    path.parent.mkdir(exist_ok=True)
    old = [row for row in csv.reader(path.open())][1:] if path.exists() else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["env_id", "round", "spu_steps_per_second", "sb3_ppo_steps_per_second", "ratio", "spu_memory_mb"]
        )
        writer.writerows([row for row in old if row[0] != args.env_id] + rows)


if __name__ == "__main__":
    main()
