"""Compare the Stan programs of the reference posteriors with their log joints in NumPy.

    python comparisons/reference_stan.py [NAME ...]

Needs the package httpstan, which has Stan's compiler in it, and a C++ compiler. Each program is compiled once, in a
minute or so, and kept in the cache of httpstan.

For every entry of `references/entries.toml` it takes the Stan program that is stored with the reference, or else that
of the model. Both log joints are computed at `POINTS` points: draws from the prior, and such draws drawn in towards
zero. Stan's has no Jacobian of its unconstrained coordinates. A statement with `~` leaves out terms that depend on no
parameter, so the two differ by a constant, which does not concern the posterior. What is compared is whether it is one
constant at all points.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import inspect
import subprocess
from collections.abc import Mapping
from typing import Any

import numpy as np
from reference_certificate import LOG_JOINT, Check
from reference_parts import numpy_program, seed_of
from reference_problems import FOLDER, Entry, Problem, problem

from ppl_bnn.backends.program import Program
from ppl_bnn.backends.systems import system
from ppl_bnn.core.errors import InputError, MissingFrameworkError, ModelError, check_known

POINTS = 20
# Half of the points are prior draws times this, in unconstrained coordinates: where Gaussian likelihoods are not huge.
TOWARDS_ZERO = 0.3
# The arguments of the NumPy log joints that no Stan program has: the values that it is written for.
WRITTEN_FOR = {"depth": 1, "activation": "tanh", "overdispersed": True, "df": None}
# A parameter in Stan is named as the site is, "hidden_weight" for "hidden0.weight", apart from these.
SHORTER = {
    "weight": "output_weight",
    "bias": "output_bias",
    "input_scale": "hidden_weight_scale",
    "base": "hidden_weight_base",
}
LABELS = ("classification_mlp", "neal_hierarchical", "ordinal_mlp")


def data_of(entry: Entry, chosen: Problem) -> dict[str, Any]:
    """The data block of the Stan program of an entry.

    Raises
    ------
    InputError
        An argument that the Stan program does not have, with another value than it is written for.
    """
    known = inspect.signature(numpy_program(entry.model).log_joint).parameters
    values = {name: each.default for name, each in known.items() if name not in ("w", "x", "y")}
    values |= entry.arguments
    # Labels are from 1 in Stan.
    y = chosen.y + 1 if entry.model in LABELS else chosen.y
    # Counts are stored as real numbers, which Stan refuses.
    y = y.astype(int) if entry.model == "count_mlp" else y
    data = {"N": len(y), "F": chosen.x.shape[1], "x": chosen.x.tolist(), "y": y.tolist()}
    if entry.model == "survival_mlp":
        data |= {"time": y[:, 0].tolist(), "event": y[:, 1].astype(int).tolist()}
    if entry.model == "multitask_hierarchical":
        cuts, column = np.sort(values.pop("cuts")), values.pop("column")
        group = 1 + np.sum(chosen.x[:, column, None] > cuts, axis=1)
        data |= {"groups": len(cuts) + 1, "group": group.tolist()}
    if entry.model == "wide_network":
        data |= {"rectified": int(values.pop("activation") == "relu"), "offset_scale": values.pop("offset")}
    if entry.model == "classification_mlp":
        data |= {"depth": values.pop("depth")}
    for name, wanted in WRITTEN_FOR.items():
        given, expected = values.pop(name, wanted), f"{name}={wanted!r}, as in the Stan program"
        InputError.check(given == wanted, entry.name, expected, repr(given), "that")
    return data | values


def points(entry: Entry, chosen: Problem) -> list[dict[str, np.ndarray]]:
    """Values of all latent variables at which log joints are compared."""
    with (numpyro := system("numpyro")).session("float64", "cpu"):
        x, y = numpyro.asarray(chosen.x), numpyro.asarray(chosen.y)
        program = Program.of(numpyro, entry.function(), x, y, language=True)
        u = program.prior_draws(x, y, seed_of(entry.name, "stan"), POINTS)
        shrunk = np.where(np.arange(POINTS) < POINTS // 2, 1.0, TOWARDS_ZERO)
        u = {name: value * shrunk.reshape(-1, *[1] * (np.ndim(value) - 1)) for name, value in u.items()}
        w = {name: numpyro.to_numpy(value) for name, value in program.constrain_draws(u, x, y).items()}
    return [{name: value[index] for name, value in w.items()} for index in range(POINTS)]


def compiled(code: str) -> Any:
    """The compiled module of a Stan program.

    Raises
    ------
    MissingFrameworkError
        httpstan is not installed.
    ModelError
        A program that Stan's compiler refuses, with its message.
    """
    try:
        models = importlib.import_module("httpstan.models")
    except ImportError as error:
        advice = "pip install httpstan"
        raise MissingFrameworkError.of("", "the package httpstan", f"none ({error})", advice) from error
    name = models.calculate_model_name(code)
    with contextlib.suppress(KeyError):
        return models.import_services_extension_module(name)
    while True:
        try:
            # Without optimisation: a log density is computed a few times only.
            build = models.build_services_extension_module(code, ["-O0", "-g0", "-w", "-std=c++17"])
            asyncio.run(build)
            return models.import_services_extension_module(name)
        except ValueError as error:
            raise ModelError.of("", "a program in Stan", str(error), "mending it") from error
        except subprocess.TimeoutExpired:
            # httpstan gives Stan's compiler one second, which a busy machine may not have: once more.
            continue


def stan_log_joints(
    code: str, model: str, data: Mapping[str, Any], each: list[dict[str, np.ndarray]]
) -> np.ndarray:
    """Stan's log joint at points, without Jacobian and up to a constant."""
    module = compiled(code)
    names: list[str] = module.get_param_names(data)
    shapes: list[list[int]] = module.get_dims(data)
    sites = {site.replace("0", "").replace(".", "_"): site for site in each[0]}
    in_words = [SHORTER.get(name, name) for name in names]
    # A layer that is not there has no elements.
    there = [word for word, shape in zip(in_words, shapes, strict=True) if 0 not in shape]
    InputError.check(set(there) == set(sites), model, f"the parameters {sorted(sites)}", there, "these")
    found = []
    for w in each:
        values = {
            name: (w[sites[word]] if word in there else np.empty(shape)).reshape(shape).tolist()
            for name, word, shape in zip(names, in_words, shapes, strict=True)
        }
        found.append(module.log_prob(data, module.transform_inits(data, values), False))
    return np.array(found)


def compare(entry: Entry, code: str) -> Check:
    """Whether Stan's log joint and NumPy's differ by one constant, relative to the size of NumPy's."""
    chosen = problem(entry)
    each = points(entry, chosen)
    by_hand = numpy_program(entry.model).log_joint
    wanted = np.array([by_hand(w, chosen.x, chosen.y, **entry.arguments) for w in each])
    constant = stan_log_joints(code, entry.model, data_of(entry, chosen), each) - wanted
    # The constant is known best where the log joint is smallest in size.
    apart = np.abs(constant - constant[np.argmin(np.abs(wanted))]) / np.maximum(np.abs(wanted), 1.0)
    return Check.below(f"{entry.name}: log joint, stan against numpy", float(np.max(apart)), LOG_JOINT)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args()
    entries = Entry.read()
    check_known("reference", options.names, entries)
    failed = 0
    for name in options.names or entries:
        stored, program = FOLDER / name / "model.stan", FOLDER / "programs" / f"{entries[name].model}.stan"
        file = stored if stored.exists() else program
        if not file.exists():
            print(f"{name}: no Stan program", flush=True)
            continue
        try:
            found = compare(entries[name], file.read_text())
            line, good = str(found), found.holds
        except (InputError, ModelError) as error:
            line, good = f"FAILS  {name}: {error}", False
        print(f"{line}  {file.relative_to(FOLDER)}", flush=True)
        failed += not good
    return int(failed > 0)


if __name__ == "__main__":
    raise SystemExit(main())
