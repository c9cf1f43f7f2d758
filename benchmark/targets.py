"""How the three constraints reshape one policy in one state, at equal constraint size: a picture.
And how a network's policy sets out towards the target of the forward KL: an animation.

    python benchmark/targets.py        # writes targets.png and fit.gif into benchmark/pictures/

The policy is a standard Gaussian over one action and the advantage a smooth function of that
action, with mean 0 and variance 1 under the policy. The targets are solved by the scripts' own
functions. Their constraints measure different things, so they are made equal to second order, where
KL(pi || pi_k) = KL(pi_k || pi) = E[(ratio - 1)^2] / 2.

In the animation a Gaussian is fitted, with the script's own loss and a batch of 4096 actions, to
the target of lambda 1, which is no Gaussian and lies beyond the trust region: delta ends the fit.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
from PIL import Image

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
import spu_continuous  # noqa: E402
import spu_linf  # noqa: E402
import spu_reverse_kl  # noqa: E402

SIZE, EPSILON = 0.1, 0.6  # the constraint, and the clip of the L-infinity target
COLORS = {"forward KL": "#1b6ca8", "reverse KL": "#c8553d", "L-infinity": "#3c8d40"}


def policy_and_advantage(points=4001):
    """pi_k as weights on a fine grid of actions, and A normalised under it."""
    actions = np.linspace(-5, 5, points)
    pi_k = np.exp(-(actions**2) / 2)
    pi_k /= pi_k.sum()
    # Best at a moderate action to the right.
    advantages = np.tanh(1.5 * (actions - 0.3)) - 0.35 * (actions - 0.8) ** 2
    advantages -= pi_k @ advantages
    return actions, pi_k, advantages / np.sqrt(pi_k @ advantages**2)


def targets(pi_k, advantages, size=SIZE, epsilon=EPSILON):
    """The ratio pi*/pi_k of each constraint, as a function of the advantage; and lambda'."""
    low, high = 1e-3, 1e3
    for _ in range(100):  # forward KL: the lambda at which KL(pi* || pi_k) is the constraint's size
        lam = np.sqrt(low * high)
        ratio = np.exp(advantages / lam) / (pi_k @ np.exp(advantages / lam))
        low, high = (lam, high) if pi_k @ (ratio * np.log(ratio)) > size else (low, lam)
    partition = pi_k @ np.exp(advantages / lam)
    # Reverse KL: the inverse ratio is (lambda' - A) / lambda.
    inverse = np.exp(-spu_reverse_kl.log_target_ratios(advantages, size, weights=pi_k))
    slope, intercept = np.polyfit(advantages, inverse, 1)
    lam_backward, lam_prime = -1 / slope, -intercept / slope
    # The sum over samples becomes an expectation: as many samples of each action as pi_k says.
    sample = np.repeat(advantages, np.round(pi_k / pi_k.max() * 100).astype(int))
    slope = spu_linf.solve_lambda(sample, epsilon, 2 * size * len(sample))

    def reverse(a):
        return np.where(a < lam_prime, lam_backward / np.maximum(lam_prime - a, 1e-9), np.nan)

    ratios = {
        "forward KL": lambda a: np.exp(a / lam) / partition,
        "reverse KL": reverse,
        "L-infinity": lambda a: spu_linf.target_ratios(a, slope, epsilon),
    }
    return ratios, lam_prime


def fit(delta=SIZE, lam=1.0, step_size=0.02):
    """(mean, standard deviation, KL) of the Gaussian after each epoch, until its KL exceeds delta:
    one state, and all of the batch in each step."""
    grid, _, advantages = policy_and_advantage()
    taken = torch.randn(4096, 1, generator=torch.Generator().manual_seed(0))
    batch_advantages = torch.tensor(np.interp(taken[:, 0], grid, advantages)).float()
    old = (torch.zeros(1), torch.zeros(1))
    mean, log_std = (torch.zeros(1, requires_grad=True) for _ in range(2))
    optimizer = torch.optim.Adam([mean, log_std], step_size)
    path = [(0.0, 1.0, 0.0)]
    while path[-1][2] <= delta:
        log_ratio = spu_continuous.gaussian_log_prob(taken, mean, log_std)
        log_ratio = log_ratio - spu_continuous.gaussian_log_prob(taken, *old)
        kl = spu_continuous.gaussian_kl(mean, log_std, *old)
        loss = spu_continuous.spu_loss(kl, log_ratio.exp(), batch_advantages, lam, torch.inf)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kl = spu_continuous.gaussian_kl(mean, log_std, *old)
        path.append((mean.item(), log_std.exp().item(), kl.item()))
    return path


def animate(path, delta=SIZE, lam=1.0):
    actions, pi_k, advantages = policy_and_advantage()
    width = actions[1] - actions[0]
    target = pi_k * np.exp(advantages / lam)
    target /= target.sum()
    frames = []
    epochs = fit(delta, lam)
    for epoch, (mean, std, kl) in enumerate(epochs):
        figure, axis = plt.subplots(figsize=(5.4, 3.2), constrained_layout=True)
        density = np.exp(-(((actions - mean) / std) ** 2) / 2) / std / np.sqrt(2 * np.pi)
        axis.fill_between(actions, target / width, color=COLORS["forward KL"], alpha=0.2, lw=0)
        axis.plot(actions, target / width, color=COLORS["forward KL"], lw=1.5, label="target π*")
        axis.plot(actions, pi_k / width, color="0.3", lw=1.5, ls="--", label="π$_k$, which acted")
        axis.plot(actions, density, color="#e0962b", lw=2.5, label="π$_θ$, which is fitted")
        state = "stop" if epoch == len(epochs) - 1 else "go on"
        axis.set_title(
            f"epoch {epoch}: KL {kl:.3f} of δ = {delta}, {state}", fontsize=10, loc="left"
        )
        axis.set(xlabel="action", xlim=(-3, 3), ylim=(0, 0.85), yticks=[])
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.legend(frameon=False, fontsize=9, loc="upper left")
        figure.canvas.draw()
        frames.append(Image.fromarray(np.array(figure.canvas.buffer_rgba())[..., :3]).quantize(32))
        plt.close(figure)
    times = [900] + [160] * (len(frames) - 2) + [3000]
    options = {"duration": times, "loop": 0, "optimize": True}
    frames[0].save(path, save_all=True, append_images=frames[1:], **options)


def main():
    actions, pi_k, advantages = policy_and_advantage()
    ratios, lam_prime = targets(pi_k, advantages)
    width = actions[1] - actions[0]
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), constrained_layout=True)
    grid = np.linspace(advantages[pi_k > 1e-3 * pi_k.max()].min(), advantages.max(), 500)
    for name, ratio in ratios.items():
        style = {"color": COLORS[name], "lw": 2, "label": name}
        left.plot(grid, ratio(grid), **style)
        right.plot(actions, ratio(advantages) * pi_k / width, **style)
    left.axhline(1, color="0.7", lw=1, zorder=0)
    left.axvline(lam_prime, color=COLORS["reverse KL"], lw=1, ls=":")
    left.text(lam_prime, 0.05, " λ′", color=COLORS["reverse KL"])
    left.set(xlabel="advantage A", ylabel="target ratio π*/π$_k$")
    left.set(xlim=(-4, lam_prime + 0.4), ylim=(0, 2.6))
    left.set_title("exponential, hyperbolic, clipped-linear")
    right.plot(actions, pi_k / width, color="0.3", lw=1.5, ls="--", label="π$_k$")
    scaled = advantages / 12
    right.plot(actions, scaled, color="0.75", lw=1, label="A (scaled)")
    right.set(xlabel="action a", ylabel="density", xlim=(-3, 3), ylim=(-0.25, 0.75))
    right.set_title("what they make of the same policy")
    right.legend(frameon=False, fontsize=9)
    left.legend(frameon=False, fontsize=9)
    path = ROOT / "benchmark" / "pictures" / "targets.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=130)
    animate(path.with_name("fit.gif"))
    print(f"wrote {path.relative_to(ROOT)} and fit.gif")


if __name__ == "__main__":
    main()
