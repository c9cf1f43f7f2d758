"""The diff is the lesson: what two scripts share is the same text, and what differs is the algorithm's own."""

import ast
import difflib
import re
import sys
import tomllib

import pytest
from conftest import CONTINUOUS, ROOT

# Same-named functions and classes that may differ from spu_continuous.py, and why.
INTENDED = {
    "spu_linf": {
        "Args": "lambda, epsilon and delta mean something else; a brake; the error in probabilities",
        "estimate": "the target ratios and their lambda",
        "policy_loss": "a squared error of ratios instead of a KL divergence",
        "fit": "max_kl ends the policy's epochs; no joint stopping",
        "train": "lambda in the log instead of the accepted states",
        "check": "epsilon is at most 1, delta may be left out, max_kl",
    },
    "spu_reverse_kl": {
        "Args": "epsilon is the target's constraint; acceptance and stopping have thresholds; no lambda",
        "spu_loss": "log(pi*/pi_k) instead of A / lambda; the reverse KL accepts",
        "estimate": "log(pi*/pi_k), less its mean",
        "policy_loss": "both directions of the KL",
        "fit": "the reverse KL ends the policy's epochs; no joint stopping",
        "train": "a state is accepted by `accept`",
        "check": "the names of the thresholds",
    },
    "benchmark/ppo_continuous": {
        "Args": "a clip and a target KL instead of SPU's constants",
        "estimate": "no constants to hand on",
        "policy_loss": "the clipped objective",
        "fit": "target_kl ends the policy's epochs; no joint stopping",
        "train": "no accepted states",
        "check": "the names of the constants",
    },
    "benchmark/trpo_continuous": {
        "Args": "TRPO's constants instead of SPU's",
        "estimate": "no constants to hand on",
        "policy_loss": "the surrogate objective",
        "fit": "one natural gradient step for the policy",
        "train": "whether the line search found a step",
        "check": "the names of the constants",
    },
}
OWN = {  # and those that only one script has
    "spu_continuous": set(),
    "spu_linf": {"target_ratios", "solve_lambda"},
    "spu_reverse_kl": {"log_target_ratios"},
    "benchmark/ppo_continuous": {"ppo_loss"},
    "benchmark/trpo_continuous": {
        "conjugate_gradients",
        "fisher_product",
        "trust_region_step",
        "mean_kl",
    },
}
VARIANTS = list(INTENDED)


def parts(script):
    """The source of each function, class and other statement of a script, in order."""
    text = (ROOT / f"{script}.py").read_text()
    nodes = ast.parse(text).body[1:]  # without the docstring
    return {
        getattr(node, "name", None) or ast.unparse(node): ast.get_source_segment(text, node)
        for node in nodes
    }


@pytest.mark.parametrize("script", VARIANTS)
def test_what_scripts_share_is_the_same_text(script):
    reference, parts_here = parts("spu_continuous"), parts(script)
    differing = {
        name for name in parts_here if name in reference and parts_here[name] != reference[name]
    }
    assert differing == set(INTENDED[script])
    assert set(parts_here) - set(reference) == OWN[script]
    assert set(reference) - set(parts_here) <= {"spu_loss"}
    common = [name for name in parts_here if name in reference]
    assert common == [name for name in reference if name in parts_here]  # in the same order


@pytest.mark.parametrize("script", VARIANTS)
def test_the_training_loop_differs_in_a_few_lines(script):
    a, b = (parts(name)["train"].splitlines() for name in ("spu_continuous", script))
    lines = difflib.unified_diff(a, b, n=0)
    changed = [line for line in lines if line[0] in "+-" and line[:3] not in ("+++", "---")]
    assert 0 < len(changed) <= 12, changed


def test_atari_shares_what_does_not_depend_on_pixels():
    reference, atari = parts("spu_continuous"), parts("spu_atari")
    own = [name for name in atari if not name.startswith(("import", "from"))]
    same = {name for name in own if atari[name] == reference.get(name)}
    assert same >= {"refuse", "spu_loss", "gae", "update_moments"}


def test_ppo_on_atari_differs_in_its_update_alone():
    reference, ppo = parts("spu_atari"), parts("benchmark/ppo_atari")
    differing = {name for name in ppo if name in reference and ppo[name] != reference[name]}
    assert differing == {"Args", "joint_loss", "fit", "check"}
    assert set(ppo) - set(reference) == {"ppo_loss"} and set(reference) - set(ppo) == {"spu_loss"}


# Lines and characters: of the whole script, and of what comes before the plumbing, which is what one
# reads to learn the algorithm.
SIZES = {name: ((610, 31_200), (405, 21_100)) for name in CONTINUOUS}
SIZES["spu_atari"] = ((650, 31_900), (370, 18_500))


@pytest.mark.parametrize("script", SIZES)
def test_a_script_is_plain_and_stands_alone(script):
    text = (ROOT / f"{script}.py").read_text()
    lesson, plumbing = text.split(
        "# =================================================================== Plumbing\n"
    )
    assert "def train(" in lesson and "def main(" in plumbing
    for part, (lines, characters) in zip((text, lesson), SIZES[script]):
        assert len(part.splitlines()) <= lines and len(part) <= characters
    assert max(len(line) for line in text.splitlines()) <= 100
    tree = ast.parse(text)
    packed = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.targets[0], ast.Tuple)
    ]
    assert len(packed) <= 5  # assignments like `a, b = x, y`
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert not any(name.startswith("spu") for name in imported)


@pytest.mark.parametrize("script", SIZES)
def test_a_script_says_what_it_needs(script):
    """The block of PEP 723, from which `uv run` makes an environment: the pins of requirements.txt."""
    text = (ROOT / f"{script}.py").read_text()
    block = re.match(r"# /// script\n((?:# .*\n)+)# ///\n", text).group(1)
    needs = tomllib.loads(block.replace("# ", "", 1).replace("\n# ", "\n"))
    assert needs["requires-python"] == ">=3.11"
    pins = (ROOT / "requirements.txt").read_text().splitlines()
    assert needs["dependencies"] and set(needs["dependencies"]) <= set(pins)
    names = {pin.split("==")[0].replace("-", "_") for pin in needs["dependencies"]}
    imported = {
        alias.name.split(".")[0]
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Import)
        for alias in node.names
    }
    assert imported - set(sys.stdlib_module_names) <= names
