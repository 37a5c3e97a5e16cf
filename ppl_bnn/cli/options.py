"""Options that several commands have, and how an option is declared."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ppl_bnn.cli import complete


def option(
    help: str, metavar: str | None = None, *names: str, default: str | bool = False, complete: Any = None
) -> Any:
    """An option. default: what help shows as its default, or whether it shows that of the function."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=default, autocompletion=complete)


def argument(help: str, metavar: str, complete: Any = None) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete)


A_MODEL = "A model of the zoo (see `ppl-bnn models`) or a file.py."
BY_VALUES = "two whole numbers, or words: classification"
OF_TASK = "regression or classification; always decides how the target of a CSV file is read."
Model = Annotated[str | None, argument(A_MODEL, "MODEL", complete.models)]
Data = Annotated[
    str | None,
    option(
        "A data set (see `ppl-bnn data`) or a CSV file.",
        "NAME|FILE.csv",
        default="the model's",
        complete=complete.datasets,
    ),
]
Target = Annotated[
    str | None, option("The column of the CSV file to predict.", "COLUMN", complete=complete.columns)
]
Drop = Annotated[
    list[str] | None,
    option("A column of the CSV file to leave out; repeatable.", "COLUMN", complete=complete.columns),
]
Task = Annotated[str | None, option(OF_TASK, "TASK", default=BY_VALUES, complete=complete.tasks)]
Set = Annotated[
    list[str] | None,
    option(
        "An argument of the model, such as width=20; repeatable.",
        "NAME=VALUE",
        "--set",
        complete=complete.settings,
    ),
]
Methods = Annotated[
    str | None,
    option(
        "Methods, separated by commas, such as nuts,laplace-kron.",
        "LIST",
        default="all",
        complete=complete.methods,
    ),
]
Device = Annotated[str, option("auto, cpu or cuda[:i].", default=True)]
