"""The benchmark's runner: it keeps what a run learned, skips what is there, and goes on where it was cut off."""

import csv
import importlib.util
import sys

import numpy as np
import pytest
from conftest import ROOT, events, run_dir


@pytest.fixture
def runner(tmp_path, monkeypatch):
    spec = importlib.util.spec_from_file_location("benchmark_run", ROOT / "benchmark" / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    flags = "--num-steps 200 --total-timesteps 1200 --max-epochs 1 --no-compile --eval-episodes 1 --checkpoint-every 1"
    monkeypatch.setattr(module, "PLAN", {"small": ("spu_continuous", ["Pendulum-v1"], [1], flags)})
    monkeypatch.setattr(module, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(module, "WORK", tmp_path / "work")
    return module


def main(runner, monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["run.py", *words])
    runner.main()


def test_a_job_leaves_its_curve_and_is_not_run_again(runner, monkeypatch, tmp_path, capsys):
    main(runner, monkeypatch, "small", "--dry-run")
    assert capsys.readouterr().out == "python benchmark/run.py small --only Pendulum-v1__1\n"
    main(runner, monkeypatch, "small")
    lines = (tmp_path / "results" / "small" / "Pendulum-v1__1.csv").read_text().splitlines()
    assert lines[0].startswith("# command: python spu_continuous.py --env-id Pendulum-v1 --seed 1 --num-steps 200")
    rows = list(csv.DictReader(line for line in lines if not line.startswith("#")))
    assert [int(row["step"]) for row in rows] == [200, 400, 600, 800, 1000, 1200]
    scalars = events(run_dir(tmp_path / "work" / "small" / "Pendulum-v1__1"))
    returns = [value for _, value in scalars["charts/episodic_return"]]
    kl = np.array([value for _, value in scalars["spu/kl_mean"]])
    moved = f"mean of spu/kl_mean: {kl.mean():.3g}, median {np.median(kl):.3g}, most {kl.max():.3g}"
    assert lines[2].endswith(f", episodes: 6, {moved}, mean of spu/epochs_used: 1, median 1, most 1")
    np.testing.assert_allclose([float(row["return"]) for row in rows], np.cumsum(returns) / np.arange(1, 7), atol=0.01)
    main(runner, monkeypatch, "small", "--dry-run")
    assert capsys.readouterr().out == ""


def test_an_unknown_group_is_refused(runner, monkeypatch):
    with pytest.raises(SystemExit, match="There is no group large: the plan has small"):
        main(runner, monkeypatch, "large")
