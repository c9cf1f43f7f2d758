"""spu_atari.py: the games' bookkeeping, the update, several processes, and the script as a user
runs it."""

import copy
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import ale_py
import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import processes
import pytest
import torch
from conftest import (
    ROOT,
    EventAccumulator,
    command,
    environment,
    events,
    run,
    run_dir,
    values,
    without_speed,
)

import spu_atari
from spu_atari import Args, Games

SIZES = ["--num-envs", 2, "--num-steps", 32, "--minibatch-size", 32, "--max-epochs", 2]
BREAKOUT = ["--env-id", "Breakout", *SIZES, "--eval-episodes", 1]  # who plays badly is soon done
PLAIN = {"noop_max": 0, "use_fire_reset": False}  # nothing happens before the first step


def torchrun(*options, meet=("--standalone", "--nproc-per-node", "2"), **extra):
    line = [sys.executable, "-m", "torch.distributed.run", *meet, *map(str, options)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(line, env=environment(), **pipes, **extra)


def wait_for(condition, *processes, seconds=120):
    """Return what the condition gives as soon as it is true, while these processes run."""
    deadline = time.time() + seconds
    while not (result := condition()):
        for process in processes:
            assert process.poll() is None, process.communicate()
        assert time.time() < deadline
        time.sleep(0.02)
    return result


def iterations_done(folder):
    """Of the only run in this folder; 0 if there is none."""
    files = list(Path(folder).glob("runs/*/agent.pt"))
    return torch.load(files[0], weights_only=True)["iterations_done"] if files else 0


def kill_worker(launcher, rank):
    """Kill this worker of a torchrun."""
    children = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
    for pid in children:
        if f"\0RANK={rank}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes():
            os.kill(int(pid), signal.SIGKILL)
            return
    raise AssertionError(f"no rank {rank} among {children}")


def steps_of(folder, tag="spu/kl_mean"):
    return [step for step, _ in events(folder)[tag]]


# ---- The games


@pytest.mark.parametrize("game", ["Breakout", "Pong", "MsPacman", "SpaceInvaders"])
def test_lives_scores_and_ends_are_those_of_gymnasium(game):
    """The same actions in gymnasium's own AtariPreprocessing: one game at a time, slow and plain."""
    gym.register_envs(ale_py)
    plain = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    plain = gym.wrappers.AtariPreprocessing(plain, noop_max=0)
    plain = gym.wrappers.FrameStackObservation(plain, 4, padding_type="zero")
    games = Games(Args(env_id=game), 1, 0, **PLAIN)
    obs, info = plain.reset(seed=0)
    lives, score, length, finished, lost_lives = info["lives"], 0.0, 0, 0, 0
    rng = np.random.default_rng(1)
    for _ in range(3000):
        np.testing.assert_array_equal(games.obs[0], obs)
        action = rng.integers(plain.action_space.n)
        rewards, lost, truncated, _, over = games.step(np.array([action]))
        obs, reward, terminated, _, info = plain.step(action)
        score, length = score + reward, length + 1
        assert rewards[0] == reward and not truncated[0]
        assert lost[0] == (terminated or info["lives"] < lives)
        assert over == ([(0, score, length)] if terminated else [])
        lives, lost_lives = info["lives"], lost_lives + lost[0]
        if terminated:
            obs, info = plain.reset()
            lives, score, length, finished = info["lives"], 0.0, 0, finished + 1
    assert finished >= 1 and lost_lives >= finished  # there was something to compare


def test_a_game_that_runs_out_of_time_is_truncated_and_shows_its_last_picture():
    args = Args(env_id="Pong")
    games = Games(args, 2, 0, max_num_frames_per_episode=400, **PLAIN)
    endless = Games(args, 2, 0, **PLAIN)
    for t in range(1, 101):
        _, lost, truncated, last_obs, over = games.step(np.array([2, 3]))
        endless.step(np.array([2, 3]))
        if truncated.any():
            break
    assert truncated.all() and not lost.any() and [length for _, _, length in over] == [t, t]
    np.testing.assert_array_equal(last_obs[:, :3], endless.obs[:, :3])
    # The last step stops at the limit, not after 4 frames.
    assert (last_obs[:, 3] != endless.obs[:, 3]).mean() < 0.01
    assert (games.obs != last_obs).any()


def test_a_time_limit_counts_with_the_value_there_and_a_lost_life_with_nothing():
    """Advantages of a batch in which both happen, against the definition, step by step."""
    args = Args(env_id="Breakout", num_envs=3, num_steps=160, gamma=0.9, gae_lambda=0.7)
    torch.manual_seed(1)
    games = Games(args, 3, 0, max_num_frames_per_episode=300)
    pictures, step = [], games.step

    def watched(actions):
        result = step(actions)
        pictures.append(result)
        return result

    games.step = watched
    agent, _ = processes.new_agent()
    agent.value.weight.data *= 10  # values that matter
    batch, _ = spu_atari.collect(games, agent, args, 0)
    data = spu_atari.estimate(agent, batch, games.obs, args)
    obs = batch[0]
    targets = torch.zeros(160, 3)
    with torch.no_grad():
        _, value = agent(torch.from_numpy(games.obs))
        advantage = torch.zeros(3)
        limits = lives = 0
        for t in reversed(range(160)):
            rewards, lost, truncated, last_obs, _ = pictures[t]
            next_value = value
            if truncated.any():
                after = agent(torch.from_numpy(last_obs))[1]
                next_value = torch.where(torch.tensor(truncated), after, next_value)
            next_value = torch.where(torch.tensor(lost), 0.0, next_value)
            _, value = agent(obs[t])
            goes_on = torch.tensor(~(lost | truncated)).float()
            error = torch.tensor(np.sign(rewards)) + 0.9 * next_value - value
            advantage = error + 0.9 * 0.7 * goes_on * advantage
            targets[t] = advantage + value
            limits, lives = limits + truncated.sum(), lives + lost.sum()
    assert limits >= 3 and lives >= 3
    torch.testing.assert_close(data["value_targets"], targets.flatten(), rtol=1e-4, atol=1e-4)
    assert data["advantages"].mean().abs() < 1e-5
    assert data["advantages"].std(correction=0) == pytest.approx(1, rel=1e-4)


@pytest.mark.parametrize(
    "spelling, rom",
    [
        ("BreakoutNoFrameskip-v4", "breakout"),
        ("ALE/Breakout-v5", "breakout"),
        ("Breakout", "breakout"),
        ("breakout", "breakout"),
        ("ALE/MsPacman-v5", "ms_pacman"),
        ("UpNDownNoFrameskip-v4", "up_n_down"),
    ],
)
def test_all_spellings_of_a_game(spelling, rom):
    assert spu_atari.rom(spelling) == rom


# ---- The update


def test_categorical_kl_is_the_analytic_one():
    new, old = torch.randn(2, 50, 6).log_softmax(-1)
    new_policy, old_policy = (torch.distributions.Categorical(logits=x) for x in (new, old))
    expected = torch.distributions.kl_divergence(new_policy, old_policy)
    torch.testing.assert_close(spu_atari.categorical_kl(new, old), expected)


def main_in(folder, monkeypatch, *options):
    """The script's main, in this process."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", ["spu_atari.py", *map(str, options)])
    spu_atari.main()


def test_each_fit_begins_at_ratio_1_and_kl_0_although_moments_change(tmp_path, monkeypatch):
    """The policy that has acted is the policy that is fitted."""
    step = spu_atari.gradient_step
    seen = []

    def watched(agent, optimizer, data, rows, args):
        measures = step(agent, optimizer, data, rows, args)
        expected = -data["advantages"][rows].mean() / args.lam
        seen.append((agent.pixel_moments, measures, float(expected)))
        return measures

    monkeypatch.setattr(spu_atari, "gradient_step", watched)
    options = ["--total-timesteps", 256, "--learning-rate", 0.003, "--delta", "inf"]
    main_in(tmp_path, monkeypatch, *BREAKOUT, *options)
    assert len(seen) == 4 * 2 * 2
    for _, measures, expected in seen[::4]:  # the first of each iteration
        assert abs(measures["spu/kl_mean"]) < 1e-6 and measures["spu/accepted_fraction"] == 1
        assert float(measures["losses/policy_loss"]) == pytest.approx(expected, abs=1e-5)
    assert max(measures["spu/kl_mean"] for _, measures, _ in seen) > 1e-4
    counts = [int(moments[2, 0]) for moments, _, _ in seen]
    assert counts == sorted([128 + 8 * i for i in range(4)] * 4)  # constant in an iteration


@pytest.mark.parametrize(
    "options", [{}, {"epsilon": 0.004}, {"kl_term": False, "epsilon": math.inf}]
)
def test_a_step_is_that_of_distributions_and_of_the_whole_minibatch(options, monkeypatch):
    """An independent loss, in one piece. Our minibatch of 300 is taken in two chunks."""
    args = Args(entropy_coefficient=0.02, value_coefficient=0.7, **options)
    agent, optimizer = processes.new_agent()
    reference = copy.deepcopy(agent)
    adam = torch.optim.Adam(reference.parameters(), lr=1e-4, eps=1e-5)
    data = processes.random_data(300)
    refused = []
    for _ in range(2):
        spu_atari.gradient_step(agent, optimizer, data, torch.arange(300), args)
        log_probs, values = reference(data["obs"])
        new = torch.distributions.Categorical(logits=log_probs)
        old = torch.distributions.Categorical(logits=data["old_log_probs"])
        kl = torch.distributions.kl_divergence(new, old)
        ratio = (new.log_prob(data["actions"]) - old.log_prob(data["actions"])).exp()
        term = args.kl_term * kl - ratio * data["advantages"] / args.lam
        accepted = kl <= args.epsilon
        refused.append(int((~accepted).sum()))
        value_loss = (values - data["value_targets"]).square().mean()
        loss = torch.where(accepted, term, 0).mean() + 0.7 * value_loss
        adam.zero_grad()
        (loss - 0.02 * new.entropy().mean()).backward()
        adam.step()
    for p, q in zip(agent.parameters(), reference.parameters()):
        # As a whole: where a gradient is all but zero, it is rounding that moves a weight by up to
        # Adam's 1e-4, differently on each kind of processor.
        assert (p.grad - q.grad).norm() < 3e-4 * q.grad.norm()
        assert (p - q).abs().mean() < 1e-6
    if args.epsilon == 0.004:
        assert 0 < refused[0] < 300  # the indicator had something to do


def test_nothing_is_left_on_the_cpu():
    """A step with everything on the meta device, which computes no numbers but refuses a tensor of
    the CPU among its own: the nearest to a GPU that a machine without one has."""
    agent, _ = processes.new_agent()
    agent.to("meta")
    optimizer = torch.optim.Adam(agent.parameters(), 1e-4)
    data = {name: x.to("meta") for name, x in processes.random_data(32).items()}
    means = spu_atari.gradient_step(agent, optimizer, data, torch.arange(16), Args())
    assert all(x.is_meta for x in means.values()) and agent.policy.weight.grad.is_meta
    data["advantages"] = torch.zeros(32)  # and so it would be found out
    with pytest.raises(RuntimeError, match="device"):
        spu_atari.gradient_step(agent, optimizer, data, torch.arange(16), Args())


@pytest.mark.parametrize("epsilon", [0.03, math.inf])
def test_a_ratio_that_would_overflow_gives_a_finite_loss_and_gradient(epsilon):
    """exp(200) is too large for a float32, in a state that is rejected and in one that is not."""
    agent, optimizer = processes.new_agent()
    data = processes.random_data(8)
    logits = torch.zeros(8, 4)
    logits[0, data["actions"][0]] = -200
    data["old_log_probs"] = logits.log_softmax(-1)
    loss, measures = spu_atari.joint_loss(agent, data, torch.arange(8), Args(epsilon=epsilon))
    assert measures["spu/accepted_fraction"] == (7 / 8 if epsilon < 1 else 1)
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in agent.parameters())


def test_the_step_size_follows_the_trust_region():
    args = Args(delta=0.01, learning_rate=1e-3)
    next_rate = spu_atari.next_learning_rate
    assert next_rate(1e-3, 0.004, args) == pytest.approx(1.5e-3)  # room is left: longer steps
    assert next_rate(1e-3, 0.0051, args) == next_rate(1e-3, 0.01, args) == 1e-3
    assert next_rate(1e-3, 0.0101, args) == pytest.approx(1e-3 / 1.5)
    assert next_rate(0.0199, 0.0, args) == next_rate(0.02, 0.0, args) == 0.02  # 20 times the first
    assert next_rate(1e-3, 0.0, Args(delta=math.inf)) == 1e-3  # no region, nothing to follow


def test_inputs_are_standardised_with_the_moments_of_what_was_seen():
    agent, _ = processes.new_agent()
    generator = torch.Generator().manual_seed(1)
    obs = torch.randint(0, 256, (60, 4, 84, 84), dtype=torch.uint8, generator=generator)
    obs[:, :, 0, 0] = 7  # never changes
    plain = agent.normalize(obs)
    torch.testing.assert_close(plain, obs.float() / 255, rtol=1e-4, atol=0)  # nothing seen yet
    for part in obs.split([10, 50]):
        agent.see(part)
    frames = obs[:, -1].double().numpy() / 255
    mean, std, count = agent.pixel_moments.view(3, 84, 84).numpy()
    np.testing.assert_allclose(mean, frames.mean(0), rtol=1e-9)
    np.testing.assert_allclose(std, np.maximum(frames.std(0), 1e-4), rtol=1e-6)
    assert (count == 60).all()
    obs[0, 2, 0, 0] = 255
    inputs = agent.normalize(obs).numpy()
    expected = (obs.numpy() / 255 - frames.mean(0)) / np.sqrt(frames.var(0) + 1e-5)
    np.testing.assert_allclose(inputs, np.clip(expected, -5, 5), rtol=1e-4, atol=1e-4)
    assert inputs[0, 2, 0, 0] == 5 and abs(inputs[1, 2, 0, 0]) < 1e-4


# ---- Several processes


def test_two_processes_share_a_gradient_step_and_what_they_see(tmp_path):
    process = torchrun(ROOT / "tests" / "processes.py", "share", tmp_path)
    assert process.wait(120) == 0, process.stdout.read()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    whole = processes.step_and_see(torch.arange(32))
    for name, expected in whole.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], expected, rtol=1e-4, atol=1e-7)
    assert whole["mean conv1.weight"].abs().max() > 1e-5


def test_two_processes_end_with_the_same_weights(tmp_path):
    options = ["--env-id", "Pong", *SIZES, "--eval-episodes", 1, "--total-timesteps", 320]
    script = ROOT / "tests" / "processes.py"
    process = torchrun(script, "train", tmp_path, *options, cwd=tmp_path)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, x in first["agent"].items():
        assert torch.equal(x, second["agent"][name]), name
    steps = 2 * sum(values(run_dir(tmp_path), "spu/epochs_used"))  # 64 samples, by 32
    assert first["adam"]["state"][0]["step"] == second["adam"]["state"][0]["step"] == steps
    assert first["agent"]["pixel_moments"][2, 0] == 2 * 64 + 5 * 64 / 8
    assert not torch.equal(first["obs"], second["obs"])  # each plays games of its own
    assert steps_of(run_dir(tmp_path)) == [64, 128, 192, 256, 320]
    assert output.count("Pong: return") == output.count("Training in") == 1  # rank 0 speaks


def test_a_killed_process_is_started_again_and_the_run_goes_on(tmp_path):
    options = [*BREAKOUT, "--total-timesteps", 1920]
    process = torchrun("--max-restarts", 1, ROOT / "spu_atari.py", *options, cwd=tmp_path)
    wait_for(lambda: iterations_done(tmp_path) >= 5, process)
    kill_worker(process, rank=1)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    folder = run_dir(tmp_path)  # there is one
    assert steps_of(folder) == list(range(64, 1921, 64)) and "Breakout: return" in output
    *_, last = sorted(folder.glob("events*"), key=os.path.getmtime)
    assert EventAccumulator(str(last)).Reload().Scalars("spu/kl_mean")[0].step > 5 * 64


def test_a_process_that_dies_in_the_evaluation_is_started_again_and_evaluates(tmp_path):
    options = [*BREAKOUT, "--total-timesteps", 128, "--eval-episodes", 8]
    process = torchrun("--max-restarts", 1, ROOT / "spu_atari.py", *options, cwd=tmp_path)
    wait_for(lambda: iterations_done(tmp_path) == 2, process)
    kill_worker(process, rank=0)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 0 and output.count("Training in") == 2, output
    assert output.count("Breakout: return") == len(
        values(run_dir(tmp_path), "eval/episodic_return")
    )
    assert steps_of(run_dir(tmp_path)) == [64, 128]


def test_a_launch_that_fails_early_does_not_take_over_the_run_of_an_earlier_one(tmp_path):
    """Two launches with the same id in the same folder, as when a command is repeated."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    meet = ["--nnodes", "1", "--nproc-per-node", "2", "--max-restarts", "1"]
    meet += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "breakout"]
    line = [ROOT / "spu_atari.py", *BREAKOUT, "--total-timesteps", 256, "--num-steps", 128]
    launch = torchrun(*line, meet=meet, cwd=tmp_path)
    assert launch.wait(120) == 0, launch.stdout.read()
    first = run_dir(tmp_path)
    before = (first / "agent.pt").read_bytes()

    launch = torchrun(*line, meet=meet, cwd=tmp_path)
    wait_for(lambda: len(list(tmp_path.glob("runs/*/agent.pt"))) == 2, launch)
    (second,) = set((tmp_path / "runs").iterdir()) - {first}
    kill_worker(launch, rank=1)
    saved = torch.load(second / "agent.pt", weights_only=True)
    assert saved["iterations_done"] == 0  # so it was early enough
    output = launch.communicate(timeout=120)[0]
    assert launch.returncode == 0, output
    assert set((tmp_path / "runs").iterdir()) == {first, second}
    assert (first / "agent.pt").read_bytes() == before
    assert steps_of(first) == steps_of(second) == [256]
    assert output.count(f"Training in {second.relative_to(tmp_path)}") == 2


def test_two_launchers_train_start_again_and_stop_together_as_two_machines_would(tmp_path):
    """Each in a folder of its own: one machine need not see the other's files."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    meet = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2"]
    meet += ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id", "two"]
    line = [ROOT / "spu_atari.py", *BREAKOUT, "--total-timesteps", 1_000_000]
    folders = [tmp_path / "a", tmp_path / "b"]
    launchers = []
    for folder in folders:
        folder.mkdir()
        launchers.append(torchrun(*line, meet=meet, cwd=folder))

    def done():
        return max(iterations_done(folder) for folder in folders)

    try:
        wait_for(lambda: done() >= 2, *launchers)
        (first,) = [folder for folder in folders if (folder / "runs").exists()]  # has rank 0
        kill_worker(launchers[1 - folders.index(first)], rank=1)
        before = done()
        wait_for(lambda: done() >= before + 10, *launchers)
        for launcher in launchers:
            launcher.send_signal(signal.SIGINT)
        output = "".join(launcher.communicate(timeout=120)[0] for launcher in launchers)
    finally:
        for launcher in launchers:
            launcher.kill()
    run = run_dir(first).relative_to(first)
    assert output.count("\nTo go on from the last checkpoint") in (
        1,
        2,
    )  # also when it lost the other
    assert output.count(f"Training in {run}") == 2  # and nowhere else
    assert list(tmp_path.glob("*/runs/*")) == [first / run]


def test_bad_input_is_said_once_by_two_processes(tmp_path):
    process = torchrun(ROOT / "spu_atari.py", *BREAKOUT, "--num-envs", 3, cwd=tmp_path)
    output = process.communicate(timeout=120)[0]
    assert process.returncode != 0 and output.count("spu_atari.py: --num-envs must be") == 1
    assert "a multiple of 2 processes; it is 3" in output and not list(tmp_path.iterdir())


# ---- The script


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("atari")
    return run("spu_atari", *BREAKOUT, "--total-timesteps", 1300, cwd=cwd), cwd


def test_training_says_what_it_does_and_leaves_its_record(trained):
    done, cwd = trained
    start, result, _, play = done.stdout.strip().splitlines()
    folder = run_dir(cwd)
    assert start.startswith(f"Training in {folder.relative_to(cwd)}. To go on from the last")
    assert start.endswith(f"--env-id Breakout --resume {folder.relative_to(cwd)}")
    assert play.endswith(f"--env-id Breakout --evaluate {folder.relative_to(cwd)}/agent.pt")
    assert re.fullmatch(r"Breakout: return [\d.]+ ± 0 over 1 games with sampled actions", result)
    lines = re.split(r"[\r\n]+", done.stderr)
    assert all("steps/s" in line for line in lines if line.strip()), done.stderr
    assert folder.name.startswith("Breakout__spu_atari__1__")
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {"agent", "events", "lock"}
    scalars = events(folder)
    losses = {"losses/policy_loss", "losses/value_loss", "losses/entropy", "eval/episodic_return"}
    charts = {f"charts/{x}" for x in ("SPS", "learning_rate", "episodic_return", "episodic_length")}
    spu = {"spu/kl_mean", "spu/accepted_fraction", "spu/epochs_used"}
    assert set(scalars) == losses | charts | spu
    assert len(scalars["charts/episodic_return"]) >= 4
    assert min(values(folder, "charts/episodic_length")) > 100  # 5 lives
    assert steps_of(folder) == list(range(64, 1281, 64))
    assert scalars["eval/episodic_return"] == [(1280, float(result.split()[2]))]
    assert iterations_done(cwd) == 20


def test_the_step_size_of_a_run_is_the_one_its_kl_asks_for(trained):
    folder = run_dir(trained[1])
    rates = values(folder, "charts/learning_rate")
    kls = values(folder, "spu/kl_mean")
    assert rates[0] == pytest.approx(3e-4)
    for rate, kl, following in zip(rates, kls, rates[1:]):
        assert following == pytest.approx(spu_atari.next_learning_rate(rate, kl, Args()), rel=1e-5)
    assert len(set(rates)) > 3


def test_without_ours_it_is_the_papers_input_and_step_size(tmp_path):
    options = ["--no-adapt-lr", "--no-standardize-inputs", "--delta", "inf", "--epsilon", "inf"]
    run("spu_atari", *BREAKOUT, *options, "--total-timesteps", 256, cwd=tmp_path)
    rates = values(run_dir(tmp_path), "charts/learning_rate")
    np.testing.assert_allclose(rates, [3e-4, 2.25e-4, 1.5e-4, 0.75e-4], rtol=1e-5)
    assert values(run_dir(tmp_path), "spu/accepted_fraction") == [1.0] * 4
    agent = torch.load(run_dir(tmp_path) / "agent.pt", weights_only=True)["agent"]
    assert not agent["pixel_moments"][2].any()


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        options = ["--seed", seed, "--total-timesteps", 192]
        run("spu_atari", *BREAKOUT, *options, cwd=tmp_path / name)
    a, b, c = (without_speed(events(run_dir(tmp_path / name))) for name in "abc")
    assert a == b != c


def test_a_run_is_carried_on_and_then_replayed_and_filmed(trained):
    _, cwd = trained
    folder = run_dir(cwd)
    before = torch.load(folder / "agent.pt", weights_only=True)
    expected = before["adam"]["param_groups"][0]["lr"]
    done = run("spu_atari", "--resume", folder, "--total-timesteps", 1408, cwd=cwd)
    assert steps_of(folder) == list(range(64, 1409, 64))
    assert values(folder, "charts/learning_rate")[20] == pytest.approx(expected)  # not the first
    after = torch.load(folder / "agent.pt", weights_only=True)
    assert after["adam"]["state"][0]["step"] == 2 * sum(values(folder, "spu/epochs_used"))
    seen = after["agent"]["pixel_moments"][2, 0]
    assert before["agent"]["pixel_moments"][2, 0] + 2 * 64 / 8 == seen == 128 + 22 * 8

    options = ["--evaluate", folder / "agent.pt", "--eval-episodes", 1, "--capture-video"]
    said = run("spu_atari", *options, cwd=cwd).stdout
    score = re.search(r"return (.*) over", said).group(1)
    assert score == re.search(r"return (.*) over", done.stdout).group(1)
    (film,) = folder.glob("video*/*.mp4")
    assert str(film) in said
    frames = imageio.get_reader(film)
    assert frames.get_data(5).std() > 10 and frames.get_data(5).shape == (210, 160, 3)
    assert frames.get_meta_data()["duration"] > 5  # seconds, at the game's own speed


@torch.no_grad()
def test_the_agent_of_the_repository_wins_points_at_pong():
    saved = torch.load(ROOT / "benchmark" / "agents" / "Pong.pt", weights_only=True)
    args = Args(**saved["args"])
    torch.manual_seed(0)
    games = Games(args, 4, seed=0)
    agent = spu_atari.Agent(games.envs.single_action_space.n)
    agent.load_state_dict(saved["agent"])
    for _ in range(600):
        log_probs, _ = agent(torch.from_numpy(games.obs))
        games.step(log_probs.exp().multinomial(1)[:, 0].numpy())
    assert games.scores.sum() > 0  # an untrained agent loses all four


def test_the_film_is_of_the_game_that_is_played(tmp_path, capsys):
    """The twin in colour, made grey and small, is what the agent saw."""
    agent, _ = processes.new_agent()
    args = Args(env_id="Breakout", eval_episodes=3, capture_video=True, seed=5)
    args.repeat_action_probability = 0.25  # the twin has the same luck
    shown = []
    original = Games.step

    def watched(self, actions):
        result = original(self, actions)
        rewards, lost, *_ = result
        shown.append((self.obs, rewards[0], lost[0]))
        return result

    Games.step = watched
    try:
        spu_atari.evaluate(agent, args, tmp_path / "film")
    finally:
        Games.step = original
    pairs = [(a, b) for a, b in zip(shown, shown[1:]) if b[0].shape[-1] == 3]
    assert len(pairs) > 100
    for (small, *played), (picture, *filmed) in pairs:
        assert played == filmed
        grey = torch.tensor(picture[0, 0] @ [0.299, 0.587, 0.114])[None, None]
        grey = torch.nn.functional.interpolate(grey, (84, 84), mode="area")[0, 0].numpy()
        assert np.abs(grey - small[0, -1]).mean() < 3
    assert sum(reward for _, reward, _ in shown) > 0
    assert "over 3 games" in capsys.readouterr().out


def test_a_resumed_run_is_determined_by_its_checkpoint_and_another_seed_draws_anew(
    trained, tmp_path, monkeypatch
):
    agents = []
    for i, options in enumerate([[], [], ["--seed", 9]]):
        shutil.copytree(run_dir(trained[1]), tmp_path / f"{i}")
        options += ["--resume", f"{i}", "--total-timesteps", 64 * 24]
        main_in(tmp_path, monkeypatch, *options)
        agents.append(torch.load(tmp_path / f"{i}/agent.pt", weights_only=True)["agent"])
    same, again, other = (agent["hidden.weight"] for agent in agents)
    assert torch.equal(same, again) and not torch.equal(same, other)


def test_ctrl_c_says_how_to_go_on_and_a_second_process_is_refused(tmp_path):
    line = command("spu_atari", *BREAKOUT, "--total-timesteps", 1_000_000)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(line, cwd=tmp_path, env=environment(), **pipes)
    wait_for(lambda: iterations_done(tmp_path) >= 1, process)
    folder = run_dir(tmp_path).relative_to(tmp_path)
    second = run("spu_atari", "--resume", folder, cwd=tmp_path, code=2)
    assert second.stderr.startswith(
        f"spu_atari.py: Another process trains in {folder}, or it cannot"
    )
    assert second.stderr.count("\n") == 1
    process.send_signal(signal.SIGINT)
    said, warned = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in warned
    resume = re.search(r"\nTo go on .*: python \S+ (.*--resume .*)", said).group(1).split()
    done = iterations_done(tmp_path)
    run("spu_atari", *resume, "--total-timesteps", 64 * (done + 1), cwd=tmp_path)
    assert iterations_done(tmp_path) == done + 1 and steps_of(tmp_path / folder)[-2:] == [
        64 * done,
        64 * done + 64,
    ]


# ---- Files


def test_an_agent_that_is_not_finite_is_never_written(tmp_path):
    agent, optimizer = processes.new_agent()
    spu_atari.save(tmp_path, Args(), agent, optimizer, 1)
    good = (tmp_path / "agent.pt").read_bytes()
    agent.conv2.bias.data[3] = math.nan
    with pytest.raises(FloatingPointError):
        spu_atari.save(tmp_path, Args(), agent, optimizer, 2)
    assert (tmp_path / "agent.pt").read_bytes() == good


def test_what_a_gpu_saved_is_loaded_without_one(tmp_path, monkeypatch):
    """There is no GPU here: tensors that say they are on one, until they are asked for a copy."""
    agent, optimizer = processes.new_agent()
    spu_atari.gradient_step(agent, optimizer, processes.random_data(4), torch.arange(4), Args())
    on_gpu = {x.data_ptr() for x in agent.state_dict().values()}
    on_gpu |= {x.data_ptr() for state in optimizer.state.values() for x in state.values()}
    copy_to_cpu = torch.Tensor.cpu
    tag = torch.serialization.location_tag
    monkeypatch.setattr(torch.Tensor, "cpu", lambda x: copy_to_cpu(x).clone())
    monkeypatch.setattr(
        torch.serialization,
        "location_tag",
        lambda storage: "cuda:0" if storage.data_ptr() in on_gpu else tag(storage),
    )
    spu_atari.save(tmp_path, Args(), agent, optimizer, 1)
    options = ["spu_atari.py", "--evaluate", str(tmp_path / "agent.pt")]
    monkeypatch.setattr(sys, "argv", options)
    _, saved = spu_atari.read_options()
    torch.testing.assert_close(saved["agent"]["conv1.weight"], agent.conv1.weight.data)
    torch.save({"agent": agent.state_dict()}, tmp_path / "as_it_is.pt")
    with pytest.raises(RuntimeError, match="CUDA"):  # the test can fail
        torch.load(tmp_path / "as_it_is.pt", weights_only=True)


# ---- Bad input


@pytest.mark.parametrize(
    "options, sentence",
    [
        (
            ["--env-id", "Brekout"],
            "Brekout is no Atari game that ale-py has; of a similar name: breakout",
        ),
        (["--env-id", "HalfCheetah-v4"], "HalfCheetah-v4 is no Atari game"),
        (["--env-id", "CartPole-v1"], "CartPole-v1 is no Atari game"),
        (["--num-envs", "0"], "--num-envs must be at least 1; it is 0"),
        (["--lam", "nan"], "--lam must be a positive, finite number; it is nan"),
        (["--delta", "nan"], "--delta must be positive (inf: no limit); it is nan"),
        (["--entropy-coefficient", "-1"], "--entropy-coefficient must be 0 or more; it is -1"),
        (["--gamma", "1.5"], "--gamma must be between 0 and 1; it is 1.5"),
        (
            ["--repeat-action-probability", "2"],
            "--repeat-action-probability must be between 0 and 1",
        ),
        (["--minibatch-size", "4097"], "--minibatch-size must be between 1 and 4096, a batch"),
        (["--total-timesteps", "4095"], "--total-timesteps must be at least 4096, a batch"),
        (["--seed", "-1"], "--seed must be between 0 and 2147483647"),
        (["--resume", "nowhere"], "nowhere/agent.pt is no agent.pt of a run"),
        (["--evaluate", "nothing.pt"], "nothing.pt is no agent.pt of a run"),
    ],
)
def test_bad_input_gets_one_sentence(options, sentence, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["spu_atari.py", *options])
    with pytest.raises(SystemExit) as stopped:
        spu_atari.main()
    said = capsys.readouterr()
    assert stopped.value.code == 2 and said.out == "" and said.err.count("\n") == 1
    assert said.err.startswith("spu_atari.py: ") and sentence in said.err
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_run_of_a_gpu_can_be_gone_on_with_without_one(trained, tmp_path, monkeypatch, capsys):
    """And what --evaluate needs is the agent, not Adam's moments, which are twice as large."""
    saved = torch.load(run_dir(trained[1]) / "agent.pt", weights_only=True)
    saved["args"]["cuda"] = True
    torch.save(saved, tmp_path / "agent.pt")
    resume = ["--resume", ".", "--total-timesteps", 64 * 25]
    with pytest.raises(SystemExit):
        main_in(tmp_path, monkeypatch, *resume)
    assert "--cuda must be off (--no-cuda): a process has no GPU" in capsys.readouterr().err
    main_in(tmp_path, monkeypatch, *resume, "--no-cuda")
    assert torch.load(tmp_path / "agent.pt", weights_only=True)["iterations_done"] == 25
    del saved["adam"]
    torch.save(saved, tmp_path / "agent.pt")
    capsys.readouterr()
    main_in(tmp_path, monkeypatch, "--evaluate", "agent.pt", "--no-cuda", "--eval-episodes", 2)
    said = capsys.readouterr().out
    assert re.fullmatch(
        r"Breakout: return [\d.]+ ± [\d.]+ over 2 games with sampled actions\n", said
    )


def test_what_does_not_fit_a_run_or_an_agent_is_refused(trained, tmp_path):
    folder = run_dir(trained[1])
    before = (folder / "agent.pt").read_bytes()
    refused = {
        ("--resume", folder): "is done: to go on, give a larger --total-timesteps",
        ("--resume", folder, "--lam", 2): "--lam cannot be changed when a run is resumed",
        ("--evaluate", folder / "agent.pt", "--env-id", "Pong"): "does not fit Pong",
    }
    for options, sentence in refused.items():
        said = run("spu_atari", *options, cwd=tmp_path, code=2).stderr
        assert sentence in said and said.count("\n") == 1
    said = run("spu_continuous", "--evaluate", folder / "agent.pt", cwd=tmp_path, code=2).stderr
    assert "is no agent.pt of a run of this version of spu_continuous.py" in said
    assert (folder / "agent.pt").read_bytes() == before and not list(tmp_path.iterdir())
