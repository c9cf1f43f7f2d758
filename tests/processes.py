"""What each of several processes does in test_atari.py: torchrun processes.py gradient FOLDER, or train FOLDER …"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import spu_atari


def random_batch(samples, actions=4):
    generator = torch.Generator().manual_seed(7)
    obs = torch.randint(0, 256, (samples, 4, 84, 84), dtype=torch.uint8, generator=generator)
    chosen = torch.randint(0, actions, (samples,), generator=generator)
    advantages, targets = torch.randn(2, samples, generator=generator)
    old = (0.1 * torch.randn(samples, actions, generator=generator)).log_softmax(-1)
    return [obs, chosen, advantages, targets, old]


def new_state(actions=4, dtype=torch.float32):
    torch.manual_seed(0)
    agent = spu_atari.Agent(actions).to(dtype)
    params = {name: p.detach() for name, p in agent.named_parameters()}
    adam = {f"{moment}.{name}": torch.zeros_like(p) for moment in ("m", "v") for name, p in params.items()}
    return agent, params, adam | {"step": torch.zeros(())}


def gradient(folder):
    """This process's share of 32 samples; Adam's first moment after one step is a tenth of the gradient."""
    spu_atari.join_processes("0")
    agent, params, adam = new_state()
    share = 32 // spu_atari.WORLD
    batch = [x[share * spu_atari.RANK :][:share] for x in random_batch(32)]
    with torch.no_grad():
        spu_atari.minibatch_step(params, adam, torch.tensor(1e-4), agent, batch, spu_atari.Args())
    torch.save(adam, f"{folder}/{spu_atari.RANK}.pt")


def train(folder):
    """The script's own main, and the weights it leaves in this process."""
    step, seen = spu_atari.minibatch_step, {}

    def watched(params, adam, *rest):
        seen.update(params | adam)
        return step(params, adam, *rest)

    spu_atari.minibatch_step = watched
    spu_atari.main()
    torch.save(seen, f"{folder}/{spu_atari.RANK}.pt")


if __name__ == "__main__":
    what, folder, *sys.argv[1:] = sys.argv[1:]
    {"gradient": gradient, "train": train}[what](folder)
