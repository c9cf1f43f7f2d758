"""Small environments with known answers. A script makes them with --env-id toy_envs:NAME."""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Dict, Discrete, Graph


class Constant(gym.Env):
    """Reward 1 at every step and nothing to see, so a state is worth 1 / (1 - gamma) if time limits are not deaths."""

    observation_space, action_space = Box(-1, 1, (1,), np.float32), Box(-1, 1, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(1, np.float32), {}

    def step(self, action):
        return np.zeros(1, np.float32), 1.0, False, False, {}


class Odd(gym.Env):
    """A dictionary to see, a matrix of float64 to do, 7 steps, each worth its index; if strict, no action outside."""

    observation_space = Dict({"a": Box(-9, 9, (2, 2), np.float64), "b": Discrete(3), "c": Box(0, 255, (3,), np.uint8)})
    action_space = Box(-0.5, 0.5, (2, 3), np.float64)

    def _observation(self):
        return {"a": self.np_random.normal(size=(2, 2)), "b": self.t % 3, "c": np.full(3, self.t, np.uint8)}

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), {}

    def step(self, action):
        assert action.shape == (2, 3) and action.dtype == np.float64
        assert not self.strict or self.action_space.contains(action)
        self.t += 1
        return self._observation(), float(self.t), self.t == 7, False, {}

    def __init__(self, strict=False):
        self.strict = strict


class Broken(Constant):
    """Goes wrong at its 1000th step: `what` becomes not a number or infinite, or so large that the loss overflows."""

    steps = 0

    def __init__(self, what):
        self.what = what

    def step(self, action):
        Broken.steps += 1
        obs, reward = np.zeros(1, np.float32), 1.0
        if Broken.steps >= 1000:
            obs = {"nan": obs + np.nan, "inf": obs + np.inf}.get(self.what, obs)
            reward = {"reward": float("nan"), "overflow": 1e25}.get(self.what, reward)
        return obs, reward, False, Broken.steps % 50 == 0, {}


class Graphs(Constant):
    """Observations that are no vector."""

    observation_space = Graph(Box(-1, 1, (1,)), Discrete(2))


class OtherGenerator(Constant):
    """Draws from a generator that is not gymnasium's own: an old RandomState, or a new one with another algorithm."""

    def __init__(self, make):
        self.make = make

    def reset(self, seed=None, options=None):
        self._np_random = self.make(seed) if seed is not None else self._np_random
        return self._np_random.uniform(-1, 1, 1).astype(np.float32), {}


class Blank(Constant):
    """Draws nothing, though it says that it can."""

    metadata = {"render_modes": ["rgb_array"], "render_fps": 30}

    def __init__(self, render_mode=None):
        self.render_mode = render_mode

    def render(self):
        return None


class Silent(Constant):
    """Fails without a word."""

    def reset(self, seed=None, options=None):
        raise AssertionError


gym.register("Constant-v0", Constant, max_episode_steps=5)
gym.register("Endless-v0", Constant)
gym.register("RandomState-v0", OtherGenerator, max_episode_steps=5, kwargs={"make": np.random.RandomState})
mersenne = {"make": lambda seed: np.random.Generator(np.random.MT19937(seed))}
gym.register("Mersenne-v0", OtherGenerator, max_episode_steps=5, kwargs=mersenne)
gym.register("Blank-v0", Blank)
gym.register("Silent-v0", Silent)
gym.register("Odd-v0", Odd)
gym.register("Strict-v0", Odd, kwargs={"strict": True})
gym.register("Graphs-v0", Graphs)
for what in ("nan", "inf", "reward", "overflow"):
    gym.register(f"Broken-{what}-v0", Broken, kwargs={"what": what}, disable_env_checker=True)
