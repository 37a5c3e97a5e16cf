"""Pages of the site that are made from the package and from what the studies have stored.

Nothing here is typed by hand that a script prints: a page of the zoo comes from the file of its model, a page of a
study from its docstring and its stored verdicts, tables of methods and columns from the registry and the comparison.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import shutil
import sys
import types
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from formulas import block

import ppl_bnn as bnn
from ppl_bnn import botorch, estimators, references, zoo
from ppl_bnn.cli.plan import sketch_of
from ppl_bnn.datasets import tables
from ppl_bnn.evaluation.comparison.table import COLUMNS
from ppl_bnn.inference.registry import ROWS
from ppl_bnn.zoo.support import declared

ROOT = Path(__file__).resolve().parents[1]
MADE = Path(__file__).parent / "made"
STUDIES = ROOT / "comparisons"
# Studies of what approximations leave out, for the page of the guide about it.
OF_APPROXIMATIONS = (
    "grading_the_field",
    "in_between_uncertainty",
    "out_of_distribution_priors",
    "evidence_framework",
)
# Groups of public names by the packages that they come from; what is in none of the others is in the first.
GROUPS = {
    "Fit and predict": (),
    "Methods": ("ppl_bnn.inference",),
    "Judge and compare": (
        "ppl_bnn.diagnostics",
        "ppl_bnn.evaluation",
        "ppl_bnn.references",
        "ppl_bnn.reporting",
    ),
    "Write a model": ("ppl_bnn.language", "ppl_bnn.backends", "ppl_bnn.zoo"),
    "Data": ("ppl_bnn.datasets",),
}


def write_all() -> None:
    """Write every page that is made into `made/`, which begins empty."""
    shutil.rmtree(MADE, ignore_errors=True)
    for name, content in [
        *zoo_pages(),
        *study_pages(),
        *reference_pages(),
        *tables_of_the_guide(),
        *documents(),
    ]:
        path = MADE / f"{name}.md"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content.rstrip() + "\n", encoding="utf-8")


def rows_of(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown; cells are Markdown in one line."""

    def line(cells: Sequence[Any]) -> str:
        texts = (str(cell).replace("|", r"\|").replace("\n", " ") for cell in cells)
        return f"| {' | '.join(texts)} |"

    return "\n".join([line(headings), line(["---"] * len(headings)), *map(line, rows)]) + "\n"


def prose(docstring: str) -> str:
    """The text of a docstring as Markdown: single backquotes mean code, indented blocks are literal."""
    return re.sub(r"(?m)^\s+- ", "- ", inspect.cleandoc(docstring))


# --- the zoo ------------------------------------------------------------------------------------------------------


def zoo_pages() -> list[tuple[str, str]]:
    """A page for each model, and the list of all."""
    gallery = _captions()
    cards = list(zoo.models().values())
    pages = [(f"zoo/{card.name}", _card_page(card, gallery)) for card in cards]
    rows = []
    for card in cards:
        sketch, _ = sketch_of(zoo.load(card.name), _example(card))
        size = "" if sketch is None else f"{sketch.shared:,}".replace(",", " ")
        rows.append([f"[{card.name}]({card.name}.md)", card.summary.rstrip("."), card.data or "", size])
    head = """# The zoo

A model of the zoo is one Python file: a generative program and its card. `bnn.zoo.load(name)` loads it,
`ppl-bnn show NAME` shows its card in a terminal. Size: the number of parameters on the default data.
"""
    toc = "\n".join(card.name for card in cards)
    return [
        *pages,
        ("zoo/index", f"{head}\n{rows_of(('model', 'what it is', 'data', 'size'), rows)}\n{_toc(toc)}"),
    ]


def _card_page(card: zoo.Card, gallery: dict[str, str]) -> str:
    support = declared()
    before, after = _around_formulas(card.docstring)
    sketch, _ = sketch_of(zoo.load(card.name), _example(card))
    parts = [f"# {card.name}", before, f"```{{math}}\n{block(card.docstring)}\n```", after]
    figure = ROOT / "models" / "gallery" / f"{card.name}.png"
    if figure.is_file():
        target = MADE / "zoo" / figure.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(figure, target)
        caption = gallery.get(card.name, card.summary)
        parts.append(f"```{{figure}} {figure.name}\n:alt: {_plain(caption)}\n\n{caption}\n```")
    if sketch is not None:
        on = f"On {card.data}" if card.data else "On the example of its file"
        cells = [
            [f"`{site.name}`", f"`{site.prior}`", " × ".join(map(str, site.shape)) or "scalar", site.size]
            for site in sketch.sites
        ]
        parts += ["## Sites", f"{on}; `...` is computed from other sites. Targets: `{sketch.likelihood}`."]
        parts.append(rows_of(("site", "prior", "shape", "numbers"), cells))
    parts += ["## Methods", f"Methods that fit it: {support.summary(card.name)}."]
    for heading, rules in (
        ("does not fit", support.missing(card.name)),
        ("may fail", support.doubtful(card.name)),
    ):
        if rules:
            parts.append(
                rows_of((heading, "why"), [(", ".join(names), rule.reason) for rule, names in rules.items()])
            )
    mine = [each for each in references.entries().values() if each.name.split("-")[0] == card.name]
    if mine:
        lines = [f"- `{each.name}`: {each.grade}" for each in mine]
        parts += ["## Reference posteriors", "`bnn.references.load(name)` loads one.", "\n".join(lines)]
    parts += [
        "## The file",
        f"```{{literalinclude}} {'../' * 3}models/{card.name}.py\n:language: python\n```",
    ]
    return "\n\n".join(parts)


def _around_formulas(docstring: str) -> tuple[str, str]:
    """What a card says before and after its formulas."""
    lines = docstring.splitlines()
    block_lines = [index for index, line in enumerate(lines) if line.startswith("    ")]
    first = block_lines[0]
    last = first
    while last + 1 in block_lines:
        last += 1
    # Each of these facts is a paragraph of its own.
    facts = r"(?m)^(Sizes|Default data|Source|What is hard about its posterior):"
    after = re.sub(facts, r"\n**\1:**", prose("\n".join(lines[last + 1 :])))
    return "\n".join(lines[:first]).strip(), after


def _captions() -> dict[str, str]:
    """Model -> the caption of its figure, from the gallery of models/README.md."""
    text = (ROOT / "models" / "README.md").read_text(encoding="utf-8")
    found = re.findall(r"!\[(\w+): (.*?)\]\(gallery/\w+\.png\)", text, re.DOTALL)
    return {name: " ".join(caption.split()) for name, caption in found}


def _example(card: zoo.Card) -> Any:
    if card.data:
        return tables.datasets()[card.data].features
    return card.example


# --- the studies --------------------------------------------------------------------------------------------------


def study_pages() -> list[tuple[str, str]]:
    """A page for each study with stored verdicts, the table of all claims, and the performance page."""
    verdicts = _verdicts()
    names = [path.parent.name for path in sorted((STUDIES / "results").glob("*/results.json"))]
    judged = {name: verdicts.stored(name) for name in names if name in verdicts.judged_studies()}
    outcomes = verdicts.OUTCOMES
    overview, pages = [], []
    for name, rows in judged.items():
        summary, text = _study(name)
        pages.append((f"studies/{name}", _study_page(name, summary, text, rows, verdicts)))
        counts = Counter(each.verdict for each in rows)
        overview.append(
            [f"[{name}]({name}.md)", summary.rstrip("."), *(counts[each] or "" for each in outcomes)]
        )
    total = Counter(each.verdict for rows in judged.values() for each in rows)
    said = ", ".join(f"{total[each]} {each}" for each in outcomes)
    head = f"""# The studies

Each study reproduces published experiments or asks a question of its own. Its claims are declared before it is run, and
one statistical rule judges all of them. Of {sum(total.values())} claims {said}.

- **Reproduced**: the 95 % confidence interval lies within the set of the claim.
- **Refuted**: it lies outside of it.
- **Undecided**: it contains values of both kinds, there is no interval, or what stands for the exact posterior has not
  converged.
- **Corrected**: the claim as printed is wrong by a proof or an exact computation.
- **Not run**: it was not run at the sizes or settings of its source.
"""
    listed = rows_of(("study", "what it is", *outcomes), overview)
    toc = _toc("\n".join([*judged, "performance"]))
    speed = (STUDIES / "performance" / "README.md").read_text(encoding="utf-8")
    pages.append(("studies/performance", speed))
    return [*pages, ("studies/index", f"{head}\n{listed}\n{toc}")]


def _verdicts() -> Any:
    """The script that reads the stored verdicts, which lies beside the studies."""
    if str(STUDIES) not in sys.path:
        sys.path.insert(0, str(STUDIES))
    return importlib.import_module("verdicts")


def _study(name: str) -> tuple[str, str]:
    docstring = ast.get_docstring(ast.parse((STUDIES / f"{name}.py").read_text(encoding="utf-8"))) or ""
    summary, _, text = docstring.partition("\n")
    return summary, text.strip()


def _study_page(name: str, summary: str, text: str, rows: list[Any], verdicts: Any) -> str:
    folder = STUDIES / "results" / name
    content = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    parts = [f"# {_title(name)}", summary, prose(text), "## Claims"]
    for verdict in rows:
        estimate = verdicts.estimate_in_words(verdict)
        number = f" Estimate {estimate}" + (f", n = {verdict.n}." if verdict.n else ".") if estimate else ""
        late = " The rule was declared after the results." if verdict.declared == "after" else ""
        before = f" Before that rule: {verdict.before}." if verdict.before else ""
        parts.append(
            f"{{bdg-{_COLOURS[verdict.verdict]}}}`{verdict.verdict}` {_escaped(verdict.claim)} "
            f"({_escaped(verdict.source)}).{_escaped(number)}{late}{before}\n\n"
            f"```{{dropdown}} Numbers\n{_escaped(verdict.numbers)}\n\n{_escaped(verdict.sizes)}\n```"
        )
    figures = sorted(folder.glob("*.png"))
    if figures:
        parts.append("## Figures")
    for figure in figures:
        target = MADE / "studies" / name / figure.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(figure, target)
        parts.append(
            f"```{{figure}} {name}/{figure.name}\n:alt: {_title(figure.stem)}\n\n{_title(figure.stem)}\n```"
        )
    stamp = {key: value for key, value in content["stamp"].items() if value is not None}
    made = ", ".join(f"{key} {value}" for key, value in stamp.items() if isinstance(value, str | int | float))
    parts += ["## Provenance", f"{_escaped(made)}. Run it: `ppl-bnn bench {name}`, `--tiny` for a trial."]
    return "\n\n".join(parts)


# Outcome -> colour of its badge.
_COLOURS = {
    "reproduced": "success",
    "refuted": "danger",
    "undecided": "secondary",
    "corrected": "warning",
    "not run": "light",
}


# --- the reference ------------------------------------------------------------------------------------------------


def public_modules() -> dict[str, types.ModuleType]:
    """Name in the reference -> module, of all public modules."""
    found = {name: getattr(bnn, name) for name in bnn.__all__}
    modules = {name: value for name, value in found.items() if isinstance(value, types.ModuleType)}
    return modules | {"botorch": botorch, "estimators": estimators}


def names_of(module: types.ModuleType) -> list[str]:
    """The public names of a module: `__all__`, else the classes and functions that it defines."""
    listed = getattr(module, "__all__", None)
    if listed is not None:
        names = listed
    else:
        names = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", "") == module.__name__
        ]
    described = (
        name for name in names if inspect.isclass(getattr(module, name)) or callable(getattr(module, name))
    )
    return sorted(name for name in described if name[0] != "_")


def reference_pages() -> list[tuple[str, str]]:
    """The lists of public names, of which autosummary makes a page each."""
    modules, paths = public_modules(), public_paths()
    found: dict[str, list[str]] = {title: [] for title in GROUPS}
    for name in sorted(set(bnn.__all__) - set(modules), key=str.lower):
        found[_group_of(name)].append(name)
    parts = ["# API reference", "All names below are in `ppl_bnn`, by convention `import ppl_bnn as bnn`."]
    for title, names in found.items():
        parts += [f"## {title}", _autosummary("ppl_bnn", names, "method" if title == "Methods" else "")]
    parts += ["## Modules", _toc("\n".join(modules))]
    pages = [("api/index", "\n\n".join(parts))]
    for name, module in modules.items():
        text = prose((module.__doc__ or "").strip())
        listed = _autosummary(module.__name__, names_of(module))
        pages.append((f"api/{name}", f"# {paths[module.__name__]}\n\n{text}\n\n{listed}"))
    return pages


def public_paths() -> dict[str, str]:
    """The name by which users know a module, by the name of its file."""
    paths = {"ppl_bnn": "ppl_bnn"}
    for name, module in public_modules().items():
        paths[module.__name__] = f"ppl_bnn.{name}" if hasattr(bnn, name) else module.__name__
    return paths


def _group_of(name: str) -> str:
    home = getattr(bnn, name).__module__
    if home.startswith("ppl_bnn.inference.sampling"):
        # `extend` goes on with a fit.
        return next(iter(GROUPS))
    fitting = (title for title, homes in GROUPS.items() if home.startswith(homes))
    return next(fitting, next(iter(GROUPS)))


def _autosummary(module: str, names: Sequence[str], template: str = "") -> str:
    lines = "\n".join(f"   {name}" for name in names)
    options = ".. autosummary::\n   :toctree: names\n   :nosignatures:"
    options += f"\n   :template: autosummary/{template}.rst" if template else ""
    return f"```{{eval-rst}}\n.. currentmodule:: {module}\n\n{options}\n\n{lines}\n```"


# --- tables of the guide ------------------------------------------------------------------------------------------


def tables_of_the_guide() -> list[tuple[str, str]]:
    """Tables that pages of the guide include: methods, columns of a comparison, data sets, references."""
    systems = declared()
    methods = [
        [f"`{row.name}`", f"`bnn.{row.class_name}`", ", ".join(systems.served(row.name)), _limits(row)]
        for row in ROWS.values()
    ]
    columns = [[f"`{name}`", _escaped(meaning)] for name, meaning in COLUMNS.items()]
    cards = [[f"`{c.name}`", c.task, c.rows, c.features, c.licence] for c in tables.datasets().values()]
    graded = [[f"`{each.name}`", each.grade] for each in references.entries().values()]
    verdicts = _verdicts()
    about = re.compile(r"Laplace|mean.field|ensemble", re.IGNORECASE)
    judged = []
    for name in OF_APPROXIMATIONS:
        for each in verdicts.stored(name):
            if each.verdict in ("reproduced", "refuted") and about.search(each.claim):
                estimate = _escaped(verdicts.estimate_in_words(each))
                link = f"[{_title(name)}](../made/studies/{name}.md)"
                judged.append([link, _escaped(each.claim), each.verdict, estimate])
    return [
        ("tables/approximations", rows_of(("study", "claim", "outcome", "estimate [95 % interval]"), judged)),
        ("tables/methods", rows_of(("name", "class", "systems", "what it leaves out"), methods)),
        ("tables/columns", rows_of(("column", "meaning"), columns)),
        ("tables/data", rows_of(("name", "task", "rows", "features", "licence"), cards)),
        ("tables/references", rows_of(("reference", "grade"), graded)),
    ]


def _limits(row: Any) -> str:
    method = row.build(declared().served(row.name)[0])
    return _escaped(method.limitations)


def documents() -> list[tuple[str, str]]:
    """The documents of the root of the repository; links to files that are no page become code."""
    names = {name.lower(): f"{name}.md" for name in ("CONTRIBUTING", "ARCHITECTURE", "CHANGELOG")}

    def linked(match: re.Match[str]) -> str:
        text, target = match[1], match[2]
        made = next((page for page, file in names.items() if target == file), None)
        if made is not None:
            return f"[{text}]({made}.md)"
        return match[0] if "://" in target else f"{text} (`{target}`)"

    found = []
    for page, file in names.items():
        text = (ROOT / file).read_text(encoding="utf-8")
        found.append((page, re.sub(r"\[([^\]]+)\]\(([^)#]+)\)", linked, text)))
    return found


# --- small parts --------------------------------------------------------------------------------------------------


def _toc(entries: str) -> str:
    return f"```{{toctree}}\n:hidden:\n\n{entries}\n```"


def _title(name: str) -> str:
    words = name.replace("_", " ")
    return words[:1].upper() + words[1:]


def _plain(text: str) -> str:
    return re.sub(r"[`*]", "", text)


def _escaped(text: str) -> str:
    """Text that is not read as Markdown, but for code in backquotes."""
    parts = re.split(r"(`[^`]*`)", str(text))
    special = re.compile(r"([\\*_<>$\[\]{}~^#])")
    return "".join(part if part.startswith("`") else special.sub(r"\\\1", part) for part in parts)


if __name__ == "__main__":
    write_all()
