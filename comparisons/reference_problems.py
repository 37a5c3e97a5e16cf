"""The problems of the reference posteriors: a model of the zoo, training rows, and a frozen grid of inputs.

`references/entries.toml` has one table for each reference. Inputs and numeric targets are standardised by the training
rows, so every array of a reference is in the units in which the model sees the data. The grid has named regions:

- "train": rows among the training rows;
- "test": held-out rows from the distribution of the training rows;
- "gap": rows from a part of the input space that the training rows leave out;
- "far": inputs at a distance from all training rows, without targets.

For a table the gap is the middle tenth of one feature, and far inputs are test rows times three. A simulated curve
chooses its own.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import ppl_bnn as bnn
from ppl_bnn.core.errors import InputError, unknown_name
from ppl_bnn.core.settings import OneOf, check_settings, setting, whole
from ppl_bnn.core.warning_filters import ignored
from ppl_bnn.diagnostics.prior_draws import PriorDraw
from ppl_bnn.language.handlers import recorded_linear
from ppl_bnn.references.reference import REGIONS

FOLDER = Path(__file__).parent / "references"
ENTRIES = FOLDER / "entries.toml"
GRADES = ("certified", "mode-weighted", "bracketed")
# Shares of the grid, and the number of outputs that a grid has at most.
SHARES = {"train": 0.2, "test": 0.4, "gap": 0.2, "far": 0.2}
GRID = 80
# The share of the values of one feature, about its median, that the training rows leave out.
GAP = 0.1
FAR = 3.0
# Steps of Adam for a network whose features are the inputs of a problem.
FEATURE_STEPS = 1000
Rows = dict[str, np.ndarray]


@dataclass(frozen=True)
class Entry:
    """One reference: what is fitted, to which rows, and how much is computed.

    Parameters
    ----------
    name : str
        Name of the reference, such as "linear_regression-diabetes".
    model : str
        Name of a model of the zoo.
    data : str
        Name of a table, or of a simulated curve in `CURVES`.
    arguments : dict
        Arguments of the model.
    rows : int
        Number of training rows.
    outputs : int
        Number of outputs of the network per row.
    feature : int
        The feature of a table whose middle is the gap.
    seed : int
        Seed of the split, and of simulated data.
    sought : {"certified", "mode-weighted", "bracketed"}
        The grade that the checks are for.
    modes : int
        Number of modes of a mode-weighted reference.
    draws, warmup, chains : int
        Of each of the two runs of NUTS.
    target_accept, mass_matrix, max_tree_depth
        As in `NUTS`.
    second : {"smc", "mclmc"}
        The second sampler: tempered SMC, or adjusted MCLMC, which has no log evidence, above some 150 weights, and
        wherever the log evidence of SMC has a standard error of 0.1 nats or more.
    particles, moves : int
        Of tempered SMC; of annealing, the particles that go forwards.
    simulations : int
        Number of simulations of the calibration, 0 where a fit is not cheap.
    scale_targets : bool
        Whether the targets of a regression table are standardised; counts and times are not.
    """

    name: str
    model: str
    data: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    rows: int = setting(100, whole(4))
    outputs: int = setting(1, whole(1, 10))
    feature: int = setting(0, whole(0))
    seed: int = setting(0, whole(0))
    sought: str = setting("certified", OneOf(GRADES))
    modes: int = setting(2, whole(2))
    draws: int = setting(2000, whole(100))
    warmup: int = setting(1000, whole(100))
    chains: int = setting(8, whole(8))
    target_accept: float = 0.9
    mass_matrix: str = "diagonal"
    max_tree_depth: int = setting(12, whole(1))
    second: str = setting("smc", OneOf(("smc", "mclmc")))
    particles: int = setting(1000, whole(100))
    moves: int = setting(5, whole(1))
    simulations: int = setting(0, whole(0))
    scale_targets: bool = True

    def __post_init__(self) -> None:
        check_settings(self, f"reference {self.name}")

    @classmethod
    def read(cls, path: Path = ENTRIES) -> dict[str, Entry]:
        """The entries of the library, in the order of the file."""
        return {name: cls(name, **table) for name, table in tomllib.loads(path.read_text()).items()}

    def function(self) -> Callable[..., None]:
        """The model with its arguments."""
        return partial(bnn.zoo.load(self.model), **self.arguments)


@dataclass(frozen=True)
class Problem:
    """The rows of a reference: training rows, and inputs and targets (where there are any) by region.

    `truth` has the values of all sites from which the targets were drawn, where these come from the prior of the model.
    """

    x: np.ndarray
    y: np.ndarray
    grid: Rows
    targets: Rows
    source: Mapping[str, Any]
    truth: Rows = field(default_factory=dict)

    @property
    def inputs(self) -> np.ndarray:
        """The grid as one array, region after region."""
        return np.concatenate([self.grid[region] for region in REGIONS])

    def pairs(self) -> np.ndarray:
        """Pairs of rows of the grid (P, 2) for joint covariances: neighbours within regions, and across regions.

        A row is paired with the next of its region, and the k-th row of a region with the k-th of each other one.
        """
        found, starts, first = [], {}, 0
        for region in REGIONS:
            starts[region] = np.arange(first, first + len(self.grid[region]))
            first += len(self.grid[region])
            found += [(a, a + 1) for a in starts[region][:-1]]
        for index, one in enumerate(REGIONS):
            for other in REGIONS[index + 1 :]:
                found += list(zip(starts[one], starts[other], strict=False))
        return np.array(found, dtype=np.int32)


def sizes(outputs: int) -> dict[str, int]:
    """Number of rows in each region, so that the grid has about `GRID` outputs."""
    return {region: max(2, round(GRID * share / outputs)) for region, share in SHARES.items()}


def problem(entry: Entry) -> Problem:
    """The rows of an entry, in the units of the model."""
    if entry.data in CURVES:
        return CURVES[entry.data](entry)
    if entry.data not in bnn.data.datasets():
        raise unknown_name("data", entry.data, [*CURVES, *bnn.data.datasets()])
    return _of_table(entry, entry.data)


def _of_table(entry: Entry, name: str) -> Problem:
    table = bnn.data.load(name)
    rng = np.random.default_rng(entry.seed)
    order = rng.permutation(len(table.y))
    ranks = np.argsort(np.argsort(table.x[order, entry.feature], kind="stable"), kind="stable")
    middle = np.abs(ranks / (len(order) - 1) - 0.5) < 0.5 * GAP
    gap, others = order[middle], order[~middle]
    count = sizes(entry.outputs)
    needed = entry.rows + count["test"]
    expected = f"rows that leave {count['test']} for the test, of the {len(others)} outside the gap"
    InputError.check(
        needed <= len(others), f"reference {entry.name}", expected, f"rows={entry.rows}", "fewer rows"
    )
    train, test = others[: entry.rows], others[entry.rows : entry.rows + count["test"]]
    gap = gap[: count["gap"]]
    mean, scale = table.x[train].mean(axis=0), table.x[train].std(axis=0)
    scale = np.where(scale > 0.0, scale, 1.0)
    y, centre, width = table.y, 0.0, 1.0
    if table.task == "regression" and entry.scale_targets:
        centre, width = float(y[train].mean()), float(y[train].std())
        y = (y - centre) / width
    x = (table.x - mean) / scale
    grid = {"train": x[train[: count["train"]]], "test": x[test], "gap": x[gap]}
    grid["far"] = FAR * x[test[: count["far"]]]
    targets = {"train": y[train[: count["train"]]], "test": y[test], "gap": y[gap]}
    source = {
        "name": table.name,
        "licence": table.licence,
        "provenance": table.provenance,
        "sha256": table.card()["hash"],
        "train": train.tolist(),
        "test": test.tolist(),
        "gap": gap.tolist(),
        "gap_feature": table.feature_names[entry.feature],
        "x_mean": mean.tolist(),
        "x_scale": scale.tolist(),
        "y_mean": centre,
        "y_scale": width,
    }
    return Problem(x[train], y[train], grid, targets, source)


# --- simulated data -----------------------------------------------------------------------------------


def _simulated(
    entry: Entry,
    draw_x: Callable[[np.random.Generator, int], np.ndarray],
    draw_y: Callable[[np.random.Generator, np.ndarray], np.ndarray],
    gap: np.ndarray,
    far: np.ndarray,
    words: str,
) -> Problem:
    """Training and test rows from one simulator, and given inputs in the gap and far away."""
    rng, count = np.random.default_rng(entry.seed), sizes(entry.outputs)
    x, test = draw_x(rng, entry.rows), draw_x(rng, count["test"])
    y, held, between = draw_y(rng, x), draw_y(rng, test), draw_y(rng, gap)
    chosen = np.linspace(0, entry.rows - 1, min(count["train"], entry.rows)).round().astype(int)
    grid = {"train": x[chosen], "test": test, "gap": gap, "far": far}
    targets = {"train": y[chosen], "test": held, "gap": between}
    source = {
        "name": entry.data,
        "licence": "none needed: simulated",
        "provenance": words,
        "seed": entry.seed,
    }
    return Problem(x, y, grid, targets, source)


def _two_sided(rng: np.random.Generator, rows: int) -> np.ndarray:
    """Uniform on [-2, -0.7] and [0.7, 2]."""
    return (rng.uniform(0.7, 2.0, rows) * rng.choice([-1.0, 1.0], rows))[:, None]


def _line(low: float, high: float, count: int) -> np.ndarray:
    return np.linspace(low, high, count)[:, None]


def _ends(inner: float, outer: float, count: int) -> np.ndarray:
    """Inputs on both sides beyond the training rows."""
    half = np.linspace(inner, outer, (count + 1) // 2)
    return np.concatenate([-half[::-1], half])[:count, None]


def curve_with_a_gap(entry: Entry) -> Problem:
    """One input on two intervals, y = sin(2 x) + 0.4 x + e, e ~ N(0, 0.2^2)."""

    def draw_y(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        return np.sin(2.0 * x[:, 0]) + 0.4 * x[:, 0] + 0.2 * rng.standard_normal(len(x))

    count = sizes(entry.outputs)
    gap, far = _line(-0.6, 0.6, count["gap"]), _ends(2.5, 4.0, count["far"])
    return _simulated(entry, _two_sided, draw_y, gap, far, str(curve_with_a_gap.__doc__))


def bayes_by_backprop_curve(entry: Entry) -> Problem:
    """The curve of Blundell et al. (2015): y = x + 0.3 sin(2 pi (x + e)) + 0.3 sin(4 pi (x + e)) + e, e ~ N(0, 0.02^2).

    Inputs are uniform on (0, 0.5) without (0.2, 0.3); inputs and targets are multiplied by four, so that they are of
    the order of one.
    """

    def draw_x(rng: np.random.Generator, rows: int) -> np.ndarray:
        u = rng.uniform(0.0, 0.4, rows)
        return 4.0 * np.where(u < 0.2, u, u + 0.1)[:, None]

    def draw_y(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        noise = 0.02 * rng.standard_normal(len(x))
        z = x[:, 0] / 4.0 + noise
        return 4.0 * (x[:, 0] / 4.0 + 0.3 * np.sin(2.0 * np.pi * z) + 0.3 * np.sin(4.0 * np.pi * z) + noise)

    count = sizes(entry.outputs)
    gap = 4.0 * _line(0.2, 0.3, count["gap"])
    far = np.concatenate(
        [_line(-0.8, -0.2, count["far"] // 2), _line(2.4, 4.8, count["far"] - count["far"] // 2)]
    )
    return _simulated(entry, draw_x, draw_y, gap, far, str(bayes_by_backprop_curve.__doc__))


def two_classes(entry: Entry) -> Problem:
    """Two inputs; p(y = 1 | x) = 1 / (1 + exp(-3 (x_2 - sin(2 x_1)))), x_1 on two intervals and x_2 normal."""

    def draw_x(rng: np.random.Generator, rows: int) -> np.ndarray:
        return np.column_stack([_two_sided(rng, rows)[:, 0], rng.standard_normal(rows)])

    def draw_y(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        logit = 3.0 * (x[:, 1] - np.sin(2.0 * x[:, 0]))
        return (rng.uniform(size=len(x)) < 1.0 / (1.0 + np.exp(-logit))).astype(np.int64)

    rng, count = np.random.default_rng([entry.seed, 1]), sizes(entry.outputs)
    gap = np.column_stack([np.linspace(-0.6, 0.6, count["gap"]), rng.standard_normal(count["gap"])])
    far = np.column_stack([_ends(3.0, 5.0, count["far"])[:, 0], 3.0 * rng.standard_normal(count["far"])])
    return _simulated(entry, draw_x, draw_y, gap, far, str(two_classes.__doc__))


def smooth_surface(entry: Entry) -> Problem:
    """Four inputs; y = sin(x_1) + 0.5 x_2 x_3 + 0.3 x_4 + e, e ~ N(0, 0.3^2), |x_1| > 0.3, all normal."""

    def draw_x(rng: np.random.Generator, rows: int) -> np.ndarray:
        x = rng.standard_normal((rows, 4))
        return np.column_stack([np.sign(x[:, 0]) * (0.3 + np.abs(x[:, 0])), x[:, 1:]])

    def draw_y(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        mean = np.sin(x[:, 0]) + 0.5 * x[:, 1] * x[:, 2] + 0.3 * x[:, 3]
        return mean + 0.3 * rng.standard_normal(len(x))

    rng, count = np.random.default_rng([entry.seed, 1]), sizes(entry.outputs)
    gap = rng.standard_normal((count["gap"], 4))
    gap[:, 0] = np.linspace(-0.2, 0.2, count["gap"])
    far = FAR * draw_x(rng, count["far"])
    return _simulated(entry, draw_x, draw_y, gap, far, str(smooth_surface.__doc__))


def hat(entry: Entry) -> Problem:
    """One input, y = 1.5 for |x| < 1 and -1.5 beyond, plus e ~ N(0, 0.3^2); |x| > 0.2, and (-x, y) with each (x, y).

    One tanh unit has one step. It fits the rise on the left or the fall on the right, and not both, and by symmetry
    each of these modes has half of the posterior mass.
    """

    def mirrored(half: np.ndarray, rows: int) -> np.ndarray:
        return np.concatenate([half, half])[:rows]

    def draw_x(rng: np.random.Generator, rows: int) -> np.ndarray:
        x = rng.uniform(0.2, 2.0, (rows + 1) // 2)
        return np.concatenate([x, -x])[:rows, None]

    def draw_y(rng: np.random.Generator, x: np.ndarray) -> np.ndarray:
        noise = mirrored(rng.standard_normal((len(x) + 1) // 2), len(x))
        return np.where(np.abs(x[:, 0]) < 1.0, 1.5, -1.5) + 0.3 * noise

    count = sizes(entry.outputs)
    gap, far = _line(-0.18, 0.18, count["gap"]), _ends(2.5, 4.0, count["far"])
    return _simulated(entry, draw_x, draw_y, gap, far, str(hat.__doc__))


# --- features of a trained network ----------------------------------------------------------------------


def _features(entry: Entry, model: str, arguments: Mapping[str, Any], words: str) -> Problem:
    """The problem of a table, with what enters the last layer of a network in place of its inputs.

    The layers before are those of a mode, found on the training rows of the problem.
    """
    base = _of_table(entry, "digits")
    network = bnn.zoo.load(model, **arguments)
    start = bnn.MAP(steps=FEATURE_STEPS, learning_rate=0.005, polish=False)
    # Pixels at the border of an image have no variance.
    with ignored("x: columns"):
        mode = bnn.fit(network, base.x, base.y, start, seed=entry.seed).approximation.centre()

    def last(x: np.ndarray) -> np.ndarray:
        return np.asarray(recorded_linear(network, mode, x)[1]["output"][0], dtype=float)

    x, grid = last(base.x), {region: last(rows) for region, rows in base.grid.items()}
    # The same bits as among all training rows.
    grid["train"] = x[_places(base)]
    arrays = [np.ascontiguousarray(array) for array in (x, *grid.values())]
    digest = hashlib.sha256(b"".join(array.astype(np.float32).tobytes() for array in arrays)).hexdigest()
    source = dict(base.source) | {
        "name": entry.data,
        "provenance": words,
        "network": {"model": model, "arguments": dict(arguments), "steps": FEATURE_STEPS},
        "table sha256": base.source["sha256"],
        "sha256": digest,
    }
    return Problem(x, base.y, grid, base.targets, source)


def digits_lenet(entry: Entry) -> Problem:
    """The 84 tanh units before the last layer of the zoo's LeNet, at a mode of the whole network, on digits."""
    return _features(entry, "lenet", {"sigma": 10.0}, str(digits_lenet.__doc__))


def digits_transformer(entry: Entry) -> Problem:
    """The 12 channels before the last layer of the zoo's transformer, at a mode of the whole network, on digits."""
    return _features(
        entry, "transformer_classifier", {"width": 12, "sigma": 10.0}, str(digits_transformer.__doc__)
    )


def _places(base: Problem) -> list[int]:
    """Where the rows of the region "train" are among the training rows."""
    places = {row.tobytes(): index for index, row in enumerate(base.x)}
    return [places[row.tobytes()] for row in base.grid["train"]]


# --- data from the prior ------------------------------------------------------------------------------


def _from_the_prior(entry: Entry, base: Problem, words: str) -> Problem:
    """The inputs of another problem, with targets of a network that is drawn from the prior of the model.

    The weights of this network are then one exact draw from the posterior.
    """
    rng = np.random.default_rng([entry.seed, 2])
    parts = {"": base.x, **{region: base.grid[region] for region in base.targets if region != "train"}}
    run = PriorDraw(rng)
    with run:
        entry.function()(np.concatenate(list(parts.values())), None)
    form = run.likelihood.form
    prediction = bnn.Prediction(*form.mixture_parameters(np.asarray(run.predictor, dtype=float)[None]))
    drawn = np.split(prediction.sample(1, rng)[0], np.cumsum([len(part) for part in parts.values()])[:-1])
    y, held = drawn[0], dict(zip(list(parts)[1:], drawn[1:], strict=True))
    chosen = _places(base)
    source = dict(base.source) | {"name": entry.data, "provenance": words}
    truth = {name: np.asarray(value) for name, (_, value) in run.drawn.items()}
    return Problem(base.x, y, base.grid, {"train": y[chosen], **held}, source, truth)


def prior_curve(entry: Entry) -> Problem:
    """One input on two intervals with a gap, and targets of a network drawn from the prior of the model."""
    return _from_the_prior(entry, curve_with_a_gap(entry), str(prior_curve.__doc__))


def prior_surface(entry: Entry) -> Problem:
    """Four inputs with a gap in the first, and targets of a network drawn from the prior of the model."""
    return _from_the_prior(entry, smooth_surface(entry), str(prior_surface.__doc__))


CURVES = {
    each.__name__: each
    for each in (
        curve_with_a_gap,
        bayes_by_backprop_curve,
        two_classes,
        smooth_surface,
        hat,
        prior_curve,
        prior_surface,
        digits_lenet,
        digits_transformer,
    )
}
