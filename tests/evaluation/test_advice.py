"""What is told before a fit is what becomes of it: refusals, sizes, bounds on gradients, and no computation."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.backends.program import Problem
from ppl_bnn.core.errors import BNNError, InputError, ModelError, UnknownNameError, UnsupportedError
from ppl_bnn.core.progress import Progress
from ppl_bnn.evaluation import advice as module
from ppl_bnn.inference.cost import Effort, Size
from ppl_bnn.inference.method import Method
from ppl_bnn.zoo.support import declared
from tests.problems import regression_data, small_network

DECLARED = declared()


# --- refusals -------------------------------------------------------------------------------------------


def asked(matrix: Any, name: str, ppl: str) -> dict[str, BNNError | None]:
    model, x, y = matrix.problem(name)
    return {
        row: method.build(ppl).refusal(model, x, y)
        for row, method in DECLARED.methods.items()
        if ppl in DECLARED.served(row)
    }


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
@pytest.mark.parametrize(
    "name",
    [
        name if name in ("last_layer", "regression_mlp") else pytest.param(name, marks=pytest.mark.slow)
        for name in DECLARED.models
    ],
)
def test_what_is_refused_is_what_is_declared_impossible(matrix: Any, name: str, ppl: str) -> None:
    for row, error in asked(matrix, name, ppl).items():
        rule, doubt = DECLARED.why_not(name, row, ppl), DECLARED.doubt(name, row, ppl)
        if rule is not None:
            assert error is not None, (row, rule.reason)
            assert rule.explains(type(error).__name__, str(error)), (row, error)
        else:
            assert error is None or (doubt and doubt.explains(type(error).__name__, str(error))), (row, error)


class Listening:
    """What a fit has told when it was asked, which should be nothing."""

    def __init__(self) -> None:
        self.titles: list[str] = []

    def task(self, title: str, total: int) -> Any:
        self.titles.append(title)
        raise AssertionError(title)


@pytest.mark.parametrize("ppl", ["numpyro", "pyro"])
def test_a_method_that_begins_with_another_is_asked_and_not_fitted(ppl: str) -> None:
    x, y = regression_data(rows=25)
    for method in (
        bnn.NUTS(start=bnn.MAP(ppl=ppl), ppl=ppl),
        bnn.Ensemble(bnn.SWAG(ppl=ppl), 3),
        bnn.Stacked(bnn.Ensemble(bnn.MAP(ppl=ppl), 2), by="validation"),
    ):
        listening = Listening()
        assert method.refusal(small_network, x, y, progress=listening) is None
        assert listening.titles == []
    # Afterwards fits are fits again.
    assert bnn.fit(small_network, x, y, bnn.MAP(ppl=ppl, steps=100)).kind == "point"


def test_a_checkpoint_is_left_alone(tmp_path: Any) -> None:
    x, y = regression_data(rows=25)
    folder = tmp_path / "kept"
    assert bnn.NUTS(checkpoint=folder).refusal(small_network, x, y) is None
    assert not folder.exists()


# --- what a fit takes -----------------------------------------------------------------------------------


def test_every_method_says_what_it_takes_and_what_it_gets_wrong() -> None:
    size = Size(rows=100, parameters=50, outputs=1)
    for name, row in DECLARED.methods.items():
        method = row.build(DECLARED.served(name)[0])
        effort = method.effort(size)
        assert effort is not None, name
        assert 0.0 < effort.fewest <= effort.usual <= effort.most, name
        assert method.limitations.endswith("."), name
        assert method.limitations[0].isupper(), name


def test_efforts_add_up() -> None:
    one, other = Effort(1.0, 2.0, 3.0, parallel=4, operations=5.0), Effort.exactly(10.0, numbers=7.0)
    assert one.times(3) == Effort(3.0, 6.0, 9.0, parallel=4, operations=15.0)
    assert one.after(other) == Effort(11.0, 12.0, 13.0, parallel=4, numbers=7.0, operations=5.0)
    assert other.after(one).parallel == 1
    assert one.after(None) == one


def test_more_of_anything_takes_more() -> None:
    size = Size(rows=1000, parameters=50, outputs=3)

    def usual(method: Method) -> float:
        effort = method.effort(size)
        assert effort is not None
        return effort.usual

    assert usual(bnn.NUTS(chains=8)) == pytest.approx(2.0 * usual(bnn.NUTS(chains=4)))
    assert usual(bnn.NUTS(start=bnn.MAP())) == usual(bnn.NUTS()) + 4 * usual(bnn.MAP())
    assert usual(bnn.Ensemble(bnn.MAP(), 7)) == 7 * usual(bnn.MAP())
    assert usual(bnn.SVI(batch_size=100)) == pytest.approx(usual(bnn.SVI()) / 10.0)
    assert usual(bnn.SVI(particles=3)) == 3 * usual(bnn.SVI())
    until = bnn.NUTS(until="rhat<1.01", budget=60).effort(size)
    assert until is not None
    assert until.most == math.inf
    # By Woodbury's identity a full Gaussian holds rows x outputs, where there are fewer of these than weights.
    few, many = (bnn.Laplace().effort(Size(20, parameters, 1)) for parameters in (1000, 2000))
    assert few is not None
    assert many is not None
    assert many.numbers < 3.0 * few.numbers


# --- the advice -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problem() -> tuple[Any, np.ndarray, np.ndarray]:
    return small_network, *regression_data(rows=25)


NAMED = ["nuts", "svi", "laplace", "map", "mclmc", "smc"]


def test_a_budget_decides(problem: Any) -> None:
    ample = bnn.advise(*problem, seconds=1e12, methods=NAMED)
    assert set(ample.table["feasible"]) == {"yes"}
    assert ample.feasible == NAMED
    none = bnn.advise(*problem, seconds=1e-9, methods=NAMED)
    assert set(none.table["feasible"]) == {"no"}
    assert none.feasible == []
    assert ample.facts["gradient_seconds_numpyro_together"] > 0.0
    for advice in (ample, none):
        numbers = advice.table[["seconds_low", "seconds", "seconds_high"]].to_numpy()
        assert (np.diff(numbers, axis=1) >= 0.0).all()
        assert (numbers > 0.0).all()
        assert advice.facts["rows"] == 25
        assert advice.facts["parameters"] == 3 * 2 + 3 + 3 + 1 + 1
        assert advice.facts["gradient_seconds_numpyro"] > 0.0
        text = str(advice)
        for name in NAMED:
            assert f"\n{name} " in text
        assert "14 parameters, 25 rows" in text
    kept = bnn.advise(*problem, seconds=1e-9, methods=[bnn.NUTS(until="rhat<1.01", budget=60)]).table
    assert kept["seconds_high"].tolist() == [60.0]


@dataclasses.dataclass(frozen=True)
class Uncertain(Method):
    """A method of 10, usually 100 and at most 1000 gradients, which does nothing."""

    def effort(self, size: Size) -> Effort:
        return Effort(10.0, 100.0, 1000.0)

    def run(self, problem: Problem, progress: Progress) -> Any:
        return progress.task("uncertain", 1)


def test_each_word_is_for_the_fit_that_the_budget_allows(
    problem: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine on which a gradient takes 10 ms and compiling it 50 ms, whatever else it does.
    measured = module._Probe(Size(25, 14, 1), "numpyro", alone=0.01, compiling=0.05)
    monkeypatch.setattr(module, "_probe", lambda *_: measured)
    monkeypatch.setattr(module, "STEP", {"numpyro": (0.5, 2.0)})
    monkeypatch.setattr(module, "COMPILING", {"numpyro": 4.0})
    # 10 gradients of half of 10 ms; 100 of 10 ms, and .2 s of compiling; 1000 of twice that, and .6 s.
    expected = [0.05, 1.2, 20.6]
    for seconds, word, reason in (
        (20.7, "yes", ""),
        (20.5, "likely", ""),
        (1.3, "likely", ""),
        (1.1, "unlikely", "It usually takes 1.2 s."),
        (0.06, "unlikely", "It usually takes 1.2 s."),
        (0.04, "no", "It takes 50 ms at the very least."),
    ):
        asked = bnn.advise(*problem, seconds=seconds, methods=[Uncertain()])
        (row,) = asked.table.to_dict(orient="records")
        assert (row["feasible"], row["reason"]) == (word, reason), seconds
        assert [row[name] for name in ("seconds_low", "seconds", "seconds_high")] == pytest.approx(expected)
        assert asked.feasible == (["uncertain"] if word in ("yes", "likely") else [])


def test_refusals_come_last_and_with_their_reason(problem: Any) -> None:
    _, x, y = problem

    def with_a_point(x: Any, y: Any = None) -> None:
        f = bnn.mlp(x, [3, 1], prior=priors.Point())
        f = f + bnn.sample("offset", bnn.dist.Normal(0.0, 1.0))
        bnn.observe(y, f, likelihoods.Gaussian(0.5))

    advice = bnn.advise(with_a_point, x, y, methods=["nuts", "map", "smc"], seconds=1e12)
    assert list(advice.table.index) == ["map", "nuts", "smc"]
    assert list(advice.table["feasible"]) == ["yes", "refused", "refused"]
    assert "a prior over everything" in advice.table.loc["nuts", "reason"]
    assert math.isnan(advice.table.loc["nuts", "seconds"])
    assert advice.table.loc["nuts", "limitations"]


@dataclasses.dataclass(frozen=True)
class Large(Method):
    """A method that would hold so many numbers, and does nothing."""

    numbers: float = 0.0

    def effort(self, size: Size) -> Effort:
        return Effort.exactly(1.0, numbers=self.numbers)

    def run(self, problem: Problem, progress: Progress) -> Any:
        return progress.task("large", 1)


def test_memory_decides_too(problem: Any) -> None:
    methods = {"small": Large(numbers=1e3), "large": Large(numbers=1e15)}
    table = bnn.advise(*problem, methods=methods, seconds=1e12).table
    assert table["feasible"].to_dict() == {"small": "yes", "large": "no"}
    assert table["memory"].to_dict() == {"small": pytest.approx(8e-3), "large": pytest.approx(8e9)}
    assert "It holds 8e+06 GB" in table.loc["large", "reason"]


def test_a_model_of_a_system_is_advised_in_that_system(problem: Any) -> None:
    numpyro = pytest.importorskip("numpyro")
    _, x, y = problem

    def plain(x: Any, y: Any = None) -> None:
        weight = numpyro.sample("weight", numpyro.distributions.Normal(0.0, 1.0).expand([2]).to_event(1))
        numpyro.sample("y", numpyro.distributions.Normal(x @ weight, 0.5), obs=y)

    advice = bnn.advise(plain, x, y, methods=["nuts", "laplace", "mc-dropout"], seconds=1e12)
    assert advice.table.loc["nuts", "feasible"] == "yes"
    assert advice.table.loc["laplace", "feasible"] == "refused"
    assert "gradient_seconds_numpyro" in advice.facts
    assert "gradient_seconds_pyro" not in advice.facts


def test_a_method_that_does_not_say_is_no_promise(problem: Any) -> None:
    class Quiet(Method):
        def run(self, problem: Problem, progress: Progress) -> Any:
            return progress.task("quiet", 1)

    table = bnn.advise(*problem, methods={"quiet": Quiet()}).table
    assert table.loc["quiet", "feasible"] == "unlikely"
    assert "does not say" in table.loc["quiet", "reason"]


def test_bad_requests_are_refused(problem: Any) -> None:
    model, x, y = problem
    for seconds in (0, -1.0, math.inf, math.nan, True, "60"):
        with pytest.raises(InputError, match="seconds: expected a positive number"):
            bnn.advise(model, x, y, seconds=seconds)  # type: ignore[arg-type]
    for methods, words in (([], "a dict of labels"), ("nuts", "a dict of labels"), ([bnn.NUTS], "methods")):
        with pytest.raises(InputError, match=words):
            bnn.advise(model, x, y, methods=methods)
    with pytest.raises(UnknownNameError, match="nutz"):
        bnn.advise(model, x, y, methods=["nutz"])
    with pytest.raises(InputError, match="twice"):
        bnn.advise(model, x, y, methods=[bnn.MAP(), bnn.MAP(steps=5)])
    with pytest.raises(ModelError):
        bnn.advise(lambda x, y=None: None, x, y)
    with pytest.raises(InputError, match="x"):
        bnn.advise(model, np.full_like(x, np.nan), y)


def test_what_all_methods_refuse_is_said_of_the_model(problem: Any) -> None:
    _, x, y = problem

    def classes(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [3, 2], prior=priors.Normal(0.0, 1.0)), likelihoods.Categorical())

    with pytest.raises(InputError, match="label"):
        bnn.advise(classes, x, y + 0.5, methods=["map", "svi"])


def test_an_unsupported_system_is_a_refusal(problem: Any) -> None:
    pyro = pytest.importorskip("pyro")
    import torch

    _, x, y = problem

    def plain(x: Any, y: Any = None) -> None:
        weight = pyro.sample("weight", pyro.distributions.Normal(torch.zeros(2), 1.0).to_event(1))
        with pyro.plate("rows", len(x)):
            pyro.sample("y", pyro.distributions.Normal(x @ weight.double(), 0.5), obs=y)

    table = bnn.advise(plain, x, y, methods=["map", "mclmc"], seconds=1e12).table
    assert table.loc["map", "feasible"] == "yes"
    assert table.loc["mclmc", "feasible"] == "refused"
    with pytest.raises(UnsupportedError):
        bnn.fit(plain, x, y, bnn.MCLMC())


def test_time_and_memory_of_a_fit_are_those_of_its_effort() -> None:
    probe = module._Probe(None, "numpyro", alone=0.01, compiling=2.0)  # type: ignore[arg-type]
    effort = Effort(100, 200, 400, operations=6e9)
    fewest, usual, most = module._seconds(effort, probe)
    plain = module._seconds(dataclasses.replace(effort, operations=0.0), probe)
    # 2e9 operations a second, and up to fifty times as many where a library does them all at once.
    assert module.OPERATIONS == 2e9
    assert most - plain[2] == pytest.approx(3.0)
    assert usual - plain[1] == pytest.approx(0.3)
    assert fewest - plain[0] == pytest.approx(0.06)


@pytest.mark.parametrize(("share", "feasible"), [(0.49, "yes"), (0.51, "no")])
def test_a_fit_may_hold_half_of_the_memory(share: float, feasible: str) -> None:
    probe = module._Probe(None, "numpyro", alone=1e-6, compiling=0.0)  # type: ignore[arg-type]
    found = module._row(bnn.MAP(), Effort(1, 1, 1, numbers=share * 2**30 / 8.0), probe, 1e6, 2**30)
    assert found["feasible"] == feasible
    assert found["memory"] == pytest.approx(share * 2**30 / 1e6)
