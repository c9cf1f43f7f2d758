"""Small environments with known answers. A script makes them with --env-id toy_envs:NAME."""

import os
import signal

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

    observation_space = Dict(
        {"a": Box(-9, 9, (2, 2), np.float64), "b": Discrete(3), "c": Box(0, 255, (3,), np.uint8)}
    )
    action_space = Box(-0.5, 0.5, (2, 3), np.float64)

    def _observation(self):
        return {
            "a": self.np_random.normal(size=(2, 2)),
            "b": self.t % 3,
            "c": np.full(3, self.t, np.uint8),
        }

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
    """Goes wrong at its 1000th step: `what` becomes not a number or infinite, or it raises."""

    steps = 0

    def __init__(self, what):
        self.what = what

    def step(self, action):
        Broken.steps += 1
        obs, reward = np.zeros(1, np.float32), 1.0
        if Broken.steps >= 1000 and self.what == "raise":
            raise RuntimeError("the motor is on fire")
        if Broken.steps >= 1000:
            obs = {"nan": obs + np.nan, "inf": obs + np.inf}.get(self.what, obs)
            reward = {"reward": float("nan")}.get(self.what, reward)
        return obs, reward, False, Broken.steps % 50 == 0, {}


class Quit(Constant):
    """Presses Ctrl-C at its 500th step."""

    steps = 0

    def step(self, action):
        Quit.steps += 1
        if Quit.steps == 500:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


class SameArray(Constant):
    """Ten steps an episode; its observation is the number of the step, always in the same array."""

    def __init__(self):
        self.obs = np.zeros(1, np.float32)
        self.observation_space = Box(0, 10, (1,), np.float32)

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.obs[0] = 0
        return self.obs, {}

    def step(self, action):
        self.obs += 1
        return self.obs, 0.0, bool(self.obs[0] == 10), False, {}


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


class Point(gym.Env):
    """Move a point in the plane to the origin within 30 steps: the return is the sum of its distances, about -27 for
    random actions and -2 at best. The same task in any units: of actions, observations and rewards."""

    def __init__(self, low=-1.0, high=1.0, obs_scale=1.0, obs_shift=0.0, reward_scale=1.0):
        self.action_space = Box(low, high, (2,), np.float64)
        self.observation_space = Box(-np.inf, np.inf, (2,), np.float64)
        self.low, self.high = low, high
        self.obs_scale, self.obs_shift, self.reward_scale = obs_scale, obs_shift, reward_scale

    def _observation(self):
        return self.place * self.obs_scale + self.obs_shift

    def reset(self, seed=None, options=None):
        super().reset(seed=seed)
        self.place = self.np_random.uniform(-1, 1, 2)
        return self._observation(), {}

    def step(self, action):
        direction = (2 * action - self.low - self.high) / (self.high - self.low)
        self.place = self.place + 0.2 * direction.clip(-1, 1)
        return (
            self._observation(),
            -self.reward_scale * float(np.linalg.norm(self.place)),
            False,
            False,
            {},
        )


POINTS = {  # the units of a Point, by name
    "Plain": {},
    "Actions10": {"low": -10.0, "high": 10.0},
    "Actions100": {"low": -100.0, "high": 100.0},
    "ActionsNear100": {"low": 99.0, "high": 101.0},
    "ObsSmall": {"obs_scale": 1e-4},
    "ObsFar": {"obs_scale": 1e4, "obs_shift": 1e6},
    "RewardSmaller": {"reward_scale": 1e-3},
    "RewardSmall": {"reward_scale": 1e-4},
    "RewardLarge": {"reward_scale": 1e4},
}
for name, units in POINTS.items():
    gym.register(f"Point{name}-v0", Point, max_episode_steps=30, kwargs=units)
gym.register("Constant-v0", Constant, max_episode_steps=5)
gym.register("Endless-v0", Constant)
gym.register(
    "RandomState-v0", OtherGenerator, max_episode_steps=5, kwargs={"make": np.random.RandomState}
)
mersenne = {"make": lambda seed: np.random.Generator(np.random.MT19937(seed))}
gym.register("Mersenne-v0", OtherGenerator, max_episode_steps=5, kwargs=mersenne)
gym.register("Blank-v0", Blank)
gym.register("Silent-v0", Silent)
gym.register("Odd-v0", Odd)
gym.register("Strict-v0", Odd, kwargs={"strict": True})
gym.register("Graphs-v0", Graphs)
gym.register("SameArray-v0", SameArray)
gym.register("Quit-v0", Quit, max_episode_steps=5)
for what in ("nan", "inf", "reward", "raise"):
    gym.register(f"Broken-{what}-v0", Broken, kwargs={"what": what}, disable_env_checker=True)
