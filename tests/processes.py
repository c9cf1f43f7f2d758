"""What each of several processes does in test_atari.py: torchrun processes.py share FOLDER, or
train FOLDER OPTION …"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import spu_atari


def random_data(samples, actions=4):
    """What `estimate` returns, but random."""
    generator = torch.Generator().manual_seed(7)
    advantages, targets = torch.randn(2, samples, generator=generator)
    logits = 0.1 * torch.randn(samples, actions, generator=generator)
    size = (samples, 4, 84, 84)
    return {
        "obs": torch.randint(0, 256, size, dtype=torch.uint8, generator=generator),
        "actions": torch.randint(0, actions, (samples,), generator=generator),
        "advantages": advantages,
        "value_targets": targets,
        "old_log_probs": logits.log_softmax(-1),
    }


def new_agent(actions=4):
    torch.manual_seed(0)
    agent = spu_atari.Agent(actions)
    return agent, torch.optim.Adam(agent.parameters(), 1e-4, eps=1e-5)


def step_and_see(rows):
    """A gradient step on these rows of 32 samples, and a look at them. Returns the gradient, Adam's
    first moments and the moments of the pixels."""
    agent, optimizer = new_agent()
    data = random_data(32)
    measures = spu_atari.gradient_step(agent, optimizer, data, rows, spu_atari.Args())
    agent.see(data["obs"][rows])
    state = {f"gradient {name}": p.grad for name, p in agent.named_parameters()}
    state |= {f"mean {name}": optimizer.state[p]["exp_avg"] for name, p in agent.named_parameters()}
    return state | measures | {"pixel_moments": agent.pixel_moments}


def share(folder):
    """This process's share of the samples."""
    spu_atari.join_processes()
    rows = torch.arange(32).chunk(spu_atari.WORLD)[spu_atari.RANK]
    torch.save(step_and_see(rows), f"{folder}/{spu_atari.RANK}.pt")


def train(folder):
    """The script's own main, and what it leaves in this process: the agent, Adam and the batch."""
    step = spu_atari.gradient_step
    seen = []

    def watched(agent, optimizer, data, *rest):
        seen[:] = [agent, optimizer, data]
        return step(agent, optimizer, data, *rest)

    spu_atari.gradient_step = watched
    spu_atari.main()
    agent, optimizer, data = seen
    state = {"agent": agent.state_dict(), "adam": optimizer.state_dict(), "obs": data["obs"]}
    torch.save(state, f"{folder}/{spu_atari.RANK}.pt")


if __name__ == "__main__":
    what, folder, *sys.argv[1:] = sys.argv[1:]
    {"share": share, "train": train}[what](folder)
