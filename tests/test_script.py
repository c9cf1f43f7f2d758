"""The scripts as a user runs them: real processes, real environments, real files."""

import math
import re
import shlex
import shutil
import signal
import subprocess
import time

import gymnasium as gym
import imageio.v2 as imageio
import numpy as np
import pytest
import torch
from conftest import QUICK, command, environment, events, run, run_dir, values, without_speed
from toy_envs import POINTS

import spu_continuous

# Pendulum's episodes are 200 steps long, so that with 200 or 400 steps an iteration they end where iterations end,
# and a resumed run can be compared with an uninterrupted one to the last bit.
PENDULUM = ["--env-id", "Pendulum-v1", "--num-steps", 200, "--max-epochs", 2, *QUICK]


def agent_of(folder):
    return torch.load(folder / "agent.pt", weights_only=True)["agent"]


def training(folder):
    """All scalars of the training: without its speed, and without evaluations."""
    scalars = without_speed(events(folder))
    scalars.pop("eval/episodic_return")
    return scalars


def assert_same_run(a, b):
    assert training(a) == training(b)
    agents = zip(agent_of(a).values(), agent_of(b).values(), strict=True)
    assert all(torch.equal(x, y) for x, y in agents)


@pytest.fixture(scope="module")
def cheetah(tmp_path_factory):
    """The README's command, only shorter."""
    cwd = tmp_path_factory.mktemp("cheetah")
    options = ["--env-id", "HalfCheetah-v4", "--total-timesteps", 10_000, "--eval-episodes", 3]
    return run("spu_continuous", *options, cwd=cwd), cwd


def test_training_says_what_it_does_and_nothing_else(cheetah):
    done, cwd = cheetah
    where, compiling, result, _, play = done.stdout.strip().splitlines()
    assert compiling.startswith("Compiling")
    assert re.match(r"HalfCheetah-v4: return -?[\d.]+ ± [\d.]+ over 3 episodes", result)
    assert where.endswith(f"--resume {run_dir(cwd).relative_to(cwd)}")
    assert play.endswith(f"--evaluate {run_dir(cwd).relative_to(cwd)}/agent.pt")
    bar = done.stderr.replace("\n", "\r").split("\r")
    assert all("steps/s" in line for line in bar if line.strip()), (
        done.stderr
    )  # no warnings, no mujoco messages
    assert re.search(r"return -?[\d.]+, KL 0\.\d+, \d+ epochs", done.stderr)
    assert [path.name for path in cwd.iterdir()] == ["runs"]  # no MUJOCO_LOG.TXT


def test_training_leaves_its_record(cheetah):
    folder = run_dir(cheetah[1])
    assert re.match(r"HalfCheetah-v4__spu_continuous__1__\d", folder.name)
    assert {path.name.split(".")[0] for path in folder.iterdir()} == {"agent", "lock", "events"}
    scalars = events(folder)
    expected = {
        "charts/episodic_return",
        "charts/episodic_length",
        "charts/SPS",
        "charts/learning_rate",
    }
    expected |= {f"losses/{name}" for name in ("policy_loss", "value_loss", "mean_log_std")}
    expected |= {
        f"spu/{name}" for name in ("kl_mean", "kl_max", "accepted_fraction", "epochs_used")
    }
    assert set(scalars) == expected | {"eval/episodic_return"}
    assert [step for step, _ in scalars["spu/kl_mean"]] == [2048, 4096, 6144, 8192]
    assert scalars["charts/episodic_length"] == [(1000 * i, 1000.0) for i in range(1, 9)]
    np.testing.assert_allclose(
        values(folder, "charts/learning_rate"), [3e-4, 2.25e-4, 1.5e-4, 0.75e-4], rtol=1e-5
    )
    assert all(0 < kl < 1 for kl in values(folder, "spu/kl_mean"))
    saved = torch.load(folder / "agent.pt", weights_only=True)
    assert saved["iterations_done"] == 4 and saved["args"]["env_id"] == "HalfCheetah-v4"
    printed = re.search(r"return (\S+)", cheetah[0].stdout).group(1)
    assert values(folder, "eval/episodic_return")[0] == pytest.approx(float(printed), rel=1e-4)


def test_a_reloaded_agent_acts_as_the_trained_one_did(cheetah):
    done, cwd = cheetah
    trained = re.search(r"return (.*) over", done.stdout).group(1)
    replayed = run(
        "spu_continuous", "--evaluate", run_dir(cwd) / "agent.pt", "--eval-episodes", 3, cwd=cwd
    ).stdout
    assert re.search(r"return (.*) over", replayed).group(1) == trained


def test_the_camera_follows_who_would_run_out_of_the_picture(monkeypatch):
    monkeypatch.delenv("DISPLAY", raising=False)
    args = spu_continuous.Args(env_id="HalfCheetah-v4", capture_video=True)
    env = spu_continuous.make_env(args)
    for away in (0.0, 100.0):
        env.unwrapped.set_state(
            np.array([away, *env.unwrapped.data.qpos[1:]]), env.unwrapped.data.qvel
        )
        red = env.render()[..., 0].astype(int) - env.render()[..., 2]
        assert (red > 20).sum() > 1000  # the cheetah is brown, everything else is grey or green
    env.close()


def test_an_evaluated_agent_can_be_filmed_without_a_screen(tmp_path):
    run(
        "spu_continuous",
        "--env-id",
        "InvertedPendulum-v4",
        "--total-timesteps",
        2048,
        *QUICK,
        cwd=tmp_path,
    )
    options = [
        "--evaluate",
        run_dir(tmp_path) / "agent.pt",
        "--capture-video",
        "--eval-episodes",
        1,
    ]
    said = run("spu_continuous", *options, cwd=tmp_path, DISPLAY="", WAYLAND_DISPLAY="").stdout
    (film,) = run_dir(tmp_path).glob("video-*/*.mp4")
    assert str(film.parent) in said
    frames = imageio.mimread(film, memtest=False)
    assert len(frames) > 3 and frames[0].std() > 10  # something is to be seen


def test_same_seed_same_run_and_another_seed_another(tmp_path):
    script = "spu_continuous"
    folders = {}
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        (tmp_path / name).mkdir()
        run(script, *PENDULUM, "--seed", seed, "--total-timesteps", 600, cwd=tmp_path / name)
        folders[name] = run_dir(tmp_path / name)
    assert_same_run(folders["a"], folders["b"])
    assert without_speed(events(folders["a"])) != without_speed(events(folders["c"]))


def iterations_done(folder):
    return torch.load(folder / "agent.pt", weights_only=True)["iterations_done"]


def test_killed_five_times_and_resumed_is_the_uninterrupted_run(tmp_path, script):
    options = [*PENDULUM, "--total-timesteps", 12_000]
    (tmp_path / "whole").mkdir()
    (tmp_path / "cut").mkdir()
    run(script, *options, cwd=tmp_path / "whole")
    arguments, folder, kills, reached = options, None, 0, []
    while not (folder and iterations_done(folder) == 60):
        process = subprocess.Popen(
            command(script, *arguments),
            cwd=tmp_path / "cut",
            env=environment(),
            stderr=subprocess.PIPE,
            text=True,
        )
        deadline = time.time() + 120
        while kills < 5 and process.poll() is None and time.time() < deadline:
            time.sleep(0.02)
            folder = next((tmp_path / "cut").glob("runs/*"), None)
            if folder and (folder / "agent.pt").exists():
                iteration = iterations_done(folder)
                if iteration > (reached[-1] if reached else 0) + 5:
                    time.sleep(0.01 * kills)  # somewhere in an iteration
                    process.kill()
                    kills, reached = kills + 1, [*reached, iteration]
        code = process.wait(timeout=120)
        assert code in (0, -signal.SIGKILL), process.stderr.read()
        arguments = ["--resume", folder]
    assert kills == 5
    assert_same_run(run_dir(tmp_path / "whole"), folder)


def start(cwd, script, *options):
    return subprocess.Popen(
        command(script, *options),
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_a_checkpoint(process, cwd):
    while not list(cwd.glob("runs/*/agent.pt")):
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.1)


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_stopped_run_says_how_to_go_on_and_loses_at_most_an_iteration(tmp_path, sent):
    cwd = tmp_path / "with a space"
    cwd.mkdir()
    process = start(cwd, "spu_continuous", *PENDULUM, "--total-timesteps", 1_000_000)
    wait_for_a_checkpoint(process, cwd)
    time.sleep(1)
    process.send_signal(sent)
    out, err = process.communicate(timeout=60)
    assert process.returncode == (130 if sent == signal.SIGINT else -sent)
    assert "Traceback" not in err
    steps = [int(done) for done in re.findall(r" (\d+)/1000000 ", err)]
    assert iterations_done(run_dir(cwd)) >= steps[-1] // 200  # what the bar says is saved
    assert out.count("To go on from the last checkpoint") == (2 if sent == signal.SIGINT else 1)
    resume = shlex.split(re.search(r"python (.*--resume .*)", out).group(1))[1:]
    total = 200 * (iterations_done(run_dir(cwd)) + 1)
    run("spu_continuous", *resume, "--total-timesteps", total, cwd=cwd)


def test_ctrl_c_in_an_evaluation_ends_it_quietly(tmp_path):
    """The environment presses it at its 500th step: in the evaluation after 400 steps of training, or in --evaluate."""
    env = ["--env-id", "toy_envs:Quit-v0"]
    options = ["--num-steps", 200, "--total-timesteps", 400, "--max-epochs", 1, "--no-compile"]
    done = run("spu_continuous", *env, *options, "--eval-episodes", 200, cwd=tmp_path, code=130)
    agent = run_dir(tmp_path) / "agent.pt"
    assert iterations_done(agent.parent) == 2 and "Traceback" not in done.stderr
    assert f"toy_envs:Quit-v0 --evaluate {agent.relative_to(tmp_path)}" in done.stdout
    done = run("spu_continuous", "--evaluate", agent, *env, cwd=tmp_path, code=130)
    assert not done.stdout and "Traceback" not in done.stderr


def test_a_second_process_on_the_same_run_is_refused(tmp_path):
    process = start(tmp_path, "spu_continuous", *PENDULUM, "--total-timesteps", 1_000_000)
    wait_for_a_checkpoint(process, tmp_path)
    folder = run_dir(tmp_path)
    said = run("spu_continuous", "--resume", folder, cwd=tmp_path, code=2).stderr
    assert "Another process trains in" in said
    process.kill()  # and a killed process leaves no lock
    process.wait(timeout=60)
    total = 200 * (iterations_done(folder) + 1)
    run("spu_continuous", "--resume", folder, "--total-timesteps", total, cwd=tmp_path)


def test_an_error_of_the_environment_says_how_to_go_on(tmp_path):
    options = ["--env-id", "toy_envs:Broken-raise-v0", "--num-steps", 200, *QUICK]
    done = run("spu_continuous", *options, cwd=tmp_path, code=1)
    assert "the motor is on fire" in done.stderr and done.stdout.count("--resume") == 2
    assert iterations_done(run_dir(tmp_path)) == 4


def test_a_disk_that_cannot_be_written_keeps_the_last_checkpoint(tmp_path):
    """The temporary file's name is taken by a folder: as with a full disk, writing fails."""
    process = start(tmp_path, "spu_continuous", *PENDULUM, "--total-timesteps", 1_000_000)
    wait_for_a_checkpoint(process, tmp_path)
    folder = run_dir(tmp_path)
    deadline = time.time() + 60
    while process.poll() is None and time.time() < deadline:
        try:
            (folder / "agent.pt.tmp").mkdir()
            break
        except FileExistsError:
            time.sleep(0.001)
    try:
        out, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 1 and "agent.pt.tmp" in err and out.count("--resume") == 2
    saved = iterations_done(folder)
    (folder / "agent.pt.tmp").rmdir()
    total = 200 * (saved + 1)
    run("spu_continuous", "--resume", folder, "--total-timesteps", total, cwd=tmp_path)


def test_a_finished_run_can_be_carried_on(tmp_path):
    script = "spu_continuous"
    options = [*PENDULUM, "--no-anneal-lr"]
    for name, steps in (("long", 1200), ("short", 700)):
        (tmp_path / name).mkdir()
        run(script, *options, "--total-timesteps", steps, cwd=tmp_path / name)
    long, short = run_dir(tmp_path / "long"), run_dir(tmp_path / "short")
    saved = (short / "agent.pt").read_bytes()
    said = run(script, "--resume", short, cwd=tmp_path, code=2).stderr
    assert "larger --total-timesteps" in said
    assert "--gamma" in run(script, "--resume", short, "--gamma", 0.9, cwd=tmp_path, code=2).stderr
    assert (short / "agent.pt").read_bytes() == saved
    run(script, "--resume", short, "--total-timesteps", 1200, cwd=tmp_path)
    assert_same_run(long, short)
    evaluations = events(short)["eval/episodic_return"]
    assert [step for step, _ in evaluations] == [600, 1200]  # the first one is not lost


def test_another_seed_draws_anew(tmp_path):
    """A run that met a NaN meets it again after --resume; with another seed it need not."""
    run("spu_continuous", *PENDULUM, "--total-timesteps", 400, cwd=tmp_path)
    first = run_dir(tmp_path)
    agents = {}
    for name, extra in (("same", []), ("anew", ["--seed", 2])):
        shutil.copytree(first, tmp_path / name)
        options = ["--resume", tmp_path / name, "--total-timesteps", 600, *extra]
        run("spu_continuous", *options, cwd=tmp_path)
        agents[name] = agent_of(tmp_path / name)
    assert any(
        not torch.equal(x, y) for x, y in zip(agents["same"].values(), agents["anew"].values())
    )


def test_tracking_works_offline(tmp_path):
    run("spu_continuous", *PENDULUM, "--total-timesteps", 400, "--track", cwd=tmp_path)
    (offline,) = run_dir(tmp_path).glob("wandb/offline-run-*")
    record = next(offline.glob("*.wandb")).read_bytes()
    for tag in (b"spu/kl_mean", b"charts/episodic_return", b"eval/episodic_return", b"Pendulum-v1"):
        assert tag in record


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
    options = [
        "--env-id",
        "Hopper-v4",
        "--total-timesteps",
        6144,
        "--max-epochs",
        1,
        "--learning-rate",
        1e-30,
        *QUICK,
    ]
    run(script, *options, cwd=tmp_path)
    np.testing.assert_allclose(values(run_dir(tmp_path), "spu/kl_max"), 0, atol=1e-12)
    np.testing.assert_allclose(values(run_dir(tmp_path), "losses/policy_loss"), 0, atol=1e-6)
    moments = agent_of(run_dir(tmp_path))["obs_moments"]
    assert (moments[2] == 6144).all() and (moments[0].abs() > 0.1).any()


def test_delta_stops_the_policy_and_not_the_value_function(tmp_path):
    options = ["--env-id", "Pendulum-v1", "--num-steps", 256, "--total-timesteps", 512]
    options += ["--max-epochs", 8, *QUICK]
    variants = {
        "stop": ["--delta", 1e-9],
        "joint": ["--delta", 1e-9, "--joint-stopping"],
        "never": ["--delta", "inf", "--epsilon", "inf"],
        "far": ["--delta", 9, "--epsilon", 1e9],
    }
    for name, extra in variants.items():
        (tmp_path / name).mkdir()
        run("spu_continuous", *options, *extra, cwd=tmp_path / name)
    folders = {name: run_dir(tmp_path / name) for name in variants}
    epochs = {name: values(folder, "spu/epochs_used") for name, folder in folders.items()}
    assert epochs["stop"] == epochs["joint"] == [1, 1]
    assert epochs["never"] == epochs["far"] == [8, 8]
    steps = {name: agent_of(folder)["value.steps_done"].item() for name, folder in folders.items()}
    assert steps == {"stop": 2 * 8 * 4, "joint": 2 * 1 * 4, "never": 2 * 8 * 4, "far": 2 * 8 * 4}
    assert agent_of(folders["stop"])["policy.steps_done"].item() == 2 * 1 * 4
    assert set(values(folders["never"], "spu/accepted_fraction")) == {1}
    agents = [agent_of(folders[name]).values() for name in ("never", "far")]
    assert all(torch.equal(x, y) for x, y in zip(*agents))  # inf says the same as a far bound


def test_a_time_limit_is_not_death(tmp_path):
    script = "spu_continuous"
    """Reward 1 for ever, cut into episodes of 5 steps, gamma 0.8: a state is worth 5, or at most 3.4 if time kills."""
    options = [
        "--env-id",
        "toy_envs:Constant-v0",
        "--gamma",
        0.8,
        "--num-steps",
        100,
        "--total-timesteps",
        6000,
    ]
    options += ["--minibatch-size", 25, "--learning-rate", 0.01, "--max-epochs", 5, *QUICK]
    worth = {}
    for flag in ("--bootstrap-truncation", "--no-bootstrap-truncation"):
        (tmp_path / flag).mkdir()
        run(script, *options, flag, cwd=tmp_path / flag)
        agent = spu_continuous.Agent(1, gym.spaces.Box(-1, 1, (1,)))
        agent.load_state_dict(agent_of(run_dir(tmp_path / flag)))
        worth[flag] = agent.values(agent.normalize(np.zeros((1, 1)))).item()
    assert worth["--bootstrap-truncation"] == pytest.approx(5, abs=0.3)
    assert worth["--no-bootstrap-truncation"] < 3.4


@pytest.mark.parametrize(
    "units",
    ["Actions100", "ActionsNear100", "ObsSmall", "ObsFar", "RewardSmall", "RewardLarge"],
)
def test_it_learns_in_any_units(tmp_path, units):
    """The same task in other units of actions, observations or rewards. Random actions give -27, the best are -2."""
    options = ["--env-id", f"toy_envs:Point{units}-v0", "--num-steps", 1024, "--max-epochs", 5]
    options += ["--total-timesteps", 15_360, "--no-compile", "--eval-episodes", 20]
    said = run("spu_continuous", *options, cwd=tmp_path).stdout
    score = float(re.search(r"return (\S+) ±", said).group(1))
    assert score / POINTS[units].get("reward_scale", 1.0) > -9


@pytest.mark.parametrize("env_id, options", [("Odd-v0", []), ("Strict-v0", ["--clip-actions"])])
def test_dictionaries_to_see_and_matrices_to_do(tmp_path, env_id, options):
    script = "spu_continuous"
    options = [*options, "--num-steps", 150, "--total-timesteps", 300, "--max-epochs", 2, *QUICK]
    run(script, "--env-id", f"toy_envs:{env_id}", *options, cwd=tmp_path)
    scalars = events(run_dir(tmp_path))
    assert {value for _, value in scalars["charts/episodic_return"]} == {1 + 2 + 3 + 4 + 5 + 6 + 7}
    assert len(scalars["charts/episodic_return"]) == 300 // 7
    agent = agent_of(run_dir(tmp_path))
    assert agent["obs_moments"].shape == (3, 4 + 3 + 3)
    assert (agent["action_scale"] == 0.5).all()  # clipped or not, in units of the action space


def test_an_environment_without_an_end(tmp_path):
    options = [
        "--num-steps",
        100,
        "--total-timesteps",
        200,
        "--max-epochs",
        1,
        "--no-compile",
        "--eval-episodes",
        2,
    ]
    done = run("spu_continuous", "--env-id", "toy_envs:Endless-v0", *options, cwd=tmp_path)
    assert "return 10000 ± 0 over 2 episodes" in done.stdout  # cut off after 10,000 steps


@pytest.mark.parametrize("env_id", ["RandomState-v0", "Mersenne-v0"])
def test_an_environment_with_a_generator_of_its_own_is_resumed_to_the_bit(tmp_path, env_id):
    """Every episode's seed comes from torch, so what the environment draws from does not matter."""
    options = ["--env-id", f"toy_envs:{env_id}", "--num-steps", 100, "--max-epochs", 1, *QUICK]
    options += ["--no-anneal-lr"]
    for name, steps in (("long", 400), ("short", 200)):
        (tmp_path / name).mkdir()
        run("spu_continuous", *options, "--total-timesteps", steps, cwd=tmp_path / name)
    long, short = run_dir(tmp_path / "long"), run_dir(tmp_path / "short")
    go_on = ["--resume", short, "--env-id", f"toy_envs:{env_id}", "--total-timesteps", 400]
    run("spu_continuous", *go_on, cwd=tmp_path)
    assert_same_run(long, short)


@pytest.mark.parametrize("what", ["nan", "inf", "reward"])
def test_nan_or_infinity_stops_the_run_and_keeps_the_last_good_checkpoint(tmp_path, what):
    options = ["--num-steps", 200, "--total-timesteps", 20_000, "--max-epochs", 2, *QUICK]
    broken = f"toy_envs:Broken-{what}-v0"
    done = run("spu_continuous", "--env-id", broken, *options, cwd=tmp_path, code=1)
    gave = {"nan": "observation [nan]", "inf": "observation [inf]", "reward": "reward nan"}[what]
    assert gave in done.stderr and "at step 1000" in done.stderr
    assert "--seed N draws anew" in done.stderr and done.stdout.count("--resume") == 2
    saved = torch.load(run_dir(tmp_path) / "agent.pt", weights_only=True)
    assert saved["iterations_done"] == 4
    assert all(x.isfinite().all() for x in saved["agent"].values())


def test_a_network_that_became_nan_is_never_saved(tmp_path):
    options = [*PENDULUM, "--total-timesteps", 20_000, "--learning-rate", 1e30, "--no-anneal-lr"]
    done = run("spu_continuous", *options, cwd=tmp_path, code=1)
    assert "lower --learning-rate" in done.stderr
    for path in run_dir(tmp_path).glob("agent.pt"):
        assert all(x.isfinite().all() for x in agent_of(path.parent).values())


def test_an_environment_that_fills_the_same_array_again(tmp_path):
    """Its observations count 1, 2, 3, ...: kept by reference, all would be the last one."""
    options = ["--env-id", "toy_envs:SameArray-v0", "--num-steps", 100, "--total-timesteps", 100]
    run("spu_continuous", *options, *QUICK, cwd=tmp_path)
    mean, std, _ = agent_of(run_dir(tmp_path))["obs_moments"][:, 0]
    assert mean == pytest.approx(4.5) and std == pytest.approx(math.sqrt(8.25))


def test_it_learns(tmp_path):
    """InvertedPendulum, an easy one: 30,000 steps bring it far from where it starts."""
    options = [
        "--env-id",
        "InvertedPendulum-v4",
        "--total-timesteps",
        30_000,
        "--seed",
        7,
        "--eval-episodes",
        5,
    ]
    run("spu_continuous", *options, cwd=tmp_path)
    returns = values(run_dir(tmp_path), "charts/episodic_return")
    assert np.mean(returns[:20]) < 30 and np.mean(returns[-20:]) > 150, (
        returns[:20],
        returns[-20:],
    )


def test_a_task_of_the_newer_version_is_trained_on(tmp_path):
    """-v5 sees more of Ant than -v4: 105 numbers instead of 27."""
    options = ["--num-steps", 512, "--total-timesteps", 1024, "--max-epochs", 2, *QUICK]
    said = run("spu_continuous", "--env-id", "Ant-v5", *options, cwd=tmp_path).stdout
    assert "Ant-v5: return" in said
    assert agent_of(run_dir(tmp_path))["obs_moments"].shape == (3, 105)
