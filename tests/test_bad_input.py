"""Bad input gets one sentence on stderr and exit code 2, and leaves nothing behind."""

import dataclasses
import importlib
import pickle
import sys
from pathlib import Path

import gymnasium as gym
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
        assert (
            said.out == ""
            and said.err.startswith(f"{request.param}.py: ")
            and said.err.count("\n") == 1
        ), said
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(left_behind)
        return said.err

    call.script, call.module, call.folder = request.param, module, tmp_path
    return call


def test_unknown_environment_suggests_a_near_one(refused):
    assert "HalfCheetah" in refused("--env-id", "HalfCheeta-v4")
    assert "v5" in refused("--env-id", "HalfCheetah-v77")
    assert "nothing_like_this" in refused("--env-id", "nothing_like_this:Env-v0")


def test_an_environment_that_fails_without_a_word(refused):
    assert "cannot be used: AssertionError()" in refused("--env-id", "toy_envs:Silent-v0")


def test_discrete_actions(refused):
    assert "Discrete(2)" in refused("--env-id", "CartPole-v1")


def test_observations_that_are_no_vector(refused):
    assert "Graph" in refused("--env-id", "toy_envs:Graphs-v0")


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf"])
def test_what_must_be_positive_and_finite(refused, value):
    options = {field.name for field in dataclasses.fields(refused.module.Args)}
    names = {"lam", "learning_rate"} & options
    if refused.script != "spu_continuous":
        names |= {"epsilon"} & options
    assert len(names) >= 2
    for option in (name.replace("_", "-") for name in names):
        said = refused(*PENDULUM, f"--{option}={value}")
        assert f"--{option} must be a positive, finite number" in said


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_what_may_be_infinite_must_be_positive(refused, value):
    names = {
        "spu_continuous": ["epsilon", "delta"],
        "spu_linf": ["max_kl"],
        "spu_reverse_kl": ["accept", "delta", "max_advantage"],
    }
    for option in (name.replace("_", "-") for name in names[refused.script]):
        assert f"--{option} must be positive" in refused(*PENDULUM, f"--{option}={value}")


@pytest.mark.parametrize("option", ["gamma", "gae-lambda"])
@pytest.mark.parametrize("value", ["-0.1", "1.1", "nan"])
def test_what_must_lie_between_0_and_1(refused, option, value):
    assert f"--{option} must be between 0 and 1" in refused(*PENDULUM, f"--{option}={value}")


@pytest.mark.parametrize("option", ["num-steps", "minibatch-size", "max-epochs", "eval-episodes"])
def test_what_must_be_at_least_1(refused, option):
    assert f"--{option} must be at least 1" in refused(*PENDULUM, f"--{option}=0")


def test_sizes_that_do_not_fit(refused):
    assert "--total-timesteps must be at least --num-steps" in refused(
        *PENDULUM, "--total-timesteps", 2047
    )
    assert "--minibatch-size must be at most --num-steps" in refused(
        *PENDULUM, "--minibatch-size", 2049
    )
    assert "--seed must be" in refused(*PENDULUM, "--seed=-1")
    assert "--initial-log-std must be" in refused(*PENDULUM, "--initial-log-std=nan")


def test_resume_without_a_checkpoint(refused):
    assert "is no agent.pt of a run" in refused("--resume", "runs/none")
    (refused.folder / "empty").mkdir()
    assert "is no agent.pt of a run" in refused("--resume", "empty", left_behind=["empty"])


def saved_by(module, **options):
    """What the script would save of an untrained agent of Pendulum."""
    space = gym.make("Pendulum-v1").action_space
    args = module.Args(env_id="Pendulum-v1", num_steps=200, total_timesteps=400, **options)
    return {
        "script": module.SCRIPT,
        "args": dataclasses.asdict(args),
        "agent": module.Agent(3, space).state_dict(),
        "iterations_done": 1,
        "random_state": torch.get_rng_state(),
    }


def without(saved, key):
    return {name: value for name, value in saved.items() if name != key}


TAMPERED = {
    "another script": lambda saved: saved | {"script": "spu_of_mine"},
    "no script": lambda saved: without(saved, "script"),
    "no args": lambda saved: without(saved, "args"),
    "no agent": lambda saved: without(saved, "agent"),
    "no count": lambda saved: without(saved, "iterations_done"),
    "no random state": lambda saved: without(saved, "random_state"),
    "a list": lambda saved: [saved],
    "args a list": lambda saved: saved | {"args": [1, 2]},
    "an option too few": lambda saved: saved | {"args": without(saved["args"], "gamma")},
    "an option of no type": lambda saved: saved | {"args": saved["args"] | {"gamma": None}},
    "an option of another type": lambda saved: saved | {"args": saved["args"] | {"num_steps": "x"}},
    "an unknown option": lambda saved: saved | {"args": saved["args"] | {"no_such_option": 1}},
    "an option out of range": lambda saved: saved | {"args": saved["args"] | {"gamma": 7.0}},
    "count a text": lambda saved: saved | {"iterations_done": "one"},
    "agent a number": lambda saved: saved | {"agent": 3},
    "agent empty": lambda saved: saved | {"agent": {}},
    "agent of the first version": lambda saved: (
        saved | {"agent": {"policy.0.weight": torch.ones(3)}}
    ),
    "agent of another shape": lambda saved: (
        saved | {"agent": saved["agent"] | {"action_scale": torch.ones(9)}}
    ),
    "random state a text": lambda saved: saved | {"random_state": "dice"},
    "random state too short": lambda saved: (
        saved | {"random_state": torch.zeros(3, dtype=torch.uint8)}
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_a_tampered_file_gets_a_sentence_and_nothing_is_written(refused, what):
    run_dir = refused.folder / "run"
    run_dir.mkdir(exist_ok=True)
    torch.save(TAMPERED[what](saved_by(refused.module)), run_dir / "agent.pt")
    before = (run_dir / "agent.pt").read_bytes()
    refused("--resume", "run", left_behind=["run"])
    refused("--evaluate", "run/agent.pt", left_behind=["run"])
    assert [path.name for path in run_dir.iterdir()] == ["agent.pt"]
    assert (run_dir / "agent.pt").read_bytes() == before


def test_what_a_resumed_run_may_not_change(refused):
    (refused.folder / "run").mkdir()
    torch.save(saved_by(refused.module), refused.folder / "run" / "agent.pt")
    resume = ["--resume", "run"]
    for option, value in (("gamma", 0.5), ("num-steps", 100), ("env-id", "InvertedPendulum-v4")):
        said = refused(*resume, f"--{option}", value, left_behind=["run"])
        assert f"--{option} cannot be changed when a run is resumed" in said
    said = refused(*resume, "--total-timesteps", 200, left_behind=["run"])
    assert "give a larger --total-timesteps" in said


def test_a_file_does_not_decide_which_module_is_imported(refused):
    """gymnasium imports what stands before the colon: a stranger's agent.pt could run a module."""
    (refused.folder / "run").mkdir()
    (refused.folder / "trap.py").write_text("open('sprung.txt', 'w')")
    saved = saved_by(refused.module)
    saved["args"]["env_id"] = "trap:Pendulum-v1"
    torch.save(saved, refused.folder / "run" / "agent.pt")
    sys.path.insert(0, str(refused.folder))
    try:
        for option, value in (("--evaluate", "run/agent.pt"), ("--resume", "run")):
            said = refused(option, value, left_behind=["run", "trap.py"])
            assert "if you trust it, add --env-id trap:Pendulum-v1" in said
    finally:
        sys.path.pop(0)


class Malice:
    def __reduce__(self):
        return (open, ("stolen.txt", "w"))


def test_evaluate_what_is_no_agent(refused):
    folder = refused.folder
    (folder / "text.pt").write_text("hello")
    (folder / "malice.pt").write_bytes(pickle.dumps(Malice()))
    torch.save([1, 2, 3], folder / "list.pt")
    there = ["list.pt", "malice.pt", "text.pt"]
    for name in (*there, "absent.pt"):
        assert "is no agent.pt of a run" in refused("--evaluate", name, left_behind=there)


def test_evaluate_an_agent_that_does_not_fit_the_environment(refused):
    torch.save(saved_by(refused.module), refused.folder / "agent.pt")
    options = ["--evaluate", "agent.pt", "--env-id", "InvertedPendulum-v4"]
    assert "does not fit InvertedPendulum-v4" in refused(*options, left_behind=["agent.pt"])


def test_video_of_what_cannot_be_drawn(refused):
    assert "render_mode" in refused("--env-id", "toy_envs:Constant-v0", "--capture-video")
    said = refused("--env-id", "toy_envs:Blank-v0", "--capture-video")
    assert "cannot be used: it draws nothing" in said


@pytest.mark.parametrize(
    "options", [["--env-id", "Nothing-v0"], ["--lam", "0"], ["--resume", "nowhere"], DRAW]
)
def test_the_same_in_a_process_of_its_own(tmp_path, options):
    done = run("spu_continuous", *options, cwd=tmp_path, code=2)
    assert done.stderr.count("\n") == 1 and not done.stdout and not list(tmp_path.iterdir())


@pytest.mark.parametrize("refused", ["spu_linf"], indirect=True)
def test_an_l_infinity_epsilon_that_would_make_ratios_negative(refused):
    assert "--epsilon must be at most 1" in refused(*PENDULUM, "--epsilon", 1.5)
