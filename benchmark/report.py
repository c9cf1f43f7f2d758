"""Every table and picture of the benchmark, made from the CSV files in benchmark/results/.

    python benchmark/report.py            # print the tables, put them into the READMEs, draw
    python benchmark/report.py --check    # write nothing; exit code 1 if a table is out of date

A README says where a table goes: what stands between `<!-- report: NAME -->` and
`<!-- end of report -->` is replaced by it. The names are front, scores, averages, improvement,
moved, ablation, iqm, steps_to_ppo, details, linf, reverse_kl, sensitivity, speed and atari.

The score of a run is the mean return of its last 100 episodes. With means over seeds, the paper's
improvement of X over Y in an environment is (X - random) / (Y - random) - 1; random is the uniform
policy of results/random.csv. Groups of runs may be missing or unfinished: what is there is
reported, with the number of seeds.
"""

import csv
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import tyro
from PIL import Image

matplotlib.use("Agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).resolve().parent.parent
START, END = "<!-- report: ", "<!-- end of report -->"
DEFAULTS = {  # which a run may have spelled out
    "spu_continuous": {"--lam 1.3", "--epsilon 0.03", "--delta 0.02", "--max-epochs 10"},
    "spu_linf": {"--lam 1", "--epsilon 1", "--max-epochs 10"},
    "spu_reverse_kl": {
        "--max-advantage 2",
        "--epsilon 0.3",
        "--accept 0.03",
        "--delta 0.02",
        "--max-epochs 10",
    },
}
ABLATION_BASELINE = "spu_30_epochs"  # full SPU, with as many epochs as the ablations: the paper's
VECTORS = "sensitivity_"  # groups with one random vector of hyper-parameters each
# The paper's percentages over TRPO; full SPU has 27.
PAPER_ABLATION = {"no_kl_term": 4, "no_dynamic_stopping": 24, "no_per_state_acceptance": 9}
PUBLISHED = "SPU as published"
# Where SPU's constants were tuned.
TUNED = ["Ant", "HalfCheetah", "Hopper", "InvertedDoublePendulum", "Swimmer", "Walker2d"]
SMALL = ["Ant-v4", "HalfCheetah-v4", "Hopper-v4", "Walker2d-v4"]  # the panels of the front page,
FRONT = ["trpo", "sb3_ppo", "ppo", "spu"]  # and its curves
RANDOM_ACTIONS = "uniform"  # the rows of random.csv that count; random_policy.py says why
ALGORITHMS = {  # group: (name, colour), in this order in tables and legends
    "trpo": ("TRPO", "#8a8a8a"),
    "sb3_ppo": ("SB3 PPO", "#8e63b0"),
    "ppo": ("our PPO", "#e0962b"),
    "spu": ("SPU", "#1b6ca8"),
    "linf": ("L-infinity SPU", "#3c8d40"),
    "reverse_kl": ("reverse-KL SPU", "#c8553d"),
    "spu_paper": ("paper-settings SPU", "#6db3e0"),
}
ATARI = {"atari_ppo": ALGORITHMS["sb3_ppo"], "atari": ALGORITHMS["spu"]}  # drawn by themselves
OTHERS = {"spu_3m": "SPU at 3M steps", "trpo_3m": "TRPO at 3M steps"}
OTHERS |= {"no_kl_term": "no KL term", "no_per_state_acceptance": "no per-state acceptance"}
OTHERS |= {"spu_30_epochs": "SPU with 30 epochs"}
# X, Y, the column of published.csv with the paper's percentage in each environment, its average.
COMPARISONS = [
    ("spu", "trpo", "spu_over_trpo_pct", 27),
    ("spu", "sb3_ppo", "spu_over_ppo_pct", 17),
    ("spu", "ppo", "spu_over_ppo_pct", 17),
    ("spu_paper", "trpo", "spu_over_trpo_pct", 27),
    ("spu_paper", "sb3_ppo", "spu_over_ppo_pct", 17),
    ("sb3_ppo", "trpo", "ppo_over_trpo_pct", 9),
    ("ppo", "trpo", "ppo_over_trpo_pct", 9),
    ("linf", "trpo", None, 6),
    ("reverse_kl", "trpo", None, None),
    ("spu_3m", "trpo_3m", None, 28),
]


@dataclass
class Args:
    results: Path = ROOT / "benchmark" / "results"  # the CSV files, as GROUP/ENV__SEED.csv
    output: Path = ROOT  # where the READMEs are; the pictures go into its benchmark/results/
    check: bool = False  # only say whether the tables of the READMEs are up to date


# ---- Data: {environment: {seed: ...}} all the way


@dataclass
class Data:
    # A curve has rows (step, mean return of the last 100 episodes).
    runs: dict  # {group: {environment: {seed: curve}}}
    # Of an iteration, in the runs that kept it.
    moved: dict  # {group: {environment: {seed: (mean KL, mean number of epochs)}}}
    random: dict  # {environment: mean} of the random policy
    published: dict  # {environment: {column of published.csv: number}}
    options: dict  # {group: the options of its runs, but for environment and seed}
    speed: list  # the rows of speed.csv
    # On seeds from 101 on.
    tuning: dict  # {script: {options that are not the default: {environment: {seed: score}}}}

    @property
    def scores(self):  # {group: {environment: {seed: score}}}
        scores = {}
        for group, envs in self.runs.items():
            scores[group] = {}
            for env, seeds in envs.items():
                scores[group][env] = {seed: float(curve[-1, 1]) for seed, curve in seeds.items()}
        return scores


def load(results):
    """Everything in the folder, and the published numbers."""
    speed = read_rows(results / "speed.csv")
    data = Data({}, {}, {}, {}, {}, speed, {script: {} for script in DEFAULTS})

    def tuned(script, flags, env, seed, score):
        flags = " ".join(sorted(set(re.findall(r"--\S+(?: (?!--)\S+)?", flags)) - DEFAULTS[script]))
        data.tuning[script].setdefault(flags, {}).setdefault(env, {})[int(seed)] = float(score)

    for row in read_rows(results / "tuning.csv"):
        score = row["return_of_last_100_episodes"]
        tuned(row["script"], row["flags"], row["env_id"], row["seed"], score)
    for path in sorted(results.glob("*/*__*.csv")):
        lines = path.read_text().splitlines()
        group = path.parent.name
        env, seed = path.stem.rsplit("__", 1)
        if rows := [line.split(",") for line in lines if line[:1].isdigit()]:
            data.runs.setdefault(group, {}).setdefault(env, {})[int(seed)] = np.array(rows, float)
            script, _, options = re.sub(r" --(env-id|seed) \S+", "", lines[0]).partition(".py")
            data.options[group] = options.strip()
            if moved := re.findall(r"mean of \S+: ([\d.e-]+)", lines[2]):
                envs = data.moved.setdefault(group, {})
                envs.setdefault(env, {})[int(seed)] = tuple(map(float, moved))
            script = script.rpartition(" ")[2]  # after "# command: python"
            if int(seed) > 100 and script in DEFAULTS:
                tuned(script, options, env, seed, rows[-1][1])
    for row in read_rows(results / "random.csv"):
        if row["actions"] == RANDOM_ACTIONS:
            data.random[row["env_id"]] = float(row["mean"])
    for row in read_rows(Path(__file__).with_name("published.csv")):
        env = row.pop("env").replace("-v2", "-v4")  # the nearest there is today
        row = data.published[env] = {column: float(value) for column, value in row.items()}
        ratio = (row["ppo"] - row["random"]) / (row["trpo"] - row["random"])
        row["ppo_over_trpo_pct"] = 100 * (ratio - 1)
    return data


def read_rows(path):
    """The rows of a CSV file as dictionaries, without its comments; none if there is no file."""
    lines = path.read_text().splitlines() if path.exists() else []
    return list(csv.DictReader(line for line in lines if not line.startswith("#")))


# ---- Numbers


def mean(values):
    return float(np.mean(list(values)))


def improvement(x, y, random):
    """{environment: (X - random) / (Y - random) - 1} where both have runs and Y beats random."""
    result = {}
    for env in sorted(x.keys() & y.keys() & random.keys()):
        gain, base = (mean(scores[env].values()) - random[env] for scores in (x, y))
        if base > 0:
            result[env] = gain / base - 1
    return result


def shared(x, y):
    """The part of x whose environments and seeds y has too."""
    both = {}
    for env in sorted(x.keys() & y.keys()):
        if seeds := sorted(x[env].keys() & y[env].keys()):
            both[env] = {seed: x[env][seed] for seed in seeds}
    return both


def iqm(x):
    """Interquartile mean over the last axis: the lowest and the highest quarter are left out."""
    cut = x.shape[-1] // 4
    return np.sort(x)[..., cut : x.shape[-1] - cut].mean(-1)


def bootstrap(statistic, strata, generator):
    """The statistic of 2000 resamples; drawn again are the seeds (first axis) of each stratum."""
    draws = [x[generator.integers(len(x), size=(2000, len(x)))] for x in strata]
    return statistic(np.concatenate(draws, axis=1))


def interval(statistic, strata, minus=()):
    """95 % bootstrap interval of a statistic, or of its difference between two sets of runs."""
    generator = np.random.default_rng(0)
    draws = bootstrap(statistic, strata, generator)
    if minus:
        draws = draws - bootstrap(statistic, minus, generator)
    return np.percentile(draws, [2.5, 97.5], axis=0)


def improvement_interval(x, y, random, envs):
    """95 % bootstrap interval of the improvement averaged over these environments; drawn again are
    the seeds."""
    generator = np.random.default_rng(0)
    total = 0
    for env in envs:
        runs = [[np.array(list(scores[env].values()))] for scores in (x, y)]
        means = [bootstrap(lambda draws: draws.mean(1), strata, generator) for strata in runs]
        gain, base = means - np.array(random[env])
        total += gain / base - 1
    return np.percentile(total / len(envs), [2.5, 97.5])


def align(curves):
    """Curves of several seeds where all of them have steps: steps (n), returns (seeds, n)."""
    first, last = max(curve[0, 0] for curve in curves), min(curve[-1, 0] for curve in curves)
    steps = np.unique(np.concatenate([curve[:, 0] for curve in curves]))
    steps = steps[(first <= steps) & (steps <= last)]
    return steps, np.array([np.interp(steps, *curve.T) for curve in curves])


def steps_to(threshold, curves):
    """The step at which the mean of the curves first reaches the threshold, or None."""
    steps, returns = align(curves)
    # The threshold may be such a mean itself, rounded otherwise.
    reached = steps[returns.mean(0) >= threshold - 1e-6]
    return float(reached[0]) if len(reached) else None


# ---- Text


def name(group):
    plain = group.replace("_", " ")
    return ALGORITHMS[group][0] if group in ALGORITHMS else OTHERS.get(group, plain)


def percent(values):
    """The mean of some improvements."""
    return f"{round(100 * mean(values)):+d} %" if values else "—"


def number(x, error=None):
    digits = 0 if abs(x) >= 100 else 1
    if error is None:
        return f"{x:.{digits}f}"
    return f"{x:.{digits}f}\u00a0±\u00a0{error:.{digits}f}"  # on one line


def cell(seeds):
    """mean ± standard error (number of seeds)"""
    x = list(seeds.values())
    error = np.std(x, ddof=1) / len(x) ** 0.5 if len(x) > 1 else None
    return f"{number(mean(x), error)} ({len(x)})" if x else "—"


def span(numbers):
    numbers = list(numbers)
    low, high = int(min(numbers)), int(max(numbers))
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def curves_of(data, group):
    return [curve for seeds in data.runs[group].values() for curve in seeds.values()]


def markdown(header, rows, sentence, data=None, groups=()):
    """A table, and a line under it that ends with the seeds and steps of its groups."""
    if not rows:
        return "There are no runs for this table yet."
    groups = [group for group in groups if group in data.runs]
    if groups:
        seeds = [span([len(seeds) for seeds in data.runs[group].values()]) for group in groups]
        counts = ", ".join(f"{name(group)} {n}" for group, n in zip(groups, seeds))
        if len(set(seeds)) == 1:
            counts = seeds[0]
        steps = [curve[-1, 0] for group in groups for curve in curves_of(data, group)]
        sentence += f" Seeds per environment: {counts}. Steps: {span(steps)}."
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join([*("| " + " | ".join(map(str, line)) + " |" for line in lines), "", sentence])


# ---- Tables


def scores_table(data, algorithms=ALGORITHMS):
    groups = [group for group in algorithms if group in data.runs]
    columns = {}
    for group in groups:
        column = {env: cell(seeds) for env, seeds in data.scores[group].items()}
        counts = {value.rpartition(" ")[2] for value in column.values()}
        if len(counts) == 1:  # say it once, in the title: narrower
            column = {env: value.rpartition(" ")[0] for env, value in column.items()}
        columns[" ".join([name(group), *(counts if len(counts) == 1 else ())])] = column
    envs = sorted({env for column in columns.values() for env in column})
    random = {env: number(value) for env, value in data.random.items()}
    published = {env: f"{row['spu']:g}" for env, row in data.published.items()}
    columns = {"random": random} | columns | {PUBLISHED: published}
    rows = []
    for env in envs:
        cells = [column.get(env, "—") for column in columns.values()]
        rows.append([env.removesuffix("-v4"), *cells])
    sentence = "Mean return of the last 100 episodes ± standard error over seeds (their number)."
    return markdown(["`-v4`", *columns], rows, sentence, data, groups)


def comparisons(data):
    """[(X, Y, improvement in each environment, the paper's in each, its average as text)] of those
    that have runs."""
    found = []
    for x, y, key, average in COMPARISONS:
        if values := improvement(data.scores.get(x, {}), data.scores.get(y, {}), data.random):
            paper = {env: row[key] for env, row in data.published.items()} if key else {}
            same = ""
            if key and len(values) < 10:
                same = f"{mean(paper[env] for env in values):+.0f}; of all ten "
            found.append((x, y, values, paper, f"{same}{average:+d}" if average else "—"))
    return found


def versus(x, y):
    return f"{name(x).removesuffix(' at 3M steps')} over {name(y)}"


def averages_table(data):
    """The averages over environments beside the paper's."""
    rows, scores, found = [], data.scores, comparisons(data)
    for x, y, values, _, average in found:
        bounds = "—"
        # One seed has no spread.
        if min(len(scores[group][env]) for group in (x, y) for env in values) > 1:
            low_high = improvement_interval(scores[x], scores[y], data.random, values)
            bounds = " to ".join(percent([v]) for v in low_high)
        rows.append([versus(x, y), f"**{percent(values.values())}**", bounds, average, len(values)])
    header = ["", "here", "95 % interval", "the paper, %", "environments"]
    sentence = (
        "(X − random) / (Y − random) − 1 of means over seeds, averaged over environments (the "
        "paper: ten, with 10 seeds). Intervals are bootstrapped over seeds, and too narrow with so "
        "few."
    )
    leads = []
    for _, y, values, *_ in (row for row in found if row[0] == "spu"):
        inside = [value for env, value in values.items() if env[:-3] in TUNED]
        outside = [value for env, value in values.items() if env[:-3] not in TUNED]
        if inside and outside:
            leads.append(f"over {name(y)} {percent(inside)} and {percent(outside)}")
    if leads:
        sentence += f" Where its constants were tuned ({', '.join(TUNED)}) and elsewhere, SPU is "
        sentence += f"{', '.join(leads)}."
    groups = dict.fromkeys(group for x, y, *_ in found for group in (x, y))
    return markdown(header, rows, sentence, data, groups)


def improvement_table(data):
    """Per environment and on average, each with the paper's percentage in brackets."""
    columns, averages, counts, found = [], [], [], comparisons(data)
    for _, _, values, paper, average in found:
        column = {env: percent([value]) for env, value in values.items()}
        if paper:
            column = {env: f"{cell} ({paper[env]:+.0f})" for env, cell in column.items()}
        columns.append(column)
        averages.append(f"**{percent(values.values())}** ({average})")
        counts.append(f"{len(values)} (10)")
    envs = sorted(set().union(*columns))
    rows = [[env, *(column.get(env, "—") for column in columns)] for env in envs]
    rows += [["**average**", *averages], ["environments", *counts]] if found else []
    sentence = (
        "(X − random) / (Y − random) − 1 of means over seeds. In brackets the paper's, of 10 "
        "seeds; its averages are of the same environments where it has them one by one, else of "
        "all ten."
    )
    groups = dict.fromkeys(group for x, y, *_ in found for group in (x, y))
    return markdown(["", *(versus(x, y) for x, y, *_ in found)], rows, sentence, data, groups)


def moved_table(data):
    """How far an iteration moves the policy, and in how many epochs: which limit was at work."""
    rows = []
    for env in sorted(data.moved.get("spu", {})):
        kl, epochs = np.mean(list(data.moved["spu"][env].values()), axis=0)
        ppo_kl = "—"
        if ppo := data.moved.get("ppo", {}).get(env):
            ppo_kl = f"{np.mean(list(ppo.values()), axis=0)[0]:.4f}"
        rows.append([env, f"{kl:.4f}", f"{epochs:.1f}", ppo_kl])
    counts = []
    for group in ("spu", "ppo"):
        if group in data.moved:
            seeds = span(len(seeds) for seeds in data.moved[group].values())
            counts.append(f"{name(group)}: {seeds}")
    sentence = (
        "Mean KL(π_θ‖π_k) after an iteration and mean number of epochs, over the whole run and all "
        f"seeds that kept it ({', '.join(counts)})."
    )
    return markdown(["", "SPU, mean KL", "SPU, epochs", "our PPO, mean KL"], rows, sentence)


def ablation_table(data):
    """Every row on the same runs: environments and seeds that full SPU and all ablations have."""
    scores = data.scores
    common = full = scores.get(ABLATION_BASELINE, {})
    groups = [group for group in PAPER_ABLATION if shared(scores.get(group, {}), full)]
    for group in groups:
        common = shared(common, scores[group])
    rows = []
    for group in [ABLATION_BASELINE, *groups] if groups else []:
        part = shared(scores[group], common)
        over_trpo = percent(improvement(part, scores.get("trpo", {}), data.random).values())
        title = "full SPU" if group == ABLATION_BASELINE else name(group)
        paper = f"{PAPER_ABLATION.get(group, 27):+d} %"
        rows.append([title, *map(cell, part.values()), over_trpo, paper])
    header = ["", *common, "over TRPO", "the paper, ten environments"]
    sentence = "Scores ± standard error over seeds (number of seeds), and (X − random) / "
    sentence += "(TRPO − random) − 1 averaged. All with `--max-epochs 30`, as in the paper."
    return markdown(header, rows, sentence, data, [ABLATION_BASELINE, *groups, "trpo"])


def iqm_table(data):
    rows, strata = [], {}

    def normalised(group, seeds):
        """The runs of each environment, where 0 is the random policy and 1 the published SPU."""
        for env, part in data.scores[group].items():
            if env in data.random and env in data.published:
                zero = data.random[env]
                one = data.published[env]["spu"]
                scores = np.array([score for seed, score in part.items() if seed in seeds])
                yield (scores - zero) / (one - zero)

    for group in (group for group in [*ALGORITHMS, ABLATION_BASELINE] if group in data.runs):
        parts = strata[group] = list(normalised(group, range(101)))
        runs, (low, high) = np.concatenate(parts), interval(iqm, parts)
        bounds = f"{low:.2f} to {high:.2f}"
        if min(map(len, parts)) == 1:
            bounds = "—"  # one seed has no spread
        rows.append([name(group), f"{iqm(runs):.2f}", bounds, len(parts), len(runs)])
    header = ["", "interquartile mean", "95 % interval", "environments", "runs"]
    sentence = (
        "0 is the random policy, 1 the published SPU. No interval where an environment has one "
        "seed; with two it is far too narrow. Compare only rows with the same environments."
    )
    if (spu := strata.get("spu")) and (ppo := strata.get("ppo")):
        low, high = interval(iqm, spu, minus=ppo)
        gap = iqm(np.concatenate(spu)) - iqm(np.concatenate(ppo))
        first_spu, first_ppo = (
            iqm(np.concatenate(list(normalised(group, (1, 2))))) for group in ("spu", "ppo")
        )
        sentence += f" SPU less our PPO: {gap:.2f} ({low:.2f} to {high:.2f}). On seeds 1 and 2 "
        sentence += f"alone: SPU {first_spu:.2f}, our PPO {first_ppo:.2f}."
    return markdown(header, rows, sentence, data, [*ALGORITHMS, ABLATION_BASELINE])


def steps_to_ppo_table(data):
    rows, groups = [], [group for group in ALGORITHMS if group in data.runs]
    for reference in (group for group in ("sb3_ppo", "ppo") if group in data.runs):
        for env, seeds in data.scores[reference].items():
            row, score = [], mean(seeds.values())
            for group in groups:
                curves = list(data.runs[group].get(env, {}).values())
                step = steps_to(score, curves) if curves else None
                row.append(f"{step / 1e6:.2f}" if step else "—" if curves else "")
            rows.append([f"{env}, {name(reference)}", number(score), *row])
    sentence = "Million steps until the mean curve first reaches that score (—: not at all; "
    sentence += "nothing: no runs)."
    return markdown(["final score of", "", *map(name, groups)], rows, sentence, data, groups)


def tuning_table(data, script):
    """Every setting tried on the tuning seeds, against the default on the same environments, seeds
    and steps."""
    rows = []
    tuning = data.tuning[script]
    envs = sorted({env for part in tuning.values() for env in part})
    for flags in sorted(tuning, key=lambda flags: ("--total-timesteps" in flags, flags)):
        part = tuning[flags]
        scores = []
        for env in envs:
            seeds = sorted(part.get(env, {}).items())
            scores.append(", ".join(number(score) for _, score in seeds) or "—")
        length = "".join(re.findall(r"--total-timesteps \d+", flags))
        default = tuning.get(length, {}) if flags != length else {}
        pairs = shared(part, default)
        change = percent(improvement(pairs, shared(default, part), data.random).values())
        change += f" ({sum(map(len, pairs.values()))})" if pairs else ""
        rows.append([f"`{flags}`" if flags else "**the default**", *scores, change])
    sentence = (
        "Mean return of the last 100 episodes, after a million steps if not said otherwise, with "
        "tuning seeds 101 and 102, in this order (one number: 101). The last column is the "
        "improvement over the default on the same environments and seeds (number of runs)."
    )
    return markdown(["", *envs, "over the default"], rows, sentence)


def sensitivity(data):
    """{group: mean improvement over TRPO} of the random vectors of constants, the worst first."""
    scores = data.scores
    means = {}
    for group in scores:
        if group.startswith(VECTORS):
            if values := improvement(scores[group], scores.get("trpo", {}), data.random):
                means[group] = mean(values.values())
    return {group: means[group] for group in sorted(means, key=means.get)}


def sensitivity_table(data):
    values, rows = sensitivity(data), []
    envs = sorted({env for group in values for env in data.runs[group]})
    for group, value in values.items():
        scores = [cell(data.scores[group].get(env, {})) for env in envs]
        rows.append([f"`{data.options[group]}`", *scores, percent([value])])
    if not rows:
        return markdown([], [], "")
    x = list(values.values())
    curves = [curve for group in values for curve in curves_of(data, group)]
    quarter = percent([x[len(x) // 4]])
    half = percent([x[len(x) // 2]])
    sentence = (
        f"{sum(v > 0 for v in x)} of {len(x)} beat TRPO; 75 % reach at least {quarter}, 50 % at "
        f"least {half}. In the paper all of 100 do, 75 % by +18 %, 50 % by +21 %. Number "
        f"of seeds in brackets. Steps: {span(curve[-1, 0] for curve in curves)}."
    )
    return markdown(["options", *envs, "over TRPO"], rows, sentence)


def speed_table(data):
    """Ratios round by round, since a slow spell of the machine meets all programs of a round."""

    def ratio(rows, spu, peer):
        pairs = [(row[spu], row[peer]) for row in rows if row.get(spu) and row.get(peer)]
        values = [float(a) / float(b) for a, b in pairs]
        if not values:
            return "—"
        return f"{np.median(values):.2g} ({min(values):.2g} to {max(values):.2g})"

    peers = [f"{who}_steps_per_second" for who in ("sb3_ppo", "plain_ppo", "our_ppo")]
    kinds = {
        "spu_10_epochs_steps_per_second": "10 epochs (the default)",
        "spu_steps_per_second": "30 epochs",
    }
    table = []
    for env in dict.fromkeys(row["env_id"] for row in data.speed):
        rows = [row for row in data.speed if row["env_id"] == env]
        for column, kind in kinds.items():
            if values := [float(row[column]) for row in rows if row.get(column)]:
                kind = "9 epochs, SB3 too" if "-v" not in env else kind
                ratios = [ratio(rows, column, peer) for peer in peers]
                table.append([f"{env}, {kind}", f"{np.median(values):.0f}", *ratios, len(values)])
    memory = {row["env_id"]: row["spu_memory_mb"] for row in data.speed}
    memory = ", ".join(f"{env} {mb} MB" for env, mb in memory.items())
    note = (
        "SPU's steps per second, and its multiple of the others' (range): medians of rounds that "
        "run all programs in turn, one thread each on MuJoCo, all cores on Atari. On MuJoCo the "
        "others do 10 epochs. Plain PPO is in the style of CleanRL, not compiled. Memory of SPU: "
        f"{memory}."
    )
    header = ["", "SPU, steps/s", "× SB3 PPO", "× plain PPO", "× our PPO", "rounds"]
    return markdown(header, table, note)


def atari_table(data):
    """A row per run: the games' scores as training goes on, and its options."""
    rows = []
    groups = [group for group in data.runs if "atari" in group]
    for group in sorted(groups, key=lambda group: (group not in ATARI, group)):
        options = re.sub(r" ?--total-timesteps \d+", "", data.options[group])
        title = ATARI[group][0] if group in ATARI else f"SPU `{options}`"
        for env, seeds in data.runs[group].items():
            for seed, curve in seeds.items():
                steps, scores = curve.T
                points = np.searchsorted(steps, np.arange(1, 5) / 4 * steps[-1])
                shown = [number(score) for score in (scores[0], *scores[points])]
                rows.append([env, title, seed, f"{steps[-1]:,.0f}", *shown])
    header = ["", "algorithm", "seed", "steps", "first games", "after ¼", "½", "¾", "at the end"]
    sentence = "Mean score of the last 100 games of a single run each, true and over all lives."
    return markdown(header, sorted(rows, key=lambda row: row[0] != "Pong"), sentence)


TABLES = {
    "front": lambda data: scores_table(data, ["trpo", "ppo", "spu"]),
    "scores": scores_table,
    "averages": averages_table,
    "improvement": improvement_table,
    "moved": moved_table,
    "ablation": ablation_table,
    "iqm": iqm_table,
    "steps_to_ppo": steps_to_ppo_table,
    "sensitivity": sensitivity_table,
    "speed": speed_table,
    "atari": atari_table,
    "details": lambda data: tuning_table(data, "spu_continuous"),
    "linf": lambda data: tuning_table(data, "spu_linf"),
    "reverse_kl": lambda data: tuning_table(data, "spu_reverse_kl"),
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


def draw_curves(data, envs, path, algorithms=ALGORITHMS):
    """A panel per environment: mean over seeds, a 95 % bootstrap interval, and SPU's published
    score."""
    columns = min(len(envs), 4)
    rows = -(-len(envs) // columns)
    full = rows * columns == len(envs)  # no place left for the legend, so it goes below
    size = (2.9 * columns, 2.3 * rows + 0.6 * full)
    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    handles = {}
    for index, (axis, env) in enumerate(zip(axes.flat, envs)):
        for order, (group, (title, color)) in enumerate(algorithms.items()):
            if curves := list(data.runs.get(group, {}).get(env, {}).values()):
                steps, returns = align(curves)
                front = 20 if title == "SPU" else 3 + order
                line = {"color": color, "lw": 2 if title == "SPU" else 1.4, "zorder": front}
                handles[title] = axis.plot(steps / 1e6, returns.mean(0), **line)[0]
                if len(curves) > 1:
                    low, high = interval(lambda draws: draws.mean(1), [returns])
                    shade = {"color": color, "alpha": 0.15, "lw": 0, "zorder": front - 1}
                    axis.fill_between(steps / 1e6, low, high, **shade)
        if env in data.published:
            line = axis.axhline(data.published[env]["spu"], color="0.25", lw=1.2, ls=":", zorder=2)
            handles[PUBLISHED] = line
        axis.set_title(env, fontsize=10)
        axis.set_xlabel("million steps" if index + columns >= len(envs) else "", fontsize=9)
        axis.yaxis.set_major_formatter(
            lambda y, _: f"{y / 1000:g}k" if abs(y) >= 10_000 else f"{y:g}"
        )
        axis.set_xlim(left=0)
        axis.tick_params(labelsize=8, length=2)
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="0.93")
    for axis in axes.flat[len(envs) :]:
        axis.axis("off")
    titles = [*(title for title, _ in algorithms.values()), PUBLISHED]
    titles = [title for title in titles if title in handles]
    legend = {"handles": [handles[title] for title in titles], "labels": titles}
    legend |= {"frameon": False, "fontsize": 9}
    if full:
        columns = len(titles) if len(titles) < 6 else 4
        figure.legend(loc="outside lower center", ncols=columns, **legend)
    else:
        axes.flat[-1].legend(loc="center right", **legend)
    figure.supylabel("return of the last 100 episodes", fontsize=9)
    save(figure, path)


def draw_sensitivity(data, path):
    """The share of the hyper-parameter vectors whose improvement over TRPO is at most x."""
    x = 100 * np.array(list(sensitivity(data).values()))
    figure, axis = plt.subplots(figsize=(4.6, 3.2), layout="constrained")
    axis.ecdf(x, color=ALGORITHMS["spu"][1], lw=2, label=f"here, {len(x)} vectors")
    axis.plot([18, 21], [0.25, 0.5], "o", color="0.25", label="the paper, 100 vectors")
    axis.axvline(0, color="0.7", lw=1, zorder=0)
    axis.set(xlabel="improvement over TRPO, %", ylabel="share of the vectors", ylim=(0, 1.02))
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, fontsize=9)
    save(figure, path)


def save(figure, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    # 256 colours: a third of the size.
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
    plt.close(figure)
    print(f"wrote {path.name}")


def refuse(sentence, code=2):
    print(f"report.py: {sentence}", file=sys.stderr)
    sys.exit(code)


def main():
    args = tyro.cli(Args, description=__doc__)
    if not args.results.is_dir():
        refuse(f"there is no folder {args.results}.")
    data = load(args.results)
    tables = {table: make(data) for table, make in TABLES.items()}
    for title in ("README.md", "benchmark/README.md"):
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
    envs = {env for group in ALGORITHMS for env in data.runs.get(group, {})}
    pictures = args.output / "benchmark/results"
    if envs:
        draw_curves(data, sorted(envs), pictures / "learning_curves.png")
    if small := [env for env in SMALL if env in envs]:
        front = {group: ALGORITHMS[group] for group in FRONT}
        draw_curves(data, small, pictures / "learning_curves_small.png", front)
    if games := sorted({env for group in ATARI for env in data.runs.get(group, {})}):
        draw_curves(data, games, pictures / "learning_curves_atari.png", ATARI)
    if sensitivity(data):
        draw_sensitivity(data, pictures / "sensitivity.png")


if __name__ == "__main__":
    main()
