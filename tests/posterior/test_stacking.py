"""Weights of chains and members against closed forms and other optimisers, and everything that reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.stats

import ppl_bnn as bnn
from ppl_bnn import scores
from ppl_bnn.core.errors import InputError, UnknownNameError, UnsupportedError
from ppl_bnn.diagnostics.importance import leave_one_out
from ppl_bnn.evaluation.comparison.run import compare
from ppl_bnn.inference.ensembles.stacked import Stacked
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.posterior import stacking
from ppl_bnn.posterior.approximation import Approximation, Chains, Point
from ppl_bnn.posterior.stacking import TOLERANCE, mixture_log_density, stack, stacking_weights

NOISE, ROWS, FEATURES = 0.5, 40, 2


def linear(x: Any, y: Any = None) -> None:
    f = bnn.mlp(x, [1], prior=bnn.priors.Normal(0.0, 1.0), bias=False)
    bnn.observe(y, f, bnn.likelihoods.Gaussian(NOISE))


def data(rows: int = ROWS, seed: int = 11) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, FEATURES))
    return x, x @ [1.0, -0.5] + NOISE * rng.normal(size=rows)


@dataclass(frozen=True)
class Planted(Method):
    """Chains at `centres`, independent draws with a standard deviation of `spread`; the rows that it saw in `seen`."""

    centres: tuple[tuple[float, float], ...] = ((1.0, -0.5), (1.0, 0.3), (0.2, -0.5), (-3.0, 2.0))
    draws: int = 200
    spread: float = 0.05
    groups: int | None = None
    seen: list[Any] = field(default_factory=list)

    def run(self, problem: Any, progress: Any) -> Outcome:
        self.seen.append((problem.inputs, problem.targets))
        noise = np.random.default_rng(problem.seed).normal(size=(len(self.centres), self.draws, FEATURES))
        w = np.asarray(self.centres)[:, None, :] + self.spread * noise
        chains = Chains({"output.weight": w[..., None]}, groups=self.groups)
        return Outcome(chains, gradient_evaluations=80.0, figures={"own": 1.0}, warnings=("slow",))


@dataclass
class Members(Approximation):
    """An ensemble: points, or normals."""

    members: tuple[Approximation, ...]
    weights: np.ndarray | None = None
    kind = "iid"  # type: ignore[misc]

    @property
    def components(self) -> tuple[Approximation, ...]:
        return self.members

    def weighted(self, weights: np.ndarray | None) -> Members:
        return replace(self, weights=weights)

    @property
    def stored_count(self) -> int | None:
        return len(self.members) if self.members[0].kind == "point" else None

    def stored_draws(self) -> dict[str, np.ndarray]:
        return {"output.weight": np.stack([member.centre()["output.weight"] for member in self.members])}

    def draw(self, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
        chosen = rng.choice(len(self.members), size=count, p=self.weights)
        return {"output.weight": np.stack([self.members[k].draw(1, rng)["output.weight"][0] for k in chosen])}

    def log_prob(self, u: Any) -> None:
        return None

    def arrays(self) -> dict[str, np.ndarray]:
        return {}

    @classmethod
    def from_arrays(cls, arrays: Any) -> Members:
        raise NotImplementedError


@dataclass(frozen=True)
class Handed(Method):
    """A posterior with a given approximation."""

    approximation: Any = None

    def run(self, problem: Any, progress: Any) -> Outcome:
        return Outcome(self.approximation)


def chains(**settings: Any) -> Any:
    return Planted(ppl="pyro", **settings).fit(linear, *data())


def points(centres: Any = ((1.0, -0.5), (1.0, 0.3), (0.2, -0.5))) -> Any:
    members = Members(tuple(Point({"output.weight": np.array(w)[:, None]}) for w in centres))
    return Handed(approximation=members, ppl="pyro").fit(linear, *data())


# --- the weights ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "second", "ratio"), [(30, 10, 4.0), (13, 12, 2.0), (30, 1, 3.0), (1, 1, 1.5)]
)
def test_two_parts_in_closed_form(first: int, second: int, ratio: float) -> None:
    """Part 0 is `ratio` times as dense in `first` rows, part 1 in `second`: a log(1 + w(r-1)) + b log(r - w(r-1))."""
    values = np.zeros((first + second, 2))
    values[:first, 0] = values[first:, 1] = math.log(ratio)
    wanted = (first * ratio - second) / ((first + second) * (ratio - 1.0))
    found = stacking_weights(values + np.random.default_rng(0).normal(size=(len(values), 1)))
    assert found == pytest.approx([min(max(wanted, 0.0), 1.0), 1.0 - min(max(wanted, 0.0), 1.0)], abs=1e-4)
    assert found.sum() == pytest.approx(1.0, abs=1e-14)


def test_rows_that_one_part_alone_explains_share_the_weight() -> None:
    values = np.full((10, 2), -np.inf)
    values[:7, 0] = values[7:, 1] = 0.0
    assert stacking_weights(values) == pytest.approx([0.7, 0.3], abs=1e-6)


@pytest.mark.parametrize(("rows", "parts", "spread"), [(50, 3, 1.0), (200, 8, 0.3), (30, 40, 3.0)])
def test_no_other_optimiser_finds_better_weights(rows: int, parts: int, spread: float) -> None:
    rng = np.random.default_rng(rows)
    values = spread * rng.normal(size=(rows, parts)) + 0.3 * rng.normal(size=parts)
    found = stacking_weights(values)
    assert (found >= 0.0).all()

    def loss(w: np.ndarray) -> float:
        return -float(np.mean(np.log(np.exp(values) @ w)))

    other = scipy.optimize.minimize(
        loss,
        np.full(parts, 1.0 / parts),
        method="SLSQP",
        bounds=[(0.0, 1.0)] * parts,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1.0},
        options={"ftol": 1e-14, "maxiter": 1000},
    )
    best = other.x.clip(0.0) / other.x.clip(0.0).sum()
    assert loss(found) <= loss(best) + TOLERANCE
    assert -mixture_log_density(values, found).mean() == pytest.approx(loss(found), abs=1e-12)
    # The other one stops at 1e-7 or so: a strictly concave problem then has weights within the root of that.
    if rows > parts:
        assert found == pytest.approx(best, abs=2e-3)


def test_parts_that_predict_alike_share_their_weight() -> None:
    rng = np.random.default_rng(3)
    values = rng.normal(size=(60, 3))
    found = stacking_weights(values[:, [0, 1, 2, 1]])
    assert found[1] == found[3]
    alone = stacking_weights(values)
    assert [found[0], found[1] + found[3], found[2]] == pytest.approx(list(alone), abs=1e-4)
    assert stacking_weights(np.zeros((5, 4))) == pytest.approx([0.25] * 4)


@pytest.mark.parametrize("spread", [1e-10, 1e-9, 3e-9, 1e-8, 1e-6])
def test_weights_of_parts_that_predict_nearly_alike_reach_the_bound(spread: float) -> None:
    """Two optimisers of one mode leave such differences; a step of EM is as short as they are."""
    rng = np.random.default_rng(0)
    values = spread * (rng.standard_normal((5, 3)) + rng.standard_normal(3))
    densities, weights = np.exp(values), stacking_weights(values)
    slopes = (densities / (densities @ weights)[:, None]).mean(axis=0)
    assert slopes.max() - 1.0 <= TOLERANCE
    assert weights.sum() == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(25))
def test_parts_nearly_alike_beside_another_reach_the_bound(seed: int) -> None:
    """Two members at one mode, one at another. Steps of EM are too short for the pair, and longer ones go too far."""
    rng = np.random.default_rng(seed)
    values = np.stack([np.zeros(5), 2.0 * rng.normal(size=5), 3e-8 * rng.normal(size=5)], axis=1)
    densities, weights = np.exp(values), stacking_weights(values)
    slopes = (densities / (densities @ weights)[:, None]).mean(axis=0)
    assert slopes.max() - 1.0 <= TOLERANCE
    assert weights[1] == pytest.approx(stacking_weights(values[:, :2])[1], abs=1e-6)


def test_densities_that_give_no_weights_are_refused() -> None:
    good = np.zeros((4, 2))
    for values, words in (
        (np.zeros(4), "rows, parts"),
        (np.where(np.eye(4, 2), np.nan, good), "NaN"),
        (np.where(np.eye(4, 2), np.inf, good), "NaN or"),
        (np.vstack([good, [-np.inf, -np.inf]]), "row 4"),
    ):
        with pytest.raises(InputError, match=words):
            stacking_weights(values)


# --- chains and members ---------------------------------------------------------------------------


def test_chains_are_weighted_as_arviz_weights_models() -> None:
    import arviz_stats

    stats: Any = arviz_stats
    # So narrow that ArviZ has nothing to warn of.
    posterior = chains(spread=0.02)
    stacked: Any = stack(posterior)
    results = {}
    for index, centre in enumerate(Planted().centres):
        part: Any = Planted(ppl="pyro", centres=(centre,)).fit(linear, *data())
        part.approximation.u["output.weight"][:] = posterior.approximation.u["output.weight"][index]
        results[str(index)] = stats.loo(part.to_datatree(), pointwise=True, reff=1.0)
    table = stats.compare(results, method="stacking", round_to="none")
    wanted = [table.loc[str(index), "weight"] for index in range(4)]
    # Its optimiser stops at about 1e-4.
    assert stacked.weights == pytest.approx(wanted, abs=2e-3)
    assert stacked.weights is not None
    assert stacked.weights[3] < 1e-6
    assert stacked.info.figures["stacking_gain"] > 0.01
    assert stacked.info.figures["stacking_rows"] == ROWS
    effective = 1.0 / np.sum(np.square(stacked.weights))
    assert stacked.info.figures["stacking_effective_parts"] == pytest.approx(effective, rel=1e-12)
    assert stacked.info.figures["stacking_pareto_k"] < 0.7
    assert stacked.info.figures["own"] == 1.0
    assert posterior.weights is None


def test_predictions_are_those_of_the_weighted_mixture() -> None:
    posterior = chains()
    stacked: Any = stack(posterior)
    x, y = data(15, 3)
    w = posterior.approximation.u["output.weight"][..., 0]
    each = scipy.stats.norm.pdf(y, np.einsum("nf,csf->csn", x, w), NOISE).mean(axis=1)
    wanted = np.log(stacked.weights @ each)
    prediction = stacked.predict(x)
    assert prediction.log_prob(y) == pytest.approx(wanted, abs=1e-12)
    assert posterior.predict(x).log_prob(y) == pytest.approx(np.log(each.mean(axis=0)), abs=1e-12)
    means = np.einsum("nf,csf->csn", x, w).mean(axis=1)
    assert prediction.mean == pytest.approx(stacked.weights @ means, abs=1e-12)
    assert stacked.shape == posterior.shape
    np.testing.assert_array_equal(stacked.draws["output.weight"], posterior.draws["output.weight"])
    np.testing.assert_array_equal(stacked.log_likelihood(x, y), posterior.log_likelihood(x, y))
    np.testing.assert_array_equal(stacked.predictor(x), posterior.predictor(x))
    joint = stacked.joint(x)
    assert joint.mean == pytest.approx(prediction.mean, abs=1e-12)
    assert np.diag(joint.function_covariance) == pytest.approx(prediction.epistemic, abs=1e-12)
    functions = np.einsum("nf,csf->csn", x, w).reshape(-1, 15)
    assert joint.function_covariance == pytest.approx(
        np.cov(functions.T, aweights=stacked.draw_weights, ddof=0), abs=1e-12
    )
    assert np.isfinite(scores.crps(prediction, y))


def test_some_of_the_draws_are_taken_by_weight() -> None:
    stacked: Any = stack(chains())
    index = stacked.chosen_draws(100)["output.weight"][:, 0, 0]
    own = stacked.approximation.u["output.weight"][..., 0, 0]
    counts = np.array([np.isin(index, chain).sum() for chain in own])
    assert np.abs(counts - 100 * stacked.weights).max() <= 1.0
    assert stacked.predict(data()[0], draws=100).log_weights is None
    drawn = stacked.approximation.draw(4000, np.random.default_rng(0))["output.weight"][:, 0, 0]
    shares = np.array([np.isin(drawn, chain).mean() for chain in own])
    error = np.sqrt(stacked.weights * (1.0 - stacked.weights) / 4000)
    assert (np.abs(shares - stacked.weights) <= 4.5 * error + 1e-6).all()
    heaviest = int(np.argmax(stacked.weights))
    np.testing.assert_array_equal(
        stacked.approximation.centre()["output.weight"],
        stacked.approximation.u["output.weight"][heaviest, -1],
    )


def test_points_are_stacked_on_rows_that_were_held_out() -> None:
    posterior = points()
    assert "a mixture of 3 members of equal weight" in str(bnn.diagnose(posterior))
    x, y = data(100, 4)
    stacked: Any = stack(posterior, x, y)
    w = posterior.approximation.stored_draws()["output.weight"][..., 0]
    wanted = stacking_weights(scipy.stats.norm.logpdf(y[:, None], x @ w.T, NOISE))
    assert stacked.weights == pytest.approx(wanted, abs=1e-9)
    assert stacked.shape == (1, 3)
    assert stacked.predict(x).weights == pytest.approx(wanted, abs=1e-12)
    assert "stacking_pareto_k" not in stacked.info.figures
    again = stack(stacked, x[:50], y[:50])
    assert again.weights == pytest.approx(stack(posterior, x[:50], y[:50]).weights, abs=1e-12)


def test_members_with_draws_on_demand_give_more_of_the_heavier() -> None:
    scale = {"output.weight": np.full((2, 1), 0.05)}
    members = Members(
        tuple(MeanField({"output.weight": np.array(w)[:, None]}, scale) for w in ((1.0, -0.5), (-1.0, -0.5)))
    )
    posterior = Handed(approximation=members, ppl="pyro").fit(linear, *data())
    assert "a mixture of 2 members of equal weight; they differ in function space" in str(
        bnn.diagnose(posterior)
    )
    stacked: Any = stack(posterior)
    assert stacked.weights is not None
    assert stacked.weights[0] > 0.99
    assert stacked.draw_weights is None
    assert stacked.predict(data()[0]).log_weights is None
    assert (stacked.draws["output.weight"][0, :, 0, 0] > 0).mean() > 0.98


def test_groups_of_chains_are_the_parts() -> None:
    posterior = chains(groups=2)
    stacked: Any = stack(posterior)
    assert len(posterior.approximation.components) == 2
    assert [part.shape for part in posterior.approximation.components] == [(2, 200)] * 2
    assert stacked.weights is not None
    assert stacked.draw_weights.reshape(4, 200).sum(axis=1) == pytest.approx(
        np.repeat(stacked.weights / 2, 2)
    )
    with pytest.raises(InputError, match="divisor"):
        chains(groups=3)


def test_what_cannot_be_stacked_is_refused_by_name() -> None:
    x, y = data(10, 5)
    with pytest.raises(UnsupportedError, match="several chains"):
        stack(chains(centres=((1.0, -0.5),)))
    with pytest.raises(UnsupportedError, match="several chains"):
        stack(
            Handed(approximation=Point({"output.weight": np.ones((2, 1))}), ppl="pyro").fit(linear, *data())
        )
    with pytest.raises(UnsupportedError, match=r"point.*stack\(posterior, x, y\)"):
        stack(points())
    with pytest.raises(UnsupportedError, match="20 draws"):
        stack(chains(draws=20))
    stuck = chains()
    stuck.approximation.u["output.weight"][2] = 0.3
    with pytest.raises(UnsupportedError, match="part 2: draws that are all the same"):
        stack(stuck)
    # On rows that were held out a chain that stands still predicts as it is.
    assert stack(stuck, x, y).weights is not None
    with pytest.raises(InputError, match="both x and y"):
        stack(chains(), x)
    with pytest.raises(InputError, match="has not seen"):
        stack(chains(), *data())
    with pytest.raises(InputError, match="4 weights"):
        chains().approximation.weighted(np.ones(4))
    with pytest.raises(UnsupportedError, match="no parts"):
        Point({}).weighted(np.ones(1))


def test_rows_that_importance_weights_cannot_leave_out_are_warned_of() -> None:
    stacked: Any = stack(chains(spread=2.0))
    assert stacked.info.figures["stacking_pareto_k"] > 0.7
    assert any("held out" in warning for warning in stacked.info.warnings)
    # Weights on other rows take the warning with them.
    again = stack(stacked, *data(20, 5))
    assert again.info.warnings == ("slow",)
    assert "stacking_pareto_k" not in again.info.figures


# --- what reads them ------------------------------------------------------------------------------


def test_weights_are_in_the_tree_and_in_the_files(tmp_path: Path) -> None:
    stacked: Any = stack(chains(groups=2))
    stacked.approximation.state["strand0:leaf1"] = np.arange(3, dtype=np.uint32)
    tree = stacked.to_datatree()
    assert np.exp(tree.sample_stats["log_weight"].values).sum() == pytest.approx(1.0)
    assert np.exp(tree.sample_stats["log_weight"].values).sum(axis=1) == pytest.approx(
        np.repeat(stacked.weights / 2, 2)
    )
    assert tree.attrs["draws_are_weighted"] == 1
    assert tree.attrs["target"] == "stacked"
    assert "log_weight" not in chains().to_datatree().sample_stats
    after: Any = bnn.load(stacked.save(tmp_path / "kept"), linear)
    np.testing.assert_array_equal(after.weights, stacked.weights)
    assert after.approximation.groups == 2
    np.testing.assert_array_equal(after.approximation.state["strand0:leaf1"], np.arange(3, dtype=np.uint32))
    assert after.approximation.state["strand0:leaf1"].dtype == np.uint32
    assert list(after.draws) == list(stacked.draws)
    x, y = data(7, 8)
    np.testing.assert_array_equal(after.predict(x).log_prob(y), stacked.predict(x).log_prob(y))
    assert "2 stacked parts" in repr(after)
    assert "stacked" not in repr(chains())


def test_a_stacked_row_of_a_table_says_so() -> None:
    test = data(20, 9)
    table = compare(
        linear,
        data(),
        test,
        {"equal": Planted(ppl="pyro"), "stacked": Stacked(Planted(ppl="pyro"), ppl="pyro")},
        reference="stacked",
    )
    rows = table.table
    assert rows.loc["equal", "target"] == ""
    assert rows.loc["stacked", "target"] == "stacked"
    assert "4 parts with weights from 0.000" in table.notes["stacked", "target"]
    assert rows.loc["stacked", "log_score"] > rows.loc["equal", "log_score"]
    assert math.isnan(rows.loc["stacked", "elpd_loo"])
    assert "do not count alike" in table.notes["stacked", "elpd_loo"]
    assert "do not count alike" in leave_one_out(table.posteriors["stacked"]).reason
    assert math.isfinite(rows.loc["equal", "elpd_loo"])
    assert rows.loc["stacked", "reference"] != "reference"
    assert np.isfinite(rows.loc["equal", "gap_mean"])
    assert "stacked" in str(table.diagnoses["stacked"])


# --- as a method ----------------------------------------------------------------------------------


def test_the_method_is_the_function_on_what_its_member_hands_over() -> None:
    found = Stacked(Planted(ppl="pyro"), ppl="pyro").fit(linear, *data(), seed=3)
    wanted = stack(Planted(ppl="pyro").fit(linear, *data(), seed=3))
    assert found.weights == pytest.approx(wanted.weights, abs=1e-12)
    np.testing.assert_array_equal(found.draws["output.weight"], wanted.draws["output.weight"])
    assert found.info.method == "Stacked"
    assert found.info.settings["member"]["method"] == "Planted"
    assert found.info.gradient_evaluations == 80.0
    assert found.info.warnings == wanted.info.warnings
    assert found.info.figures == wanted.info.figures
    assert found.info.target == ""


def test_a_validation_part_is_held_out() -> None:
    x, y = data()
    member = Planted(ppl="pyro")
    found = Stacked(member, by="validation", validation=0.25, ppl="pyro").fit(linear, x, y)
    (seen_x, seen_y) = member.seen[-1]
    assert seen_x.shape == (30, FEATURES)
    held = ~(x[:, None] == seen_x[None]).all(-1).any(1)
    assert held.sum() == 10
    np.testing.assert_array_equal(seen_y, y[~held])
    wanted = stack(Planted(ppl="pyro").fit(linear, seen_x, seen_y), x[held], y[held])
    assert found.weights == pytest.approx(wanted.weights, abs=1e-12)
    assert found.info.target == "the posterior of 30 of 40 rows"
    assert found.target == "the posterior of 30 of 40 rows; stacked"
    assert found.info.gradient_evaluations == 60.0
    assert found.log_likelihood().shape[-1] == ROWS
    other = Planted(ppl="pyro")
    Stacked(other, by="validation", validation=0.25, ppl="pyro").fit(linear, x, y, seed=1)
    assert not np.array_equal(other.seen[-1][0], seen_x)


def test_units_do_not_change_the_weights() -> None:
    x, y = data()
    way = {"member": Planted(ppl="pyro"), "by": "validation", "ppl": "pyro"}
    plain = Stacked(**way).fit(linear, x, y, standardise=True)
    moved = Stacked(**way).fit(linear, 10.0 * x + 3.0, 100.0 * y - 7.0, standardise=True)
    assert plain.weights == pytest.approx(moved.weights, abs=1e-6)


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(InputError, match="instance of a method"):
        Stacked(Planted)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="validation"):
        Stacked(Planted(), by="valid")
    for share in (0.0, 1.0, True, "0.2"):
        with pytest.raises(InputError, match="Stacked validation: expected a number between 0 and 1"):
            Stacked(Planted(), validation=share)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="rows on either side"):
        Stacked(Planted(ppl="pyro"), by="validation", validation=0.001, ppl="pyro").fit(linear, *data())
    with pytest.raises(UnsupportedError, match="point"):
        Stacked(Handed(approximation=points().approximation, ppl="pyro"), ppl="pyro").fit(linear, *data())


def test_the_system_is_that_of_the_member_unless_it_is_given() -> None:
    assert Stacked(Planted(ppl="pyro")).ppl == "pyro"
    assert Stacked(Planted(), ppl="pyro").member.ppl == "pyro"
    assert Stacked(Planted(dtype="float32")).dtype == "float32"
    assert replace(Stacked(Planted()), ppl="pyro").member.ppl == "pyro"
    with pytest.raises(UnknownNameError, match="system"):
        Stacked(Planted(), ppl="stan")


def test_what_the_member_serves_is_served() -> None:
    @dataclass(frozen=True)
    class Special(Planted):
        serves_priors = frozenset({"LogUniform"})
        serves_local = False

    assert Stacked(Special()).serves_priors == {"LogUniform"}
    assert not Stacked(Special()).serves_local
    assert Stacked(Planted()).serves_local
    assert not Stacked(Planted(), by="validation").serves_local


def test_draws_that_depend_on_each_other_count_less() -> None:
    """A chain of 1000 draws with an autocorrelation of 0.9 has a longer tail to smooth than independent draws have."""
    import arviz_stats
    from arviz_stats.base import array_stats

    rng = np.random.default_rng(6)
    posterior = chains(draws=1000)
    w = posterior.approximation.u["output.weight"]
    deviation = np.zeros(w[:, 0].shape)
    for draw in range(1000):
        deviation = 0.9 * deviation + math.sqrt(1.0 - 0.9**2) * 0.05 * rng.normal(size=deviation.shape)
        w[:, draw] = np.asarray(Planted().centres)[..., None] + deviation
    part = stacking._alone(posterior, posterior.approximation.components[0])
    density, k = stacking._left_out(part, 0)
    values = part.log_likelihood()[0]
    stats: Any = arviz_stats
    relative = [
        stats.ess(np.exp(row - row.max())[None], method="mean", relative=True, chain_axis=0, draw_axis=1)
        for row in values.T
    ]
    efficiency = float(np.mean(relative))
    assert efficiency < 0.3
    ary: Any = values.T[:, None, :]
    expected = array_stats.loo(ary, r_eff=efficiency, chain_axis=1, draw_axis=2)
    np.testing.assert_allclose(density, expected[0], rtol=1e-12)
    np.testing.assert_allclose(k, expected[1], rtol=1e-12)
    plain = array_stats.loo(ary, r_eff=1.0, chain_axis=1, draw_axis=2)
    assert np.abs(k - plain[1]).max() > 0.01


@pytest.mark.parametrize(("draws", "refused"), [(24, True), (25, False)])
def test_a_part_needs_a_tail_of_five_draws(draws: int, refused: bool) -> None:
    posterior = chains(draws=draws)
    if refused:
        with pytest.raises(UnsupportedError, match="at least 25 draws"):
            stack(posterior)
    else:
        assert stack(posterior).weights is not None
