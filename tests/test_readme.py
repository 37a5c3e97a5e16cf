"""What the README shows is executed: its Python blocks run, its commands and their options exist."""

from __future__ import annotations

import re
import shlex
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[tuple[int, str]]:
    """(line of the first character, text) of every block in that language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
    return [(README.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def commands() -> list[list[str]]:
    """Every command of the shell blocks, in words, without its comment."""
    lines = [line for _, block in blocks("bash") for line in block.splitlines()]
    parts = [part for line in lines for part in line.split(" && ")]
    return [shlex.split(part, comments=True) for part in parts]


def test_the_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    # As a module, because dataclasses and pickling look for one.
    page = types.ModuleType("readme")
    shown = blocks("python")
    assert len(shown) >= 8
    for line, text in shown:
        # Lines as in the file, so that a traceback points there.
        exec(compile("\n" * (line - 1) + text, "README.md", "exec"), vars(page))
    assert (tmp_path / "results" / "comparison.csv").is_file()
    assert (tmp_path / "posterior").is_dir()


def test_the_commands_and_their_options_exist():
    from typer.main import get_command

    from ppl_bnn import data, references, zoo
    from ppl_bnn.cli import plan
    from ppl_bnn.cli.commands import app

    root: Any = get_command(app)
    seen = set()
    for words in commands():
        if Path(words[0]).name != "ppl-bnn":
            continue
        if words[1].startswith("-"):
            assert words[1:] == ["--version"]
            assert any("--version" in parameter.opts for parameter in root.params)
            continue
        command = root.commands[words[1]]
        seen.add(words[1])
        # Parses and converts, and calls nothing: an option that does not exist is an error here.
        given = command.make_context(words[1], list(words[2:])).params
        model = given.get("model") or given.get("name")
        known = references.entries() if words[1] == "grade" else zoo.models()
        assert model is None or model in known, model
        if words[1] != "compare":
            continue
        source = given["data"]
        assert source is None or source in data.datasets() or (source.endswith(".csv") and given["target"])
        methods = plan.method_names(given["methods"])
        plan.systems_of(methods, given["ppl"])
        for setting in given["set_"] or []:
            assert setting.partition("=")[0] in zoo.models()[model].arguments
    assert seen == set(root.commands)


def test_the_two_commands_do_their_own_set_up():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    first_screen = "\n".join(README.splitlines()[:25])
    both = re.findall(r"^python3 -m venv \.venv && (.*)$", first_screen, re.MULTILINE)
    assert [line.rpartition(" && ")[2] for line in both] == [".venv/bin/ppl-bnn compare", ".venv/bin/pytest"]
    assert "ppl-bnn" in project["scripts"]
    for extra in re.findall(r"'\.\[(\w+)\]'", README):
        assert extra in project["optional-dependencies"], extra


def test_the_columns_are_those_of_the_table():
    from ppl_bnn.evaluation.comparison.table import COLUMNS

    table = README.split("| column | meaning |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    shown = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(shown) == sorted(COLUMNS)


@pytest.mark.parametrize(
    ("heading", "method"), [("## Variational inference", "SVI"), ("## Laplace, in every way", "Laplace")]
)
def test_the_choices_of_a_method_are_its_arguments(heading, method):
    from dataclasses import fields

    import ppl_bnn as bnn

    section = README.split(heading, 1)[1]
    table = section.split("| choice | values |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert names
    assert set(names) <= {field.name for field in fields(getattr(bnn, method))}


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
