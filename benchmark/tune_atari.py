r"""A tuning prototype, never for results: spu_atari.py with four changes, each of them an option.

  1. --standardize-inputs: each pixel less its mean, over its standard deviation, clipped at +-5.
  2. --follow-region: the step size grows while the mean KL stays below delta/2 and shrinks after an
     iteration that ended above delta; no annealing.
  3. 32 games x 128 steps, minibatches of 1024, at most 4 epochs, step size 3e-4 at the start.
  4. delta 0.01, epsilon 0.03.
And --algorithm ppo: PPO's clipped loss in place of SPU's, everything else shared. The KL does not
end its epochs, unless --target-kl is given.
The algorithm itself is described in spu_atari.py.

    python benchmark/tune_atari.py --env-id Pong          # train; everything goes to runs/
    python benchmark/tune_atari.py --resume runs/RUN      # go on where a run was cut off
    OMP_NUM_THREADS=1 python benchmark/tune_atari.py    # on a single core, games included
"""

import ctypes
import difflib
import math
import os
import re
import signal
import sys
import time
import warnings
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import ale_py
import gymnasium as gym
import numpy as np
import torch
import torch.distributed as dist
import tyro
from ale_py.vector_env import AtariVectorEnv
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
RANK, WORLD = (
    int(os.getenv("RANK", "0")),
    int(os.getenv("WORLD_SIZE", "1")),
)  # this process, of how many: from torchrun
LOCAL_RANK = int(os.getenv("LOCAL_RANK", "0"))  # among those of this machine
ONE_CORE = os.getenv("OMP_NUM_THREADS") == "1"
if ONE_CORE:
    torch.set_num_threads(1)


@dataclass
class Args:
    env_id: str = "Breakout"  # an Atari game: Breakout or BreakoutNoFrameskip-v4 or ALE/Breakout-v5
    exp_name: str = SCRIPT  # part of the run folder's name
    seed: int = 1  # of the network; plus 10000 x rank, of a process's games, actions, minibatches
    total_timesteps: int = 10_000_000  # steps (of 4 frames) of all processes, in whole batches
    # The algorithm, in the symbols of the paper's section 5.1
    algorithm: Literal["spu", "ppo"] = "spu"  # ppo has the clipped loss instead, all else shared
    lam: float = 1.1  # lambda, the temperature of the target pi_k exp(A / lambda)
    epsilon: float = 0.03  # disaggregated constraint: a state with a larger KL gives no gradient
    delta: float = 0.01  # aggregated constraint: the epochs end when the mean KL exceeds delta
    max_epochs: int = 4  # the most passes over the batch in an iteration (zeta in Algorithm 1)
    clip: float = 0.1  # ppo: how far the ratio may be from 1
    target_kl: float | None = None  # ppo: end the epochs when the mean KL exceeds this
    follow_region: bool = True  # let the step size grow and shrink with the KL, towards delta
    standardize_inputs: bool = True  # pixel by pixel, with running moments; otherwise x / 255
    # What SPU shares with PPO
    num_envs: int = 32  # games per process
    num_steps: int = 128  # steps per game in an iteration; the batch is num_envs x num_steps
    minibatch_size: int = 1024  # samples per gradient step, of all processes; a rest is dropped
    learning_rate: float = 3e-4  # Adam's step size, at the start
    anneal_lr: bool = True  # without --follow-region: lower it linearly to 0 over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # of generalised advantage estimation and the TD(lambda) value targets
    value_coefficient: float = 1.0  # weight of the value loss; policy and value share a trunk
    entropy_coefficient: float = 0.01  # weight of the entropy bonus, also where KL > epsilon
    repeat_action_probability: float = 0.0  # sticky actions: 0 as in the paper, 0.25 in ALE's v5
    # The paper's ablations (table 1)
    kl_term: bool = True  # keep grad KL(pi_theta || pi_k) in the gradient
    dynamic_stopping: bool = True  # end the epochs when the mean KL exceeds delta
    per_state_acceptance: bool = True  # no gradient from a state whose KL exceeds epsilon
    # The machine, the record, and what to do
    cuda: bool = False  # act and update on the GPU, one for each process of a machine
    track: bool = False  # log to Weights & Biases too (offline with WANDB_MODE=offline)
    wandb_project_name: str = "spu"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team or user
    capture_video: bool = False  # film a game at every tenth of the training, or of --evaluate
    checkpoint_every: int = 5  # iterations between checkpoints
    resume: str | None = None  # a run folder to go on from; only --total-timesteps may be given too
    evaluate: str | None = None  # an agent.pt to replay instead of training
    eval_episodes: int = 10  # games of the evaluation, at the end of training or of --evaluate


def refuse(sentence):  # bad input: one sentence, no traceback
    print(f"{SCRIPT}.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def check(args):
    """Refuse what cannot work, before anything is written."""
    batch = args.num_envs * args.num_steps * WORLD
    rules = [
        (
            "num_envs num_steps max_epochs checkpoint_every eval_episodes",
            lambda x: x >= 1,
            "at least 1",
        ),
        (
            "lam epsilon delta learning_rate clip",
            lambda x: 0 < x < math.inf,
            "a positive, finite number",
        ),
        (
            "value_coefficient entropy_coefficient",
            lambda x: 0 <= x < math.inf,
            "a finite number, 0 or more",
        ),
        ("gamma gae_lambda repeat_action_probability", lambda x: 0 <= x <= 1, "between 0 and 1"),
        (
            "seed",
            lambda x: 0 <= x < 2**31 - 10000 * WORLD,
            "between 0 and 2147483647, less 10000 a process",
        ),
        (
            "minibatch_size",
            lambda x: 1 <= x <= batch,
            f"between 1 and the batch ({batch} samples of all processes)",
        ),
        (
            "minibatch_size",
            lambda x: x % WORLD == 0,
            f"a multiple of the number of processes, {WORLD}",
        ),
        (
            "total_timesteps",
            lambda x: x >= batch,
            f"at least one batch ({batch} samples of all processes)",
        ),
        (
            "target_kl",
            lambda x: x is None or 0 < x < math.inf,
            "left out, or a positive, finite number",
        ),
        (
            "cuda",
            lambda x: not x or torch.cuda.device_count() > LOCAL_RANK,
            "left out: no GPU for this process",
        ),
        (
            "track",
            lambda x: not x or find_spec("wandb"),
            "left out, or wandb installed: `pip install wandb`",
        ),
        (
            "capture_video",
            lambda x: not x or find_spec("moviepy"),
            "left out, or moviepy installed",
        ),
    ]
    for names, holds, wanted in rules:
        for name in (name for name in names.split() if not holds(getattr(args, name))):
            refuse(f"--{name.replace('_', '-')} must be {wanted}; it is {getattr(args, name)}.")


def rom(env_id):
    """The ROM of a game, however it is spelt: BreakoutNoFrameskip-v4, ALE/Breakout-v5 and Breakout
    are `breakout`."""
    names = {name.replace("_", ""): name for name in ale_py.roms.get_all_rom_ids()}
    spelt = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?-v\d+$", "", env_id).lower().replace("_", "")
    if spelt not in names:
        near = [
            names[name].title().replace("_", "") for name in difflib.get_close_matches(spelt, names)
        ]
        refuse(
            f"{env_id} is no Atari game that ale-py has"
            f"{': did you mean ' + ' or '.join(near) if near else ''}."
        )
    return names[spelt]


def make_env(args, seed, draw=False):
    """One seeded game with the usual preprocessing, for evaluation and video; training has
    AtariVectorEnv."""
    try:
        game = f"ALE/{rom(args.env_id).title().replace('_', '')}-v5"
        sticky = {"repeat_action_probability": args.repeat_action_probability}
        env = gym.make(
            game, frameskip=1, **sticky, **({"render_mode": "rgb_array"} if draw else {})
        )
        env = gym.wrappers.FrameStackObservation(
            gym.wrappers.AtariPreprocessing(env), 4, padding_type="zero"
        )
        env.reset(seed=seed)
    except Exception as error:
        refuse(
            f"{args.env_id} cannot be {('made', 'drawn')[draw]}: "
            f"{' '.join(str(error).split()) or repr(error)}"
        )
    return env


class Games:
    """Games side by side in ale-py's C++ threads, with the usual preprocessing: at the start FIRE,
    if the game has it, and a random number of no-ops, up to 30; then each action for 4 frames. Seen
    are the last 4 steps, each the maximum of its last two frames, 84 x 84 and grey. A lost life
    ends the return that is learnt from, but the game goes on."""

    def __init__(self, args, seed, **changes):
        options = {"life_loss_info": True, "reward_clipping": False, "autoreset_mode": "SameStep"}
        options |= {"repeat_action_probability": args.repeat_action_probability}
        options |= {"num_threads": int(ONE_CORE)}  # 0 is a thread per core
        self.envs = AtariVectorEnv(rom(args.env_id), args.num_envs, **(options | changes))
        self.obs, info = self.envs.reset(seed=seed)
        self.frames = info["episode_frame_number"]
        self.scores, self.lengths = np.zeros((2, args.num_envs))

    def step(self, actions):
        """Returns rewards; which games lost a life, the last one included; which ran out of time,
        and what was seen last where they did (obs is the new game already); and (index, score of
        all lives, length) of those now over."""
        self.obs, rewards, lost, truncated, info = self.envs.step(actions)
        self.scores, self.lengths = self.scores + rewards, self.lengths + 1
        # A new game has begun; the number of lives need not tell
        over = info["episode_frame_number"] < self.frames
        finished = [
            (int(i), float(self.scores[i]), int(self.lengths[i])) for i in np.flatnonzero(over)
        ]
        self.frames = info["episode_frame_number"]
        self.scores, self.lengths = self.scores * ~over, self.lengths * ~over
        return rewards, lost, truncated, info.get("final_obs"), finished


def layer(linear, gain):
    """Orthogonal initial weights, zero biases."""
    nn.init.orthogonal_(linear.weight, gain)
    nn.init.zeros_(linear.bias)
    return linear


class Agent(nn.Module):
    """The convolutional network of Mnih et al. (2015), with a softmax policy and a value function
    on one trunk."""

    def __init__(self, num_actions):
        super().__init__()
        gain = math.sqrt(2)
        layers = [
            layer(nn.Conv2d(4, 32, 8, stride=4), gain),
            nn.ReLU(),
            layer(nn.Conv2d(32, 64, 4, stride=2), gain),
        ]
        layers += [nn.ReLU(), layer(nn.Conv2d(64, 64, 3), gain), nn.ReLU(), nn.Flatten()]
        self.trunk = nn.Sequential(*layers, layer(nn.Linear(3136, 512), gain), nn.ReLU())
        self.policy = layer(nn.Linear(512, num_actions), 0.01)
        self.value = layer(nn.Linear(512, 1), 1.0)
        # The moments of a pixel, in bytes: sums of whole numbers, so that float64 has them exactly
        self.register_buffer("frames", torch.zeros((), dtype=torch.float64))
        self.register_buffer("sums", torch.zeros(2, 84, 84, dtype=torch.float64))
        # What the inputs are made with. A copy per stacked frame: broadcasting would be slower
        self.register_buffer("pixel_mean", torch.zeros(1, 4, 84, 84))
        self.register_buffer("pixel_std", torch.full((1, 4, 84, 84), 255.0))
        self.to(memory_format=torch.channels_last)  # 1.5 times as fast on a CPU

    def see(self, frames):
        """Take frames, (..., 84, 84) bytes, of all processes into the moments. Only between
        iterations: the policy that has acted must be the policy that is fitted."""
        frames = frames.flatten(0, -3).to(self.sums.device, torch.float64)
        self.frames += len(frames)
        (new,) = average(torch.stack([frames.sum(0), (frames**2).sum(0)]))
        self.sums += new  # of an average process, as the number of frames is
        mean, square = self.sums / self.frames
        self.pixel_mean.copy_(mean)
        self.pixel_std.copy_((square - mean**2 + 1e-5 * 255**2).sqrt())

    def forward(self, obs):
        """Four 84 x 84 frames as uint8 to log pi(.|s) and V(s)."""
        pixels = obs.contiguous(memory_format=torch.channels_last).float()
        # (x / 255 - mean) / sqrt(var + 1e-5). With no moments it is x / 255, and nothing is clipped
        pixels = pixels.sub_(self.pixel_mean).div_(self.pixel_std).clamp_(-5, 5)
        features = self.trunk(pixels)
        return self.policy(features).log_softmax(-1), self.value(features).squeeze(-1)


def categorical_kl(log_probs, old_log_probs):
    """KL(pi_theta || pi_k) in each state, exact: a sum over the actions."""
    return (log_probs.exp() * (log_probs - old_log_probs)).sum(-1)


def spu_loss(kl, ratio, advantages, lam, epsilon, kl_term=True):
    """Its gradient is eq. (18): grad KL - (1/lambda) grad ratio A where KL <= epsilon, else 0."""
    accepted = kl.detach() <= epsilon  # the indicator, a constant for the gradient
    return torch.where(accepted, kl_term * kl - ratio * advantages / lam, 0.0).mean()


def ppo_loss(ratio, advantages, clip):
    """PPO's clipped surrogate."""
    return -torch.min(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages).mean()


def gae(rewards, values, next_values, dead, ended, gamma, gae_lambda):
    """Generalised advantages; all arrays are (num_steps, num_envs). next_values[t] is the value of
    the observation that step t produced, before any reset; where the episode is dead by then, it
    counts as 0."""
    td_errors = rewards + gamma * next_values * ~dead - values
    advantages, decay, advantage = np.zeros_like(td_errors), gamma * gae_lambda * ~ended, 0.0
    for t in reversed(range(len(rewards))):
        advantages[t] = advantage = td_errors[t] + decay[t] * advantage
    return advantages


def losses(params, agent, batch, args):
    """The loss on these samples as a function of the parameters (agent is the architecture and the
    moments of the inputs), and its parts."""
    obs, actions, advantages, value_targets, old_log_probs = batch
    log_probs, values = torch.func.functional_call(agent, params, (obs,))
    kl = categorical_kl(log_probs, old_log_probs)
    log_ratio = (log_probs - old_log_probs).gather(-1, actions[:, None]).squeeze(-1)
    ratio = log_ratio.clamp(max=20).exp()  # finite, so that a state not accepted gives 0, not NaN
    if args.algorithm == "ppo":
        policy_loss = ppo_loss(ratio, advantages, args.clip)
    else:
        epsilon = args.epsilon if args.per_state_acceptance else math.inf
        policy_loss = spu_loss(kl, ratio, advantages, args.lam, epsilon, args.kl_term)
    value_loss = ((values - value_targets) ** 2).mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = policy_loss + args.value_coefficient * value_loss - args.entropy_coefficient * entropy
    accepted = (kl <= args.epsilon).float().mean()
    parts = [policy_loss, value_loss, entropy, accepted, kl.mean(), kl.max()]
    return loss, torch.stack(parts).detach()


def average(*tensors):
    """The means of these tensors over all processes, in one all-reduce."""
    if WORLD == 1:
        return tensors
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat)
    parts = (flat / WORLD).split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors)]


def join_processes(attempt):
    """Meet the other processes. After a restart the store still has the addresses of the dead: do
    not look there."""
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    store, rank, world = next(dist.rendezvous("env://"))
    dist.init_process_group(
        backend, store=dist.PrefixStore(attempt, store), rank=rank, world_size=world
    )


def minibatch_step(params, adam, rate, agent, batch, args):
    """Loss, gradient, its average over the processes, and Adam (betas 0.9 and 0.999, eps 1e-5).
    Returns the parts of the loss before the step."""
    gradient, parts = torch.func.grad(losses, has_aux=True)(params, agent, batch, args)
    *averaged, parts = average(*gradient.values(), parts)
    t = adam["step"].add_(1)
    for name, g in zip(gradient, averaged):
        m, v = adam["m." + name].lerp_(g, 1 - 0.9), adam["v." + name].lerp_(g * g, 1 - 0.999)
        params[name].sub_(rate * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-5))
    return parts


def keep_memory():
    """Large tensors are freed and made again in every minibatch. glibc asks the system for each of
    them, page by page: a quarter of the time of a fit in minibatches of 1024. Let it keep them."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)  # M_MMAP_MAX: no allocation of its own for a large tensor
        mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: give nothing back


def play(agent, args, episodes, video=None):
    """Play whole games with sampled actions (always the likeliest can stall a game for ever) and
    return a sentence about their scores; video is where to film the first."""
    env, returns = make_env(args, args.seed, draw=video is not None), []
    device = agent.value.weight.device
    # Dice of its own: a film does not change the training
    dice = torch.Generator().manual_seed(args.seed)
    if video:
        film = {
            "episode_trigger": lambda episode: episode == 0,
            "name_prefix": video.name,
            "fps": 15,
        }
        env = gym.wrappers.RecordVideo(env, str(video.parent), **film)
    for episode in range(episodes):
        (obs, _), ended, total = env.reset(seed=args.seed + episode), False, 0.0
        if "FIRE" in env.unwrapped.get_action_meanings():
            # In training it comes before no-ops
            obs, *_ = env.step(env.unwrapped.get_action_meanings().index("FIRE"))
        while not ended:
            with torch.no_grad():
                log_probs, _ = agent(torch.as_tensor(obs, device=device)[None])
            action = log_probs.exp().cpu().multinomial(1, generator=dice).item()
            obs, reward, terminated, truncated, _ = env.step(action)
            ended, total = terminated or truncated, total + float(reward)
        returns.append(total)
    env.close()
    film = f", filmed in {video}-episode-0.mp4" if video else ""
    score = f"return {np.mean(returns):.1f} ± {np.std(returns):.1f}"
    return f"{score} over {episodes} episodes with sampled actions{film}"


def save(data, path):
    torch.save(data, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)  # atomic: a kill leaves the old file or the new one


def load(path):
    """A file that this script saved, and its Args. With weights_only, a stranger's file cannot run
    code."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        assert data["script"] == SCRIPT
        return data, Args(**data["args"])
    except Exception:
        refuse(
            f"{path} is not of a run of {SCRIPT}.py: give --resume a run folder, or --evaluate an "
            "agent.pt in one."
        )


def main():
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    typed = [word.split("=")[0] for word in sys.argv[1:] if word.startswith("--")]
    given = {word.replace("_", "-") for word in typed}
    warnings.filterwarnings(
        "ignore", message=".*(is out of date|render_modes|pickle protocol|Overwriting).*"
    )
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    gym.register_envs(ale_py)
    keep_memory()
    # ---- Set up, from the options or from a saved file
    saved, iteration, last_returns, rate_factor = None, 0, [], 1.0
    launch = os.getenv("TORCHELASTIC_RUN_ID", str(os.getpid()))
    name = f"{args.env_id}__{args.exp_name}__{args.seed}__".replace("/", "-")
    now = time.strftime("%Y%m%d-%H%M%S")
    run_dir = Path("runs") / f"{name}{now}-{launch}"
    if args.resume is not None and (extra := given - {"--resume", "--total-timesteps"}):
        refuse(
            f"--resume takes its options from the checkpoint: leave out {' '.join(sorted(extra))}."
        )
    restarts = os.getenv("TORCHELASTIC_RESTART_COUNT", "0")
    # torchrun starts us again after a crash: find our folder
    if restarts != "0" and args.resume is None:
        folders = sorted(path.parent for path in Path("runs").glob("*/checkpoint.pt"))
        folders = [
            str(f) for f in folders if f.name.startswith(name) and f.name.endswith(f"-{launch}")
        ]
        args.resume = folders[-1] if folders else None
    if args.resume is not None and RANK == 0:
        run_dir, total_timesteps = Path(args.resume), args.total_timesteps
        saved, args = load(run_dir / "checkpoint.pt")
        args.total_timesteps = (
            total_timesteps if "--total-timesteps" in given else args.total_timesteps
        )
    elif args.evaluate is not None:
        saved, trained = load(args.evaluate)
        args.env_id = args.env_id if "--env-id" in given else trained.env_id
        if "--repeat-action-probability" not in given:  # as it was trained
            args.repeat_action_probability = trained.repeat_action_probability
        if rom(args.env_id) != rom(trained.env_id):
            refuse(f"The saved agent plays {trained.env_id}, not {args.env_id}.")
    # Rank 0 decides what is resumed and tells the others: they need not see its files
    if WORLD > 1:
        join_processes(restarts)
        dist.broadcast_object_list(decided := [saved, args, run_dir])
        saved, args, run_dir = decided
    check(args)
    env = make_env(args, args.seed, draw=args.capture_video)
    batch_size = args.num_envs * args.num_steps  # of this process, as is
    minibatch_size = args.minibatch_size // WORLD
    num_iterations = args.total_timesteps // (batch_size * WORLD)
    device = f"cuda:{LOCAL_RANK}" if args.cuda else "cpu"
    num_actions = int(env.action_space.n)
    torch.manual_seed(args.seed)  # the same network in all processes
    agent = Agent(num_actions).to(device)
    if saved:
        agent.load_state_dict(saved["agent"])
    if args.evaluate is not None:
        if WORLD > 1:
            refuse("--evaluate needs one process: start it with python, not with torchrun.")
        video = (
            Path(args.evaluate).parent / "videos" / f"evaluation-{now}-{launch}"
            if args.capture_video
            else None
        )
        return print(f"{args.env_id}: {play(agent, args, args.eval_episodes, video)}")
    # The agent's own memory, updated in place
    params = {name: p.detach() for name, p in agent.named_parameters()}
    adam = {f"m.{name}": torch.zeros_like(p) for name, p in params.items()}
    adam |= {f"v.{name}": torch.zeros_like(p) for name, p in params.items()}
    adam["step"] = torch.zeros((), device=device)
    if saved:
        iteration = saved["global_step"] // (batch_size * WORLD)
        if iteration >= num_iterations:
            refuse(
                f"{run_dir} has done {saved['global_step']} steps: to go on, give a larger "
                "--total-timesteps."
            )
        adam = {name: tensor.to(device) for name, tensor in saved["adam"].items()}
        last_returns, rate_factor = saved["last_returns"], saved["rate_factor"]
    # The games' random state cannot be saved, so a resumed run draws anew, from seeds that no other
    # process has
    seed = args.seed + 10000 * RANK + iteration
    torch.manual_seed(seed)
    if RANK == 0:
        writer = SummaryWriter(
            str(run_dir), purge_step=iteration * batch_size * WORLD + 1 if saved else None
        )
        text = "\n".join(
            f"    {key}: {value}" for key, value in (vars(args) | {"processes": WORLD}).items()
        )
        writer.add_text("hyperparameters", text, iteration)
    if args.track and RANK == 0:
        import wandb

        where = {
            "project": args.wandb_project_name,
            "entity": args.wandb_entity,
            "dir": str(run_dir),
        }
        name = run_dir.resolve().name.replace(":", "-")
        wandb.init(**where, id=name, name=name, resume="allow", config=vars(args))
        wandb.define_metric("*", step_metric="global_step")

    def log(values, global_step):
        for key, value in values.items():
            writer.add_scalar(key, value, global_step)
        if args.track:
            wandb.log(values | {"global_step": global_step})

    shape = (args.num_steps, args.num_envs)
    obs = torch.zeros((*shape, 4, 84, 84), dtype=torch.uint8)  # bytes until they are used
    actions = torch.zeros(shape, dtype=torch.int64)
    old_log_probs = torch.zeros((*shape, num_actions))
    rewards, values, final_values = np.zeros((3, *shape), np.float32)
    lost, truncated = np.zeros((2, *shape), bool)
    if args.standardize_inputs and not saved:  # first moments: 64 random steps, of other games
        games, frames = Games(args, seed), []
        for _ in range(64):
            games.step(torch.randint(num_actions, (args.num_envs,)).numpy())
            frames.append(torch.tensor(games.obs[:, -1]))
        agent.see(torch.stack(frames))
    games = Games(args, seed)
    # The first Ctrl-C fills the list, a second ends the process
    stop, at_once = [], (signal.SIGINT, signal.SIG_DFL)
    said = b"\nStopping after this iteration. "
    said += b"(Ctrl-C again stops at once, and loses what is not in a checkpoint.)\n"
    signal.signal(
        signal.SIGINT, lambda *_: (stop.append(os.write(2, said)), signal.signal(*at_once))
    )
    launcher = "python" if WORLD == 1 else f"torchrun --standalone --nproc-per-node {WORLD}"
    if int(os.getenv("LOCAL_WORLD_SIZE", "1")) < WORLD:
        launcher = "on every machine torchrun with the options it had,"
    go_on = f"To go on from the last checkpoint: {launcher} {sys.argv[0]} --resume {run_dir}"
    steps = {
        "total": num_iterations * batch_size * WORLD,
        "initial": iteration * batch_size * WORLD,
    }
    bar = tqdm(**steps, unit=" steps", unit_scale=True, disable=RANK > 0)
    while True:
        # ---- Checkpoint: at the start, every few iterations, after Ctrl-C and at the end
        global_step, iteration_start = iteration * batch_size * WORLD, time.time()
        finished = iteration == num_iterations
        (stopped,) = average(torch.tensor(float(len(stop))))
        leaving = finished or stopped > 0
        if RANK == 0 and (leaving or iteration % args.checkpoint_every == 0):
            writer.flush()
            data = {"script": SCRIPT, "args": vars(args), "agent": agent.state_dict()}
            if finished:
                save(data, run_dir / "agent.pt")
            data |= {"adam": adam, "global_step": global_step, "last_returns": last_returns}
            data |= {"rate_factor": rate_factor}
            save(data, run_dir / "checkpoint.pt")
        if leaving:
            break
        # ---- Collect a batch with pi_k
        episodes = []
        for t in range(args.num_steps):
            obs[t] = torch.from_numpy(games.obs)
            with torch.no_grad():
                old_log_probs[t], value = (x.cpu() for x in agent(obs[t].to(device)))
            values[t], actions[t] = value, old_log_probs[t].exp().multinomial(1).squeeze(-1)
            reward, lost[t], truncated[t], final_obs, finished_games = games.step(
                actions[t].numpy()
            )
            rewards[t] = np.sign(reward)
            if truncated[t].any():  # a time limit is not death
                with torch.no_grad():
                    final_values[t] = agent(torch.from_numpy(final_obs).to(device))[1].cpu()
            for i, score, length in finished_games:
                episodes.append(
                    (global_step + (t * args.num_envs + i) * WORLD + RANK + 1, score, length)
                )
        # ---- Advantages, normalised over all processes
        with torch.no_grad():
            next_values = np.concatenate(
                [values[1:], agent(torch.from_numpy(games.obs).to(device))[1][None].cpu()]
            )
        next_values = np.where(truncated, final_values, next_values)
        advantages = gae(
            rewards, values, next_values, lost, lost | truncated, args.gamma, args.gae_lambda
        )
        value_targets = advantages + values  # TD(lambda) returns
        (mean,) = average(torch.tensor(advantages.mean()))
        (var,) = average(torch.tensor(((advantages - mean.item()) ** 2).mean()))
        # lambda is in units of this standard deviation
        advantages = (advantages - mean.item()) / (math.sqrt(var) + 1e-8)
        batch = (obs, actions, torch.tensor(advantages), torch.tensor(value_targets), old_log_probs)
        batch = [x.flatten(0, 1).to(device) for x in batch]
        # ---- Fit: epochs over the batch in minibatches, until the mean KL exceeds delta
        largest_kl = args.delta if args.dynamic_stopping else math.inf
        if args.algorithm == "ppo":
            largest_kl = args.target_kl or math.inf
        annealed = 1 - args.anneal_lr * iteration / num_iterations
        rate = args.learning_rate * (rate_factor if args.follow_region else annealed)
        rate = torch.tensor(rate, device=device)
        with torch.no_grad():  # torch.func.grad differentiates all the same
            for epochs_used in range(1, args.max_epochs + 1):
                order = torch.randperm(batch_size).unfold(0, minibatch_size, minibatch_size)
                parts = [
                    minibatch_step(params, adam, rate, agent, [x[i] for x in batch], args)
                    for i in order.to(device)
                ]
                # The KL of each state as the epoch met it: measuring all of them after it would
                # take half as long again
                policy_loss, value_loss, entropy, accepted, kl, _ = (
                    torch.stack(parts).mean(0).tolist()
                )
                if kl > largest_kl:
                    break
        if not math.isfinite(policy_loss + value_loss + kl + sum(p.sum() for p in params.values())):
            sys.exit(f"\nThe loss became NaN or infinite. {go_on}")
        # ---- Between iterations: the next step size and the next moments
        if kl > args.delta:
            rate_factor /= 1.5
        elif kl < args.delta / 2:
            rate_factor = min(1.5 * rate_factor, 20.0)
        if args.standardize_inputs:
            agent.see(obs[::8, :, -1])
        # ---- Log
        iteration, global_step = iteration + 1, global_step + batch_size * WORLD
        if WORLD > 1:
            dist.all_gather_object(gathered := [None] * WORLD, episodes)
            episodes = sorted(sum(gathered, []))
        if RANK > 0:
            continue
        for step, score, length in episodes:
            last_returns = [*last_returns[-99:], score]
            log({"charts/episodic_return": score, "charts/episodic_length": length}, step)
        explained = 1 - np.var(value_targets - values) / (np.var(value_targets) + 1e-8)
        scalars = {
            "charts/SPS": batch_size * WORLD / (time.time() - iteration_start),
            "charts/learning_rate": rate.item(),
            "losses/policy_loss": policy_loss,
            "losses/value_loss": value_loss,
            "losses/entropy": entropy,
            "losses/explained_variance": explained,
            "spu/kl_mean": kl,
            # With several processes, the mean of theirs
            "spu/kl_max": max(part[-1].item() for part in parts),
            "spu/accepted_fraction": accepted,
            "spu/epochs_used": epochs_used,
        }
        log(scalars, global_step)
        bar.set_postfix_str(
            f"return {np.mean(last_returns or math.nan):.1f}, KL {kl:.4f}, {epochs_used} epochs"
        )
        bar.update(batch_size * WORLD)
        if args.capture_video and 10 * iteration % num_iterations < 10:  # another tenth is done
            video = run_dir / "videos" / f"step-{global_step}"
            play(agent, args, 1, video)
            if args.track:
                wandb.log(
                    {"video": wandb.Video(f"{video}-episode-0.mp4"), "global_step": global_step}
                )
    bar.close()
    if WORLD > 1:
        dist.destroy_process_group()
    if RANK > 0:
        return
    if not finished:
        print(f"Stopped after {global_step} steps. {go_on}")
        sys.exit(130)
    print(f"{args.env_id} after {global_step} steps: {play(agent, args, args.eval_episodes)}")
    print(
        f"It is all in {run_dir}/; to watch it: python {sys.argv[0]} --evaluate {run_dir}/agent.pt "
        "--capture-video"
    )


if __name__ == "__main__":
    main()
