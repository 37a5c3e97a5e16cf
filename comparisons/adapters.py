"""Bayesian adapters on a network of transformers, with a gold standard of the last layer beside them.

A small BERT of 1.4 million weights learns to tell eight modules of Python's library apart by passages of twelve words
from their documentation. It is then adapted to ten tasks, of three other modules each, 40 passages a module, by LoRA
adapters of its queries and values and a new head, on which there are normal priors; everything else is held. No module
is in two tasks. Words are numbers below the size of the vocabulary, from their check sums.

- Adapters and head: LoRA as it is used (the mode), mean-field SVI, IVON, the Kronecker Laplace approximation, and an
  ensemble of five LoRA.
- The head alone, on the features of the network that LoRA has adapted: NUTS, which is the reference, the Laplace
  approximation with its full curvature, mean-field SVI, and the variational Bayesian last layer (in closed form).

Scores are those of other passages of the three modules. Out-of-distribution passages are those of the next task's
modules; the entropy of the prediction detects them. The distance to NUTS is the total variation distance between the
predicted probabilities, mean over test passages; it is judged where all functions of NUTS have converged at the
training and at the test passages. Two halves of NUTS show how much of it is sampling noise.

What training costs beside LoRA written by hand is measured in `performance/adapter_training.py`.

What had been seen before the claims were written: fits of one more task (`PILOT`). From them followed the size of the
network and the numbers of steps. In that task IVON predicted near chance with three learning rates, two initial scales
and a start at the mode, so it has its default settings here. With priors of scale 0.1 on the adapters, LoRA, mean field
and IVON had accuracies of 0.38 to 0.41.

What was looked at after the claims had been judged, on the task of the pilot alone: mean-field SVI has not converged in
the steps of this study; with five times as many it has, its evidence bound is larger, and its accuracy is that of
chance, as IVON's is. So the bound prefers weights near the prior there, and the accuracy of mean-field SVI depends on
when it stops. A better log score than LoRA's does not: LoRA is so sure of itself that chance scores better. The
convergence of SVI and IVON is no part of the rules, so their verdicts are on these numbers of steps.

    python comparisons/adapters.py [--tiny] [--out DIR] [--checkpoint DIR] [--seeds N] [--figures]
"""

from __future__ import annotations

import copy
import importlib
import inspect
import re
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from claims import Referee, Verdict, mean, read_claims, worst_case
from study import BLACK, BLUE, Study, command_line, converged, kept, panels, run

import ppl_bnn as bnn
from ppl_bnn import likelihoods, priors, scores

BODY = ("os", "doctest", "typing", "socket", "pdb", "unittest.mock", "io", "codecs")
TASKS = (
    ("difflib", "logging", "inspect"),
    ("statistics", "threading", "email.message"),
    ("tarfile", "decimal", "ipaddress"),
    ("ast", "ssl", "xml.etree.ElementTree"),
    ("urllib.request", "smtplib", "configparser"),
    ("unittest.case", "pickle", "http.cookiejar"),
    ("shutil", "json", "email.header"),
    ("collections", "subprocess", "http.server"),
    ("tokenize", "re", "traceback"),
    ("pathlib", "imaplib", "enum"),
)
PILOT = ("optparse", "uuid", "http.client")
CLASSES = 3
LORA, MEAN_FIELD, IVON, KRON, ENSEMBLE = (
    "LoRA",
    "mean field",
    "IVON",
    "Laplace, Kronecker",
    "ensemble of LoRA",
)
NUTS, LAPLACE, FACTORISED, CLOSED = "NUTS", "Laplace", "mean field", "closed form"
# As the keys of the claims name them.
KEYS = {MEAN_FIELD: "mean-field", IVON: "ivon", KRON: "laplace", ENSEMBLE: "ensemble"}
HEADS = {LAPLACE: "laplace", FACTORISED: "mean-field", CLOSED: "closed-form"}


@dataclass(frozen=True)
class Sizes:
    """How much is computed; train and test: passages of each module; steps: of LoRA, others have more."""

    seeds: int = len(TASKS)
    words: int = 12
    vocabulary: int = 8000
    width: int = 128
    layers: int = 2
    rank: int = 4
    body_passages: int = 300
    body_steps: int = 600
    train: int = 40
    test: int = 60
    steps: int = 150
    draws: int = 100
    members: int = 5
    chains: int = 4
    warmup: int = 500
    nuts_draws: int = 1000


FULL = Sizes()
TINY = Sizes(2, 6, 100, 8, 1, 2, 10, 5, 6, 8, 5, 5, 2, 2, 20, 20)


# --- text ---------------------------------------------------------------------------------------------


def documentation(module: str) -> list[str]:
    """The words of the documentation of a module, its functions and classes, and their methods, each text once."""
    found: Any = importlib.import_module(module)
    parts = [found]
    for each in vars(found).values():
        if inspect.isroutine(each) or inspect.isclass(each):
            parts.append(each)
        if inspect.isclass(each) and each.__module__.split(".")[0].lstrip("_") == module.split(".")[0]:
            own = vars(each).values()
            parts += [part for part in own if inspect.isroutine(part) or isinstance(part, property)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of what is documented
        texts = dict.fromkeys(str(text) for part in parts if (text := getattr(part, "__doc__", None)))
    return re.findall(r"[a-z]+", " ".join(texts).lower())


def passages(modules: tuple[str, ...], count: int, sizes: Sizes) -> tuple[np.ndarray, np.ndarray]:
    """Up to `count` passages of each module that do not overlap, (rows, words) of numbers, and the module of each."""
    rows, labels = [], []
    for label, module in enumerate(modules):
        numbers = [1 + zlib.crc32(word.encode()) % (sizes.vocabulary - 1) for word in documentation(module)]
        there = len(numbers) // sizes.words
        chosen = np.random.default_rng(zlib.crc32(module.encode())).permutation(there)[:count]
        rows += [numbers[place * sizes.words : (place + 1) * sizes.words] for place in chosen]
        labels += [label] * len(chosen)
    return np.array(rows), np.array(labels)


# --- networks -----------------------------------------------------------------------------------------


def body(sizes: Sizes) -> Any:
    """A BERT that tells the modules of `BODY` apart."""
    import torch
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=4,
        intermediate_size=4 * sizes.width,
        num_labels=len(BODY),
        max_position_embeddings=sizes.words,
    )
    network = BertForSequenceClassification(config)
    x, y = (torch.as_tensor(each) for each in passages(BODY, sizes.body_passages, sizes))
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-4)
    for step in range(sizes.body_steps):
        rows = torch.as_tensor(np.random.default_rng(step).permutation(len(y))[:64])
        optimiser.zero_grad()
        network(input_ids=x[rows], labels=y[rows]).loss.backward()
        optimiser.step()
    return network


def adapted(network: Any, sizes: Sizes, seed: int) -> Any:
    """The network with adapters and a new head."""
    import torch
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(seed)
    own = copy.deepcopy(network)
    own.num_labels = own.config.num_labels = CLASSES
    own.classifier = torch.nn.Linear(sizes.width, CLASSES)
    options = {"r": sizes.rank, "lora_alpha": 2 * sizes.rank, "target_modules": ["query", "value"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return get_peft_model(own, LoraConfig(task_type="SEQ_CLS", **options))


def layer_of(network: Any) -> Any:
    """The logits of a network as a module of numbers of words."""
    import torch

    class Logits(torch.nn.Module):
        def __init__(self, network: Any):
            super().__init__()
            self.network = network

        def forward(self, words: Any) -> Any:
            return self.network(input_ids=words).logits

    return Logits(network)


def model_of(layer: Any) -> Any:
    """The adapters and the head are random, the rest is held."""
    normal = priors.Normal(0.0, 0.5)
    prior = {"*lora_*": normal, "*modules_to_save*": normal, "*": None}

    def model(x: Any, y: Any = None) -> None:
        bnn.observe(y, bnn.module("net", x, layer, prior, mode="eval"), likelihoods.Categorical())

    return model


def head(x: Any, y: Any = None) -> None:
    """A head on features."""
    bnn.observe(y, bnn.dense("head", x, CLASSES, prior=priors.Normal(0.0, 0.5)), likelihoods.Categorical())


def features(network: Any, posterior: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    """What the head sees of the network at the weights of a point."""
    import torch

    w = {
        name.removeprefix("net.network."): torch.tensor(value[0, 0])
        for name, value in posterior.draws.items()
    }
    own = copy.deepcopy(network).eval()
    assert not own.load_state_dict(w, strict=False).unexpected_keys
    with torch.no_grad():
        encoder = own.base_model.model.bert
        return [encoder(input_ids=torch.as_tensor(x)).pooler_output.double().numpy() for x in inputs]


# --- one task -----------------------------------------------------------------------------------------


def methods(sizes: Sizes) -> dict[str, bnn.Method]:
    """The methods for adapters and head."""
    common: dict[str, Any] = {"ppl": "pyro", "dtype": "float32"}
    mode = common | {"steps": sizes.steps, "learning_rate": 0.01}
    return {
        LORA: bnn.MAP(**mode),
        MEAN_FIELD: bnn.SVI(steps=2 * sizes.steps, learning_rate=0.01, elbo_draws=5, **common),
        IVON: bnn.IVON(steps=2 * sizes.steps, elbo_draws=5, **common),
        KRON: bnn.Laplace(structure="kron", **mode),
        ENSEMBLE: bnn.Ensemble(bnn.MAP(**mode), size=sizes.members),
    }


def heads(sizes: Sizes) -> dict[str, bnn.Method]:
    """The methods for the head alone."""
    closed: Any = {"guide": {"last_layer": "matrixnormal"}, "estimator": "closed_form"}
    chains = {"chains": sizes.chains, "warmup": sizes.warmup, "draws": sizes.nuts_draws}
    return {
        NUTS: bnn.NUTS(**chains),
        LAPLACE: bnn.Laplace(),
        FACTORISED: bnn.SVI(steps=20 * sizes.steps, elbo_draws=50),
        CLOSED: bnn.SVI(steps=20 * sizes.steps, elbo_draws=50, divergence="analytic", **closed),
    }


def one_task(
    network: Any, modules: tuple[str, ...], foreign: tuple[str, ...], seed: int, sizes: Sizes
) -> Any:
    """The rows of one task: a row for each method, of the adapters first."""
    x, y = passages(modules, sizes.train + sizes.test, sizes)
    order = np.concatenate([np.flatnonzero(y == label) for label in range(CLASSES)]).reshape(CLASSES, -1)
    train, test = (
        part.ravel() for part in (order[:, : sizes.train], order[:, sizes.train : sizes.train + sizes.test])
    )
    other, _ = passages(foreign, sizes.test, sizes)
    own = adapted(network, sizes, seed)
    rows = []

    def scored(name: str, part: str, posterior: Any, at: Any, away: Any) -> np.ndarray:
        drawn = part == "adapters" and name in (MEAN_FIELD, IVON)
        seen, elsewhere = (
            posterior.predict(each, draws=sizes.draws if drawn else None) for each in (at, away)
        )
        row = {"task": "-".join(modules), "seed": seed, "part": part, "method": name}
        row |= scores.scores_of(seen, y[test])
        row |= {"auroc": scores.out_of_distribution(seen, elsewhere, "entropy")["auroc"]}
        info = posterior.info
        row |= {"seconds": info.compile_seconds + info.run_seconds, "gradients": info.gradient_evaluations}
        rows.append(row)
        return seen.probabilities

    model, point = model_of(layer_of(own)), None
    for name, method in methods(sizes).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = bnn.fit(model, x[train], y[train], method, seed=seed)
            point = point or posterior
            scored(name, "adapters", posterior, x[test], other)
    at, here, away = features(own, point, x[train], x[test], other)
    found, reference = {}, {}
    for name, method in heads(sizes).items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            posterior = bnn.fit(head, at, y[train], method, seed=seed)
            found[name] = scored(name, "head", posterior, here, away)
            if name == NUTS:
                figures = bnn.diagnose(posterior, x={"test": here}).figures
                most = max(figures["rhat"], figures["rhat_at_test"])
                least = min(figures["ess_bulk"], figures["ess_at_test"])
                reference = {"rhat": most, "ess": least, "converged": converged(most, least)}
                halves = scores.halves(posterior.predict(here))
                rows[-1] |= {"distance": distance(*(half.probabilities for half in halves))}
    for row in rows:
        if row["part"] == "head":
            row |= reference
            if row["method"] != NUTS:
                row |= {"distance": distance(found[row["method"]], found[NUTS])}
    return {"rows": rows}


def distance(p: np.ndarray, q: np.ndarray) -> float:
    """The total variation distance between two sets of probabilities (N, C), mean over rows."""
    return float(0.5 * np.abs(p - q).sum(1).mean())


# --- verdicts and all of it ---------------------------------------------------------------------------


def column(study: Study, part: str, method: str, name: str) -> dict[int, float]:
    """One score of one method by task."""
    rows = study.tables["scores"]
    return {row["seed"]: row[name] for row in rows if (row["part"], row["method"]) == (part, method)}


def judge(study: Study) -> list[Verdict]:
    """The verdicts from the stored rows."""
    referee = Referee(read_claims("adapters"), f"{study.sizes.seeds} tasks")
    for score, better in (("log_score", 1.0), ("ece", -1.0), ("auroc", 1.0)):
        plain = column(study, "adapters", LORA, score)
        for method, key in KEYS.items():
            own = column(study, "adapters", method, score)
            gain = [better * (own[seed] - plain[seed]) for seed in plain]
            referee.measured(
                f"{score.replace('_', '-')}-{key}", mean(gain), f"LoRA: {np.mean(list(plain.values())):.3f}"
            )
    known = column(study, "head", NUTS, "converged")
    unknown = ~np.array(list(known.values()), dtype=bool)
    halves = np.mean(list(column(study, "head", NUTS, "distance").values()))
    words = f"NUTS converged on {np.sum(~unknown)} of {len(unknown)} tasks; its halves differ by {halves:.4f}"
    for method, key in HEADS.items():
        distances = column(study, "head", method, "distance")
        values = np.array([distances[seed] for seed in known])
        # A distance to what has not converged may be anything from 0 to 1.
        referee.measured(f"distance-{key}", worst_case(mean, values, unknown, 0.0, 1.0), words)
    return referee.verdicts()


def draw(study: Study) -> None:
    """Gains over LoRA, task by task, and the distances of heads to NUTS."""
    titles = {
        "log_score": "log score minus LoRA's,\nnats per passage",
        "ece": "calibration error\nminus LoRA's",
        "auroc": "area for foreign passages\nminus LoRA's",
    }
    figure, axes = panels(10.0, 3.0, columns=len(titles) + 1)
    for panel, (score, title) in zip(axes[0], titles.items(), strict=False):
        plain = column(study, "adapters", LORA, score)
        panel.axvline(0.0, color=BLACK, linewidth=0.8)
        values = [
            [each - plain[seed] for seed, each in column(study, "adapters", name, score).items()]
            for name in KEYS
        ]
        strips(panel, list(KEYS) if score == "log_score" else [""] * len(KEYS), values)
        panel.set_xlabel(title)
    values = [list(column(study, "head", name, "distance").values()) for name in (NUTS, *HEADS)]
    strips(axes[0, -1], ["halves of NUTS", *HEADS], values)
    axes[0, -1].set_xlabel("head alone:\ntotal variation to NUTS")
    axes[0, -1].set_xlim(0.0)
    figure.savefig(study.out / "gains.png", dpi=150)


def strips(panel: Any, names: list[str], values: list[list[float]]) -> None:
    """A row of points for each name, and their mean."""
    for place, each in enumerate(values):
        panel.plot(each, np.full(len(each), place), "o", color=BLUE, alpha=0.35, markersize=4)
        panel.plot(np.mean(each), place, "|", color=BLACK, markersize=14)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.5, -0.5)


def main(
    tiny: bool = False,
    out: str | Path | None = None,
    checkpoint: str | Path | None = None,
    seeds: int | None = None,
) -> Study:
    """Run the study and write tables, figure and verdicts to `out`; see `Study.begin` for where that is.

    seeds: how many of the tasks.
    """
    study = Study.begin(TINY if tiny else FULL, "adapters", tiny, out, seeds=seeds)
    sizes, rows, network = study.sizes, [], body(study.sizes)
    for seed, modules in enumerate(TASKS[: sizes.seeds]):
        part = kept(
            checkpoint,
            f"task-{seed}",
            sizes,
            lambda seed=seed, modules=modules: one_task(
                network, modules, TASKS[(seed + 1) % len(TASKS)], seed, sizes
            ),
        )
        for row in part["rows"]:
            study.say(
                f"{row['task']}, {row['part']}, {row['method']}: accuracy {row['accuracy']:.2f}, log score "
                f"{row['log_score']:.3f}, area {row['auroc']:.2f}, {row['seconds']:.0f} s"
                + (f", distance {row['distance']:.4f}" if "distance" in row else "")
            )
        rows += part["rows"]
    study.tables = {"scores": rows}
    study.numbers["weights"] = sum(each.numel() for each in network.parameters())
    study.conclude(judge)
    draw(Study.read(study.out, sizes))
    study.say(f"written to {study.out}")
    return study


if __name__ == "__main__":
    run(command_line(__doc__, "checkpoint", "seeds", "figures"), main, "adapters", FULL, draw)
