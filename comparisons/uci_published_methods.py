"""MC dropout and deep ensembles as they were published, run here on the splits of the UCI tables.

`uci_regression.py` holds one network by nine methods to numbers that others published. This study runs two of the
published methods themselves, so that the same split stands on both sides:

- MC dropout (Y. Gal and Z. Ghahramani 2016), by the script in the authors' repository (yaringal/
  DropoutUncertaintyExps, commit 6eb4497628d1): one hidden layer of 50 ReLU, dropout of inputs and hidden units,
  minimise

      1/N sum_n (y_n - f(x_n))^2 + lambda |W|^2,    lambda = l^2 (1 - p) / (2 N tau),    l = 0.01,

  by Adam (0.001, batches of 128) over 4000 epochs on the first four fifths of the training rows; the rate p is one of
  0.005, 0.01, 0.05, 0.1 and the precision tau of the noise, in units of the target, one of three for each table, chosen
  by the log likelihood of the last fifth. The network that is chosen is the one that is tested: nothing is trained
  again on all rows. For given p and tau that is the mode of a model with y_n ~ N(f(x_n), 1 / tau) and weights
  N(0, 2 / (l^2 (1 - p) sd(y)^2)) in standardised units, which is how it is written here.
- Deep ensembles (B. Lakshminarayanan, A. Pritzel and C. Blundell 2017): five networks of 50 ReLU with a mean and a
  variance for each row, torch's own initial weights, Adam (0.1, batches of 100) over 40 epochs, on the loss of the rows
  plus that of their adversarial examples, which are 0.01 of the range of each input away. A prediction is the normal
  distribution with the mean and the variance of the five. This is plain torch; the settings are recalled.

Departures of MC dropout: batches are drawn at random from all rows at each step, not epoch by epoch; the rate of
learning falls in the second half of the steps and the iterates of that half are averaged, as the library's descents do;
the noise in training is 1 / tau, which leaves the objective as it is.

The published log likelihoods of MC dropout are read split by split from `published/uci_mc_dropout.csv`; those of deep
ensembles are recalled, and their splits are not known.

    python comparisons/uci_published_methods.py [--tiny] [--out DIR] [--checkpoint DIR] [--splits N] [--tables NAME ...]
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, exact, mean_over_splits, read_claims
from study import BLACK, GREY, ORANGE, Study, command_line, kept, panels, run
from uci_regression import RECALLED_LOG_SCORES, THEIR_ENSEMBLE, chosen, load, published_dropout

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors, scores
from ppl_bnn.prediction.prediction import Prediction

DROPOUT, ENSEMBLE = "MC dropout", "deep ensemble"
# Precisions of the noise, in units of the target, as the authors' logs have them.
PRECISIONS = {
    "yacht": (0.25, 0.5, 0.75),
    "energy": (0.25, 0.5, 0.75),
    "concrete": (0.005, 0.05, 0.5),
    "diabetes": (0.0001, 0.0003, 0.001),
}
LENGTH_SCALE = 0.01


@dataclass(frozen=True)
class Sizes:
    """How much is computed. tables: which; splits: the first so many of the standard ones; rows: of a table, or all.

    rates: of dropout, to choose from; epochs, ensemble_epochs: of each descent; masks, test_masks: of dropout, on the
    validation part and the test rows. adversarial: how far such an example is from its row, in ranges of the inputs.
    """

    tables: tuple[str, ...] = ("yacht", "energy", "concrete")
    splits: int = 20
    rows: int | None = None
    rates: tuple[float, ...] = (0.005, 0.01, 0.05, 0.1)
    width: int = 50
    epochs: int = 4000
    batch: int = 128
    rate: float = 1e-3
    masks: int = 1000
    test_masks: int = 10_000
    members: int = 5
    ensemble_epochs: int = 40
    ensemble_batch: int = 100
    ensemble_rate: float = 0.1
    adversarial: float = 0.01


FULL = Sizes()
TINY = Sizes(
    tables=("diabetes",),
    splits=2,
    rows=60,
    rates=(0.05,),
    width=3,
    epochs=40,
    masks=20,
    test_masks=50,
    members=2,
)


# --- the two methods --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scaled:
    """Rows of a table in the units of its training rows: mean 0 and standard deviation 1."""

    x_mean: np.ndarray
    x_sd: np.ndarray
    y_mean: float
    y_sd: float

    @classmethod
    def by(cls, x: np.ndarray, y: np.ndarray) -> Scaled:
        sd = x.std(axis=0)
        return cls(x.mean(axis=0), np.where(sd == 0.0, 1.0, sd), float(y.mean()), float(y.std()))

    def inputs(self, x: np.ndarray) -> np.ndarray:
        return (x - self.x_mean) / self.x_sd

    def target(self, y: np.ndarray) -> np.ndarray:
        return (y - self.y_mean) / self.y_sd

    def scores(self, prediction: Prediction, y: np.ndarray) -> tuple[float, float]:
        """Log score and root mean square error in the units of the target, which the prediction is not in."""
        found = scores.scores_of(prediction, self.target(y))
        return found["log_score"] - math.log(self.y_sd), found["rmse"] * self.y_sd


def dropped(x: Any, y: Any = None, *, width: int, weight: float, noise: float) -> None:
    """The network of MC dropout; weights and biases N(0, weight^2), noise known."""
    f = bnn.mlp(x, [width, 1], activation="relu", prior=priors.Normal(0.0, weight))
    bnn.observe(y, f, likelihoods.Gaussian(noise))


def steps_of(epochs: int, rows: int, batch: int) -> int:
    return epochs * math.ceil(rows / batch)


def dropout_fit(
    sizes: Sizes, x: np.ndarray, y: np.ndarray, scaled: Scaled, rate: float, precision: float
) -> Any:
    """MC dropout at one rate and one precision of the noise."""
    weight = math.sqrt(2.0 / (1.0 - rate)) / (LENGTH_SCALE * scaled.y_sd)
    model = partial(
        dropped, width=sizes.width, weight=weight, noise=1.0 / (math.sqrt(precision) * scaled.y_sd)
    )
    method = bnn.MCDropout(
        rate=rate,
        layers=("hidden0", "output"),
        steps=steps_of(sizes.epochs, len(y), sizes.batch),
        batch_size=min(sizes.batch, len(y)),
        learning_rate=sizes.rate,
    )
    return bnn.fit(model, scaled.inputs(x), scaled.target(y), method, seed=0)


def run_dropout(
    sizes: Sizes, data: str, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    """The grid on the validation part, and the test scores of the network that it chooses."""
    begun = time.process_time()
    x, y = train
    count = int(0.8 * len(y))
    scaled = Scaled.by(x[:count], y[:count])
    grid: list[dict[str, Any]] = []
    best: Any = None
    for rate in sizes.rates:
        for precision in PRECISIONS[data]:
            posterior = dropout_fit(sizes, x[:count], y[:count], scaled, rate, precision)
            log_score, _ = scaled.scores(
                posterior.predict(scaled.inputs(x[count:]), draws=sizes.masks), y[count:]
            )
            row = {"rate": rate, "precision": precision, "validation": log_score}
            if best is None or log_score > max(each["validation"] for each in grid):
                best = posterior, row
            grid.append(row)
    posterior, row = best
    prediction = posterior.predict(scaled.inputs(test[0]), draws=sizes.test_masks)
    log_score, rmse = scaled.scores(prediction, test[1])
    return {
        "grid": grid,
        "row": {key: row[key] for key in ("rate", "precision")}
        | {"log_score": log_score, "rmse": rmse, "processor_seconds": time.process_time() - begun},
    }


def moments_of(network: Any, x: Any) -> tuple[Any, Any]:
    """The mean and the variance of each row; the variance has the source's lower limit."""
    import torch

    mean, raw = network(x).unbind(dim=1)
    return mean, torch.nn.functional.softplus(raw) + 1e-6


def member(sizes: Sizes, x: Any, y: Any, seed: int) -> Any:
    """One network, trained as in the source; x, y in standard units."""
    import torch

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = torch.nn.Linear(x.shape[1], sizes.width), torch.nn.ReLU(), torch.nn.Linear(sizes.width, 2)
        network = torch.nn.Sequential(*layers).double()
        optimiser = torch.optim.Adam(network.parameters(), lr=sizes.ensemble_rate)
        step = sizes.adversarial * (x.max(dim=0).values - x.min(dim=0).values)
        for _ in range(sizes.ensemble_epochs):
            for rows in torch.randperm(len(y)).split(sizes.ensemble_batch):
                inputs = x[rows].requires_grad_()
                loss = loss_of(network, inputs, y[rows])
                (slope,) = torch.autograd.grad(loss, inputs, retain_graph=True)
                optimiser.zero_grad()
                (loss + loss_of(network, (inputs + step * slope.sign()).detach(), y[rows])).backward()
                optimiser.step()
    return network


def loss_of(network: Any, x: Any, y: Any) -> Any:
    """The negative log likelihood, nats per row, without its constant."""
    mean, variance = moments_of(network, x)
    return (0.5 * variance.log() + 0.5 * (y - mean) ** 2 / variance).mean()


def run_ensemble(
    sizes: Sizes, train: tuple[np.ndarray, np.ndarray], test: tuple[np.ndarray, np.ndarray]
) -> dict[str, Any]:
    """Test scores of an ensemble of networks that have a variance for each row."""
    import torch

    begun = time.process_time()
    scaled = Scaled.by(*train)
    x, y = torch.as_tensor(scaled.inputs(train[0])), torch.as_tensor(scaled.target(train[1]))
    networks = [member(sizes, x, y, seed) for seed in range(sizes.members)]
    at = torch.as_tensor(scaled.inputs(test[0]))
    with torch.no_grad():
        means, variances = (
            np.stack(each) for each in zip(*(moments_of(network, at) for network in networks), strict=True)
        )
    spread = np.sqrt(variances.mean(axis=0) + means.var(axis=0))
    prediction = Prediction("Normal", {"loc": means.mean(axis=0)[None], "scale": spread[None]})
    log_score, rmse = scaled.scores(prediction, test[1])
    return {"row": {"log_score": log_score, "rmse": rmse, "processor_seconds": time.process_time() - begun}}


def splits_of(table: Any, sizes: Sizes) -> list[tuple[np.ndarray, np.ndarray]]:
    """(training rows, test rows) of the first splits: the standard ones, or random ones where rows were left out."""
    if table.splits is not None:
        return list(zip(table.splits.train, table.splits.test, strict=True))[: sizes.splits]
    orders = [np.random.default_rng(k).permutation(len(table.y)) for k in range(sizes.splits)]
    cut = int(0.9 * len(table.y))
    return [(order[:cut], order[cut:]) for order in orders]


# --- what was found ---------------------------------------------------------------------------------


def by_split(rows: Sequence[Mapping[str, Any]], data: str, method: str) -> dict[int, Mapping[str, Any]]:
    return {row["split"]: row for row in rows if row["data"] == data and row["method"] == method}


def over_splits(found: Mapping[int, Mapping[str, Any]], values: Sequence[float]) -> Any:
    """The estimate over the splits of one table, whose training rows overlap."""
    first = next(iter(found.values()))
    return mean_over_splits(values, first["test_rows"], first["train_rows"])


def ceiling(data: str) -> float:
    """The largest log score that a prediction with a noise precision of the grid can have, nats per row."""
    return 0.5 * math.log(max(PRECISIONS[data]) / (2.0 * math.pi))


def judge_dropout(referee: Referee, rows: Sequence[Mapping[str, Any]], data: str) -> None:
    """MC dropout here beside the published one, split by split, and whether its noise is at the end of the grid."""
    keys = [f"{data}-dropout-log_score", f"{data}-dropout-rmse", f"{data}-edge"]
    found = by_split(rows, data, DROPOUT)
    published = {row["split"]: row for row in published_dropout() if row["data"] == data}
    if len(found) < 2:
        for key in keys:
            referee.not_run(key, "not in this run")
        return
    own, theirs = (
        np.array([[each["log_score"], each["rmse"]] for each in found.values()]),
        np.array([[published[k]["log_likelihood"], published[k]["rmse"]] for k in found]),
    )
    text = (
        f"here {own[:, 0].mean():.3f} nats and RMSE {own[:, 1].mean():.3f}, published "
        f"{theirs[:, 0].mean():.3f} and {theirs[:, 1].mean():.3f} on the same splits"
    )
    referee.measured(keys[0], over_splits(found, own[:, 0] - theirs[:, 0]), text)
    referee.measured(keys[1], over_splits(found, own[:, 1] / theirs[:, 1] - 1.0), text)
    largest = max(PRECISIONS[data])
    at_edge = np.mean([each["precision"] == largest for each in found.values()])
    referee.measured(
        keys[2],
        exact(float(at_edge)),
        f"largest precision {largest:g}; no prediction with it has a log score above {ceiling(data):.3f} nats; the "
        f"published mean is {theirs[:, 0].mean():.3f}",
    )


def judge_ensemble(referee: Referee, rows: Sequence[Mapping[str, Any]], data: str) -> None:
    """The ensemble beside the published mean, which is recalled."""
    key, wanted = f"{data}-ensemble", RECALLED_LOG_SCORES[THEIR_ENSEMBLE][data]
    found = by_split(rows, data, ENSEMBLE)
    if len(found) < 2:
        referee.not_run(key, "not in this run")
        return
    values = np.array([each["log_score"] for each in found.values()])
    text = (
        f"here {values.mean():.3f} nats on {len(values)} splits, published {wanted:.3f}; the settings of the "
        "source are recalled and not verified"
    )
    referee.measured(key, over_splits(found, values - wanted), text)


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    rows = study.tables["scores"]
    counts = [len(by_split(rows, data, DROPOUT)) for data in ("yacht", "energy", "concrete")]
    done = ", ".join(map(str, counts))
    referee = Referee(
        read_claims("uci_published_methods"),
        f"{done} of 20 splits of yacht, energy and concrete; other departures from the source in the docstring",
    )
    for data in ("yacht", "energy", "concrete"):
        judge_dropout(referee, rows, data)
        judge_ensemble(referee, rows, data)
    return referee.verdicts()


# --- figure and run ---------------------------------------------------------------------------------


def draw(path: Path, rows: Sequence[Mapping[str, Any]], tables: Sequence[str]) -> None:
    """Log scores of MC dropout here against the published ones, a point for each split."""
    figure, axes = panels(max(4.6 * len(tables), 6.4), 4.6, len(tables))
    for axis, data in zip(axes[0], tables, strict=True):
        found = by_split(rows, data, DROPOUT)
        theirs = {row["split"]: row["log_likelihood"] for row in published_dropout() if row["data"] == data}
        common = [split for split in found if split in theirs]
        own = [found[split]["log_score"] for split in common]
        published = [theirs[split] for split in common]
        if common:
            ends = [min(own + published), max(own + published)]
            axis.plot(ends, ends, color=GREY, linewidth=1.0, zorder=0, label="as published")
            axis.plot(published, own, "o", color=ORANGE, label="MC dropout, a split each")
        axis.axhline(
            ceiling(data),
            color=BLACK,
            linestyle="--",
            label="largest log score that the grid of precisions allows",
        )
        axis.locator_params(nbins=6)
        axis.set(
            title=data, xlabel="published log score, nats per row", ylabel="log score here, nats per row"
        )
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    figure.savefig(path)


def draw_all(study: Study) -> None:
    """The figure from the stored tables."""
    draw(study.out / "scores.png", study.tables["scores"], study.sizes.tables)


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    splits: int | None = None,
    tables: Sequence[str] | None = None,
) -> Study:
    """Run the study and write tables, figure and verdicts; the arguments are those of the command line.

    What is kept in `checkpoint` is each method of each split.
    """
    sizes = TINY if tiny else FULL
    study = Study.begin(
        sizes, "uci_published_methods", tiny, out, splits=splits, tables=chosen(tables, sizes.tables)
    )
    sizes = study.sizes
    rows: list[dict[str, Any]] = []
    grids: list[dict[str, Any]] = []
    loaded = {data: load(data, sizes.rows) for data in sizes.tables}
    pairs = {data: splits_of(table, sizes) for data, table in loaded.items()}
    # Split by split over all tables, so that an interrupted run has the same splits of each.
    for split in range(max(map(len, pairs.values()))):
        for data, table in loaded.items():
            if split >= len(pairs[data]):
                continue
            first, second = pairs[data][split]
            train, test = (table.x[first], table.y[first]), (table.x[second], table.y[second])
            base = {"data": data, "split": split, "train_rows": len(first), "test_rows": len(second)}
            for method, compute in (
                (DROPOUT, partial(run_dropout, sizes, data, train, test)),
                (ENSEMBLE, partial(run_ensemble, sizes, train, test)),
            ):
                slug = method.lower().replace(" ", "_")
                # A part is of one table, whichever others are run.
                part = kept(checkpoint, f"{data}-{split}-{slug}", replace(sizes, tables=()), compute)
                rows.append(base | {"method": method} | part["row"])
                grids += [{"data": data, "split": split} | row for row in part.get("grid", ())]
                study.say(f"{data}, split {split}, {method}: {part['row']['log_score']:.3f} nats per row")
    study.tables = {"scores": rows, "validation": grids}
    draw_all(study)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "splits", "figures")
    parser.add_argument("--tables", nargs="+", help=f"of {', '.join(FULL.tables)}")
    run(parser, main, "uci_published_methods", FULL, draw_all)
