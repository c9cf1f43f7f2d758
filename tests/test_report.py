"""The report: tables and pictures from a small made-up set of runs whose right answers are known by hand."""

import importlib
import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from benchmark import report

# A score of 142 in Hopper is random and 2142 the published SPU: 0 and 1 when normalised. In Walker2d 663 and 2663.
RANDOM = "env_id,actions,episodes,mean,standard_error\n" + "".join(
    f"{env},gaussian,100,9999,1\n{env},uniform,100,{mean},1.5\n"
    for env, mean in (("Hopper-v4", 142), ("Walker2d-v4", 663))
)
SPEED = "env_id,round,spu_steps_per_second,sb3_ppo_steps_per_second,ratio,spu_memory_mb,"
SPEED += "plain_ppo_steps_per_second,ratio_to_plain,our_ppo_steps_per_second,spu_10_epochs_steps_per_second\n"
SPEED += "Pong,1,200,100,2,700,,,,\nHopper-v4,1,3000,1000,3,400,900,3.4,5500,5000\n"
SPEED += "Hopper-v4,2,3300,1000,3.3,410,900,3.7,6000,5000\n"
SPEED += "Hopper-v4,3,5000,1000,5,420,900,6,5000,5000\n"
TUNING = "script,flags,env_id,seed,return_of_last_100_episodes\n"
TUNING += "spu_linf,--probabilities --total-timesteps 300000,Hopper-v4,101,1142\n"
TUNING += "spu_linf,--total-timesteps 300000,Hopper-v4,101,642\n"
TUNING += "spu_continuous,--lam 1.3 --epsilon 0.03,Hopper-v4,102,2142\n"
TUNING += "spu_continuous,--lam 1.3 --delta 0.025,Hopper-v4,102,1142\n"
STEP = 204_800


def add(results, group, env, seed, *returns, first=1, flags="", script="spu_continuous"):
    """A run with these returns, one every STEP steps."""
    path = results / group / f"{env}__{seed}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = f"# command: python {script}.py --env-id {env} --seed {seed}{flags}\n# versions: torch 2\n# seconds: 1\n"
    rows = "".join(f"{STEP * i},{value}\n" for i, value in enumerate(returns, first))
    path.write_text(f"{header}step,return\n{rows}")


def run(folder, *options, code=0):
    command = [sys.executable, str(ROOT / "benchmark" / "report.py"), "--output", str(folder)]
    command += ["--results", str(folder / "benchmark" / "results"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def markers(*names):
    return "# Title\n\n" + "".join(
        f"{name}:\n<!-- report: {name} -->\nold\n<!-- end of report -->\n\n" for name in names
    )


@pytest.fixture(scope="module")
def made_up(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    results = folder / "benchmark" / "results"
    add(results, "trpo", "Hopper-v4", 1, 142, 900, 1142)  # normalised: 0.5
    add(results, "trpo", "Walker2d-v4", 1, 663, 1000, 1663)  # 0.5
    add(results, "sb3_ppo", "Hopper-v4", 1, 142, 800, 1642)  # 0.75
    add(results, "ppo", "Hopper-v4", 1, 142, 1000, 2142)  # 1
    add(results, "spu", "Hopper-v4", 1, 142, 1000, 1442)  # 0.65
    add(results, "spu", "Hopper-v4", 2, 2400, 1842, first=2)  # 0.85; its first episode ended later
    add(results, "spu", "Walker2d-v4", 1, 663, 2663)  # 1; a shorter run
    for seed, score in ((2, 1842), (3, 99999)):
        add(results, "spu_30_epochs", "Hopper-v4", seed, score, flags=" --max-epochs 30")
    for seed, score in enumerate((142, 1142, 1542, 18142), 1):  # 0, 0.5, 0.7, 9
        add(results, "reverse_kl", "Hopper-v4", seed, score)
    add(results, "no_kl_term", "Hopper-v4", 2, 1142)
    add(results, "no_kl_term", "Hopper-v4", 7, 99999)  # full SPU has no seed 7
    add(results, "no_dynamic_stopping", "Hopper-v4", 7, 1142)
    add(results, "no_per_state_acceptance", "Hopper-v4", 2, 1342)
    add(results, "no_per_state_acceptance", "Hopper-v4", 3, 99999)  # no_kl_term has no seed 3
    add(results, "tune_default", "Hopper-v4", 101, 1142)
    flags = " --lam 1.3 --clip-actions --delta 0.02"
    add(results, "detail_clip_actions", "Hopper-v4", 101, 642, flags=flags)
    add(results, "detail_clip_actions", "Hopper-v4", 102, 1642, flags=" --clip-actions")
    # The default has no 103.
    add(results, "detail_clip_actions", "Hopper-v4", 103, 99999, flags=" --clip-actions")
    # Longer than those in TUNING.
    add(results, "tune_linf", "Hopper-v4", 101, 9999, script="spu_linf")
    (results / "tuning.csv").write_text(TUNING)
    add(results, "sensitivity_1", "Hopper-v4", 1, 1342, flags=" --delta 0.06 --lam 1.1")
    add(results, "sensitivity_2", "Hopper-v4", 1, 1042, flags=" --delta 0.05 --lam 1.2")
    add(results, "spu_3m", "Hopper-v4", 1, 2142)
    add(results, "trpo_3m", "Hopper-v4", 1, 1142)
    add(results, "atari", "Pong", 1, -21, -20, -19, -18, -17, flags=" --total-timesteps 1024000")
    flags = " --algorithm ppo --total-timesteps 819200"
    add(results, "atari_ppo", "Breakout", 1, 2, 4, 6, 8, flags=flags)
    flags = " --lam 2 --total-timesteps 409600"
    add(results, "tune_atari_x", "Breakout", 101, 1, 3, flags=flags, script="spu_atari")
    (results / "random.csv").write_text(RANDOM)
    (results / "speed.csv").write_text(SPEED)
    (folder / "README.md").write_text(markers("scores", "averages"))
    others = "improvement ablation iqm steps_to_ppo details linf sensitivity speed atari"
    (folder / "benchmark" / "README.md").write_text(markers(*others.split()))
    run(folder)
    return folder


def table(folder, name):
    """{row: {column: cell}} and the line under the table, from the README that has it."""
    text = "".join((folder / path).read_text() for path in ("README.md", "benchmark/README.md"))
    pattern = f"<!-- report: {name} -->(.*?)<!-- end of report -->"
    content = re.search(pattern, text, re.DOTALL)[1].strip()
    content = content.replace("\u00a0", " ")  # which keep a cell on one line
    lines, _, footnote = content.partition("\n\n")
    cells = [line.strip("|").split("|") for line in lines.splitlines()]
    header, _, *rows = [[cell.strip() for cell in row] for row in cells]
    return {row[0]: dict(zip(header[1:], row[1:], strict=True)) for row in rows}, footnote


def test_scores_are_means_with_standard_errors_and_seeds(made_up):
    rows, footnote = table(made_up, "scores")
    assert list(rows) == ["Hopper", "Walker2d"]
    assert rows["Hopper"] == {
        "random": "142",
        "TRPO (1)": "1142",
        "SB3 PPO (1)": "1642",
        "our PPO (1)": "2142",
        "SPU": "1642 ± 200 (2)",  # not as many seeds in every environment
        "reverse-KL SPU (4)": "5242 ± 4310",
        "SPU as published": "2142",
    }
    assert rows["Walker2d"]["SPU"] == "2663 (1)" and rows["Walker2d"]["SB3 PPO (1)"] == "—"
    seeds = "TRPO 1, SB3 PPO 1, our PPO 1, SPU 1 to 2, reverse-KL SPU 4."
    assert f"{seeds} Steps: 204,800 to 614,400." in footnote


def test_improvement_is_the_papers_metric_over_the_environments_that_both_have(made_up):
    rows, _ = table(made_up, "improvement")
    columns = ["SPU over TRPO", "SPU over SB3 PPO", "SPU over our PPO", "SB3 PPO over TRPO"]
    columns += ["our PPO over TRPO", "reverse-KL SPU over TRPO", "SPU over TRPO at 3M steps"]
    assert {row: list(cells.values()) for row, cells in rows.items()} == {
        "Hopper-v4": [
            "+50 % (+6)",
            "+0 % (+13)",
            "-25 % (+13)",
            "+50 % (-5)",
            "+100 % (-5)",
            "+410 %",
            "+100 %",
        ],
        "Walker2d-v4": ["+100 % (+17)", "—", "—", "—", "—", "—", "—"],
        "**average**": [
            "**+75 %** (+12; of all ten +27)",  # of +6 and +17
            "**+0 %** (+13; of all ten +17)",
            "**-25 %** (+13; of all ten +17)",
            "**+50 %** (-5; of all ten +9)",
            "**+100 %** (-5; of all ten +9)",
            "**+410 %** (—)",
            "**+100 %** (+28)",
        ],
        "environments": ["2 (10)", "1 (10)", "1 (10)", "1 (10)", "1 (10)", "1 (10)", "1 (10)"],
    }
    assert list(rows["Hopper-v4"]) == columns


def test_averages_stand_beside_the_papers(made_up):
    rows, footnote = table(made_up, "averages")
    assert {row: list(cells.values()) for row, cells in rows.items()} == {
        "SPU over TRPO": ["**+75 %**", "—", "+12; of all ten +27", "2"],
        "SPU over SB3 PPO": ["**+0 %**", "—", "+13; of all ten +17", "1"],
        "SPU over our PPO": ["**-25 %**", "—", "+13; of all ten +17", "1"],
        "SB3 PPO over TRPO": ["**+50 %**", "—", "-5; of all ten +9", "1"],
        "our PPO over TRPO": ["**+100 %**", "—", "-5; of all ten +9", "1"],
        "reverse-KL SPU over TRPO": ["**+410 %**", "—", "—", "1"],
        "SPU over TRPO at 3M steps": ["**+100 %**", "—", "+28", "1"],
    }
    assert "SPU 1 to 2, TRPO 1, SB3 PPO 1" in footnote
    assert "elsewhere" not in footnote  # both are where it was tuned


def test_averages_have_an_interval_from_two_seeds_on_and_say_where_spu_was_tuned():
    scores = {"spu": {"Hopper-v4": {1: 4, 2: 8}, "Humanoid-v4": {1: 6, 2: 6}}}
    scores["trpo"] = {"Hopper-v4": {1: 2, 2: 2}, "Humanoid-v4": {1: 3, 2: 3}}
    runs = {
        group: {
            env: {seed: np.array([[STEP, score]]) for seed, score in seeds.items()}
            for env, seeds in envs.items()
        }
        for group, envs in scores.items()
    }
    published = {env: {"spu_over_trpo_pct": 6.0} for env in scores["spu"]}
    data = report.Data(runs, {}, {"Hopper-v4": 0.0, "Humanoid-v4": 0.0}, published, {}, [], {})
    text = report.averages_table(data)
    assert "| SPU over TRPO | **+150 %** | +100 % to +200 % | +6; of all ten +27 | 2 |" in text
    assert "Swimmer, Walker2d) and elsewhere, SPU is over TRPO +200 % and +100 %." in text


def test_how_far_an_iteration_moved_the_policy():
    moved = {
        "spu": {"Hopper-v4": {1: (0.01, 9.0), 2: (0.02, 8.0)}},
        "ppo": {"Hopper-v4": {3: (0.03, 10.0)}},
    }
    text = report.moved_table(report.Data({}, moved, {}, {}, {}, [], {}))
    assert "| Hopper-v4 | 0.0150 | 8.5 | 0.0300 |" in text and "(SPU: 2, our PPO: 1)" in text


def test_ablation_compares_the_same_environments_and_seeds(made_up):
    rows, _ = table(made_up, "ablation")
    assert {row: list(cells.values()) for row, cells in rows.items()} == {
        "full SPU": ["1842 (1)", "+70 %", "+27 %"],
        "no KL term": ["1142 (1)", "+0 %", "+4 %"],
        "no per-state acceptance": ["1342 (1)", "+20 %", "+9 %"],
    }


def test_interquartile_mean_and_its_interval(made_up):
    rows, footnote = table(made_up, "iqm")
    assert "SPU less our PPO: -0.17 (-0.23 to -0.10)." in footnote
    assert "On seeds 1 and 2 alone: SPU 0.83, our PPO 1.00." in footnote
    assert list(rows["reverse-KL SPU"].values()) == ["0.60", "0.00 to 9.00", "1", "4"]
    assert list(rows["SPU"].values()) == [
        "0.83",
        "—",
        "2",
        "3",
    ]  # of 0.65, 0.85 and 1; one seed of Walker2d: no interval


def test_interquartile_means_of_the_first_two_seeds_leave_out_the_third():
    curve = {score: np.array([[STEP, score]]) for score in (1.0, 2.0, 6.0)}
    runs = {
        "spu": {"Hopper-v4": {1: curve[1], 2: curve[2], 3: curve[6]}},
        "ppo": {"Hopper-v4": {1: curve[1]}},
    }
    data = report.Data(runs, {}, {"Hopper-v4": 0.0}, {"Hopper-v4": {"spu": 2.0}}, {}, [], {})
    text = report.iqm_table(data)
    assert "| SPU | 1.50 | " in text and "On seeds 1 and 2 alone: SPU 0.75, our PPO 0.50." in text


def test_steps_until_the_mean_curve_reaches_ppo(made_up):
    rows, _ = table(made_up, "steps_to_ppo")
    cells = {
        "": "1642",
        "TRPO": "—",
        "SB3 PPO": "0.61",
        "our PPO": "0.61",
        "SPU": "0.41",
        "reverse-KL SPU": "0.20",
    }
    assert rows["Hopper-v4, SB3 PPO"] == cells
    assert rows["Hopper-v4, our PPO"] == cells | {"": "2142", "SB3 PPO": "—", "SPU": "—"}


def test_details_sensitivity_and_speed(made_up):
    rows, _ = table(made_up, "details")
    assert {row: list(cells.values()) for row, cells in rows.items()} == {
        "**the default**": ["1142, 2142", "—"],
        "`--clip-actions`": ["642, 1642, 99999", "-33 % (2)"],
        "`--delta 0.025`": ["1142", "-50 % (1)"],
    }
    rows, _ = table(made_up, "linf")
    assert {row: list(cells.values()) for row, cells in rows.items()} == {
        "**the default**": ["9999", "—"],
        "`--probabilities --total-timesteps 300000`": ["1142", "+100 % (1)"],
        "`--total-timesteps 300000`": ["642", "—"],
    }
    rows, footnote = table(made_up, "sensitivity")
    assert rows == {
        "`--delta 0.05 --lam 1.2`": {"Hopper-v4": "1042 (1)", "over TRPO": "-10 %"},
        "`--delta 0.06 --lam 1.1`": {"Hopper-v4": "1342 (1)", "over TRPO": "+20 %"},
    }
    assert footnote.startswith("1 of 2 beat TRPO; 75 % reach at least -10 %, 50 % at least +20 %.")
    rows, footnote = table(made_up, "speed")
    assert {row: list(cells.values()) for row, cells in rows.items()} == {
        "Pong, 9 epochs, SB3 too": ["200", "2 (2 to 2)", "—", "—", "1"],
        "Hopper-v4, 10 epochs (the default)": [
            "5000",
            "5 (5 to 5)",
            "5.6 (5.6 to 5.6)",
            "0.91 (0.83 to 1)",
            "3",
        ],
        "Hopper-v4, 30 epochs": [
            "3300",
            "3.3 (3 to 5)",
            "3.7 (3.3 to 5.6)",
            "0.55 (0.55 to 1)",
            "3",
        ],
    }
    assert "Pong 700 MB, Hopper-v4 420 MB" in footnote


@pytest.mark.parametrize("script", report.DEFAULTS)
def test_the_defaults_of_the_tuning_tables_are_the_scripts(script):
    for flag, value in map(str.split, report.DEFAULTS[script]):
        args = importlib.import_module(script).Args()
        assert getattr(args, flag.removeprefix("--").replace("-", "_")) == float(value)


def test_atari_runs_have_a_row_each(made_up):
    text = (made_up / "benchmark" / "README.md").read_text().split("<!-- report: atari -->")[1]
    assert [line for line in text.splitlines() if line.startswith("| ")][2:] == [
        "| Pong | SPU | 1 | 1,024,000 | -21.0 | -20.0 | -19.0 | -18.0 | -17.0 |",
        "| Breakout | SB3 PPO | 1 | 819,200 | 2.0 | 2.0 | 4.0 | 6.0 | 8.0 |",
        "| Breakout | SPU `--lam 2` | 101 | 409,600 | 1.0 | 1.0 | 1.0 | 3.0 | 3.0 |",
    ]


def test_pictures_are_drawn_and_small(made_up):
    curves = ("learning_curves", "learning_curves_small", "learning_curves_atari")
    for name in (*curves, "sensitivity"):
        path = made_up / "benchmark" / "results" / f"{name}.png"
        assert path.stat().st_size < 300_000
        pixels = np.array(Image.open(path).convert("RGB")).reshape(-1, 3)
        spu = [int(report.ALGORITHMS["spu"][1][i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - spu).max(1) < 12).sum() > 100, name  # a line in SPU's colour


def test_a_second_report_changes_nothing_and_check_sees_a_new_run(made_up):
    before = (made_up / "README.md").read_text()
    assert before.startswith("# Title\n\nscores:\n<!-- report: scores -->\n\n|")
    assert "old" not in before
    run(made_up, "--check")
    added = made_up / "benchmark" / "results" / "spu" / "Walker2d-v4__2.csv"
    add(added.parent.parent, "spu", "Walker2d-v4", 2, 663)
    try:
        assert "README.md is out of date" in run(made_up, "--check", code=1).stderr
        assert (made_up / "README.md").read_text() == before
    finally:
        added.unlink()


def test_without_runs_there_are_no_tables_and_no_pictures(tmp_path):
    (tmp_path / "benchmark" / "results").mkdir(parents=True)
    (tmp_path / "README.md").write_text(markers(*report.TABLES))
    run(tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert text.count("There are no runs for this table yet.") == len(report.TABLES)
    assert not list(tmp_path.rglob("*.png"))
    (tmp_path / "README.md").write_text(markers("score"))
    (line,) = run(tmp_path, code=2).stderr.splitlines()
    assert line.startswith(
        "report.py: README.md: There is no table score: the tables are front, scores, averages, improvement"
    )


def test_the_pure_functions():
    assert report.iqm(np.array([100, 5, 0, 1, 2, 6, 3, 4])) == 3.5  # of 2, 3, 4, 5
    low, high = report.interval(report.iqm, [np.array([1.0, 1.0]), np.array([3.0])])
    # What is drawn again is the seeds of an environment, not the environments.
    assert low == high == 5 / 3
    random = {"a": 10.0, "b": 0.0, "c": 5.0}
    x, y = {"a": {1: 30, 2: 50}, "b": {1: 5}, "c": {1: 9}}, {"a": {3: 20}, "b": {1: -1}}
    # No percentage of b, where y is worse than random.
    assert report.improvement(x, y, random) == {"a": 2.0}
    assert report.shared(x, {"a": {2: 0}, "b": {2: 0}}) == {"a": {2: 50}}
    x, y = {"a": {1: 4, 2: 8}, "b": {1: 6, 2: 6}}, {"a": {1: 2, 2: 2}, "b": {1: 3, 2: 3}}
    bounds = report.improvement_interval(x, y, {"a": 0.0, "b": 0.0}, ["a", "b"])
    assert bounds.tolist() == [1, 2]  # +100 to +300 % in a, +100 % in b
    curves = [
        np.array([[10, 0.0], [20, 10], [40, 30]]),
        np.array([[20, 20.0], [30, 20], [40, 40], [50, 90]]),
    ]
    steps, returns = report.align(curves)
    assert steps.tolist() == [20, 30, 40] and returns.tolist() == [[10, 20, 30], [20, 20, 40]]
    assert report.steps_to(20, curves) == 30 and report.steps_to(36, curves) is None
    text = markers("one", "two")
    filled = report.fill(text, {"one": "1", "two": r"2 \1"})
    assert filled == report.fill(filled, {"one": "1", "two": r"2 \1"}) != text
    assert "one:\n<!-- report: one -->\n\n1\n\n<!-- end" in filled
    assert "\n\n2 \\1\n\n<!-- end" in filled
    with pytest.raises(ValueError, match="There is no table two: the tables are one"):
        report.fill(text, {"one": "1"})
    first_open = text.replace(report.END, "", 1) + report.END
    last_open = text.rstrip().removesuffix(report.END)
    for broken in (first_open, last_open):
        with pytest.raises(ValueError, match="end of report"):
            report.fill(broken, {"one": "1", "two": "2"})


def test_the_tables_in_the_readmes_are_those_of_the_committed_runs():
    command = [sys.executable, str(ROOT / "benchmark/report.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_peers_refuse_an_unknown_environment_or_say_what_is_missing():
    options = ["--algorithm", "ppo", "--env-id", "nonsense"]
    command = [sys.executable, str(ROOT / "benchmark/peers.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 2
    assert "nonsense cannot be made" in line or "pip install -r benchmark/req" in line
