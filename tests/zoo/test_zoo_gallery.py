"""The gallery of the zoo: every model has a figure and its caption, README.md holds them, and each can be drawn."""

from __future__ import annotations

import importlib
import json
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from scipy import stats

import ppl_bnn as bnn
from ppl_bnn import zoo

ROOT = Path(__file__).parents[2]
GALLERY = ROOT / "models" / "gallery"
# Bytes of one figure: all of them are in every checkout, and in the wheel.
LARGEST = 60_000
# Drawn by default; all others by the slow tests.
QUICK = ("linear_regression", "count_mlp", "neal_hierarchical", "autoregressive")
# Minutes even at the tiny size: recurrences, attention and convolutions in torch, and fits of several starts.
LONG = (
    "evidence_framework",
    "lenet",
    "lstm_classifier",
    "mixture_density",
    "resnet",
    "transformer_classifier",
)


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "comparisons"))
        yield importlib.import_module("zoo_gallery")


# --- what is stored -----------------------------------------------------------------------------------


def test_every_model_has_a_figure_and_its_caption(script: Any) -> None:
    captions = script.read_captions(GALLERY)
    wanted = set(zoo.models()) | set(script.EXAMPLES)
    assert set(captions) == wanted
    assert set(script.FIGURES) == wanted
    for name, entry in captions.items():
        assert entry["figure"] == f"{name}.png"
        assert entry["caption"].endswith(".")
        assert entry["fitted"]
    assert {path.name for path in GALLERY.glob("*.png")} == {f"{name}.png" for name in captions}


def test_figures_are_small_and_readable(script: Any) -> None:
    from PIL import Image

    for path in sorted(GALLERY.glob("*.png")):
        assert path.stat().st_size <= LARGEST, path.name
        with Image.open(path) as image:
            assert image.mode == "P", path.name
            assert 600 <= image.width <= 700, path.name


def test_the_readme_holds_what_the_script_would_write(script: Any) -> None:
    page = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    assert script.with_section(page, script.section(script.read_captions(GALLERY))) == page
    for name in zoo.models():
        assert f"](gallery/{name}.png)" in page


def test_the_table_of_the_readme_is_that_of_the_cards() -> None:
    page = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    rows = [line.split(" | ") for line in page.splitlines() if line.startswith("| `")]
    assert {row[0].strip("| `"): row[2] for row in rows} == {
        name: card.data for name, card in zoo.models().items()
    }


def test_the_commands_of_the_readme_exist() -> None:
    from typer.main import get_command

    from ppl_bnn.cli import commands

    page = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    root: Any = get_command(commands.app)
    (block,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    for line in block.splitlines():
        words = shlex.split(line, comments=True)
        assert words[0] == "ppl-bnn"
        # Parses and converts, and calls nothing.
        given = root.commands[words[1]].make_context(words[1], words[2:]).params
        assert (given.get("model") or given.get("name") or "lenet") in zoo.models()


def test_every_other_link_of_the_readme_leads_somewhere() -> None:
    folder = ROOT / "models"
    page = (folder / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)\)", page):
        assert target.startswith("https://") or (folder / target).exists(), target


# --- how it is written --------------------------------------------------------------------------------


def test_a_section_goes_between_its_marks_and_nowhere_else(script: Any) -> None:
    captions = {
        "b": {"figure": "b.png", "caption": "Second. " + "word " * 40 + "end.", "fitted": "MAP: undecided"},
        "a": {"figure": "a.png", "caption": "First.", "fitted": "NUTS: converged"},
    }
    text = script.section(captions)
    assert text.index("### `a`") < text.index("### `b`")
    assert "![b: Second.](gallery/b.png)" in text
    assert "First. NUTS: converged." in text
    assert max(map(len, text.splitlines())) <= 120
    page = f"before\n{script.BEGIN}\nold\n{script.END}\nafter\n"
    written = script.with_section(page, text)
    assert written.startswith(f"before\n{script.BEGIN}\n\n")
    assert written.endswith(f"\n\n{script.END}\nafter\n")
    assert "old" not in written
    assert script.with_section(written, text) == written
    with pytest.raises(ValueError, match="no part between"):
        script.with_section("nothing", text)


def test_a_saved_figure_looks_like_the_figure(script: Any, tmp_path: Path) -> None:
    from PIL import Image

    figure, ((axes,),) = script.panels(6.4, 4.2)
    axes.fill_between([0.0, 1.0], [0.0, 1.0], color=script.BLUE, alpha=0.4)
    axes.plot([0.0, 1.0], [1.0, 0.0], color=script.VERMILION)
    script.save_small(figure, tmp_path / "a.png")
    whole = np.asarray(figure.canvas.buffer_rgba())[..., :3].astype(float)
    with Image.open(tmp_path / "a.png") as image:
        reduced = np.asarray(image.convert("RGB")).astype(float)
    assert whole.shape == reduced.shape == (420, 640, 3)
    # Of 255: no colour is lost, though none need be exact.
    assert np.abs(whole - reduced).max() < 30.0
    assert (tmp_path / "a.png").stat().st_size < 20_000


# --- numbers behind figures ---------------------------------------------------------------------------


def test_the_gaussian_process_is_the_limit_of_the_prior_conditioned_on_the_rows(script: Any) -> None:
    """The kernel by quadrature over the two pre-activations, and the posterior from the joint precision matrix."""
    sigma, offset, noise = 1.3, 0.6, 0.2
    x, new = np.array([[-1.0], [0.3], [1.7]]), np.array([[0.9], [-2.0]])
    y = np.array([0.2, -0.4, 1.0])
    mean, spread = script.nngp(x, y, new, sigma, offset, noise)

    nodes, weights = np.polynomial.hermite_e.hermegauss(150)
    weights = weights / weights.sum()

    def kernel(a: np.ndarray, b: np.ndarray) -> float:
        """offset^2 + sigma^2 E relu(u) relu(v), (u, v) normal with the covariance of the first layer."""
        first = [[offset**2 + sigma**2 * float(p @ q) for q in (a, b)] for p in (a, b)]
        root = np.linalg.cholesky(np.array(first) + 1e-12 * np.eye(2))
        u = root[0, 0] * nodes[:, None]
        v = root[1, 0] * nodes[:, None] + root[1, 1] * nodes[None, :]
        product = np.maximum(u, 0.0) * np.maximum(v, 0.0)
        return offset**2 + sigma**2 * float(weights @ product @ weights)

    rows = np.concatenate([x, new])
    joint = np.array([[kernel(a, b) for b in rows] for a in rows])
    joint[:3, :3] += noise**2 * np.eye(3)
    precision = np.linalg.inv(joint)
    covariance = np.linalg.inv(precision[3:, 3:])
    # Kinks cost the quadrature digits: about two of 150 nodes.
    np.testing.assert_allclose(spread**2, np.diag(covariance), rtol=0.02)
    np.testing.assert_allclose(mean, -covariance @ precision[3:, :3] @ y, atol=0.02)


def test_the_share_in_use_is_the_odds_of_two_normals(script: Any) -> None:
    w = np.array([0.0, 1e-3, 0.02, 0.5, -2.0])
    wide = 1.5 / math.sqrt(6)
    slab, spike = stats.norm(0.0, wide).pdf(w), stats.norm(0.0, wide / 100.0).pdf(w)
    expected = 0.25 * slab / (0.25 * slab + 0.75 * spike)
    np.testing.assert_allclose(script.in_use(w, 0.25, 1.5, 6), expected, rtol=1e-9)


def test_scales_of_units_are_those_of_the_program(script: Any, rng: np.random.Generator) -> None:
    """As the deterministic site of the weights, divided by its standard normal variables."""
    model = zoo.load("horseshoe_mlp", width=4)
    prior = bnn.prior_predictive(model, rng.normal(size=(5, 1)), rng.normal(size=5), draws=6, ppl="pyro")
    draws = {name: script.flat_draws(prior, name) for name in prior.draws}
    import torch
    from pyro import poutine

    native = bnn.as_pyro(model)
    found = script.unit_scales(draws)
    assert found.shape == (6, 4)
    for index in range(6):
        values = {name: torch.as_tensor(value[index]) for name, value in draws.items()}
        trace = poutine.trace(poutine.condition(native, values)).get_trace(
            torch.zeros((5, 1), dtype=torch.float64)
        )
        weights = trace.nodes["hidden0.weight"]["value"].numpy()
        scale = np.abs(weights / draws["hidden0.weight.base"][index])[0]
        np.testing.assert_allclose(found[index], np.sort(scale)[::-1], rtol=1e-9)


def test_kaplan_meier_is_the_product_over_events_of_the_rows_still_at_risk(script: Any) -> None:
    # Five rows; of the two at time 2 one is an event, and the other is at risk until then.
    y = np.array([[2.0, 0], [1, 1], [4, 1], [2, 1], [5, 0]])
    times, survival = script.kaplan_meier(y)
    expected = {
        0.0: 1.0,
        1.0: 4 / 5,
        2.0: 4 / 5 * 3 / 4,
        4.0: 4 / 5 * 3 / 4 * 1 / 2,
        5.0: 4 / 5 * 3 / 4 * 1 / 2,
    }
    np.testing.assert_allclose(times, list(expected))
    np.testing.assert_allclose(survival, list(expected.values()))


def test_the_common_head_is_every_head_where_groups_do_not_differ(
    script: Any, rng: np.random.Generator
) -> None:
    from types import SimpleNamespace

    from ppl_bnn.language.handlers import network_function

    model = zoo.load("multitask_hierarchical", column=1, cuts=(0.5,), width=3)
    x = np.column_stack([rng.normal(size=6), np.arange(6) % 2])
    y = rng.normal(size=6)
    draws = dict(bnn.prior_predictive(model, x, y, draws=4, ppl="pyro").draws)
    for name in ("heads.weight.spread", "heads.bias.spread"):
        draws[name] = np.full_like(draws[name], 1e-14)
    function = network_function(model)
    by_model = [
        function({name: value[0, index] for name, value in draws.items()}, x)[:, 0] for index in range(4)
    ]
    found = script.average_head(SimpleNamespace(draws=draws), x)
    np.testing.assert_allclose(found, np.mean(by_model, axis=0), rtol=1e-9, atol=1e-12)


def test_a_forecast_without_noise_is_the_network_on_its_own_output(
    script: Any, rng: np.random.Generator
) -> None:
    from ppl_bnn.language.handlers import network_function

    model = zoo.load("autoregressive", width=3)
    x, y = rng.normal(size=(7, 4)), rng.normal(size=7)
    drawn = bnn.prior_predictive(model, x, y, draws=5, ppl="pyro")
    draws = {name: script.flat_draws(drawn, name) for name in drawn.draws} | {"noise": np.full(5, 1e-14)}
    paths = script.forecast(draws, x[0], 3, rng)
    function = network_function(model)
    for index in range(5):
        w, series = {name: value[index] for name, value in draws.items()}, list(x[0])
        for step in range(3):
            series.append(function(w, np.array([series[-4:]]))[0, 0])
            assert paths[index, step] == pytest.approx(series[-1], rel=1e-9, abs=1e-10)
    # With noise the spread of the first step is the noise.
    many = {name: np.repeat(value[:1], 4000, axis=0) for name, value in draws.items()} | {
        "noise": np.full(4000, 0.3)
    }
    first = script.forecast(many, x[0], 1, rng)[:, 0]
    assert first.std() == pytest.approx(0.3, rel=6.0 / math.sqrt(2 * 4000))


# --- drawing ------------------------------------------------------------------------------------------


def drawn(script: Any, name: str, folder: Path) -> None:
    settings = dict(matplotlib.rcParams)
    assert script.main([name], tiny=True, out=folder) == folder
    assert dict(matplotlib.rcParams) == settings
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    captions = json.loads((folder / "captions.json").read_text(encoding="utf-8"))
    assert set(captions) == {name}
    assert len(captions[name]["caption"]) > 80
    assert "{" not in captions[name]["caption"]
    assert " nan" not in captions[name]["caption"]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_tiny_figure_is_drawn(script: Any, name: str, tmp_path: Path) -> None:
    drawn(script, name, tmp_path)


def others() -> list[str]:
    return sorted({*zoo.models(), "active_learning"} - set(QUICK) - set(LONG))


@pytest.mark.slow
@pytest.mark.parametrize("name", others())
def test_a_tiny_figure_of_another_model_is_drawn(script: Any, name: str, tmp_path: Path) -> None:
    drawn(script, name, tmp_path)


def test_a_run_goes_on_where_it_was_stopped(
    script: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = []

    def make(name: str) -> Any:
        def one(sizes: Any) -> Any:
            if name == "c" and len(done) == 2:
                raise KeyboardInterrupt
            done.append(name)
            return script.Drawn(script.panels(2.0, 2.0)[0], f"About {name}.", "MAP")

        return one

    monkeypatch.setattr(script, "FIGURES", {name: make(name) for name in "abc"})
    with pytest.raises(KeyboardInterrupt):
        script.main(tiny=True, out=tmp_path)
    assert set(script.read_captions(tmp_path)) == {"a", "b"}
    (tmp_path / "b.png").unlink()
    done.clear()
    script.main(tiny=True, out=tmp_path)
    assert done == ["b", "c"]
    script.main(["a"], tiny=True, out=tmp_path)
    assert done == ["b", "c", "a"]
    with pytest.raises(SystemExit, match="no figure of 'd'"):
        script.main(["d"], tiny=True, out=tmp_path)
