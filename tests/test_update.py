"""The pieces of an iteration against slow, obvious or independent versions of themselves."""

import importlib
import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import CONTINUOUS

import spu_continuous
import spu_linf
import spu_reverse_kl

OBS, ACTIONS = 5, 3
SPACE = gym.spaces.Box(-1.0, 1.0, (ACTIONS,))


@pytest.fixture(params=CONTINUOUS)
def spu(request):
    return importlib.import_module(request.param)


def random_data(rows, seed=0, dtype=torch.float32):
    """What `estimate` would return for a batch."""
    g = torch.Generator().manual_seed(seed)
    data = {
        "inputs": torch.randn(rows, OBS, generator=g),
        "actions": torch.randn(rows, ACTIONS, generator=g),
        "advantages": torch.randn(rows, generator=g),
        "value_targets": torch.randn(rows, 1, generator=g),
        "old_mean": 0.1 * torch.randn(rows, ACTIONS, generator=g),
        "old_log_std": torch.full((ACTIONS,), 0.1),
    }
    data["lam"] = torch.tensor(1.3)
    data["epsilon"] = torch.tensor(math.inf)
    data["target_ratios"] = data["advantages"]  # what the other two scripts fit to
    data["log_target_ratios"] = data["advantages"]
    return {name: x.to(dtype) for name, x in data.items()}


def new_agent(spu, dtype=torch.float32):
    torch.manual_seed(0)
    agent = spu.Agent(OBS, SPACE, initial_log_std=0.0)
    return agent if dtype == torch.float32 else agent.to(dtype)


# ---------------------------------------------------------------- advantages


def slow_gae(rewards, values, next_values, terminated, ended, gamma, lam):
    """The definition, step by step: the discounted sum of the TD errors up to the end of the episode or batch."""
    advantages = np.zeros_like(rewards)
    for t in range(len(rewards)):
        weight = 1.0
        for k in range(t, len(rewards)):
            bootstrap = 0.0 if terminated[k] else gamma * next_values[k]
            advantages[t] += weight * (rewards[k] + bootstrap - values[k])
            weight *= gamma * lam
            if ended[k]:
                break
    return advantages


@pytest.mark.parametrize("seed", range(5))
def test_gae_is_the_sum_of_td_errors_within_the_episode(spu, seed):
    rng = np.random.default_rng(seed)
    rewards, values, next_values = rng.normal(size=(3, 80))
    terminated, truncated = rng.random((2, 80)) < 0.1
    assert terminated.any() and (truncated & ~terminated).any()
    arguments = (rewards, values, next_values, terminated, terminated | truncated, 0.97, 0.9)
    np.testing.assert_allclose(spu.gae(*arguments), slow_gae(*arguments), rtol=1e-12)


def test_gae_gives_a_truncated_state_its_value_and_a_terminal_one_nothing(spu):
    rewards, values, next_values = np.full(3, 1.0), np.zeros(3), np.full(3, 10.0)
    ended = np.array([False, True, False])
    truncated = spu.gae(rewards, values, next_values, np.zeros_like(ended), ended, 0.5, 1.0)
    terminal = spu.gae(rewards, values, next_values, ended, ended, 0.5, 1.0)
    assert truncated[1] == 1 + 0.5 * 10 and terminal[1] == 1
    assert truncated[2] == terminal[2] == 1 + 0.5 * 10  # the batch's end is not the episode's


# ---------------------------------------------------------------- units, normaliser and the acting network


def test_moments_are_those_of_everything_seen(spu):
    rng = np.random.default_rng(0)
    batches = [rng.normal(1e3 * i, 10.0**i, size=(n, 4)) for i, n in enumerate((1, 7, 300))]
    moments = spu.Agent(4, SPACE).obs_moments
    for batch in batches:
        moments = spu.update_moments(moments, torch.tensor(batch))
    seen = np.concatenate(batches)
    np.testing.assert_allclose(moments[0], seen.mean(0), rtol=1e-10)
    np.testing.assert_allclose(moments[1], seen.std(0), rtol=1e-7)
    assert (moments[2] == len(seen)).all()


def test_small_units_are_seen_and_constants_do_no_harm(spu):
    """A spread of 1e-3 around 0 is seen in full; what never changes has the floor, 1e-4 of its size."""
    agent = spu.Agent(3, SPACE)
    column = torch.tensor([-1e-3, 1e-3]).double()
    x = torch.stack([column, torch.zeros(2), torch.full((2,), 1e6)], 1).double()
    agent.obs_moments[:] = spu.update_moments(agent.obs_moments, x)
    np.testing.assert_allclose(agent.obs_moments[1], [1e-3, 1e-4, 1e2], rtol=1e-6)
    np.testing.assert_allclose(agent.normalize(x.numpy()), [[-1, 0, 0], [1, 0, 0]], atol=1e-6)
    assert agent.normalize(np.array([[1.0, -1.0, 0.0]])).tolist() == [[5, -5, -5]]  # clipped


def test_the_acting_network_is_the_trained_one(spu):
    agent = new_agent(spu)
    agent.obs_moments[:] = spu.update_moments(
        agent.obs_moments, 3 + 2 * torch.randn(500, OBS, dtype=torch.float64)
    )
    for p in agent.parameters():
        p.data += 0.1 * torch.randn_like(p)
    for obs in 3 + 2 * np.random.default_rng(0).normal(size=(5, OBS)):
        inputs = agent.normalize(obs)
        expected = spu.forward(agent.policy.params, torch.tensor(inputs))
        np.testing.assert_allclose(agent.policy.outputs(inputs), expected, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(agent.mean(obs), expected, rtol=1e-4, atol=1e-6)


def test_an_agent_that_was_moved_is_not_trained_with_the_old_one_acting(spu):
    """Acting reads the parameters' memory, which .double() or .to() leaves behind."""
    args = spu.Args(env_id="Pendulum-v1", num_steps=3)
    env = spu.make_env(args)
    agent = spu.Agent(3, env.action_space)
    spu.collect(env, agent, args, None, 0, None)
    with pytest.raises(AssertionError):
        spu.collect(env, agent.double(), args, None, 0, None)


def test_actions_are_in_units_of_the_action_space(spu):
    """-1 to 1 is low to high where both are finite and differ; other components are left as they are."""
    low, high = np.array([-0.4, 99.0, -np.inf, 2.0, 0.0]), np.array([0.4, 101.0, 5.0, 2.0, np.inf])
    space = gym.spaces.Box(low, high, dtype=np.float64)
    agent = spu.Agent(OBS, space)
    np.testing.assert_allclose(agent.to_environment(-np.ones(5)), [-0.4, 99, -1, -1, -1])
    np.testing.assert_allclose(agent.to_environment(np.ones(5)), [0.4, 101, 1, 1, 1])
    np.testing.assert_allclose(
        agent.to_environment(3 * np.ones(5)), [1.2, 103, 3, 3, 3]
    )  # beyond, passed on
    raw = spu.Agent(OBS, space, scale_actions=False)
    np.testing.assert_array_equal(raw.to_environment(0.3 * np.ones(5)), 0.3 * np.ones(5))


def test_unit_bounds_leave_actions_as_they_are_to_the_bit(spu):
    action = np.random.default_rng(0).normal(size=ACTIONS).astype(np.float32)
    assert (new_agent(spu).to_environment(action) == action).all()


def test_matrices_of_another_type_have_their_shape_and_type(spu):
    space = gym.spaces.Box(-1, 1, (2, 3), np.float64)
    action = spu.Agent(OBS, space).to_environment(np.arange(6.0))
    assert action.dtype == np.float64 and action.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_values_are_in_units_of_the_rewards(spu):
    agent, inputs = new_agent(spu), random_data(9)["inputs"].numpy()
    assert not agent.values(inputs).any()  # nothing seen yet: no first guess outweighs the rewards
    agent.value_moments[:] = torch.tensor([[100.0], [7.0], [1.0]])
    expected = 100 + 7 * spu.forward(agent.value.params, torch.tensor(inputs))[:, 0]
    np.testing.assert_allclose(agent.values(inputs), expected, rtol=1e-6)


def test_initial_weights_are_random_directions(spu):
    agent = spu.Agent(OBS, SPACE, initial_log_std=-0.7)
    policy, value = agent.policy.params, agent.value.params
    torch.testing.assert_close(policy["w1"].norm(dim=0), torch.ones(64))
    torch.testing.assert_close(policy["w2"].norm(dim=0), torch.ones(64))
    torch.testing.assert_close(policy["w3"].norm(dim=0), torch.full((ACTIONS,), 0.01))
    torch.testing.assert_close(value["w3"].norm(), torch.tensor(1.0))
    assert not any(network[b].any() for network in (policy, value) for b in ("b1", "b2", "b3"))
    assert policy["log_std"].tolist() == pytest.approx([-0.7] * ACTIONS)


def test_estimate_hands_the_fit_what_it_needs():
    """Everything computed again by hand, in the order of the paper's code: normaliser, values, advantages."""
    spu, rng = spu_continuous, np.random.default_rng(0)
    args = spu.Args(lam=0.7, epsilon=0.04, gamma=0.9, gae_lambda=0.8)
    agent = new_agent(spu)
    agent.value_moments[:] = torch.tensor([[3.0], [2.0], [10.0]])
    obs, next_obs = rng.normal(2, 3, size=(2, 50, OBS))
    actions = rng.normal(size=(50, ACTIONS)).astype(np.float32)
    rewards = rng.normal(size=50)
    terminated, truncated = rng.random((2, 50)) < 0.1
    data = spu.estimate(agent, [obs, actions, rewards, next_obs, terminated, truncated], args)
    inputs = ((obs - obs.mean(0)) / obs.std(0)).clip(-5, 5)
    np.testing.assert_allclose(data["inputs"], inputs, rtol=1e-5, atol=1e-5)
    old_mean = spu.forward(agent.policy.params, data["inputs"])
    np.testing.assert_allclose(data["old_mean"], old_mean, rtol=1e-4, atol=1e-6)
    next_inputs = ((next_obs - obs.mean(0)) / obs.std(0)).clip(-5, 5).astype(np.float32)
    values, next_values = (
        3 + 2 * spu.forward(agent.value.params, torch.tensor(x))[:, 0].numpy()
        for x in (inputs.astype(np.float32), next_inputs)
    )
    ended = terminated | truncated
    advantages = slow_gae(rewards, values, next_values, terminated, ended, 0.9, 0.8)
    targets = advantages + values
    expected = (advantages - advantages.mean()) / advantages.std()
    np.testing.assert_allclose(data["advantages"], expected, rtol=1e-3, atol=1e-4)
    mean, std, count = agent.value_moments[:, 0].tolist()
    assert count == 60 and mean == pytest.approx((10 * 3 + targets.sum()) / 60, rel=1e-4)
    np.testing.assert_allclose(data["value_targets"][:, 0], (targets - mean) / std, atol=1e-3)
    assert data["lam"].item() == pytest.approx(0.7) and data["epsilon"].item() == pytest.approx(
        0.04
    )
    assert torch.equal(data["old_log_std"], agent.policy.params["log_std"])


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
    kl, ratio = (
        torch.tensor([0.01, 0.2], requires_grad=True),
        torch.tensor([1.1, 1.5], requires_grad=True),
    )
    spu_continuous.spu_loss(
        kl, ratio, torch.ones(2), lam=1.0, epsilon=math.inf, kl_term=False
    ).backward()
    assert kl.grad is None and (ratio.grad == -0.5).all()


def test_the_reverse_kl_decides_acceptance_in_spu_reverse_kl():
    kl, ratio = (
        torch.tensor([9.0, 0.01], requires_grad=True),
        torch.tensor([1.1, 1.5], requires_grad=True),
    )
    reverse_kl = torch.tensor([0.01, 9.0])
    spu_reverse_kl.spu_loss(kl, reverse_kl, ratio, torch.tensor([3.0, 4.0]), accept=0.03).backward()
    assert kl.grad.tolist() == [0.5, 0.0] and ratio.grad.tolist() == [-1.5, 0.0]


@pytest.mark.parametrize("place", [0, 1])
def test_an_overflowing_ratio_is_harmless_in_accepted_and_rejected_states(spu, place):
    """exp(200) is infinite, and 0 times infinity is NaN: a run that met it once met it again after every --resume."""
    agent, data = new_agent(spu), random_data(2)
    old_mean = spu.forward(agent.policy.params, data["inputs"])
    data["old_mean"] = old_mean
    data["old_log_std"] = agent.policy.params["log_std"].clone()
    data["actions"] = old_mean.clone()
    # The new policy is far from the old one in state `place`: log-ratio about 200 at the new mean.
    data["old_mean"] = data["old_mean"].clone()
    data["old_mean"][place] += math.sqrt(2 * 200 / ACTIONS)
    data["advantages"] = torch.tensor([-1.0, 1.0])
    args = spu.Args()
    for name in ("epsilon", "accept"):  # the state in question is accepted, or not
        data[name] = torch.tensor(math.inf if place == 0 else 0.03)
        setattr(args, name, math.inf if place == 0 else 0.03)
    rows = torch.arange(2)
    log_ratio = spu.gaussian_log_prob(
        data["actions"], old_mean, data["old_log_std"]
    ) - spu.gaussian_log_prob(data["actions"], data["old_mean"], data["old_log_std"])
    assert log_ratio[place] > 190
    loss = spu.policy_loss(agent.policy.params, data, rows, args)
    gradient = torch.func.grad(spu.policy_loss)(agent.policy.params, data, rows, args)
    assert loss.isfinite() and all(g.isfinite().all() for g in gradient.values())


def forward_loss(kl, reverse_kl, ratio, third, old_log_prob, args):
    return ((kl if args.kl_term else 0) - ratio * third / args.lam) * (kl.detach() <= args.epsilon)


def backward_loss(kl, reverse_kl, ratio, third, old_log_prob, args):
    return (kl - ratio * third) * (reverse_kl.detach() <= args.accept)


def squared_error(kl, reverse_kl, ratio, third, old_log_prob, args):
    if args.probabilities:
        return ((ratio - third) * old_log_prob.exp()) ** 2
    return (ratio - third) ** 2


STEPS = [
    (spu_continuous, forward_loss, {"epsilon": math.inf}),
    (spu_continuous, forward_loss, {"epsilon": math.inf, "kl_term": False}),
    (spu_continuous, forward_loss, {"epsilon": math.inf, "lam": 0.7}),
    (spu_continuous, forward_loss, {"epsilon": 0.04}),
    (spu_reverse_kl, backward_loss, {"accept": 0.05}),
    (spu_reverse_kl, backward_loss, {"accept": math.inf}),
    (spu_linf, squared_error, {}),
    (spu_linf, squared_error, {"probabilities": True}),
]


def module_of(network):
    """The same network out of torch's own layers."""
    layers = [torch.nn.Linear(1, 1) for _ in range(3)]
    for i, layer in enumerate(layers, start=1):
        layer.weight = torch.nn.Parameter(network.params[f"w{i}"].T.clone(), requires_grad=True)
        layer.bias = torch.nn.Parameter(network.params[f"b{i}"].clone(), requires_grad=True)
    return torch.nn.Sequential(layers[0], torch.nn.Tanh(), layers[1], torch.nn.Tanh(), layers[2])


def assert_same_network(network, module, **tolerance):
    for i, layer in enumerate(module[::2], start=1):
        torch.testing.assert_close(network.params[f"w{i}"].data, layer.weight.data.T, **tolerance)
        torch.testing.assert_close(network.params[f"b{i}"].data, layer.bias.data, **tolerance)


@pytest.mark.parametrize("spu, policy_loss, options", STEPS)
def test_a_step_is_autograd_and_torch_adam(spu, policy_loss, options):
    """Independent of torch.func.grad and the Adam written out: torch's layers, distributions and optim.Adam."""
    args = spu.Args(**options)
    agent = new_agent(spu, torch.float64)
    policy, value = module_of(agent.policy), module_of(agent.value)
    log_std = torch.zeros(ACTIONS, dtype=torch.float64, requires_grad=True)
    rate = torch.tensor(0.01, dtype=torch.float64)
    learnt = [*policy.parameters(), *value.parameters(), log_std]
    optimizer = torch.optim.Adam(learnt, lr=rate.item(), eps=1e-5)
    rows = torch.arange(3, 19)
    for seed in range(20):
        data = random_data(20, seed, torch.float64)
        for name in {"lam", "epsilon", "accept"} & set(options):
            data[name] = torch.tensor(options[name], dtype=torch.float64)
        for network in (agent.policy, agent.value):
            network.step(rate, data, rows, args)
        here = {name: x[rows] for name, x in data.items() if x.shape[:1] == (20,)}
        new = gaussian(policy(here["inputs"]), log_std)
        old = gaussian(here["old_mean"], data["old_log_std"])
        kl, reverse_kl = (
            torch.distributions.kl_divergence(*pair) for pair in ((new, old), (old, new))
        )
        old_log_prob = old.log_prob(here["actions"])
        ratio = (new.log_prob(here["actions"]) - old_log_prob).exp()
        optimizer.zero_grad()
        value_loss = (value(here["inputs"]) - here["value_targets"]).square().mean()
        fitted = policy_loss(kl, reverse_kl, ratio, here["advantages"], old_log_prob, args).mean()
        (fitted + value_loss).backward()
        optimizer.step()
    assert_same_network(agent.policy, policy, rtol=1e-5, atol=5e-6)
    assert_same_network(agent.value, value, rtol=1e-5, atol=5e-6)
    torch.testing.assert_close(
        agent.policy.params["log_std"].data, log_std.data, rtol=1e-5, atol=5e-6
    )
    assert log_std.any()


def run_steps(spu, compiled, minibatch_size=64, lams=(1.3,) * 30):
    agent, data, args = new_agent(spu), random_data(256), spu.Args()
    if compiled:
        torch.compiler.reset()
        spu.compile_steps(agent)
        assert "step" in vars(agent.policy)
    rate = torch.tensor(3e-4)
    for i, lam in enumerate(lams):
        data["lam"] = torch.tensor(lam)
        rows = torch.randperm(256, generator=torch.Generator().manual_seed(i))[:minibatch_size]
        for network in (agent.policy, agent.value):
            network.step(rate, data, rows, args)
    return agent


def assert_agents_agree(a, b):
    for name, x in a.state_dict().items():
        torch.testing.assert_close(x, b.state_dict()[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "name, size", [*((name, 64) for name in CONTINUOUS), ("spu_continuous", 37)]
)
def test_compiled_and_eager_steps_agree(name, size):
    spu = importlib.import_module(name)
    assert_agents_agree(run_steps(spu, True, size), run_steps(spu, False, size))


def test_lambda_may_be_annealed_in_a_compiled_run():
    """A compiled step keeps a number for ever; lambda is a tensor."""
    lams = [2.0 - 0.1 * i for i in range(15)]
    eager = run_steps(spu_continuous, False, lams=lams)
    assert_agents_agree(run_steps(spu_continuous, True, lams=lams), eager)
    with pytest.raises(AssertionError):
        assert_agents_agree(run_steps(spu_continuous, True, lams=[2.0] * 15), eager)


def test_nothing_is_left_on_the_cpu(spu):
    """A step with everything on the meta device, which computes no numbers but refuses a tensor of
    the CPU among its own: the nearest to a GPU that a machine without one has."""
    data = {name: x.to("meta") for name, x in random_data(20).items()}
    agent = new_agent(spu).to("meta")
    rows = torch.arange(3, 19, device="meta")
    rate = torch.tensor(3e-4, device="meta")
    for network in (agent.policy, agent.value):
        network.step(rate, data, rows, spu.Args())
        assert network.vector.is_meta and network.m.is_meta
    data["inputs"] = torch.zeros(20, OBS)  # and so it would be found out
    with pytest.raises(RuntimeError, match="device"):
        agent.policy.step(rate, data, rows, spu.Args())
