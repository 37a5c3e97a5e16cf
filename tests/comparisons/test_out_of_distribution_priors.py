"""The study of the last layer over prior scales: its rows, its verdicts on made-up tables, and a tiny run."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("out_of_distribution_priors")


@pytest.fixture(scope="module")
def run(script: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("priors")
    return script.main(tiny=True, out=folder, checkpoint=folder / "kept")


def test_rows_of_seeds_are_disjoint(script: Any) -> None:
    loaded = [script.load_images("digits", 80, 40, 30, seed, disjoint=True) for seed in range(3)]
    # Seeds scale pixels by their own training rows, so the same image is not the same bytes; its order of pixels is.
    orders = [
        {np.argsort(image.ravel(), kind="stable").tobytes() for image in (*each.train, *each.test)}
        for each in loaded
    ]
    assert [len(each) for each in orders] == [120] * 3
    assert len(set.union(*orders)) == 360
    with pytest.raises(ValueError, match="needs rows up to"):
        script.load_images("digits", 800, 400, 30, 2, disjoint=True)


def test_a_run_has_every_method_scale_and_set(script: Any, run: Any) -> None:
    sizes = run.sizes
    found = {(row["seed"], row["factor"], row["method"], row["set"]): row for row in run.tables["scores"]}
    assert len(found) == sizes.seeds * len(sizes.factors) * 3 * 4 == len(run.tables["scores"])
    assert all(math.isfinite(row["confidence"]) for row in found.values())
    turned = [row for row in found.values() if row["set"] == script.TURNED]
    assert {row["images"] for row in turned} == {sizes.turned * len(sizes.angles)}
    assert len(run.tables["convergence"]) == sizes.seeds * len(sizes.factors) * 4
    assert all(row["functions"] <= 200 for row in run.tables["convergence"])
    # Laplace was taken at a mode: its figures have no such warning.
    assert not any("not a mode" in row["reason"] for row in run.tables["costs"])
    assert matplotlib.image.imread(run.out / "priors_lenet.png").std() > 0.0


def tables(shift: float, spread: float = 0.01, rhat: float = 1.001, seeds: int = 10) -> dict[str, Any]:
    """Made-up rows: HMC is better than the mode by `shift` in every score, and Laplace by three times that."""
    rng = np.random.default_rng(1)
    scores: list[dict[str, Any]] = []
    for architecture in ("LeNet", "transformer"):
        for seed in range(seeds):
            for factor in (0.125, 1.0, 4.0):
                for of in ("test", "turned", "elsewhere", "shuffled"):
                    for method, times in (("mode", 0.0), ("HMC", 1.0), ("Laplace at the mode", 3.0)):
                        gain = times * shift + rng.normal(0.0, spread)
                        scores.append(
                            {
                                "architecture": architecture,
                                "factor": factor,
                                "seed": seed,
                                "method": method,
                                "set": of,
                                "log_score": -2.0 + gain + (1.0 if factor == 0.125 else 0.0),
                                "ece": 0.5 - gain,
                                "confidence": 0.8 - gain,
                            }
                        )
    keys = {(row["architecture"], row["factor"], row["seed"], row["set"]) for row in scores}
    names = ("architecture", "factor", "seed", "set")
    convergence = [dict(zip(names, key, strict=True)) | {"rhat": rhat, "ess_bulk": 2000.0} for key in keys]
    costs = [
        {"architecture": a, "factor": f, "seed": s, "log_evidence": -abs(f - 1.0)}
        for a, f, s in {key[:3] for key in keys}
    ]
    return {"scores": scores, "convergence": convergence, "costs": costs}


def judged(script: Any, tmp_path: Path, made: dict[str, Any]) -> dict[str, str]:
    study = script.Study(script.FULL, tmp_path, tables=made)
    claims = script.read_claims("out_of_distribution_priors")
    by_text = {claim.text: key for key, claim in claims.items()}
    return {by_text[each.claim]: each.verdict for each in script.judge(study)}


@pytest.mark.parametrize(("shift", "outcome"), [(0.1, REPRODUCED), (-0.1, REFUTED), (0.0, UNDECIDED)])
def test_the_posterior_is_held_to_its_mode(script: Any, tmp_path: Path, shift: float, outcome: str) -> None:
    found = judged(script, tmp_path, tables(shift))
    for name in ("written-log_score", "written-ece", "evidence-elsewhere", "ahead-shuffled"):
        assert found[f"lenet-{name}"] == outcome, name


def test_the_share_of_the_gain_close_to_a_half(script: Any, tmp_path: Path) -> None:
    # HMC has a third of the gain of Laplace.
    assert judged(script, tmp_path, tables(0.1))["lenet-share-written"] == REPRODUCED
    made = tables(0.1)
    for row in made["scores"]:
        if row["method"] == "HMC":
            row["log_score"] += 0.1
    # Two thirds.
    assert judged(script, tmp_path, made)["lenet-share-written"] == REFUTED


@pytest.mark.parametrize(("gap", "outcome"), [(0.08, REPRODUCED), (0.12, REFUTED), (0.1, UNDECIDED)])
def test_near_is_within_the_margin_on_both_sides(
    script: Any, tmp_path: Path, gap: float, outcome: str
) -> None:
    # Laplace minus HMC is twice the shift.
    assert judged(script, tmp_path, tables(0.5 * gap, spread=0.003))["lenet-near-test"] == outcome
    assert judged(script, tmp_path, tables(-0.5 * gap, spread=0.003))["transformer-near-turned"] == outcome


@pytest.mark.parametrize(("rhat", "decided"), [(1.0099, True), (1.0101, False)])
def test_chains_that_have_not_converged_decide_nothing(
    script: Any, tmp_path: Path, rhat: float, decided: bool
) -> None:
    found = judged(script, tmp_path, tables(0.1, rhat=rhat))
    assert (set(found.values()) == {UNDECIDED}) is not decided


def test_an_architecture_that_was_not_run_says_so(script: Any, tmp_path: Path) -> None:
    made = {
        name: [row for row in rows if row["architecture"] == "LeNet"] for name, rows in tables(0.1).items()
    }
    found = judged(script, tmp_path, made)
    assert {value for key, value in found.items() if key.startswith("transformer")} == {NOT_RUN}
    assert NOT_RUN not in {value for key, value in found.items() if key.startswith("lenet")}


def test_the_scale_of_a_seed_is_the_one_with_the_largest_evidence(script: Any) -> None:
    made = tables(0.1)
    for row in made["costs"]:
        if row["seed"] == 3:
            row["log_evidence"] = row["factor"]
    chosen = script.Case(script.Referee({}), "LeNet", made).chosen()
    assert chosen[3] == 4.0
    assert {value for seed, value in chosen.items() if seed != 3} == {1.0}
