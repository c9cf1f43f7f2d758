"""What the READMEs claim: their code runs, their commands parse, their links and test names exist."""

import csv
import importlib
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, environment, run, run_dir

README = (ROOT / "README.md").read_text()
BENCHMARK = (ROOT / "benchmark" / "README.md").read_text()
PAPER = (ROOT / "benchmark" / "PAPER.md").read_text()


def blocks(language, text=README):
    return re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)


def python_block(name):
    (block,) = [block for block in blocks("python") if block.startswith(f"# {name}\n")]
    return block


def commands(text):
    """Every command line of the bash blocks, without comments."""
    joined = "\n".join(blocks("bash", text)).replace("\\\n", " ")
    return [
        line.split("#")[0].strip() for line in joined.splitlines() if line.split("#")[0].strip()
    ]


def test_the_example_environment_is_learnt(tmp_path):
    (tmp_path / "my_env.py").write_text(python_block("my_env.py"))
    (line,) = [line for line in commands(README) if "my_env" in line]
    options = shlex.split(line)[2:]
    said = run(
        "spu_continuous", *options, "--no-compile", cwd=tmp_path, PYTHONPATH=str(tmp_path)
    ).stdout
    assert float(re.search(r"return (-?[\d.]+) ±", said).group(1)) > -5


def test_the_example_program_plays_an_agent_as_its_script_does(tmp_path):
    (tmp_path / "replay.py").write_text(python_block("replay.py"))
    line, extra = [sys.executable, tmp_path / "replay.py"], environment(PYTHONPATH=str(ROOT))
    done = subprocess.run(line, cwd=ROOT, env=extra, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    agent = ROOT / "benchmark" / "agents" / "Walker2d-v4.pt"
    options = ["--evaluate", agent, "--seed", 1, "--eval-episodes", 1]
    said = run("spu_continuous", *options, cwd=tmp_path).stdout
    assert float(done.stdout.split()[1]) == pytest.approx(
        float(re.search(r"return (\S+)", said).group(1)), abs=0.1
    )


def test_the_wider_network_has_the_sizes_of_the_recipe_and_trains(tmp_path):
    (line,) = [line for line in commands(README) if "spu_wide" in line]
    shutil.copy(ROOT / "spu_continuous.py", tmp_path)
    subprocess.run(line, shell=True, check=True, cwd=tmp_path)
    options = ["--env-id", "InvertedPendulum-v4", "--total-timesteps", "2048", "--no-compile"]
    train = [sys.executable, "spu_wide.py", *options, "--eval-episodes", "1"]
    subprocess.run(train, cwd=tmp_path, env=environment(), check=True, timeout=100)
    agent = torch.load(run_dir(tmp_path) / "agent.pt", weights_only=True)["agent"]
    size = 4 * 256 + 256 + 256 * 128 + 128 + 128 * 1 + 1  # observations are 4 numbers
    assert len(agent["value.vector"]) == size and len(agent["policy.vector"]) == size + 1
    assert agent["value.steps_done"] == 10 * 2048 / 64


def test_cartpole_is_balanced_after_the_changes_of_the_recipe(tmp_path):
    (tmp_path / "cartpole.py").write_text(python_block("cartpole.py"))
    *functions, line = python_block("spu_discrete.py").partition("\n")[2].strip().split("\n\n\n")
    script = (ROOT / "spu_continuous.py").read_text()
    for function in functions:
        name = re.match(r"def (\w+)\(", function).group(1)
        script, found = re.subn(rf"def {name}\(.*?\n\n\n", f"{function}\n\n\n", script, flags=re.S)
        assert found == 1
    script, found = re.subn(r"noise = \(.*", line, script)
    assert found == 1
    (tmp_path / "spu_discrete.py").write_text(script)
    (command,) = re.findall(r"`python (spu_discrete.py .*?)`", README)
    words = [sys.executable, *command.split(), "--no-compile"]
    extra = {"env": environment(PYTHONPATH=str(tmp_path)), "cwd": tmp_path}
    done = subprocess.run(words, **extra, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"return (\S+) ±", done.stdout).group(1)) > 400


def test_the_papers_configuration_is_the_command_of_its_page(tmp_path):
    (line,) = [line for line in commands(PAPER) if "--joint-stopping" in line]
    options = [*shlex.split(line)[2:], "--no-compile", "--eval-episodes", 1]
    options[options.index("--env-id") + 1] = "HumanoidStandup-v4"  # its actions are within 0.4
    run("spu_continuous", *options, "--total-timesteps", 2048, cwd=tmp_path)
    saved = torch.load(run_dir(tmp_path) / "agent.pt", weights_only=True)
    args, agent = saved["args"], saved["agent"]
    assert (args["lam"], args["epsilon"], args["max_epochs"]) == (1.3, 0.05, 30)
    assert args["delta"] == pytest.approx(0.05 / 1.2, rel=1e-5)
    assert args["initial_log_std"] == 0 and not args["bootstrap_truncation"]
    assert (agent["action_scale"] == 1).all()  # raw actions
    assert agent["policy.steps_done"] == agent["value.steps_done"]  # joint stopping


def test_the_two_losses_are_those_of_the_scripts():
    generator = torch.Generator().manual_seed(0)
    kl, A, ratio = torch.rand(3, 100, generator=generator) + torch.tensor([[0], [-0.5], [0.5]])
    names = {
        "torch": torch,
        "kl": kl,
        "A": A,
        "ratio": ratio,
        "epsilon": 0.4,
        "lam": 1.3,
        "clip": 0.2,
    }
    exec(python_block("the two losses"), names)
    assert names["spu_loss"] == importlib.import_module("spu_continuous").spu_loss(
        kl, ratio, A, 1.3, 0.4
    )
    assert names["ppo_loss"] == importlib.import_module("benchmark.ppo_continuous").ppo_loss(
        ratio, A, 0.2
    )


def test_the_returns_under_the_pictures_are_those_of_the_agents():
    with open(ROOT / "benchmark" / "agents" / "agents.csv") as file:
        scores = {row["task"]: float(row["evaluation"]) for row in csv.DictReader(file)}
    tasks = ("Walker2d-v4", "Ant-v4", "HalfCheetah-v4", "Pong", "Breakout")
    shown = [scores[task] for task in tasks]
    said = re.search(r"Mean returns of \[these agents\].* over 10 episodes: (.*)\.\n", README)[1]
    numbers = re.findall(r"\d+\.?\d*", said)
    assert numbers == [f"{score:.4g}" for score in shown]


def test_every_python_block_is_one_of_the_tested_ones():
    assert len(blocks("python")) == 5 and not blocks("python", BENCHMARK + PAPER)


@pytest.mark.parametrize("line", sorted({*commands(README), *commands(BENCHMARK + PAPER)}))
def test_a_command_names_files_and_options_that_exist(line):
    words = shlex.split(line.replace("{}", "1"))
    if ">" in words:  # what follows is written
        words = words[: words.index(">")]
    for word in words:
        if word.endswith((".py", ".txt")) and not word.startswith("runs/"):
            assert (ROOT / word).exists(), word
    scripts = [word for word in words if re.fullmatch(r"spu_\w+\.py", word)]
    if scripts and words[0] != "diff":
        fields = importlib.import_module(scripts[0][:-3]).Args.__dataclass_fields__
        after = words[words.index(scripts[0]) + 1 :]
        for option in (word[2:].replace("-", "_") for word in after if word.startswith("--")):
            assert option in fields or option.removeprefix("no_") in fields, option


@pytest.mark.parametrize(
    "where, text", [(ROOT, README), (ROOT / "benchmark", BENCHMARK), (ROOT / "benchmark", PAPER)]
)
def test_links_and_test_names_exist(where, text):
    for label, link in re.findall(r"\[([^\]]*)\]\(([^)]+)\)", text):
        if not link.startswith("https://"):
            path, _, place = link.partition("#")
            assert (where / path).exists(), link
            there = (where / path).read_text() if path and place else text
            if re.fullmatch(r"L\d+", place):  # a function's own line, or a comment's
                name = label.strip("`")
                start = (
                    "def test_"
                    if label == "test"
                    else name
                    if name.startswith("#")
                    else f"def {name}("
                )
                assert there.splitlines()[int(place[1:]) - 1].lstrip().startswith(start), link
            elif place:
                headings = [
                    re.sub(r"[^\w\- ]", "", heading)
                    for heading in re.findall(r"^#+ (.*)$", there, re.M)
                ]
                assert place in [
                    heading.strip().lower().replace(" ", "-") for heading in headings
                ], link
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in tests, name


@pytest.mark.parametrize("script", ["spu_continuous", "spu_atari", "spu_linf", "spu_reverse_kl"])
def test_help_reads_well_at_80_columns(script, tmp_path):
    said = run(script, "--help", cwd=tmp_path, COLUMNS="80").stdout
    assert max(len(line) for line in said.splitlines()) <= 80
    module = importlib.import_module(script)
    for field in module.Args.__dataclass_fields__:
        assert f"--{field.replace('_', '-')}" in said
