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
LA (last layer, Kronecker GGN, evidence), its LA* (last layer, full empirical Fisher), with the prior as written, and,
which the paper's table does not have, over all weights with a Kronecker GGN.

Reference: no sampler converges on a whole network of this size here, so it is NUTS on the last layer given the features
of MAP and the prior as written (LA and LA* tune it). That is the posterior that a Laplace approximation of the last
layer stands for. A lower calibration error of the approximation is a virtue of the posterior only if NUTS has it, too;
so NUTS is scored on each set of images as the others are, and its R-hat and bulk ESS are taken at those images. MAP by
mini-batches is no exact mode: the mode of the last layer itself, and the Laplace approximation at it, are scored beside
NUTS.

Cut to an hour of one processor: 3000 of 60 000 training rows, 10 epochs of each descent, three seeds; KMNIST alone is
elsewhere, and the networks on colour images of the source are left out. Its percentages, kept beside, are of whole
tables.

Scores: accuracy, mean log probability, expected calibration error (15 bins), Brier score, confidence (the mean
probability of the most probable class), and the area under the ROC curve of that confidence as a detector of
what is a digit. Differences are paired over seeds; a seed has its own training rows, test rows and networks, all rows
of one table.

    python comparisons/out_of_distribution.py [--tiny] [--out DIR] [--checkpoint DIR] [--seeds N]
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, mean, mean_over_splits, read_claims
from study import (
    BLACK,
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PINK,
    SKY,
    VERMILION,
    Images,
    Study,
    command_line,
    converged,
    kept,
    load_images,
    paired,
    panels,
)

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors, scores
from ppl_bnn.core.errors import BNNError
from ppl_bnn.language.handlers import recorded_linear
from ppl_bnn.language.transforms import with_precision_factors
from ppl_bnn.posterior.convergence import mixing

# Of the mean loss of a row.
WEIGHT_DECAY = 5e-4
LENET, TRANSFORMER = "LeNet", "transformer"
MAP, ENSEMBLE, VI, SWAG, SGHMC = "MAP", "deep ensemble", "VI, mean field", "SWAG", "cyclical SGHMC"
LAST, WRITTEN = "Laplace, last layer", "Laplace, last layer, prior as written"
STAR = "Laplace, last layer, full empirical Fisher"
ALL, NUTS = "Laplace, all weights", "NUTS, last layer"
METHODS = (MAP, ENSEMBLE, VI, SWAG, SGHMC, LAST, STAR, WRITTEN, ALL, NUTS)
# Beside the methods: the mode of the last layer itself, on the features that NUTS has.
OWN_MODE, AT_MODE = "MAP, last layer at its own mode", "Laplace, last layer, at its own mode"
CHOICES: dict[str, dict[str, Any]] = {
    LAST: {"weights": "last_layer", "structure": "kron", "tune": "global"},
    STAR: {"weights": "last_layer", "structure": "full", "curvature": "empirical", "tune": "global"},
    WRITTEN: {"weights": "last_layer", "structure": "full", "tune": "none"},
    ALL: {"weights": "all", "structure": "kron", "tune": "global"},
}
TEST, SHIFT, ELSEWHERE = "test", "turned", "elsewhere"
LABELLED = ("accuracy", "log_score", "ece", "brier", "confidence")
# Where no digits are, as means over several such sets: confidence and AUROC in per cent, as a third party ran it again;
# those of LA and LA* as recalled from the paper.
PUBLISHED = {
    MAP: (75.0, 96.5),
    ENSEMBLE: (65.7, 97.5),
    VI: (73.3, 95.9),
    SGHMC: (69.2, 96.1),
    SWAG: (76.8, 96.3),
    LAST: (67.5, 96.2),
    STAR: (56.1, 96.4),
}
# Names of methods in those of claims.
SHORT = {
    ENSEMBLE: "ensemble",
    VI: "vi",
    SGHMC: "sghmc",
    SWAG: "swag",
    LAST: "last",
    STAR: "star",
    ALL: "all",
    AT_MODE: "mode",
}
# R-hat is the worst over this many functions f of each set of images: evenly spaced images, ten outputs each.
FUNCTIONS, CLASSES = 200, 10
COLOURS = {
    MAP: BLACK,
    ENSEMBLE: GREEN,
    VI: ORANGE,
    SWAG: PINK,
    SGHMC: GREY,
    LAST: BLUE,
    STAR: "#5E3C99",
    WRITTEN: SKY,
    ALL: VERMILION,
    NUTS: "#8B4513",
}
MARKERS = dict(zip(METHODS, "osD^vPp*Xh", strict=True))


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


# (name, images or features, labels or None) of each set; test digits first.
Sets = Iterable[tuple[str, np.ndarray, np.ndarray | None]]


def scored(predict: Callable[[np.ndarray], Any], sets: Sets) -> list[dict[str, Any]]:
    """A row of scores for each set; where there are no digits, the area under the ROC curve against test digits."""
    rows: list[dict[str, Any]] = []
    known = np.zeros(0)
    for name, x, labels in sets:
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


def evaluated(predict: Callable[[np.ndarray], Any], images: Images, sizes: Sizes) -> list[dict[str, Any]]:
    """A row of scores for each set. predict: images (N, H, W) -> Prediction."""
    return scored(predict, sets_of(images, sizes))


def probes(count: int) -> np.ndarray:
    """The images of a set whose functions are judged for convergence: evenly spaced, the same in every run."""
    return np.unique(np.linspace(0, count - 1, FUNCTIONS // CLASSES).astype(int))


def convergence(predictor: Callable[[np.ndarray], np.ndarray], sets: Sets) -> list[dict[str, Any]]:
    """A row for each set: the largest rank-normalised R-hat and the least bulk ESS over the functions f at its probes.

    predictor: what a set has -> f (chains, draws, N, 10).
    """
    rows = []
    for name, x, _ in sets:
        f = predictor(x[probes(len(x))])
        found = mixing(f.reshape(*f.shape[:2], -1))
        rows.append(
            {"set": name, "functions": found.components, "rhat": found.rhat, "ess_bulk": found.ess_bulk}
        )
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
        """NUTS on the last layer, its convergence on each set, and how far the Laplace approximations are from it."""
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
        # The mode of the last layer itself, which descent by mini-batches has only come near to.
        own = bnn.fit(model, phi, y, bnn.MAP(start=held, steps=100, learning_rate=1e-3), seed=self.seed)
        near = bnn.fit(model, phi, y, bnn.Laplace(start=own, optimise=False), seed=self.seed)
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
        return part | {
            "verdict": diagnosis.verdict,
            "reasons": list(diagnosis.reasons),
            "convergence": convergence(
                lambda x: posterior.predictor(seen(x)), sets_of(self.images, self.sizes)
            ),
            "beside": {
                name: evaluated(lambda x, each=each: each.predict(seen(x)), self.images, self.sizes)
                for name, each in ((OWN_MODE, own), (AT_MODE, near))
            },
            "gaps": self.gaps(posterior, near, seen(self.images.test), weights, chains, draws),
        }

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
        for name in (LAST, STAR, WRITTEN):
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

    def by_seed(self, architecture: str, method: str, of: str, score: str) -> dict[int, float]:
        """The score of a method for each seed in which it was run; of SHIFT the mean over angles."""
        found: dict[int, list[float]] = {}
        for row in self.rows:
            own = (row["architecture"], row["method"]) == (architecture, method)
            if own and within(row["set"], of) and score in row:
                found.setdefault(row["seed"], []).append(row[score])
        return {seed: float(np.mean(found[seed])) for seed in sorted(found)}

    def values(self, architecture: str, method: str, of: str, score: str) -> np.ndarray | None:
        """Those of `by_seed` as an array (seeds,). None where not run."""
        found = self.by_seed(architecture, method, of, score)
        return np.array(list(found.values())) if found else None

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


def within(name: str, of: str) -> bool:
    """Whether a set of images is the one that is asked for; SHIFT is every angle."""
    return name.startswith(SHIFT) if of == SHIFT else name == of


# --- verdicts ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One architecture before the referee. tables: those of the study."""

    referee: Referee
    architecture: str
    found: Found
    tables: Mapping[str, Sequence[Mapping[str, Any]]]
    sizes: Sizes

    def rows(self, table: str) -> list[Mapping[str, Any]]:
        return [row for row in self.tables.get(table, ()) if row["architecture"] == self.architecture]

    def scores(self, claim: str, of: str, *wanted: tuple[str, str]) -> list[np.ndarray]:
        """Of each (method, score) that is wanted one value for each seed in which all were run; nothing at all, and the
        claim is said to be not run, where there is no such seed.
        """
        columns = [self.found.by_seed(self.architecture, method, of, score) for method, score in wanted]
        return self.common(claim, [method for method, _ in wanted], columns)

    def common(
        self, claim: str, methods: Sequence[str], columns: Sequence[Mapping[int, float]]
    ) -> list[np.ndarray]:
        """Columns (seed to value), one for each method, as arrays over the seeds that are in all of them."""
        seeds = sorted(set.intersection(*map(set, columns)))
        if seeds:
            return [np.array([column[seed] for seed in seeds]) for column in columns]
        absent = [method for method, column in zip(methods, columns, strict=True) if not column]
        what = " and ".join(dict.fromkeys(absent)) or "no seed has all of what is compared"
        sure, area = PUBLISHED[STAR]
        published = f"the source has confidence {sure} % and AUROC {area} % for it where no digits are"
        self.referee.not_run(
            self.key(claim), f"{what}: not run with {self.architecture}", published if STAR in absent else ""
        )
        return []

    def key(self, claim: str) -> str:
        return f"{self.architecture.lower()}-{claim}"

    def means(self, of: str, score: str, *methods: str) -> str:
        """The mean over seeds of each method that was run."""
        found = {each: self.found.values(self.architecture, each, of, score) for each in methods}
        return ", ".join(
            f"{method} {values.mean():.4f}" for method, values in found.items() if values is not None
        )

    def measured(self, claim: str, of: str, values: np.ndarray, numbers: str, **more: Any) -> None:
        """One value for each seed, of a set of images."""
        rows = {TEST: self.sizes.test, SHIFT: self.sizes.turned, ELSEWHERE: self.sizes.elsewhere}[of]
        estimate = mean_over_splits(values, rows, self.sizes.rows)
        self.referee.measured(self.key(claim), estimate, numbers, **more)

    def convergence(self, of: str) -> dict[str, Any]:
        """Whether NUTS has converged at the images of a set in every seed, as the referee takes it."""
        rows = [row for row in self.rows("convergence") if within(row["set"], of)]
        wanted = {
            (row["seed"], row["set"])
            for row in self.rows("scores")
            if row["method"] == NUTS and within(row["set"], of)
        }
        if not rows or wanted - {(row["seed"], row["set"]) for row in rows}:
            why = "R-hat and bulk ESS of NUTS at these images were not stored; not known to have converged there"
            return {"converged": False, "why_not": why}
        rhat = float(np.max([row.get("rhat", math.inf) for row in rows]))
        ess = float(np.min([row.get("ess_bulk", 0.0) for row in rows]))
        why = f"at these images NUTS has R-hat {rhat:.3f} and bulk ESS {ess:.0f} at worst"
        return {"converged": converged(rhat, ess), "why_not": why}


def judge_overconfident(case: Case, of: str) -> None:
    """MAP is surer than it is right."""
    claim = f"overconfident-{of}"
    if found := case.scores(claim, of, (MAP, "confidence"), (MAP, "accuracy")):
        sure, right = found
        own = [row for row in case.rows("costs") if row["method"] == MAP]
        falling = sum("still falling" in row.get("reason", "") for row in own)
        text = (
            f"MAP: confidence {sure.mean():.3f}, accuracy {right.mean():.3f}; its loss was still falling at the end in "
            f"{falling} of {len(own)} seeds"
        )
        case.measured(claim, of, sure - right, text)


def judge_calibration(case: Case, method: str, of: str) -> None:
    """The calibration error is below that of MAP; beside the last layer that of NUTS is told."""
    claim = f"calibration-{SHORT[method]}-{of}"
    if found := case.scores(claim, of, (MAP, "ece"), (method, "ece")):
        beside = () if method == ALL else (NUTS,)
        case.measured(claim, of, found[0] - found[1], case.means(of, "ece", method, MAP, *beside))


def judge_accuracy(case: Case) -> None:
    """Laplace on the last layer is as accurate as MAP."""
    if found := case.scores("accuracy", TEST, (LAST, "accuracy"), (MAP, "accuracy")):
        difference = found[0] - found[1]
        by_seed = ", ".join(f"{each:+.3f}" for each in difference)
        alike = "; no spread over seeds, so the interval has no width" if np.ptp(difference) == 0.0 else ""
        case.measured(
            "accuracy",
            TEST,
            difference,
            f"{case.means(TEST, 'accuracy', LAST, MAP)}; by seed {by_seed}, of {case.sizes.test} images each{alike}",
        )


def judge_direction(case: Case, method: str) -> None:
    """Surer or less sure than MAP of what is no digit."""
    claim = f"direction-{SHORT[method]}"
    if found := case.scores(claim, ELSEWHERE, (method, "confidence"), (MAP, "confidence")):
        beside = (NUTS,) if method in (LAST, STAR) else ()
        text = case.means(ELSEWHERE, "confidence", method, MAP, *beside)
        if method in PUBLISHED:
            text += f"; published {PUBLISHED[method][0]} %, MAP {PUBLISHED[MAP][0]} %"
        else:
            text += f"; the published {PUBLISHED[STAR][0]} % are of LA*, which is another variant"
        case.measured(claim, ELSEWHERE, found[0] - found[1], text)


def judge_least_sure(case: Case, method: str) -> None:
    """Less sure of what is no digit than any other method of the published table, LA* aside, in each seed."""
    claim, others = f"least-sure-{SHORT[method]}", [name for name in PUBLISHED if name != STAR]
    wanted = [(name, "confidence") for name in (method, *others)]
    if found := case.scores(claim, ELSEWHERE, *wanted):
        text = case.means(ELSEWHERE, "confidence", method, *others)
        case.measured(claim, ELSEWHERE, np.min(found[1:], axis=0) - found[0], text)


def judge_detects(case: Case, method: str) -> None:
    """Detects what is no digit as well as MAP does."""
    claim = f"detects-{SHORT[method]}"
    if found := case.scores(claim, ELSEWHERE, (method, "auroc"), (MAP, "auroc")):
        case.measured(claim, ELSEWHERE, found[0] - found[1], case.means(ELSEWHERE, "auroc", method, MAP))


def judge_ensemble(case: Case, claim: str, rivals: Sequence[str]) -> None:
    """The deep ensemble detects what is no digit better than the best of its rivals in each seed."""
    wanted = [(name, "auroc") for name in (ENSEMBLE, *rivals)]
    if found := case.scores(claim, ELSEWHERE, *wanted):
        text = case.means(ELSEWHERE, "auroc", ENSEMBLE, *rivals)
        case.measured(claim, ELSEWHERE, found[0] - np.max(found[1:], axis=0), text)


def judge_keeps_up(case: Case, of: str) -> None:
    """Laplace on the last layer gains more than half of the log score that the ensemble gains over MAP."""
    claim = f"keeps-up-{of}"
    if found := case.scores(claim, of, *((name, "log_score") for name in (LAST, ENSEMBLE, MAP))):
        own, ensemble, point = found
        text = case.means(of, "log_score", LAST, ENSEMBLE, MAP, NUTS)
        case.measured(claim, of, own - 0.5 * (ensemble + point), text)


def judge_cost(case: Case) -> None:
    """MAP and Laplace on the last layer take less than half of the processor time of the ensemble."""
    columns = {
        method: {
            row["seed"]: row["processor_seconds"]
            for row in case.rows("costs")
            if row["method"] == method and "processor_seconds" in row
        }
        for method in (MAP, LAST, ENSEMBLE)
    }
    if found := case.common("cost", list(columns), list(columns.values())):
        point, own, ensemble = found
        text = (
            f"Laplace {own.mean():.1f} s, the ensemble {ensemble.mean():.1f} s, MAP as one of its "
            f"{case.sizes.members} members {point.mean():.1f} s, on a machine that may have had other work"
        )
        case.referee.measured(case.key("cost"), mean((point + own) / ensemble), text)


def judge_near(case: Case, method: str) -> None:
    """The predictive means and their spread are near those of NUTS on the last layer."""
    gaps = {
        name: {row["seed"]: row for row in case.rows("gaps") if row["method"] == name}
        for name in (method, AT_MODE, LAST, STAR, WRITTEN, NUTS)
    }
    listing = "; ".join(
        f"{'between halves of NUTS' if name == NUTS else name} "
        f"{np.mean([row['mean_gap'] for row in rows.values()]):.2f} and "
        f"{np.mean([row['sd_ratio'] for row in rows.values()]):.2f}"
        for name, rows in gaps.items()
        if rows
    )
    for start, of in (("near-mean", "mean_gap"), ("near-spread", "sd_ratio")):
        claim = f"{start}-{SHORT[method]}"
        column = {seed: row[of] for seed, row in gaps[method].items()}
        if found := case.common(claim, [f"{method}, beside NUTS"], [column]):
            case.measured(
                claim,
                TEST,
                found[0] if of == "mean_gap" else np.log(found[0]),
                f"gap of the mean and ratio of standard deviations: {listing}",
                **case.convergence(TEST),
            )


# Where what a posterior predicts is held to that of a point: (name, set of images, score, sign of what is better).
PREDICTS = (
    ("log_score", SHIFT, "log_score", 1.0),
    ("ece", SHIFT, "ece", -1.0),
    ("elsewhere", ELSEWHERE, "confidence", -1.0),
)
# All that is the last layer's, from the points on.
OF_THE_LAST = (MAP, OWN_MODE, LAST, STAR, WRITTEN, AT_MODE, NUTS)


def judge_posterior(case: Case, prefix: str, point: str) -> None:
    """NUTS on the last layer predicts better than a point: turned digits by log score and calibration error, and less
    sure of what is no digit.
    """
    for name, of, score, sign in PREDICTS:
        claim = f"{prefix}-{name}"
        if found := case.scores(claim, of, (NUTS, score), (point, score)):
            text = case.means(of, score, *OF_THE_LAST)
            case.measured(claim, of, sign * (found[0] - found[1]), text, **case.convergence(of))


def judge_nearer(case: Case) -> None:
    """Laplace on the last layer is nearer to NUTS than MAP is, by the same scores."""
    for name, of, score, _ in PREDICTS:
        claim = f"nearer-{name}"
        if found := case.scores(claim, of, *((each, score) for each in (MAP, LAST, NUTS))):
            point, own, nuts = found
            text = case.means(of, score, *OF_THE_LAST)
            case.measured(claim, of, np.abs(point - nuts) - np.abs(own - nuts), text, **case.convergence(of))


def judge_architecture(case: Case) -> None:
    """Every claim about one architecture."""
    for of in (TEST, SHIFT):
        judge_overconfident(case, of)
        judge_keeps_up(case, of)
        for method in (LAST, STAR, ALL):
            judge_calibration(case, method, of)
    for method in (ENSEMBLE, VI, SGHMC, SWAG, LAST, STAR, ALL):
        judge_direction(case, method)
    for method in (STAR, ALL):
        judge_least_sure(case, method)
        judge_detects(case, method)
    judge_ensemble(case, "ensemble-rivals", [name for name in PUBLISHED if name not in (ENSEMBLE, STAR)])
    judge_ensemble(case, "ensemble-star", [STAR])
    judge_ensemble(case, "ensemble-all", [ALL])
    judge_accuracy(case)
    judge_cost(case)
    judge_near(case, LAST)
    judge_near(case, AT_MODE)
    judge_posterior(case, "posterior", MAP)
    judge_posterior(case, "posterior-mode", OWN_MODE)
    judge_nearer(case)


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored tables."""
    referee = Referee(read_claims("out_of_distribution"), smaller(study.sizes))
    found = Found(study.tables["scores"])
    for architecture in (LENET, TRANSFORMER):
        judge_architecture(Case(referee, architecture, found, study.tables, study.sizes))
    referee.not_run("cifar", "no such images here")
    return referee.verdicts()


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
        (STAR, lambda: task.laplace(STAR, at)),
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
    of_nuts: dict[str, list[dict[str, Any]]] = {"gaps": [], "convergence": []}
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
                for name, scored in part.get("beside", {}).items():
                    rows += [base | {"method": name} | row for row in scored]
                cost = (
                    base
                    | {key: part[key] for key in ("processor_seconds", "gradients")}
                    | part.get("figures", {})
                    | {key: part[key] for key in ("verdict",) if key in part}
                )
                said = [*part["warnings"], *part.get("reasons", ())]
                costs.append(cost | {"reason": "; ".join(dict.fromkeys(said))})
                for name, table in of_nuts.items():
                    table += [
                        {"architecture": architecture, "seed": seed} | row for row in part.get(name, ())
                    ]
    found, note = Found(rows), smaller(sizes)
    study.tables = {"summary": found.table(note), "scores": rows, "costs": costs} | of_nuts
    study.numbers = {
        "what is no digit": what,
        "note": note,
        "weight decay": WEIGHT_DECAY,
        "gamma": gamma_of(sizes.rows),
        "published, per cent": PUBLISHED,
    }
    for architecture in sizes.architectures:
        draw_shift(study.out / f"shift_{architecture.lower()}.png", found, sizes, architecture)
    draw_elsewhere(study.out / "elsewhere.png", found, what)
    study.conclude(judge)
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    main(
        **vars(
            command_line(__doc__, "checkpoint", "seeds", tiny="a few small images, in seconds").parse_args()
        )
    )
