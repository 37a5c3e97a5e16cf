"""The study of certified answers: its list, its rule at both parts of the rows, its verdicts, its limit, a tiny run."""

from __future__ import annotations

import importlib
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arviz_stats.base import array_stats

import ppl_bnn as bnn
from comparisons.claims import NOT_RUN, REFUTED, REPRODUCED, UNDECIDED

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        patch.syspath_prepend(str(FOLDER / "performance"))
        yield importlib.import_module("certified_answer")


@pytest.fixture(scope="module")
def arms(script: Any) -> Any:
    return importlib.import_module("certified_arms")


def test_the_list_is_the_one_that_is_declared(script: Any) -> None:
    listed = script.PROBLEMS
    assert len({each.name for each in listed}) == 24
    assert len({each.table for each in listed}) == 15
    assert Counter(each.width for each in listed) == {10: 12, 50: 12}
    assert Counter(each.activation for each in listed) == {"tanh": 12, "relu": 12}
    asked = {"concrete", "energy", "yacht", "airfoil", "power-plant", "protein"}
    assert asked <= {each.table for each in listed}
    assert set(script.SIMULATED) <= {each.table for each in listed}
    here = [each for each in listed if each.table not in asked]
    tasks = {each.name: script.task_of(each, 2000) for each in here}
    # Tables of classes are all here; of the twelve problems of numbers seven are not.
    assert sum(task.classes > 0 for task in tasks.values()) == 12
    for task in tasks.values():
        assert np.allclose(task.x.mean(0), 0.0, atol=1e-9)
        assert len(task.x_test) >= 24


def test_full_sizes_are_the_defaults_of_the_methods(script: Any) -> None:
    sizes = script.FULL
    for method in (bnn.NUTS(), bnn.MCLMC()):
        assert (method.chains, method.warmup, method.draws) == (sizes.chains, sizes.warmup, sizes.draws)
    assert (sizes.limit, sizes.rule, sizes.seeds) == (600.0, "rhat<1.01, ess>400", 3)


@pytest.mark.parametrize(("activation", "classes"), [("tanh", 0), ("relu", 0), ("relu", 3)])
def test_the_model_by_hand_is_that_of_the_language(
    script: Any, double_by_default: None, activation: str, classes: int
) -> None:
    import numpyro.infer.util

    from ppl_bnn.backends.program import Program
    from ppl_bnn.backends.systems import system

    problem = importlib.import_module("problem")
    x, y = problem.data(9)
    y = np.arange(9) % 3 if classes else y
    chosen = system("numpyro")
    network = ([4], activation, classes)
    with chosen.session("float64", "cpu"):
        data = chosen.asarray(x), chosen.asarray(y)
        program = Program.of(chosen, problem.in_the_language(*network), *data, language=True)
        rng = np.random.default_rng(0)
        u = {name: rng.normal(size=site.unconstrained_shape) for name, site in program.sites.items()}
        values = {name: chosen.asarray(value) for name, value in u.items()}
        ours = float(program.log_joint(values, *data))
        theirs = numpyro.infer.util.potential_energy(problem.by_hand_in_numpyro(*network), data, {}, values)
    assert np.isclose(ours, -float(theirs), rtol=1e-12)


def draws_of(task: Any, rng: np.random.Generator, chains: int, draws: int) -> dict[str, np.ndarray]:
    """Independent draws of all weights: chains that agree."""
    features, width = task.x.shape[1], task.width
    shapes = {"hidden0.weight": (features, width), "hidden0.bias": (width,)}
    shapes |= {"output.weight": (width, 1), "output.bias": (1,), "noise": ()}
    return {name: 0.3 * rng.normal(size=(chains, draws, *shape)) for name, shape in shapes.items()}


def test_the_rule_is_arviz_of_the_functions_at_training_and_at_test_rows(arms: Any) -> None:
    """A unit that is off at all training rows, with an offset for each chain, disagrees at the test rows alone."""
    rng = np.random.default_rng(0)
    x, x_test = rng.uniform(-2.0, -1.0, (20, 1)), rng.uniform(1.0, 2.0, (10, 1))
    task = arms.Task(x, rng.normal(size=20), x_test, rng.normal(size=10), 2, "relu")
    u = draws_of(task, rng, 4, 500)
    # The second unit is relu(x), for all draws.
    u["hidden0.weight"][..., 1], u["hidden0.bias"][..., 1] = 1.0, 0.0
    holds, rhat, ess = arms.Judge(task, "rhat<1.01, ess>400", None)(arms.Block(u, 1.0))
    assert holds
    assert ess > 1000

    def worst(u: dict[str, np.ndarray], at: np.ndarray) -> float:
        hidden = np.maximum(
            np.einsum("nf,cdfw->cdnw", at, u["hidden0.weight"]) + u["hidden0.bias"][:, :, None], 0
        )
        f = np.einsum("cdnw,cdw->cdn", hidden, u["output.weight"][..., 0]) + u["output.bias"]
        return float(array_stats.rhat(f, chain_axis=0, draw_axis=1, method="rank").max())

    assert rhat >= max(worst(u, x), worst(u, x_test))
    u["output.weight"][..., 1, 0] += np.arange(4.0)[:, None]
    judge = arms.Judge(task, "rhat<1.01, ess>400", None)
    holds, rhat, _ = judge(arms.Block(u, 1.0))
    assert not holds
    assert worst(u, x) < 1.01 < 1.1 < worst(u, x_test) <= rhat
    # At training rows nothing is amiss: it is the test rows that say so.
    assert [watch.known["f"].shape[2] for watch in judge.watches] == [20, 10]
    # The noise has come beside f, and is left out of the functions.
    f = judge.functions
    assert f.shape == (2000, 10)
    # A peer with another model is judged by its functions alone.
    assert arms.Judge(task, "rhat<1.01, ess>400", None)(arms.Block({}, None, f=rng.normal(size=(4, 500, 3))))[
        0
    ]


def runs(times: dict[str, list[float | None]], arm: str, seeds: int = 3) -> list[dict[str, Any]]:
    """Runs of an arm: seconds by problem, None without a solution, slightly different for each seed."""
    return [
        {"problem": name, "arm": arm, "seed": seed, "solved": value is not None}
        | ({} if value is None else {"seconds": value * (1.0 + 0.01 * (seed - 1))})
        for name, values in times.items()
        for seed, value in zip(range(seeds), values * seeds, strict=False)
    ]


def outcomes(script: Any, rows: list[dict[str, Any]], **sizes: Any) -> dict[str, str]:
    """Verdicts where the problems and the arms of the rows are all that there are."""
    study = script.Study(replace(script.FULL, **sizes), Path("."), {"runs": rows})
    with pytest.MonkeyPatch.context() as patch:
        names = dict.fromkeys(row["problem"] for row in rows)
        patch.setattr(script, "PROBLEMS", [script.Problem(name, 2, "tanh") for name in names])
        patch.setattr(script.Problem, "name", property(lambda problem: problem.table))
        patch.setattr(script, "OURS", tuple({row["arm"] for row in rows} - {script.BY_HAND}))
        return {each.key: each.verdict for each in script.judge(study)}


def test_each_claim_is_decided_on_both_sides_of_its_bound(script: Any) -> None:
    easy: dict[str, Any] = {f"p{index}": [30.0 + index] for index in range(8)}
    hard: dict[str, Any] = {"h0": [None], "h1": [None]}

    def found(factor: float, slowest: float, h0: float | None, lost: bool = False) -> dict[str, str]:
        ours: dict[str, Any] = {
            name: [factor * each[0] * (1 + 0.01 * int(name[1]))] for name, each in easy.items()
        }
        ours["p0"] = [slowest * 30.0]
        ours["p1"] = [None] if lost else ours["p1"]
        rows = runs(easy | hard, script.BY_HAND) + runs(ours | {"h0": [h0], "h1": [None]}, script.NUTS)
        return outcomes(script, rows)

    assert set(found(0.2, 0.5, 300.0).values()) == {REPRODUCED}
    assert found(0.2, 0.5, None)["solves"] == REFUTED
    assert found(0.2, 0.5, 300.0, lost=True)["loses-none"] == REFUTED
    assert found(0.3, 0.5, 300.0)["third"] == REPRODUCED
    assert found(0.36, 0.5, 300.0)["third"] == REFUTED
    assert found(0.2, 1.19, 300.0)["never-slower"] == REPRODUCED
    assert found(0.2, 1.21, 300.0)["never-slower"] == REFUTED
    everywhere = runs(easy, script.BY_HAND) + runs(easy, script.NUTS)
    assert outcomes(script, everywhere)["solves"] == UNDECIDED
    assert set(outcomes(script, everywhere, limit=60.0).values()) == {NOT_RUN}
    assert set(outcomes(script, []).values()) == {NOT_RUN}
    # One seed of one problem is missing.
    assert set(outcomes(script, everywhere[1:]).values()) == {NOT_RUN}


def test_most_seeds_solve_a_problem_and_the_best_method_solves_most_runs(script: Any) -> None:
    rows = runs({"a": [1.0, 1.0, None], "b": [1.0, None, None]}, script.NUTS)
    assert list(script.solved(rows, script.NUTS)) == ["a"]
    rows += runs({"a": [500.0], "b": [500.0]}, script.MCLMC)
    assert script.best_of_ours(rows, 600.0) == script.MCLMC
    rows += runs({"a": [400.0], "b": [500.0]}, script.LAPS)
    assert script.best_of_ours(rows, 600.0) == script.LAPS


def test_the_curve_ends_at_the_share_that_is_solved(script: Any) -> None:
    rows = runs({"a": [3.0, 1.0, None], "b": [2.0, None, None]}, script.NUTS)
    at, share = script.curve(rows, script.NUTS, "seconds")
    assert np.allclose(at, [1.0, 1.98, 2.97])
    assert np.allclose(share, np.array([1, 2, 3]) / 6)
    assert script.curve(rows, script.NUTS, "gradients") is None
    assert script.curve(rows, script.MCLMC, "seconds") is None


def test_gaps_are_distances_from_other_runs_of_nuts(script: Any) -> None:
    common = {"problem": "a", "seed": 0, "solved": True, "sd": [0.5, 0.5]}
    rows = [common | {"arm": script.NUTS, "mean": [1.0, 2.0]}]
    rows += [common | {"arm": script.MCLMC, "mean": [1.5, 2.0], "sd": [0.25, 0.25]}]
    first, second = script.with_gaps(rows)
    assert "gap" not in first
    assert second["gap"] == pytest.approx(np.sqrt(0.5))
    assert second["sd_ratio"] == pytest.approx(0.5)
    assert "mean" not in second


def test_a_run_that_outlasts_its_limit_is_ended_and_is_not_solved(
    script: Any, arms: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warm-up of hours: the process is ended whatever it does, and nothing of it is left."""
    monkeypatch.setattr(arms, "GRACE", 0.0)
    task = script.task_of(script.TINY_PROBLEMS[0], 30)
    sizes = replace(script.TINY, limit=2.0, warmup=10**7)
    found = arms.in_a_process(script.BY_HAND, task, sizes, 0)
    assert not found["solved"]
    assert found["why"] == "no block was finished"


def test_a_process_that_fails_says_why(script: Any, arms: Any) -> None:
    task = script.task_of(script.TINY_PROBLEMS[0], 30)
    with pytest.raises(RuntimeError, match=r"NUTS by hand: .*num_samples"):
        arms.in_a_process(script.BY_HAND, task, replace(script.TINY, draws=-1), 0)


def test_what_is_not_known_is_refused(script: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected some of gap-2-tanh"):
        script.main(tiny=True, out=tmp_path, only=["gap"])
    with pytest.raises(ValueError, match="expected some of NUTS, MCLMC"):
        script.main(tiny=True, out=tmp_path, arms=["HMC"])


def test_a_tiny_run_of_all_arms_writes_everything_and_goes_on(script: Any, tmp_path: Path) -> None:
    first = {"only": ["gap-2-tanh"], "checkpoint": tmp_path / "kept"}
    study = script.main(tiny=True, out=tmp_path / "one", **first)
    left_out = {row["what"] for row in study.tables["left_out"]}
    assert {row["arm"] for row in study.tables["runs"]} | left_out == set(script.ARMS)
    assert left_out <= {script.BDE}
    for row in study.tables["runs"]:
        assert row["solved"], row
        assert row["rhat"] < 1.5
        assert row["ess"] > 10.0
        assert row["gradients"] > row["draws"]
    for name in ("runs.csv", "left_out.csv", "verdicts.txt"):
        assert (tmp_path / "one" / name).is_file()
    assert (tmp_path / "one" / "profile.png").stat().st_size > 5000
    again = script.main(tiny=True, out=tmp_path / "two", **first)
    assert json.dumps(again.tables["runs"]) == json.dumps(study.tables["runs"])
    # With one file gone, that run alone is made again.
    (tmp_path / "kept" / "gap-2-tanh-MCLMC-0.json").unlink()
    third = script.main(tiny=True, out=tmp_path / "three", **first)
    for now, then in zip(third.tables["runs"], again.tables["runs"], strict=True):
        assert (now["seconds"] == then["seconds"]) == (now["arm"] != script.MCLMC)


def test_classes_are_certified_too(script: Any, tmp_path: Path) -> None:
    study = script.main(tiny=True, out=tmp_path, only=["rings-2-relu"], arms=[script.MCLMC])
    (row,) = study.tables["runs"]
    assert row["solved"]
