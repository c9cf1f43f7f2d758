"""The pieces of an iteration against slow, obvious or independent versions of themselves."""

import copy
import importlib
import math

import numpy as np
import pytest
import torch
from conftest import CONTINUOUS

import spu_continuous
import spu_linf
import spu_reverse_kl

OBS, ACTIONS = 5, 3


@pytest.fixture(params=CONTINUOUS)
def spu(request):
    return importlib.import_module(request.param)


def random_batch(n, seed=0):
    g = torch.Generator().manual_seed(seed)
    sizes = [(n, OBS), (n, ACTIONS), (n,), (n,), (n, ACTIONS)]  # inputs, actions, advantages, value targets, old mean
    return [torch.randn(size, generator=g) for size in sizes[:-1]] + [0.1 * torch.randn(sizes[-1], generator=g)]


def new_state(spu, dtype=torch.float32):
    torch.manual_seed(0)
    agent = spu.Agent(OBS, ACTIONS).to(dtype)
    params = {name: p.detach() for name, p in agent.named_parameters()}
    adam = {f"{m}.{name}": torch.zeros_like(p) for m in ("m", "v") for name, p in params.items()}
    return agent, params, adam | {"step": torch.zeros((), dtype=dtype)}


# ---------------------------------------------------------------- advantages


def slow_gae(rewards, values, next_values, terminated, ended, gamma, lam):
    """The definition, sample by sample: the discounted sum of the TD errors up to the end of the episode or batch."""
    advantages = np.zeros_like(rewards)
    steps, envs = rewards.shape
    for i in range(envs):
        for t in range(steps):
            weight = 1.0
            for k in range(t, steps):
                bootstrap = 0.0 if terminated[k, i] else gamma * next_values[k, i]
                advantages[t, i] += weight * (rewards[k, i] + bootstrap - values[k, i])
                weight *= gamma * lam
                if ended[k, i]:
                    break
    return advantages


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_sum_of_td_errors_within_the_episode(spu, seed):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, 40, 2))
    terminated, truncated = rng.random((2, 40, 2)) < 0.1
    assert terminated.any() and (truncated & ~terminated).any()
    arguments = (rewards, values, next_values, terminated, terminated | truncated, 0.97, 0.9)
    np.testing.assert_allclose(spu.gae(*arguments), slow_gae(*arguments), rtol=1e-12)


def test_gae_gives_a_truncated_state_its_value_and_a_terminal_one_nothing(spu):
    rewards, values, next_values = np.full((3, 1), 1.0), np.zeros((3, 1)), np.full((3, 1), 10.0)
    ended = np.array([[False], [True], [False]])
    truncated = spu.gae(rewards, values, next_values, np.zeros_like(ended), ended, 0.5, 1.0)
    terminal = spu.gae(rewards, values, next_values, ended, ended, 0.5, 1.0)
    assert truncated[1, 0] == 1 + 0.5 * 10 and terminal[1, 0] == 1
    assert truncated[2, 0] == terminal[2, 0] == 1 + 0.5 * 10  # the batch's end is not the episode's


# ---------------------------------------------------------------- the normaliser and the acting network


def test_moments_are_those_of_everything_seen(spu):
    rng = np.random.default_rng(0)
    batches = [rng.normal(1e3 * i, 10.0**i, size=(n, 4)) for i, n in enumerate((1, 7, 300))]
    moments = torch.tensor([[0.0], [1.0], [0.0]], dtype=torch.float64).repeat(1, 4)
    for batch in batches:
        moments = spu.update_moments(moments, torch.tensor(batch))
    seen = np.concatenate(batches)
    np.testing.assert_allclose(moments[0], seen.mean(0), rtol=1e-10)
    np.testing.assert_allclose(moments[1], seen.var(0), rtol=1e-10)
    assert (moments[2] == len(seen)).all()


def test_normaliser_has_the_paper_codes_floor_and_clipping(spu):
    agent = spu.Agent(3, 1)
    agent.obs_moments = torch.tensor([[1.0, 1.0, 1.0], [4.0, 1e-9, 4.0], [9.0, 9.0, 9.0]], dtype=torch.float64)
    np.testing.assert_allclose(agent.normalizer()(np.array([2.0, 1.2, 99.0])), [0.5, 2.0, 5.0], rtol=1e-6)


@pytest.mark.parametrize("shape", [(OBS,), (1, OBS), (4, OBS)])
def test_the_acting_network_is_the_trained_one(spu, shape):
    agent, _, _ = new_state(spu)
    agent.obs_moments = spu.update_moments(agent.obs_moments, 3 + 2 * torch.randn(500, OBS, dtype=torch.float64))
    for p in agent.parameters():
        p.data += 0.1 * torch.randn_like(p)
    obs = 3 + 2 * np.random.default_rng(0).normal(size=shape)
    expected = agent.policy(torch.tensor(agent.normalizer()(obs))).detach().numpy()
    np.testing.assert_allclose(agent.actor()(obs), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("orthogonal", [False, True])
def test_initial_weights(spu, orthogonal):
    agent = spu.Agent(OBS, ACTIONS, orthogonal)
    hidden, middle, head = agent.policy[0].weight, agent.policy[2].weight, agent.policy[4].weight
    if orthogonal:
        torch.testing.assert_close(middle @ middle.T, 2 * torch.eye(64), rtol=0, atol=1e-5)
        torch.testing.assert_close(head @ head.T, 1e-4 * torch.eye(ACTIONS), rtol=0, atol=1e-8)
    else:
        torch.testing.assert_close(hidden.norm(dim=1), torch.ones(64))
        torch.testing.assert_close(head.norm(dim=1), torch.full((ACTIONS,), 0.01))
        torch.testing.assert_close(agent.value[4].weight.norm(), torch.tensor(1.0))
    assert not any(m.bias.any() for m in [*agent.policy[::2], *agent.value[::2]]) and not agent.log_std.any()


# ---------------------------------------------------------------- the step


def gaussian(mean, log_std):
    return torch.distributions.Independent(torch.distributions.Normal(mean, log_std.exp()), 1)


def test_gaussian_kl_and_log_prob_are_those_of_torch_distributions(spu):
    torch.manual_seed(0)
    mean, old_mean, actions = torch.randn(3, 100, ACTIONS, dtype=torch.float64)
    log_std, old_log_std = 0.5 * torch.randn(2, ACTIONS, dtype=torch.float64)
    new, old = gaussian(mean, log_std), gaussian(old_mean, old_log_std)
    expected = torch.distributions.kl_divergence(new, old)
    torch.testing.assert_close(spu.gaussian_kl(mean, log_std, old_mean, old_log_std), expected)
    torch.testing.assert_close(spu.gaussian_log_prob(actions, mean, log_std), new.log_prob(actions))


def test_a_state_past_epsilon_gives_no_gradient():
    kl = torch.tensor([0.01, 0.05, 0.2], requires_grad=True)
    ratio = torch.tensor([1.1, 0.9, 1.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 3.0])
    spu_continuous.spu_loss(kl, ratio, advantages, lam=2.0, epsilon=0.05).backward()
    torch.testing.assert_close(kl.grad, torch.tensor([1.0, 1.0, 0.0]) / 3)
    torch.testing.assert_close(ratio.grad, torch.tensor([-0.5, 1.0, 0.0]) / 3)


def test_without_the_kl_term_or_acceptance_their_part_is_gone():
    kl, ratio = torch.tensor([0.01, 0.2], requires_grad=True), torch.tensor([1.1, 1.5], requires_grad=True)
    spu_continuous.spu_loss(kl, ratio, torch.ones(2), lam=1.0, epsilon=math.inf, kl_term=False).backward()
    assert not kl.grad.any() and (ratio.grad == -0.5).all()


def test_the_reverse_kl_decides_acceptance_in_spu_reverse_kl():
    kl, ratio = torch.tensor([9.0, 0.01], requires_grad=True), torch.tensor([1.1, 1.5], requires_grad=True)
    reverse_kl = torch.tensor([0.01, 9.0])
    spu_reverse_kl.spu_loss(kl, reverse_kl, ratio, torch.tensor([3.0, 4.0]), accept=0.03).backward()
    assert kl.grad.tolist() == [0.5, 0.0] and ratio.grad.tolist() == [-1.5, 0.0]


def forward_loss(kl, reverse_kl, ratio, third, old_log_prob, args):
    accepted = kl.detach() <= args.epsilon if args.per_state_acceptance else 1.0
    return ((kl if args.kl_term else 0) - ratio * third / args.lam) * accepted


def backward_loss(kl, reverse_kl, ratio, third, old_log_prob, args):
    return (kl - ratio * third) * (reverse_kl.detach() <= args.accept)


def squared_error(kl, reverse_kl, ratio, third, old_log_prob, args):
    if args.probabilities:
        return ((ratio - third) * old_log_prob.exp()) ** 2
    return (ratio - third) ** 2


STEPS = [
    (spu_continuous, forward_loss, {}),
    (spu_continuous, forward_loss, {"kl_term": False}),
    (spu_continuous, forward_loss, {"per_state_acceptance": False}),
    (spu_continuous, forward_loss, {"epsilon": 0.04}),
    (spu_reverse_kl, backward_loss, {"accept": 0.05}),
    (spu_reverse_kl, backward_loss, {"accept": math.inf}),
    (spu_linf, squared_error, {}),
    (spu_linf, squared_error, {"probabilities": True}),
]


@pytest.mark.parametrize("spu, policy_loss, options", STEPS)
def test_a_step_is_autograd_and_torch_adam(spu, policy_loss, options):
    """Independent of functional_call, torch.func.grad and the Adam written out: modules, distributions, optim.Adam."""
    args = spu.Args(**options)
    agent, params, adam = new_state(spu, torch.float64)
    reference = copy.deepcopy(agent)
    rate = torch.tensor(0.01, dtype=torch.float64)
    optimizer = torch.optim.Adam(reference.parameters(), lr=rate.item(), eps=1e-5)
    old_log_std = torch.full((ACTIONS,), 0.1)
    for seed in range(20):
        batch = [x.double() for x in random_batch(16, seed)]
        spu.minibatch_step(params, adam, rate, agent, batch, old_log_std, args)
        obs, actions, third, targets, old_mean = batch
        new, old = gaussian(reference.policy(obs), reference.log_std), gaussian(old_mean, old_log_std)
        kl, reverse_kl = (torch.distributions.kl_divergence(*pair) for pair in ((new, old), (old, new)))
        ratio = new.log_prob(actions).exp() / old.log_prob(actions).exp()
        optimizer.zero_grad()
        value_loss = (reference.value(obs).squeeze(-1) - targets).square().mean()
        (policy_loss(kl, reverse_kl, ratio, third, old.log_prob(actions), args).mean() + value_loss).backward()
        optimizer.step()
    for p, q in zip(agent.parameters(), reference.parameters()):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)
    assert agent.log_std.any()


@pytest.mark.parametrize("name, minibatch_size", [*((name, 64) for name in CONTINUOUS), ("spu_continuous", 37)])
def test_compiled_and_eager_steps_agree(name, minibatch_size):
    spu = importlib.import_module(name)
    args, batches = spu.Args(), [random_batch(minibatch_size, seed) for seed in range(30)]
    rate, old_log_std = torch.tensor(3e-4), torch.zeros(ACTIONS)
    agents = []
    torch.compiler.reset()  # a script compiles for one shape only
    for compiled in (False, True):
        agent, params, adam = new_state(spu)
        step = spu.minibatch_step
        with torch.no_grad():
            if compiled:
                step = spu.try_compile(params, adam, rate, agent, batches[0], old_log_std, args)
                assert step is not spu.minibatch_step
                assert adam["step"] == 0  # the trial was on copies
            for batch in batches:
                step(params, adam, rate, agent, batch, old_log_std, args)
        agents.append(agent)
    for p, q in zip(*(agent.parameters() for agent in agents)):
        torch.testing.assert_close(p, q, rtol=1e-4, atol=1e-6)
