# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium==1.4.0", "ale-py==0.12.1", "numpy==2.4.6", "tyro==1.0.16",
#   "tensorboard==2.21.0", "tqdm==4.70.1", "wandb==0.31.0", "moviepy==2.2.1",
# ]
# ///
"""Supervised Policy Update (SPU): forward-KL constraint, Atari games.

Vuong, Zhang and Ross, ICLR 2019: https://arxiv.org/abs/1805.11706, whose equation numbers we use.

SPU is PPO with another update: it first works out which policy it would like to have, then fits
the network to that. Let pi_k be the policy that collected the batch.

1. Solve. Among ALL policies, not only those that a network can express,
       maximise    the expected advantage A(s, a)
       subject to  mean KL(pi || pi_k) <= delta   and   KL(pi || pi_k)[s] <= epsilon in each state
   Theorem 1: the solution is pi*(a|s), proportional to pi_k(a|s) exp(A(s, a) / lambda), where
   lambda follows from delta, or from epsilon in a state where that binds. Like the paper we use one
   lambda, set by hand. So this step has no code: it gives the loss its form.

2. Fit the network pi_theta to pi*. Up to a term without theta,
       KL(pi_theta || pi*) = KL(pi_theta || pi_k) - (1/lambda) E_{a ~ pi_k}[ratio A]
   with ratio = pi_theta(a|s) / pi_k(a|s): a KL, known exactly as a sum over all actions, and a mean
   over the actions of the batch. Two rules stand for the constraints: a state whose KL has passed
   epsilon drops out of this loss (eq. 18, `spu_loss`), and when the mean KL has passed delta, the
   epochs end (`fit`).

Why KL(new || old)? It is large where the new policy does what pi_k would hardly do, and of such
actions the batch tells nothing. It also makes pi* an exponential of A, so that the fit splits into
those two parts. (The paper calls this KL forward; elsewhere it is the reverse one.)

Unlike in spu_continuous.py, policy and value function share a trunk: they have one loss, and their
epochs end together. Ours, not the paper's, besides some constants: pixels are standardised, and the
step size follows the trust region (`next_learning_rate`), so that delta sets the pace.

How to read: from top to bottom, or first `train`, which is Algorithm 1. Skip the plumbing below it.
For another constraint change `spu_loss`, its call and the measures in `joint_loss`, the rule in
`fit`, `next_learning_rate`, what `train` logs, and the options in `Args` and `check`.

    python spu_atari.py --env-id Pong                                  # train, into runs/
    python spu_atari.py --env-id Breakout --track                      # with Weights & Biases
    python spu_atari.py --resume runs/RUN                              # go on where it stopped
    python spu_atari.py --evaluate runs/RUN/agent.pt --capture-video   # watch the agent

Several processes can share the work, on several machines too (torchrun's --nnodes and --rdzv-...,
in a shared folder). If one dies, all are started again, from the last checkpoint:

    torchrun --standalone --nproc-per-node 4 --max-restarts 2 spu_atari.py --env-id Pong
"""

import difflib
import math
import os
import re
import shlex
import sys
import time
from collections import deque
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

import ale_py
import numpy as np
import torch
import torch.distributed as dist
import tyro
from ale_py.vector_env import AtariVectorEnv
from filelock import FileLock  # comes with torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem
RANK = int(os.getenv("RANK", "0"))  # which process this is, and of how many: from torchrun
WORLD = int(os.getenv("WORLD_SIZE", "1"))


@dataclass
class Args:
    env_id: str = "Breakout"  # a game: Breakout, BreakoutNoFrameskip-v4 or ALE/Breakout-v5
    seed: int = 1  # of the games, the network, the actions and the minibatches
    total_timesteps: int = 10_000_000  # steps of all games (of 4 frames each), in whole batches
    # The algorithm: tuned (benchmark/PROTOCOL.md); in brackets what the paper has
    lam: float = 1.1  # lambda, in standard deviations of the batch's advantages (paper: 1.1)
    epsilon: float = 0.06  # nats; a state whose KL exceeds it drops out (paper: 0.0154)
    delta: float = 0.02  # nats; the epochs end when the mean KL exceeds it (paper: 0.02)
    max_epochs: int = 4  # the most passes over a batch (paper: 9)
    kl_term: bool = True  # the KL in the loss; --no-kl-term is the paper's ablation
    adapt_lr: bool = True  # the step size follows delta (paper: no, it falls linearly to 0)
    standardize_inputs: bool = True  # pixel by pixel (paper: no, they are x / 255)
    # What SPU shares with PPO
    num_envs: int = 32  # games side by side, of all processes (paper: 8)
    num_steps: int = 128  # steps of each game in a batch (paper: 256)
    minibatch_size: int = 1024  # samples per gradient step, of all processes (paper: 512)
    learning_rate: float = 3e-4  # Adam's step size, at the start (paper: 1e-4)
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the advantage estimates and of the value targets
    value_coefficient: float = 1.0  # weight of the value loss (the paper does not say)
    entropy_coefficient: float = 0.01  # weight of the entropy bonus (the paper does not say)
    repeat_action_probability: float = 0.0  # sticky actions, 0.25 in ALE's -v5 games (paper: 0)
    # The machine and the record
    cuda: bool = False  # compute on GPUs, one for each process
    track: bool = False  # log to Weights & Biases too (WANDB_PROJECT, WANDB_MODE=offline, ...)
    capture_video: bool = False  # film the first game of the evaluation
    eval_episodes: int = 10  # games to play, side by side, after training or by --evaluate
    resume: str | None = None  # a run folder to go on from, with its options
    evaluate: str | None = None  # the agent.pt of a run, to play instead of training


# ------------------------------------------------------------------- The algorithm


def categorical_kl(log_probs, old_log_probs):
    """KL(pi_theta || pi_k) in each state, exact: a sum over the actions."""
    return (log_probs.exp() * (log_probs - old_log_probs)).sum(-1)


def spu_loss(kl, ratio, advantages, lam, epsilon, kl_term=True):
    """Estimates KL(pi_theta || pi*) of step 2, up to a constant; its gradient is eq. (18)."""
    loss = -ratio * advantages / lam
    if kl_term:
        loss = loss + kl
    accepted = kl <= epsilon  # the indicator: beyond epsilon a state gives this loss no gradient
    return torch.where(accepted, loss, 0.0).mean()


def gae(rewards, values, next_values, terminated, ended, gamma, gae_lambda):
    """Generalised advantage estimation. next_values[t] is the value of the state that step t led
    to, before any reset. After a real end (terminated) nothing follows: there it counts as 0. At a
    time limit (ended, but not terminated) it stands for the rewards that were cut off."""
    advantages = rewards + gamma * np.where(terminated, 0.0, next_values) - values  # TD errors
    decay = np.where(ended, 0.0, gamma * gae_lambda)
    for t in reversed(range(len(rewards) - 1)):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages


def next_learning_rate(learning_rate, kl, args):
    """The step size grows while the trust region is far from used up, and shrinks when it is: by
    the mean KL of an iteration's last epoch."""
    if kl > args.delta:
        return learning_rate / 1.5
    if kl < args.delta / 2 and args.delta < math.inf:  # without delta it stays
        return min(1.5 * learning_rate, 20 * args.learning_rate)
    return learning_rate


# ------------------------------------------------------------------- The agent


def update_moments(moments, x):
    """Mean, standard deviation and number of all rows seen so far, x included."""
    mean, std, count = moments
    weight = len(x) / (count + len(x))
    shift = x.mean(0) - mean
    var = (1 - weight) * std**2 + weight * x.var(0, correction=0) + weight * (1 - weight) * shift**2
    mean = mean + weight * shift
    # At least 1e-4 max(|mean|, 1): what never changes is not divided by 0.
    std = torch.maximum(var, 1e-8 * mean.square().clamp(min=1.0)).sqrt()
    return torch.stack([mean, std, count + len(x)])


class Agent(nn.Module):
    """The network of Mnih et al. (2015), with heads for policy and value, and each pixel's mean and
    spread. With --no-standardize-inputs those stay 0 and 1, which makes inputs x / 255."""

    def __init__(self, num_actions):
        super().__init__()
        self.conv1 = nn.Conv2d(4, 32, 8, stride=4)
        self.conv2 = nn.Conv2d(32, 64, 4, stride=2)
        self.conv3 = nn.Conv2d(64, 64, 3)
        self.hidden = nn.Linear(3136, 512)
        self.policy = nn.Linear(512, num_actions)
        self.value = nn.Linear(512, 1)
        gains = {self.policy: 0.01, self.value: 1.0}
        for layer in self.children():
            nn.init.orthogonal_(layer.weight, gains.get(layer, math.sqrt(2)))
            nn.init.zeros_(layer.bias)
        self.to(memory_format=torch.channels_last)  # 1.5 times as fast on a CPU
        nothing_seen = torch.tensor([[0.0], [1.0], [0.0]]).double()
        self.register_buffer("pixel_moments", nothing_seen.repeat(1, 84 * 84))

    def normalize(self, obs):
        """(x / 255 - mean) / sqrt(var + 1e-5), clipped: what moves, such as Pong's ball, stands
        out. In place, and in the convolution's order of memory: twice as fast as the formula."""
        mean, std, _ = 255 * self.pixel_moments.float().view(3, 1, 1, 84, 84)
        scale = (std**2 + 1e-5 * 255**2).sqrt()
        x = obs.to(mean.device).contiguous(memory_format=torch.channels_last).float()
        x.sub_(mean.expand_as(x[:1]).contiguous(memory_format=torch.channels_last))
        x.div_(scale.expand_as(x[:1]).contiguous(memory_format=torch.channels_last))
        return x.clamp_(-5, 5)

    def forward(self, obs):
        """log pi(.|s) and V(s), of four frames of bytes."""
        x = self.conv1(self.normalize(obs)).relu()
        x = self.conv2(x).relu()
        x = self.conv3(x).relu()
        x = self.hidden(x.flatten(1)).relu()
        return self.policy(x).log_softmax(-1), self.value(x)[:, 0]

    def see(self, obs):
        """Take the newest frames, of all processes, into the moments."""
        frames = torch.cat(gather(obs[:, -1].flatten(1).cpu())).to(self.pixel_moments.device)
        self.pixel_moments = update_moments(self.pixel_moments, frames.double() / 255)


# ------------------------------------------------------------------- An iteration


@torch.no_grad()
def collect(games, agent, args, step):
    """num_steps steps of each game with pi_k. Returns the batch and, for each game that was over in
    it, (step, score, length)."""
    batch = []
    episodes = []
    for _ in range(args.num_steps):
        obs = torch.from_numpy(games.obs)
        log_probs, values = (x.cpu() for x in agent(obs))
        actions = log_probs.exp().multinomial(1)[:, 0]
        rewards, life_lost, truncated, last_obs, finished = games.step(actions.numpy())
        rewards = torch.tensor(np.sign(rewards)).float()  # scores differ in size between games
        if truncated.any():  # a time limit is no end: add the value there
            _, last_values = agent(torch.from_numpy(last_obs))
            cut_off = torch.tensor(truncated & ~life_lost)
            rewards += args.gamma * torch.where(cut_off, last_values.cpu(), 0.0)
        ended = torch.tensor(life_lost | truncated)
        batch.append((obs, actions, log_probs, values, rewards, ended))
        step += args.num_envs
        episodes += [(step, score, length) for _, score, length in finished]
    return [torch.stack(column) for column in zip(*batch)], episodes


@torch.no_grad()
def estimate(agent, batch, next_obs, args):
    """Advantages, value targets, and pi_k on the batch, as it acted: all that the fit needs."""
    obs, actions, log_probs, *rest = batch
    values, rewards, ended = (x.numpy() for x in rest)
    _, values_after = agent(torch.from_numpy(next_obs))
    next_values = np.concatenate([values[1:], values_after[None].cpu()])
    # `collect` has put what a time limit cuts off into the reward: here every end is a real one. So
    # the next value at an end, which would be the new game's, is never used.
    advantages = gae(rewards, values, next_values, ended, ended, args.gamma, args.gae_lambda)
    value_targets = advantages + values  # lambda-returns
    everyones = np.concatenate(gather(advantages))
    advantages = (advantages - everyones.mean()) / (everyones.std() + 1e-8)  # lambda's unit
    data = {
        "obs": obs,  # bytes until they are used: a quarter of the memory
        "actions": actions,
        "advantages": torch.tensor(advantages),
        "value_targets": torch.tensor(value_targets),
        "old_log_probs": log_probs,
    }
    return {name: x.flatten(0, 1).to(agent.pixel_moments.device) for name, x in data.items()}


def joint_loss(agent, data, rows, args):
    """The loss of policy and value function, and what is logged. The value loss and the entropy
    bonus count in all states."""
    log_probs, values = agent(data["obs"][rows])
    old_log_probs = data["old_log_probs"][rows]
    log_ratio = (log_probs - old_log_probs).gather(-1, data["actions"][rows, None])[:, 0]
    ratio = log_ratio.clamp(max=20).exp()  # an overflow would be NaN even in a rejected state
    kl = categorical_kl(log_probs, old_log_probs)
    advantages = data["advantages"][rows]
    policy_loss = spu_loss(kl, ratio, advantages, args.lam, args.epsilon, args.kl_term)
    value_loss = (values - data["value_targets"][rows]).square().mean()
    entropy = -(log_probs.exp() * log_probs).sum(-1).mean()
    loss = policy_loss + args.value_coefficient * value_loss - args.entropy_coefficient * entropy
    return loss, {
        "losses/policy_loss": policy_loss,
        "losses/value_loss": value_loss,
        "losses/entropy": entropy,
        "spu/kl_mean": kl.mean(),
        "spu/accepted_fraction": (kl <= args.epsilon).float().mean(),
    }


def gradient_step(agent, optimizer, data, rows, args):
    """One step of Adam on these rows of all processes. Returns what was measured before it."""
    optimizer.zero_grad()
    means = {}
    for chunk in rows.split(256):  # 1.2 times as fast as 1024: smaller tensors reuse memory
        share = len(chunk) / len(rows) / WORLD
        loss, measures = joint_loss(agent, data, chunk, args)
        (share * loss).backward()
        for name, x in measures.items():
            means[name] = means.get(name, 0.0) + share * x.detach()
    if WORLD > 1:
        for x in [*(p.grad for p in agent.parameters()), *means.values()]:
            dist.all_reduce(x)  # the sum of the shares
    optimizer.step()
    return means


def fit(agent, optimizer, data, args):
    """Epochs over the batch, in shuffled minibatches, until the mean KL exceeds delta: the mean
    of what the epoch's minibatches had, each before its step. (A pass at its end would cost a third
    more.) Returns the means of what the last epoch measured, and the number of epochs."""
    size = args.minibatch_size // WORLD
    for epochs in range(1, args.max_epochs + 1):
        order = torch.randperm(len(data["obs"]))
        measured = []
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            measured.append(gradient_step(agent, optimizer, data, rows, args))
        means = {name: np.mean([float(x[name]) for x in measured]) for name in measured[0]}
        if means["spu/kl_mean"] > args.delta:
            break
    return means, epochs


def train(args, games, agent, optimizer, iterations_done, run_dir, writer):
    """Algorithm 1."""
    batch_size = args.num_envs * args.num_steps  # of all processes
    num_iterations = args.total_timesteps // batch_size
    bar = tqdm(total=num_iterations * batch_size, unit=" steps")
    bar.update(iterations_done * batch_size)
    recent = deque(maxlen=100)
    adam = optimizer.param_groups[0]  # has the step size, and is saved with it
    for iteration in range(iterations_done, num_iterations):
        start = time.time()
        if not args.adapt_lr:
            adam["lr"] = args.learning_rate * (1 - iteration / num_iterations)

        # Algorithm 1, lines 2 and 3: sample with pi_k, estimate advantages.
        batch, episodes = collect(games, agent, args, iteration * batch_size)
        data = estimate(agent, batch, games.obs, args)

        # Lines 4 to 15: fit the network.
        measures, epochs = fit(agent, optimizer, data, args)
        scalars = measures | {
            "charts/SPS": batch_size / (time.time() - start),
            "charts/learning_rate": adam["lr"],
            "spu/epochs_used": epochs,
        }

        # Only now: the moments are part of the policy. Changed before the fit, they would move it
        # away from pi_k, which acted. (An eighth of the batch is enough.)
        if args.standardize_inputs:
            an_eighth = torch.randperm(len(data["obs"]))[::8]
            agent.see(data["obs"][an_eighth])
        if args.adapt_lr:
            adam["lr"] = next_learning_rate(adam["lr"], measures["spu/kl_mean"], args)

        episodes = sorted(sum(gather(episodes), []))
        if RANK > 0:
            continue
        for step, score, length in episodes:
            recent.append(score)
            writer.add_scalar("charts/episodic_return", score, step)
            writer.add_scalar("charts/episodic_length", length, step)
        for name, scalar in scalars.items():
            writer.add_scalar(name, scalar, (iteration + 1) * batch_size)
        writer.flush()
        save(run_dir, args, agent, optimizer, iteration + 1)
        figures = f"return {np.mean(recent or math.nan):.6g}, KL {measures['spu/kl_mean']:.4f}"
        bar.set_postfix_str(f"{figures}, {epochs} epochs")
        bar.update(batch_size)
    bar.close()


# =================================================================== Plumbing
# Skip it on a first reading: games, processes, files, checks, main.


def refuse(sentence):
    """Bad input: one sentence, no traceback, exit code 2."""
    print(f"{SCRIPT}.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def rom(env_id):
    """The ROM of a game: of Breakout, BreakoutNoFrameskip-v4 and ALE/Breakout-v5 `breakout`."""
    names = {name.replace("_", ""): name for name in ale_py.roms.get_all_rom_ids()}
    spelt = re.sub(r"^ALE/|(NoFrameskip|Deterministic)?-v\d+$|_", "", env_id).lower()
    if spelt not in names:
        near = ", ".join(difflib.get_close_matches(spelt, names)) or "none"
        refuse(f"{env_id} is no Atari game that ale-py has; of a similar name: {near}.")
    return names[spelt]


class Games:
    """Games side by side in ale-py's C++ threads, with the usual preprocessing: at the start FIRE,
    if the game has it, and up to 30 no-ops; then each action for 4 frames. Seen are the last 4
    steps, each the maximum of its last two frames, 84 x 84 and grey. A lost life ends the return
    that is learnt from, but the game goes on."""

    def __init__(self, args, num_envs, seed=None, **changes):
        options = {"autoreset_mode": "SameStep", "life_loss_info": True, "reward_clipping": False}
        options["repeat_action_probability"] = args.repeat_action_probability
        options["num_threads"] = torch.get_num_threads()  # with OMP_NUM_THREADS=1 one
        self.envs = AtariVectorEnv(rom(args.env_id), num_envs, **options, **changes)
        if seed is None:  # seeded by torch, so that its generator decides everything
            seed = int(torch.randint(2**30, ()))
        self.obs, info = self.envs.reset(seed=seed)
        self.frame_numbers = info["episode_frame_number"]
        self.scores = np.zeros(num_envs)
        self.lengths = np.zeros(num_envs)

    def step(self, actions):
        """Returns rewards; which games lost a life, or ended; which ran out of time, and what was
        seen last where they did (obs is of the new game already); and (index, score of all lives,
        length) of those that are over."""
        self.obs, rewards, life_lost, truncated, info = self.envs.step(actions)
        self.scores += rewards
        self.lengths += 1
        # A new game counts its frames anew. Lives do not tell: Pong has none.
        over = info["episode_frame_number"] < self.frame_numbers
        self.frame_numbers = info["episode_frame_number"]
        finished = [(int(i), self.scores[i], self.lengths[i]) for i in np.flatnonzero(over)]
        self.scores[over] = 0.0
        self.lengths[over] = 0.0
        return rewards, life_lost, truncated, info.get("final_obs"), finished


def join_processes():
    """Meet the other processes. Returns torchrun's store of names and values, which survives us: a
    process that is started again finds there what was set before, the run folder, but also the
    addresses of processes that are dead. So each attempt meets under a new name that rank 0 makes
    up. The others may first read an old name: that it is the new one, rank 0's answer tells."""
    store, _, _ = next(dist.rendezvous("env://"))
    me = f"{time.time_ns()}-{os.getpid()}"
    attempt = me
    if RANK == 0:
        store.set("attempt", attempt)
        for rank in range(1, WORLD):
            other = store.get(f"{attempt}/{rank}").decode()
            store.set(f"{attempt}/{other}", "welcome")
    while RANK > 0 and not store.check([f"{attempt}/{me}"]):
        attempt = store.get("attempt").decode()
        store.set(f"{attempt}/{RANK}", me)
        time.sleep(0.1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    meeting = dist.PrefixStore(attempt, store)
    dist.init_process_group(backend, store=meeting, rank=RANK, world_size=WORLD)
    return store


def gather(x):
    """The x of each process, in a list."""
    everyones = [x] * WORLD
    if WORLD > 1:
        dist.all_gather_object(everyones, x)
    return everyones


@torch.no_grad()
def evaluate(agent, args, folder):
    """Play games with sampled actions (with always the likeliest a game can stall); return their
    scores."""
    torch.manual_seed(args.seed)
    games = Games(args, args.eval_episodes, args.seed)
    if args.capture_video:  # the first game once more, in colour: same seed, same actions
        picture = {"img_height": 210, "img_width": 160, "grayscale": False, "stack_num": 1}
        twin = Games(args, 1, args.seed, **picture)
    film = []
    returns = {}
    while len(returns) < args.eval_episodes:
        log_probs, _ = agent(torch.from_numpy(games.obs))
        actions = log_probs.cpu().exp().multinomial(1)[:, 0].numpy()
        *_, finished = games.step(actions)
        for i, score, _ in finished:
            returns.setdefault(i, score)  # its first game: who is done early plays on
        if args.capture_video and 0 not in returns:
            twin.step(actions[:1])
            film.append(twin.obs[0, 0])
    if args.capture_video:
        from moviepy import ImageSequenceClip

        folder.mkdir()
        ImageSequenceClip(film, fps=15).write_videofile(folder / "game.mp4", logger=None)
        print(f"The first game is filmed in {folder / 'game.mp4'}")
    scores = list(returns.values())
    figures = f"{np.mean(scores):.6g} ± {np.std(scores):.3g}"
    print(f"{args.env_id}: return {figures} over {len(scores)} games with sampled actions")
    return scores


def save(run_dir, args, agent, optimizer, iterations_done):
    """At the start and after every iteration: all that was learnt, but not the games, which cannot
    be saved. A resumed run begins new ones, so it is not the unbroken run.
    On the CPU, so that a machine without a GPU can load it."""
    state = {name: x.cpu() for name, x in agent.state_dict().items()}
    if not all(x.isfinite().all() for x in state.values()):
        cure = "try another --seed, or a new run with a lower --learning-rate"
        raise FloatingPointError(f"The agent is NaN or infinite: {cure}.")
    adam = optimizer.state_dict()
    for i, moments in adam["state"].items():
        adam["state"][i] = {name: x.cpu() for name, x in moments.items()}
    saved = {
        "script": SCRIPT,
        "args": asdict(args),
        "agent": state,
        "adam": adam,
        "iterations_done": iterations_done,
        "random_state": torch.get_rng_state(),
    }
    torch.save(saved, run_dir / "agent.pt.tmp")
    os.replace(run_dir / "agent.pt.tmp", run_dir / "agent.pt")  # a kill leaves one or the other


def check(args):
    """Refuse what cannot work, before anything is written."""
    batch_size = args.num_envs * args.num_steps
    gpus = torch.cuda.device_count() // int(os.getenv("LOCAL_WORLD_SIZE", "1"))
    rules = [
        ("num_envs num_steps max_epochs eval_episodes", lambda x: x >= 1, "at least 1"),
        ("lam learning_rate", lambda x: 0 < x < math.inf, "a positive, finite number"),
        ("epsilon delta", lambda x: x > 0, "positive (inf: no limit)"),
        ("value_coefficient entropy_coefficient", lambda x: 0 <= x < math.inf, "0 or more"),
        ("gamma gae_lambda repeat_action_probability", lambda x: 0 <= x <= 1, "between 0 and 1"),
        ("seed", lambda x: 0 <= x < 2**31, "between 0 and 2147483647"),
        ("num_envs minibatch_size", lambda x: x % WORLD == 0, f"a multiple of {WORLD} processes"),
        ("minibatch_size", lambda x: 1 <= x <= batch_size, f"between 1 and {batch_size}, a batch"),
        ("total_timesteps", lambda x: x >= batch_size, f"at least {batch_size}, a batch"),
        ("cuda", lambda x: not x or gpus, "off (--no-cuda): a process has no GPU"),
    ]
    for names, holds, wanted in rules:
        for name in names.split():
            if not holds(getattr(args, name)):
                refuse(f"--{name.replace('_', '-')} must be {wanted}; it is {getattr(args, name)}.")


def read_options():
    """The typed options or, to resume or evaluate a run, its own with the typed ones on top; and
    what `save` wrote of it."""
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    if args.resume is None and args.evaluate is None:
        return args, None
    path = args.evaluate or f"{args.resume}/agent.pt"
    try:
        saved = torch.load(path, weights_only=True)  # such a file cannot run code
        assert saved["script"] == SCRIPT and isinstance(saved["iterations_done"], int)
        for field in fields(Args):
            assert isinstance(saved["args"][field.name], field.type)
        before = Args(**saved["args"] | {"resume": None, "evaluate": None})
    except Exception:
        refuse(f"{path} is no agent.pt of a run of this version of {SCRIPT}.py.")
    args = tyro.cli(Args, default=before)
    may_change = "resume seed total_timesteps cuda track capture_video eval_episodes"
    for name, value in asdict(before).items():
        if args.resume and name not in may_change.split() and getattr(args, name) != value:
            refuse(f"--{name.replace('_', '-')} cannot be changed when a run is resumed.")
    return args, saved


def main():
    if RANK > 0:  # rank 0 speaks for all
        sys.stdout = sys.stderr = open(os.devnull, "w")
    ale_py.ALEInterface.setLoggerMode(ale_py.LoggerMode.Error)
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    store = join_processes() if "RANK" in os.environ else dist.HashStore()
    restarted = store.check(["run_dir"])
    if restarted:  # by torchrun: go on with our own run
        sys.argv += ["--resume", store.get("run_dir").decode()]
    decided = [None, None]
    try:
        if RANK == 0:
            args, saved = read_options()
            check(args)
            decided = [args, saved]
    finally:  # rank 0 tells the others or, if it refuses, they end as well
        if WORLD > 1:
            dist.broadcast_object_list(decided)
    args, saved = decided
    if args is None:
        return

    torch.manual_seed(args.seed)
    agent = Agent(int(AtariVectorEnv(rom(args.env_id), 1).single_action_space.n))
    if args.cuda:
        agent.cuda(int(os.getenv("LOCAL_RANK", "0")))
    optimizer = torch.optim.Adam(agent.parameters(), args.learning_rate, eps=1e-5)
    iterations_done = 0
    run_dir = Path("runs") / f"{args.env_id}__{SCRIPT}__{args.seed}__{now}".replace("/", "-")
    if saved is not None:
        run_dir = Path(args.resume or Path(args.evaluate).parent)
        iterations_done = saved["iterations_done"]
        try:
            agent.load_state_dict(saved["agent"])
            if args.resume is not None:
                optimizer.load_state_dict(saved["adam"])
            if args.seed == saved["args"]["seed"]:  # with another seed it draws anew
                torch.set_rng_state(saved["random_state"])
        except Exception:
            refuse(f"What is saved in {run_dir} does not fit {args.env_id}, or is damaged.")
    video = run_dir / f"video-{now}"
    if args.evaluate is not None:
        if RANK == 0:
            evaluate(agent, args, video)
        return
    batch_size = args.num_envs * args.num_steps
    if args.total_timesteps < (iterations_done + 1) * batch_size and not restarted:
        refuse(f"{run_dir} is done: to go on, give a larger --total-timesteps.")

    command = ["python", sys.argv[0], "--env-id", args.env_id]
    resume = shlex.join([*command, "--resume", str(run_dir)])
    play = shlex.join([*command, "--evaluate", str(run_dir / "agent.pt")])
    what_next = f"To go on from the last checkpoint: {resume}"
    writer = None
    if RANK == 0:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = FileLock(run_dir / "lock", blocking=False)  # it ends with its process
            lock.acquire()
        except OSError as error:
            refuse(f"Another process trains in {run_dir}, or it cannot be written: {error}")
        save(run_dir, args, agent, optimizer, iterations_done)
        store.set("run_dir", str(run_dir))
    print(f"Training in {run_dir}. {what_next}")
    try:
        if RANK == 0 and args.track:
            import wandb

            run = {"id": run_dir.resolve().name.replace(":", "-"), "resume": "allow"}
            wandb.init(dir=run_dir, config=asdict(args), sync_tensorboard=True, **run)
        if RANK == 0:
            writer = SummaryWriter(run_dir, purge_step=iterations_done * batch_size + 1)
        # From here on each process draws numbers, and plays games, of its own.
        torch.manual_seed(int(torch.randint(2**30, ())) + RANK)
        num_envs = args.num_envs // WORLD
        if args.standardize_inputs and iterations_done == 0:  # look around before the first batch
            batch, _ = collect(Games(args, num_envs), agent, replace(args, num_steps=64), 0)
            agent.see(batch[0].flatten(0, 1))
        games = Games(args, num_envs)
        train(args, games, agent, optimizer, iterations_done, run_dir, writer)
        if RANK == 0:
            what_next = f"To play it again: {play}"
            returns = evaluate(agent, args, video)
            last_step = args.total_timesteps // batch_size * batch_size
            writer.add_scalar("eval/episodic_return", np.mean(returns), last_step)
            writer.close()
    finally:  # also after Ctrl-C, or an error
        print(f"\n{what_next}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
    finally:
        sys.stderr = sys.__stderr__  # a traceback is shown, whichever process it is of
