"""The rules of the house: what may import what, how large a file and a folder are, what an import costs.

The rooms and their order are read from ARCHITECTURE.md, so that the document is what is enforced.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import pytest

import ppl_bnn
from ppl_bnn.inference import registry

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"torch", "jax", "jaxlib", "numpyro", "pyro", "optax", "blackjax"}
# At most so many; the document says the same.
BOUNDS = {
    "rooms at the first level": 18,
    "modules at the root": 4,
    "modules in a folder": 12,
    "arrows between rooms": 80,
    "lines of a file": 700,
    "lines of the median file": 220,
    "lines of code of the package": 35730,
}
# The tables that name modules as text: the public names, and the registry of methods and approximations.
TABLES = {"ppl_bnn", "ppl_bnn.inference.registry"}
# Import root -> the dependency that brings it, where the two have different names or one comes with the other.
BROUGHT_BY = {
    "arviz_base": "arviz",
    "arviz_plots": "arviz",
    "arviz_stats": "arviz",
    "h5py": "h5netcdf",
    "markupsafe": "jinja2",
    "pyro": "pyro-ppl",
    "sklearn": "scikit-learn",
    "requests": "pooch",
}


# --- reading the list and the imports -----------------------------------------------------------------------


def listed_rooms(text: str) -> list[str]:
    """The rooms of ARCHITECTURE.md in order: folders and modules one level below `ppl_bnn/`."""
    block = text.split("## The house", 1)[1].split("```")[1]
    found, inside = [], False
    for line in block.splitlines():
        depth = len(line) - len(line.lstrip())
        word = line.split()[0] if line.split() else ""
        if depth == 0:
            inside = word == "ppl_bnn/"
        elif inside and depth == 2:
            found.append(word.removesuffix("/").removesuffix(".py"))
    return found


def listed_bounds(text: str) -> dict[str, int]:
    """The table of bounds of ARCHITECTURE.md."""
    rows = re.findall(r"^\| ([a-z ]+) \| (\d+) \|$", text, flags=re.MULTILINE)
    return {name: int(value) for name, value in rows}


def modules_in_tree() -> dict[str, Path]:
    """Module -> file, for everything in the checkout's package."""
    found = {}
    for file in sorted((ROOT / "ppl_bnn").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(source: str, module: str, known: set[str]) -> Iterator[tuple[str, str]]:
    """(what is imported, when) for every import in a source, those by name included.

    When: "early", at import time; "late", in a function; "typing", for type checkers only; "name", a text that is the
    name of a module. Modules of the package are named whole (`ppl_bnn.core.errors`), as is what `from` takes from them
    if it is a module.
    """
    tree = ast.parse(source)
    when: dict[ast.AST, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            when.update(dict.fromkeys((part for child in node.body for part in ast.walk(child)), "typing"))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            for part in ast.walk(node):
                when.setdefault(part, "late")
    for node in ast.walk(tree):
        at = when.get(node, "early")
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, at
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if whole in known else base), at
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if name in known and name != "ppl_bnn":
                yield name, "name"
        elif isinstance(node, ast.JoinedStr):
            name = "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"<{ast.unparse(part.value)}>"
                for part in node.values
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )
            if re.fullmatch(r"ppl_bnn(\.[\w<>]+)+", name):
                yield name, "name"


TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
ROOMS = listed_rooms(TEXT)
TREE = modules_in_tree()
IMPORTS = {
    name: list(imports(file.read_text(encoding="utf-8"), name, set(TREE))) for name, file in TREE.items()
}


def _own(found: str) -> bool:
    return found == "ppl_bnn" or found.startswith("ppl_bnn.")


def room_of(module: str) -> str:
    """The room of a module: the part behind `ppl_bnn`; "__init__" for the package itself."""
    return (*module.split("."), "__init__")[1]


def violations(module: str, found: list[tuple[str, str]], rooms: list[str]) -> list[str]:
    """Imports of `module` from rooms below its own. What only a type checker reads is none."""
    wrong, own = [], room_of(module)
    for name, when in found:
        if not _own(name) or when == "typing":
            continue
        other = room_of(name)
        if other not in rooms:
            wrong.append(f"{module} imports {name}, whose room the list does not have")
        elif other != own and rooms.index(other) > rooms.index(own):
            wrong.append(f"{module} imports {name}, from a room below its own")
    return wrong


def code_lines(file: Path) -> int:
    """Lines of a file that hold code: without docstrings, comments and blanks."""
    text = file.read_text(encoding="utf-8")
    lines = {
        number
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.strip().startswith("#")
    }
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def circles(graph: Mapping[str, Iterable[str]]) -> set[str]:
    """The nodes that lie on a circle: leaving out again and again what imports nothing that is left."""
    left = {node: set(others) & set(graph) - {node} for node, others in graph.items()}
    while ends := {node for node, others in left.items() if not others & set(left)}:
        left = {node: others for node, others in left.items() if node not in ends}
    return set(left)


# --- the order ----------------------------------------------------------------------------------------------


def test_the_list_names_every_room_once():
    there = {room_of(name) for name in TREE} - {"__main__"}
    assert sorted(ROOMS) == sorted(there)


@pytest.mark.parametrize("module", sorted(set(TREE) - TABLES))
def test_a_module_imports_only_from_rooms_above_its_own(module: str):
    # `__main__` is the command line under another name.
    rooms = [*ROOMS, "__main__"]
    assert violations(module, IMPORTS[module], rooms) == []


def test_no_file_imports_itself_through_others():
    graph = {
        name: {other for other, when in found if when in ("early", "late") and other != "ppl_bnn"}
        for name, found in IMPORTS.items()
        if name not in ("ppl_bnn", "ppl_bnn.__main__")
    }
    assert circles(graph) == set()


def test_only_the_tables_name_modules_as_text():
    named = {
        (module, name)
        for module, found in IMPORTS.items()
        for name, when in found
        if when == "name" and module not in TABLES
    }
    assert named == set()


def test_a_package_imports_only_its_own_files_at_its_top():
    # An `__init__` that imported other rooms would make every file of the package import them.
    for module, file in TREE.items():
        if file.name == "__init__.py" and module not in ("ppl_bnn", "ppl_bnn.zoo"):
            early = {name for name, when in IMPORTS[module] if when == "early" and name != "__future__"}
            assert all(name.startswith(f"{module}.") for name in early), module


def test_the_bounds_of_the_house():
    assert listed_bounds(TEXT) == BOUNDS
    inside = [name for name, file in TREE.items() if file.name not in ("__init__.py", "__main__.py")]
    folders = Counter(TREE[name].parent for name in inside)
    files = [file for file in TREE.values() if file.name != "__init__.py"]
    lengths = sorted(len(file.read_text(encoding="utf-8").splitlines()) for file in files)
    arrows: dict[str, set[str]] = defaultdict(set)
    for name in inside:
        for other, when in IMPORTS[name]:
            if _own(other) and other != "ppl_bnn" and when != "typing":
                arrows[room_of(name)] |= {room_of(other)} - {room_of(name)}
    found = {
        "rooms at the first level": len({room_of(name) for name in inside}),
        "modules at the root": folders.pop(ROOT / "ppl_bnn", 0) + 1,
        "modules in a folder": max(folders.values()),
        "arrows between rooms": sum(len(others) for others in arrows.values()),
        "lines of a file": lengths[-1],
        "lines of the median file": lengths[len(lengths) // 2],
        "lines of code of the package": sum(code_lines(file) for file in TREE.values()),
    }
    assert {name: (found[name], most) for name, most in BOUNDS.items() if found[name] > most} == {}


def test_the_reader_sees_every_kind_of_import():
    known = {"ppl_bnn", "ppl_bnn.core.errors", "ppl_bnn.language", "ppl_bnn.language.ops", "ppl_bnn.zoo"}
    source = (
        "from typing import TYPE_CHECKING\n"
        "import torch.nn\n"
        "from .core.errors import InputError\n"
        "from ppl_bnn.language import ops\n"
        "from ppl_bnn import __version__\n"
        "class A:\n    import jax\n"
        "try:\n    import pyro\nexcept ImportError:\n    pass\n"
        "if TYPE_CHECKING:\n    import pandas\n"
        "def f():\n    from ppl_bnn.core.errors import message\n    return __import__('ppl_bnn.zoo')\n"
        "TABLE = {'a': 'ppl_bnn.language.ops:tanh'}\n"
        "g = lambda name: f'ppl_bnn.backends.{name}'\n"
    )
    found = list(imports(source, "ppl_bnn.estimators", known))
    assert sorted(found) == sorted(
        [
            ("typing", "early"),
            ("torch.nn", "early"),
            ("ppl_bnn.core.errors", "early"),
            ("ppl_bnn.language.ops", "early"),
            ("ppl_bnn", "early"),
            ("jax", "early"),
            ("pyro", "early"),
            ("pandas", "typing"),
            ("ppl_bnn.core.errors", "late"),
            ("ppl_bnn.zoo", "name"),
            ("ppl_bnn.language.ops", "name"),
            ("ppl_bnn.backends.<name>", "name"),
        ]
    )


def test_an_import_from_below_is_found():
    rooms = ["core", "posterior", "datasets"]
    above = [("ppl_bnn.core.errors", "early"), ("ppl_bnn.posterior.export", "late")]
    assert violations("ppl_bnn.posterior.storage", above, rooms) == []
    for when in ("early", "late", "name"):
        assert len(violations("ppl_bnn.posterior.storage", [("ppl_bnn.datasets.tables", when)], rooms)) == 1
    assert violations("ppl_bnn.posterior.storage", [("ppl_bnn.datasets.tables", "typing")], rooms) == []
    assert len(violations("ppl_bnn.posterior.storage", [("ppl_bnn.elsewhere", "early")], rooms)) == 1


def test_a_circle_is_found():
    assert circles({"a": ["b"], "b": ["c"], "c": []}) == set()
    assert circles({"a": ["b"], "b": ["c"], "c": ["b"], "d": []}) == {"a", "b", "c"}


# --- the rooms ----------------------------------------------------------------------------------------------


def test_a_method_imports_no_other_method():
    methods = set(registry.MODULES.values())
    for module in methods:
        assert {name for name, _ in IMPORTS[module]} & methods - {module} == set(), module


def test_the_language_imports_no_framework():
    for module in TREE:
        if module.startswith("ppl_bnn.language"):
            roots = {name.split(".")[0] for name, _ in IMPORTS[module]}
            assert roots & FRAMEWORKS == set(), module


def test_only_the_two_systems_import_a_framework_at_their_top():
    importers = {
        module
        for module, found in IMPORTS.items()
        if any(when == "early" and name.split(".")[0] in FRAMEWORKS for name, when in found)
    }
    own = {"numpyro", "pyro", "pyro_distributions", "pyro_recording", "pyro_session"}
    assert importers == {f"ppl_bnn.backends.{name}" for name in own}


def globals_of_all_threads(source: str) -> list[str]:
    """Calls that change something for all threads of a process."""
    refused = {"catch_warnings", "simplefilter", "filterwarnings", "set_default_dtype", "set_default_device"}
    refused |= {"clear_param_store", "set_rng_seed"}
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = (getattr(call, "attr", getattr(call, "id", "")) for call in calls)
    return sorted(name for name in names if name in refused)


def test_no_module_changes_what_other_threads_see():
    # The command line is a program of its own; the entry that one filter makes is taken out at once.
    allowed = {"ppl_bnn.cli.console": ["catch_warnings"], "ppl_bnn.core.warning_filters": ["simplefilter"]}
    for module, file in TREE.items():
        found = globals_of_all_threads(file.read_text(encoding="utf-8"))
        assert found == allowed.get(module, []), module


def test_a_change_that_other_threads_see_is_found():
    assert globals_of_all_threads("with warnings.catch_warnings():\n    torch.set_default_dtype(x)") == [
        "catch_warnings",
        "set_default_dtype",
    ]
    assert globals_of_all_threads("ignored('text')\ntorch.get_default_dtype()") == []


def test_neither_system_imports_the_framework_of_the_other():
    for module, foreign in (("numpyro", {"torch", "pyro"}), ("pyro", {"jax", "jaxlib", "numpyro", "optax"})):
        roots = {name.split(".")[0] for name, _ in IMPORTS[f"ppl_bnn.backends.{module}"]}
        assert roots & foreign == set()


def test_only_export_imports_arviz_base():
    importers = {
        module
        for module, found in IMPORTS.items()
        if any(name.split(".")[0] in ("arviz_base", "arviz") for name, _ in found)
    }
    assert importers == {"ppl_bnn.posterior.export"}


def test_nothing_imports_the_models_or_the_studies():
    for module, found in IMPORTS.items():
        for name, _ in found:
            assert name.split(".")[0] not in ("models", "comparisons", "tests"), module
            assert not name.startswith(("ppl_bnn._zoo", "ppl_bnn._studies")), module


def test_every_package_that_is_imported_is_a_declared_dependency():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"[\[<>=!~; ]", requirement)[0] for requirement in project["dependencies"]}
    for module, found in IMPORTS.items():
        for name, _ in found:
            root = name.split(".")[0]
            # The module that an extra is for may import it.
            if _own(name) or root in sys.stdlib_module_names or module == f"ppl_bnn.{root}":
                continue
            assert BROUGHT_BY.get(root, root) in declared, f"{module} imports {root}"
    required = {
        re.split(r"[\[<>=!~; (]", requirement)[0].lower()
        for requirement in (importlib.metadata.requires("pooch") or [])
    }
    assert "requests" in required


def test_a_model_of_the_zoo_is_written_in_the_language_alone():
    language = {
        name
        for name, (module, own) in ppl_bnn._CONTENTS.items()
        if f"{module}.{own}".startswith("ppl_bnn.language.")
    }
    files = sorted((ROOT / "models").glob("*.py"))
    assert files
    for file in files:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    assert (alias.name, alias.asname) in (("ppl_bnn", "bnn"), ("math", None)), file.name
            elif isinstance(node, ast.ImportFrom):
                assert node.module in ("__future__", "typing", "ppl_bnn"), file.name
                if node.module == "ppl_bnn":
                    assert {alias.name for alias in node.names} <= language, file.name
            elif (
                isinstance(node, ast.Attribute)
                and isinstance(node.value, ast.Name)
                and node.value.id == "bnn"
            ):
                assert node.attr in language, f"{file.name}: bnn.{node.attr}"


# --- the table of contents ----------------------------------------------------------------------------------


def test_every_name_of_the_table_of_contents_is_there():
    for name in ppl_bnn.__all__:
        assert getattr(ppl_bnn, name) is not None, name
    assert set(ppl_bnn.__all__) <= set(dir(ppl_bnn))
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = ppl_bnn.no_such_name


def test_type_checkers_see_every_method():
    assert {
        name: (module, name) for name, module in registry.MODULES.items()
    }.items() <= ppl_bnn._contents().items()


# --- what an import costs, and what it may do without ---------------------------------------------------------


def run_python(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `code` in a fresh interpreter that finds the package under test and nothing of the checkout's folder."""
    where = Path(ppl_bnn.__file__).resolve().parents[1]
    prelude = f"import sys; sys.path.insert(0, {str(where)!r})\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + code],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


HEAVY = ("torch", "jax", "numpyro", "pyro", "pandas", "scipy.stats", "matplotlib", "sklearn", "arviz_base")


def test_importing_the_package_loads_nothing_heavy(tmp_path: Path):
    result = run_python(
        f"import ppl_bnn\nprint([name for name in {HEAVY!r} if name in sys.modules])", tmp_path
    )
    assert (result.stdout.strip(), result.stderr) == ("[]", "")


WITHOUT = """
BLOCKED, HALF, OTHER = {blocked!r}, {half!r}, {other!r}

# What is not installed is not found; a finder that raised would be something else.
class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        return None if name.split(".")[0] in BLOCKED else self.finder.find_spec(name, path, target)

    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import numpy as np
import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods

def model(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [1]), likelihoods.Gaussian(noise))

rng = np.random.default_rng(0)
x = rng.normal(size=(30, 2))
y = x @ np.array([1.0, -2.0]) + 0.1 * rng.normal(size=30)

posterior = bnn.fit(model, x, y, bnn.MAP(ppl=HALF, steps=200))
assert np.allclose(posterior.draws["output.weight"].ravel(), [1.0, -2.0], atol=0.2), posterior.draws
for method in (bnn.SVI(ppl=HALF, steps=20, elbo_draws=10),
               bnn.NUTS(ppl=HALF, draws=4, warmup=4, chains=1, max_tree_depth=3, start=posterior),
               bnn.Laplace(ppl=HALF, start=posterior, optimise=False)):
    fitted = bnn.fit(model, x, y, method)
    assert np.all(np.isfinite(fitted.predict(x[:3]).mean))
fitted.save("kept")
assert np.array_equal(bnn.load("kept", model).predict(x[:3]).mean, fitted.predict(x[:3]).mean)

try:
    bnn.fit(model, x, y, bnn.MAP(ppl=OTHER))
except bnn.errors.MissingFrameworkError as error:
    assert isinstance(error, ImportError)
    print(error)
else:
    raise SystemExit("no MissingFrameworkError")
assert not set(BLOCKED) & {{name.split(".")[0] for name in sys.modules}}
"""


@pytest.mark.parametrize(
    ("half", "other", "blocked", "packages"),
    [
        ("numpyro", "pyro", ("torch", "pyro"), "pyro-ppl and torch"),
        ("pyro", "numpyro", ("jax", "jaxlib", "numpyro", "optax"), "numpyro and jax"),
    ],
)
def test_one_system_works_where_the_other_is_missing(
    half: str, other: str, blocked: tuple[str, ...], packages: str, tmp_path: Path
):
    result = run_python(WITHOUT.format(half=half, other=other, blocked=blocked), tmp_path)
    assert result.returncode == 0, result.stderr
    told = result.stdout.strip().splitlines()[-1]
    # What was expected, what got, what to try.
    assert f"for ppl='{other}'" in told
    assert f"try ppl='{half}' or installing {packages}" in told
