"""Keep the agents that one can watch right after the installation: of each task the median seed.

    python benchmark/agents.py                    # from the runs under runs/benchmark/
    python benchmark/agents.py --runs FOLDER      # from those of another work tree
    python spu_continuous.py --evaluate benchmark/agents/Walker2d-v4.pt --capture-video

For each task of SPU's reported groups: the seed whose score, the mean return of the last 100
episodes of training, is the median of the seeds that are finished (of an even number the lower of
the two in the middle). Its agent is copied to benchmark/agents/TASK.pt, without Adam's moments,
which make two thirds of the file. agents.csv says which seed it is, of how many, and what it
scored: in training, and in the evaluation that ended its run. `--evaluate` plays the same episodes.
"""

import csv
from dataclasses import dataclass
from pathlib import Path

import torch
import tyro
from run import RESULTS, ROOT, WORK, newest_agent

GROUPS = {
    "spu": "spu_continuous.py",
    "pong_spu": "spu_atari.py",
    "breakout_spu": "spu_atari.py",
}
HEADER = ["task", "script", "seed", "seeds", "training_score", "evaluation"]


@dataclass
class Args:
    results: Path = RESULTS / "reported"  # the finished runs' CSV files
    runs: Path = WORK / "reported"  # their run folders
    output: Path = ROOT / "benchmark" / "agents"


def finished(folder):
    """{task: [(score, seed, evaluation)]} of a group, the worst first."""
    tasks = {}
    for path in folder.glob("*__*.csv"):
        task, seed = path.stem.rsplit("__", 1)
        lines = path.read_text().splitlines()
        (evaluation,) = [line.split()[-1] for line in lines if line.startswith("# evaluation: ")]
        score = float(lines[-1].split(",")[1])
        tasks.setdefault(task, []).append((score, int(seed), float(evaluation)))
    return {task: sorted(seeds) for task, seeds in sorted(tasks.items())}


def without_adam(saved):
    """What is saved of a run, but for Adam's moments. Its script can play it still."""
    saved.pop("adam", None)  # Atari's
    for name, x in saved["agent"].items():
        if name.endswith((".m", ".v")):
            saved["agent"][name] = torch.zeros(()).expand_as(x)  # one number in the file
    return saved


def main():
    args = tyro.cli(Args, description=__doc__)
    args.output.mkdir(parents=True, exist_ok=True)
    table = args.output / "agents.csv"
    rows = {}
    if table.exists():
        rows = {row["task"]: list(row.values()) for row in csv.DictReader(table.open())}
    for group, script in GROUPS.items():
        for task, seeds in finished(args.results / group).items():
            score, seed, evaluation = seeds[(len(seeds) - 1) // 2]
            agent = newest_agent(args.runs / group / f"{task}__{seed}")
            if agent is None:
                print(f"{task}: the run folder of seed {seed} is gone, so it stays as it was")
                continue
            torch.save(
                without_adam(torch.load(agent, weights_only=True)), args.output / f"{task}.pt"
            )
            rows[task] = [task, script, seed, len(seeds), score, evaluation]
            print(f"{task}: seed {seed} of {len(seeds)}, {score} in training, then {evaluation}")
    with table.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(HEADER)
        writer.writerows(rows[task] for task in sorted(rows))


if __name__ == "__main__":
    main()
