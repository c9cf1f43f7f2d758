"""The scripts as a user runs them: real processes, real environments, real files."""

import re
import signal
import subprocess
import time

import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from conftest import QUICK, EventAccumulator, command, environment, events, run, run_dir, values, without_speed

import spu_continuous

# Pendulum's episodes are 200 steps long, so that with 200 or 400 steps an iteration they end where iterations end,
# and a resumed run can be compared with an uninterrupted one to the last bit.
PENDULUM = ["--env-id", "Pendulum-v1", "--num-steps", 200, "--max-epochs", 2, *QUICK]


def agent_of(folder):
    return torch.load(folder / "agent.pt", weights_only=True)["agent"]


def assert_same_run(a, b):
    assert without_speed(events(a)) == without_speed(events(b))
    assert all(torch.equal(x, y) for x, y in zip(agent_of(a).values(), agent_of(b).values(), strict=True))


@pytest.fixture(scope="module")
def cheetah(tmp_path_factory):
    """The README's command, only shorter."""
    cwd = tmp_path_factory.mktemp("cheetah")
    options = ["--env-id", "HalfCheetah-v4", "--total-timesteps", 10_000, "--eval-episodes", 3]
    return run("spu_continuous", *options, cwd=cwd), cwd


def test_training_says_what_it_does_and_nothing_else(cheetah):
    done, cwd = cheetah
    compiling, result, where = done.stdout.strip().splitlines()
    assert compiling.startswith("Compiling")
    assert re.match(r"HalfCheetah-v4 after 8192 steps: return -?[\d.]+ ± [\d.]+ over 3 episodes", result)
    assert str(run_dir(cwd).relative_to(cwd)) in where
    bar = done.stderr.replace("\n", "\r").split("\r")
    assert all("steps/s" in line for line in bar if line.strip()), done.stderr  # no warnings, no mujoco messages
    assert re.search(r"return -?[\d.]+, KL 0\.\d+, \d+ epochs", done.stderr)
    assert [path.name for path in cwd.iterdir()] == ["runs"]  # no MUJOCO_LOG.TXT


def test_training_leaves_its_record(cheetah):
    folder = run_dir(cheetah[1])
    assert re.match(r"HalfCheetah-v4__spu_continuous__1__\d", folder.name)
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {"agent", "checkpoint", "events"}
    scalars = events(folder)
    expected = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "charts/learning_rate"}
    expected |= {f"losses/{name}" for name in ("policy_loss", "value_loss", "entropy", "explained_variance")}
    expected |= {f"spu/{name}" for name in ("kl_mean", "kl_max", "accepted_fraction", "epochs_used")}
    assert set(scalars) == expected
    assert [step for step, _ in scalars["spu/kl_mean"]] == [2048, 4096, 6144, 8192]
    assert scalars["charts/episodic_length"] == [(1000 * i, 1000.0) for i in range(1, 9)]
    np.testing.assert_allclose(values(folder, "charts/learning_rate"), [3e-4, 2.25e-4, 1.5e-4, 0.75e-4], rtol=1e-5)
    assert all(0 < kl < 1 for kl in values(folder, "spu/kl_mean"))
    accumulator = EventAccumulator(str(folder)).Reload()
    text = accumulator.Tensors("hyperparameters/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "env_id: HalfCheetah-v4" in text and "lam: 1.3" in text


def test_a_reloaded_agent_acts_as_the_trained_one_did(cheetah):
    done, cwd = cheetah
    trained = re.search(r"return (.*) over", done.stdout).group(1)
    replayed = run("spu_continuous", "--evaluate", run_dir(cwd) / "agent.pt", "--eval-episodes", 3, cwd=cwd).stdout
    assert re.search(r"return (.*) over", replayed).group(1) == trained


def test_the_camera_follows_who_would_run_out_of_the_picture(monkeypatch):
    monkeypatch.setenv("MUJOCO_GL", "egl")
    env = spu_continuous.make_env(spu_continuous.Args(env_id="HalfCheetah-v4"), 0, draw=True)
    for away in (0.0, 100.0):
        env.unwrapped.set_state(np.array([away, *env.unwrapped.data.qpos[1:]]), env.unwrapped.data.qvel)
        red = env.render()[..., 0].astype(int) - env.render()[..., 2]
        assert (red > 20).sum() > 1000  # the cheetah is brown, everything else is grey or green
    env.close()


def test_an_evaluated_agent_can_be_filmed_without_a_screen(tmp_path):
    run("spu_continuous", "--env-id", "InvertedPendulum-v4", "--total-timesteps", 2048, *QUICK, cwd=tmp_path)
    options = ["--evaluate", run_dir(tmp_path) / "agent.pt", "--capture-video", "--eval-episodes", 1]
    said = run("spu_continuous", *options, cwd=tmp_path, DISPLAY="", WAYLAND_DISPLAY="").stdout
    (film,) = (run_dir(tmp_path) / "videos").glob("*.mp4")
    assert str(film) in said
    frames = imageio.mimread(film, memtest=False)
    assert len(frames) > 3 and frames[0].std() > 10  # something is to be seen


def test_same_seed_same_run_and_another_seed_another(tmp_path):
    script = "spu_continuous"
    folders = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        run(script, *PENDULUM, "--seed", seed, "--total-timesteps", 600, "--num-envs", 2, cwd=tmp_path / name)
        folders[name] = run_dir(tmp_path / name)
    assert_same_run(folders["a"], folders["b"])
    assert without_speed(events(folders["a"])) != without_speed(events(folders["c"]))


def test_killed_five_times_and_resumed_is_the_uninterrupted_run(tmp_path, script):
    options = [*PENDULUM, "--normalize-rewards", "--total-timesteps", 12_000, "--checkpoint-every", 3]
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    run(script, *options, cwd=tmp_path / "whole")
    arguments, folder, kills, reached = options, None, 0, []
    while not (folder and (folder / "agent.pt").exists()):
        process = subprocess.Popen(
            command(script, *arguments), cwd=tmp_path / "cut", env=environment(), stderr=subprocess.PIPE, text=True
        )
        deadline = time.time() + 120
        while kills < 5 and process.poll() is None and time.time() < deadline:
            time.sleep(0.02)
            folder = next((tmp_path / "cut" / "runs").iterdir(), None) if (tmp_path / "cut" / "runs").exists() else None
            if folder and (folder / "checkpoint.pt").exists():
                iteration = torch.load(folder / "checkpoint.pt", weights_only=True)["iteration"]
                if iteration > (reached[-1] if reached else 0):
                    time.sleep(0.01 * kills)  # somewhere in an iteration
                    process.kill()
                    kills, reached = kills + 1, [*reached, iteration]
        code = process.wait(timeout=120)
        assert code in (0, -signal.SIGKILL), process.stderr.read()
        arguments = ["--resume", folder]
    assert kills == 5
    assert_same_run(tmp_path / "whole" / "runs" / run_dir(tmp_path / "whole").name, folder)


def test_ctrl_c_writes_a_checkpoint_and_says_how_to_resume(tmp_path):
    script = "spu_continuous"
    process = subprocess.Popen(
        command(script, *PENDULUM, "--total-timesteps", 1_000_000, "--checkpoint-every", 1000),
        cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not list(tmp_path.glob("runs/*/checkpoint.pt")):
        assert process.poll() is None
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in err
    assert "Stopping after this iteration." in err  # at once: an iteration may take a while
    iteration = torch.load(run_dir(tmp_path) / "checkpoint.pt", weights_only=True)["iteration"]
    assert iteration > 0  # written now: the next regular one would have been at 1000
    assert f"Stopped after {200 * iteration} steps" in out
    resume = re.search(r"python \S+ (--resume \S+)", out).group(1).split()
    run(script, *resume, "--total-timesteps", 200 * (iteration + 1), cwd=tmp_path)


def test_a_finished_run_can_be_carried_on(tmp_path):
    script = "spu_continuous"
    options = [*PENDULUM, "--no-anneal-lr"]
    for name, steps in (("long", 1200), ("short", 600)):
        (tmp_path / name).mkdir()
        run(script, *options, "--total-timesteps", steps, cwd=tmp_path / name)
    long, short = run_dir(tmp_path / "long"), run_dir(tmp_path / "short")
    saved = (short / "checkpoint.pt").read_bytes()
    assert "larger --total-timesteps" in run(script, "--resume", short, cwd=tmp_path, code=2).stderr
    assert "--seed" in run(script, "--resume", short, "--seed", 2, cwd=tmp_path, code=2).stderr
    assert (short / "checkpoint.pt").read_bytes() == saved
    run(script, "--resume", short, "--total-timesteps", 1200, cwd=tmp_path)
    assert_same_run(long, short)


def test_tracking_works_offline_with_videos(tmp_path):
    script = "spu_continuous"
    run(script, *PENDULUM, "--total-timesteps", 400, "--track", "--capture-video", cwd=tmp_path)
    (offline,) = run_dir(tmp_path).glob("wandb/offline-run-*")
    assert len(list(offline.glob("files/media/videos/*.mp4"))) == len(list(run_dir(tmp_path).glob("videos/*.mp4"))) == 2
    record = next(offline.glob("*.wandb")).read_bytes()
    assert b"spu/kl_mean" in record and b"charts/episodic_return" in record


def test_without_a_compiler_it_trains_the_same_numbers_eagerly(tmp_path):
    script = "spu_continuous"
    for name, options in (("eager", ["--no-compile"]), ("none", [])):
        (tmp_path / name).mkdir()
        wanted = [option for option in PENDULUM if option != "--no-compile"]
        done = run(
            script, *wanted, *options, "--total-timesteps", 400, cwd=tmp_path / name,
            CXX="no-such-compiler", TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"),
        )  # fmt: skip
    assert "does not compile here" in done.stdout and "Traceback" not in done.stderr
    assert_same_run(run_dir(tmp_path / "eager"), run_dir(tmp_path / "none"))


def test_the_update_begins_at_ratio_one_and_kl_zero(tmp_path):
    script = "spu_continuous"
    """With no learning to speak of, KL is 0 in all states; and the loss, -mean(ratio A)/lambda, is 0 only at ratio 1,
    since the mean of the normalised A is 0. Hopper's normaliser changes a lot between its first batches."""
    options = ["--env-id", "Hopper-v4", "--total-timesteps", 6144, "--max-epochs", 1, "--learning-rate", 1e-30, *QUICK]
    run(script, *options, cwd=tmp_path)
    np.testing.assert_allclose(values(run_dir(tmp_path), "spu/kl_max"), 0, atol=1e-12)
    np.testing.assert_allclose(values(run_dir(tmp_path), "losses/policy_loss"), 0, atol=1e-6)
    moments = agent_of(run_dir(tmp_path))["obs_moments"]
    assert (moments[2] == 6144).all() and (moments[0].abs() > 0.1).any()


def test_dynamic_stopping_stops_and_acceptance_accepts(tmp_path):
    options = ["--env-id", "Pendulum-v1", "--num-steps", 256, "--total-timesteps", 512, "--max-epochs", 8, *QUICK]
    variants = {"stop": ["--delta", 1e-9], "ablated": ["--delta", 1e-9, "--no-dynamic-stopping"], "far": ["--delta", 9]}
    for name, extra in variants.items():
        (tmp_path / name).mkdir()
        run("spu_continuous", *options, *extra, cwd=tmp_path / name)
    folders = {name: run_dir(tmp_path / name) for name in variants}
    assert values(folders["stop"], "spu/epochs_used") == [1, 1]
    assert values(folders["ablated"], "spu/epochs_used") == values(folders["far"], "spu/epochs_used") == [8, 8]
    assert all(fraction == 1 for fraction in values(folders["stop"], "spu/accepted_fraction"))


def test_a_time_limit_is_not_death(tmp_path):
    script = "spu_continuous"
    """Reward 1 for ever, cut into episodes of 5 steps, gamma 0.8: a state is worth 5, or at most 3.4 if time kills."""
    options = ["--env-id", "toy_envs:Constant-v0", "--gamma", 0.8, "--num-steps", 100, "--total-timesteps", 6000]
    options += ["--minibatch-size", 25, "--learning-rate", 0.01, "--max-epochs", 5, *QUICK]
    worth = {}
    for flag in ("--bootstrap-truncation", "--no-bootstrap-truncation"):
        (tmp_path / flag).mkdir()
        run(script, *options, flag, cwd=tmp_path / flag)
        state = agent_of(run_dir(tmp_path / flag))
        hidden = torch.tanh(state["value.0.bias"])  # the observation is 0, so only biases enter
        hidden = torch.tanh(state["value.2.weight"] @ hidden + state["value.2.bias"])
        worth[flag] = (state["value.4.weight"] @ hidden + state["value.4.bias"]).item()
    assert worth["--bootstrap-truncation"] == pytest.approx(5, abs=0.3)
    assert worth["--no-bootstrap-truncation"] < 3.4


def test_rewards_are_normalised_by_the_spread_of_the_discounted_return(tmp_path):
    """Episodes of 5 steps worth 1 each, in two environments: the discounted return so far is known at every step."""
    options = ["--env-id", "toy_envs:Constant-v0", "--normalize-rewards", "--num-envs", 2, "--num-steps", 40]
    run("spu_continuous", *options, "--total-timesteps", 160, "--minibatch-size", 16, *QUICK, cwd=tmp_path)
    mean, var, count = agent_of(run_dir(tmp_path))["return_moments"].flatten().tolist()
    so_far = np.cumsum(0.99 ** np.arange(5))
    assert count == 160 and mean == pytest.approx(so_far.mean()) and var == pytest.approx(so_far.var())
    assert values(run_dir(tmp_path), "charts/episodic_return") == [5.0] * 32  # the record has them as they are


@pytest.mark.parametrize("env_id, options", [("Odd-v0", []), ("Strict-v0", ["--clip-actions"])])
def test_dictionaries_to_see_and_matrices_to_do(tmp_path, env_id, options):
    script = "spu_continuous"
    options = [*options, "--num-envs", 3, "--num-steps", 50, "--total-timesteps", 300, "--max-epochs", 2, *QUICK]
    run(script, "--env-id", f"toy_envs:{env_id}", *options, cwd=tmp_path)
    scalars = events(run_dir(tmp_path))
    assert {value for _, value in scalars["charts/episodic_return"]} == {1 + 2 + 3 + 4 + 5 + 6 + 7}
    assert len(scalars["charts/episodic_return"]) == 3 * (100 // 7)
    assert agent_of(run_dir(tmp_path))["policy.0.weight"].shape == (64, 4 + 3 + 3)


def test_an_environment_without_an_end(tmp_path):
    options = ["--num-steps", 100, "--total-timesteps", 200, "--max-epochs", 1, "--no-compile", "--eval-episodes", 2]
    done = run("spu_continuous", "--env-id", "toy_envs:Endless-v0", *options, cwd=tmp_path)
    assert "return 10000.0 ± 0.0 over 2 episodes" in done.stdout  # cut off after 10,000 steps


@pytest.mark.parametrize("env_id", ["RandomState-v0", "Mersenne-v0"])
def test_an_environment_with_a_generator_of_its_own_can_be_resumed(tmp_path, env_id):
    options = ["--num-steps", 100, "--total-timesteps", 200, "--max-epochs", 1, *QUICK]
    run("spu_continuous", "--env-id", f"toy_envs:{env_id}", *options, cwd=tmp_path)
    run("spu_continuous", "--resume", run_dir(tmp_path), "--total-timesteps", 400, cwd=tmp_path)
    assert len(values(run_dir(tmp_path), "charts/SPS")) == 4


@pytest.mark.parametrize("what", ["nan", "inf", "reward", "overflow"])
def test_nan_or_infinity_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, what):
    script = "spu_continuous"
    options = ["--num-steps", 200, "--total-timesteps", 20_000, "--max-epochs", 2, "--checkpoint-every", 1, *QUICK]
    done = run(script, "--env-id", f"toy_envs:Broken-{what}-v0", *options, cwd=tmp_path, code=1)
    assert "NaN" in done.stderr and "--resume" in done.stderr and "Traceback" not in done.stderr
    saved = torch.load(run_dir(tmp_path) / "checkpoint.pt", weights_only=True)
    assert saved["iteration"] == 4 and all(x.isfinite().all() for x in saved["agent"].values())
    assert not (run_dir(tmp_path) / "agent.pt").exists()


def test_it_learns(tmp_path):
    """InvertedPendulum, an easy one: 30,000 steps bring it far from where it starts."""
    options = ["--env-id", "InvertedPendulum-v4", "--total-timesteps", 30_000, "--seed", 7, "--eval-episodes", 5]
    run("spu_continuous", *options, cwd=tmp_path)
    returns = values(run_dir(tmp_path), "charts/episodic_return")
    assert np.mean(returns[:20]) < 30 and np.mean(returns[-20:]) > 150, (returns[:20], returns[-20:])
