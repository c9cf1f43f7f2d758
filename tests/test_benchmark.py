"""The benchmark: its runner keeps what a run learned and goes on where it was cut off, its plan is
the protocol's, and the algorithms that SPU is compared with are what they say they are."""

import csv
import importlib
import re
import shutil
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
import tyro
from conftest import QUICK, ROOT, environment, events, run, run_dir, values
from torch.distributions import Independent, Normal, kl_divergence
from torch.utils.tensorboard import SummaryWriter

from benchmark import ppo_continuous as ppo
from benchmark import run as benchmark_run
from benchmark import trpo_continuous as trpo

# ------------------------------------------------------------------- The runner


@pytest.fixture
def runner(tmp_path, monkeypatch):
    """The runner with one small job, in a folder of its own. An episode is a batch, so a run that
    is resumed loses nothing."""
    flags = "--num-steps 200 --total-timesteps 6000 --max-epochs 1 --no-compile --eval-episodes 1"
    plan = {"small": ("spu_continuous", ["Pendulum-v1"], [1], flags)}
    monkeypatch.setattr(benchmark_run, "PLAN", plan)
    monkeypatch.setattr(benchmark_run, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(benchmark_run, "WORK", tmp_path / "work")
    return benchmark_run


def main(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    benchmark_run.main()


def read_curve(path):
    lines = path.read_text().splitlines()
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    steps = [int(row["step"]) for row in rows]
    return lines[:5], steps, [float(row["return"]) for row in rows]


def test_a_job_leaves_its_curve_and_is_not_run_again(runner, monkeypatch, tmp_path, capsys):
    main(monkeypatch, "small", "--dry-run")
    assert capsys.readouterr().out == "python benchmark/run.py small --only Pendulum-v1__1\n"
    main(monkeypatch, "small")
    path = tmp_path / "results" / "small" / "Pendulum-v1__1.csv"
    header, steps, curve = read_curve(path)
    start = "# command: python spu_continuous.py --env-id Pendulum-v1 --seed 1 --num-steps 200"
    assert header[0].startswith(start)
    assert steps == list(range(200, 6001, 200))
    scalars = events(run_dir(tmp_path / "work" / "small" / "Pendulum-v1__1"))
    returns = [value for _, value in scalars["charts/episodic_return"]]
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True).stdout.strip() or "unknown"
    assert header[1] in (f"# commit: {head}", f"# commit: {head}+")
    assert header[3].endswith(", sittings: 1, episodes: 30")
    assert header[4] == f"# evaluation: {scalars['eval/episodic_return'][0][1]:.2f}"
    with open(path) as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    kl = [value for _, value in scalars["spu/kl_mean"]]
    np.testing.assert_allclose([float(row["kl"]) for row in rows], kl, atol=1e-5)
    np.testing.assert_allclose(curve, np.cumsum(returns) / np.arange(1, 31), atol=0.01)
    main(monkeypatch, "small", "--dry-run")
    assert capsys.readouterr().out == ""

    # Another seed than the plan's is still to do.
    main(monkeypatch, "small", "--seeds", "1", "2", "--dry-run")
    assert capsys.readouterr().out == "python benchmark/run.py small --only Pendulum-v1__2\n"

    # A finished run whose curve was not kept is not trained again.
    path.unlink()
    main(monkeypatch, "small", "--only", "Pendulum-v1__1")
    assert read_curve(path) == (header, steps, curve)  # one sitting still


def test_a_job_that_was_killed_goes_on_as_if_nothing_had_happened(runner, monkeypatch, tmp_path):
    folder = tmp_path / "work" / "small" / "Pendulum-v1__1"
    folder.mkdir(parents=True)
    script, *options = runner.command("small", "Pendulum-v1", 1)
    command = [sys.executable, str(ROOT / script), *options]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.DEVNULL)
    done = 0
    while done < 3:
        time.sleep(0.02)
        assert process.poll() is None
        if agent := runner.newest_agent(folder):
            done = torch.load(agent, weights_only=True)["iterations_done"]
    process.kill()
    process.wait()
    assert not runner.is_finished(runner.newest_agent(folder))

    main(monkeypatch, "small")
    header, steps, curve = read_curve(tmp_path / "results" / "small" / "Pendulum-v1__1.csv")
    assert header[3].endswith(", sittings: 2, episodes: 30")
    assert runner.is_finished(run_dir(folder) / "agent.pt")  # the only run
    run("spu_continuous", *options, cwd=tmp_path)  # the same, in one go
    returns = np.array(values(run_dir(tmp_path), "charts/episodic_return"))
    assert steps == list(range(200, 6001, 200))
    np.testing.assert_allclose(curve, np.cumsum(returns) / np.arange(1, 31), atol=0.01)


def test_a_run_that_was_cut_off_in_its_evaluation_is_kept(runner, tmp_path):
    folder = tmp_path / "run"
    writer = SummaryWriter(folder)
    for step in (200, 400):
        writer.add_scalar("charts/episodic_return", -step, step)
        writer.add_scalar("spu/kl_mean", 0.01, step)
    writer.close()
    runner.keep("small", "Pendulum-v1", 1, folder)
    header, _, curve = read_curve(tmp_path / "results" / "small" / "Pendulum-v1__1.csv")
    assert header[4] == "# evaluation: nan" and curve == [-200, -300]


def test_seeds_come_one_after_the_other(runner, monkeypatch, capsys):
    runner.PLAN["other"] = runner.PLAN["small"]
    main(monkeypatch, "small", "other", "--seeds", "1", "2", "--dry-run")
    lines = capsys.readouterr().out.splitlines()
    order = [line.split()[2] + line[-1] for line in lines]
    assert order == ["small1", "other1", "small2", "other2"]


def test_the_agent_of_the_median_seed_is_kept_and_plays_as_it_did(tmp_path):
    results, runs, agents = (tmp_path / name for name in ("results", "runs", "agents"))
    (results / "spu").mkdir(parents=True)
    for seed, score in {1: -50, 2: -100, 3: -300, 4: -200}.items():
        text = f"# evaluation: {score - 1}.00\nstep,return,kl\n200,-999,0.01\n400,{score},0.01\n"
        (results / "spu" / f"Pendulum-v1__{seed}.csv").write_text(text)
    job = runs / "spu" / "Pendulum-v1__4"
    job.mkdir(parents=True)
    options = ("--env-id", "Pendulum-v1", "--num-steps", 200, "--total-timesteps", 400)
    played = run("spu_continuous", *options, *QUICK, cwd=job).stdout
    command = [sys.executable, str(ROOT / "benchmark/agents.py"), "--results", results]
    command += ["--runs", runs, "--output", agents]
    for _ in range(2):  # the second time the table is there already
        subprocess.run(command, check=True)
    rows = list(csv.DictReader((agents / "agents.csv").open()))
    assert [list(row.values()) for row in rows] == [
        ["Pendulum-v1", "spu_continuous.py", "4", "4", "-200.0", "-201.0"]
    ]
    agent = agents / "Pendulum-v1.pt"
    assert agent.stat().st_size < 0.5 * (run_dir(job) / "agent.pt").stat().st_size
    again = run("spu_continuous", "--evaluate", agent, cwd=tmp_path).stdout
    assert again.startswith("Pendulum-v1: return") and again in played


@pytest.mark.parametrize("task", ["HalfCheetah-v4", "InvertedDoublePendulum-v4", "Swimmer-v4"])
def test_an_agent_of_the_repository_plays_as_its_table_says(task, tmp_path):
    folder = ROOT / "benchmark" / "agents"
    (row,) = [row for row in csv.DictReader((folder / "agents.csv").open()) if row["task"] == task]
    said = run("spu_continuous", "--evaluate", folder / f"{task}.pt", cwd=tmp_path).stdout
    score = float(re.search(r"return (\S+) ±", said).group(1))
    assert score == pytest.approx(float(row["evaluation"]), rel=0.05)


def test_a_header_has_the_commit_that_the_jobs_started_from(runner, monkeypatch, tmp_path):
    def commit():
        identity = ["-c", "user.name=x", "-c", "user.email=x"]
        git = ["git", "-C", str(tmp_path), *identity, "commit", "--allow-empty", "-qm", "x"]
        subprocess.run(git, check=True)

    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    commit()
    monkeypatch.setattr(runner, "ROOT", tmp_path)
    monkeypatch.setitem(runner.PLAN, "small", (*runner.PLAN["small"][:2], [], ""))  # no jobs
    runner.commit.cache_clear()
    try:
        main(monkeypatch, "small")
        head = ["git", "-C", str(tmp_path), "rev-parse", "--short", "HEAD"]
        at_the_start = subprocess.run(head, capture_output=True, text=True).stdout.strip()
        commit()
        assert runner.commit() == at_the_start
    finally:
        runner.commit.cache_clear()


def test_todays_scripts_are_compared_with_those_of_the_reported_runs(tmp_path):
    there = tmp_path / "spu"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{ROOT}", there], check=True)
    git = ["git", "-C", there, "rev-parse", "--short", "HEAD"]
    head = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    results = tmp_path / "results"
    for name, options, commit in (
        ("a/Ant__1", "--env-id Ant-v4 --seed 1", f"# commit: {head}"),
        ("a/Ant__2", "--env-id Ant-v4 --seed 2 --total-timesteps 9", f"# commit: {head}+"),
        ("b/Ant__1", "--env-id Ant-v4 --seed 1 --delta 0.01 --epsilon 1", f"# commit: {head}"),
        ("sb3_ppo/Ant__1", "--env-id Ant-v4 --seed 1", "# versions: of a library"),
    ):
        path = results / f"{name}.csv"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"# command: python spu_continuous.py {options}\n{commit}\nstep,return\n")

    # Another default for epsilon is found out where the runs had the default.
    script = there / "spu_continuous.py"
    script.write_text(script.read_text().replace("epsilon: float = 0.03", "epsilon: float = 0.001"))
    shutil.copy(ROOT / "benchmark" / "frozen.py", there / "benchmark")
    command = [sys.executable, there / "benchmark" / "frozen.py", "--results", results]
    done = subprocess.run([*command, "--hopper-steps", "2048"], capture_output=True, text=True)
    one, two = done.stdout.splitlines()
    assert one == f"{head} spu_continuous.py : OTHER NUMBERS"
    assert two.startswith(f"{head} spu_continuous.py --delta 0.01 --epsilon 1: the same ")
    assert done.returncode == 1


def test_an_unknown_group_is_refused(runner, monkeypatch):
    with pytest.raises(SystemExit, match="There is no group large: the plan has small"):
        main(monkeypatch, "large")


# ------------------------------------------------------------------- The plan


@pytest.mark.parametrize("group", benchmark_run.PLAN)
def test_every_command_of_the_plan_is_understood(group):
    _, envs, seeds, _ = benchmark_run.PLAN[group]
    script, *options = benchmark_run.command(group, envs[0], seeds[0])
    module = importlib.import_module(script.removesuffix(".py").replace("/", "."))
    args = tyro.cli(module.Args, args=options)
    assert (args.env_id, args.seed) == (envs[0], seeds[0])
    if hasattr(module, "check"):
        module.check(args)


def test_the_tuning_runs_are_those_of_the_protocol():
    text = (ROOT / "benchmark" / "PROTOCOL.md").read_text()
    names = {
        "spu": ["delta", "epsilon", "lam", "max_epochs"],
        "ppo": ["clip", "max_epochs", "target_kl"],  # and as many value_epochs
        "trpo": ["delta", "max_epochs"],
    }
    rows = re.findall(r"^\| (\d) \| (.*) \| (.*) \| (.*) \|$", text, re.MULTILINE)
    assert [number for number, *_ in rows] == list("123456")
    tasks = ["HalfCheetah-v4", "Hopper-v4", "Walker2d-v4", "Humanoid-v4", "Reacher-v4"]
    others = {
        "linf_1",
        "linf_2",
        "ppo_7",
        "trpo_7",
        "trpo_8",
        "trpo_9",
        "ppo_log_std_0",
        "pong_ppo_512",
    }
    groups = {group for group in benchmark_run.PLAN if group.startswith("tuning/")}
    assert len(groups) == 18 + len(others) and all(f"tuning/{name}" in groups for name in others)
    assert all(f"`tuning/{name}`" in text for name in others)
    for number, *cells in rows:
        for algorithm, cell in zip(names, cells, strict=True):
            script, envs, seeds, flags = benchmark_run.PLAN[f"tuning/{algorithm}_{number}"]
            assert script.rpartition("/")[2] == f"{algorithm}_continuous"
            assert (envs, seeds) == (tasks, [101])
            module = importlib.import_module(script.replace("/", "."))
            args = tyro.cli(module.Args, args=flags.split())
            constants = [float(word.replace("none", "inf")) for word in cell.split(", ")]
            assert [getattr(args, name) for name in names[algorithm]] == constants
            assert args.total_timesteps == 1_000_000
            if algorithm == "ppo":
                assert args.value_epochs == args.max_epochs


# ------------------------------------------------------------------- PPO and TRPO


@pytest.fixture
def batch(tmp_path):
    """An agent and what it needs for a fit: 256 steps of Hopper with it."""

    def make(script, **options):
        torch.manual_seed(0)
        args = script.Args(env_id="Hopper-v4", num_steps=256, **options)
        env = script.make_env(args)
        agent = script.Agent(env.observation_space.shape[0], env.action_space)
        rollout, _ = script.collect(env, agent, args, None, 0, SummaryWriter(tmp_path))
        return agent, script.estimate(agent, rollout, args), args

    return make


def gaussian(mean, log_std):
    return Independent(Normal(mean, log_std.exp()), 1)


def policies(script, agent, data):
    """pi_theta and pi_k on the batch, as torch has them."""
    params = agent.policy.params
    new = gaussian(script.forward(params, data["inputs"]), params["log_std"])
    return new, gaussian(data["old_mean"], data["old_log_std"])


def test_ppo_gives_no_gradient_where_the_ratio_has_left_the_clip_as_its_advantage_wants():
    ratio = torch.tensor([0.7, 0.9, 1.1, 1.3] * 2, requires_grad=True)
    advantages = torch.tensor([1.0] * 4 + [-1.0] * 4)
    loss = ppo.ppo_loss(ratio, advantages, clip=0.2)
    loss.backward()
    moving = torch.tensor([True, True, True, False, False, True, True, True])
    torch.testing.assert_close(ratio.grad, torch.where(moving, -advantages / 8, 0.0))
    assert loss.item() == pytest.approx(-(0.7 + 0.9 + 1.1 + 1.2 - 0.8 - 0.9 - 1.1 - 1.3) / 8)


@pytest.mark.parametrize("target_kl, policy_epochs", [(1e-9, 1), (np.inf, 3)])
def test_the_target_kl_ends_the_epochs_of_ppos_policy_only(batch, target_kl, policy_epochs):
    agent, data, args = batch(ppo, max_epochs=3, value_epochs=5, target_kl=target_kl)
    kl, epochs = ppo.fit(agent, torch.tensor(3e-4), data, args)
    assert epochs == policy_epochs
    assert (
        agent.policy.steps_done == 4 * policy_epochs and agent.value.steps_done == 4 * 5
    )  # 256 / 64 each
    torch.testing.assert_close(kl, kl_divergence(*policies(ppo, agent, data)))


def test_the_fisher_product_is_one_with_the_explicit_hessian_of_the_mean_kl():
    torch.manual_seed(0)
    shapes = {"w1": (3, 4), "b1": (4,), "w2": (4, 4), "b2": (4,), "w3": (4, 2), "b3": (2,)}
    shapes["log_std"] = (2,)
    network = trpo.Network(3, 2, 1.0, loss=None)
    network.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}  # a smaller one
    theta = 0.5 * torch.randn(48).double()
    params = network.split(theta)
    params["log_std"][:] = torch.tensor([-1.0, 0.3])
    inputs = torch.randn(7, 3).double()
    old = gaussian(trpo.forward(params, inputs), params["log_std"])

    def mean_kl(theta):  # torch's own
        new = network.split(theta)
        return kl_divergence(old, gaussian(trpo.forward(new, inputs), new["log_std"])).mean()

    def our_kl(theta):
        data = {"inputs": inputs, "old_mean": old.mean, "old_log_std": params["log_std"]}
        return trpo.mean_kl(network.split(theta), data)

    far = theta + 0.3 * torch.randn(48).double()
    torch.testing.assert_close(our_kl(far), mean_kl(far))
    hessian = torch.autograd.functional.hessian(mean_kl, theta)
    assert hessian.shape == (48, 48) and torch.linalg.eigvalsh(hessian).max() > 0.1
    for vector in torch.randn(5, 48).double():
        torch.testing.assert_close(trpo.fisher_product(our_kl, theta, vector), hessian @ vector)


def quadratic():
    """F and g of a KL and an objective of which the best step is known: quadratic and linear."""
    generator = torch.Generator().manual_seed(0)
    root = torch.randn(6, 6, generator=generator).double()
    gradient = torch.randn(6, generator=generator).double()
    args = trpo.Args(delta=0.01, cg_iterations=12, damping=0.01)
    return root @ root.T, gradient, args


def test_conjugate_gradients_solve_and_end_when_they_have():
    fisher, gradient, _ = quadratic()
    x = trpo.conjugate_gradients(lambda vector: fisher @ vector, gradient, 20)
    torch.testing.assert_close(x, torch.linalg.solve(fisher, gradient), rtol=1e-3, atol=0.0)
    # After one iteration nothing is left to do: another would divide 0 by 0.
    x = trpo.conjugate_gradients(lambda vector: 2 * vector, gradient, 10)
    torch.testing.assert_close(x, gradient / 2)


def test_trpos_step_is_the_natural_gradient_as_long_as_the_trust_region_allows():
    fisher, gradient, args = quadratic()
    start = torch.ones(6).double()
    theta, share = trpo.trust_region_step(
        lambda x: gradient @ x, lambda x: (x - start) @ fisher @ (x - start) / 2, start, args
    )
    damped = fisher + args.damping * torch.eye(6).double()
    natural = torch.linalg.solve(damped, gradient)
    length = (2 * args.delta / (gradient @ natural)).sqrt()
    assert share == 1
    torch.testing.assert_close(theta - start, length * natural, rtol=1e-4, atol=1e-7)


def test_trpos_line_search_halves_the_step_until_kl_and_objective_allow_it():
    fisher, gradient, args = quadratic()
    start = torch.zeros(6).double()

    def kl(x, steep=0.0):
        return x @ fisher @ x / 2 + steep * (x @ fisher @ x) ** 2

    def objective(x, steep=0.0):
        return gradient @ x - steep * (x @ x) ** 2

    full, share = trpo.trust_region_step(objective, kl, start, args)
    assert share == 1
    # A KL of four times the quadratic one at the full step: at half of it it is below delta again.
    four_times = 3 * kl(full) / (full @ fisher @ full) ** 2
    theta, share = trpo.trust_region_step(objective, lambda x: kl(x, four_times), start, args)
    torch.testing.assert_close(theta, full / 2)
    assert share == 0.5
    # An objective that is lower than before at the full step, and higher at half of it.
    falls = 2 * gradient @ full / (full @ full) ** 2
    theta, share = trpo.trust_region_step(lambda x: objective(x, falls), kl, start, args)
    torch.testing.assert_close(theta, full / 2)
    assert share == 0.5


@pytest.mark.parametrize("slope", [0.0, np.nan])
def test_trpo_stays_where_it_is_without_a_better_place(slope):
    fisher, gradient, args = quadratic()
    start = torch.ones(6).double()
    theta, share = trpo.trust_region_step(
        lambda x: slope * gradient @ x, lambda x: (x - start) @ fisher @ (x - start), start, args
    )
    assert share == 0 and theta is start


@pytest.mark.parametrize("delta", [0.001, 0.01, 0.1])
def test_an_iteration_of_trpo_improves_the_objective_within_the_trust_region(batch, delta):
    agent, data, args = batch(trpo, max_epochs=2, delta=delta)
    kl, share = trpo.fit(agent, torch.tensor(3e-4), data, args)
    new, old = policies(trpo, agent, data)
    constraint = kl_divergence(old, new).mean()
    assert delta / 4 < constraint <= delta
    ratio = (new.log_prob(data["actions"]) - old.log_prob(data["actions"])).exp()
    gain = (ratio * data["advantages"]).mean() - data["advantages"].mean()
    assert gain > 0.5 * delta**0.5 and share > 0
    torch.testing.assert_close(kl, kl_divergence(new, old))  # what is logged: SPU's direction
    assert (
        agent.policy.steps_done == 0 and agent.value.steps_done == 4 * 2
    )  # Adam is for the values only


@pytest.mark.parametrize("script", ["benchmark/ppo_continuous", "benchmark/trpo_continuous"])
def test_ppo_and_trpo_train_resume_and_replay(script, tmp_path):
    options = ["--env-id", "Hopper-v4", *QUICK]
    run(script, *options, "--total-timesteps", 4096, cwd=tmp_path)
    folder = run_dir(tmp_path)
    said = run(script, "--resume", folder, "--total-timesteps", 6144, cwd=tmp_path).stdout
    assert torch.load(folder / "agent.pt", weights_only=True)["iterations_done"] == 3
    scalars = events(folder)
    assert [step for step, _ in scalars["spu/kl_mean"]] == [2048, 4096, 6144]
    assert all(0 < kl < 0.1 for _, kl in scalars["spu/kl_mean"])
    if "trpo" in script:
        assert [value for _, value in scalars["trpo/accepted"]] == [1, 1, 1]
    else:
        assert [value for _, value in scalars["spu/epochs_used"]] == [4, 4, 4]
    replayed = run(script, "--evaluate", folder / "agent.pt", cwd=tmp_path).stdout
    assert replayed.startswith("Hopper-v4: return") and replayed in said
