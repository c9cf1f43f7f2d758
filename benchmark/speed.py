"""How many environment steps per second, against Stable-Baselines3 PPO: alternately, in one run.

    pip install -r benchmark/requirements.txt
    python benchmark/speed.py                       # HalfCheetah-v4; writes benchmark/results/speed.csv
    python benchmark/speed.py --env-id Hopper-v4 --rounds 5
    python benchmark/speed.py --env-id Pong         # spu_atari.py against CnnPolicy

MuJoCo, one thread each: SPU does its full update, 30 epochs in every iteration (--no-dynamic-stopping), PPO its 10.
Atari, all cores: both do 9 epochs over 8 games x 256 steps in minibatches of 512. Each round runs both in turn, so that
a machine that is slow for a while is slow for both; compilation and the first iteration are left out. Absolute numbers
depend on the machine, the ratio hardly does. Let nothing else run meanwhile.
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
BATCH = 2048  # steps in an iteration


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # a MuJoCo environment, or an Atari game by its short name
    rounds: int = 5  # each times both programs once
    peer: bool = False  # (what this program starts itself with: time Stable-Baselines3 and print steps per second)


def is_atari(env_id):
    return "-v" not in env_id


def iterations(env_id):
    return 3 if is_atari(env_id) else 8  # timed after a first one that is not


def time_peer(env_id):
    import torch
    from stable_baselines3 import PPO

    if is_atari(env_id):
        import ale_py
        import gymnasium
        from stable_baselines3.common.env_util import make_atari_env
        from stable_baselines3.common.vec_env import VecFrameStack

        gymnasium.register_envs(ale_py)
        envs = VecFrameStack(make_atari_env(f"{env_id}NoFrameskip-v4", n_envs=8), 4)
        model = PPO("CnnPolicy", envs, n_steps=256, batch_size=512, n_epochs=9, device="cpu")
    else:
        torch.set_num_threads(1)
        model = PPO("MlpPolicy", env_id, n_steps=BATCH, batch_size=64, n_epochs=10, device="cpu")
    model.learn(BATCH)
    start = time.perf_counter()
    model.learn(BATCH * iterations(env_id), reset_num_timesteps=False)
    return BATCH * iterations(env_id) / (time.perf_counter() - start)


def run_peer(env_id):
    command = [sys.executable, __file__, "--peer", "--env-id", env_id]
    threads = {} if is_atari(env_id) else {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split()[-1])


def run_spu(env_id):
    """Train for an iteration that is not timed and some that are: the speed from the event file, the memory from the
    kernel."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps, script = BATCH * (1 + iterations(env_id)), "spu_atari.py" if is_atari(env_id) else "spu_continuous.py"
    options = ["--env-id", env_id, "--total-timesteps", str(steps), "--no-dynamic-stopping", "--eval-episodes", "1"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(ROOT / script), *options]
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(process.stderr.read().decode())
        accumulator = EventAccumulator(str(next((Path(folder) / "runs").iterdir())), {"scalars": 0})
        accumulator.Reload()
        epochs = [event.value for event in accumulator.Scalars("spu/epochs_used")]
        speeds = [event.value for event in accumulator.Scalars("charts/SPS")][1:]
    assert set(epochs) == {9 if is_atari(env_id) else 30} and len(speeds) == iterations(env_id)
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
