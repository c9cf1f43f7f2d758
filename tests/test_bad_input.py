"""Bad input gets one sentence on stderr and exit code 2, and leaves nothing behind."""

import importlib
import pickle
import sys
from pathlib import Path

import pytest
import torch
from conftest import CONTINUOUS, run

PENDULUM = ["--env-id", "Pendulum-v1"]
DRAW = ["--env-id", "toy_envs:Constant-v0", "--capture-video"]


@pytest.fixture(params=CONTINUOUS)
def refused(request, tmp_path, monkeypatch, capsys):
    """Call the script's main with these options in an empty folder; return the one sentence it says."""
    module = importlib.import_module(request.param)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))

    def call(*options, left_behind=()):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [f"{request.param}.py", *map(str, options)])
        with pytest.raises(SystemExit) as stopped:
            module.main()
        assert stopped.value.code == 2
        said = capsys.readouterr()
        assert said.out == "" and said.err.startswith(f"{request.param}.py: ") and said.err.count("\n") == 1, said
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left_behind)
        return said.err

    call.script, call.module, call.folder = request.param, module, tmp_path
    return call


def test_unknown_environment_suggests_a_near_one(refused):
    assert "HalfCheetah" in refused("--env-id", "HalfCheeta-v4")
    assert "v5" in refused("--env-id", "HalfCheetah-v77")
    assert "nothing_like_this" in refused("--env-id", "nothing_like_this:Env-v0")


def test_an_environment_that_fails_without_a_word(refused):
    assert "cannot be made: AssertionError()" in refused("--env-id", "toy_envs:Silent-v0")


def test_discrete_actions(refused):
    assert "Discrete(2)" in refused("--env-id", "CartPole-v1")


def test_observations_that_are_no_vector(refused):
    assert "Graph" in refused("--env-id", "toy_envs:Graphs-v0")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_what_must_be_positive_and_finite(refused, value):
    names = {"lam", "epsilon", "accept", "max_advantage", "delta", "learning_rate"} & set(vars(refused.module.Args()))
    assert len(names) >= 4
    for option in (name.replace("_", "-") for name in names):
        assert f"--{option} must be a positive, finite number" in refused(*PENDULUM, f"--{option}={value}")


@pytest.mark.parametrize("option", ["gamma", "gae-lambda"])
@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan"])
def test_what_must_lie_between_0_and_1(refused, option, value):
    assert f"--{option} must be between 0 and 1" in refused(*PENDULUM, f"--{option}={value}")


@pytest.mark.parametrize("option", ["num-envs", "num-steps", "max-epochs", "checkpoint-every", "eval-episodes"])
def test_what_must_be_at_least_1(refused, option):
    assert f"--{option} must be at least 1" in refused(*PENDULUM, f"--{option}=0")


def test_sizes_that_do_not_fit(refused):
    assert "--total-timesteps must be at least one batch" in refused(*PENDULUM, "--total-timesteps", 2047)
    assert "--minibatch-size must be between 1 and" in refused(*PENDULUM, "--minibatch-size", 0)
    assert "--minibatch-size must be between 1 and" in refused(*PENDULUM, "--minibatch-size", 2049)
    assert "--seed must be" in refused(*PENDULUM, "--seed=-1")


def test_resume_without_a_checkpoint(refused):
    assert "--resume" in refused("--resume", "runs/none")
    (refused.folder / "empty").mkdir()
    assert "--resume" in refused("--resume", "empty", left_behind=["empty"])


def save(path, script, **extra):
    torch.save({"script": script, "args": {}, "agent": {}} | extra, path)


def test_resume_of_another_script(refused):
    save(refused.folder / "checkpoint.pt", "spu_of_mine", iteration=3)
    assert f"{refused.script}.py" in refused("--resume", ".", left_behind=["checkpoint.pt"])


class Malice:
    def __reduce__(self):
        return (open, ("stolen.txt", "w"))


def test_evaluate_what_is_no_agent(refused):
    folder = refused.folder
    (folder / "text.pt").write_text("hello")
    (folder / "malice.pt").write_bytes(pickle.dumps(Malice()))
    torch.save([1, 2, 3], folder / "list.pt")
    save(folder / "other.pt", refused.script, args={"no_such_option": 1})
    there = ["list.pt", "malice.pt", "other.pt", "text.pt"]
    for name in (*there, "absent.pt"):
        assert "--evaluate an agent.pt" in refused("--evaluate", name, left_behind=there)


def test_evaluate_an_agent_that_does_not_fit_the_environment(refused):
    agent = refused.module.Agent(3, 1)
    save(refused.folder / "agent.pt", refused.script, agent=agent.state_dict(), args={"env_id": "Pendulum-v1"})
    said = refused("--evaluate", "agent.pt", "--env-id", "InvertedPendulum-v4", left_behind=["agent.pt"])
    assert "does not fit InvertedPendulum-v4" in said


def test_track_without_wandb(refused, monkeypatch):
    monkeypatch.setattr(refused.module, "find_spec", lambda name: None)
    assert "pip install wandb" in refused(*PENDULUM, "--track")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_cuda_without_a_gpu(refused):
    assert "no GPU" in refused(*PENDULUM, "--cuda")


def test_video_of_what_cannot_be_drawn(refused):
    assert "cannot be drawn" in refused("--env-id", "toy_envs:Constant-v0", "--capture-video")
    assert "cannot be drawn: it draws nothing" in refused("--env-id", "toy_envs:Blank-v0", "--capture-video")


@pytest.mark.parametrize("options", [["--env-id", "Nothing-v0"], ["--lam", "0"], ["--resume", "nowhere"], DRAW])
def test_the_same_in_a_process_of_its_own(tmp_path, options):
    done = run("spu_continuous", *options, cwd=tmp_path, code=2)
    assert done.stderr.count("\n") == 1 and not done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("refused", ["spu_linf"], indirect=True)
def test_an_l_infinity_epsilon_that_would_make_ratios_negative(refused):
    assert "--epsilon must be at most 1" in refused(*PENDULUM, "--epsilon", 1.5)
