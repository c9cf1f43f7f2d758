"""The report: tables and pictures from a small made-up set of runs whose right answers are known by hand."""

import re
import subprocess
import sys

import numpy as np
import pytest
from conftest import ROOT
from PIL import Image

from benchmark import report

# A score of 142 in Hopper is random and 2142 the published SPU: 0 and 1 when normalised. In
# Walker2d 663 and 2663; in Swimmer, which is held out, 8.4 and 108.4.
RANDOM = "env_id,actions,episodes,mean,standard_error\n" + "".join(
    f"{env},gaussian,100,9999,1\n{env},uniform,100,{mean},1.5\n"
    for env, mean in (
        ("Hopper-v4", 142),
        ("Walker2d-v4", 663),
        ("Swimmer-v4", 8.4),
        ("HalfCheetah-v4", 111),
        ("Humanoid-v4", -201),
        ("Reacher-v4", -16.1),
        ("Pong", -21),
        ("Breakout", 1),
        ("Qbert", 0),
        ("Enduro", 0),
    )
)
SPEED = "env_id,round,program,epochs,steps_per_second,memory_mb\n"
SPEED += (
    "Pong,1,spu,9,200,700\nPong,1,sb3_ppo,9,100,\nPong,1,spu,4,512,650\nPong,1,sb3_ppo,4,128,\n"
)
for number, (spu_30, our_ppo) in enumerate([(3000, 5500), (3300, 6000), (5000, 5000)], start=1):
    SPEED += f"Hopper-v4,{number},spu,10,5000,\nHopper-v4,{number},sb3_ppo,10,1000,\n"
    SPEED += f"Hopper-v4,{number},plain_ppo,10,900,\nHopper-v4,{number},our_ppo,10,{our_ppo},\n"
    SPEED += f"Hopper-v4,{number},spu,30,{spu_30},{400 + 10 * number}\n"
UNITS = "algorithm,units,seed,return\n" + "".join(
    f"{algorithm},{units},{seed},{-seed * score}\n"
    for seed in (1, 2)
    for algorithm, units, score in (
        ("SPU", "Plain", 2), ("random", "Plain", 20), ("SPU", "RewardLarge", 4)
    )
)  # fmt: skip
AGENTS = """task,script,seed,seeds,training_score,evaluation
Hopper-v4,spu_continuous.py,2,3,1842.0,1950.5
Pong,spu_atari.py,1,1,20.04,19.6
"""
STEP = 204_800


def add(
    results, group, env, seed, *returns, first=1, flags="", kl=0.01, header="", kind="reported"
):
    """A run with these returns, one every STEP steps."""
    path = results / kind / group / f"{env}__{seed}.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    header = f"# command: python x.py --env-id {env} --seed {seed}{flags}\n# commit: abc\n{header}"
    rows = "".join(f"{STEP * i},{value},{kl}\n" for i, value in enumerate(returns, first))
    path.write_text(f"{header}step,return,kl\n{rows}")


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
    add(results, "trpo", "Hopper-v4", 2, 142, 900, 1142)
    add(results, "trpo", "Walker2d-v4", 1, 663, 1000, 1663)  # 0.5
    add(results, "trpo", "Swimmer-v4", 1, 8.4, 10, 48.4)  # 0.4
    add(results, "ppo", "Hopper-v4", 1, 142, 1000, 2142, kl=0.09)  # 1
    add(results, "ppo", "Hopper-v4", 7, 142, 1000, 99999)  # SPU has no seed 7
    add(results, "spu", "Hopper-v4", 1, 142, 1000, 1442)  # 0.65
    add(results, "spu", "Hopper-v4", 2, 2400, 1842, first=2)  # 0.85; its first episode ended later
    add(results, "spu", "Hopper-v4", 3, 142, 142, 99999)  # TRPO has no seed 3
    add(results, "spu", "Walker2d-v4", 1, 663, 2663)  # 1; a shorter run
    add(results, "spu", "Swimmer-v4", 1, 8.4, 88.4)  # 0.8
    for seed, score in enumerate((142, 1142, 1542, 18142, 1342), 1):  # 0, 0.5, 0.7, 9, 0.6
        add(results, "reverse_kl", "Hopper-v4", seed, score)
    add(results, "no_kl_term", "Hopper-v4", 2, 1142)
    add(results, "no_kl_term", "Hopper-v4", 7, 99999)  # full SPU has no seed 7
    add(results, "no_delta", "Hopper-v4", 7, 1142)
    add(results, "no_epsilon", "Hopper-v4", 2, 1342)
    add(results, "no_epsilon", "Hopper-v4", 3, 99999)  # no_kl_term has no seed 3
    for number, score in enumerate((1342, 1042, 1242, 1642), 1):
        add(results, f"sensitivity_paper_{number}", "Hopper-v4", 1, score)
    add(results, "pong_spu", "Pong", 1, -21, -3, 18.5, 17, 20)
    add(results, "pong_ppo", "Pong", 1, -21, -20, -3, 0.5, 3)
    add(results, "pong_ppo", "Pong", 2, -21, -20)
    add(results, "pong_processes", "Pong", 1, -21, -2)
    add(results, "pong_without_games", "Pong", 1, -21, -19, -9)
    numbers = "# seconds: 9, sittings: 1, episodes: {}\n# evaluation: {}\n"
    add(results, "games_spu", "Breakout", 1, 1, 41, header=numbers.format(300, 44.5))
    add(results, "games_ppo", "Breakout", 1, 1, 21, header=numbers.format(400, -2))
    add(results, "games_spu", "Qbert", 1, 96)
    add(results, "games_ppo", "Qbert", 1, 100)
    add(results, "games_spu", "Enduro", 1, 94)
    add(results, "games_ppo", "Enduro", 1, 100)
    add(results, "sb3_ppo", "Hopper-v4", 7, 142, 1000, 1442)
    add(results, "sb3_trpo", "Hopper-v4", 1, 142, 1142)  # 0.5
    add(results, "trpo_check_3", "Hopper-v4", 1, 142, 1262)  # 0.56, 12 % more
    add(results, "trpo_check_3", "Hopper-v4", 2, 142, 99999)  # sb3-contrib's has no seed 2
    add(results, "sb3_trpo", "Walker2d-v4", 1, 1663)  # 0.5
    add(results, "trpo_check_6", "Walker2d-v4", 1, 1163)  # 0.25, half of it
    middle = {"Hopper": 1142, "Walker2d": 1663, "HalfCheetah": 1111, "Humanoid": 299}
    for task, score in (middle | {"Reacher": -11.1}).items():  # normalised: 0.5
        add(results, "spu_1", f"{task}-v4", 101, score, kind="tuning")
    add(results, "spu_1", "Hopper-v4", 102, 2142, kind="tuning")  # 1, so that Hopper has 0.75
    add(results, "spu_1", "Humanoid-v4", 102, 799, kind="tuning")
    add(results, "trpo_2", "Hopper-v4", 101, 142, kind="tuning")
    add(results, "screen_floor", "Hopper-v4", 101, 642, kind="tuning")
    add(results, "pong_ppo_512", "Pong", 101, -21, 5.4, kind="tuning")
    atari = results / "tuning" / "atari"
    atari.mkdir()
    (atari / "pong_spu_delta_02.csv").write_text("# x\nstep,return\n1000,18.2\n2000,19\n")
    (atari / "breakout_spu_delta_02.csv").write_text("# x\nstep,return\n1000,17\n")
    (results / "robustness.csv").write_text(UNITS)
    (results / "random.csv").write_text(RANDOM)
    (results / "speed.csv").write_text(SPEED)
    (folder / "benchmark" / "agents").mkdir()
    (folder / "benchmark" / "agents" / "agents.csv").write_text(AGENTS)
    (folder / "README.md").write_text(markers("scores", "improvement"))
    others = [name for name in report.TABLES if name not in ("scores", "improvement")]
    (folder / "benchmark" / "README.md").write_text(markers(*others))
    run(folder)
    return folder


def table(folder, name):
    """The rows of cells, and the line under the table, from the README that has it."""
    text = "".join((folder / path).read_text() for path in ("README.md", "benchmark/README.md"))
    pattern = f"<!-- report: {name} -->(.*?)<!-- end of report -->"
    content = re.search(pattern, text, re.DOTALL)[1].strip()
    content = content.replace("\u00a0", " ")  # which keep a cell on one line
    lines, _, footnote = content.partition("\n\n")
    cells = [line.strip("|").split("|") for line in lines.splitlines()]
    header, _, *rows = [[cell.strip() for cell in row] for row in cells]
    assert all(len(row) == len(header) for row in rows)
    return [header, *rows], footnote


def test_our_trpo_is_compared_with_the_librarys_on_shared_seeds(made_up):
    rows, footnote = table(made_up, "trpo_check")
    assert rows[1:] == [["Hopper", "1142", "1262", "+12 %"], ["Walker2d", "1663", "1163", "-50 %"]]
    assert "within 20 % in 1 of 2 tasks" in footnote


def test_scores_are_means_with_standard_errors_and_the_best_is_bold(made_up):
    rows, footnote = table(made_up, "scores")
    assert rows == [
        ["`-v4`", "random", "TRPO", "PPO", "SPU", "reverse-KL SPU", "SPU in the paper"],
        [
            "Hopper",
            "142",
            "1142<br>± 0",
            "**51070<br>± 48928**",
            "34428<br>± 32786",
            "4462<br>± 3428",
            "2142",
        ],
        ["Swimmer", "8.4", "48.4", "—", "**88.4**", "—", "108.4"],
        ["Walker2d", "663", "1663", "—", "**2663**", "—", "2663"],
    ]
    seeds = "TRPO 1 to 2, PPO 2, SPU 1 to 3, reverse-KL SPU 5."
    assert f"{seeds} Steps: 204,800 to 614,400." in footnote


def test_improvement_is_the_papers_metric_on_shared_tasks_and_seeds(made_up):
    rows, _ = table(made_up, "improvement")
    assert rows[1:] == [
        # Hopper (1642 - 142) / 1000 - 1, Walker2d +100 %, Swimmer +100 %; the paper has 6, 17 and 3
        ["SPU over TRPO", "**1.00**", "3 of 3", "+100 %", "+83 %", "+75 to +100 %",
         "+75 %<br>(+12 %)", "+100 %<br>(+3 %)", "+27 %", "1 to 2"],
        # seed 1 alone: 1300 / 2000 - 1
        ["SPU over PPO", "**0.00**", "0 of 1", "-35 %", "-35 %", "—", "-35 %<br>(+13 %)", "—",
         "+17 %", "1"],
        ["PPO over TRPO", "**1.00**", "1 of 1", "+100 %", "+100 %", "—", "+100 %<br>(-5 %)", "—",
         "+9 %", "1"],
        ["reverse-KL SPU over TRPO", "**0.25**", "0 of 1", "-50 %", "-50 %", "—", "-50 %", "—", "—", "2"],
    ]  # fmt: skip


def test_from_five_seeds_on_an_improvement_has_an_interval_and_other_levers_have_a_mark():
    scores = {"spu_paper": (700, 800, 800, 800, 900), "ppo": (400,) * 5}
    runs = {
        group: {"Hopper-v4": {seed: np.array([[STEP, x, 0.01]]) for seed, x in enumerate(numbers)}}
        for group, numbers in scores.items()
    }
    published = {"Hopper-v4": {"spu": 2000.0, "spu_over_ppo_pct": 7.0}}
    data = report.Data(runs, {}, {"Hopper-v4": 0.0}, published, [], [])
    (line,) = [x for x in report.improvement_table(data).splitlines() if x.startswith("| SPU")]
    title, chance, won, median, average, *_ = [cell.strip() for cell in line.strip("|").split("|")]
    assert title == "SPU, the paper's configuration over PPO (†)"
    assert (chance, won, median) == ("**1.00**<br>1.00 to 1.00", "1 of 1", "+100 %")
    middle, low, high = re.fullmatch(r"(\S+) %<br>(\S+) to (\S+) %", average).groups()
    assert middle == "+100" and 80 <= int(low) < 100 < int(high) <= 120


def test_interquartile_means_have_an_interval_from_five_seeds_on(made_up):
    rows, _ = table(made_up, "iqm")
    cells = {row[0]: row[1:] for row in rows[1:]}
    assert cells["TRPO"] == ["0.50", "—", "3", "4"]  # of 0.5, 0.5, 0.5 and 0.4
    mean, bounds, *numbers = cells["reverse-KL SPU"]
    assert (mean, numbers) == ("0.60", ["1", "5"])  # of 0.5, 0.6 and 0.7
    low, high = map(float, bounds.split(" to "))
    assert 0 <= low < 0.5 and 0.7 < high <= 9


def test_ablation_compares_the_same_tasks_and_seeds(made_up):
    rows, footnote = table(made_up, "ablation")
    assert rows == [
        ["", "Hopper", "over TRPO", "the paper"],
        ["full SPU", "1842", "+70 %", "+27 %"],
        ["no KL in the loss", "1142", "+0 %", "+4 %"],
        ["no acceptance (`--epsilon inf`)", "1342", "+20 %", "+9 %"],
    ]
    assert footnote.endswith("Seeds: 1.")


def test_sensitivity_and_speed(made_up):
    rows, _ = table(made_up, "sensitivity")
    assert rows[1:] == [
        ["the paper's", "3 of 4", "-10 %", "+10 %", "+20 %", "+50 %"],
        ["in the paper (10 tasks)", "100 of 100", "—", "+18 %", "+21 %", "—"],
    ]
    rows, footnote = table(made_up, "speed")
    assert rows[1:] == [
        ["Pong, 9 epochs", "200", "2 (2 to 2)", "—", "—", "1"],
        ["Pong, 4 epochs (the default)", "512", "4 (4 to 4)", "—", "—", "1"],
        ["Hopper-v4, 10 epochs (the default)", "5000", "5 (5 to 5)", "5.6 (5.6 to 5.6)", "0.91 (0.83 to 1)", "3"],
        ["Hopper-v4, 30 epochs", "3300", "3.3 (3 to 5)", "3.7 (3.3 to 5.6)", "0.55 (0.55 to 1)", "3"],
    ]  # fmt: skip
    assert "Pong 650 MB, Hopper-v4 430 MB" in footnote


def test_atari_tables(made_up):
    rows, footnote = table(made_up, "pong")
    assert "takes 20 minutes to 18" in footnote  # 614,400 steps at 512 a second
    assert rows[1:] == [
        ["1", "SPU", "614,400", "614,400", "20.0", "1,024,000"],
        ["1", "SPU, 2 processes", "—", "—", "-2.0", "409,600"],
        ["1", "PPO", "819,200", "—", "3.0", "1,024,000"],
        ["2", "PPO", "—", "—", "-20.0", "409,600"],
    ]
    rows, _ = table(made_up, "without")
    assert rows[1:] == [
        ["nothing: the default", "18.5", "614,400", "614,400"],
        ["32 games (8 × 256 steps, minibatches of 512 instead)", "-9.0", "—", "614,400"],
    ]
    rows, footnote = table(made_up, "games")
    assert rows[1:] == [
        ["Breakout", "1.0", "21.0", "41.0", "+100 %", "-2.0 / 44.5", "400 / 300", "1", "409,600"],
        ["Enduro", "0.0", "100", "94.0", "-6 %", "— / —", "— / —", "1", "204,800"],
        ["Pong", "-21.0", "3.0", "20.0", "+71 %", "— / —", "— / —", "1", "1,024,000"],
        ["Qbert", "0.0", "100", "96.0", "-4 %", "— / —", "— / —", "1", "204,800"],
    ]
    assert (
        "SPU wins 2, ties (within 5%) 1 and loses 1 of the 4 games in which PPO beats random"
        in footnote
    )
    assert "the median is +33 %, the mean +40 %" in footnote


def test_the_tables_of_the_protocol(made_up):
    rows, _ = table(made_up, "constants")
    assert [row[0] for row in rows] == ["setting", "**`spu_1`**", "`trpo_2`"]
    assert rows[1][1:] == ["1111", "1142, 2142", "299, 799", "-11.1", "1663", "**0.60**", "0.56"]
    assert rows[2][1:] == ["—", "142", "—", "—", "—", "—", "—"]  # no average without all tasks
    rows, _ = table(made_up, "levers")
    assert rows[1][:3] == ["`screen_floor`", "—", "642"]
    rows, _ = table(made_up, "tuning_atari")
    assert rows[1:] == [
        ["**SPU, δ 0.02, ε 0.06**", "19.0", "1,000", "17.0"],
        ["PPO, the step size follows 0.02, clip 0.2, minibatch 512 (`pong_ppo_512`)", "5.4", "—", "—"],
    ]  # fmt: skip


def test_one_task_in_many_units(made_up):
    rows, footnote = table(made_up, "units")
    assert rows[0] == ["units", "random", "SPU"] and len(rows) == 10
    assert rows[1] == ["the task's own", "-30.0", "-3.0"]
    assert rows[9] == ["rewards × 1e4", "—", "-6.0"] and footnote.endswith("Seeds: 2.")


def test_the_table_of_agents_has_seed_and_scores(made_up):
    (_, hopper, pong), footnote = table(made_up, "agents")
    assert hopper == ["[Hopper-v4](agents/Hopper-v4.pt)", "2 of 3", "1842", "1950"]
    assert pong == ["[Pong](agents/Pong.pt)", "1", "20.0", "19.6"]
    assert "median seed" in footnote


def test_pictures_are_drawn_and_small(made_up):
    names = ["learning_curves", "learning_curves_variants", "learning_curves_atari"]
    for name in [*names, "improvement", "minutes", "sensitivity"]:
        path = made_up / "benchmark" / "pictures" / f"{name}.png"
        assert path.stat().st_size < 300_000
        pixels = np.array(Image.open(path).convert("RGB")).reshape(-1, 3)
        color = "#6db3e0" if name == "sensitivity" else report.ALGORITHMS["spu"][1]
        spu = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
        assert (np.abs(pixels - spu).max(1) < 12).sum() > 50, name  # SPU's colour is in it


def test_the_picture_of_the_kl_has_both_algorithms(tmp_path):
    curve = np.array([[STEP * i, 1.0, 0.02] for i in range(1, 40)])
    runs = {group: {"Hopper-v4": {1: curve}} for group in ("spu", "ppo")}
    report.draw_kl(report.Data(runs, {}, {}, {}, [], []), tmp_path / "kl.png")
    assert (tmp_path / "kl.png").stat().st_size > 3000
    report.draw_kl(report.Data({"spu": runs["spu"]}, {}, {}, {}, [], []), tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_a_second_report_changes_nothing_and_check_sees_a_new_run(made_up):
    before = (made_up / "README.md").read_text()
    assert before.startswith("# Title\n\nscores:\n<!-- report: scores -->\n\n|")
    assert "old" not in before.replace("bold", "").replace("held-out", "")
    run(made_up, "--check")
    results = made_up / "benchmark" / "results"
    add(results, "spu", "Walker2d-v4", 2, 663)
    try:
        assert "README.md is out of date" in run(made_up, "--check", code=1).stderr
        assert (made_up / "README.md").read_text() == before
    finally:
        (results / "reported" / "spu" / "Walker2d-v4__2.csv").unlink()


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
        "report.py: README.md: There is no table score: the tables are scores, improvement"
    )


def test_the_pure_functions():
    assert report.iqm(np.array([100, 5, 0, 1, 2, 6, 3, 4])) == 3.5  # of 2, 3, 4, 5
    low, high = report.interval(report.iqm_of, [np.array([1.0, 1.0]), np.array([3.0])])
    # What is drawn again is the seeds of a task, not the tasks.
    assert low == high == 5 / 3
    random = {"a": 10.0, "b": 0.0, "c": 5.0}
    x, y = (
        {"a": {1: 30, 2: 50, 3: 99}, "b": {1: 5}, "c": {1: 9}},
        {"a": {1: 20, 2: 20}, "b": {1: -1}},
    )
    # Not seed 3, which y has not; and no percentage of b, where y is worse than random.
    assert report.improvement(x, y, random) == {"a": 2.0}
    assert report.shared(x, {"a": {2: 0}, "b": {2: 0}}) == {"a": {2: 50}}
    # 2 beats 1, ties with 2, and loses to 3: half of the pairs; the second task is won.
    chance = report.probability_of_improvement
    x, y = [np.array([2.0]), np.array([5.0])], [np.array([1.0, 2.0, 3.0]), np.array([4.0])]
    assert chance(x, y) == 0.75
    assert report.interval(chance, [np.ones(5)], [np.zeros(5)]).tolist() == [1, 1]
    # +50 % and -25 %, on average +12.5 %; and with leading axes, as the bootstrap draws them.
    x, y = [np.array([1.0, 2.0]), np.array([3.0])], [np.array([1.0]), np.array([4.0])]
    assert report.mean_improvement(x, y) == 0.125
    assert report.mean_improvement([np.ones((7, 2))], [np.full((7, 3), 2.0)]).tolist() == [-0.5] * 7
    low, high = report.interval(report.mean_improvement, [np.array([1.0, 3.0])], [np.ones(1)])
    assert (low, high) == (0, 2)
    np.testing.assert_allclose(report.without_any_one([0.0, 0.2, 4.0]), (0.1, 2.1))
    curves = [
        np.array([[10, 0.0], [20, 10], [40, 30]]),
        np.array([[20, 20.0], [30, 20], [40, 40], [50, 90]]),
    ]
    steps, returns = report.align(curves)
    assert steps.tolist() == [20, 30, 40] and returns.tolist() == [[10, 20, 30], [20, 20, 40]]
    assert report.first_reached(curves[1], 40) == 40 and report.first_reached(curves[1], 91) is None
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
