"""How many environment steps per second, against Stable-Baselines3 PPO: alternately, in one run.

    pip install -r benchmark/requirements.txt
    python benchmark/speed.py                  # HalfCheetah-v4; writes benchmark/results/speed.csv
    python benchmark/speed.py --env-id Hopper-v4 --rounds 5
    python benchmark/speed.py --env-id Pong    # spu_atari.py against CnnPolicy

MuJoCo, one thread each: SPU with 10 epochs, the default, and with 30, as in the paper; PPO in the
same program (ppo_continuous.py), Stable-Baselines3's, and a plain one in the style of single-file
implementations such as CleanRL's (`time_plain`), with 10 each. Atari, all cores: SPU and
Stable-Baselines3's PPO with 9 epochs over 8 games x 256 steps, in minibatches of 512, and with
spu_atari.py's own 4 epochs over 32 x 128 steps, in minibatches of 1024. SPU does all its epochs
(--delta inf). Each round runs all in turn, so that a machine that is slow for a while is slow for
all; compilation and the first iteration are left out. Absolute numbers depend on the machine, the
ratios hardly do. Let nothing else run meanwhile.
"""

import csv
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import tyro

ROOT = Path(__file__).resolve().parent.parent
BATCH = 2048  # steps in an iteration on MuJoCo
ATARI = {9: (8, 256, 512), 4: (32, 128, 1024)}  # epochs: games, steps, minibatch
HEADER = ["env_id", "round", "program", "epochs", "steps_per_second", "memory_mb"]


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # a MuJoCo environment, or an Atari game by its short name
    rounds: int = 5  # each times both programs once
    peer: str = ""  # (what this program starts itself with, to time sb3_ppo or plain_ppo)
    epochs: int = 10  # (and its number of epochs)


def is_atari(env_id):
    return "-v" not in env_id


def iterations(env_id):
    return 3 if is_atari(env_id) else 8  # timed after a first one that is not


def time_sb3(env_id, epochs):
    import torch
    from stable_baselines3 import PPO

    if is_atari(env_id):
        import ale_py
        import gymnasium
        from stable_baselines3.common.env_util import make_atari_env
        from stable_baselines3.common.vec_env import VecFrameStack

        gymnasium.register_envs(ale_py)
        games, steps, minibatch = ATARI[epochs]
        envs = VecFrameStack(make_atari_env(f"{env_id}NoFrameskip-v4", n_envs=games), 4)
        policy = "CnnPolicy"
    else:
        torch.set_num_threads(1)
        games, steps, minibatch = 1, BATCH, 64
        envs = env_id
        policy = "MlpPolicy"
    sizes = {"n_steps": steps, "batch_size": minibatch, "n_epochs": epochs}
    model = PPO(policy, envs, device="cpu", **sizes)
    model.learn(games * steps)
    timed = games * steps * iterations(env_id)
    start = time.perf_counter()
    model.learn(timed, reset_num_timesteps=False)
    return timed / (time.perf_counter() - start)


def time_plain(env_id, epochs):
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
        for _ in range(epochs):
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


def run_peer(env_id, peer, epochs):
    command = [sys.executable, __file__, "--peer", peer, "--env-id", env_id]
    threads = {} if is_atari(env_id) else {"OMP_NUM_THREADS": "1"}
    settings = {"capture_output": True, "text": True, "env": os.environ | threads}
    done = subprocess.run([*command, "--epochs", str(epochs)], **settings)
    if done.returncode:
        sys.exit(done.stderr)
    return float(done.stdout.split()[-1]), None


def run_ours(env_id, script, epochs):
    """Train for an iteration that is not timed and some that are: the speed from the event file,
    the memory from the kernel."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    options = ["--value-epochs", epochs] if "ppo" in script else ["--delta", "inf"]
    batch = BATCH
    if is_atari(env_id):
        games, steps, minibatch = ATARI[epochs]
        batch = games * steps
        options += ["--num-envs", games, "--num-steps", steps, "--minibatch-size", minibatch]
        options += ["--no-adapt-lr"]  # there is no delta to follow
    options += ["--total-timesteps", batch * (1 + iterations(env_id)), "--max-epochs", epochs]
    command = [sys.executable, str(ROOT / script), "--env-id", env_id, "--eval-episodes", "1"]
    command += map(str, options)
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


def time_one(env_id, program, epochs):
    """Steps per second, and the memory of our own in MB."""
    scripts = {"spu": "spu_atari.py" if is_atari(env_id) else "spu_continuous.py"}
    scripts["our_ppo"] = "benchmark/ppo_continuous.py"
    if program in scripts:
        return run_ours(env_id, scripts[program], epochs)
    return run_peer(env_id, program, epochs)


def main():
    args = tyro.cli(Args, description=__doc__)
    if args.peer:
        peers = {"sb3_ppo": time_sb3, "plain_ppo": time_plain}
        return print(peers[args.peer](args.env_id, args.epochs))
    programs = [("spu", 10), ("sb3_ppo", 10), ("plain_ppo", 10), ("our_ppo", 10), ("spu", 30)]
    if is_atari(args.env_id):
        programs = [(program, epochs) for epochs in ATARI for program in ("spu", "sb3_ppo")]
    rows = []
    for number in range(1, args.rounds + 1):
        for program, epochs in programs:
            speed, memory = time_one(args.env_id, program, epochs)
            memory = round(memory) if memory else ""
            rows.append([args.env_id, number, program, epochs, round(speed), memory])
            print(", ".join(f"{key} {x}" for key, x in zip(HEADER, rows[-1]) if x), flush=True)
    path = ROOT / "benchmark" / "results" / "speed.csv"
    path.parent.mkdir(exist_ok=True)
    old = [row for row in csv.reader(path.open())][1:] if path.exists() else []
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows([row for row in old if row[0] != args.env_id] + rows)
    print(f"wrote {path}; `python benchmark/report.py` makes the table")


if __name__ == "__main__":
    main()
