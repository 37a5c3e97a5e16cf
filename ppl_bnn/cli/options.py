"""Options that several commands have, and how an option is declared."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from ppl_bnn.cli import complete


def option(
    help: str, metavar: str | None = None, default: str | bool = False, complete: Any = None, *names: str
) -> Any:
    """An option. default: what help shows as its default, or whether it shows that of the function."""
    return typer.Option(*names, help=help, metavar=metavar, show_default=default, autocompletion=complete)


def argument(help: str, metavar: str, complete: Any = None) -> Any:
    return typer.Argument(metavar=metavar, help=help, show_default=False, autocompletion=complete)


HELP = {
    "model": "A model of the zoo (see `ppl-bnn models`) or a file.py.",
    "data": "A data set (see `ppl-bnn data`) or a CSV file.",
    "target": "The column of the CSV file to predict.",
    "drop": "A column of the CSV file to leave out; repeatable.",
    "task": "regression or classification; always decides how the target of a CSV file is read.",
    "set": "An argument of the model, such as width=20; repeatable.",
    "methods": "Methods, separated by commas, such as nuts,laplace-kron.",
}
OUT = "./ppl-bnn-results/MODEL-DATA"
BY_VALUES = "two whole numbers, or words: classification"
Model = Annotated[str | None, argument(HELP["model"], "MODEL", complete.models)]
Data = Annotated[str | None, option(HELP["data"], "NAME|FILE.csv", "the model's", complete.datasets)]
Target = Annotated[str | None, option(HELP["target"], "COLUMN", False, complete.columns)]
Drop = Annotated[list[str] | None, option(HELP["drop"], "COLUMN", False, complete.columns)]
Task = Annotated[str | None, option(HELP["task"], "TASK", BY_VALUES, complete.tasks)]
Set = Annotated[list[str] | None, option(HELP["set"], "NAME=VALUE", False, complete.settings, "--set")]
Methods = Annotated[str | None, option(HELP["methods"], "LIST", "all", complete.methods)]
Device = Annotated[str, option("auto, cpu or cuda[:i].", default=True)]
