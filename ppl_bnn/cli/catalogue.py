"""Commands that do not fit a model: `advise`, `bench`, `models`, `show`, `prior`, `data`."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppl_bnn import zoo
from ppl_bnn.cli import complete, console, options
from ppl_bnn.cli.options import argument, option
from ppl_bnn.cli.plan import card_of, load_model, plan_of, settings_of, sketch_of
from ppl_bnn.core.errors import InputError, check_known
from ppl_bnn.datasets import tables
from ppl_bnn.zoo import studies
from ppl_bnn.zoo.support import declared

if TYPE_CHECKING:
    from rich.console import Console

    from ppl_bnn.prediction.prediction import Prediction

PRIOR = "prior.png"
CARD = "Show the whole card of this model."
INPUTS = "A data set (see `ppl-bnn data`), for the number of inputs."
PICTURE = "Where the picture is kept: a folder, or a file where it ends in .png."


def advise(
    model: options.Model = None,
    data: options.Data = None,
    target: options.Target = None,
    drop: options.Drop = None,
    task: options.Task = None,
    set_: options.Set = None,
    seconds: Annotated[float, option("How long a fit may take.", default=True)] = 300.0,
    methods: options.Methods = None,
    device: options.Device = "auto",
) -> None:
    """Estimate which methods finish in time on this machine, and name the limitations of each. Nothing is fitted."""
    names = None if methods is None else [word.strip() for word in methods.split(",") if word.strip()]
    plan = plan_of(model, data, target, drop or [], task, set_ or [], 0, False, None, keeps=False)
    console.show_reading(console.new_console(error=True), plan.table)
    from ppl_bnn.evaluation.advice import advise as ask

    screen = console.new_console()
    x, y = plan.table.x[plan.train], plan.table.y[plan.train]
    found = ask(plan.model, x, y, seconds=seconds, methods=names, device=device, standardise=True)
    screen.print(f"{plan.name} on {plan.table.name}", markup=False, style="bold")
    screen.print(found.text(screen.width), markup=False, soft_wrap=True)


def bench(
    context: typer.Context,
    name: Annotated[str | None, argument("A study or benchmark.", "NAME", complete.studies)] = None,
) -> None:
    """Run a study of the project by its name; without one, list them.

    Further options are those of the study: --tiny runs all of it in seconds or a few minutes, --help lists the others.
    Tables, figures and verdicts go to ./ppl-bnn-results/NAME, or to --out.
    """
    if name is None:
        known = ((each, studies.summary(file)) for each, file in studies.studies().items())
        console.new_console().print(console.listing(("study", "what it is"), known))
        return
    arguments = list(context.args)
    has_place = any(each in ("--help", "-h", "--out") or each.startswith("--out=") for each in arguments)
    if "/" not in name and not has_place and name in studies.studies():
        arguments += ["--out", str(Path("ppl-bnn-results") / name)]
    written = re.search(r"(?:^|\0)--out[=\0]([^\0]+)", "\0".join(arguments))
    with console.keeping(Path(written[1])) if written else contextlib.nullcontext():
        status = studies.run(name, arguments)
    if status:
        raise typer.Exit(status)


def models(name: Annotated[str | None, argument(CARD, "NAME", complete.models)] = None) -> None:
    """List the models of the zoo with what fits them, or show one as `ppl-bnn show` does."""
    from rich.text import Text

    if name is not None:
        show(name)
        return
    support, screen = declared(), console.new_console()
    rows: list[tuple[Any, ...]] = []
    unread: dict[str, str] = {}
    for card in zoo.models().values():
        features = tables.datasets()[card.data].features if card.data else 1
        sketch, why = sketch_of(zoo.load(card.name), features)
        if why:
            unread[card.name] = why
        task, size = ("?", "?") if sketch is None else (sketch.task, console.digits(sketch.shared))
        if sketch is not None and sketch.per_row:
            size += f"\n+{console.digits(sketch.per_row)} a row"
        what = Text.assemble(card.summary, "\n", (f"Methods: {support.summary(card.name)}.", "dim"))
        rows.append((card.name, what, f"{task}\n{card.data or '-'}", size))
    headings = ("model", "what it is, and which methods fit it", "task, data", "size")
    screen.print(console.listing(headings, rows, {3}))
    for name, why in unread.items():
        text = f"{name} was not read: outside of a system it ends in {why}"
        screen.print(text, markup=False, style="yellow")
    single = support.shortened(row for row in support.methods if len(support.served(row)) == 1)
    screen.print(
        "Size: the number of parameters on the default data. Methods: those declared to fit it, in both systems but "
        f"for {', '.join(single)}, which one of them has; a star stands for all variants. Each model is a file that "
        "can be copied and changed: `ppl-bnn show NAME` shows its card, its sites, its path and why a method does not "
        "fit, `ppl-bnn prior NAME` what it expects before it has seen a target, and `ppl-bnn compare NAME` fits it.",
        markup=False,
    )


def show(
    model: Annotated[str, argument(options.HELP["model"], "MODEL", complete.models)],
    data: Annotated[str | None, option(INPUTS, "NAME", "the model's", complete.datasets)] = None,
    set_: options.Set = None,
) -> None:
    """Show a model: its card, its sites with priors and shapes, its number of parameters, and what cannot fit it."""
    card, is_file = card_of(model, "show")
    known = tables.datasets()
    check_known("data set", [] if data is None else [data], known)
    arguments = settings_of(set_ or [])
    function = load_model(model, is_file, arguments)
    screen = console.new_console()
    screen.print(card.name, markup=False, style="bold")
    console.say(screen, card.docstring)
    shown = card.arguments | {name: repr(value) for name, value in arguments.items()}
    listed = ", ".join(f"{name}={value}" for name, value in shown.items()) or "none"
    console.say(screen, f"\nArguments (--set NAME=VALUE): {listed}\nFile: {card.path}\n")
    # The example of a file is shown unless data are named, and goes before its default data.
    source = data or (card.data if card.example is None else None)
    inputs, title = card.example, "On the example in its file:"
    if source is not None:
        inputs = known[source].features
        title = f"On {source}, with {inputs} inputs:"
    elif inputs is None:
        screen.print("Its sites depend on the number of inputs: --data NAME shows them.", markup=False)
        return
    sketch, unread = sketch_of(function, inputs, bool(arguments) and not is_file)
    if sketch is None:
        screen.print(f"Its sites are not listed: outside of a system it ends in {unread}", markup=False)
        return
    screen.print(title, markup=False, style="bold")
    _show_sites(screen, sketch)
    if not is_file:
        _show_methods(screen, card.name)


def _show_sites(screen: Console, sketch: zoo.Sketch) -> None:
    rows = []
    for site in sketch.sites:
        shape = " x ".join(map(str, site.shape)) or "-"
        each = "each row: " if site.local else ""
        rows.append((site.name, site.prior, each + shape, console.digits(site.size)))
    grid = console.listing(("site", "prior", "shape", "numbers"), rows, {3})
    grid.add_section()
    grid.add_row("in all", "", "", console.digits(sketch.shared), style="bold")
    if sketch.per_row:
        grid.add_row("and for each row", "", "", console.digits(sketch.per_row), style="bold")
    screen.print(grid)
    computed = any("..." in words for words in (sketch.likelihood, *(site.prior for site in sketch.sites)))
    legend = "\n...: computed from other sites" if computed else ""
    screen.print(f"y, given x and these: {sketch.likelihood}{legend}", markup=False)


def _show_methods(screen: Console, name: str) -> None:
    """The methods that fit a model of the zoo, and why the others do not."""
    support = declared()
    screen.print(f"\nMethods that fit it: {support.summary(name)}.", markup=False, style="bold")
    for heading, rules in (("does not fit", support.missing(name)), ("may fail", support.doubtful(name))):
        if rules:
            rows = ((", ".join(names), rule.reason) for rule, names in rules.items())
            grid = console.listing((heading, "why"), rows)
            grid.columns[0].no_wrap, grid.columns[0].max_width = False, 30
            screen.print(grid)


def prior(
    model: options.Model = None,
    data: options.Data = None,
    target: options.Target = None,
    drop: options.Drop = None,
    task: options.Task = None,
    set_: options.Set = None,
    draws: Annotated[int, option("How many draws from the prior.", default=True)] = 500,
    seed: Annotated[int, option("For the draws.", default=True)] = 0,
    out: Annotated[Path | None, option(PICTURE, "DIR|FILE.png", options.OUT)] = None,
) -> None:
    """Draw the prior predictive distribution of a model, before it is fitted, as a picture.

    Curves for one input, class maps for two, else intervals row by row; in the units that `compare` fits in.
    """
    console.check_seed(seed)
    InputError.check(draws >= 2, "--draws", "a whole number of at least 2", draws, "--draws 500")
    picture = out if out is not None and out.suffix.lower() == ".png" and not out.is_dir() else None
    folder = out if picture is None else picture.parent
    plan = plan_of(model, data, target, drop or [], task, set_ or [], seed, False, folder)
    table = plan.table
    console.show_reading(console.new_console(error=True), table)
    from ppl_bnn.core.figures import save
    from ppl_bnn.diagnostics.prior_draws import prior_predictive
    from ppl_bnn.reporting.figures.prior import prior_figure

    # Pyro draws without compiling first, unlike JAX; a plain NumPyro model runs in NumPyro in any case.
    names = {"feature_names": tuple(table.feature_names), "class_names": table.class_names}
    settings: dict[str, Any] = {"draws": draws, "seed": seed, "ppl": "pyro", "standardise": True, **names}
    drawn = prior_predictive(plan.model, table.x, table.y, **settings)
    title = f"{plan.name} on {table.name}, before it has seen a target: {draws} draws from the prior"
    shown: dict[str, Any] = {"target_name": table.target_name, "feature_names": table.feature_names}
    figure = prior_figure(drawn.predict, table.x, table.y, title=title, **shown)
    plan.out.mkdir(parents=True, exist_ok=True)
    file = picture or plan.out / PRIOR
    save(figure, file)
    screen = console.new_console()
    screen.print(_expected(drawn.predict(table.x), table), markup=False)
    console.show_prior_problems(screen, plan)
    console.say(screen, f"Kept: {file}", "bold")


def _expected(prediction: Prediction, table: tables.Table) -> str:
    """The prior predictive of the rows of `table` in a sentence, beside the observed values."""
    import numpy as np

    if prediction.is_classes:
        some = np.linspace(0, prediction.draws - 1, min(100, prediction.draws)).astype(int)
        each = prediction.take_draws(some)
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
    screen, cards = console.new_console(), tables.datasets().values()
    headings = ("data set", "task", "rows", "features", "where from", "bytes to fetch")
    rows = []
    for card in cards:
        size = console.digits(card.bytes) if card.bytes else "-"
        rows.append((card.name, card.task, console.digits(card.rows), str(card.features), card.where, size))
    screen.print(console.listing(headings, rows, {2, 3, 5}))
    screen.print("Licences", style="bold")
    for licence in dict.fromkeys(card.licence for card in cards):
        names = ", ".join(card.name for card in cards if card.licence == licence)
        screen.print(f"- {names}: {licence}", markup=False)
    screen.print("\nOr any CSV file: ppl-bnn compare --data FILE.csv --target COLUMN", markup=False)
