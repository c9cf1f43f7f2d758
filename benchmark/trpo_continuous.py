# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "torch==2.13.0", "gymnasium==1.4.0", "mujoco==4.0.0", "numpy==2.4.6", "tyro==1.0.16",
#   "tensorboard==2.21.0", "tqdm==4.70.1", "wandb==0.31.0", "imageio==2.38.1", "moviepy==2.2.1",
# ]
# ///
"""TRPO in the same program as spu_continuous.py, for a comparison in which only the update differs.

Schulman et al., 2015: https://arxiv.org/abs/1502.05477. TRPO solves in the network's parameters
what SPU solves among all policies:
    maximise    mean of  ratio A,   ratio = pi_theta(a|s) / pi_k(a|s)
    subject to  mean KL(pi_k || pi_theta) <= delta
With the first derivative g of the objective and the second, F, of the KL, both at pi_k, the
solution is a step along F^-1 g, the natural gradient. Conjugate gradients find it from products
F v alone. The step is as long as the quadratic KL allows, and is halved until the true objective
has improved and the true KL is within delta. It is one step on the whole batch, F included; only
the value function has epochs of minibatches, as in SPU.
`diff spu_continuous.py benchmark/trpo_continuous.py` shows all that differs.

    python benchmark/trpo_continuous.py --env-id HalfCheetah-v4
"""

import math
import os
import shlex
import sys
import time
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import gymnasium as gym
import mujoco
import numpy as np
import torch
import tyro
from filelock import FileLock  # comes with torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # a gymnasium environment with continuous (Box) actions
    seed: int = 1  # of the environment, the networks, the noise and the minibatches
    total_timesteps: int = 1_000_000  # environment steps, in whole batches
    # The algorithm
    delta: float = 0.06  # nats; the mean KL of an iteration is at most this (often: 0.01)
    cg_iterations: int = 10  # of conjugate gradients: each costs a product with F
    damping: float = 0.1  # added to F's diagonal, so that F can be inverted
    line_search_steps: int = 10  # lengths that are tried, each half of the one before
    max_epochs: int = 10  # the value function's passes over a batch
    # What SPU shares with PPO
    num_steps: int = 2048  # environment steps in a batch
    minibatch_size: int = 64  # samples per gradient step; an incomplete last one is dropped
    learning_rate: float = 3e-4  # Adam's step size, for the value function
    anneal_lr: bool = True  # lower it linearly to 0 over the run (a run made longer lifts it again)
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of the advantage estimates and of the value targets
    initial_log_std: float = -1.0  # log of the policy's first standard deviation (paper: 0)
    scale_actions: bool = True  # the policy's -1 to 1 is the action space's low to high (paper: no)
    clip_actions: bool = False  # clip to the action space, for environments that refuse others
    bootstrap_truncation: bool = True  # at a time limit, no real end, add the value (paper: no)
    # The machine and the record
    compile: bool = True  # compile the gradient step: some seconds, then training is 3x as fast
    track: bool = False  # log to Weights & Biases too (WANDB_PROJECT, WANDB_MODE=offline, ...)
    capture_video: bool = False  # film the first episode of the evaluation
    eval_episodes: int = 10  # played with the mean action, after training or by --evaluate
    resume: str | None = None  # a run folder to go on from, with its options
    evaluate: str | None = None  # the agent.pt of a run, to play instead of training


# ------------------------------------------------------------------- The algorithm


def gaussian_log_prob(actions, mean, log_std):
    distance = (actions - mean) / log_std.exp()
    return (-0.5 * distance**2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_kl(mean, log_std, other_mean, other_log_std):
    """KL(one || other) in each state, exact for Gaussians with independent components."""
    log_ratio = log_std - other_log_std
    shift = (mean - other_mean) / other_log_std.exp()
    return (0.5 * ((2 * log_ratio).exp() + shift**2 - 1) - log_ratio).sum(-1)


def conjugate_gradients(product, b, iterations):
    """The x with F x = b, or an approximation, where product(v) is F v."""
    x = torch.zeros_like(b)
    residual = b
    direction = b
    size = residual @ residual
    for _ in range(iterations):
        if size <= 1e-10 * (b @ b):
            break
        image = product(direction)
        length = size / (direction @ image)
        x = x + length * direction
        residual = residual - length * image
        previous_size = size
        size = residual @ residual
        direction = residual + size / previous_size * direction
    return x


def fisher_product(kl, theta, vector):
    """F v, F being the second derivative of kl at theta: the derivative along v of its gradient."""
    return torch.func.jvp(torch.func.grad(kl), (theta,), (vector,))[1]


def trust_region_step(objective, kl, theta, args):
    """The natural gradient step from theta, and the share of its full length that was taken. No
    step, and 0, if no length will do: also if one is NaN, with which all comparisons are false."""

    def product(vector):
        return fisher_product(kl, theta, vector) + args.damping * vector

    gradient, before = torch.func.grad_and_value(objective)(theta)
    direction = conjugate_gradients(product, gradient, args.cg_iterations)
    # So that half of step F step, which is the KL to second order, is delta.
    full_step = direction * (2 * args.delta / (direction @ product(direction))).sqrt()
    share = 1.0
    for _ in range(args.line_search_steps):
        new_theta = theta + share * full_step
        if objective(new_theta) > before and kl(new_theta) <= args.delta:
            return new_theta, share
        share /= 2
    return theta, 0.0


def gae(rewards, values, next_values, terminated, ended, gamma, gae_lambda):
    """Generalised advantage estimation. next_values[t] is the value of the state that step t led
    to, before any reset. After a real end (terminated) nothing follows: there it counts as 0. At a
    time limit (ended, but not terminated) it stands for the rewards that were cut off."""
    advantages = rewards + gamma * np.where(terminated, 0.0, next_values) - values  # TD errors
    decay = np.where(ended, 0.0, gamma * gae_lambda)
    for t in reversed(range(len(rewards) - 1)):
        advantages[t] += decay[t] * advantages[t + 1]
    return advantages


# ------------------------------------------------------------------- The agent


def forward(params, x, tanh=torch.tanh):
    """A network with two hidden layers; in torch, or in numpy if tanh is numpy's."""
    x = tanh(x @ params["w1"] + params["b1"])
    x = tanh(x @ params["w2"] + params["b2"])
    return x @ params["w3"] + params["b3"]


class Network(nn.Module):
    """The parameters of `forward`, what Adam remembers of them, and a gradient step. They are one
    vector, because a compiled step spends half a microsecond on each tensor that it is given."""

    def __init__(self, num_inputs, num_outputs, head_norm, loss, **more):
        super().__init__()
        self.loss = loss
        params = dict(more)
        # As in the paper's code, the weights into a unit are at first a random direction.
        for i, shape in enumerate([(num_inputs, 64), (64, 64), (64, num_outputs)], start=1):
            params[f"w{i}"] = nn.functional.normalize(torch.randn(shape), dim=0)
            params[f"b{i}"] = torch.zeros(shape[1])
        params["w3"] *= head_norm
        self.shapes = {name: p.shape for name, p in params.items()}
        vector = torch.cat([p.flatten() for p in params.values()])
        self.vector = nn.Parameter(vector, requires_grad=False)  # torch.func takes the gradient
        self.register_buffer("m", torch.zeros_like(vector))
        self.register_buffer("v", torch.zeros_like(vector))
        self.register_buffer("steps_done", torch.zeros(()))
        self.in_numpy = {name: p.numpy() for name, p in self.params.items()}  # the same memory

    def split(self, vector):
        """The parameters by name, as views of the one vector that holds them all."""
        pieces = vector.split([shape.numel() for shape in self.shapes.values()])
        named = zip(self.shapes.items(), pieces)
        return {name: piece.view(shape) for (name, shape), piece in named}

    @property
    def params(self):
        return self.split(self.vector)

    def outputs(self, inputs):
        """What the network makes of inputs, in numpy: for one observation a call of torch costs
        more than its arithmetic. An action takes 7 microseconds, in torch 30."""
        return forward(self.in_numpy, inputs, np.tanh)

    def step(self, learning_rate, data, rows, args):
        """One step of Adam (betas 0.9, 0.999; eps 1e-5) on these rows of what `estimate` returns.
        Written by hand, as torch.optim's does not compile into one graph with the loss and its
        gradient. That graph takes 60 microseconds; uncompiled, with torch.optim, a step 1000."""
        grad = torch.func.grad(lambda x: self.loss(self.split(x), data, rows, args))(self.vector)
        self.m.lerp_(grad, 1 - 0.9)
        self.v.lerp_(grad * grad, 1 - 0.999)
        self.steps_done.add_(1)
        m = self.m / (1 - 0.9**self.steps_done)
        v = self.v / (1 - 0.999**self.steps_done)
        self.vector.sub_(learning_rate * m / (v.sqrt() + 1e-5))


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
    """Policy, value function, and the units in which they see, act and estimate."""

    def __init__(self, obs_size, action_space, initial_log_std=-1.0, scale_actions=True):
        super().__init__()
        self.action_space = action_space
        low = torch.tensor(action_space.low.flatten()).double()
        high = torch.tensor(action_space.high.flatten()).double()
        # -1 to 1 is low to high, in each component whose bounds are finite and differ.
        scaled = low.isfinite() & high.isfinite() & (low < high) & scale_actions
        self.register_buffer("action_scale", torch.where(scaled, (high - low) / 2, 1.0))
        self.register_buffer("action_shift", torch.where(scaled, (high + low) / 2, 0.0))
        # The policy is a Gaussian. The network gives its mean; its spread is the same everywhere.
        log_std = torch.full((len(low),), initial_log_std)
        self.policy = Network(obs_size, len(low), 0.01, policy_loss, log_std=log_std)
        self.value = Network(obs_size, 1, 1.0, value_loss)
        # Nothing is seen yet. Values have spread 0: an untrained network's output counts as 0.
        zeros = torch.zeros(1, obs_size).double()
        self.register_buffer("obs_moments", torch.cat([zeros, zeros + 1, zeros]))
        self.register_buffer("value_moments", torch.zeros(3, 1).double())
        # What acting needs, as numpy sees it: buffers are changed in place and never replaced.
        self.obs_mean, self.obs_std, _ = self.obs_moments.numpy()
        self.scale = self.action_scale.numpy()
        self.shift = self.action_shift.numpy()

    def normalize(self, obs):
        return ((obs - self.obs_mean) / self.obs_std).clip(-5, 5).astype(np.float32)

    def mean(self, obs):
        """Of the policy, for one observation or many."""
        return self.policy.outputs(self.normalize(obs))

    def to_environment(self, action):
        action = action * self.scale + self.shift
        return action.astype(self.action_space.dtype).reshape(self.action_space.shape)

    def values(self, inputs):
        """In the rewards' units; what the network itself gives is standardised."""
        mean, std, _ = self.value_moments.numpy()
        return self.value.outputs(inputs)[:, 0] * std + mean


# ------------------------------------------------------------------- An iteration


def collect(env, agent, args, obs, step, writer):
    """num_steps steps with pi_k. Acting needs no values: `estimate` computes them all at once."""
    policy = agent.policy
    # Acting reads the parameters' memory in numpy: this fails if .to() or .double() has moved it.
    assert np.shares_memory(policy.in_numpy["w1"], policy.vector.numpy())
    std = policy.params["log_std"].exp()
    noise = (std * torch.randn(args.num_steps, len(std))).numpy()
    batch = []
    for t in range(args.num_steps):
        if obs is None:  # seeded by torch, so that its generator decides everything
            obs, _ = env.reset(seed=int(torch.randint(2**31, ())))
            obs = obs.copy()
        action = policy.outputs(agent.normalize(obs)) + noise[t]
        next_obs, reward, terminated, truncated, info = env.step(agent.to_environment(action))
        next_obs = next_obs.copy()  # some environments will write into the same array
        batch.append((obs, action, reward, next_obs, terminated, truncated))
        obs = next_obs
        step += 1
        if not math.isfinite(reward + obs.sum()):
            what = f"reward {reward} and observation {obs} at step {step}"
            raise FloatingPointError(f"{args.env_id} gave {what}; --seed N draws anew.")
        if terminated or truncated:
            obs = None
            writer.add_scalar("charts/episodic_return", info["episode"]["r"], step)
            writer.add_scalar("charts/episodic_length", info["episode"]["l"], step)
    return [np.array(column) for column in zip(*batch)], obs


def estimate(agent, batch, args):
    """Advantages, value targets, and pi_k on the batch: all that the fit needs."""
    obs, actions, rewards, next_obs, terminated, truncated = batch
    agent.obs_moments[:] = update_moments(agent.obs_moments, torch.tensor(obs).double())
    inputs = agent.normalize(obs)
    values = agent.values(inputs)
    next_values = agent.values(agent.normalize(next_obs))

    ended = terminated | truncated
    if not args.bootstrap_truncation:
        terminated = ended  # a time limit counts as a real end
    advantages = gae(rewards, values, next_values, terminated, ended, args.gamma, args.gae_lambda)
    targets = torch.tensor(advantages + values)[:, None]  # lambda-returns, of gae_lambda
    agent.value_moments[:] = update_moments(agent.value_moments, targets)
    mean, std, _ = agent.value_moments
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    return {
        "inputs": torch.tensor(inputs),
        "actions": torch.tensor(actions),
        "advantages": torch.tensor(advantages).float(),
        "value_targets": ((targets - mean) / std).float(),
        # pi_k is evaluated anew: the normaliser has just changed, and with it what the network
        # makes of a state. So the fit begins at ratio 1 and KL 0, as in the paper's code. (That
        # the actions were drawn before the change is neglected; it gets small soon.)
        "old_mean": torch.tensor(agent.policy.outputs(inputs)),
        "old_log_std": agent.policy.params["log_std"].clone(),
    }


def policy_loss(params, data, rows, args):
    actions = data["actions"][rows]
    new = (forward(params, data["inputs"][rows]), params["log_std"])
    old = (data["old_mean"][rows], data["old_log_std"])
    log_ratio = gaussian_log_prob(actions, *new) - gaussian_log_prob(actions, *old)
    return -(log_ratio.exp() * data["advantages"][rows]).mean()


def value_loss(params, data, rows, args):
    return (forward(params, data["inputs"][rows]) - data["value_targets"][rows]).square().mean()


def epoch(network, learning_rate, data, args):
    """One pass over the batch, in shuffled minibatches."""
    minibatches = torch.randperm(args.num_steps).split(args.minibatch_size)
    for rows in minibatches[: args.num_steps // args.minibatch_size]:
        network.step(learning_rate, data, rows, args)


def mean_kl(params, data):
    """KL(pi_k || pi_theta), as TRPO has it: the other direction than SPU's."""
    new = (forward(params, data["inputs"]), params["log_std"])
    return gaussian_kl(data["old_mean"], data["old_log_std"], *new).mean()


def fit(agent, learning_rate, data, args):
    """One step of the policy, and the value function's epochs. Returns the KL of each state, in
    SPU's direction to compare with, and the share of the full step that was taken."""
    policy = agent.policy

    def objective(theta):
        return -policy_loss(policy.split(theta), data, slice(None), args)

    def kl_to(theta):
        return mean_kl(policy.split(theta), data)

    theta, share = trust_region_step(objective, kl_to, policy.vector.clone(), args)
    policy.vector.copy_(theta)
    for _ in range(args.max_epochs):
        epoch(agent.value, learning_rate, data, args)
    mean = torch.tensor(agent.policy.outputs(data["inputs"].numpy()))
    new = (mean, agent.policy.params["log_std"])
    kl = gaussian_kl(*new, data["old_mean"], data["old_log_std"])
    return kl, share


def train(args, env, agent, iterations_done, run_dir, writer):
    """Algorithm 1 of the SPU paper, with TRPO's fit."""
    num_iterations = args.total_timesteps // args.num_steps
    bar = tqdm(range(iterations_done, num_iterations), unit=" steps", unit_scale=args.num_steps)
    obs = None
    for iteration in bar:
        start = time.time()
        learning_rate = torch.tensor(args.learning_rate)  # a plain number would be compiled in
        if args.anneal_lr:
            learning_rate *= 1 - iteration / num_iterations

        # Algorithm 1, lines 2 and 3: sample with pi_k, estimate advantages.
        batch, obs = collect(env, agent, args, obs, iteration * args.num_steps, writer)
        data = estimate(agent, batch, args)

        # Lines 4 to 15: fit the networks.
        kl, share = fit(agent, learning_rate, data, args)

        all_rows = slice(None)
        scalars = {
            "charts/SPS": args.num_steps / (time.time() - start),
            "charts/learning_rate": learning_rate,
            "losses/policy_loss": policy_loss(agent.policy.params, data, all_rows, args),
            "losses/value_loss": value_loss(agent.value.params, data, all_rows, args),
            "losses/mean_log_std": agent.policy.params["log_std"].mean(),
            "spu/kl_mean": kl.mean(),
            "spu/kl_max": kl.max(),
            "trpo/accepted": share > 0,  # whether the line search found a step
            "trpo/share_of_full_step": share,
        }
        for name, scalar in scalars.items():
            writer.add_scalar(name, float(scalar), (iteration + 1) * args.num_steps)
        writer.flush()
        save(run_dir, args, agent, iteration + 1)
        recent = np.mean(env.return_queue or math.nan)  # of the last 100 episodes
        bar.set_postfix_str(f"return {recent:.6g}, KL {kl.mean():.4f}, step {share:.3g}")


# =================================================================== Plumbing
# Skip it on a first reading: environments, files, checks, main.


def refuse(sentence):
    """Bad input: one sentence, no traceback, exit code 2."""
    print(f"{SCRIPT}.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def make_env(args):
    """The environment, with vector observations; refuse what cannot be trained on."""
    if sys.platform == "linux" and not os.getenv("DISPLAY"):
        os.environ.setdefault("MUJOCO_GL", "egl")  # draw without a screen
    draw = {"render_mode": "rgb_array"} if args.capture_video else {}
    try:
        env = gym.make(args.env_id, **draw)
        if len(env.observation_space.shape or ()) != 1:
            env = gym.wrappers.FlattenObservation(env)
        assert env.observation_space.shape, f"{env.observation_space} observations make no vector"
        box = isinstance(env.action_space, gym.spaces.Box) and env.action_space.dtype.kind == "f"
        assert box, f"its actions are {env.action_space}, and must be a Box of floats"
        env.reset(seed=args.seed)  # a trial
        if hasattr(env.unwrapped, "mujoco_renderer"):
            # The last camera follows the robot; -1, where there is none, stands still.
            env.unwrapped.mujoco_renderer.camera_id = env.unwrapped.model.ncam - 1
        assert not args.capture_video or env.render() is not None, "it draws nothing"
    except Exception as error:
        refuse(f"{args.env_id} cannot be used: {' '.join(str(error).split()) or repr(error)}")
    if args.clip_actions:
        env = gym.wrappers.ClipAction(env)
        env.action_space = env.env.action_space  # the wrapper's has no bounds
    return gym.wrappers.RecordEpisodeStatistics(env)


def compile_steps(agent):
    """Compile the gradient steps, if a small trial shows that this machine can."""
    print("Compiling takes some seconds. (--no-compile does without.)")
    # In a run neither shapes nor options change: without checks a call takes half as long.
    options = {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False}
    # Fewer steps from Python to the compiled code, and a tanh in vector instructions.
    options |= {"cpp_wrapper": True, "cpp.use_decompose_tanh": True}
    try:
        torch.compile(torch.square, options=options)(torch.zeros(8))
    except Exception as error:
        print(f"It does not compile here, so training is slower: {error!r:.200}")
        return
    for network in (agent.policy, agent.value):
        # isolate_recompiles: the networks share this method. Without checks, the second would run
        # what was compiled for the first.
        how = {"fullgraph": True, "isolate_recompiles": True, "options": options}
        network.step = torch.compile(network.step, **how)


def evaluate(agent, args, folder):
    """Play episodes with the mean action; return their returns."""
    env = gym.wrappers.TimeLimit(make_env(args), 10_000)  # not every environment has an end
    if args.capture_video:
        env = gym.wrappers.RecordVideo(env, folder, lambda episode: episode == 0)
        print(f"Filming the first episode, into {folder}")
    returns = []
    for episode in range(args.eval_episodes):
        obs, _ = env.reset(seed=args.seed + episode)
        returns.append(0.0)
        ended = False
        while not ended:
            action = agent.to_environment(agent.mean(obs))
            obs, reward, terminated, truncated, _ = env.step(action)
            returns[-1] += float(reward)
            ended = terminated or truncated
    env.close()
    figures = f"{np.mean(returns):.6g} ± {np.std(returns):.3g}"
    print(f"{args.env_id}: return {figures} over {len(returns)} episodes with the mean action")
    return returns


def save(run_dir, args, agent, iterations_done):
    """At the start and after every iteration: options, networks with Adam's moments, normalisers,
    random generator. Not the environment's state: a resumed run begins a new episode. It equals an
    unbroken run, to the bit, if that began an episode there too (and had the same options)."""
    if not all(x.isfinite().all() for x in agent.state_dict().values()):
        cure = "try another --seed, or a new run with a lower --learning-rate"
        raise FloatingPointError(f"The agent is NaN or infinite: {cure}.")
    saved = {
        "script": SCRIPT,
        "args": asdict(args),
        "agent": agent.state_dict(),
        "iterations_done": iterations_done,
        "random_state": torch.get_rng_state(),
    }
    torch.save(saved, run_dir / "agent.pt.tmp")
    os.replace(run_dir / "agent.pt.tmp", run_dir / "agent.pt")  # a kill leaves one or the other


def check(args):
    """Refuse what cannot work, before anything is written."""
    rules = [
        ("num_steps minibatch_size max_epochs eval_episodes", lambda x: x >= 1, "at least 1"),
        ("cg_iterations line_search_steps", lambda x: x >= 1, "at least 1"),
        ("delta damping learning_rate", lambda x: 0 < x < math.inf, "a positive, finite number"),
        ("initial_log_std", math.isfinite, "a finite number"),
        ("gamma gae_lambda", lambda x: 0 <= x <= 1, "between 0 and 1"),
        ("seed", lambda x: 0 <= x < 2**31, "between 0 and 2147483647"),
        ("minibatch_size", lambda x: x <= args.num_steps, "at most --num-steps"),
        ("total_timesteps", lambda x: x >= args.num_steps, "at least --num-steps"),
    ]
    for names, holds, wanted in rules:
        for name in names.split():
            if not holds(getattr(args, name)):
                refuse(f"--{name.replace('_', '-')} must be {wanted}; it is {getattr(args, name)}.")


def read_options():
    """The typed options or, to resume or evaluate a run, its own with the typed ones on top; and
    what `save` wrote of it."""
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    typed_env_id = args.env_id
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
    if ":" in args.env_id and args.env_id != typed_env_id:  # gymnasium would import that module
        refuse(f"The file asks for {args.env_id}: if you trust it, add --env-id {args.env_id}.")
    may_change = "resume seed total_timesteps compile track capture_video eval_episodes"
    for name, value in asdict(before).items():
        if args.resume and name not in may_change.split() and getattr(args, name) != value:
            refuse(f"--{name.replace('_', '-')} cannot be changed when a run is resumed.")
    return args, saved


def main():
    args, saved = read_options()
    check(args)
    # No warnings of gymnasium's, as that -v4 is old, nor of how the Humanoids' masses are set.
    gym.logger.min_level = gym.logger.ERROR
    mujoco.set_mju_user_warning(lambda text: None if "settotalmass" in text else print(text))
    torch.set_num_threads(1)  # networks this small gain nothing from more
    torch.manual_seed(args.seed)

    env = make_env(args)
    obs_size = env.observation_space.shape[0]
    agent = Agent(obs_size, env.action_space, args.initial_log_std, args.scale_actions)
    iterations_done = 0
    now = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run_dir = Path("runs") / f"{args.env_id}__{SCRIPT}__{args.seed}__{now}".replace("/", "-")
    if saved is not None:
        run_dir = Path(args.resume or Path(args.evaluate).parent)
        iterations_done = saved["iterations_done"]
        try:
            agent.load_state_dict(saved["agent"])
            if args.seed == saved["args"]["seed"]:  # with another seed it draws anew
                torch.set_rng_state(saved["random_state"])
        except Exception:
            refuse(f"What is saved in {run_dir} does not fit {args.env_id}, or is damaged.")
    video = run_dir / f"video-{now}"
    if args.evaluate is not None:
        evaluate(agent, args, video)
        return
    if args.total_timesteps < (iterations_done + 1) * args.num_steps:
        refuse(f"{run_dir} is done: to go on, give a larger --total-timesteps.")

    command = ["python", sys.argv[0], "--env-id", args.env_id]
    resume = shlex.join([*command, "--resume", str(run_dir)])
    play = shlex.join([*command, "--evaluate", str(run_dir / "agent.pt")])
    what_next = f"To go on from the last checkpoint: {resume}"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = FileLock(run_dir / "lock", blocking=False)  # it ends with its process
        lock.acquire()
    except OSError as error:
        refuse(f"Another process trains in {run_dir}, or it cannot be written: {error}")
    save(run_dir, args, agent, iterations_done)  # so that the next line is true at once
    print(f"Training in {run_dir}. {what_next}")
    try:
        if args.track:
            import wandb

            run = {"id": run_dir.resolve().name.replace(":", "-"), "resume": "allow"}
            wandb.init(dir=run_dir, config=asdict(args), sync_tensorboard=True, **run)
        if args.compile:
            compile_steps(agent)
        writer = SummaryWriter(run_dir, purge_step=iterations_done * args.num_steps + 1)
        train(args, env, agent, iterations_done, run_dir, writer)
        what_next = f"To play it again: {play}"
        returns = evaluate(agent, args, video)
        last_step = args.total_timesteps // args.num_steps * args.num_steps
        writer.add_scalar("eval/episodic_return", np.mean(returns), last_step)
        writer.close()
    finally:  # also after Ctrl-C, or an error
        print(f"\n{what_next}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
