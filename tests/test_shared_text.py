"""The diff is the lesson: what two scripts share is the same text, and what differs is the algorithm's own."""

import ast
import difflib

import pytest
from conftest import CONTINUOUS, ROOT

# Same-named functions and classes that may differ from spu_continuous.py, and why.
INTENDED = {
    "spu_linf": {
        "Args": "lambda, epsilon and delta mean something else; no ablations; the error in probabilities",
        "check": "delta may be left out",
        "losses": "a squared error of ratios instead of a KL divergence",
        "main": "targets instead of advantages, no stopping rule, another curve",
    },
    "spu_reverse_kl": {
        "Args": "epsilon is the target's constraint; acceptance and stopping have thresholds of their own; no lambda",
        "check": "the names of the thresholds",
        "gaussian_kl": "its docstring: both directions are used",
        "spu_loss": "log(pi*/pi_k) instead of A / lambda; the reverse KL accepts",
        "losses": "both directions of the KL",
        "main": "the targets, and the reverse KL in the stopping rule",
    },
    "benchmark/ppo_continuous": {
        "Args": "a clip instead of SPU's constants and ablations",
        "check": "the names of the constants",
        "losses": "the clipped objective",
        "main": "no stopping rule, no accepted states",
    },
}
OWN = {  # and those that only one script has
    "spu_continuous": set(),
    "spu_linf": {"target_ratios", "solve_lambda"},
    "spu_reverse_kl": {"log_target_ratios"},
    "benchmark/ppo_continuous": {"ppo_loss"},
}
VARIANTS = [*(name for name in CONTINUOUS if name != "spu_continuous"), "benchmark/ppo_continuous"]


def parts(script):
    """The source of each function, class and other statement of a script, in order."""
    text = (ROOT / f"{script}.py").read_text()
    nodes = ast.parse(text).body[1:]  # without the docstring
    return {getattr(node, "name", None) or ast.unparse(node): ast.get_source_segment(text, node) for node in nodes}


@pytest.mark.parametrize("script", VARIANTS)
def test_what_scripts_share_is_the_same_text(script):
    reference, parts_here = parts("spu_continuous"), parts(script)
    differing = {name for name in parts_here if name in reference and parts_here[name] != reference[name]}
    assert differing == set(INTENDED[script])
    assert set(parts_here) - set(reference) == OWN[script]
    assert set(reference) - set(parts_here) <= {"spu_loss"}
    common = [name for name in parts_here if name in reference]
    assert common == [name for name in reference if name in parts_here]  # in the same order


@pytest.mark.parametrize("script", VARIANTS)
def test_main_differs_in_a_few_lines(script):
    a, b = (parts(name)["main"].splitlines() for name in ("spu_continuous", script))
    changed = [line for line in difflib.unified_diff(a, b, n=0) if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 16, changed


def test_atari_shares_what_does_not_depend_on_pixels():
    reference, atari = parts("spu_continuous"), parts("spu_atari")
    same = {name for name in atari if not name.startswith(("import", "from")) and atari[name] == reference.get(name)}
    assert same >= {"refuse", "spu_loss", "gae", "save", "load"}
    lines = set(reference["main"].splitlines())
    shared = [line for line in atari["main"].splitlines() if line in lines]
    assert len(shared) > 60  # about half of it


@pytest.mark.parametrize("script, lines", [*((name, 450) for name in CONTINUOUS), ("spu_atari", 500)])
def test_a_script_is_short_and_stands_alone(script, lines):
    text = (ROOT / f"{script}.py").read_text()
    assert len(text.splitlines()) <= lines
    imported = {
        alias.name for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import) for alias in node.names
    }
    imported |= {node.module for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("spu") for name in imported)
