"""Commands that do not fit a model: `advise`, `bench`, `models`, `show`, `prior`, `data`."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ppl_bnn.cli import complete, options
from ppl_bnn.cli.console import (
    check_seed,
    digits,
    keeping,
    listing,
    new_console,
    show_prior_problems,
    show_reading,
)
from ppl_bnn.cli.plan import card_of, load_model, plan_of, settings_of, sketch_of
from ppl_bnn.core.errors import InputError, unknown_name
from ppl_bnn.core.files import write_whole
from ppl_bnn.core.warning_filters import ignored

if TYPE_CHECKING:
    from rich.console import Console

    from ppl_bnn.datasets.tables import Table
    from ppl_bnn.prediction.prediction import Prediction
    from ppl_bnn.zoo import Sketch

PRIOR = "prior.png"


def advise(
    model: options.Model = None,
    data: options.Data = None,
    target: options.Target = None,
    drop: options.Drop = None,
    task: options.Task = None,
    set_: options.Set = None,
    seconds: Annotated[float, options.option("How long a fit may take.", default=True)] = 300.0,
    methods: options.Methods = None,
    device: options.Device = "auto",
) -> None:
    """Estimate which methods finish in time on this machine, and name the limitations of each. Nothing is fitted."""
    names = None if methods is None else [word.strip() for word in methods.split(",") if word.strip()]
    plan = plan_of(model, data, target, drop or [], task, set_ or [], 0, False, None, keeps=False)
    show_reading(new_console(error=True), plan.table)
    from ppl_bnn.evaluation.advice import advise as ask

    console = new_console()
    x, y = plan.table.x[plan.train], plan.table.y[plan.train]
    found = ask(plan.model, x, y, seconds=seconds, methods=names, device=device, standardise=True)
    console.print(f"{plan.name} on {plan.table.name}", markup=False, style="bold")
    console.print(found.text(console.width), markup=False, soft_wrap=True)


def bench(
    context: typer.Context,
    name: Annotated[str | None, options.argument("A study or benchmark.", "NAME", complete.studies)] = None,
) -> None:
    """Run a study of the project by its name; without one, list them.

    Further options are those of the study: --tiny runs all of it in seconds or a few minutes, --help lists the others.
    Tables, figures and verdicts go to ./ppl-bnn-results/NAME, or to --out.
    """
    from rich.text import Text

    from ppl_bnn.zoo import studies

    if name is None:
        listed = listing(("study", "what it is"))
        for each, file in studies.studies().items():
            listed.add_row(each, Text(studies.summary(file)))
        new_console().print(listed)
        return
    arguments = list(context.args)
    has_place = any(each in ("--help", "-h", "--out") or each.startswith("--out=") for each in arguments)
    if "/" not in name and not has_place and name in studies.studies():
        arguments += ["--out", str(Path("ppl-bnn-results") / name)]
    written = re.search(r"(?:^|\0)--out[=\0]([^\0]+)", "\0".join(arguments))
    with keeping(Path(written[1])) if written else contextlib.nullcontext():
        status = studies.run(name, arguments)
    if status:
        raise typer.Exit(status)


def models(
    name: Annotated[
        str | None, options.argument("Show the whole card of this model.", "NAME", complete.models)
    ] = None,
) -> None:
    """List the models of the zoo with what fits them, or show one as `ppl-bnn show` does."""
    from rich.text import Text

    from ppl_bnn import zoo
    from ppl_bnn.datasets import tables
    from ppl_bnn.zoo.support import declared

    if name is not None:
        _show(name, None, [])
        return
    cards, support = zoo.models(), declared()
    console = new_console()
    grid = listing(("model", "what it is, and which methods fit it", "task, data", "size"), right=(3,))
    unread: dict[str, str] = {}
    for card in cards.values():
        features = tables.datasets()[card.data].features if card.data else 1
        sketch, why = sketch_of(zoo.load(card.name), features)
        if why:
            unread[card.name] = why
        task, size = ("?", "?") if sketch is None else (sketch.task, digits(sketch.shared))
        if sketch is not None and sketch.per_row:
            size += f"\n+{digits(sketch.per_row)} a row"
        what = Text.assemble(card.summary, "\n", (f"Methods: {support.summary(card.name)}.", "dim"))
        grid.add_row(card.name, what, f"{task}\n{card.data or '-'}", size)
    console.print(grid)
    for name, why in unread.items():
        console.print(Text(f"{name} was not read: outside of a system it ends in {why}", style="yellow"))
    single = support.shortened(row for row in support.methods if len(support.served(row)) == 1)
    console.print(
        "Size: the number of parameters on the default data. Methods: those declared to fit it, in both systems but "
        f"for {', '.join(single)}, which one of them has; a star stands for all variants. Each model is a file that "
        "can be copied and changed: `ppl-bnn show NAME` shows its card, its sites, its path and why a method does not "
        "fit, `ppl-bnn prior NAME` what it expects before it has seen a target, and `ppl-bnn compare NAME` fits it.",
        markup=False,
    )


def show(
    model: Annotated[str, options.argument(options.A_MODEL, "MODEL", complete.models)],
    data: Annotated[
        str | None,
        options.option(
            "A data set (see `ppl-bnn data`), for the number of inputs.",
            "NAME",
            default="the model's",
            complete=complete.datasets,
        ),
    ] = None,
    set_: options.Set = None,
) -> None:
    """Show a model: its card, its sites with priors and shapes, its number of parameters, and what cannot fit it."""
    _show(model, data, set_ or [])


def _show(model: str, data: str | None, settings: list[str]) -> None:
    from rich.text import Text

    from ppl_bnn.datasets import tables

    card, is_file = card_of(model, "show")
    known = tables.datasets()
    if data is not None and data not in known:
        raise unknown_name("data set", data, known)
    arguments = settings_of(settings)
    function = load_model(model, is_file, arguments)
    console = new_console()
    console.print(Text(card.name, style="bold"))
    console.print(Text(card.docstring), soft_wrap=True)
    shown = card.arguments | {name: repr(value) for name, value in arguments.items()}
    listed = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none"
    console.print(Text(f"\nArguments (--set NAME=VALUE): {listed}\nFile: {card.path}\n"), soft_wrap=True)
    source = data or card.data
    if source is None and card.example is None:
        console.print("Its sites depend on the number of inputs: --data NAME shows them.", markup=False)
        return
    inputs, title = card.example, "On the example in its file:"
    if source is not None and (data is not None or card.example is None):
        inputs = known[source].features
        title = f"On {source}, with {inputs} inputs:"
    sketch, unread = sketch_of(function, inputs, bool(arguments) and not is_file)
    if sketch is None:
        console.print(Text(f"Its sites are not listed: outside of a system it ends in {unread}"))
        return
    _show_sites(console, sketch, title)
    if not is_file:
        _show_methods(console, card.name)


def _show_sites(console: Console, sketch: Sketch, title: str) -> None:
    from rich.text import Text

    grid = listing(("site", "prior", "shape", "numbers"), right=(3,))
    for site in sketch.sites:
        shape = " x ".join(map(str, site.shape)) or "-"
        each = "each row: " if site.local else ""
        grid.add_row(site.name, Text(site.prior), each + shape, digits(site.size))
    grid.add_section()
    grid.add_row("in all", "", "", digits(sketch.shared), style="bold")
    if sketch.per_row:
        grid.add_row("and for each row", "", "", digits(sketch.per_row), style="bold")
    console.print(Text(title, style="bold"))
    console.print(grid)
    computed = any("..." in words for words in (sketch.likelihood, *(site.prior for site in sketch.sites)))
    legend = "\n...: computed from other sites" if computed else ""
    console.print(Text(f"y, given x and these: {sketch.likelihood}{legend}"))


def _show_methods(console: Console, name: str) -> None:
    """The methods that fit a model of the zoo, and why the others do not."""
    from rich.text import Text

    from ppl_bnn.zoo.support import declared

    support = declared()
    missing, doubtful = support.missing(name), support.doubtful(name)
    console.print(Text(f"\nMethods that fit it: {support.summary(name)}.", style="bold"))
    for heading, rules in (("does not fit", missing), ("may fail", doubtful)):
        if not rules:
            continue
        grid = listing((heading, "why"))
        grid.columns[0].no_wrap, grid.columns[0].max_width = False, 30
        for rule, names in rules.items():
            grid.add_row(", ".join(names), Text(rule.reason))
        console.print(grid)


def prior(
    model: options.Model = None,
    data: options.Data = None,
    target: options.Target = None,
    drop: options.Drop = None,
    task: options.Task = None,
    set_: options.Set = None,
    draws: Annotated[int, options.option("How many draws from the prior.", default=True)] = 500,
    seed: Annotated[int, options.option("For the draws.", default=True)] = 0,
    out: Annotated[
        Path | None,
        options.option(
            "Where the picture is kept: a folder, or a file where it ends in .png.",
            "DIR|FILE.png",
            default="./ppl-bnn-results/MODEL-DATA",
        ),
    ] = None,
) -> None:
    """Draw the prior predictive distribution of a model, before it is fitted, as a picture.

    Curves for one input, class maps for two, else intervals row by row; in the units that `compare` fits in.
    """
    from rich.text import Text

    check_seed(seed)
    if draws < 2:
        raise InputError.of("--draws", "a whole number of at least 2", str(draws), "--draws 500")
    picture = out if out is not None and out.suffix.lower() == ".png" and not out.is_dir() else None
    folder = out if picture is None else picture.parent
    plan = plan_of(model, data, target, drop or [], task, set_ or [], seed, False, folder)
    table = plan.table
    show_reading(new_console(error=True), table)
    from ppl_bnn.diagnostics.prior_draws import prior_predictive
    from ppl_bnn.reporting.prior_figures import prior_figure

    # Pyro draws without compiling first, unlike JAX; a plain NumPyro model runs in NumPyro in any case.
    drawn = prior_predictive(
        plan.model,
        table.x,
        table.y,
        draws=draws,
        seed=seed,
        ppl="pyro",
        standardise=True,
        feature_names=tuple(table.feature_names),
        class_names=table.class_names,
    )
    figure = prior_figure(
        drawn.predict,
        table.x,
        table.y,
        title=f"{plan.name} on {table.name}, before it has seen a target: {draws} draws from the prior",
        target_name=table.target_name,
        feature_names=table.feature_names,
    )
    plan.out.mkdir(parents=True, exist_ok=True)
    file = picture or plan.out / PRIOR
    with ignored("Glyph .* missing from"):
        write_whole(file, lambda path: figure.savefig(path, dpi=100, format="png"))
    console = new_console()
    console.print(Text(_expected(drawn.predict(table.x), table)))
    show_prior_problems(console, plan)
    console.print(Text(f"Kept: {file}", style="bold"), soft_wrap=True)


def _expected(prediction: Prediction, table: Table) -> str:
    """The prior predictive of the rows of `table` in a sentence, beside the observed values."""
    import numpy as np

    if prediction.is_classes:
        each = prediction.take_draws(
            np.linspace(0, prediction.draws - 1, min(100, prediction.draws)).astype(int)
        )
        sure = [each.take_draws([draw]).probabilities.max(axis=1).mean() for draw in range(each.draws)]
        return (
            f"Before it has seen a target, a draw gives its most probable class of a row a probability of "
            f"{np.mean(sure):.2f} on average, and half of the draws between {np.quantile(sure, 0.25):.2f} and "
            f"{np.quantile(sure, 0.75):.2f} (1 for {prediction.classes} classes would be certainty, "
            f"{1 / prediction.classes:.2f} ignorance)."
        )
    y = table.y
    if prediction.censored:
        # The bound of a censored row is not an observed value.
        seen = np.flatnonzero(y[:, 1] == 1)
        prediction, y = prediction.take(seen), y[seen, 0]
    lower, upper = prediction.interval(0.9)
    inside = np.mean((lower <= y) & (y <= upper))
    return (
        f"Before it has seen a target, the model expects {table.target_name} between {np.mean(lower):.3g} and "
        f"{np.mean(upper):.3g} with probability 0.9, on average over {len(y)} rows; observed were "
        f"{y.min():.3g} to {y.max():.3g}, of which {inside:.0%} lie in the interval of their row."
    )


def data() -> None:
    """List the data sets."""
    from rich.text import Text

    from ppl_bnn.datasets import tables

    console = new_console()
    grid = listing(("data set", "task", "rows", "features", "where from", "bytes to fetch"), right=(2, 3, 5))
    licences: dict[str, list[str]] = {}
    for card in tables.datasets().values():
        size = digits(card.bytes) if card.bytes else "-"
        grid.add_row(card.name, card.task, digits(card.rows), str(card.features), card.where, size)
        licences.setdefault(card.licence, []).append(card.name)
    console.print(grid)
    console.print("[bold]Licences[/]")
    for licence, names in licences.items():
        console.print(Text(f"- {', '.join(names)}: {licence}"))
    console.print("\nOr any CSV file: ppl-bnn compare --data FILE.csv --target COLUMN", markup=False)
