"""A saved posterior comes back whole, for the same model only, and never by pickle."""

from __future__ import annotations

import functools
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
import ppl_bnn.core.stored
import ppl_bnn.posterior.storage
from ppl_bnn.core.errors import InputError, ModelError, UnsupportedError
from ppl_bnn.core.stored import write_manifest
from ppl_bnn.inference.curvature.gaussians import Full
from ppl_bnn.inference.laplace.approximation import LaplaceGaussian
from ppl_bnn.inference.method import Method, Outcome
from ppl_bnn.inference.variational.mean_field import MeanField
from ppl_bnn.posterior.approximation import Chains, Point
from ppl_bnn.posterior.loading import load
from ppl_bnn.posterior.registered import APPROXIMATIONS
from ppl_bnn.posterior.storage import ARRAYS, MANIFEST, TREE, save


@dataclass(frozen=True)
class Planted(Method):
    """Every approximation that can be stored, around one draw of the prior."""

    form: str = "Chains"

    def run(self, problem: Any, progress: Any) -> Outcome:
        u = problem.program.prior_draws(problem.x, problem.y, problem.seed, 6)
        centre = {name: value[0] for name, value in u.items()}
        history = {"loss": np.linspace(3.0, 1.0, 7)}
        figures = {"elbo": -3.25, "elbo_se": float("inf")}
        if self.form == "Point":
            return Outcome(Point(centre), history=history, warnings=("slow",), figures=figures)
        if self.form == "MeanField":
            scale = {name: np.full(np.shape(value), 0.1) for name, value in centre.items()}
            return Outcome(MeanField(centre, scale), history=history, gradient_evaluations=7.5)
        if self.form == "LaplaceGaussian":
            size = sum(value.size for value in centre.values())
            return Outcome(LaplaceGaussian(centre, Full.of(np.eye(size) + 0.5)))
        chains = Chains({name: value.reshape(2, 3, *value.shape[1:]) for name, value in u.items()})
        return Outcome(chains, statistics={"diverging": np.eye(2, 3) > 0, "lp": np.arange(6.0).reshape(2, 3)})


def model(
    x: Any,
    y: Any = None,
    *,
    width: int = 3,
    activation: str = "tanh",
    scale: Any = "fan_in",
    deep: bool = False,
) -> None:
    noise = bnn.sample("noise", bnn.dist.HalfNormal(1.0))
    widths = [width, 2, 1] if deep else [width, 1]
    f = bnn.mlp(x, widths, activation=activation, prior=bnn.priors.Normal(0.0, scale))
    bnn.observe(y, f, bnn.likelihoods.Gaussian(noise))


def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(5)
    x = rng.normal(1.0, 2.0, size=(12, 2))
    return x, x[:, 0] + rng.normal(size=12)


def planted(form: str = "Point", ppl: str = "pyro", **options: Any) -> Any:
    x, y = data()
    return Planted(form=form, ppl=ppl).fit(model, x, y, standardise=True, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return save(planted(), tmp_path / "posterior")


@pytest.mark.parametrize("form", ["Chains", "Point", "MeanField", "LaplaceGaussian"])
def test_what_comes_back_is_what_went_in_to_the_bit(form: str, ppl: str, tmp_path: Path) -> None:
    before = planted(form, ppl, feature_names=("a", "b"))
    assert before.save(tmp_path / "posterior") == tmp_path / "posterior"
    after = bnn.load(tmp_path / "posterior", model)
    x, y = data()
    old, new = before.predict(x), after.predict(x)
    assert old.parameters.keys() == new.parameters.keys()
    for name in old.parameters:
        np.testing.assert_array_equal(new.parameters[name], old.parameters[name])
    np.testing.assert_array_equal(after.log_likelihood(x, y), before.log_likelihood(x, y))
    assert list(after.draws) == list(before.draws)
    for name in before.draws:
        np.testing.assert_array_equal(after.draws[name], before.draws[name])
    assert after.statistics.keys() == before.statistics.keys()
    for name, value in before.statistics.items():
        np.testing.assert_array_equal(after.statistics[name], value)
        assert after.statistics[name].dtype == value.dtype
    np.testing.assert_array_equal(after.inputs, before.inputs)
    np.testing.assert_array_equal(after.targets, before.targets)
    assert after.feature_names == ("a", "b")
    assert after.class_names is None
    for name in before.info.history:
        np.testing.assert_array_equal(after.info.history[name], before.info.history[name])
    for field in (
        "method",
        "ppl",
        "seed",
        "dtype",
        "device",
        "run_seconds",
        "gradient_evaluations",
        "settings",
    ):
        assert getattr(after.info, field) == getattr(before.info, field)
    for field in ("versions", "data_hash", "warnings", "figures"):
        assert getattr(after.info, field) == getattr(before.info, field)


@pytest.fixture(scope="module")
def mode() -> Any:
    return bnn.MAP(ppl="pyro", steps=100).fit(model, *data())


@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_tuned_gaussians_over_some_weights_come_back_to_the_bit(
    structure: str, mode: Any, tmp_path: Path
) -> None:
    """Positions, factors and every structure's own arrays, and with them the tuned program."""
    x, y = data()
    settings: dict[str, Any] = {"structure": structure, "weights": ["output"], "tune": "tensor"}
    settings |= {"start": mode, "optimise": False}
    settings |= {"noise": "evidence"} | ({"rank": 4} if structure == "lowrank" else {})
    before: Any = bnn.Laplace(ppl="pyro", **settings).fit(model, x, y, progress=False)
    after: Any = bnn.load(before.save(tmp_path / "posterior"), model)
    old, new = before.approximation.arrays(), after.approximation.arrays()
    assert old.keys() == new.keys()
    assert {"positions", "factors/0000/output.weight"} <= old.keys()
    for name, value in old.items():
        np.testing.assert_array_equal(new[name], value)
    assert after.approximation.kinds == before.approximation.kinds
    np.testing.assert_array_equal(after.predict(x).std, before.predict(x).std)
    np.testing.assert_array_equal(after.log_joint(), before.log_joint())
    np.testing.assert_array_equal(after.log_q(), before.log_q())


def test_dicts_of_inputs_and_labels_come_back(tmp_path: Path) -> None:
    def classes(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x["table"], [3]), bnn.likelihoods.Categorical())

    x = {"table": data()[0], "index": np.arange(12)}
    before = Planted(ppl="pyro").fit(
        classes, x, np.arange(12) % 3, class_names=("a", "b", "c"), standardise=True
    )
    after = load(save(before, tmp_path / "p"), classes)
    assert after.inputs["index"].dtype == np.int64
    assert after.class_names == ("a", "b", "c")
    np.testing.assert_array_equal(after.predict(x).mean, before.predict(x).mean)


def test_the_folder_holds_a_tree_and_no_pickle(saved: Path) -> None:
    import xarray

    assert {entry.name for entry in saved.iterdir()} == {TREE, ARRAYS, MANIFEST}
    assert [entry.name for entry in saved.parent.iterdir()] == ["posterior"]
    with xarray.open_datatree(saved / TREE, engine="h5netcdf") as tree:
        assert tree.attrs["method"] == "Planted"
    assert b"\x80\x04" not in (saved / ARRAYS).read_bytes()[:200]
    json.loads((saved / MANIFEST).read_text(), parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


def test_a_partial_of_the_model_is_the_model(saved: Path) -> None:
    load(saved, functools.partial(model, width=3))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"width": 4}, r"'hidden0.weight' was \[2, 3\], is \[2, 4\]"),
        ({"deep": True}, "site 'hidden1.weight' is new"),
        ({"activation": "relu"}, "log joint of a stored draw"),
        ({"scale": 3.0}, "log joint of a stored draw"),
    ],
)
def test_another_model_is_refused_with_the_difference(
    changes: dict[str, Any], said: str, saved: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        load(saved, functools.partial(model, **changes))


def test_another_likelihood_is_refused(tmp_path: Path) -> None:
    def classes(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Bernoulli())

    def numbers(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [1]), bnn.likelihoods.Gaussian(1.0))

    path = save(Planted(form="Point", ppl="pyro").fit(classes, data()[0], np.arange(12) % 2), tmp_path / "p")
    with pytest.raises(ModelError, match="likelihood was Bernoulli, is Gaussian"):
        load(path, numbers)


def test_missing_sites_and_no_model_are_refused(saved: Path) -> None:
    def fewer(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.mlp(x, [3, 1], activation="tanh"), bnn.likelihoods.Gaussian(1.0))

    with pytest.raises(ModelError, match="'noise' is missing"):
        load(saved, fewer)
    with pytest.raises(ModelError, match="does not run"):
        load(saved, lambda x, y=None: 1 / 0)
    with pytest.raises(InputError, match="function"):
        load(saved, "model")  # type: ignore[arg-type]


@pytest.mark.parametrize("damage", ["missing", "cut", "flipped", "text", "keys", "other", "list"])
def test_damage_is_named(damage: str, saved: Path) -> None:
    arrays, manifest = saved / ARRAYS, saved / MANIFEST
    content = bytearray(arrays.read_bytes())
    if damage == "missing":
        arrays.unlink()
    elif damage == "cut":
        arrays.write_bytes(content[:-7])
    elif damage == "flipped":
        content[-5] ^= 1
        arrays.write_bytes(content)
    elif damage == "text":
        manifest.write_text(manifest.read_text()[:-20])
    elif damage == "keys":
        kept = json.loads(manifest.read_text())
        del kept["info"]["seed"]
        manifest.write_text(json.dumps(kept))
    elif damage == "list":
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"arrays": []}))
    else:
        manifest.write_text("{}")
    with pytest.raises(InputError, match=r"damaged|another folder"):
        load(saved, model)


def test_what_is_no_saved_posterior_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        load(tmp_path / "nothing", model)
    with pytest.raises(InputError, match=MANIFEST):
        load(tmp_path, model)


def test_a_newer_format_and_an_unknown_approximation_are_refused(saved: Path) -> None:
    file = saved / MANIFEST
    manifest = json.loads(file.read_text())
    file.write_text(json.dumps(manifest | {"format": 99}))
    with pytest.raises(UnsupportedError, match="format 99"):
        load(saved, model)
    write_manifest(file, manifest | {"approximation": "os:system"})
    with pytest.raises(bnn.errors.BNNError, match="os:system"):
        load(saved, model)


def test_saving_again_replaces_a_posterior_and_nothing_else(saved: Path, tmp_path: Path) -> None:
    save(planted("Chains"), saved)
    assert load(saved, model).kind == "chains"
    (saved / "notes.txt").write_text("mine")
    file = tmp_path / "file"
    file.write_text("mine")
    for occupied in (saved, file):
        with pytest.raises(InputError, match="saved posterior to replace"):
            save(planted(), occupied)
    assert (saved / "notes.txt").read_text() == file.read_text() == "mine"
    (tmp_path / "empty").mkdir()
    save(planted(), tmp_path / "empty")
    assert load(tmp_path / "empty", model).kind == "point"


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError])
def test_an_interrupted_save_leaves_what_was_there(
    error: type[BaseException], saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path) -> str:
        raise error("stop")

    monkeypatch.setattr(ppl_bnn.core.stored, "digest", interrupted)
    for path in (saved, saved.parent / "new"):
        with pytest.raises(InputError if error is OSError else KeyboardInterrupt):
            save(planted("Chains"), path)
    monkeypatch.undo()
    assert [entry.name for entry in saved.parent.iterdir()] == ["posterior"]
    assert load(saved, model).kind == "point"


def test_a_path_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="written"):
        save(planted(), tmp_path / "file" / "posterior")
    if os.geteuid() != 0:
        closed = tmp_path / "closed"
        closed.mkdir(mode=0o500)
        with pytest.raises(InputError, match="written"):
            save(planted(), closed / "posterior")


def test_an_approximation_without_a_row_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(APPROXIMATIONS, "Point")
    with pytest.raises(UnsupportedError, match="Point"):
        save(planted(), tmp_path / "posterior")
    assert not (tmp_path / "posterior").exists()


def test_a_missing_device_is_said(saved: Path) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    file = saved / MANIFEST
    manifest = json.loads(file.read_text())
    manifest["info"]["device"] = "cuda:0"
    write_manifest(file, manifest)
    with pytest.warns(UserWarning, match="cuda:0"):
        posterior = load(saved, model)
    assert posterior.info.device == "cpu"
    with pytest.raises(bnn.errors.DeviceError):
        load(saved, model, device="cuda:0")


def test_a_field_that_would_be_lost_is_refused(rng: np.random.Generator) -> None:
    @dataclass
    class Shifted(Point):
        by: float = 1.0

    with pytest.raises(
        UnsupportedError, match=r"Shifted\.by: expected an array or a dict of arrays.*got float"
    ):
        Shifted({"w": rng.normal(size=2)}).arrays()
    several = {f"w{index}": rng.normal(size=index + 1) for index in range(12)}
    found = Point.from_arrays(dict(reversed(Point(several).arrays().items())))
    assert list(found.u) == list(several)
    for name, value in several.items():
        np.testing.assert_array_equal(found.u[name], value)
