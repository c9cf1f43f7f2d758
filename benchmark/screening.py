"""spu_continuous.py of the first version with the levers of benchmark/PROTOCOL.md as options: for the screening only.

SPU (Vuong, Zhang and Ross, ICLR 2019) is PPO with another update. From the current policy pi_k, in two steps:
  1. Solve. Among ALL policies, not only those a network can express, maximise the expected advantage subject to
     mean KL(pi || pi_k) <= delta and, in every state s, KL(pi || pi_k)[s] <= epsilon. Theorem 1 has the closed form:
         pi*(a|s)  is proportional to  pi_k(a|s) exp(A(s,a) / lambda)
     (lambda follows from delta, or epsilon; the paper makes it a hyper-parameter, so that no line below computes pi*).
  2. Fit. Up to a constant, KL(pi_theta || pi*) = KL(pi_theta || pi_k) - (1/lambda) E_{a ~ pi_k}[ratio A], where
     ratio = pi_theta(a|s) / pi_k(a|s). The network is trained on the batch to lower it, with the gradient of eq. (18):
         mean_i [ grad KL(pi_theta || pi_k)[s_i] - (1/lambda) A_i grad ratio_i ] 1{KL(pi_theta || pi_k)[s_i] <= epsilon}
     The indicator stands for epsilon: a state that has moved too far gives no gradient. Stopping stands for delta: the
     epochs over the batch end after the first that leaves the mean KL above it.

    python spu_continuous.py --env-id HalfCheetah-v4                        # train; everything goes to runs/
    python spu_continuous.py --env-id Hopper-v4 --track --capture-video     # with Weights & Biases and videos
    python spu_continuous.py --resume runs/RUN                              # go on where a run was cut off
    python spu_continuous.py --evaluate runs/RUN/agent.pt --capture-video   # watch a trained agent
"""

import math
import os
import signal
import sys
import time
import warnings
from ctypes.util import find_library
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

if not (os.getenv("DISPLAY") or os.getenv("WAYLAND_DISPLAY")) and sys.platform == "linux" and find_library("EGL"):
    os.environ.setdefault("MUJOCO_GL", "egl")  # draws videos without a screen; read when mujoco is imported

import gymnasium as gym
import mujoco
import numpy as np
import torch
import tyro
from torch import nn
from torch.utils.tensorboard import SummaryWriter
from tqdm import tqdm

SCRIPT = Path(__file__).stem


@dataclass
class Args:
    env_id: str = "HalfCheetah-v4"  # a gymnasium environment with continuous (Box) actions
    exp_name: str = SCRIPT  # part of the run folder's name
    seed: int = 1  # of the network, the action noise, the minibatches and (plus its index) each environment
    total_timesteps: int = 1_000_000  # environment steps to train for, in whole batches
    # The algorithm, in the symbols of the paper's section 5.1
    lam: float = 1.3  # lambda, the temperature of the target pi_k exp(A / lambda): smaller is greedier
    epsilon: float = 0.03  # disaggregated constraint: a state whose KL exceeds epsilon gives no gradient (paper: 0.05)
    delta: float = 0.02  # aggregated constraint: the epochs end when the mean KL exceeds delta (paper: 0.05 / 1.2)
    max_epochs: int = 10  # the most passes over the batch in an iteration (zeta in Algorithm 1; paper: 30)
    # What SPU shares with PPO
    num_envs: int = 1  # environments, stepped in turn
    num_steps: int = 2048  # steps per environment in an iteration; a batch is num_envs x num_steps samples
    minibatch_size: int = 64  # samples per gradient step; a smaller remainder is dropped
    learning_rate: float = 3e-4  # Adam's step size
    anneal_lr: bool = True  # lower the step size linearly to 0 over the run
    gamma: float = 0.99  # discount factor
    gae_lambda: float = 0.95  # lambda of generalised advantage estimation and of the TD(lambda) value targets
    # The paper's ablations (table 1)
    kl_term: bool = True  # keep grad KL(pi_theta || pi_k) in the gradient
    dynamic_stopping: bool = True  # end the epochs when the mean KL exceeds delta; otherwise always max_epochs
    per_state_acceptance: bool = True  # no gradient from a state whose KL exceeds epsilon
    # Where the paper's code and today's practice differ
    bootstrap_truncation: bool = True  # a time limit is not death: add the value of what it cut off (not in the paper)
    normalize_rewards: bool = False  # divide rewards by the std of the discounted return, then clip them at 10
    clip_actions: bool = False  # clip actions to the action space before the environment sees them
    orthogonal_init: bool = False  # orthogonal initial weights instead of the paper's code's Gaussian ones
    # The levers
    value_all_epochs: bool = False  # fit the value function for all epochs, the policy until it is stopped
    scale_actions: bool = False  # -1 to 1 is low to high
    initial_log_std: float = 0.0
    recompute_advantages: bool = False  # before every epoch, with the value function as it is then
    relative_floor: bool = False  # of the observations' variance
    follow_region: bool = False  # the policy's step size grows while KL < delta / 2, shrinks when stopped
    standard_values: bool = False  # value targets in units of their running mean and std
    # The machine, the record, and what to do
    compile: bool = True  # compile the minibatch step: half a minute once, then several times the speed
    cuda: bool = False  # update on the GPU; networks this small are usually faster on the CPU
    track: bool = False  # log to Weights & Biases too (offline with WANDB_MODE=offline)
    wandb_project_name: str = "spu"  # Weights & Biases project
    wandb_entity: str | None = None  # Weights & Biases team or user
    capture_video: bool = False  # film an episode at every tenth of the training, or the first of --evaluate
    checkpoint_every: int = 10  # iterations between checkpoints
    resume: str | None = None  # a run folder to go on from, with its options; only --total-timesteps may be given too
    evaluate: str | None = None  # an agent.pt to replay with the mean action instead of training
    eval_episodes: int = 10  # episodes of the evaluation, at the end of training or of --evaluate


def refuse(sentence):  # bad input: one sentence, no traceback
    print(f"{SCRIPT}.py: {sentence}", file=sys.stderr)
    sys.exit(2)


def check(args):
    """Refuse what cannot work, before anything is written."""
    batch = args.num_envs * args.num_steps
    rules = [
        ("num_envs num_steps max_epochs checkpoint_every eval_episodes", lambda x: x >= 1, "at least 1"),
        ("lam epsilon delta learning_rate", lambda x: 0 < x < math.inf, "a positive, finite number"),
        ("gamma gae_lambda", lambda x: 0 <= x <= 1, "between 0 and 1"),
        ("seed", lambda x: 0 <= x < 2**31, "between 0 and 2147483647"),
        ("minibatch_size", lambda x: 1 <= x <= batch, f"between 1 and the batch (num_envs x num_steps = {batch})"),
        ("total_timesteps", lambda x: x >= batch, f"at least one batch (num_envs x num_steps = {batch})"),
        ("cuda", lambda x: not x or torch.cuda.is_available(), "left out: torch sees no GPU here"),
        ("track", lambda x: not x or find_spec("wandb"), "left out, or wandb installed: `pip install wandb`"),
        ("capture_video", lambda x: not x or find_spec("moviepy"), "left out, or moviepy installed"),
    ]
    for names, holds, wanted in rules:
        for name in (name for name in names.split() if not holds(getattr(args, name))):
            refuse(f"--{name.replace('_', '-')} must be {wanted}; it is {getattr(args, name)}.")


def make_env(args, seed, draw=False):
    """A seeded environment whose observations are vectors; refuse what this script cannot train on."""
    try:
        env = gym.make(args.env_id, **({"render_mode": "rgb_array"} if draw else {}))
        env.reset(seed=seed)
        if draw:
            if renderer := getattr(env.unwrapped, "mujoco_renderer", None):  # follow what would leave the picture
                renderer.camera_id = mujoco.mj_name2id(renderer.model, mujoco.mjtObj.mjOBJ_CAMERA, "track")
            assert env.render() is not None, "it draws nothing"  # fail now, and not in the middle of the training
    except Exception as error:
        refuse(f"{args.env_id} cannot be {('made', 'drawn')[draw]}: {' '.join(str(error).split()) or repr(error)}")
    if not isinstance(env.action_space, gym.spaces.Box) or env.action_space.dtype.kind != "f":
        refuse(f"{args.env_id} has {env.action_space} actions: this script needs continuous ones, a Box of floats.")
    if not env.observation_space.is_np_flattenable:
        refuse(f"{args.env_id} has {env.observation_space} observations: wrap them so that they flatten to a vector.")
    env = gym.wrappers.ClipAction(env) if args.clip_actions else env
    return env if len(env.observation_space.shape or ()) == 1 else gym.wrappers.FlattenObservation(env)


def update_moments(moments, x):
    """Mean, variance and count of everything seen so far, one row each, with the samples x of shape (n, size) added."""
    (mean, var, count), n = moments, len(x)
    shift, total = x.mean(0) - mean, count + n
    var = (count * var + n * x.var(0, correction=0) + shift**2 * count * n / total) / total
    return torch.stack([mean + shift * n / total, var, total])


def network(inputs, outputs, head_gain, orthogonal):
    """64-64 tanh (repeated in `Agent.actor`). By default, as in the paper's code, a unit's weights have norm `gain`."""
    layers = [nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs)]
    for linear in layers[::2]:
        gain = head_gain if linear is layers[-1] else math.sqrt(2) if orthogonal else 1.0
        gaussian = gain * nn.functional.normalize(torch.randn_like(linear.weight), dim=1)
        linear.weight.data = nn.init.orthogonal_(linear.weight.data, gain) if orthogonal else gaussian
        nn.init.zeros_(linear.bias)
    return nn.Sequential(*layers)


class Agent(nn.Module):
    """A Gaussian policy and a value function, two separate networks, and the normaliser of their observations."""

    def __init__(self, obs_size, action_size, orthogonal=False, initial_log_std=0.0, relative=False):
        super().__init__()
        self.policy = network(obs_size, action_size, 0.01, orthogonal)  # the mean, near zero at first
        self.relative = relative
        self.log_std = nn.Parameter(torch.full((action_size,), initial_log_std))  # the same in every state
        self.value = network(obs_size, 1, 1.0, orthogonal)
        start = torch.tensor([[0.0], [1.0], [0.0]], dtype=torch.float64)  # buffers are saved with the weights
        self.register_buffer("obs_moments", start.repeat(1, obs_size))
        self.register_buffer("target_moments", start.clone())
        self.register_buffer("return_moments", start)  # for --normalize-rewards

    def forward(self, obs):  # normalised observations
        return self.policy(obs), self.log_std, self.value(obs).squeeze(-1)

    def normalizer(self):
        """A function from raw observations to network inputs, as the moments stand now."""
        mean, var, _ = self.obs_moments.cpu().numpy()
        floor = 1e-8 * np.maximum(1, mean**2) if self.relative else 0.01
        std = np.sqrt(np.maximum(var, floor))  # this floor and the clipping below are the paper's code's
        return lambda obs: ((obs - mean) / std).clip(-5, 5).astype(np.float32)

    def actor(self, normalized=False):
        """The policy's mean from raw (or normalised) observations: `network` again, in numpy, which is far quicker."""
        normalize = (lambda obs: obs) if normalized else self.normalizer()
        (w1, b1), (w2, b2), (w3, b3) = [[p.detach().cpu().numpy().T for p in m.parameters()] for m in self.policy[::2]]
        return lambda obs: np.tanh(np.tanh(normalize(obs) @ w1 + b1) @ w2 + b2) @ w3 + b3


def gaussian_log_prob(actions, mean, log_std):
    return (-0.5 * ((actions - mean) / log_std.exp()) ** 2 - log_std - 0.5 * math.log(2 * math.pi)).sum(-1)


def gaussian_kl(mean, log_std, old_mean, old_log_std):
    """KL(pi_theta || pi_k) in each state, exact for diagonal Gaussians."""
    log_ratio, shift = log_std - old_log_std, (mean - old_mean) / old_log_std.exp()
    return (0.5 * ((2 * log_ratio).exp() + shift**2 - 1) - log_ratio).sum(-1)


def spu_loss(kl, ratio, advantages, lam, epsilon, kl_term=True):
    """Its gradient is eq. (18): grad KL - (1/lambda) grad ratio A where KL <= epsilon, nothing elsewhere."""
    accepted = (kl.detach() <= epsilon).float()  # the indicator, a constant for the gradient
    return ((kl_term * kl - ratio * advantages / lam) * accepted).mean()


def gae(rewards, values, next_values, dead, ended, gamma, gae_lambda):
    """Generalised advantages; all arrays are (num_steps, num_envs). next_values[t] is the value of the observation
    that step t produced, before any reset; where the episode is dead by then, it counts as 0."""
    td_errors = rewards + gamma * next_values * ~dead - values
    advantages, decay, advantage = np.zeros_like(td_errors), gamma * gae_lambda * ~ended, 0.0
    for t in reversed(range(len(rewards))):
        advantages[t] = advantage = td_errors[t] + decay[t] * advantage
    return advantages


def policy_losses(params, agent, batch, old_log_std, args):
    obs, actions, advantages, old_mean = batch
    mean = torch.func.functional_call(agent.policy, {k[7:]: v for k, v in params.items() if k != "log_std"}, (obs,))
    log_std = params["log_std"]
    kl = gaussian_kl(mean, log_std, old_mean, old_log_std)
    log_ratio = gaussian_log_prob(actions, mean, log_std) - gaussian_log_prob(actions, old_mean, old_log_std)
    epsilon = args.epsilon if args.per_state_acceptance else math.inf
    return spu_loss(kl, log_ratio.clamp(max=20).exp(), advantages, args.lam, epsilon, args.kl_term)


def value_losses(params, agent, batch):
    obs, value_targets = batch
    values = torch.func.functional_call(agent.value, {k[6:]: v for k, v in params.items()}, (obs,)).squeeze(-1)
    return ((values - value_targets) ** 2).mean()


def adam_step(params, adam, rate, gradient):
    t = adam["step"].add_(1)
    for name, g in gradient.items():
        m, v = adam["m." + name].lerp_(g, 1 - 0.9), adam["v." + name].lerp_(g * g, 1 - 0.999)
        params[name].sub_(rate * m / (1 - 0.9**t) / ((v / (1 - 0.999**t)).sqrt() + 1e-5))


def policy_step(params, adam, rate, agent, batch, old_log_std, args):
    adam_step(params, adam, rate, torch.func.grad(policy_losses)(params, agent, batch, old_log_std, args))


def value_step(params, adam, rate, agent, batch):
    adam_step(params, adam, rate, torch.func.grad(value_losses)(params, agent, batch))


def try_compile(step):
    options = {"cpp_wrapper": True, "cpp.use_decompose_tanh": True}
    options |= {"guard_filter_fn": torch.compiler.skip_all_guards_unsafe, "size_asserts": False}
    return torch.compile(step, fullgraph=True, options=options)


def units(space, args):
    low, high = space.low.ravel().astype(np.float64), space.high.ravel().astype(np.float64)
    known = np.isfinite(low) & np.isfinite(high) & (low < high) & args.scale_actions
    with np.errstate(all="ignore"):
        return np.where(known, (high - low) / 2, 1.0), np.where(known, (high + low) / 2, 0.0)


def play(agent, args, episodes, video=None):
    """Play episodes with the mean action and return a sentence about them; video is where to film the first."""
    env, act, returns = make_env(args, args.seed, draw=video is not None), agent.actor(), []
    scale, shift = units(env.action_space, args)
    if video:
        env = gym.wrappers.RecordVideo(env, str(video.parent), lambda episode: episode == 0, name_prefix=video.name)
    for episode in range(episodes):
        (obs, _), ended, total, length = env.reset(seed=args.seed + episode), False, 0.0, 0
        while not ended and length < 10_000:  # an environment need not have an end
            action = (act(obs) * scale + shift).astype(env.action_space.dtype).reshape(env.action_space.shape)
            obs, reward, terminated, truncated, _ = env.step(action)
            ended, total, length = terminated or truncated, total + float(reward), length + 1
        returns.append(total)
    env.close()
    film = f", filmed in {video}-episode-0.mp4" if video else ""
    return f"return {np.mean(returns):.1f} ± {np.std(returns):.1f} over {episodes} episodes with the mean action{film}"


def save(data, path):
    torch.save(data, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)  # atomic: a kill leaves the old file or the new one


def load(path):
    """A file that this script saved, and its Args. With weights_only, a stranger's file cannot run code."""
    try:
        data = torch.load(path, map_location="cpu", weights_only=True)
        assert data["script"] == SCRIPT
        return data, Args(**data["args"])
    except Exception:
        refuse(f"{path} is not of a run of {SCRIPT}.py: give --resume a run folder, or --evaluate an agent.pt in one.")


def main():
    args = tyro.cli(Args, description=__doc__.splitlines()[0])
    given = {word.split("=")[0].replace("_", "-") for word in sys.argv[1:] if word.startswith("--")}  # what was typed
    warnings.filterwarnings("ignore", message=".*(is out of date|render_modes|pickle protocol|Overwriting).*")
    mujoco.set_mju_user_warning(lambda text: None if "settotalmass" in text else print(text, file=sys.stderr))
    torch.set_num_threads(1)  # networks this small gain nothing from more
    # ---- Set up, from the options or from a saved file
    saved, iteration, last_returns, now = None, 0, [], f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    if args.resume is not None:
        if extra := given - {"--resume", "--total-timesteps"}:
            refuse(f"--resume takes its options from the checkpoint: leave out {' '.join(sorted(extra))}.")
        run_dir, total_timesteps = Path(args.resume), args.total_timesteps
        saved, args = load(run_dir / "checkpoint.pt")
        args.total_timesteps = total_timesteps if "--total-timesteps" in given else args.total_timesteps
    elif args.evaluate is not None:
        saved, trained = load(args.evaluate)
        args.clip_actions, args.env_id = trained.clip_actions, args.env_id if "--env-id" in given else trained.env_id
    check(args)
    batch_size, device = args.num_envs * args.num_steps, "cuda" if args.cuda else "cpu"
    num_iterations = args.total_timesteps // batch_size
    envs = [make_env(args, args.seed + i, draw=args.capture_video and i == 0) for i in range(args.num_envs)]
    obs_size, action_space = envs[0].observation_space.shape[0], envs[0].action_space
    torch.manual_seed(args.seed)
    agent = Agent(
        obs_size, math.prod(action_space.shape), args.orthogonal_init, args.initial_log_std, args.relative_floor
    ).to(device)
    if saved:
        if any(saved["agent"][name].shape != tensor.shape for name, tensor in agent.state_dict().items()):
            refuse(f"The saved agent does not fit {args.env_id}: its observations or actions have another size.")
        agent.load_state_dict(saved["agent"])
    if args.evaluate is not None:
        video = Path(args.evaluate).parent / "videos" / f"evaluation-{now}" if args.capture_video else None
        return print(f"{args.env_id}: {play(agent, args, args.eval_episodes, video)}")
    params = {name: p.detach() for name, p in agent.named_parameters()}  # the agent's own memory, updated in place
    names = {
        "policy": [n for n in params if not n.startswith("value")],
        "value": [n for n in params if n.startswith("value")],
    }
    params = {part: {n: params[n] for n in names[part]} for part in names}
    adam = {
        part: {f"{moment}.{n}": torch.zeros_like(p) for moment in ("m", "v") for n, p in params[part].items()}
        for part in params
    }
    for part in adam:
        adam[part]["step"] = torch.zeros(())
    pace = 1.0
    if saved:
        iteration, last_returns = saved["iteration"], saved["last_returns"]
        if iteration >= num_iterations:
            refuse(f"{run_dir} has done {iteration * batch_size} steps: to go on, give a larger --total-timesteps.")
        adam, pace = saved["adam"], saved["pace"]
        torch.set_rng_state(saved["torch_rng"])
        for env, state in zip(envs, saved["env_rng"]):
            if state:  # none where an environment brings a generator of another kind
                env.unwrapped.np_random.bit_generator.state = state
    else:
        run_dir = Path("runs") / f"{args.env_id}__{args.exp_name}__{args.seed}__{now}".replace("/", "-")
    writer = SummaryWriter(str(run_dir), purge_step=iteration * batch_size + 1 if saved else None)
    writer.add_text("hyperparameters", "\n".join(f"    {key}: {value}" for key, value in vars(args).items()), iteration)
    if args.track:
        import wandb

        where = {"project": args.wandb_project_name, "entity": args.wandb_entity, "dir": str(run_dir)}
        name = run_dir.resolve().name.replace(":", "-")
        wandb.init(**where, id=name, name=name, resume="allow", config=vars(args))
        wandb.define_metric("*", step_metric="global_step")

    def log(values, global_step):
        for key, value in values.items():
            writer.add_scalar(key, value, global_step)
        if args.track:
            wandb.log(values | {"global_step": global_step})

    shape = (args.num_steps, args.num_envs)
    obs, next_obs = np.zeros((2, *shape, obs_size))
    actions, (rewards, so_far) = np.zeros((*shape, len(agent.log_std)), np.float32), np.zeros((2, *shape))
    terminated, ended = np.ones((2, *shape), bool)  # row -1 has ended: the first step resets all
    episode_return, episode_length = [0.0] * args.num_envs, [0] * args.num_envs
    fit_policy = try_compile(policy_step) if args.compile else policy_step
    fit_value = try_compile(value_step) if args.compile else value_step
    scale, shift = units(action_space, args)
    stop, at_once = [], (signal.SIGINT, signal.SIG_DFL)  # the first Ctrl-C fills the list, a second ends the process
    said = b"\nStopping after this iteration. (Ctrl-C again stops at once, and loses what is not in a checkpoint.)\n"
    signal.signal(signal.SIGINT, lambda *_: (stop.append(os.write(2, said)), signal.signal(*at_once)))
    go_on = f"To go on from the last checkpoint: python {sys.argv[0]} --resume {run_dir}"
    bar = tqdm(total=num_iterations * batch_size, initial=iteration * batch_size, unit=" steps", unit_scale=True)
    while True:
        # ---- Checkpoint: at the start, every few iterations, after Ctrl-C and at the end
        global_step, iteration_start, finished = iteration * batch_size, time.time(), iteration == num_iterations
        leaving = finished or len(stop) > 0
        if leaving or iteration % args.checkpoint_every == 0:
            writer.flush()
            data = {"script": SCRIPT, "args": vars(args), "agent": agent.state_dict()}
            if finished:
                save(data, run_dir / "agent.pt")
            data |= {"adam": adam, "pace": pace, "iteration": iteration, "last_returns": last_returns}
            bits = [getattr(env.unwrapped.np_random, "bit_generator", None) for env in envs]
            data |= {"env_rng": [x.state if isinstance(x, np.random.PCG64) else None for x in bits]}
            save(data | {"torch_rng": torch.get_rng_state()}, run_dir / "checkpoint.pt")
        if leaving:
            break
        # ---- Collect a batch with pi_k. Acting needs no values: they are computed below, all at once
        act, noise = agent.actor(), (torch.randn(actions.shape) * agent.log_std.detach().cpu().exp()).numpy()
        for t in range(args.num_steps):
            obs[t] = next_obs[t - 1]  # row -1 is still that of the last batch
            for i, env in enumerate(envs):
                if ended[t - 1, i]:  # only now, after the checkpoint: a resumed run repeats the reset
                    (obs[t, i], _), episode_return[i], episode_length[i] = env.reset(), 0.0, 0
            actions[t] = act(obs[t]) + noise[t]
            for i, env in enumerate(envs):
                action = (actions[t, i] * scale + shift).astype(action_space.dtype).reshape(action_space.shape)
                next_obs[t, i], reward, terminated[t, i], truncated, _ = env.step(action)
                if not math.isfinite(reward + next_obs[t, i].sum()):
                    sys.exit(f"\n{args.env_id} gave a NaN or an infinity. {go_on}")
                so_far[t, i] = reward + args.gamma * so_far[t - 1, i] * (episode_length[i] > 0)  # discounted return
                rewards[t, i], ended[t, i] = reward, terminated[t, i] or truncated
                episode_return[i], episode_length[i] = episode_return[i] + reward, episode_length[i] + 1
                if ended[t, i]:
                    last_returns = [*last_returns[-99:], float(episode_return[i])]
                    scalars = {"charts/episodic_return": last_returns[-1], "charts/episodic_length": episode_length[i]}
                    log(scalars, global_step + t * args.num_envs + i + 1)
        # ---- Advantages, and pi_k anew, under the normaliser with this batch in it: the fit begins at ratio 1 and KL 0
        # (the actions were drawn under the one before it, as in the paper's code, which has the values under it too)
        if args.normalize_rewards:  # by the spread of the discounted return so far
            agent.return_moments = update_moments(agent.return_moments, torch.tensor(so_far, device=device).view(-1, 1))
            rewards[:] = (rewards / math.sqrt(agent.return_moments[1].item() + 1e-8)).clip(-10, 10)
        agent.obs_moments = update_moments(agent.obs_moments, torch.tensor(obs, device=device).flatten(0, 1))
        inputs, next_inputs = (torch.tensor(agent.normalizer()(x), device=device) for x in (obs, next_obs))
        with torch.no_grad():
            old_mean, old_log_std, _ = (x.clone() for x in agent(inputs))  # log_std will change in place
        old_mean = old_mean.flatten(0, 1)
        dead = terminated if args.bootstrap_truncation else ended
        flat, flat_actions = inputs.flatten(0, 1), torch.tensor(actions).flatten(0, 1)

        def estimate():
            mean, std = (
                (agent.target_moments[0].item(), math.sqrt(agent.target_moments[1].item()))
                if args.standard_values
                else (0.0, 1.0)
            )
            with torch.no_grad():
                values, next_values = (agent.value(x).squeeze(-1).numpy() * std + mean for x in (inputs, next_inputs))
            advantages = gae(rewards, values, next_values, dead, ended, args.gamma, args.gae_lambda)
            value_targets = advantages + values  # TD(lambda) returns
            advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)  # lambda is in units of this std
            return advantages, value_targets, values

        advantages, value_targets, values = estimate()
        if args.standard_values:
            agent.target_moments = update_moments(agent.target_moments, torch.tensor(value_targets).view(-1, 1))
        # ---- Fit: epochs over the batch in minibatches, until the mean KL exceeds delta (Algorithm 1)
        annealed = args.learning_rate * (1 - args.anneal_lr * iteration / num_iterations)
        rate, value_rate = (
            torch.tensor(args.learning_rate * pace if args.follow_region else annealed),
            torch.tensor(annealed),
        )
        policy_done, epochs_used, policy_loss, value_loss = False, 0, 0.0, 0.0
        with torch.no_grad():  # torch.func.grad differentiates all the same
            for epoch in range(args.max_epochs):
                if args.recompute_advantages and epoch > 0:
                    advantages, value_targets, _ = estimate()
                flat_advantages = torch.tensor(advantages, dtype=torch.float32).flatten()
                if args.standard_values:
                    mean, var = agent.target_moments[:2].flatten().tolist()
                    flat_targets = torch.tensor(
                        (value_targets - mean) / max(math.sqrt(var), 1e-12), dtype=torch.float32
                    ).flatten()
                else:
                    flat_targets = torch.tensor(value_targets, dtype=torch.float32).flatten()
                order = torch.randperm(batch_size).unfold(0, args.minibatch_size, args.minibatch_size)
                for mb in zip(*(x[order] for x in (flat, flat_actions, flat_advantages, old_mean, flat_targets))):
                    if not policy_done:
                        fit_policy(params["policy"], adam["policy"], rate, agent, mb[:4], old_log_std, args)
                    fit_value(params["value"], adam["value"], value_rate, agent, (mb[0], mb[4]))
                if not policy_done:
                    epochs_used += 1
                    new_mean = torch.as_tensor(agent.actor(normalized=True)(flat.numpy()))
                    kl = gaussian_kl(new_mean, agent.log_std, old_mean, old_log_std)  # in all states
                    policy_done = (args.dynamic_stopping and kl.mean() > args.delta).item()
                if policy_done and not args.value_all_epochs:
                    break
            policy_loss = policy_losses(
                params["policy"], agent, (flat, flat_actions, flat_advantages, old_mean), old_log_std, args
            )
            value_loss = value_losses(params["value"], agent, (flat, flat_targets))
        if args.follow_region:
            if policy_done:
                pace = pace / 1.2
            elif kl.mean() < args.delta / 2:
                pace = min(pace * 1.2, 20.0)
        if not math.isfinite(policy_loss + value_loss + kl.mean()):
            sys.exit(f"\nThe loss became NaN or infinite. {go_on}")
        # ---- Log
        iteration, global_step = iteration + 1, global_step + batch_size
        scalars = {
            "charts/SPS": batch_size / (time.time() - iteration_start),
            "charts/learning_rate": rate.item(),
            "losses/policy_loss": policy_loss.item(),
            "losses/value_loss": value_loss.item(),
            "losses/entropy": (agent.log_std + 0.5 * math.log(2 * math.pi * math.e)).sum().item(),
            "losses/explained_variance": 1 - np.var(value_targets - values) / (np.var(value_targets) + 1e-8),
            "spu/kl_mean": kl.mean().item(),
            "spu/kl_max": kl.max().item(),
            "spu/accepted_fraction": (kl <= args.epsilon).float().mean().item(),
            "spu/epochs_used": epochs_used,
        }
        log(scalars, global_step)
        bar.set_postfix_str(f"return {np.mean(last_returns or math.nan):.1f}, KL {kl.mean():.4f}, {epochs_used} epochs")
        bar.update(batch_size)
        if args.capture_video and 10 * iteration % num_iterations < 10:  # another tenth is done
            video = run_dir / "videos" / f"step-{global_step}"
            play(agent, args, 1, video)
            if args.track:
                wandb.log({"video": wandb.Video(f"{video}-episode-0.mp4"), "global_step": global_step})
    bar.close()
    if not finished:
        print(f"Stopped after {global_step} steps. {go_on}")
        sys.exit(130)
    print(f"{args.env_id} after {global_step} steps: {play(agent, args, args.eval_episodes)}")
    print(f"It is all in {run_dir}/; to watch it: python {sys.argv[0]} --evaluate {run_dir}/agent.pt --capture-video")


if __name__ == "__main__":
    main()
