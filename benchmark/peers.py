"""One training run of Stable-Baselines3 PPO or sb3-contrib TRPO, near to the paper's settings.

    pip install -r benchmark/requirements.txt
    python benchmark/peers.py --algorithm ppo --env-id Hopper-v4        # into results/reported/
    python benchmark/peers.py --algorithm trpo --env-id Hopper-v4 --seed 2 --output FILE.csv

The CSV is like those of run.py: after every 2048 steps, the mean return of the last 100 finished
episodes. Both have two separate 64-64 tanh networks, 2048 steps per iteration, gamma 0.99, GAE
lambda 0.95 and normalised observations, and rewards as they are. Both libraries clip actions to the
action space and bootstrap at time limits.

  PPO   10 epochs of minibatches of 64, clip 0.2, step size 3e-4 annealed to 0, no entropy bonus.
        The rest is the library's default: value coefficient 0.5, gradient norm at most 0.5,
        advantages normalised per minibatch.
  TRPO  KL at most 0.01 (the library takes the mean over the action's dimensions, where TRPO has the
        sum: so it is 0.01 for each of them), 10 conjugate gradient steps, damping 0.1, and 5 epochs
        of minibatches of 64 with step size 1e-3 for the value network. These are the values of
        OpenAI baselines, whose TRPO the paper ran, with the KL as a sum. It had 1024 steps per
        iteration and GAE lambda 0.98; here both are what all the other algorithms have.

An Atari game by its short name (--algorithm ppo --env-id Pong) is played with CnnPolicy, 8 games x
256 steps, minibatches of 512 and step size 1e-4 annealed to 0, and for the rest as baselines' PPO
played Atari: 4 epochs, clip 0.2, entropy bonus 0.01, clipped rewards, a lost life as an end. The
return is the true score of a game.
"""

import csv
import os
import shlex
import sys
import time
import warnings
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import ale_py
import gymnasium as gym
import mujoco
import numpy as np
import torch
import tyro
from tqdm import tqdm

RESULTS = Path(__file__).resolve().parent / "results" / "reported"
STEPS = 2048  # per iteration


@dataclass
class Args:
    algorithm: Literal["ppo", "trpo"] = "ppo"  # Stable-Baselines3 PPO or sb3-contrib TRPO
    env_id: str = "Hopper-v4"  # a gymnasium environment whose observations are vectors
    seed: int = 1  # of the network, the action noise, the minibatches and the environment
    total_timesteps: int = 1_000_000  # environment steps to train for, in whole iterations of 2048
    output: Path | None = None  # the CSV; by default under results/reported/, for report.py


def refuse(sentence):  # bad input
    print(f"peers.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def train(args):
    """Rows (step, mean return of the last 100 episodes), and the number of episodes."""
    try:
        from sb3_contrib import TRPO
        from stable_baselines3 import PPO
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.env_util import make_atari_env
        from stable_baselines3.common.monitor import Monitor
        from stable_baselines3.common.vec_env import DummyVecEnv, VecFrameStack, VecNormalize
    except ImportError:
        refuse("the peers are not installed: `pip install -r benchmark/requirements.txt`.")
    atari = "-v" not in args.env_id
    if atari and args.algorithm != "ppo":
        refuse(f"--algorithm must be ppo for an Atari game such as {args.env_id}.")
    try:
        if atari:
            gym.register_envs(ale_py)
            game = f"{args.env_id}NoFrameskip-v4"
            envs = VecFrameStack(make_atari_env(game, n_envs=8, seed=args.seed), 4)
        else:
            # Monitor keeps an episode's true return.
            envs = DummyVecEnv([lambda: Monitor(gym.make(args.env_id))])
    except Exception as error:
        refuse(f"{args.env_id} cannot be made: {' '.join(str(error).split())}")
    if not atari and len(envs.observation_space.shape or ()) != 1:
        refuse(f"{args.env_id} has {envs.observation_space} observations: only vectors will do.")
    steps = args.total_timesteps // STEPS * STEPS
    rows = []
    returns = []
    options = {"gamma": 0.99, "gae_lambda": 0.95, "seed": args.seed, "device": "cpu"}
    if atari:
        options |= {"n_steps": STEPS // 8, "batch_size": 512, "n_epochs": 4}
        options |= {"clip_range": 0.2, "ent_coef": 0.01}
        model = PPO("CnnPolicy", envs, learning_rate=lambda left: 1e-4 * left, **options)
    else:
        options |= {"n_steps": STEPS, "batch_size": 64}
        networks = {"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "activation_fn": torch.nn.Tanh}
        options |= {"policy_kwargs": networks}
        if args.algorithm == "ppo":
            options |= {"learning_rate": lambda left: 3e-4 * left, "n_epochs": 10}
            options |= {"clip_range": 0.2, "ent_coef": 0.0}
        else:
            options |= {"learning_rate": 1e-3, "n_critic_updates": 5}
            options |= {"target_kl": 0.01, "cg_max_steps": 10, "cg_damping": 0.1}
        envs = VecNormalize(envs, norm_obs=True, norm_reward=False)
        model = {"ppo": PPO, "trpo": TRPO}[args.algorithm]("MlpPolicy", envs, **options)
    with tqdm(total=steps, unit=" steps", unit_scale=True) as bar:

        class Curve(BaseCallback):
            def _on_step(self):
                infos = self.locals["infos"]
                returns.extend(info["episode"]["r"] for info in infos if "episode" in info)
                return True

            def _on_rollout_end(self):
                bar.update(STEPS)
                if returns:
                    rows.append([self.num_timesteps, round(float(np.mean(returns[-100:])), 2)])
                    bar.set_postfix_str(f"return {rows[-1][1]:.1f}")

        model.learn(steps, callback=Curve())
    return rows, len(returns)


def main():
    args = tyro.cli(Args, description=__doc__)
    noise = "is out of date|render_modes|pickle protocol|Overwriting"
    warnings.filterwarnings("ignore", message=f".*({noise}).*")
    mujoco.set_mju_user_warning(lambda text: None if "settotalmass" in text else print(text))
    if "-v" in args.env_id:
        torch.set_num_threads(1)  # networks this small gain nothing from more
    if args.total_timesteps < STEPS:
        refuse(f"--total-timesteps must be at least {STEPS}; it is {args.total_timesteps}.")
    if not 0 <= args.seed < 2**31:
        refuse(f"--seed must be between 0 and 2147483647; it is {args.seed}.")
    group = {"ppo": "sb3_ppo", "trpo": "sb3_trpo"}[args.algorithm]
    path = args.output or RESULTS / group / f"{args.env_id}__{args.seed}.csv"
    start = time.time()
    rows, episodes = train(args)
    names = ("torch", "gymnasium", "mujoco", "numpy", "stable_baselines3", "sb3_contrib")
    options = {"algorithm": args.algorithm, "env-id": args.env_id, "seed": args.seed}
    options |= {"total-timesteps": args.total_timesteps}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.tmp", "w", newline="") as file:
        file.write(f"# command: python benchmark/peers.py {shlex.join(words)}\n")
        file.write(f"# versions: {', '.join(f'{name} {version(name)}' for name in names)}\n")
        file.write(f"# seconds: {time.time() - start:.0f}, episodes: {episodes}\n")
        csv.writer(file, lineterminator="\n").writerows([["step", "return"], *rows])
    os.replace(f"{path}.tmp", path)  # at once: never half a file


if __name__ == "__main__":
    main()
