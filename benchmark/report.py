"""Every table and picture of the benchmark, made from the CSV files in benchmark/results/.

    python benchmark/report.py            # print the tables, put them into the pages, draw
    python benchmark/report.py --check    # write nothing; exit code 1 if a table is out of date

A page says where a table goes: what stands between `<!-- report: NAME -->` and
`<!-- end of report -->` is replaced by it. The names are those of TABLES, at the end of this file.

The score of a run is the mean return of its last 100 episodes. With means over seeds, the paper's
improvement of X over Y in a task is (X - random) / (Y - random) - 1; random is the uniform policy
of results/random.csv. Two algorithms are compared on the tasks and seeds that both have. Groups of
runs may be missing or unfinished: what is there is reported, with the number of seeds.
"""

import csv
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- report: ", "<!-- end of report -->"
ALGORITHMS = {  # group: (name, colour), in this order in tables and legends
    "trpo": ("TRPO", "#8a8a8a"),
    "ppo": ("PPO", "#e0962b"),
    "ppo_target_kl": ("PPO, target KL", "#8e63b0"),
    "spu": ("SPU", "#1b6ca8"),
    "linf": ("L-infinity SPU", "#3c8d40"),
    "reverse_kl": ("reverse-KL SPU", "#c8553d"),
}
OTHERS = {
    "spu_paper": "SPU, the paper's configuration",
    "sb3_ppo": "SB3 PPO",
    "sb3_trpo": "sb3-contrib TRPO",
    "no_kl_term": "no KL in the loss",
    "no_delta": "no stopping (`--delta inf`)",
    "no_epsilon": "no acceptance (`--epsilon inf`)",
    "joint_stopping": "value function stopped too",
    "spu_3m": "SPU, 3 million steps",
    "trpo_3m": "TRPO, 3 million steps",
}
PUBLISHED = "SPU in the paper"
# They have none of the levers of PROTOCOL.md, part 1, which all the others share.
WITHOUT_LEVERS = ["spu_paper", "sb3_ppo", "sb3_trpo"]
TUNING = ["HalfCheetah-v4", "Hopper-v4", "Humanoid-v4", "Reacher-v4", "Walker2d-v4"]
# X, Y, the column of published.csv with the paper's percentage in each task, its average.
COMPARISONS = [
    ("spu", "trpo", "spu_over_trpo_pct", 27),
    ("spu", "ppo", "spu_over_ppo_pct", 17),
    ("spu", "ppo_target_kl", None, None),
    ("spu", "sb3_ppo", "spu_over_ppo_pct", 17),
    ("spu_paper", "trpo", "spu_over_trpo_pct", 27),
    ("spu_paper", "ppo", "spu_over_ppo_pct", 17),
    ("ppo", "trpo", "ppo_over_trpo_pct", 9),
    ("linf", "trpo", None, 6),
    ("reverse_kl", "trpo", None, None),
    ("spu_3m", "trpo_3m", None, 28),
]
# The paper's percentages over TRPO; full SPU has 27.
ABLATIONS = {"no_kl_term": 4, "no_delta": 24, "no_epsilon": 9, "joint_stopping": None}
INTERVAL_SEEDS = 5  # with fewer there is no interval
TIE = 0.05  # in the table of games, from -5 to +5 %
DEFAULT_EPOCHS = {False: "10", True: "4"}  # whether it is Atari: the scripts' --max-epochs
GAMES = {"spu": ["pong_spu", "breakout_spu", "games_spu"]}
GAMES |= {"ppo": ["pong_ppo", "breakout_ppo", "games_ppo"]}
WITHOUT = {
    "inputs": "inputs standardised (x / 255 instead)",
    "inputs_and_step_size": "inputs standardised and the step size that follows δ (both as above)",
    "step_size": "the step size that follows δ (annealed from 1e-4 instead)",
    "games": "32 games (8 × 256 steps, minibatches of 512 instead)",
    "region": "ε 0.06 (the paper's 0.0154 instead)",
}
# Settings of PROTOCOL.md, in the order of its tables; those that were chosen are in bold.
CHOSEN = ["screen_combined_values", "spu_1", "ppo_4", "ppo_6", "trpo_8"]
ATARI_TUNING = {
    "spu_4_epochs": "SPU, 4 epochs, δ 0.01, ε 0.03",
    "spu_2_epochs": "SPU, 2 epochs",
    "spu_minibatch_512": "SPU, minibatch 512",
    "spu_delta_02": "**SPU, δ 0.02, ε 0.06**",
    "ppo_follow": "PPO, the step size follows 0.01",
    "ppo_anneal": "PPO, annealed from 2.5e-4",
    "ppo_delta_02": "PPO, the step size follows 0.02",
    "ppo_clip_02": "**PPO, the step size follows 0.02, clip 0.2**",
    "ppo_minibatch_512": "PPO, the step size follows 0.02, minibatch 512",
    "ppo_512": "PPO, the step size follows 0.02, clip 0.2, minibatch 512 (`pong_ppo_512`)",
}
UNITS = {  # of robustness.csv
    "Plain": "the task's own",
    "Actions10": "actions from −10 to 10",
    "Actions100": "actions from −100 to 100",
    "ActionsNear100": "actions from 99 to 101",
    "ObsSmall": "observations × 1e-4",
    "ObsFar": "observations × 1e4 + 1e6",
    "RewardSmaller": "rewards × 1e-3",
    "RewardSmall": "rewards × 1e-4",
    "RewardLarge": "rewards × 1e4",
}


@dataclass
class Args:
    results: Path = ROOT / "benchmark" / "results"  # where random.csv and reported/ are
    output: Path = ROOT  # where the READMEs are; the pictures go into its benchmark/pictures/
    check: bool = False  # only say whether the tables of the READMEs are up to date


# ---- Data: {task: {seed: ...}} all the way


@dataclass
class Data:
    # A curve has rows (step, mean return of the last 100 episodes, mean KL of the iteration).
    runs: dict  # {group: {task: {seed: curve}}}
    options: dict  # {group: the options of its runs, but for task and seed}
    random: dict  # {task: mean} of the random policy
    published: dict  # {task: {column of published.csv: number}}
    speed: list  # the rows of speed.csv
    agents: list  # the rows of agents.csv
    headers: dict = field(default_factory=dict)  # {(group, task, seed): {name: number}}
    tuning: dict = field(default_factory=dict)  # like runs
    units: list = field(default_factory=list)  # the rows of robustness.csv

    @property
    def scores(self):
        return final(self.runs)


def final(runs):
    """{group: {task: {seed: score}}}"""
    scores = {}
    for group, tasks in runs.items():
        scores[group] = {}
        for task, seeds in tasks.items():
            scores[group][task] = {seed: float(curve[-1, 1]) for seed, curve in seeds.items()}
    return scores


def load(results):
    """Everything in the folder, and the published numbers."""
    agents = results.parent / "agents" / "agents.csv"
    data = Data({}, {}, {}, {}, read_rows(results / "speed.csv"), read_rows(agents))
    for path in sorted(results.glob("reported/*/*__*.csv")):
        group = path.parent.name
        task, seed = path.stem.rsplit("__", 1)
        if (curve := read_curve(path)) is not None:
            data.runs.setdefault(group, {}).setdefault(task, {})[int(seed)] = curve
            command, *header = path.read_text().splitlines()[:5]
            numbers = re.findall(r"(\w+): (-?[\d.]+)", " ".join(header))
            data.headers[group, task, int(seed)] = {key: float(x) for key, x in numbers}
            command = re.sub(r" --(env-id|seed|algorithm) \S+", "", command)
            data.options[group] = command.partition(".py")[2].strip()
    for path in sorted(results.glob("tuning/*/*.csv")):
        task, _, seed = path.stem.partition("__")
        tasks = data.tuning.setdefault(path.parent.name, {})
        tasks.setdefault(task, {})[int(seed or 101)] = read_curve(path)
    data.units = read_rows(results / "robustness.csv")
    for row in read_rows(results / "random.csv"):
        if row["actions"] == "uniform":  # random_policy.py says why
            data.random[row["env_id"]] = float(row["mean"])
    for row in read_rows(Path(__file__).with_name("published.csv")):
        task = row.pop("env").replace("-v2", "-v4")  # the nearest there is today
        row = data.published[task] = {column: float(value) for column, value in row.items()}
        ratio = (row["ppo"] - row["random"]) / (row["trpo"] - row["random"])
        row["ppo_over_trpo_pct"] = 100 * (ratio - 1)
    return data


def read_rows(path):
    """The rows of a CSV file as dictionaries, without its comments; none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


def read_curve(path):
    """The columns of a run's CSV, or None if no episode ended in it."""
    rows = read_rows(path)
    return np.array([[float(x or "nan") for x in row.values()] for row in rows]) if rows else None


def shared(x, y):
    """The part of x whose tasks and seeds y has too."""
    both = {}
    for task in sorted(x.keys() & y.keys()):
        if seeds := sorted(x[task].keys() & y[task].keys()):
            both[task] = {seed: x[task][seed] for seed in seeds}
    return both


# ---- Numbers


def mean(values):
    return float(np.mean(list(values)))


def improvement(x, y, random):
    """{task: (X - random) / (Y - random) - 1}, on shared seeds, where Y beats random."""
    x, y = shared(x, y), shared(y, x)
    result = {}
    for task in x.keys() & random.keys():
        gain, base = (mean(scores[task].values()) - random[task] for scores in (x, y))
        if base > 0:
            result[task] = gain / base - 1
    return dict(sorted(result.items()))


def mean_improvement(x, y):
    """The mean over tasks of X / Y - 1, of runs as `normalised` has them; with leading axes too."""
    return np.mean([a.mean(-1) / b.mean(-1) - 1 for a, b in zip(x, y, strict=True)], axis=0)


def without_any_one(values):
    """The lowest and the highest mean of the values when one of them is left out."""
    values = np.array(list(values))
    means = (values.sum() - values) / (len(values) - 1)
    return means.min(), means.max()


def normalised(scores, data):
    """The runs of each task as an array, where 0 is the random policy and 1 the published SPU."""
    parts = []
    for task, seeds in sorted(scores.items()):
        if task in data.random and task in data.published:
            zero = data.random[task]
            one = data.published[task]["spu"]
            parts.append((np.array(list(seeds.values())) - zero) / (one - zero))
    return parts


def iqm(x):
    """Interquartile mean over the last axis: the lowest and the highest quarter are left out."""
    cut = x.shape[-1] // 4
    return np.sort(x)[..., cut : x.shape[-1] - cut].mean(-1)


def probability_of_improvement(x, y):
    """How often a run of x beats one of y, on average over tasks (a tie counts half). The arrays
    may have leading axes."""
    chances = []
    for a, b in zip(x, y, strict=True):
        difference = a[..., :, None] - b[..., None, :]
        chances.append((np.sign(difference) + 1).mean((-2, -1)) / 2)
    return np.mean(chances, axis=0)


def resample(parts, generator):
    """2000 times as many runs as there are, drawn again within each task."""
    return [part[generator.integers(len(part), size=(2000, len(part)))] for part in parts]


def interval(statistic, *sets):
    """95 % interval of a statistic of one or more sets of runs, bootstrapped within tasks."""
    generator = np.random.default_rng(0)
    draws = statistic(*(resample(parts, generator) for parts in sets))
    return np.percentile(draws, [2.5, 97.5], axis=0)


def iqm_of(parts):
    return iqm(np.concatenate(parts, axis=-1))


def enough(*groups):
    """Whether every task has the seeds that an interval asks for."""
    return min(len(seeds) for tasks in groups for seeds in tasks.values()) >= INTERVAL_SEEDS


def align(curves, column=1):
    """Curves of several seeds where all of them have steps: steps (n), values (seeds, n)."""
    first, last = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    steps = np.unique(np.concatenate([curve[:, 0] for curve in curves]))
    steps = steps[(first <= steps) & (steps <= last)]
    return steps, np.array([np.interp(steps, curve[:, 0], curve[:, column]) for curve in curves])


# ---- Text


def name(group):
    return ALGORITHMS[group][0] if group in ALGORITHMS else OTHERS.get(group, group)


def percent(values):
    """The mean of some improvements."""
    values = list(values)
    return f"{round(100 * mean(values)):+d} %" if values else "—"


def number(x, error=None):
    digits = 0 if abs(x) >= 100 else 1
    if error is None:
        return f"{x:.{digits}f}"
    return f"{x:.{digits}f}\u00a0±\u00a0{error:.{digits}f}"  # on one line


def cell(seeds):
    """mean ± standard error"""
    x = list(seeds.values())
    error = np.std(x, ddof=1) / len(x) ** 0.5 if len(x) > 1 else None
    return number(mean(x), error) if x else "—"


def span(numbers):
    numbers = list(numbers)
    low, high = int(min(numbers)), int(max(numbers))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def counts(data, groups):
    """The seeds of each task and the steps of each run, in a sentence."""
    groups = [group for group in dict.fromkeys(groups) if group in data.runs]
    seeds = [span(len(seeds) for seeds in data.runs[group].values()) for group in groups]
    said = ", ".join(f"{name(group)} {n}" for group, n in zip(groups, seeds))
    if len(set(seeds)) == 1:
        said = seeds[0]
    steps = []
    for group in groups:
        for tasks in data.runs[group].values():
            steps += [curve[-1, 0] for curve in tasks.values()]
    return f" Seeds of each task: {said}. Steps: {span(steps)}."


def markdown(header, rows, sentence):
    if not rows:
        return "There are no runs for this table yet."
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join([*("| " + " | ".join(map(str, line)) + " |" for line in lines), "", sentence])


# ---- Tables: MuJoCo


def scores_table(data):
    """All tasks and algorithms; the best in bold."""
    groups = [group for group in ALGORITHMS if group in data.runs]
    scores = data.scores
    tasks = sorted({task for group in groups for task in scores[group]})
    rows = []
    for task in tasks:
        means = {
            group: mean(scores[group][task].values()) for group in groups if task in scores[group]
        }
        best = max(means, key=means.get)
        cells = []
        for group in groups:
            # The error on a line of its own: so nine columns fit GitHub's page.
            text = cell(scores[group].get(task, {})).replace("\u00a0±", "<br>±")
            cells.append(f"**{text}**" if group == best else text)
        random = number(data.random[task]) if task in data.random else "—"
        published = f"{data.published[task]['spu']:g}" if task in data.published else "—"
        title = task.removesuffix("-v4").replace("DoublePendulum", "Double<br>Pendulum")
        rows.append([title, random, *cells, published])
    if not rows:
        return markdown([], [], "")
    sentence = "Mean return of the last 100 episodes ± standard error over seeds; the best in bold."
    sentence += counts(data, groups)
    return markdown(["`-v4`", "random", *map(name, groups), PUBLISHED], rows, sentence)


def improvement_table(data):
    """The paper's metric, over all tasks, those of the tuning and the others."""
    rows = []
    groups = []
    scores = data.scores
    for x, y, key, average in COMPARISONS:
        values = improvement(scores.get(x, {}), scores.get(y, {}), data.random)
        if not values:
            continue
        groups += [x, y]
        median = percent([np.median(list(values.values()))])
        won = f"{sum(value > 0 for value in values.values())} of {len(values)}"
        span_without = "—"
        if len(values) > 1:
            low, high = without_any_one(values.values())
            span_without = f"{100 * low:+.0f} to {percent([high])}"
        tuned = {task: value for task, value in values.items() if task in TUNING}
        held_out = {task: value for task, value in values.items() if task not in TUNING}
        runs, others = shared(scores[x], scores[y]), shared(scores[y], scores[x])
        parts = [normalised(runs, data), normalised(others, data)]
        chance = f"**{probability_of_improvement(*parts):.2f}**"
        average_here = percent(values.values())
        if enough(runs, others):
            low, high = interval(probability_of_improvement, *parts)
            chance += f"<br>{low:.2f} to {high:.2f}"
            low, high = interval(mean_improvement, *parts)
            average_here += f"<br>{100 * low:+.0f} to {percent([high])}"
        title = f"{name(x)} over {name(y).removesuffix(', 3 million steps')}"
        if len({x, y} & set(WITHOUT_LEVERS)) == 1:
            title += " (†)"
        row = [title, chance, won, median, average_here, span_without]
        for tasks in (tuned, held_out):
            row.append(percent(tasks.values()))
            if key and tasks:
                row[-1] += f"<br>({percent(data.published[task][key] / 100 for task in tasks)})"
        row.append(f"{average:+d} %" if average else "—")
        rows.append([*row, span(len(seeds) for seeds in runs.values())])
    header = ["", "P(better)", "tasks won", "median", "mean", "mean without any one task"]
    header += ["tuning tasks<br>(the paper)", "held-out tasks<br>(the paper)"]
    header += ["all ten in the paper", "seeds"]
    sentence = (
        "P(better): how often a run of X beats one of Y in the same task. The other numbers are of "
        "(X − random) / (Y − random) − 1, with means over shared seeds, in each task: its median, "
        "its mean, the range of that mean when any one task is left out, and its means over the "
        "tasks of the tuning and the others, with the paper's for the same tasks in brackets. "
        "Below, 95 % bootstrap intervals, from "
        f"{INTERVAL_SEEDS} seeds on. (†) One of the two has none of the levers that the others "
        "share."
    )
    sentence += counts(data, groups) if groups else ""
    return markdown(header, rows, sentence)


def iqm_table(data):
    rows = []
    scores = data.scores
    groups = [group for group in [*ALGORITHMS, "spu_paper"] if group in data.runs]
    for group in groups:
        parts = normalised(scores[group], data)
        bounds = "—"
        if enough(scores[group]):
            bounds = " to ".join(f"{x:.2f}" for x in interval(iqm_of, parts))
        runs = sum(map(len, parts))
        rows.append([name(group), f"{iqm_of(parts):.2f}", bounds, len(parts), runs])
    sentence = (
        f"0 is the random policy, 1 the published SPU. Intervals from {INTERVAL_SEEDS} seeds on."
    )
    return markdown(["", "interquartile mean", "95 % interval", "tasks", "runs"], rows, sentence)


def ablation_table(data):
    """Every row on the same runs: tasks and seeds that full SPU and all ablations have."""
    scores = data.scores
    full = scores.get("spu", {})
    groups = [group for group in ABLATIONS if shared(scores.get(group, {}), full)]
    common = full
    for group in groups:
        common = shared(common, scores[group])
    rows = []
    for group in ["spu", *groups] if groups and common else []:
        part = shared(scores[group], common)
        over_trpo = percent(improvement(part, scores.get("trpo", {}), data.random).values())
        paper = ABLATIONS.get(group, 27)
        title = "full SPU" if group == "spu" else name(group)
        cells = [cell(part[task]) for task in common]
        rows.append([title, *cells, over_trpo, f"{paper:+d} %" if paper else "—"])
    header = ["", *(task.removesuffix("-v4") for task in common), "over TRPO", "the paper"]
    sentence = (
        "Mean ± standard error, and (X − random) / (TRPO − random) − 1 averaged over these tasks."
    )
    if rows:
        sentence += f" Seeds: {span(len(seeds) for seeds in common.values())}."
    return markdown(header, rows, sentence)


def trpo_check_table(data):
    """Our TRPO beside sb3-contrib's with the same settings, on the seeds that both have."""
    groups = [group for group in data.scores if group.startswith("trpo_check_")]
    ours = {task: seeds for group in groups for task, seeds in data.scores[group].items()}
    theirs = data.scores.get("sb3_trpo", {})
    values = improvement(ours, theirs, data.random)
    rows = []
    for task, value in values.items():
        cells = [cell(shared(x, y)[task]) for x, y in ((theirs, ours), (ours, theirs))]
        rows.append([task.removesuffix("-v4"), *cells, percent([value])])
    near = sum(abs(value) <= 0.2 for value in values.values())
    sentence = (
        "Mean return of the last 100 episodes ± standard error, and "
        f"(ours − random) / (theirs − random) − 1: within 20 % in {near} of {len(values)} tasks."
    )
    seeds = span(len(seeds) for seeds in shared(ours, theirs).values()) if rows else ""
    sentence += f" Seeds of each task: {seeds}." if rows else ""
    return markdown(["", "sb3-contrib's", "ours", "difference"], rows, sentence)


def sensitivity(data, ranges):
    """{group: mean improvement over TRPO} of the random vectors of constants, the worst first."""
    means = {}
    for group in data.runs:
        if group.startswith(f"sensitivity_{ranges}_"):
            trpo = data.scores.get("trpo", {})
            if values := improvement(data.scores[group], trpo, data.random):
                means[group] = mean(values.values())
    return {group: means[group] for group in sorted(means, key=means.get)}


def sensitivity_table(data):
    rows = []
    for ranges, title in (("paper", "the paper's"), ("default", "around our default")):
        if x := list(sensitivity(data, ranges).values()):
            better = f"{sum(value > 0 for value in x)} of {len(x)}"
            quarter, half = percent([x[len(x) // 4]]), percent([x[len(x) // 2]])
            rows.append([title, better, percent(x[:1]), quarter, half, percent(x[-1:])])
    if rows:
        rows.append(["in the paper (10 tasks)", "100 of 100", "—", "+18 %", "+21 %", "—"])
    header = ["ranges", "better than TRPO", "worst", "75 % reach", "50 % reach", "best"]
    sentence = "Random vectors of δ, ε, λ and epochs, in Hopper and Walker2d, one seed each: their "
    sentence += "improvement over TRPO."
    return markdown(header, rows, sentence)


def speeds(data, env, program, epochs=None):
    """{round: steps per second} of a program; with these epochs, if it was timed with them."""
    rows = [row for row in data.speed if (row["env_id"], row["program"]) == (env, program)]
    same = [row for row in rows if row["epochs"] == epochs]
    return {row["round"]: float(row["steps_per_second"]) for row in same or rows}


def speed_table(data):
    """Ratios round by round, since a slow spell of the machine meets all programs of a round."""
    kinds = dict.fromkeys(
        (row["env_id"], row["epochs"]) for row in data.speed if row["program"] == "spu"
    )
    table = []
    for env, epochs in kinds:
        spu = speeds(data, env, "spu", epochs)
        ratios = []
        for program in ("sb3_ppo", "plain_ppo", "our_ppo"):
            peer = speeds(data, env, program, epochs)
            x = [spu[number] / peer[number] for number in spu if number in peer]
            ratios.append(f"{np.median(x):.2g} ({min(x):.2g} to {max(x):.2g})" if x else "—")
        default = " (the default)" if epochs == DEFAULT_EPOCHS["-v" not in env] else ""
        title = f"{env}, {epochs} epochs{default}"
        table.append([title, f"{np.median(list(spu.values())):.0f}", *ratios, len(spu)])
    memory = {row["env_id"]: row["memory_mb"] for row in data.speed if row["memory_mb"]}
    memory = ", ".join(f"{env} {mb} MB" for env, mb in memory.items())
    note = (
        "SPU's steps per second, and its multiple of the others' (range): medians of rounds that "
        "run all programs in turn, one thread each on MuJoCo, all cores on Atari. On MuJoCo the "
        "others do 10 epochs, on Atari as many as SPU. Plain PPO is in the style of CleanRL, not "
        f"compiled. Memory of SPU: {memory}."
    )
    header = ["", "SPU, steps/s", "× SB3 PPO", "× plain PPO", "× our PPO", "rounds"]
    return markdown(header, table, note)


def units_table(data):
    """One small task in many units: the mean of the seeds of each algorithm."""
    found = {row["algorithm"] for row in data.units}
    algorithms = [name for name in ("random", "SB3 PPO", "our PPO", "SPU") if name in found]
    rows = []
    for units, title in UNITS.items() if algorithms else []:
        cells = []
        for algorithm in algorithms:
            same = [
                row for row in data.units if (row["algorithm"], row["units"]) == (algorithm, units)
            ]
            cells.append(number(mean(float(row["return"]) for row in same)) if same else "—")
        rows.append([title, *cells])
    seeds = {row["seed"] for row in data.units}
    sentence = (
        "Mean returns in the task's own unit, played with the mean action after 20,480 steps of "
        f"training. Seeds: {len(seeds)}."
    )
    return markdown(["units", *algorithms], rows, sentence)


# ---- Tables: the protocol


def tuning_table(data, algorithms):
    """A row per setting of these algorithms: each seed's score, and the protocol's criterion."""
    rows = []
    for algorithm in algorithms:
        for group in sorted(name for name in data.tuning if name.startswith(f"{algorithm}_")):
            scores = final(data.tuning)[group]
            parts = []
            cells = []
            for task in TUNING:
                seeds = list(scores.get(task, {}).values())
                cells.append(", ".join(f"{score:.4g}" for score in seeds) or "—")
                if seeds:
                    parts += [(task, x.mean()) for x in normalised({task: scores[task]}, data)]
            averages = ["—", "—"]
            if len(parts) == len(TUNING):
                others = [x for task, x in parts if task != "Humanoid-v4"]
                averages = [f"{mean(x for _, x in parts):.2f}", f"{mean(others):.2f}"]
            title = f"`{group}`"
            if group in CHOSEN:
                title, averages[0] = f"**{title}**", f"**{averages[0]}**"
            rows.append([title, *cells, *averages])
    header = ["setting", *(task.removesuffix("-v4") for task in TUNING)]
    sentence = (
        "The score of each seed, and the average over tasks of (X − random) / (published SPU − "
        "random). What was chosen is in bold."
    )
    return markdown([*header, "average", "without Humanoid"], rows, sentence)


def levers_table(data):
    return tuning_table(data, ["screen"])


def constants_table(data):
    return tuning_table(data, ["spu", "ppo", "trpo"])


def tuning_atari_table(data):
    """A row per setting: the end of its curves, and when Pong's first was 18."""
    prototypes = data.tuning.get("atari", {})
    rows = []
    for setting, title in ATARI_TUNING.items():
        pong = prototypes.get(f"pong_{setting}") or data.tuning.get(f"pong_{setting}", {}).get(
            "Pong"
        )
        breakout = prototypes.get(f"breakout_{setting}")
        if pong:
            (curve,) = pong.values()
            reached = first_reached(curve, 18)
            cells = [number(curve[-1, 1]), f"{reached:,}" if reached else "—"]
            cells.append(number(breakout[101][-1, 1]) if breakout else "—")
            rows.append([title, *cells])
    header = ["", "Pong", "18 reached after", "Breakout"]
    return markdown(header, rows, "Mean of the last 100 games of training, after 397,312 steps.")


# ---- Tables: Atari


def first_reached(curve, threshold):
    """The first step after which the mean of the last 100 games is this high, or None."""
    steps = curve[curve[:, 1] >= threshold, 0]
    return int(steps[0]) if len(steps) else None


def pong_table(data):
    """A row per run, one algorithm's seed beside the other's."""
    rows = []
    titles = {"spu": "SPU", "processes": "SPU, 2 processes", "ppo": "PPO"}
    runs = {who: data.runs.get(f"pong_{who}", {}).get("Pong", {}) for who in titles}
    for seed in sorted({seed for seeds in runs.values() for seed in seeds}):
        for who, title in titles.items():
            if seed in runs[who]:
                curve = runs[who][seed]
                reached = [first_reached(curve, threshold) for threshold in (0, 18)]
                reached = [f"{step:,}" if step else "—" for step in reached]
                rows.append([seed, title, *reached, number(curve[-1, 1]), f"{curve[-1, 0]:,.0f}"])
    header = ["seed", "", "0 reached after", "18 reached after", "at the end", "steps"]
    sentence = "Pong: mean score of the last 100 games of training."
    speed = speeds(data, "Pong", "spu", DEFAULT_EPOCHS[True])
    reached = [step for curve in runs["spu"].values() if (step := first_reached(curve, 18))]
    if speed and reached:
        speed = np.median(list(speed.values()))
        minutes = span(round(step / speed / 60) for step in reached)
        sentence += f" SPU, alone on the machine, takes {minutes} minutes to 18."
    return markdown(header, rows, sentence)


def without_table(data):
    """Pong without one of four changes, beside the run that has them all, after as many steps."""
    rows = []
    groups = {f"pong_without_{key}": title for key, title in WITHOUT.items()}
    runs = {}
    for group, title in groups.items():
        for curve in data.runs.get(group, {}).get("Pong", {}).values():
            runs[title] = curve
    if runs and (full := data.runs.get("pong_spu", {}).get("Pong", {}).get(1)) is not None:
        last = max(curve[-1, 0] for curve in runs.values())
        runs = {"nothing: the default": full[full[:, 0] <= last]} | runs
    for title, curve in runs.items():
        step = first_reached(curve, 18)
        reached = f"{step:,}" if step else "—"
        rows.append([title, number(curve[-1, 1]), reached, f"{curve[-1, 0]:,.0f}"])
    header = ["without", "at the end", "18 reached after", "steps"]
    return markdown(header, rows, "Pong, seed 1: mean score of the last 100 games of training.")


def of_games(data, who, seeds, game, key):
    """The mean over seeds of a number in the headers of a game's runs."""
    headers = [data.headers.get((group, game, seed), {}) for group in GAMES[who] for seed in seeds]
    numbers = [header[key] for header in headers if key in header]
    return number(mean(numbers)) if numbers else "—"


def games_table(data):
    """A row per game: the mean of its seeds, and the paper's metric."""
    scores = {}
    for who, groups in GAMES.items():
        scores[who] = {}
        for group in groups:
            scores[who] |= data.scores.get(group, {})
    values = improvement(scores["spu"], scores["ppo"], data.random)
    both = shared(scores["spu"], scores["ppo"])
    rows = []
    for game in both:
        spu, ppo = (cell(shared(scores[who], both)[game]) for who in ("spu", "ppo"))
        steps = max(curve[-1, 0] for group in GAMES["spu"]
                    for curve in data.runs.get(group, {}).get(game, {}).values())  # fmt: skip
        better = percent([values[game]]) if game in values else "—"
        random = number(data.random[game]) if game in data.random else "—"
        evaluations, played = (
            " / ".join(of_games(data, who, both[game], game, key) for who in ("ppo", "spu"))
            for key in ("evaluation", "episodes")
        )
        row = [game, random, ppo, spu, better, evaluations, played]
        rows.append([*row, len(both[game]), f"{steps:,.0f}"])
    header = ["", "random", "PPO", "SPU", "SPU over PPO"]
    header += ["PPO / SPU in evaluation", "PPO / SPU, games played", "seeds", "steps"]
    sentence = (
        "Mean score of the last 100 games of training, on shared seeds. Where games are long, "
        "these reach far back; the evaluation, of 10 games, is of the agent at the end."
    )
    if values:
        sentence += (
            f" SPU wins {sum(x > TIE for x in values.values())}, ties (within {TIE:.0%}) "
            f"{sum(abs(x) <= TIE for x in values.values())} and loses "
            f"{sum(x < -TIE for x in values.values())} of the {len(values)} games in which PPO "
            f"beats random; the median is {percent([np.median(list(values.values()))])}, the mean "
            f"{percent(values.values())}. The paper has 15, 36 and 9, and +55 %: over 60 games of "
            "10 million steps and 20 seeds."
        )
    return markdown(header, rows, sentence)


def agents_table(data):
    """A row per agent in benchmark/agents/."""
    rows = []
    for row in data.agents:
        which = f"{row['seed']} of {row['seeds']}" if row["seeds"] != "1" else row["seed"]
        score, evaluation = (number(float(row[x])) for x in ("training_score", "evaluation"))
        rows.append([f"[{row['task']}](agents/{row['task']}.pt)", which, score, evaluation])
    header = ["agent", "seed", "in training", "in evaluation"]
    sentence = (
        "The median seed of those that are finished; mean return of its last 100 episodes of "
        "training, and of the 10 episodes that `--evaluate` plays."
    )
    return markdown(header, rows, sentence)


TABLES = {
    "scores": scores_table,
    "improvement": improvement_table,
    "iqm": iqm_table,
    "ablation": ablation_table,
    "trpo_check": trpo_check_table,
    "sensitivity": sensitivity_table,
    "units": units_table,
    "speed": speed_table,
    "pong": pong_table,
    "without": without_table,
    "games": games_table,
    "agents": agents_table,
    "levers": levers_table,
    "constants": constants_table,
    "tuning_atari": tuning_atari_table,
}


def fill(text, tables):
    """The text with each table between its markers."""

    def put(match):
        table, old = match.groups()
        if table not in tables:
            raise ValueError(f"There is no table {table}: the tables are {', '.join(tables)}.")
        if START in old:
            raise ValueError(f"The table {table} has no `{END}`.")
        return f"{START}{table} -->\n\n{tables[table]}\n\n{END}"

    if text.count(START) != text.count(END):
        raise ValueError(f"Each `{START}NAME -->` needs its `{END}`.")
    return re.sub(f"{START}(.*?) -->(.*?){END}", put, text, flags=re.DOTALL)


# ---- Pictures


def panels(count, columns=4, width=2.9, height=2.3):
    """A figure with so many panels, and their axes in order; the others are hidden."""
    columns = min(count, columns)
    rows = -(-count // columns)
    size = (width * columns, height * rows + 0.5)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    for axis in axes.flat:
        axis.tick_params(labelsize=8, length=2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.93")
    for axis in axes.flat[count:]:
        axis.axis("off")
    return figure, axes.flat[:count]


def thousands(axis):
    axis.yaxis.set_major_formatter(lambda y, _: f"{y / 1000:g}k" if abs(y) >= 10_000 else f"{y:g}")


def draw_curves(data, path, series, published=True):
    """A panel per task. series: {name: (colour, [groups])}. Up to 4 seeds are thin lines, more are
    a 95 % bootstrap interval."""
    tasks = {}
    for title, (_, groups) in series.items():
        for group in groups:
            for task, seeds in data.runs.get(group, {}).items():
                tasks.setdefault(task, {})[title] = list(seeds.values())
    if not tasks:
        return
    figure, axes = panels(len(tasks))
    handles = {}
    for index, (axis, task) in enumerate(zip(axes, sorted(tasks))):
        for order, (title, (color, _)) in enumerate(series.items(), start=3):
            curves = tasks[task].get(title)
            if not curves:
                continue
            steps, returns = align(curves)
            (line,) = axis.plot(
                steps / 1e6, returns.mean(0), color=color, lw=1.8, zorder=order + 10
            )
            handles[title] = line
            if len(curves) >= INTERVAL_SEEDS:
                low, high = interval(lambda parts: parts[0].mean(1), [returns])
                axis.fill_between(steps / 1e6, low, high, color=color, alpha=0.15, lw=0)
            elif len(curves) > 1:
                axis.plot(steps / 1e6, returns.T, color=color, lw=0.6, alpha=0.6, zorder=order)
        if published and task in data.published:
            level = data.published[task]["spu"]
            handles["SPU as published"] = axis.axhline(level, color="0.25", lw=1.2, ls=":")
        axis.set_title(task.removesuffix("-v4"), fontsize=10)
        axis.set_xlim(left=0)
        axis.set_xlabel("million steps" if index + 4 >= len(tasks) else "", fontsize=9)
        thousands(axis)
    figure.supylabel("return of the last 100 episodes", fontsize=9)
    place = {"loc": "outside lower center", "ncols": 5, "frameon": False, "fontsize": 9}
    figure.legend(handles.values(), handles.keys(), **place)
    save(figure, path)


def draw_dots(data, path):
    """SPU over PPO, a dot per seed, each against the mean of PPO's."""
    spu, ppo = data.scores.get("spu", {}), data.scores.get("ppo", {})
    tasks = [task for task in shared(spu, ppo) if task in data.random]
    if not tasks:
        return
    figure, (axis,) = panels(1, width=7, height=3.2)
    for place, task in enumerate(reversed(tasks)):
        runs = shared(spu, ppo)[task]
        base = mean(shared(ppo, spu)[task].values()) - data.random[task]
        dots = [100 * ((score - data.random[task]) / base - 1) for score in runs.values()]
        color = ALGORITHMS["spu"][1]
        axis.plot(dots, [place] * len(dots), "o", color=color, alpha=0.5, ms=6, mew=0)
        axis.plot([mean(dots)] * 2, [place - 0.3, place + 0.3], color=color, lw=2)
    axis.set_yticks(range(len(tasks)), [task.removesuffix("-v4") for task in reversed(tasks)])
    axis.axvline(0, color="0.5", lw=1)
    low, high = axis.get_xlim()
    axis.set_xscale("symlog", linthresh=100)
    ticks = [-100, -50, 0, 50, 100, 300, 1000, 3000]
    axis.set_xticks([tick for tick in ticks if low <= tick <= high], minor=False)
    axis.set_xticks([], minor=True)
    axis.xaxis.set_major_formatter(lambda x, _: f"{x:+.0f} %")
    axis.set_xlabel("a seed of SPU over the mean of PPO", fontsize=9)
    save(figure, path)


def draw_kl(data, path, tasks=("Humanoid-v4", "Hopper-v4"), delta=0.02):
    """The mean KL of each iteration, SPU against PPO, with delta as a line."""
    groups = {group: ALGORITHMS[group] for group in ("ppo", "spu")}
    tasks = [task for task in tasks if all(task in data.runs.get(group, {}) for group in groups)]
    if not tasks:
        return
    figure, axes = panels(len(tasks), width=3.6, height=2.6)
    for axis, task in zip(axes, tasks):
        for group, (title, color) in groups.items():
            steps, kls = align(list(data.runs[group][task].values()), column=2)
            axis.plot(steps / 1e6, kls.T, color=color, lw=0.4, alpha=0.25)
            size = min(15, len(steps))  # a running mean
            smooth = np.convolve(kls.mean(0), np.ones(size) / size, "valid")
            centre = steps[size // 2 :][: len(smooth)]
            axis.plot(centre / 1e6, smooth, color=color, lw=1.8, label=title)
        axis.axhline(delta, color="0.25", lw=1.2, ls=":", label="δ")
        axis.set(yscale="log", ylim=(1e-3, 1), title=task.removesuffix("-v4"))
        axis.set_xlabel("million steps", fontsize=9)
    axes[0].set_ylabel("mean KL of an iteration, nats", fontsize=9)
    axes[0].legend(frameon=False, fontsize=9)
    save(figure, path)


def draw_minutes(data, path):
    """Score against time: steps divided by the speed of each program, measured alone."""
    series = {"SB3 PPO": ("sb3_ppo", "sb3_ppo", ALGORITHMS["ppo"][1])}
    series["SPU"] = ("spu", "spu", ALGORITHMS["spu"][1])
    both = data.runs.get("spu", {}).keys() & data.runs.get("sb3_ppo", {}).keys()
    timed = {row["env_id"] for row in data.speed}
    tasks = sorted(both & timed)
    if not tasks:
        return
    figure, axes = panels(len(tasks), width=3.2, height=2.6)
    for axis, task in zip(axes, tasks):
        for title, (group, program, color) in series.items():
            speed = np.median(list(speeds(data, task, program, DEFAULT_EPOCHS[False]).values()))
            steps, returns = align(list(data.runs[group][task].values()))
            axis.plot(steps / speed / 60, returns.T, color=color, lw=0.6, alpha=0.5)
            axis.plot(steps / speed / 60, returns.mean(0), color=color, lw=1.8, label=title)
        axis.set(title=task.removesuffix("-v4"), xlim=(0, None))
        axis.set_xlabel("minutes on one core", fontsize=9)
        thousands(axis)
    axes[0].set_ylabel("return of the last 100 episodes", fontsize=9)
    axes[0].legend(frameon=False, fontsize=9)
    save(figure, path)


def draw_sensitivity(data, path):
    """The share of the vectors whose improvement over TRPO is at most x."""
    found = {ranges: sensitivity(data, ranges) for ranges in ("paper", "default")}
    if not any(found.values()):
        return
    figure, (axis,) = panels(1, width=4.6, height=2.8)
    for (ranges, values), color in zip(found.items(), ("#6db3e0", ALGORITHMS["spu"][1])):
        if values:
            title = {"paper": "the paper's ranges", "default": "around our default"}[ranges]
            x = 100 * np.array(list(values.values()))
            axis.ecdf(x, color=color, lw=2, label=f"{title}, {len(x)} vectors")
    axis.plot([18, 21], [0.25, 0.5], "o", color="0.25", label="the paper, 100 vectors")
    axis.axvline(0, color="0.7", lw=1, zorder=0)
    axis.set(xlabel="improvement over TRPO, %", ylabel="share of the vectors", ylim=(0, 1.02))
    axis.legend(frameon=False, fontsize=8)
    save(figure, path)


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    # 256 colours: a third of the size.
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
    plt.close(figure)
    print(f"wrote {path.name}")


def draw_all(data, folder):
    lines = {title: (color, [group]) for group, (title, color) in ALGORITHMS.items()}
    main = {title: lines[title] for title in ("TRPO", "PPO", "PPO, target KL", "SPU")}
    variants = {title: lines[title] for title in ("SPU", "L-infinity SPU", "reverse-KL SPU")}
    draw_curves(data, folder / "learning_curves.png", main)
    if {"linf", "reverse_kl"} & data.runs.keys():
        draw_curves(data, folder / "learning_curves_variants.png", variants)
    atari = {
        "PPO": (ALGORITHMS["ppo"][1], GAMES["ppo"]),
        "SPU": (ALGORITHMS["spu"][1], GAMES["spu"]),
    }
    draw_curves(data, folder / "learning_curves_atari.png", atari, published=False)
    draw_dots(data, folder / "improvement.png")
    draw_kl(data, folder / "kl.png")
    draw_minutes(data, folder / "minutes.png")
    draw_sensitivity(data, folder / "sensitivity.png")


def refuse(sentence, code=2):
    print(f"report.py: {sentence}", file=sys.stderr)
    sys.exit(code)


def main():
    args = tyro.cli(Args, description=__doc__)
    if not args.results.is_dir():
        refuse(f"there is no folder {args.results}.")
    data = load(args.results)
    tables = {table: make(data) for table, make in TABLES.items()}
    for title in ("README.md", "benchmark/README.md", "benchmark/PROTOCOL.md"):
        readme = args.output / title
        if not readme.exists():
            continue
        old = readme.read_text()
        try:
            new = fill(old, tables)
        except ValueError as error:
            refuse(f"{title}: {error}")
        if args.check and new != old:
            refuse(f"{title} is out of date: run `python benchmark/report.py`.", 1)
        if new != old:
            readme.write_text(new)
    if args.check:
        return
    print("\n\n".join(f"## {title}\n\n{table}" for title, table in tables.items()))
    draw_all(data, args.output / "benchmark" / "pictures")


if __name__ == "__main__":
    main()
