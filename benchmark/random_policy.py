"""What a random policy scores: the zero of the paper's improvement.

    python benchmark/random_policy.py                  # half an hour; writes results/random.csv
    python benchmark/random_policy.py Pong Breakout    # only these; the other rows stay

100 episodes each. Atari's actions are drawn uniformly. MuJoCo's are in two ways: unit-Gaussian, not
clipped, which is what an untrained policy with log-std 0 does, and uniform over the action space.
The paper does not say which it means, but its numbers do: where actions cost reward, its random
scores are the uniform ones (Reacher -43.5, here -43.0 against -109; Ant -60, here -57 against -337;
HalfCheetah -280, here -286 against -650), and its percentages there follow from no others.
HumanoidStandup (38,800; here 33,429 against 37,224), InvertedPendulum and Swimmer are nearer to the
Gaussian. So report.py uses uniform actions.
"""

import csv
import os
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import tyro
from run import GAMES, MUJOCO, ROOT
from tqdm import tqdm

sys.path.insert(0, str(ROOT))
import spu_atari  # noqa: E402


@dataclass
class Args:
    env_ids: tyro.conf.Positional[list[str]] = field(
        default_factory=lambda: [*MUJOCO, "Pong", "Breakout", *GAMES]
    )
    episodes: int = 100  # for each environment and each kind of actions
    seed: int = 1  # of the actions and the environments
    output: Path = Path(__file__).resolve().parent / "results/random.csv"  # where the table goes


def returns(env_id, gaussian, episodes, seed):
    """The return of each episode."""
    env = gym.make(env_id)
    generator = np.random.default_rng(seed)
    totals = []
    space = env.action_space
    env.reset(seed=seed)
    for _ in range(episodes):
        env.reset()
        ended = False
        total = 0.0
        while not ended:
            if gaussian:
                action = generator.standard_normal(space.shape)
            else:
                action = generator.uniform(space.low, space.high)
            _, reward, terminated, truncated, _ = env.step(action.astype(space.dtype))
            ended = terminated or truncated
            total += float(reward)
        totals.append(total)
    return np.array(totals)


def scores(game, episodes, seed):
    """The score of the first game on each of so many screens."""
    games = spu_atari.Games(spu_atari.Args(env_id=game), episodes, seed)
    actions = games.envs.single_action_space.n
    generator = np.random.default_rng(seed)
    found = {}
    while len(found) < episodes:
        *_, finished = games.step(generator.integers(actions, size=episodes))
        for i, score, _ in finished:
            found.setdefault(i, score)
    return np.array(list(found.values()))


def main():
    args = tyro.cli(Args, description=__doc__)
    warnings.filterwarnings("ignore", message=".*(is out of date|render_modes).*")
    mujoco.set_mju_user_warning(lambda text: None if "settotalmass" in text else print(text))
    rows = []
    if args.output.exists():
        rows = [row for row in csv.reader(open(args.output)) if row[0] not in args.env_ids][1:]
    for env_id in tqdm(args.env_ids, unit="environment"):
        for actions in ("gaussian", "uniform") if "-v" in env_id else ("uniform",):
            if "-v" in env_id:
                x = returns(env_id, actions == "gaussian", args.episodes, args.seed)
            else:
                x = scores(env_id, args.episodes, args.seed)
            error = x.std(ddof=1) / np.sqrt(len(x))
            rows.append([env_id, actions, len(x), f"{x.mean():.2f}", f"{error:.2f}"])
    rows = [["env_id", "actions", "episodes", "mean", "standard_error"], *sorted(rows)]
    with open(f"{args.output}.tmp", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)
    os.replace(f"{args.output}.tmp", args.output)


if __name__ == "__main__":
    main()
