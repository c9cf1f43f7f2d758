"""Print the tuning runs as a table: a row per setting, on the scale of PROTOCOL.md.

python benchmark/tuning.py              # the screening of levers and each algorithm's constants
python benchmark/tuning.py screen_      # only groups that begin like this
"""

import csv
import sys
from pathlib import Path
from statistics import mean

HERE = Path(__file__).resolve().parent
TASKS = ["HalfCheetah", "Hopper", "Walker2d", "Reacher", "Humanoid"]


def read(path):
    with open(path) as file:
        return list(csv.DictReader(line for line in file if not line.startswith("#")))


def scale():
    """{task: (return of random actions, published return of SPU)}"""
    random = {row["env_id"]: row["mean"] for row in read(HERE / "results" / "random.csv")
              if row["actions"] == "uniform"}  # fmt: skip
    published = {row["env"]: row["spu"] for row in read(HERE / "published.csv")}
    return {task: (float(random[f"{task}-v4"]), float(published[f"{task}-v2"])) for task in TASKS}


def scores(group):
    """{task: [score of each seed]}: the mean return of the last 100 training episodes."""
    found = {}
    for task in TASKS:
        paths = sorted(group.glob(f"{task}-v4__*.csv"))
        found[task] = [float(read(path)[-1]["return"]) for path in paths]
    return found


def main():
    start = sys.argv[1] if len(sys.argv) > 1 else ""
    print(f"| setting | {' | '.join(TASKS)} | average | without Humanoid |")
    print("|---" * (len(TASKS) + 3) + "|")
    for group in sorted((HERE / "results" / "tuning").iterdir()):
        found = scores(group)
        if not group.name.startswith(start) or not any(found.values()):
            continue
        cells = [", ".join(f"{x:.4g}" for x in found[task]) or "-" for task in TASKS]
        parts = {}
        for task, (random, published) in scale().items():
            relative = [(x - random) / (published - random) for x in found[task]]
            if relative:
                parts[task] = sum(relative) / len(relative)
        averages = "- | -"
        if len(parts) == len(TASKS):
            others = [x for task, x in parts.items() if task != "Humanoid"]
            averages = f"{mean(parts.values()):.2f} | {mean(others):.2f}"
        print(f"| {group.name} | {' | '.join(cells)} | {averages} |")


if __name__ == "__main__":
    main()
