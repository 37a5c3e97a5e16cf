"""What the README and the guide show is executed: Python blocks run, commands and their options exist."""

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
GUIDE = ROOT / "docs" / "guide"


def pages() -> dict[str, str]:
    """Name -> text of the README and of the pages of the guide, in the order in which they are read."""
    listed = (GUIDE / "index.md").read_text(encoding="utf-8").split("{toctree}", 1)[1].split("```", 1)[0]
    names = [line for line in listed.splitlines() if line and line[0].isalpha()]
    return {"README.md": README} | {f"{name}.md": (GUIDE / f"{name}.md").read_text("utf-8") for name in names}


def blocks(text: str, language: str) -> list[tuple[int, str]]:
    """(line of the first character, text) of every block in that language."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text.count("\n", 0, match.start(1)) + 1, match[1]) for match in found]


def commands() -> list[list[str]]:
    """Every command of the shell blocks, in words, without its comment."""
    shown = [block for text in pages().values() for _, block in blocks(text, "bash")]
    parts = [part for block in shown for line in block.splitlines() for part in line.split(" && ")]
    return [shlex.split(part, comments=True) for part in parts]


def test_every_page_of_the_guide_is_listed():
    assert {path.name for path in GUIDE.glob("*.md")} == set(pages()) - {"README.md"} | {"index.md"}


@pytest.mark.slow
@pytest.mark.usefixtures("optimised")
def test_the_python_blocks_run_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    # As a module, because dataclasses and pickling look for one. Pages go on from those before them.
    page = types.ModuleType("readme")
    shown = [(name, *block) for name, text in pages().items() for block in blocks(text, "python")]
    assert len(shown) >= 15
    for name, line, text in shown:
        # Lines as in the file, so that a traceback points there.
        exec(compile("\n" * (line - 1) + text, name, "exec"), vars(page))
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


@pytest.mark.parametrize(("name", "method"), [("variational.md", "SVI"), ("laplace.md", "Laplace")])
def test_the_choices_of_a_method_are_its_arguments(name: str, method: str):
    from dataclasses import fields

    import ppl_bnn as bnn

    table = pages()[name].split("| choice | values |", 1)[1].split("\n\n", 1)[0]
    rows = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    names = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert names
    assert set(names) <= {field.name for field in fields(getattr(bnn, method))}


def test_the_readme_is_short():
    assert len(README.splitlines()) <= 120


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target
