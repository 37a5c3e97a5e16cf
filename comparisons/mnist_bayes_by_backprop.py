"""Bayes by Backprop on MNIST: two hidden layers of ReLU under a scale mixture, beside plain training and dropout.

Source: C. Blundell, J. Cornebise, K. Kavukcuoglu and D. Wierstra (2015), "Weight uncertainty in neural networks". Two
hidden layers of 400, 800 or 1200 ReLU and a softmax; pixels divided by 126; the first 50 000 of the training images to
train on and the last 10 000 to choose by; batches of 128 rows. The prior of every weight and bias is

    p(w) = 1/2 N(w; 0, s1^2) + 1/2 N(w; 0, s2^2),   -ln s1 = 0,   -ln s2 = 6,

and q(w) = N(mu, sigma^2) is fitted by one draw a step. Beside it the same with a normal prior, whose standard deviation
is chosen, too; plain training ("SGD": the mode under N(0, 100^2), by Adam on batches); and dropout of half of the
hidden units, in training and in prediction, under that same prior. Learning rate and number of epochs are chosen for
each method and width by the error on the 10 000 images held out; what is then scored on the test images is the very fit
that was chosen, and further seeds of it. Predictions are averages over draws of the weights.

Departures: Adam in place of plain descent, with a rate that falls to a tenth over the second half, the mean of whose
iterates is the fit (as `bnn.SVI` has it). There is no reference: NUTS on half a million weights is out of reach.

This is a study for a GPU: `--full --device cuda`. By default it is a smoke test on a tenth of the rows, width 400 and a
few epochs, which shows that every part works; its errors are compared with nothing that was published.

    python comparisons/mnist_bayes_by_backprop.py [--tiny] [--full] [--device cuda] [--out DIR] [--checkpoint DIR]
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from bayes_by_backprop import FLAT
from claims import Referee, Verdict, mean, read_claims
from priors_and_temperature import fully_connected
from study import BLACK, BLUE, GREEN, SKY, VERMILION, Study, command_line, kept, panels

import ppl_bnn as bnn
from ppl_bnn import priors, scores

MIXTURE, GAUSSIAN = "Bayes by Backprop, scale mixture", "Bayes by Backprop, Gaussian"
SGD, DROPOUT = "SGD", "dropout"
METHODS = (MIXTURE, GAUSSIAN, SGD, DROPOUT)
SHORT = {MIXTURE: "mixture", GAUSSIAN: "gaussian", SGD: "sgd", DROPOUT: "dropout"}
SHARES, SCALES = (0.5, 0.5), (1.0, math.exp(-6.0))
# Test errors in %, by width; recalled, not verified.
RECALLED = {
    MIXTURE: {400: 1.36, 800: 1.34, 1200: 1.32},
    GAUSSIAN: {400: 1.82, 800: 1.99, 1200: 2.04},
    SGD: {400: 1.83, 800: 1.84, 1200: 1.88},
    DROPOUT: {400: 1.51, 800: 1.33, 1200: 1.36},
}
DTYPE = "float32"
# Weights that are kept of a fit to be looked at.
KEPT = 20_000


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    rows: (trained on, held out, tested on). gaussian_scales: standard deviations of the normal prior to choose from.
    seeds: fits of what was chosen. draws: of the weights, for a prediction. scale: standard deviations of q at the
    start. elbo_draws: for the ELBO that a fit reports. rate_dropped: the probability of a hidden unit to be dropped.
    """

    table: str = "mnist"
    rows: tuple[int, int, int] = (50_000, 10_000, 10_000)
    widths: tuple[int, ...] = (400, 800, 1200)
    rates: tuple[float, ...] = (1e-4, 3e-4, 1e-3)
    epochs: tuple[int, ...] = (100, 300)
    gaussian_scales: tuple[float, ...] = (math.exp(-2.0), math.exp(-1.0), 1.0)
    seeds: int = 3
    batch: int = 128
    draws: int = 100
    scale: float = 0.02
    elbo_draws: int = 10
    rate_dropped: float = 0.5


FULL = Sizes()
SMOKE = Sizes(
    rows=(5000, 1000, 1000),
    widths=(400,),
    rates=(1e-3,),
    epochs=(3, 6),
    gaussian_scales=(math.exp(-2.0),),
    seeds=1,
    draws=20,
)
TINY = Sizes(
    table="digits",
    rows=(150, 60, 60),
    widths=(6,),
    rates=(0.01,),
    epochs=(2, 4),
    gaussian_scales=(0.5,),
    seeds=2,
    batch=25,
    draws=5,
)


# --- images -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Images:
    """Rows of pixels in units of 126 of 255 steps, and labels: to train on, held out, to test on."""

    x: np.ndarray
    y: np.ndarray
    held_x: np.ndarray
    held_y: np.ndarray
    test_x: np.ndarray
    test_y: np.ndarray


def load_images(table: str, rows: tuple[int, int, int]) -> Images:
    """MNIST: of the training images the first to train on and the last held out, and the first of the test images.

    "digits": scikit-learn's of 8 x 8 pixels, one part after the other, in units of 8 of 16 steps.
    """
    trained, held, tested = rows
    if table == "digits":
        whole = bnn.data.load("digits")
        x, y = (whole.x / 8.0).astype(np.float32), whole.y
        test_x, test_y = x[trained + held :], y[trained + held :]
        x, y = x[: trained + held], y[: trained + held]
    else:
        train, test = (bnn.data.load("mnist", part=part) for part in ("train", "test"))
        x, test_x = ((part.x * (255.0 / 126.0)).astype(np.float32) for part in (train, test))
        y, test_y = train.y, test.y
    return Images(x[:trained], y[:trained], x[-held:], y[-held:], test_x[:tested], test_y[:tested])


# --- one fit ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """What is chosen on the images held out. gaussian: the standard deviation of the normal prior, where it has one."""

    rate: float
    epochs: int
    gaussian: float | None = None

    @property
    def name(self) -> str:
        return f"{self.rate:g}-{self.epochs}" + ("" if self.gaussian is None else f"-{self.gaussian:.4g}")


def choices(method: str, sizes: Sizes) -> list[Choice]:
    scales = sizes.gaussian_scales if method == GAUSSIAN else (None,)
    return [Choice(*each) for each in product(sizes.rates, sizes.epochs, scales)]


def prior_of(method: str, choice: Choice) -> Any:
    if method == MIXTURE:
        return priors.ScaleMixture(SHARES, SCALES)
    return FLAT if choice.gaussian is None else priors.Normal(0.0, choice.gaussian)


def method_of(method: str, choice: Choice, sizes: Sizes) -> Any:
    """The method with that rate, for as many steps as the epochs have."""
    steps = choice.epochs * math.ceil(sizes.rows[0] / sizes.batch)
    settings: dict[str, Any] = {
        "steps": steps,
        "learning_rate": choice.rate,
        "batch_size": sizes.batch,
        "dtype": DTYPE,
    }
    if method == DROPOUT:
        return bnn.MCDropout(rate=sizes.rate_dropped, **settings)
    if method == SGD:
        return bnn.SVI(guide="delta", elbo_draws=2, **settings)
    return bnn.SVI(guide="diagonal", init_scale=sizes.scale, elbo_draws=sizes.elbo_draws, **settings)


def part(
    method: str, width: int, choice: Choice, seed: int, sizes: Sizes, images: Images, device: str
) -> dict[str, Any]:
    """Scores of one fit on the images held out and on the test images, and some of its weights."""
    model = partial(fully_connected, width=width, classes=10, prior=prior_of(method, choice))
    with warnings.catch_warnings():
        # Pixels at the rim are blank in every image.
        warnings.filterwarnings("ignore", message=".*have no variance")
        fit = method_of(method, choice, sizes)
        posterior = bnn.fit(model, images.x, images.y, fit, seed=seed, device=device)
    draws = None if method == SGD else sizes.draws
    found: dict[str, Any] = {"converged": float(posterior.info.figures.get("converged", math.nan))}
    for name, x, y in (("held", images.held_x, images.held_y), ("test", images.test_x, images.test_y)):
        prediction = posterior.predict(x, draws=draws, device=device)
        found[f"{name}_error"] = 100.0 * (1.0 - scores.accuracy(prediction, y))
        found[f"{name}_log_score"] = float(np.mean(scores.log_score(prediction, y)))
    rng = np.random.default_rng(seed)
    approximation = posterior.approximation
    point = method in (SGD, DROPOUT)
    u = approximation.centre() if point else approximation.draw(1, rng)
    flat = np.concatenate([np.ravel(value) for name, value in u.items() if name.endswith(".weight")])
    found["weights"] = rng.choice(flat, min(KEPT, len(flat)), replace=False).astype(np.float32)
    return found


# --- verdicts -----------------------------------------------------------------------------------------


def errors_of(rows: Sequence[Mapping[str, Any]], method: str, width: int) -> np.ndarray:
    """Test errors in %, seed by seed."""
    return np.array([row["error"] for row in rows if row["method"] == method and row["width"] == width])


def whole(sizes: Sizes) -> bool:
    return sizes.table == FULL.table and sizes.rows == FULL.rows and sizes.widths == FULL.widths


def not_run(sizes: Sizes) -> str:
    return (
        f"a smoke test on {sizes.rows[0]} of {FULL.rows[0]} images ({sizes.table}), widths {sizes.widths}, at most "
        f"{max(sizes.epochs)} epochs, which no published error is compared with; --full --device cuda runs the study"
    )


def judge_published(referee: Referee, rows: Sequence[Mapping[str, Any]], method: str, sizes: Sizes) -> None:
    """The test error of a method beside the published one, width by width."""
    for width, wanted in RECALLED[method].items():
        claim = f"{SHORT[method]}-{width}"
        if not whole(sizes):
            referee.not_run(claim, not_run(sizes))
            continue
        errors = errors_of(rows, method, width)
        referee.measured(claim, mean(errors - wanted), f"{errors.mean():.2f} %, published {wanted:.2f} %")


def judge_order(referee: Referee, rows: Sequence[Mapping[str, Any]], other: str, sizes: Sizes) -> None:
    """The scale mixture has the smaller error: differences paired over seeds, averaged over widths."""
    claim = f"mixture-below-{SHORT[other]}"
    if not whole(sizes):
        referee.not_run(claim, not_run(sizes))
        return
    gains = [errors_of(rows, other, width) - errors_of(rows, MIXTURE, width) for width in sizes.widths]
    referee.measured(claim, mean(np.mean(gains, axis=0)), f"widths {', '.join(map(str, sizes.widths))}")


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    referee, rows = Referee(read_claims("mnist_bayes_by_backprop")), study.tables["errors"]
    for method in METHODS:
        judge_published(referee, rows, method, study.sizes)
    for other in METHODS[1:]:
        judge_order(referee, rows, other, study.sizes)
    return referee.verdicts()


# --- figures ------------------------------------------------------------------------------------------

STYLES = {MIXTURE: (BLUE, "o"), GAUSSIAN: (SKY, "s"), SGD: (BLACK, "^"), DROPOUT: (VERMILION, "D")}


def draw_errors(path: Path, rows: Sequence[Mapping[str, Any]], sizes: Sizes) -> None:
    """Test error by width, a mark per seed; what is recalled of the source beside it, if the study was run whole."""
    figure, axes = panels(6.6, 4.6)
    panel = axes[0, 0]
    for step, (name, (colour, marker)) in enumerate(STYLES.items()):
        for place, width in enumerate(sizes.widths):
            errors = errors_of(rows, name, width)
            at = np.full(len(errors), place + 0.12 * (step - 1.5))
            panel.plot(at, errors, marker, color=colour, label=name if place == 0 else None)
            if whole(sizes):
                label = "recalled of the source" if place == step == 0 else None
                panel.plot(at[0], RECALLED[name][width], "_", color=GREEN, markersize=14, label=label)
    panel.set_xticks(range(len(sizes.widths)), [str(width) for width in sizes.widths])
    panel.set(xlabel="units in each hidden layer", ylabel="test error, %", ylim=(0.0, None))
    # Marks of one width beside each other, not over the whole axis.
    panel.set_xlim(-0.6, len(sizes.widths) - 0.4)
    if not whole(sizes):
        panel.set_title(f"smoke test: {sizes.rows[0]} images of {sizes.table}", fontsize=11)
    panel.legend(frameon=False, fontsize=9, loc="center left", bbox_to_anchor=(1.0, 0.5))
    figure.savefig(path)


def draw_weights(path: Path, weights: Mapping[str, np.ndarray], width: int) -> None:
    """How the weights of each method are distributed: of one draw of q, or of the point."""
    figure, axes = panels(6.6, 4.4)
    panel = axes[0, 0]
    # Most weights of a mixture stay in its spike, and all of plain training within a few tenths.
    limit = float(np.quantile(np.abs(weights[SGD]), 0.999))
    edges = np.linspace(-limit, limit, 81)
    for name, (colour, _) in STYLES.items():
        panel.hist(weights[name], bins=edges, density=True, histtype="step", color=colour, label=name)
    panel.set(xlabel="weight", ylabel="density", yscale="log", title=f"width {width}, the chosen fits")
    panel.legend(frameon=False, fontsize=9)
    figure.savefig(path)


# --- all of it ----------------------------------------------------------------------------------------


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    full: bool = False,
    checkpoint: str | Path | None = None,
    seeds: int | None = None,
    device: str = "auto",
) -> Study:
    """Run the study and write tables, figures and verdicts to `out`; see `Study.begin` for where that is.

    full: all of it, for a GPU; by default a smoke test. checkpoint: a folder where each fit is kept when it has
    finished, so that an interrupted run goes on. seeds: how many. device: "auto", "cpu" or "cuda[:i]".
    """
    sizes = TINY if tiny else FULL if full else SMOKE
    study = Study.begin(sizes, "mnist_bayes_by_backprop", tiny, out, seeds=seeds)
    sizes = study.sizes
    images = load_images(sizes.table, sizes.rows)
    tried: list[dict[str, Any]] = []
    errors: list[dict[str, Any]] = []
    weights: dict[str, np.ndarray] = {}
    for width, method in product(sizes.widths, METHODS):

        def fitted(choice: Choice, seed: int, method: str = method, width: int = width) -> dict[str, Any]:
            name = f"{METHODS.index(method)}-{width}-{choice.name}-{seed}"
            compute = partial(part, method, width, choice, seed, sizes, images, device)
            return kept(checkpoint, name, sizes, compute)

        found = {choice: fitted(choice, 0) for choice in choices(method, sizes)}
        best = min(found, key=lambda choice: (found[choice]["held_error"], -found[choice]["held_log_score"]))
        for choice, scored in found.items():
            tried.append(
                {
                    "method": method,
                    "width": width,
                    "rate": choice.rate,
                    "epochs": choice.epochs,
                    "prior_sd": "" if choice.gaussian is None else choice.gaussian,
                    "held_out_error": scored["held_error"],
                    "held_out_log_score": scored["held_log_score"],
                    "chosen": int(choice == best),
                }
            )
        for seed in range(sizes.seeds):
            scored = found[best] if seed == 0 else fitted(best, seed)
            errors.append(
                {
                    "method": method,
                    "width": width,
                    "seed": seed,
                    "rate": best.rate,
                    "epochs": best.epochs,
                    "error": scored["test_error"],
                    "log_score": scored["test_log_score"],
                    "converged": "" if math.isnan(scored["converged"]) else int(scored["converged"]),
                    "recalled_error": RECALLED[method].get(width, "") if whole(sizes) else "",
                }
            )
            study.say(f"{method}, width {width}, seed {seed}: test error {scored['test_error']:.2f} %")
        if width == sizes.widths[0]:
            weights[method] = np.asarray(found[best]["weights"])
    study.tables = {"errors": errors, "choices": tried}
    study.numbers["reference"] = "no reference: NUTS is out of reach for so many weights"
    draw_errors(study.out / "errors.png", errors, sizes)
    draw_weights(study.out / "weights.png", weights, sizes.widths[0])
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    parser = command_line(__doc__, "checkpoint", "seeds")
    parser.add_argument("--full", action="store_true", help="the whole study, for a GPU")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda[:i]")
    main(**vars(parser.parse_args()))
