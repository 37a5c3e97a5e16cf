"""Interrupted fits: resumed to the same bits, and what a checkpoint is not for is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors
from ppl_bnn.core.errors import InputError
from ppl_bnn.core.stored import write_sealed
from ppl_bnn.inference import checkpoint
from ppl_bnn.inference.checkpoint import Checkpoint
from ppl_bnn.inference.fingerprint import identity
from ppl_bnn.inference.variational import autoguide
from ppl_bnn.inference.variational.svi import SVI

X = np.random.default_rng(3).normal(size=(24, 2))
Y = X @ np.array([1.0, -0.5]) + 0.3 * np.random.default_rng(301).normal(size=24)


def linear(x: Any, y: Any = None, *, scale: float = 1.0) -> None:
    f = bnn.mlp(x, [1], prior=priors.Normal(0.0, scale))
    bnn.observe(y, f, likelihoods.Gaussian(0.4))


def wider(x: Any, y: Any = None) -> None:
    """The same sites under another prior."""
    linear(x, y, scale=2.0)


def numpyro_guide(x: Any, y: Any = None) -> None:
    import jax.numpy as jnp
    import numpyro
    import numpyro.distributions as d

    for name, shape in (("output.weight", (2, 1)), ("output.bias", (1,))):
        loc = numpyro.param(f"{name}.loc", jnp.zeros(shape))
        scale = numpyro.param(f"{name}.scale", jnp.full(shape, 0.1), constraint=d.constraints.positive)
        numpyro.sample(name, d.Normal(loc, scale).to_event(len(shape)))


def pyro_guide(x: Any, y: Any = None) -> None:
    import pyro
    import pyro.distributions as d
    import torch

    for name, shape in (("output.weight", (2, 1)), ("output.bias", (1,))):
        loc = pyro.param(f"{name}.loc", torch.zeros(shape))
        scale = pyro.param(f"{name}.scale", torch.full(shape, 0.1), constraint=d.constraints.positive)
        pyro.sample(name, d.Normal(loc, scale).to_event(len(shape)))


LOWRANK = {"guide": "lowrank", "particles": 2, "kl_warmup": 0.2}
STREAMED = {"batch_size": 7, "stream": True, "estimator": "local", "stop": "plateau"}


class After:
    """A progress that presses Ctrl-C at the n-th report."""

    def __init__(self, reports: int):
        self.left = reports

    def task(self, title: str, total: int) -> After:
        return self

    def update(self, done: int, **figures: float) -> None:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt

    def close(self) -> None:
        pass


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Written after every stretch, so that an interruption finds something."""
    monkeypatch.setattr(checkpoint, "INTERVAL", 0.0)


def interrupted(method: SVI, folder: Path, reports: int, model: Any = linear, seed: int = 4) -> SVI:
    """The method with a checkpoint in which a fit was interrupted at the n-th report."""
    method = replace(method, checkpoint=folder)
    with pytest.raises(KeyboardInterrupt):
        bnn.fit(model, X, Y, method, seed=seed, progress=After(reports))
    return method


def same_bits(first: Any, second: Any) -> None:
    one, two = first.approximation.arrays(), second.approximation.arrays()
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert np.array_equal(value, two[name]), name
    for name, value in first.info.history.items():
        assert np.array_equal(value, second.info.history[name]), name
    assert first.info.figures == second.info.figures
    assert first.info.warnings == second.info.warnings


# --- the same bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ppl", "options", "reports"),
    [
        # In the second of two fits, with batches, past the middle of it.
        ("numpyro", {"batch_size": 7, "restarts": 2}, 5),
        ("pyro", {"batch_size": 7, "restarts": 2}, 5),
        # A guide of our own with parts of several shapes.
        pytest.param("numpyro", LOWRANK, 2, marks=pytest.mark.slow),
        ("pyro", LOWRANK, 2),
        # The rows come from the host, and the learning rate falls as soon as the loss is flat.
        pytest.param("numpyro", STREAMED, 2, marks=pytest.mark.slow),
        ("pyro", STREAMED, 2),
    ],
)
def test_an_interrupted_fit_goes_on_to_the_same_bits(
    ppl: str, options: dict[str, Any], reports: int, eager: None, tmp_path: Path
) -> None:
    method = SVI(ppl=ppl, steps=250, learning_rate=0.05, elbo_draws=50, **options)
    whole = bnn.fit(linear, X, Y, method, seed=4)
    kept = interrupted(method, tmp_path / "fit", reports)
    folder = sorted(path.name for path in (tmp_path / "fit").iterdir())
    assert folder == [f"restart{index}.safetensors" for index in range(2 if "restarts" in options else 1)]
    resumed = bnn.fit(linear, X, Y, kept, seed=4)
    same_bits(whole, resumed)
    if ppl == "pyro":
        # A fit that is done is read back, to the same bits again.
        same_bits(whole, bnn.fit(linear, X, Y, kept, seed=4))


@pytest.mark.parametrize("ppl", [pytest.param("numpyro", marks=pytest.mark.slow), "pyro"])
def test_a_guide_written_by_hand_goes_on_as_well(
    ppl: str, eager: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autoguide, "KEPT", 60)
    guide: Callable[..., Any] = numpyro_guide if ppl == "numpyro" else pyro_guide
    method = SVI(ppl=ppl, guide=guide, steps=150, elbo_draws=50)
    whole = bnn.fit(linear, X, Y, method, seed=4)
    same_bits(whole, bnn.fit(linear, X, Y, interrupted(method, tmp_path / "fit", 1), seed=4))
    # Nothing in it depends on where the function lies in the memory of this process.
    from safetensors import safe_open

    with safe_open(tmp_path / "fit" / "restart0.safetensors", framework="numpy") as file:
        fingerprint = json.loads(file.metadata()["fingerprint"])
    assert fingerprint["settings"]["guide"] == identity(guide)
    assert fingerprint["settings"]["guide"]["function"] == f"{__name__}.{guide.__name__}"


def test_what_is_resumed_is_what_was_kept(eager: None, tmp_path: Path) -> None:
    # The proof that the steps before the interruption are not taken again: their losses are changed in the file.
    from safetensors import safe_open

    method = interrupted(SVI(ppl="pyro", steps=250, elbo_draws=50), tmp_path, 1)
    path = tmp_path / "restart0.safetensors"
    with safe_open(path, framework="numpy") as file:
        metadata = file.metadata()
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert arrays["losses"].shape == (100, 3)
    arrays["losses"] = arrays["losses"] + 1000.0
    write_sealed(path, arrays, {"fingerprint": metadata["fingerprint"]})
    loss = bnn.fit(linear, X, Y, method, seed=4).info.history["loss"]
    assert loss.shape == (250,)
    assert loss[:100].min() > 1000.0 > loss[100:].max()


# --- refused --------------------------------------------------------------------------------------------


def test_the_checkpoint_of_another_fit_is_refused_and_the_difference_is_named(
    eager: None, tmp_path: Path
) -> None:
    start = {"output.weight": np.zeros((2, 1)), "output.bias": np.zeros(1)}
    method = interrupted(SVI(ppl="pyro", steps=150, elbo_draws=50, start=start), tmp_path, 1)
    elsewhere = {**start, "output.bias": np.ones(1)}

    def refused(
        match: str, method: SVI = method, model: Any = linear, y: np.ndarray = Y, seed: int = 4
    ) -> None:
        with pytest.raises(InputError, match=rf"checkpoint.*differs in {match};"):
            bnn.fit(model, X, y, method, seed=seed)

    refused("seed", seed=5)
    refused("settings learning_rate", replace(method, learning_rate=0.02))
    refused("settings guide, settings particles", replace(method, guide="diagonal", particles=2))
    refused("settings start", replace(method, start=elsewhere))
    refused("model", model=wider)
    refused("model, data", y=Y + 1.0)
    refused("settings dtype, model, dtype", replace(method, dtype="float32"))


def test_a_folder_or_a_file_that_is_of_no_use_is_refused(eager: None, tmp_path: Path) -> None:
    occupied = tmp_path / "occupied"
    occupied.write_text("something else")
    for folder in (occupied, occupied / "below"):
        with pytest.raises(InputError, match=r"checkpoint: expected a folder that can be written"):
            bnn.fit(linear, X, Y, SVI(ppl="pyro", steps=20, checkpoint=folder))
    method = interrupted(SVI(ppl="pyro", steps=150, elbo_draws=50), tmp_path / "fit", 1)
    path = tmp_path / "fit" / "restart0.safetensors"
    content = path.read_bytes()
    for broken in (content[: len(content) // 2], b"", b"\xff" * 100):
        path.write_bytes(broken)
        with pytest.raises(InputError, match=r"checkpoint: expected a file that can be read.*restart0"):
            bnn.fit(linear, X, Y, method, seed=4)
    path.write_bytes(content)
    assert len(bnn.fit(linear, X, Y, method, seed=4).info.history["loss"]) == 150


# --- by itself --------------------------------------------------------------------------------------------


def test_it_keeps_arrays_of_all_kinds_and_replaces_them_as_a_whole(eager: None, tmp_path: Path) -> None:
    kept = Checkpoint.of(tmp_path / "new" / "folder", {"seed": 1}, "fit")
    assert kept.load() is None
    arrays = {
        "matrix": np.arange(6.0).reshape(2, 3)[:, ::-1],
        "scalar": np.asarray(2.5),
        "key": np.array([1, 2], dtype=np.uint32),
        "empty": np.empty((0, 3)),
        "half": np.ones(3, dtype=np.float32),
    }
    kept.keep(lambda: arrays)
    found = Checkpoint.of(tmp_path / "new" / "folder", {"seed": 1}, "fit").load()
    assert found is not None
    for name, value in arrays.items():
        assert found[name].dtype == value.dtype
        assert np.array_equal(found[name].reshape(value.shape), value)
    kept.keep(lambda: {"matrix": np.zeros(1)})
    again = kept.load()
    assert again is not None
    assert list(again) == ["matrix"]
    assert [path.name for path in kept.path.parent.iterdir()] == ["fit.safetensors"]  # pyright: ignore[reportOptionalMemberAccess]
    with pytest.raises(InputError, match="differs in seed"):
        Checkpoint.of(tmp_path / "new" / "folder", {"seed": 2}, "fit").load()


def test_it_is_written_now_and_then_and_always_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: now[0])
    kept = Checkpoint.of(tmp_path, {}, "fit")
    kept._written = now[0]
    asked = []

    def state() -> dict[str, np.ndarray]:
        asked.append(now[0])
        return {"a": np.zeros(1)}

    for moment in (101.0, 104.9, 105.0, 109.9, 110.0):
        now[0] = moment
        kept.keep(state)
    kept.keep(state, last=True)
    assert asked == [105.0, 110.0, 110.0]
    nothing = Checkpoint.of(None, {}, "fit")
    nothing.keep(state, last=True)
    assert nothing.load() is None
    assert len(asked) == 3
