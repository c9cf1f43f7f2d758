"""spu_atari.py: the games' bookkeeping, the update, several processes, and the script as a user runs it."""

import copy
import os
import re
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
from conftest import ROOT, command, environment, events, run, run_dir, values, without_speed

import spu_atari

SMALL = ["--num-envs", 2, "--num-steps", 32, "--minibatch-size", 32, "--max-epochs", 2, "--eval-episodes", 1]
BREAKOUT = ["--env-id", "Breakout", *SMALL]  # who plays badly plays a short game


def torchrun(*options, meet=("--standalone", "--nproc-per-node", "2"), **extra):
    line = [sys.executable, "-m", "torch.distributed.run", *meet, *map(str, options)]
    return subprocess.Popen(
        line, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment(), **extra
    )


# ---- The games


@pytest.mark.parametrize("game", ["Breakout", "Pong", "MsPacman", "SpaceInvaders"])
def test_lives_scores_and_ends_are_those_of_gymnasium(game):
    """The same actions in gymnasium's own AtariPreprocessing, which is one game at a time and slow, but plain."""
    gym.register_envs(ale_py)
    plain = gym.make(f"ALE/{game}-v5", frameskip=1, repeat_action_probability=0.0)
    plain = gym.wrappers.FrameStackObservation(
        gym.wrappers.AtariPreprocessing(plain, noop_max=0), 4, padding_type="zero"
    )
    games = spu_atari.Games(spu_atari.Args(env_id=game, num_envs=1), 0, noop_max=0, use_fire_reset=False)
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
            (obs, info), score, length, finished = plain.reset(), 0.0, 0, finished + 1
            lives = info["lives"]
    assert finished >= 1 and lost_lives >= finished  # there was something to compare


def test_a_game_that_runs_out_of_time_is_truncated_and_shows_its_last_picture():
    limit = {"max_num_frames_per_episode": 400, "noop_max": 0, "use_fire_reset": False}
    games = spu_atari.Games(spu_atari.Args(env_id="Pong", num_envs=2), 0, **limit)
    endless = spu_atari.Games(spu_atari.Args(env_id="Pong", num_envs=2), 0, noop_max=0, use_fire_reset=False)
    for t in range(1, 101):
        _, lost, truncated, final_obs, over = games.step(np.array([2, 3]))
        endless.step(np.array([2, 3]))
        if truncated.any():
            break
    assert truncated.all() and not lost.any() and [length for _, _, length in over] == [t, t]
    np.testing.assert_array_equal(final_obs[:, :3], endless.obs[:, :3])
    assert (final_obs[:, 3] != endless.obs[:, 3]).mean() < 0.01  # the last step stops at the limit, not after 4 frames
    assert (games.obs != final_obs).any()


@pytest.mark.parametrize(
    "spelling, rom", [("BreakoutNoFrameskip-v4", "breakout"), ("ALE/Breakout-v5", "breakout"), ("Breakout", "breakout")]
    + [("breakout", "breakout"), ("ALE/MsPacman-v5", "ms_pacman"), ("UpNDownNoFrameskip-v4", "up_n_down")]
)  # fmt: skip
def test_all_spellings_of_a_game(spelling, rom):
    assert spu_atari.rom(spelling) == rom


# ---- The update


def test_categorical_kl_is_the_analytic_one():
    new, old = torch.randn(2, 50, 6).log_softmax(-1)
    expected = torch.distributions.kl_divergence(*(torch.distributions.Categorical(logits=x) for x in (new, old)))
    torch.testing.assert_close(spu_atari.categorical_kl(new, old), expected)


def test_a_fit_begins_at_ratio_1_and_kl_0():
    agent, params, _ = processes.new_state()
    obs, actions, advantages, targets, _ = processes.random_batch(16)
    with torch.no_grad():
        log_probs, values = agent(obs)
        args = spu_atari.Args(entropy_coefficient=0, value_coefficient=0)
        loss, parts = spu_atari.losses(params, agent, [obs, actions, advantages, values, log_probs], args)
    policy_loss, value_loss, _, accepted, kl, kl_max = parts
    assert kl == kl_max == value_loss == 0 and accepted == 1
    assert loss == policy_loss == pytest.approx(-advantages.mean().item() / args.lam, rel=1e-5)


@pytest.mark.parametrize("options", [{}, {"epsilon": 0.004}, {"kl_term": False, "per_state_acceptance": False}])
def test_a_step_is_autograd_and_torch_adam(options):
    """Independent of functional_call, torch.func.grad and the Adam written out: modules, distributions, optim.Adam."""
    args = spu_atari.Args(entropy_coefficient=0.02, value_coefficient=0.7, **options)
    agent, params, adam = processes.new_state()
    reference = copy.deepcopy(agent)
    optimizer = torch.optim.Adam(reference.parameters(), lr=1e-4, eps=1e-5)
    obs, actions, advantages, targets, old_log_probs = batch = processes.random_batch(16)
    refused = []
    for _ in range(4):
        with torch.no_grad():
            spu_atari.minibatch_step(params, adam, torch.tensor(1e-4), agent, batch, args)
        log_probs, values = reference(obs)
        new, old = (torch.distributions.Categorical(logits=x) for x in (log_probs, old_log_probs))
        kl = torch.distributions.kl_divergence(new, old)
        term = args.kl_term * kl - (new.log_prob(actions) - old.log_prob(actions)).exp() * advantages / args.lam
        accepted = (kl <= args.epsilon) | (not args.per_state_acceptance)
        refused.append(int((~accepted).sum()))
        value_loss = (values - targets).square().mean()
        optimizer.zero_grad()
        (torch.where(accepted, term, 0).mean() + 0.7 * value_loss - 0.02 * new.entropy().mean()).backward()
        optimizer.step()
    for p, q in zip(agent.parameters(), reference.parameters()):
        assert (
            p - q
        ).abs().mean() < 1e-6  # of a step of 1e-4: where a gradient is all but zero, rounding moves a weight
    assert args.epsilon != 0.004 or 0 < refused[0] < 16, refused  # the indicator had something to do


# ---- Several processes


def test_two_processes_average_to_the_gradient_of_the_whole_batch(tmp_path):
    process = torchrun(ROOT / "tests" / "processes.py", "gradient", tmp_path)
    assert process.wait(120) == 0, process.stdout.read()
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    agent, params, adam = processes.new_state()
    with torch.no_grad():
        spu_atari.minibatch_step(params, adam, torch.tensor(1e-4), agent, processes.random_batch(32), spu_atari.Args())
    for name, moment in adam.items():
        assert torch.equal(first[name], second[name])
        torch.testing.assert_close(first[name], moment, rtol=1e-4, atol=1e-7)
    assert adam["m.trunk.0.weight"].abs().max() > 1e-5


def test_two_processes_end_with_the_same_weights(tmp_path):
    options = ["--env-id", "Pong", *SMALL, "--num-envs", 1, "--total-timesteps", 320]
    process = torchrun(ROOT / "tests" / "processes.py", "train", tmp_path, *options, cwd=tmp_path)
    output = process.communicate(timeout=300)[0]
    assert process.returncode == 0, output
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    assert first and all(torch.equal(first[name], second[name]) for name in first)
    assert first["step"] == 5 * 2 * 2  # iterations x epochs x minibatches: 64 samples in minibatches of 32
    scalars = events(run_dir(tmp_path))
    assert [step for step, _ in scalars["spu/kl_mean"]] == [64, 128, 192, 256, 320]
    assert output.count("Pong after 320 steps") == 1  # rank 0 alone speaks


def test_a_killed_process_is_started_again_and_the_run_goes_on(tmp_path):
    options = [*BREAKOUT, "--num-envs", 1, "--checkpoint-every", 1, "--total-timesteps", 1600]
    process = torchrun("--max-restarts", 2, ROOT / "spu_atari.py", *options, cwd=tmp_path)
    victim, deadline = None, time.time() + 120
    while victim is None and time.time() < deadline:
        time.sleep(0.2)
        checkpoint = list(tmp_path.glob("runs/*/checkpoint.pt"))
        if checkpoint and torch.load(checkpoint[0], weights_only=True)["global_step"] >= 320:
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            victim = next(pid for pid in children if b"RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes())
    os.kill(int(victim), signal.SIGKILL)
    output = process.communicate(timeout=400)[0]
    assert process.returncode == 0, output
    folder = run_dir(tmp_path)  # there is one
    assert (folder / "agent.pt").exists()
    assert [step for step, _ in events(folder)["spu/kl_mean"]] == list(range(64, 1601, 64))
    assert "Breakout after 1600 steps" in output


def test_two_launchers_train_together_and_stop_together_as_two_machines_would(tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{free.getsockname()[1]}", "--rdzv-id", "two"]
    meet = ["--nnodes", "2", "--nproc-per-node", "1", *meet]
    options = [*BREAKOUT, "--num-envs", 1, "--total-timesteps", 1_000_000]
    launchers = [torchrun(ROOT / "spu_atari.py", *options, meet=meet, cwd=tmp_path) for _ in range(2)]
    deadline = time.time() + 120
    try:
        while not list(tmp_path.glob("runs/*/checkpoint.pt")):
            assert time.time() < deadline and all(launcher.poll() is None for launcher in launchers)
            time.sleep(0.2)
        for launcher in launchers:
            launcher.send_signal(signal.SIGINT)
        output = "".join(launcher.communicate(timeout=120)[0] for launcher in launchers)
    finally:
        for launcher in launchers:
            launcher.kill()
    (steps,) = re.findall(r"Stopped after (\d+) steps. To go on .*: on every machine torchrun .*--resume runs/", output)
    assert torch.load(run_dir(tmp_path) / "checkpoint.pt", weights_only=True)["global_step"] == int(steps)


# ---- The script


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("atari")
    return run("spu_atari", *BREAKOUT, "--total-timesteps", 1300, "--checkpoint-every", 7, cwd=cwd), cwd


def test_training_says_what_it_does_and_leaves_its_record(trained):
    done, cwd = trained
    result, where = done.stdout.strip().splitlines()
    assert re.match(r"Breakout after 1280 steps: return [\d.]+ ± 0.0 over 1 episodes with sampled actions", result)
    assert "--evaluate runs/Breakout__spu_atari__1__" in where
    assert all("steps/s" in line for line in re.split(r"[\r\n]+", done.stderr) if line.strip()), done.stderr
    folder = run_dir(cwd)
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {"agent", "checkpoint", "events"}
    scalars = events(folder)
    assert (
        len(scalars["charts/episodic_return"]) >= 4 and min(values(folder, "charts/episodic_length")) > 100
    )  # 5 lives
    assert values(folder, "spu/epochs_used") == [2.0] * 20
    assert torch.load(folder / "checkpoint.pt", weights_only=True)["global_step"] == 1280


def test_the_same_seed_gives_the_same_run_and_another_does_not(tmp_path):
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        run("spu_atari", *BREAKOUT, "--seed", seed, "--total-timesteps", 192, cwd=tmp_path / name)
    a, b, c = (without_speed(events(run_dir(tmp_path / name))) for name in "abc")
    assert a == b != c


def test_a_run_is_carried_on_and_then_replayed_and_filmed(trained):
    _, cwd = trained
    folder = run_dir(cwd)
    done = run("spu_atari", "--resume", folder, "--total-timesteps", 1408, cwd=cwd)
    assert "Breakout after 1408 steps" in done.stdout
    assert [step for step, _ in events(folder)["spu/kl_mean"]] == list(range(64, 1409, 64))
    said = run("spu_atari", "--evaluate", folder / "agent.pt", "--eval-episodes", 1, "--capture-video", cwd=cwd).stdout
    assert re.search(r"return (.*) over", said).group(1) == re.search(r"return (.*) over", done.stdout).group(1)
    (film,) = (folder / "videos").glob("*.mp4")
    assert str(film) in said
    frames = imageio.get_reader(film)
    assert frames.get_data(5).std() > 10 and frames.get_meta_data()["duration"] > 5  # seconds, at the game's own speed


def test_ctrl_c_leaves_a_checkpoint(tmp_path):
    line = command("spu_atari", *BREAKOUT, "--total-timesteps", 1_000_000)
    process = subprocess.Popen(line, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while not list(tmp_path.glob("runs/*/checkpoint.pt")):
        time.sleep(0.2)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    said, warned = (stream.decode() for stream in process.communicate(timeout=60))
    assert "Stopping after this iteration." in warned
    steps = int(re.search(r"Stopped after (\d+) steps. To go on", said).group(1))
    assert process.returncode == 130
    assert torch.load(run_dir(tmp_path) / "checkpoint.pt", weights_only=True)["global_step"] == steps


# ---- Bad input


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["--env-id", "Brekout"], "Brekout is no Atari game that ale-py has: did you mean Breakout"),
        (["--env-id", "HalfCheetah-v4"], "HalfCheetah-v4 is no Atari game"),
        (["--env-id", "CartPole-v1"], "CartPole-v1 is no Atari game"),
        (["--num-envs", "0"], "--num-envs must be at least 1; it is 0"),
        (["--lam", "nan"], "--lam must be a positive, finite number; it is nan"),
        (["--entropy-coefficient", "-1"], "--entropy-coefficient must be a finite number, 0 or more"),
        (["--gamma", "1.5"], "--gamma must be between 0 and 1; it is 1.5"),
        (["--repeat-action-probability", "2"], "--repeat-action-probability must be between 0 and 1"),
        (["--minibatch-size", "4096"], "--minibatch-size must be between 1 and the batch (2048 samples"),
        (["--total-timesteps", "2047"], "--total-timesteps must be at least one batch (2048 samples"),
        (["--resume", "nowhere"], "nowhere/checkpoint.pt is not of a run of spu_atari.py"),
        (["--resume", "nowhere", "--lam", "2"], "leave out --lam"),
        (["--evaluate", "nothing.pt"], "nothing.pt is not of a run of spu_atari.py"),
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


def test_an_agent_of_another_game_or_of_another_script_is_refused(trained, tmp_path):
    agent = run_dir(trained[1]) / "agent.pt"
    said = run("spu_atari", "--evaluate", agent, "--env-id", "Pong", cwd=tmp_path, code=2).stderr
    assert said == "spu_atari.py: The saved agent plays Breakout, not Pong.\n"
    said = run("spu_continuous", "--evaluate", agent, cwd=tmp_path, code=2).stderr
    assert "is not of a run of spu_continuous.py" in said
