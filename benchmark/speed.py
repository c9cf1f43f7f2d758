"""How many environment steps per second, against Stable-Baselines3 PPO: alternately, in one run.

    pip install -r benchmark/requirements.txt
    python benchmark/speed.py                  # HalfCheetah-v4; writes benchmark/results/speed.csv
    python benchmark/speed.py --env-id Hopper-v4 --rounds 5
    python benchmark/speed.py --env-id Pong    # spu_atari.py against CnnPolicy

MuJoCo, one thread each: SPU does its full update, 30 epochs in every iteration (--delta inf), and
Stable-Baselines3 PPO its 10; so does a plain PPO in the style of single-file implementations such
as CleanRL's (`time_plain`). PPO in the same program as SPU (ppo_continuous.py) and SPU with 10
epochs too tell what SPU's update itself costs. Atari, all cores: both do 9 epochs over 8 games x
256 steps in minibatches of 512. Each round runs all in turn, so that a machine that is slow for a
while is slow for all; compilation and the first iteration are left out. Absolute numbers depend on
the machine, the ratios hardly do. Let nothing else run meanwhile.
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
ATARI = "--num-envs 8 --num-steps 256 --minibatch-size 512 --no-adapt-lr".split()
HEADER = ["env_id", "round", "spu_steps_per_second", "sb3_ppo_steps_per_second", "ratio"]
HEADER += ["spu_memory_mb", "plain_ppo_steps_per_second", "ratio_to_plain"]
HEADER += ["our_ppo_steps_per_second", "spu_10_epochs_steps_per_second"]


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # a MuJoCo environment, or an Atari game by its short name
    rounds: int = 5  # each times both programs once
    peer: str = ""  # (what this program starts itself with, to time sb3 or plain)


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


def time_plain(env_id):
    """PPO as single-file implementations usually have it: gymnasium's wrappers and vector
    environment, modules, distributions, loss.backward() and torch's Adam, all eager. Only its speed
    matters here."""
    import gymnasium as gym
    import torch
    from torch import nn

    def make():
        env = gym.wrappers.ClipAction(gym.wrappers.RecordEpisodeStatistics(gym.make(env_id)))
        return gym.wrappers.NormalizeReward(gym.wrappers.NormalizeObservation(env))

    torch.set_num_threads(1)
    envs = gym.vector.SyncVectorEnv([make])
    (size,), (count,) = envs.single_observation_space.shape, envs.single_action_space.shape

    def network(outputs):
        hidden = [nn.Linear(size, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh()]
        return nn.Sequential(*hidden, nn.Linear(64, outputs))

    policy = network(count)
    value = network(1)
    log_std = nn.Parameter(torch.zeros(1, count))
    parameters = [*policy.parameters(), *value.parameters(), log_std]
    optimizer = torch.optim.Adam(parameters, lr=3e-4, eps=1e-5)
    obs, actions = torch.zeros(BATCH, 1, size), torch.zeros(BATCH, 1, count)
    log_probs, rewards, ends, values = torch.zeros(4, BATCH, 1)
    seen = torch.tensor(envs.reset(seed=1)[0], dtype=torch.float32)
    for iteration in range(1 + iterations(env_id)):
        if iteration == 1:
            start = time.perf_counter()
        for t in range(BATCH):
            obs[t] = seen
            with torch.no_grad():
                distribution = torch.distributions.Normal(policy(seen), log_std.exp())
                actions[t], values[t] = distribution.sample(), value(seen).flatten()
                log_probs[t] = distribution.log_prob(actions[t]).sum(1)
            seen, reward, terminated, truncated, _ = envs.step(actions[t].numpy())
            seen, rewards[t] = torch.tensor(seen, dtype=torch.float32), torch.tensor(reward)
            ends[t] = torch.tensor(terminated | truncated)
        with torch.no_grad():
            advantages, advantage, following = torch.zeros(BATCH, 1), 0.0, value(seen).flatten()
            for t in reversed(range(BATCH)):
                error = rewards[t] + 0.99 * following * (1 - ends[t]) - values[t]
                advantages[t] = advantage = error + 0.99 * 0.95 * (1 - ends[t]) * advantage
                following = values[t]
        batch = (obs, actions, log_probs, advantages, advantages + values)
        batch = [x.flatten(0, 1) for x in batch]
        for _ in range(10):
            for order in torch.randperm(BATCH).split(64):
                obs_, action, old_log_prob, gain, target = (x[order] for x in batch)
                gain = (gain - gain.mean()) / (gain.std() + 1e-8)
                distribution = torch.distributions.Normal(policy(obs_), log_std.exp())
                ratio = (distribution.log_prob(action).sum(1) - old_log_prob).exp()
                loss = -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()
                loss = loss + 0.5 * (value(obs_).flatten() - target).square().mean()
                loss = loss + 0 * distribution.entropy().mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(parameters, 0.5)
                optimizer.step()
    return BATCH * iterations(env_id) / (time.perf_counter() - start)


def run_peer(env_id, peer):
    command = [sys.executable, __file__, "--peer", peer, "--env-id", env_id]
    threads = {} if is_atari(env_id) else {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | threads)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split()[-1])


def run_ours(env_id, script, epochs, *options):
    """Train for an iteration that is not timed and some that are: the speed from the event file,
    the memory from the kernel."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    steps = BATCH * (1 + iterations(env_id))
    command = [sys.executable, str(ROOT / script), "--env-id", env_id, "--eval-episodes", "1"]
    command += ["--max-epochs", str(epochs), "--total-timesteps", str(steps), *options]
    with tempfile.TemporaryDirectory() as folder:
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = subprocess.Popen(command, cwd=folder, **pipes)
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            sys.exit(process.stderr.read().decode())
        (run_dir,) = (Path(folder) / "runs").iterdir()
        accumulator = EventAccumulator(str(run_dir), {"scalars": 0})
        accumulator.Reload()
        used = {event.value for event in accumulator.Scalars("spu/epochs_used")}
        speeds = [event.value for event in accumulator.Scalars("charts/SPS")][1:]
    assert used == {epochs} and len(speeds) == iterations(env_id)
    return len(speeds) / sum(1 / speed for speed in speeds), usage.ru_maxrss / 1024


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.peer:
        return print({"sb3": time_peer, "plain": time_plain}[args.peer](args.env_id))
    rows = []
    full = ("--delta", "inf")  # delta never ends the epochs
    for number in range(1, args.rounds + 1):
        if is_atari(args.env_id):
            spu, memory = run_ours(args.env_id, "spu_atari.py", 9, *full, *ATARI)
            others = [""] * 4
        else:
            spu, memory = run_ours(args.env_id, "spu_continuous.py", 30, *full)
            plain = run_peer(args.env_id, "plain")
            ppo, _ = run_ours(args.env_id, "benchmark/ppo_continuous.py", 10)
            spu_10, _ = run_ours(args.env_id, "spu_continuous.py", 10, *full)
            others = [round(plain), round(spu / plain, 2), round(ppo), round(spu_10)]
        peer = run_peer(args.env_id, "sb3")
        ratio = round(spu / peer, 2)
        rows.append([args.env_id, number, round(spu), round(peer), ratio, round(memory), *others])
        print(f"round {number}: {dict(zip(HEADER[2:], rows[-1][2:]))}", flush=True)
    ratios = [row[4] for row in rows]
    spread = f"median; {min(ratios)} to {max(ratios)}"
    print(f"{args.env_id}: {np.median(ratios):.2f} times Stable-Baselines3 PPO ({spread})")
    path = ROOT / "benchmark" / "results" / "speed.csv"
    path.parent.mkdir(exist_ok=True)
    old = [row for row in csv.reader(path.open())][1:] if path.exists() else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows([row for row in old if row[0] != args.env_id] + rows)


if __name__ == "__main__":
    main()
