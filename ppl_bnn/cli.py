"""The command line: `ppl-bnn compare`, `ppl-bnn models`, `ppl-bnn data`.

Names, numbers and folders are checked before data are read, and data before a framework is imported, so that a typing
error costs a fraction of a second. Exit codes: 0 all methods finished; 1 a method failed (its row says why); 2 bad
input; 130 interrupted.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ppl_bnn import __version__
from ppl_bnn.errors import BNNError, InputError, message, unknown_name
from ppl_bnn.progress import Bars, Task

if TYPE_CHECKING:
    from rich.console import Console

    from ppl_bnn.comparison import Comparison
    from ppl_bnn.data import Table
    from ppl_bnn.inference.method import Method
    from ppl_bnn.zoo import Sketch

# Name -> (class in `ppl_bnn`, the system it runs in unless told otherwise).
METHODS = {
    "nuts": ("NUTS", "numpyro"),
    "svi": ("SVI", "pyro"),
    "laplace": ("Laplace", "pyro"),
    "map": ("MAP", "numpyro"),
}
REFERENCE = "nuts"
_DEFAULT_MODEL = {"regression": "regression_mlp", "classification": "classification_mlp"}
# Enough to run every line of every method within seconds, and far from enough to believe the result.
QUICK: dict[str, dict[str, Any]] = {
    "nuts": {"draws": 25, "warmup": 25, "chains": 2, "max_tree_depth": 4},
    "svi": {"steps": 100},
    "laplace": {"steps": 100},
    "map": {"steps": 100},
}
QUICK_ROWS = {"train": 100, "test": 50}
MANY_ROWS = 20_000
NOTES = "comparison.md"
WIDTH = 100

app = typer.Typer(
    name="ppl-bnn",
    help="Bayesian neural networks: one model, several methods of inference, one comparison.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)


def main() -> None:
    """The entry point of `ppl-bnn` and of `python -m ppl_bnn`."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that cannot show a sign shows a question mark instead of a traceback.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    app(prog_name="ppl-bnn")


def _console(error: bool = False) -> Console:
    """Standard output, or the error stream; 100 columns where it is no terminal and COLUMNS does not say otherwise."""
    from rich.console import Console

    console = Console(stderr=error, highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return Console(stderr=error, highlight=False, width=WIDTH)


def _told(command: Callable[..., None]) -> Callable[..., None]:
    """Errors raised on purpose become one red line and exit code 2; Ctrl-C ends with 130."""

    @functools.wraps(command)
    def told(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except BNNError as error:
            _complain(_in_options(str(error)))
            raise typer.Exit(2) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            _complain(f"{type(error).__name__}: {error}")
            raise typer.Exit(2) from None
        except KeyboardInterrupt as error:
            _complain(str(error) or "interrupted; nothing was finished, so nothing was kept")
            raise typer.Exit(130) from None

    return told


def _in_options(text: str) -> str:
    """Advice of the library, which speaks Python, in the words of the command line."""
    text = re.sub(r"""\b(task|device)=["'](\w+)["']""", r"--\1 \2", text)
    return re.sub(r"""\bdrop=\[(["'].*?["'])\]""", r"--drop \1", text)


def _complain(text: str) -> None:
    from rich.text import Text

    _console(error=True).print(Text.assemble(("error: ", "bold red"), (text, "red")), soft_wrap=True)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ppl-bnn {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


# --- compare ----------------------------------------------------------------------------------------------


@app.command()
@_told
def compare(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="A model of the zoo (see `ppl-bnn models`) or a file.py.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE.csv",
            help="A data set (see `ppl-bnn data`) or a CSV file.",
            show_default="the model's",
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(metavar="COLUMN", help="The column of the CSV file to predict.", show_default=False),
    ] = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="COLUMN", help="A column of the CSV file to leave out; repeatable.", show_default=False
        ),
    ] = None,
    task: Annotated[
        str | None,
        typer.Option(
            metavar="TASK",
            help="regression or classification, where a CSV file leaves it open.",
            show_default=False,
        ),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="An argument of the model, such as width=20; repeatable.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        str, typer.Option(metavar="LIST", help="What to compare, separated by commas.")
    ] = ",".join(METHODS),
    ppl: Annotated[
        str | None,
        typer.Option(
            metavar="SYSTEM",
            help="numpyro or pyro for all methods, or svi=pyro,nuts=numpyro.",
            show_default=",".join(f"{name}={system}" for name, (_, system) in METHODS.items()),
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda[:i].")] = "auto",
    seed: Annotated[
        int, typer.Option(help="For the split into training and test rows, and for every method.")
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="Tiny sizes: shows in seconds that all runs, and nothing else.")
    ] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Where results are kept.", show_default="./ppl-bnn-results/MODEL-DATA"
        ),
    ] = None,
) -> None:
    """Fit one model by several methods and show what each gives and costs.

    Without arguments: regression_mlp on the diabetes table by NUTS, SVI, Laplace and MAP, in under three minutes.
    """
    started = time.monotonic()
    systems = _systems(_names(methods), ppl)
    _check_seed(seed)
    from ppl_bnn.ppl.protocol import resolve_device

    resolve_device(device)
    plan = _plan(model, data, target, drop or [], task, set_ or [], seed, quick, out)
    chosen = {name: _method(name, system, quick) for name, system in systems.items()}
    errors = _console(error=True)
    _announce(errors, plan, chosen, quick)
    if "numpyro" in systems.values():
        _remember_compilations()

    from ppl_bnn.comparison import compare as run
    from ppl_bnn.reporting.terminal import show

    table, bars = plan.table, _Bars(errors)
    (plan.out / NOTES).unlink(missing_ok=True)
    try:
        with _warnings_told(errors):
            result = run(
                plan.model,
                (table.x[plan.train], table.y[plan.train]),
                (table.x[plan.test], table.y[plan.test]),
                chosen,
                reference=REFERENCE if REFERENCE in chosen else None,
                seed=seed,
                device=device,
                progress=bars,
                standardise=True,
                out=plan.out,
                feature_names=table.feature_names,
                class_names=table.class_names,
                target_name=table.target_name,
                card={"name": table.name, "provenance": table.provenance, "licence": table.licence},
            )
    except KeyboardInterrupt as interrupt:
        bars.rest()
        partial = getattr(interrupt, "partial", None)
        if partial is not None and partial.posteriors:
            show(_console(), partial, NOTES)
            _keep_notes(plan.out, partial)
        raise
    finally:
        bars.rest()
    console = _console()
    show(console, result, NOTES)
    _keep_notes(plan.out, result)
    if quick:
        console.print("[yellow]--quick: nothing here is expected to have converged, or to mean anything.[/]")
    console.print(_kept(plan.out, result), soft_wrap=True)
    console.print(f"[dim]{_seconds(time.monotonic() - started)} in all[/]")
    if result.failures:
        raise typer.Exit(1)


@dataclass(frozen=True)
class _Plan:
    """What will be run: everything that the words of the command line stand for."""

    name: str
    model: Callable[..., Any]
    table: Table
    train: Any
    test: Any
    out: Path
    parameters: int | None


def _names(methods: str) -> list[str]:
    names = [name.strip().lower() for name in methods.split(",") if name.strip()]
    for name in names:
        if name not in METHODS:
            raise unknown_name("method", name, METHODS)
    if not names or len(set(names)) < len(names):
        raise InputError(
            "--methods: " + message("each method once", repr(methods), f"--methods {','.join(METHODS)}")
        )
    return names


def _systems(names: list[str], ppl: str | None) -> dict[str, str]:
    """Method -> system. `ppl`: one system for all, or `svi=pyro,nuts=numpyro`."""
    from ppl_bnn.ppl.protocol import SYSTEMS

    systems = {name: METHODS[name][1] for name in names}
    for word in [] if ppl is None else ppl.split(","):
        method, equals, system = (part.strip().lower() for part in word.rpartition("="))
        if system not in SYSTEMS:
            raise unknown_name("system", system, SYSTEMS)
        if equals and method not in METHODS:
            raise unknown_name("method", method, METHODS)
        if equals and method not in systems:
            raise InputError(
                "--ppl: "
                + message(
                    f"methods among {', '.join(names)}", method, f"--methods {','.join([*names, method])}"
                )
            )
        systems |= {method: system} if equals else dict.fromkeys(names, system)
    return systems


def _check_seed(seed: int) -> None:
    if not 0 <= seed < 2**31:
        raise InputError("--seed: " + message("a whole number from 0 to 2**31 - 1", str(seed), "--seed 0"))


def _method(name: str, system: str, quick: bool) -> Method:
    import ppl_bnn

    return getattr(ppl_bnn, METHODS[name][0])(ppl=system, **(QUICK[name] if quick else {}))


def _plan(
    model: str | None,
    data: str | None,
    target: str | None,
    drop: list[str],
    task: str | None,
    settings: list[str],
    seed: int,
    quick: bool,
    out: Path | None,
) -> _Plan:
    """Everything that the words stand for; what can be refused without reading data is refused first."""
    from ppl_bnn import data as tables
    from ppl_bnn import zoo

    if task is not None and task not in tables.TASKS:
        raise unknown_name("task", task, tables.TASKS)
    is_file = model is not None and (model.endswith(".py") or "/" in model)
    card = None
    if model is not None:
        known = {} if is_file else zoo.models()
        if not is_file and model not in known:
            if model in tables.datasets():
                advice = f"ppl-bnn compare --data {model}"
                raise InputError(
                    "MODEL: " + message("a model or a file.py", f"the data set {model!r}", advice)
                )
            raise unknown_name("model", model, known)
        card = zoo.read_card(model) if is_file else known[model]
    source = data or (card.data if card is not None else "diabetes")
    if source is None:
        raise InputError(
            "--data: "
            + message(
                f"data for {model}, which has no DATA of its own",
                "none",
                "--data NAME or --data FILE.csv --target COLUMN",
            )
        )
    is_csv = source.lower().endswith(".csv") or "/" in source
    _check_source(source, is_csv, target, drop, task)
    arguments = dict(_setting(setting) for setting in settings)

    # Only now are files read and run; first the model, which says how a column of whole numbers is to be read.
    known_task = task if is_csv else tables.datasets()[source].task
    if model is None and known_task is not None:
        model = _DEFAULT_MODEL[known_task]
    function, sketch = None, None
    if model is not None:
        _check_folder(_folder(out, model, source, quick))
        function = zoo.from_file(model, **arguments) if is_file else zoo.load(model, **arguments)
        features = 1 if is_csv else tables.datasets()[source].features
        sketch = _sketch(function, features)
        if not is_csv:
            _check_task(model, sketch, source, known_task)
    wanted = known_task or (sketch.task if sketch is not None else None)
    table = tables.read_csv(source, str(target), drop=drop, task=wanted) if is_csv else tables.load(source)
    if function is None or model is None:
        model = _DEFAULT_MODEL[table.task]
        function = zoo.load(model, **arguments)
    name = Path(model).stem if is_file else model
    from ppl_bnn.comparison import bind_classes

    if table.task == "classification":
        function = bind_classes(function, table.y, table.class_names)
    sketch = _sketch(function, table.x.shape[1])
    _check_task(name, sketch, table.name, table.task)
    train, test = table.split(seed)
    if quick:
        train, test = train[: QUICK_ROWS["train"]], test[: QUICK_ROWS["test"]]
    folder = _folder(out, model, source, quick)
    _check_folder(folder)
    return _Plan(name, function, table, train, test, folder, None if sketch is None else sketch.parameters)


def _sketch(model: Callable[..., Any], features: int) -> Sketch | None:
    """Size and task of a model; None for one of either system's own. What is wrong with it, `compare` will say."""
    from ppl_bnn import zoo

    try:
        return zoo.sketch(model, features)
    except Exception:
        return None


def _check_task(name: str, sketch: Sketch | None, table: str, task: str | None) -> None:
    if task is not None and sketch is not None and sketch.task != task:
        came = f"{name}, a model for {sketch.task}"
        raise InputError(
            "MODEL: " + message(f"a model for {task}, as {table} is meant for", came, _DEFAULT_MODEL[task])
        )


def _check_source(source: str, is_csv: bool, target: str | None, drop: list[str], task: str | None) -> None:
    from ppl_bnn import data as tables

    if not is_csv:
        known = tables.datasets()
        if source not in known:
            error = unknown_name("data set", source, known)
            raise type(error)(f"{error}; a file is given as FILE.csv")
        for option, value in (("--target", target), ("--drop", drop), ("--task", task)):
            if value:
                raise InputError(
                    f"{option}: "
                    + message(
                        "a CSV file to go with it", f"data set {source!r}", f"--data FILE.csv, or no {option}"
                    )
                )
        return
    if not Path(source).is_file():
        raise InputError(
            "--data: "
            + message(
                "a CSV file",
                f"{source}, which does not exist",
                "its full path, or a name from `ppl-bnn data`",
            )
        )
    if target is None:
        with open(source, encoding="utf-8-sig", errors="replace") as file:
            columns = [name.strip() for name in file.readline().split(",")]
        shown = ", ".join(columns[:30]) + (", ..." if len(columns) > 30 else "")
        raise InputError(
            "--target: "
            + message(f"the column of {source} to predict", "none", f"--target COLUMN, one of: {shown}")
        )


def _folder(out: Path | None, model: str, source: str, quick: bool) -> Path:
    name = f"{Path(model).stem}-{Path(source).stem}" + ("-quick" if quick else "")
    return out or Path("ppl-bnn-results") / name


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, and leave no trace of having tried."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            "--out: "
            + message(
                "a folder that can be written",
                f"{folder} ({error.strerror or error})",
                "another folder with --out DIR",
            )
        ) from None
    finally:
        for path in missing:
            with contextlib.suppress(OSError):
                path.rmdir()


def _setting(setting: str) -> tuple[str, Any]:
    name, equals, value = setting.partition("=")
    if not (equals and name.strip().isidentifier()):
        raise InputError("--set: " + message("NAME=VALUE", repr(setting), "--set width=20"))
    try:
        return name.strip(), ast.literal_eval(value.strip())
    except (SyntaxError, ValueError):
        return name.strip(), value.strip()


def _remember_compilations() -> None:
    """Keep JAX's compiled programs on disk; where there is no JAX or no room, do without."""
    with contextlib.suppress(ImportError, OSError):
        from ppl_bnn.ppl.numpyro import enable_compilation_cache

        enable_compilation_cache()


@contextlib.contextmanager
def _warnings_told(console: Console) -> Iterator[None]:
    """Warnings meant for a person, each once and in one line; what libraries mutter among themselves is left out."""
    said: set[str] = set()

    def show(text: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        words = " ".join(str(text).split())
        if issubclass(category, UserWarning) and words not in said:
            said.add(words)
            console.print(f"warning: {words}", style="yellow", markup=False, soft_wrap=True)

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


# --- what is said ---------------------------------------------------------------------------------------


def _announce(console: Console, plan: _Plan, methods: dict[str, Method], quick: bool) -> None:
    from rich.markup import escape

    table = plan.table
    size = f", {plan.parameters} parameters" if plan.parameters else ""
    names = ", ".join(f"{METHODS[name][0]} ({method.ppl})" for name, method in methods.items())
    classes = f", {len(table.class_names)} classes" if table.class_names else ""
    console.print(
        f"[bold]{escape(plan.name)}[/]{size}, on [bold]{escape(table.name)}[/]: {len(plan.train)} training and "
        f"{len(plan.test)} test rows, {table.x.shape[1]} features{classes}"
    )
    console.print(f"by {names}")
    if quick:
        console.print("[yellow]--quick: tiny sizes and few rows; nothing is expected to converge[/]")
    if len(plan.train) > MANY_ROWS and "nuts" in methods:
        console.print(
            f"[yellow]NUTS goes through all {len(plan.train)} rows for every gradient: this may take hours. "
            "--methods svi,map is quicker.[/]"
        )


class _Bars(Bars):
    """Bars, and between two of them a word that predictions and diagnoses are being computed."""

    def __init__(self, console: Console):
        self._console = console
        self._status: Any = None

    def task(self, title: str, total: int) -> Task:
        self.rest()
        bar = super().task(title, total)

        def close() -> None:
            bar.close()
            self.rest()
            if self._console.is_terminal:
                self._status = self._console.status(f"{title}: prediction, diagnosis, scores")
                self._status.start()

        return _Closing(bar.update, close)

    def rest(self) -> None:
        """Clear the word."""
        if self._status is not None:
            self._status.stop()
            self._status = None


@dataclass
class _Closing:
    """A task with another `close`."""

    update: Callable[..., None]
    close: Callable[[], None]


def _keep_notes(folder: Path, result: Comparison) -> None:
    """All that is too long for a terminal, beside the other files."""
    (folder / NOTES).write_text(result.markdown(), encoding="utf-8")


def _kept(folder: Path, result: Comparison) -> str:
    from rich.markup import escape

    files = [f"{name}.nc" for name in result.trees] + ["comparison.csv", NOTES, "figure.png"]
    return f"[bold]Kept in {escape(str(folder))}/[/]\n{', '.join(files)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


# --- models, data -----------------------------------------------------------------------------------------


@app.command()
@_told
def models(
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="Show the whole card of this model.", show_default=False),
    ] = None,
) -> None:
    """List the models of the zoo, or show the card of one."""
    from rich.text import Text

    from ppl_bnn import data as tables
    from ppl_bnn import zoo

    cards = zoo.models()
    console = _console()
    if name is not None:
        if name not in cards:
            raise unknown_name("model", name, cards)
        card = cards[name]
        arguments = ", ".join(f"{key}={default}" for key, default in card.arguments.items())
        console.print(Text(card.name, style="bold"))
        console.print(Text(card.docstring), soft_wrap=True)
        console.print(Text(f"\nArguments (--set NAME=VALUE): {arguments}\nFile: {card.path}"), soft_wrap=True)
        return
    grid = _list(("model", "what it is", "default data", "size"))
    for card in cards.values():
        features = tables.datasets()[card.data].features if card.data else 1
        grid.add_row(
            card.name, card.summary, card.data, str(zoo.sketch(zoo.load(card.name), features).parameters)
        )
    console.print(grid)
    console.print(
        "Size: the number of parameters on the default data. Each is a file that can be copied and changed:\n"
        "`ppl-bnn models NAME` shows its card and its path, `ppl-bnn compare NAME` fits it.",
        markup=False,
    )


@app.command()
@_told
def data() -> None:
    """List the data sets."""
    from rich.text import Text

    from ppl_bnn import data as tables

    console = _console()
    grid = _list(("data set", "task", "rows", "features", "where from", "bytes to fetch"), right=(2, 3, 5))
    licences: dict[str, list[str]] = {}
    for card in tables.datasets().values():
        size = f"{card.bytes:,}".replace(",", " ") if card.bytes else "-"
        grid.add_row(
            card.name, card.task, f"{card.rows:,}".replace(",", " "), str(card.features), card.where, size
        )
        licences.setdefault(card.licence, []).append(card.name)
    console.print(grid)
    console.print("[bold]Licences[/]")
    for licence, names in licences.items():
        console.print(Text(f"- {', '.join(names)}: {licence}"))
    console.print("\nOr any CSV file: ppl-bnn compare --data FILE.csv --target COLUMN", markup=False)


def _list(headings: tuple[str, ...], right: tuple[int, ...] = ()) -> Any:
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(headings):
        grid.add_column(heading, justify="right" if index in right else "left", no_wrap=index == 0)
    return grid
