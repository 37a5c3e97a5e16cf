"""Known digits, turned digits and no digits at all: what a Laplace approximation says of each, beside its rivals.

Source: E. Daxberger, A. Kristiadi, A. Immer, R. Eschenhagen, M. Bauer and P. Hennig, "Laplace Redux - Effortless
Bayesian Deep Learning", NeurIPS 2021, its second experiment (in distribution, shift, out of distribution) and, of its
third, that other architectures will do, a transformer among them; as a review of it in Chinese retells them. With
L = -log p(D | w) - log p(w), the prior N(0, gamma^2 I) and a mode w* of a network f,

    p(w | D) ~ N(w*, Sigma),    Sigma^-1 = +(Hessian of L) = gamma^-2 I - sum_n Hessian of log p(y_n | f(x_n, w*)),
    f(x, w) ~ f(x, w*) + J (w - w*),    p(y | x) = integral softmax(f) N(f; f(x, w*), J Sigma J') df.

In print two signs of the first line are wrong (`laplace_design_choices.py` counts the negative variances that come of
it). A weight decay of lambda on the mean loss of N rows is gamma^-2 = lambda N; here lambda is 5e-4, as in the paper.

Data: MNIST, subsets of its rows drawn anew for each seed; shift: test images turned by 30 to 180 degrees; no digits:
KMNIST. Architectures: the zoo's LeNet, and a transformer that reads an image row by row. Methods: MAP (Adam on
mini-batches, iterates averaged); a deep ensemble of such, whose first member MAP is; mean-field VI; SWAG; cyclical
stochastic-gradient Hamiltonian Monte Carlo over all weights; Laplace, post hoc, from the same MAP: the paper's default
(last layer, Kronecker, evidence), over all weights, and with the prior as written. Reference: no sampler converges on a
whole network of this size here, so it is NUTS on the last layer given the features of MAP, which is the posterior that
a Laplace approximation of the last layer approximates.

Cut to an hour of one processor: 3000 of 60 000 training rows, 10 epochs of each descent, three seeds; KMNIST alone is
elsewhere, and the networks on colour images of the source are left out. Its percentages, kept beside, are of whole
tables.

Scores: accuracy, mean log probability, expected calibration error (15 bins), Brier score, confidence (the mean
probability of the most probable class), and the area under the ROC curve of that confidence as a detector of
what is a digit. Differences are paired over seeds; a seed has its own training rows, test rows and networks.

    python comparisons/out_of_distribution.py [--tiny] [--out DIR] [--checkpoint DIR] [--seeds N]
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from study import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    NOT_REPRODUCED,
    NOT_RUN,
    ORANGE,
    PINK,
    REPRODUCED,
    SKY,
    VERMILION,
    Images,
    Study,
    Verdict,
    command_line,
    judge_better,
    kept,
    load_images,
    paired,
    panels,
    stamp,
)

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors, scores
from ppl_bnn.core.errors import BNNError
from ppl_bnn.language.handlers import recorded_linear
from ppl_bnn.language.transforms import with_precision_factors

# Of the mean loss of a row.
WEIGHT_DECAY = 5e-4
LENET, TRANSFORMER = "LeNet", "transformer"
MAP, ENSEMBLE, VI, SWAG, SGHMC = "MAP", "deep ensemble", "VI, mean field", "SWAG", "cyclical SGHMC"
LAST, WRITTEN = "Laplace, last layer", "Laplace, last layer, prior as written"
ALL, NUTS = "Laplace, all weights", "NUTS, last layer"
# Beside the methods, in the table of gaps to NUTS: both have the same mode and the same features.
AT_MODE = "Laplace, last layer, at its own mode"
METHODS = (MAP, ENSEMBLE, VI, SWAG, SGHMC, LAST, WRITTEN, ALL, NUTS)
CHOICES: dict[str, dict[str, Any]] = {
    LAST: {"weights": "last_layer", "structure": "kron", "tune": "global"},
    WRITTEN: {"weights": "last_layer", "structure": "full", "tune": "none"},
    ALL: {"weights": "all", "structure": "kron", "tune": "global"},
}
TEST, SHIFT, ELSEWHERE = "test", "turned", "elsewhere"
LABELLED = ("accuracy", "log_score", "ece", "brier", "confidence")
# Where no digits are, as means over several such sets: confidence and AUROC in per cent, as a third party ran it again,
# those of Laplace as recalled from the paper (its two: the default, and the best of its design choices).
PUBLISHED = {
    MAP: (75.0, 96.5),
    ENSEMBLE: (65.7, 97.5),
    VI: (73.3, 95.9),
    SGHMC: (69.2, 96.1),
    SWAG: (76.8, 96.3),
    LAST: (67.5, 96.2),
    ALL: (56.1, 96.4),
}
COLOURS = {
    MAP: BLACK,
    ENSEMBLE: GREEN,
    VI: ORANGE,
    SWAG: PINK,
    SGHMC: GREY,
    LAST: BLUE,
    WRITTEN: SKY,
    ALL: VERMILION,
    NUTS: "#8B4513",
}
MARKERS = dict(zip(METHODS, "osD^vP*Xh", strict=True))


@dataclass(frozen=True)
class Sizes:
    """How much is computed. rows, test, turned, elsewhere: images; epochs: of each descent; vi_epochs: from MAP on.

    nuts: chains, warm-up and draws of the reference.
    """

    table: str = "mnist"
    seeds: int = 3
    rows: int = 3000
    test: int = 1000
    turned: int = 200
    elsewhere: int = 1000
    angles: tuple[int, ...] = (30, 60, 90, 120, 150, 180)
    architectures: tuple[str, ...] = (LENET, TRANSFORMER)
    channels: tuple[int, ...] = (6, 16)
    widths: tuple[int, ...] = (120, 84)
    kernel: int = 5
    width: int = 32
    heads: int = 4
    blocks: int = 1
    epochs: int = 10
    batch: int = 50
    rate: float = 2e-3
    members: int = 5
    vi_epochs: int = 10
    vi_rate: float = 1e-3
    vi_scale: float = 0.02
    swag_collections: int = 30
    swag_every: int = 20
    swag_burn_in: int = 5
    cycles: int = 3
    cycle_length: int = 10
    thinning: int = 20
    warmup: int = 10
    draws: int = 20
    nuts: tuple[int, int, int] | None = (4, 300, 1000)
    ppl: str = "pyro"
    dtype: str = "float32"


FULL = Sizes()
TINY = Sizes(
    table="digits",
    seeds=1,
    rows=80,
    test=40,
    turned=20,
    elsewhere=30,
    angles=(90,),
    channels=(2,),
    widths=(4,),
    kernel=3,
    width=4,
    heads=2,
    epochs=3,
    batch=20,
    rate=0.02,
    members=2,
    vi_epochs=2,
    swag_collections=6,
    swag_every=2,
    swag_burn_in=1,
    cycles=0,
    draws=5,
    nuts=None,
    dtype="float64",
)


def smaller(sizes: Sizes) -> str:
    """What every verdict has to say."""
    return (
        f"smaller than the source: {sizes.rows} of 60000 training rows, {sizes.epochs} epochs, {sizes.members} members,"
        f" {sizes.seeds} seeds, one set without digits"
    )


# --- networks ---------------------------------------------------------------------------------------


def gamma_of(rows: int) -> float:
    """The prior standard deviation that the weight decay on the mean loss of so many rows is."""
    return (WEIGHT_DECAY * rows) ** -0.5


def transformer(
    x: Any, y: Any = None, *, classes: int, width: int, heads: int, blocks: int, gamma: float
) -> None:
    """An image (N, H, W) as a sequence of its rows; weights and biases N(0, gamma^2)."""
    f = bnn.transformer(x, classes, width, heads, blocks, prior=priors.Normal(0.0, gamma))
    bnn.observe(y, f, likelihoods.Categorical())


def lenet(sizes: Sizes, pixels: int, gamma: float) -> Callable[..., None]:
    """The zoo's LeNet, whose priors are N(0, 1 / fan-in), with N(0, gamma^2) on every weight and bias instead."""
    model = bnn.zoo.load("lenet", channels=sizes.channels, widths=sizes.widths, kernel=sizes.kernel)
    factors = {
        # Of a bias, (O,), the product over no axis is 1, which is its fan-in.
        site.name: 1.0 / (gamma**2 * math.prod(site.shape[:-1]))
        for site in bnn.zoo.sketch(model, pixels).sites
    }
    return with_precision_factors(model, factors)


def network(architecture: str, sizes: Sizes, pixels: int) -> Callable[..., None]:
    gamma = gamma_of(sizes.rows)
    if architecture == LENET:
        return lenet(sizes, pixels, gamma)
    return partial(
        transformer, classes=10, width=sizes.width, heads=sizes.heads, blocks=sizes.blocks, gamma=gamma
    )


def inputs(architecture: str, images: np.ndarray) -> np.ndarray:
    """Images (N, H, W) as the network takes them: with a channel, or as sequences of rows."""
    return images[..., None] if architecture == LENET else images


def last_layer(x: Any, y: Any = None, *, classes: int, gamma: float) -> None:
    """The last layer alone, on features x (N, H): what is left of the network where the layers before it are held."""
    f = bnn.dense("output", x, classes, priors.Normal(0.0, gamma))
    bnn.observe(y, f, likelihoods.Categorical())


def features(
    model: Callable[..., None], weights: Mapping[str, np.ndarray], x: np.ndarray, chunk: int = 250
) -> np.ndarray:
    """What enters the layer "output", (N, H), from the program itself, in NumPy."""
    parts = [
        recorded_linear(model, weights, x[start : start + chunk])[1]["output"][0]
        for start in range(0, len(x), chunk)
    ]
    return np.concatenate(parts)


# --- images and scores ------------------------------------------------------------------------------


def rotated(images: np.ndarray, angle: float) -> np.ndarray:
    """Images (N, H, W) turned counter-clockwise by `angle` degrees about their middle, linearly interpolated."""
    from scipy.ndimage import rotate

    return np.asarray(rotate(images, angle, axes=(2, 1), reshape=False, order=1))


def sets_of(images: Images, sizes: Sizes) -> Iterator[tuple[str, np.ndarray, np.ndarray | None]]:
    """(name, images, labels): the test rows, the first of them turned, and what is no digit, which has no labels."""
    yield TEST, images.test, images.test_labels
    for angle in sizes.angles:
        yield (
            f"{SHIFT} {angle}",
            rotated(images.test[: sizes.turned], angle),
            images.test_labels[: sizes.turned],
        )
    yield ELSEWHERE, images.elsewhere, None


def detection(known: np.ndarray, unknown: np.ndarray) -> float:
    """Area under the ROC curve of confidences (N,) of digits against those (M,) of what is none; 1/2 is chance."""
    from sklearn.metrics import roc_auc_score

    truth = np.repeat([1, 0], [len(known), len(unknown)])
    return float(roc_auc_score(truth, np.concatenate([known, unknown])))


def evaluated(predict: Callable[[np.ndarray], Any], images: Images, sizes: Sizes) -> list[dict[str, Any]]:
    """A row of scores for each set. predict: images (N, H, W) -> Prediction."""
    rows: list[dict[str, Any]] = []
    known = np.zeros(0)
    for name, x, labels in sets_of(images, sizes):
        prediction = predict(x)
        confidence = prediction.probabilities.max(axis=1)
        row: dict[str, Any] = {"set": name, "images": len(x), "confidence": float(confidence.mean())}
        if labels is None:
            row["auroc"] = detection(known, confidence)
        else:
            row |= scores.scores_of(prediction, labels)
        if name == TEST:
            known = confidence
        rows.append(row)
    return rows


# --- methods ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Task:
    """One architecture on the rows of one seed."""

    architecture: str
    seed: int
    sizes: Sizes
    images: Images
    model: Callable[..., None]

    @classmethod
    def of(cls, architecture: str, seed: int, sizes: Sizes) -> Task:
        images = load_images(sizes.table, sizes.rows, sizes.test, sizes.elsewhere, seed)
        return cls(architecture, seed, sizes, images, network(architecture, sizes, images.pixels))

    @property
    def x(self) -> np.ndarray:
        return inputs(self.architecture, self.images.train)

    @property
    def steps_of_an_epoch(self) -> int:
        return math.ceil(self.sizes.rows / self.sizes.batch)

    def fit(self, method: Any) -> Any:
        return bnn.fit(self.model, self.x, self.images.labels, method, seed=self.seed)

    def predict(self, posterior: Any, draws: int | None = None) -> Callable[[np.ndarray], Any]:
        return lambda x: posterior.predict(inputs(self.architecture, x), draws=draws)

    def part(self, predict: Callable[[np.ndarray], Any], seconds: float, info: Any) -> dict[str, Any]:
        """Scores and costs of one method. seconds: of this process, as others may have the machine, too."""
        return {
            "scores": evaluated(predict, self.images, self.sizes),
            "processor_seconds": seconds,
            "gradients": info.gradient_evaluations,
            "warnings": list(info.warnings),
        }

    # -- one method each: (weights of MAP) -> a part

    def descent(self) -> Any:
        """The mode by mini-batches, or near it: the mean of the iterates of the second half."""
        sizes = self.sizes
        return bnn.SVI(
            guide="delta",
            steps=sizes.epochs * self.steps_of_an_epoch,
            batch_size=sizes.batch,
            learning_rate=sizes.rate,
            elbo_draws=2,
            ppl=sizes.ppl,
            dtype=sizes.dtype,
        )

    def ensemble(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Parts of the deep ensemble and of its first member, and the weights of that one, which is MAP."""
        begun = time.process_time()
        members = self.fit(bnn.Ensemble(self.descent(), size=self.sizes.members))
        seconds = time.process_time() - begun
        first = dataclasses.replace(members, approximation=members.approximation.components[0])
        whole = self.part(self.predict(members), seconds, members.info)
        one = self.part(self.predict(first), seconds / self.sizes.members, members.info)
        one["gradients"] = members.info.gradient_evaluations / self.sizes.members
        weights = {name: np.asarray(value[0, 0], float) for name, value in first.draws.items()}
        return {ENSEMBLE: whole, MAP: one}, weights

    def variational(self, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Independent normals, from MAP on, the gradient by flipout: convolutions share their weights."""
        sizes = self.sizes
        method = bnn.SVI(
            guide="normal",
            estimator="flipout",
            divergence="analytic",
            start=weights,
            init_scale=sizes.vi_scale,
            steps=sizes.vi_epochs * self.steps_of_an_epoch,
            batch_size=sizes.batch,
            learning_rate=sizes.vi_rate,
            elbo_draws=4,
            ppl=sizes.ppl,
            dtype=sizes.dtype,
        )
        return self._fitted(method, sizes.draws)

    def swag(self, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """The moments of gradient descent from MAP on, at the rate that the library takes from theory."""
        sizes = self.sizes
        method = bnn.SWAG(
            start=weights,
            collections=sizes.swag_collections,
            rank=min(20, sizes.swag_collections),
            every=sizes.swag_every,
            burn_in=sizes.swag_burn_in,
            batch_size=sizes.batch,
            ppl=sizes.ppl,
            dtype=sizes.dtype,
        )
        return self._fitted(method, sizes.draws)

    def sghmc(self, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Cyclical SGHMC over all weights, from MAP on: few cycles, and nothing that would be called convergence."""
        sizes = self.sizes
        if not sizes.cycles:
            return {"reason": "no cycles at this size"}
        method = bnn.SGHMC(
            start=weights,
            chains=1,
            warmup=sizes.warmup,
            draws=sizes.cycles * (sizes.cycle_length - sizes.cycle_length // 2),
            batch_size=sizes.batch,
            thinning=sizes.thinning,
            schedule="cyclical",
            cycle_length=sizes.cycle_length,
            exploration=0.5,
            dtype=sizes.dtype,
        )
        return self._fitted(method, None)

    def laplace(self, name: str, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Post hoc, at the weights of MAP, which are no exact mode: the warnings say by how much."""
        sizes = self.sizes
        method = bnn.Laplace(start=weights, optimise=False, ppl=sizes.ppl, dtype=sizes.dtype, **CHOICES[name])
        return self._fitted(method, None)

    def _fitted(self, method: Any, draws: int | None) -> dict[str, Any]:
        begun = time.process_time()
        try:
            posterior = self.fit(method)
        except BNNError as error:
            return {"reason": f"{type(error).__name__}: {error}"}
        seconds = time.process_time() - begun
        part = self.part(self.predict(posterior, draws), seconds, posterior.info)
        figures = posterior.info.figures
        wanted = ("prior_factor/all", "log_evidence", "elbo", "learning_rate", "variance_excess")
        return part | {"figures": {key: float(figures[key]) for key in wanted if key in figures}}

    def nuts(self, weights: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """NUTS on the last layer, and how far MAP and the Laplace approximations of it are from it on the test rows."""
        sizes = self.sizes
        if sizes.nuts is None:
            return {"reason": "no reference: NUTS is not run at this size"}
        chains, warmup, draws = sizes.nuts

        def seen(x: np.ndarray) -> np.ndarray:
            return features(self.model, weights, inputs(self.architecture, x))

        model = partial(last_layer, classes=10, gamma=gamma_of(sizes.rows))
        phi, y = seen(self.images.train), self.images.labels
        begun = time.process_time()
        held = {name: weights[name] for name in ("output.weight", "output.bias")}
        # At the mode of the last layer itself, which descent by mini-batches has only come near to.
        near = bnn.fit(model, phi, y, bnn.Laplace(start=held, steps=100, learning_rate=1e-3), seed=self.seed)
        posterior = bnn.fit(
            model,
            phi,
            y,
            bnn.NUTS(
                chains=chains,
                warmup=warmup,
                draws=draws,
                start=near,
                mass_matrix="dense",
                adapt_mass_matrix=False,
                max_tree_depth=8,
            ),
            seed=self.seed,
        )
        seconds = time.process_time() - begun
        thinned = chains * draws
        part = self.part(lambda x: posterior.predict(seen(x), draws=thinned), seconds, posterior.info)
        diagnosis = bnn.diagnose(posterior)
        part |= {"verdict": diagnosis.verdict, "reasons": list(diagnosis.reasons)}
        if diagnosis.verdict == "converged":
            part["gaps"] = self.gaps(posterior, near, seen(self.images.test), weights, chains, draws)
        return part

    def gaps(
        self,
        posterior: Any,
        near: Any,
        phi: np.ndarray,
        weights: Mapping[str, np.ndarray],
        chains: int,
        draws: int,
    ) -> list[dict[str, Any]]:
        """Error of the mean and ratio of standard deviations against the reference, test rows; its floor as its own."""
        reference = posterior.predict(phi, draws=chains * draws)
        floor = scores.noise_floor(reference, np.repeat(np.arange(chains), draws))
        rows = [{"method": NUTS} | floor]
        rows.append({"method": AT_MODE} | scores.fidelity(near.predict(phi), reference))
        sampled = near.predict(phi, kind="sampled", draws=chains * draws)
        rows.append({"method": f"{AT_MODE}, sampled"} | scores.fidelity(sampled, reference))
        for name in (LAST, WRITTEN):
            found = self.fit(
                bnn.Laplace(
                    start=weights, optimise=False, ppl=self.sizes.ppl, dtype=self.sizes.dtype, **CHOICES[name]
                )
            )
            prediction = self.predict(found)(self.images.test)
            rows.append({"method": name} | scores.fidelity(prediction, reference))
        kept_columns = ("method", "mean_gap", "sd_ratio", "total_variation", "agreement")
        return [{key: row[key] for key in kept_columns if key in row} for row in rows]


# --- what was found ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Rows of scores: architecture, method, seed, set, and a column for each score that the set has."""

    rows: Sequence[Mapping[str, Any]]

    def values(self, architecture: str, method: str, of: str, score: str) -> np.ndarray | None:
        """One value for each seed, (seeds,), in their order; of SHIFT the mean over angles. None where not run."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            inside = row["set"].startswith(SHIFT) if of == SHIFT else row["set"] == of
            if inside and (row["architecture"], row["method"]) == (architecture, method):
                found.setdefault(row["seed"], []).append(row[score])
        return np.array([np.mean(found[seed]) for seed in sorted(found)]) if found else None

    def difference(
        self, architecture: str, first: str, second: str, of: str, score: str
    ) -> tuple[float, float] | None:
        """Mean over seeds of the score of `first` minus that of `second`, and its standard error."""
        values = [self.values(architecture, method, of, score) for method in (first, second)]
        if values[0] is None or values[1] is None or len(values[0]) != len(values[1]):
            return None
        return paired(values[0] - values[1])

    def architectures(self) -> list[str]:
        return list(dict.fromkeys(row["architecture"] for row in self.rows))

    def table(self, note: str) -> list[dict[str, Any]]:
        """Mean and standard error over seeds of each score, for each architecture, method and set, turned images also
        together."""
        table = []
        methods = [name for name in METHODS if any(row["method"] == name for row in self.rows)]
        names = list(dict.fromkeys(row["set"] for row in self.rows))
        for architecture in self.architectures():
            for of in [*names[:1], SHIFT, *names[1:]]:
                for method in methods:
                    row: dict[str, Any] = {"architecture": architecture, "set": of, "method": method}
                    for score in ("auroc", "confidence") if of == ELSEWHERE else LABELLED:
                        values = self.values(architecture, method, of, score)
                        if values is not None:
                            row["seeds"] = len(values)
                            row[score], row[f"{score}_se"] = paired(values)
                    if "seeds" in row:
                        table.append(row | {"note": note})
        return table


def text(found: tuple[float, float]) -> str:
    mean, error = found
    return f"{mean:+.4f} (standard error {error:.4f})"


def missing(claim: str, architecture: str, method: str) -> Verdict:
    return Verdict(claim, NOT_RUN, f"{method} was not run with {architecture} at this size")


# --- verdicts ---------------------------------------------------------------------------------------


def judge_overconfident(found: Found, architecture: str, of: str) -> Verdict:
    """Reproduced where MAP is surer than it is right, by two standard errors."""
    claim = (
        f"{architecture}, {'in distribution' if of == TEST else 'turned digits'}: networks are over-confident"
    )
    sure, right = (found.values(architecture, MAP, of, score) for score in ("confidence", "accuracy"))
    assert sure is not None
    assert right is not None
    mean, error = paired(sure - right)
    return judge_better(
        claim,
        mean,
        error,
        f"MAP: confidence {sure.mean():.3f}, accuracy {right.mean():.3f}, difference {text((mean, error))}",
    )


def judge_lower(found: Found, architecture: str, method: str, of: str, score: str, claim: str) -> Verdict:
    """Reproduced where the score of `method` is below that of MAP by two standard errors."""
    difference = found.difference(architecture, MAP, method, of, score)
    if difference is None:
        return missing(claim, architecture, method)
    own, other = (found.values(architecture, name, of, score) for name in (method, MAP))
    assert own is not None
    assert other is not None
    return judge_better(
        claim,
        *difference,
        f"{score} {own.mean():.4f}, MAP {other.mean():.4f}, MAP's higher by {text(difference)}",
    )


def judge_accuracy(found: Found, architecture: str) -> Verdict:
    """Reproduced where the mean accuracies differ by no more than half a per cent, whatever their error is."""
    claim = f"{architecture}: Laplace, last layer, is as accurate as MAP"
    difference = found.difference(architecture, LAST, MAP, TEST, "accuracy")
    if difference is None:
        return missing(claim, architecture, LAST)
    same = abs(difference[0]) <= 0.005
    return Verdict(
        claim, REPRODUCED if same else NOT_REPRODUCED, f"difference on test rows {text(difference)}"
    )


def judge_signs(found: Found, architecture: str) -> Verdict:
    """Reproduced where each method is surer or less sure than MAP of what is no digit, as it is in the source, by two
    standard errors: a sign alone is right half of the time.
    """
    claim = f"{architecture}: where no digits are, each method is surer or less sure than MAP as in the published table"
    agree, parts = [], []
    for method, (published, _) in PUBLISHED.items():
        difference = found.difference(architecture, method, MAP, ELSEWHERE, "confidence")
        if method == MAP or difference is None:
            continue
        there = published - PUBLISHED[MAP][0]
        mean, error = difference
        agree.append(math.copysign(1.0, there) * mean > 2.0 * error)
        parts.append(f"{method} {text(difference)}, there {'higher' if there > 0 else 'lower'}")
    if not agree:
        return missing(claim, architecture, "any rival")
    return Verdict(
        claim,
        REPRODUCED if all(agree) else NOT_REPRODUCED,
        f"{sum(agree)} of {len(agree)} directions, by two standard errors; confidence minus MAP's: "
        + "; ".join(parts),
    )


def judge_more_weights(found: Found, architecture: str) -> Verdict:
    """Reproduced where all weights are less sure than the last layer, by two standard errors, and the area under the
    curve is not below that of MAP by more than half a per cent.
    """
    claim = f"{architecture}: Laplace over all weights is the least sure of what is no digit, and detects it as well"
    sure = found.difference(architecture, LAST, ALL, ELSEWHERE, "confidence")
    area = found.difference(architecture, ALL, MAP, ELSEWHERE, "auroc")
    if sure is None or area is None:
        return missing(claim, architecture, ALL)
    good = sure[0] > 2.0 * sure[1] and area[0] >= -0.005
    return Verdict(
        claim,
        REPRODUCED if good else NOT_REPRODUCED,
        f"the last layer is surer by {text(sure)}; AUROC of all weights minus MAP's {text(area)}",
    )


def judge_detection(found: Found, architecture: str) -> Verdict:
    """Reproduced where the deep ensemble is a better detector than MAP, by two standard errors."""
    claim = f"{architecture}: a deep ensemble tells best what is no digit"
    difference = found.difference(architecture, ENSEMBLE, MAP, ELSEWHERE, "auroc")
    if difference is None:
        return missing(claim, architecture, ENSEMBLE)
    areas = {
        method: float(values.mean())
        for method in METHODS
        if (values := found.values(architecture, method, ELSEWHERE, "auroc")) is not None
    }
    best = max(areas, key=lambda method: areas[method])
    good = best == ENSEMBLE and difference[0] > 2.0 * difference[1]
    listing = ", ".join(
        f"{method} {area:.4f}" for method, area in sorted(areas.items(), key=lambda pair: -pair[1])
    )
    return Verdict(
        claim,
        REPRODUCED if good else NOT_REPRODUCED,
        f"AUROC: {listing}; ensemble minus MAP {text(difference)}",
    )


def judge_cost(found: Found, costs: Sequence[Mapping[str, Any]], architecture: str) -> Verdict:
    """Reproduced where Laplace costs less than half of the ensemble and has more than half of the log score that the
    ensemble gains over MAP, by two standard errors, on test images and on turned ones.
    """
    claim = f"{architecture}: Laplace, last layer, keeps up with a deep ensemble at a fraction of its cost"
    seconds = {
        name: [
            row["processor_seconds"]
            for row in costs
            if (row["architecture"], row["method"]) == (architecture, name)
        ]
        for name in (MAP, LAST, ENSEMBLE)
    }
    if not all(seconds.values()):
        return missing(claim, architecture, LAST)
    share = (np.mean(seconds[MAP]) + np.mean(seconds[LAST])) / np.mean(seconds[ENSEMBLE])
    good, parts = share < 0.5, []
    for of, where in ((TEST, "test"), (SHIFT, "turned")):
        gained, whole = (
            found.difference(architecture, name, MAP, of, "log_score") for name in (LAST, ENSEMBLE)
        )
        values = [found.values(architecture, name, of, "log_score") for name in (LAST, ENSEMBLE, MAP)]
        if gained is None or whole is None:
            return missing(claim, architecture, LAST)
        own, ensemble, point = (each for each in values if each is not None)
        above, error = paired(own - 0.5 * (ensemble + point))
        good = good and above > 2.0 * error
        parts.append(f"{where} {text(gained)}, the ensemble's {text(whole)}")
    return Verdict(
        claim,
        REPRODUCED if good else NOT_REPRODUCED,
        f"{share:.2f} of the processor time of the ensemble, MAP included; log score minus MAP's: "
        + "; ".join(parts),
    )


def judge_reference(
    gaps: Sequence[Mapping[str, Any]], nuts: Mapping[str, Sequence[str]], architecture: str
) -> Verdict:
    """Reproduced where the mean is within half a standard deviation and the spread within a quarter, in every seed.

    nuts: by architecture, why there is no reference in a seed.
    """
    claim = f"{architecture}: Laplace on the last layer is near the posterior that it approximates (NUTS, last layer)"
    own = [row for row in gaps if row["architecture"] == architecture]
    if not own:
        return Verdict(
            claim, NOT_RUN, "no reference: " + ("; ".join(nuts.get(architecture, ())) or "NUTS was not run")
        )
    parts, good = [], True
    for method in dict.fromkeys(row["method"] for row in own):
        gap, ratio = (
            np.array([row[key] for row in own if row["method"] == method]) for key in ("mean_gap", "sd_ratio")
        )
        parts.append(f"{method} {gap.mean():.2f} and {ratio.mean():.2f}")
        if method == AT_MODE:
            good = bool((gap < 0.5).all() and (np.abs(np.log(ratio)) < math.log(1.25)).all())
    return Verdict(
        claim,
        REPRODUCED if good else NOT_REPRODUCED,
        f"gap of the mean in standard deviations of NUTS and ratio of standard deviations, means over "
        f"{len({row['seed'] for row in own})} seeds (of NUTS, between its halves): " + "; ".join(parts),
    )


def judge(
    found: Found,
    costs: Sequence[Mapping[str, Any]],
    gaps: Sequence[Mapping[str, Any]],
    nuts: Mapping[str, Sequence[str]],
    note: str,
) -> list[Verdict]:
    """Every claim, from the rows alone; each says how small the study is."""
    verdicts = []
    for architecture in found.architectures():
        verdicts += [
            judge_overconfident(found, architecture, TEST),
            judge_overconfident(found, architecture, SHIFT),
        ]
        for method in (LAST, ALL):
            for of, where in ((TEST, "in distribution"), (SHIFT, "turned digits")):
                claim = f"{architecture}, {where}: {method}, is better calibrated than MAP"
                verdicts.append(judge_lower(found, architecture, method, of, "ece", claim))
        claim = f"{architecture}: {LAST}, is less sure than MAP of what is no digit"
        verdicts += [
            judge_accuracy(found, architecture),
            judge_lower(found, architecture, LAST, ELSEWHERE, "confidence", claim),
            judge_more_weights(found, architecture),
            judge_signs(found, architecture),
            judge_detection(found, architecture),
            judge_cost(found, costs, architecture),
            judge_reference(gaps, nuts, architecture),
        ]
    verdicts.append(
        Verdict(
            "CIFAR-10 with augmentation: post hoc is better than during training",
            NOT_RUN,
            "no such data here",
        )
    )
    return [
        each if each.verdict == NOT_RUN else dataclasses.replace(each, numbers=f"{each.numbers} [{note}]")
        for each in verdicts
    ]


# --- figures ----------------------------------------------------------------------------------------


def draw_shift(path: Path, found: Found, sizes: Sizes, architecture: str) -> None:
    """Log score, calibration error and confidence against the angle by which test images are turned."""
    figure, axes = panels(13.5, 4.6, 3)
    angles = [0, *sizes.angles]
    names = [TEST, *(f"{SHIFT} {angle}" for angle in sizes.angles)]
    for axis, score, label in zip(
        axes[0],
        ("log_score", "ece", "confidence"),
        ("log score, nats per image", "expected calibration error", "confidence (dotted: accuracy of MAP)"),
        strict=True,
    ):
        for method in METHODS:
            each = [found.values(architecture, method, name, score) for name in names]
            known = [values for values in each if values is not None]
            if len(known) < len(names):
                continue
            mean, error = zip(*(paired(values) for values in known), strict=True)
            bars = np.where(np.isfinite(error), error, 0.0)
            axis.errorbar(
                angles,
                mean,
                bars,
                color=COLOURS[method],
                marker=MARKERS[method],
                markersize=5,
                linewidth=1.4,
                label=method,
            )
        axis.set(xlabel="turned by, degrees", ylabel=label)
        axis.set_xticks(angles)
    right = [found.values(architecture, MAP, name, "accuracy") for name in names]
    axes[0][2].plot(
        angles, [float(np.mean(values)) for values in right if values is not None], ":", color=BLACK
    )
    axes[0][2].set_ylim(0.0, 1.02)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.suptitle(
        f"{architecture}: digits, and digits turned (bars: standard error over seeds)", fontsize=12
    )
    figure.savefig(path)


def draw_elsewhere(path: Path, found: Found, what: str) -> None:
    """Confidence where no digits are against the area under the ROC curve, one panel for each architecture."""
    architectures = found.architectures()
    figure, axes = panels(6.2 * len(architectures), 5.2, len(architectures))
    for axis, architecture in zip(axes[0], architectures, strict=True):
        for method in METHODS:
            sure, area = (
                found.values(architecture, method, ELSEWHERE, score) for score in ("confidence", "auroc")
            )
            if sure is None or area is None:
                continue
            (x, x_error), (y, y_error) = paired(sure), paired(area)
            axis.errorbar(
                x,
                y,
                y_error if math.isfinite(y_error) else 0.0,
                x_error if math.isfinite(x_error) else 0.0,
                color=COLOURS[method],
                marker=MARKERS[method],
                markersize=8,
                linestyle="none",
                label=method,
            )
        axis.set(xlabel="confidence (lower is better)", ylabel="area under the ROC curve", title=architecture)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"{what} shown to networks of digits", fontsize=12)
    figure.savefig(path)


# --- the run ----------------------------------------------------------------------------------------


def run_task(
    task: Task, checkpoint: str | Path | None, say: Callable[[str], None]
) -> dict[str, dict[str, Any]]:
    """A part for each method; those that are in the folder are not computed again."""
    name = f"{task.architecture.lower()}-{task.seed}"

    def both() -> dict[str, Any]:
        parts, weights = task.ensemble()
        return {**parts, **weights}

    at = kept(checkpoint, f"{name}-ensemble", task.sizes, both)
    parts = {method: at.pop(method) for method in (ENSEMBLE, MAP)}
    for method, compute in (
        (LAST, lambda: task.laplace(LAST, at)),
        (WRITTEN, lambda: task.laplace(WRITTEN, at)),
        (NUTS, lambda: task.nuts(at)),
        (ALL, lambda: task.laplace(ALL, at)),
        (SWAG, lambda: task.swag(at)),
        (VI, lambda: task.variational(at)),
        (SGHMC, lambda: task.sghmc(at)),
    ):
        slug = method.lower().replace(",", "").replace(" ", "_")
        parts[method] = kept(checkpoint, f"{name}-{slug}", task.sizes, compute)
        told = (
            f"{parts[method]['processor_seconds']:.0f} s"
            if "scores" in parts[method]
            else parts[method]["reason"]
        )
        say(f"{task.architecture}, seed {task.seed}, {method}: {told}")
    return parts


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    seeds: int | None = None,
) -> Study:
    """Run the study and write tables, figures and verdicts; the arguments are those of the command line.

    What is kept in `checkpoint` is each method of each seed.
    """
    study = Study.begin(TINY if tiny else FULL, "out_of_distribution", tiny, out, seeds=seeds)
    sizes = study.sizes
    rows: list[dict[str, Any]] = []
    costs: list[dict[str, Any]] = []
    gaps: list[dict[str, Any]] = []
    without: dict[str, list[str]] = {}
    what = ""
    for seed in range(sizes.seeds):
        for architecture in sizes.architectures:
            task = Task.of(architecture, seed, sizes)
            what = task.images.what
            for method, part in run_task(task, checkpoint, study.say).items():
                base = {"architecture": architecture, "method": method, "seed": seed}
                if "scores" not in part:
                    costs.append(base | {"reason": part["reason"]})
                    continue
                rows += [base | row for row in part["scores"]]
                cost = (
                    base
                    | {key: part[key] for key in ("processor_seconds", "gradients")}
                    | part.get("figures", {})
                )
                costs.append(cost | {"reason": "; ".join(part["warnings"])})
                gaps += [{"architecture": architecture, "seed": seed} | row for row in part.get("gaps", [])]
                if method == NUTS and "gaps" not in part:
                    said = f"seed {seed} {part['verdict']}: {part['reasons'][0]}"
                    without.setdefault(architecture, []).append(said)
    found, note = Found(rows), smaller(sizes)
    study.tables = {"summary": found.table(note), "scores": rows, "costs": costs, "gaps": gaps}
    study.numbers = {
        "what is no digit": what,
        "note": note,
        "weight decay": WEIGHT_DECAY,
        "no reference": without,
    }
    study.numbers |= {"gamma": gamma_of(sizes.rows), "published, per cent": PUBLISHED} | stamp()
    timed = [row for row in costs if "processor_seconds" in row]
    for verdict in judge(found, timed, gaps, without, note):
        study.judge(verdict)
    for architecture in sizes.architectures:
        draw_shift(study.out / f"shift_{architecture.lower()}.png", found, sizes, architecture)
    draw_elsewhere(study.out / "elsewhere.png", found, what)
    study.write()
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    main(
        **vars(
            command_line(__doc__, "checkpoint", "seeds", tiny="a few small images, in seconds").parse_args()
        )
    )
