"""The rules of the house: who imports whom, what an import costs, and that either system may be missing.

The order is read from the list in ARCHITECTURE.md, so that the document is what is enforced.
"""

from __future__ import annotations

import ast
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

import ppl_bnn

ROOT = Path(__file__).resolve().parents[1]
FRAMEWORKS = {"torch", "jax", "jaxlib", "numpyro", "pyro", "optax", "blackjax"}
# What a method may use of its own room; everything else in that room is another method.
SHARED_BY_METHODS = {
    "autoguide",
    "autolaplace",
    "chains",
    "checkpoint",
    "conditioning",
    "covariance",
    "curvature",
    "divergence",
    "drawn",
    "effort",
    "evidence",
    "families",
    "flat_vector",
    "computed_weights",
    "flows",
    "guides",
    "hamiltonian",
    "hyperparameters",
    "identity",
    "jacobian",
    "kronecker",
    "laplace_gaussian",
    "linearised",
    "many_chains",
    "mean_field",
    "method",
    "optimise",
    "precision",
    "pretrained",
    "prior_curvature",
    "sampler",
    "search",
    "stepping",
    "stochastic",
    "stochastic_gradient",
    "stream",
    "until",
    "variational",
    "warm_start",
    "whitening",
}

# (importer, imported) -> why this import may run up the list; each finds the module by name when it is needed.
EXCEPTIONS = {
    (
        "ppl_bnn.cli",
        "ppl_bnn.cli.commands",
    ): "the entry point of the installed script is a name of the package",
    (
        "ppl_bnn.posterior",
        "ppl_bnn.storage",
    ): "save: storage knows all approximations, a posterior none of them",
    (
        "ppl_bnn.comparison",
        "ppl_bnn.reporting.summary",
    ): "a comparison hands out its summary; reporting reads comparisons",
    (
        "ppl_bnn.comparison",
        "ppl_bnn.reporting.figures",
    ): "a comparison hands out its figure; reporting reads comparisons",
    (
        "ppl_bnn.inference.ensemble",
        "ppl_bnn.storage",
    ): "an ensemble may be made of any approximation; storage knows all by name",
    ("ppl_bnn", "ppl_bnn.grid"): "the table of contents has the grid, which finds methods by that table",
    ("ppl_bnn", "ppl_bnn.advice"): "the table of contents has what finds methods by that table",
    ("ppl_bnn.grid", "ppl_bnn.grid_file"): "Grid.from_toml: what reads a file makes grids",
    ("ppl_bnn.ppl.protocol", "ppl_bnn.ppl.<name>"): "system(name): either of the two may be missing",
}
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


def listed_modules(text: str) -> list[list[str]]:
    """The lines of the list of the house, in order: the modules named on each. A folder stands for its `__init__`."""
    block = text.split("## The house", 1)[1].split("```")[1]
    lines, inside = [], False
    folders: list[tuple[int, str]] = []
    for line in block.splitlines():
        depth = len(line) - len(line.lstrip())
        words = line.split()
        if not words:
            continue
        if depth == 0:
            inside = words[0] == "ppl_bnn/"
            folders = [(0, "ppl_bnn")]
            continue
        if not inside:
            continue
        while folders[-1][0] >= depth:
            folders.pop()
        if words[0].endswith("/"):
            folders.append((depth, f"{folders[-1][1]}.{words[0][:-1]}"))
            lines.append([folders[-1][1]])
            continue
        names = []
        for word in words:
            if not re.fullmatch(r"\w+\.py", word):
                break
            names.append(word[:-3])
        assert names, f"ARCHITECTURE.md: {line!r} names neither a folder nor a file"
        parent = folders[-1][1]
        lines.append([parent if name == "__init__" else f"{parent}.{name}" for name in names])
    return lines


def modules_in_tree() -> dict[str, Path]:
    """Module -> file, for everything in the checkout's package."""
    found = {}
    for file in sorted((ROOT / "ppl_bnn").rglob("*.py")):
        parts = file.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(source: str, module: str, known: set[str]) -> Iterator[tuple[str, bool]]:
    """(what is imported, whether at import time) for every import in a source, those by name included.

    Modules of the package are named whole (`ppl_bnn.errors`), as is what `from` takes from them if it is a module.
    """
    tree = ast.parse(source)
    late: set[ast.AST] = set()
    for node in ast.walk(tree):
        only_types = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda) or only_types:
            late.update(ast.walk(node))
    for node in ast.walk(tree):
        early = node not in late
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, early
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = module.split(".")[: -node.level]
                base = ".".join([*package, base] if base else package)
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                yield (whole if whole in known else base), early
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if name in known and name != "ppl_bnn":
                yield name, False
        elif isinstance(node, ast.JoinedStr):
            name = "".join(
                str(part.value) if isinstance(part, ast.Constant) else f"<{ast.unparse(part.value)}>"
                for part in node.values
                if isinstance(part, ast.Constant | ast.FormattedValue)
            )
            if re.fullmatch(r"ppl_bnn(\.[\w<>]+)+", name):
                yield name, False


LINES = listed_modules((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"))
PLACE = {name: place for place, line in enumerate(LINES) for name in line}
TREE = modules_in_tree()
IMPORTS = {
    name: list(imports(file.read_text(encoding="utf-8"), name, set(TREE))) for name, file in TREE.items()
}


def _own(found: str) -> bool:
    return found == "ppl_bnn" or found.startswith("ppl_bnn.")


def violations(module: str, found: list[tuple[str, bool]], place: dict[str, int]) -> list[str]:
    """Imports of `module` that do not stand above it in the list."""
    wrong = []
    for name, _ in found:
        if not _own(name) or name == module or (module, name) in EXCEPTIONS:
            continue
        if name not in place:
            wrong.append(f"{module} imports {name}, which the list does not have")
        elif place[name] >= place[module]:
            wrong.append(f"{module} imports {name}, which does not stand above it")
    return wrong


# --- the order ----------------------------------------------------------------------------------------------


def test_the_list_names_every_module_once():
    named = [name for line in LINES for name in line]
    assert len(named) == len(set(named))
    # A folder of the list stands for its __init__.py.
    assert set(TREE) - set(named) == set(), "modules that ARCHITECTURE.md does not list"
    assert set(named) - set(TREE) == set(), "ARCHITECTURE.md lists modules that are not there"


@pytest.mark.parametrize("module", sorted(TREE))
def test_a_module_imports_only_what_stands_above_it(module: str):
    assert violations(module, IMPORTS[module], PLACE) == []


def test_every_exception_is_still_needed():
    used = {(module, name) for module, found in IMPORTS.items() for name, _ in found}
    assert set(EXCEPTIONS) <= used


def test_a_package_imports_nothing_at_its_top():
    # An __init__ that imported its files would make every file of the room import all others.
    for module, file in TREE.items():
        if file.name == "__init__.py" and module != "ppl_bnn":
            assert [name for name, early in IMPORTS[module] if early] == [], module


def test_the_reader_sees_every_kind_of_import():
    known = {"ppl_bnn", "ppl_bnn.errors", "ppl_bnn.language", "ppl_bnn.language.ops", "ppl_bnn.storage"}
    source = (
        "from typing import TYPE_CHECKING\n"
        "import torch.nn\n"
        "from .errors import InputError\n"
        "from ppl_bnn.language import ops\n"
        "from ppl_bnn import __version__\n"
        "class A:\n    import jax\n"
        "try:\n    import pyro\nexcept ImportError:\n    pass\n"
        "if TYPE_CHECKING:\n    import pandas\n"
        "def f():\n    from ppl_bnn.errors import message\n    return __import__('ppl_bnn.storage')\n"
        "TABLE = {'a': 'ppl_bnn.language.ops:tanh'}\n"
        "g = lambda name: f'ppl_bnn.ppl.{name}'\n"
    )
    found = list(imports(source, "ppl_bnn.posterior", known))
    assert sorted(found) == sorted(
        [
            ("typing", True),
            ("torch.nn", True),
            ("ppl_bnn.errors", True),
            ("ppl_bnn.language.ops", True),
            ("ppl_bnn", True),
            ("jax", True),
            ("pyro", True),
            ("pandas", False),
            ("ppl_bnn.errors", False),
            ("ppl_bnn.storage", False),
            ("ppl_bnn.language.ops", False),
            ("ppl_bnn.ppl.<name>", False),
        ]
    )


def test_an_import_from_below_is_found():
    place = {"ppl_bnn.errors": 0, "ppl_bnn.posterior": 1, "ppl_bnn.data": 2}
    assert violations("ppl_bnn.posterior", [("ppl_bnn.errors", True)], place) == []
    assert len(violations("ppl_bnn.posterior", [("ppl_bnn.data", False)], place)) == 1
    assert len(violations("ppl_bnn.posterior", [("ppl_bnn.elsewhere", True)], place)) == 1


# --- the rooms ----------------------------------------------------------------------------------------------


def test_a_method_imports_no_other_method():
    room = {name for name in TREE if name.startswith("ppl_bnn.inference.")}
    shared = {f"ppl_bnn.inference.{name}" for name in SHARED_BY_METHODS}
    for module in room - shared:
        others = {name for name, _ in IMPORTS[module]} & room - shared - {module}
        assert others == set(), module


def test_the_language_imports_no_framework():
    for module in TREE:
        if module.startswith("ppl_bnn.language"):
            roots = {name.split(".")[0] for name, _ in IMPORTS[module]}
            assert roots & FRAMEWORKS == set(), module


def test_only_the_two_systems_import_a_framework_at_their_top():
    importers = {
        module
        for module, found in IMPORTS.items()
        if any(early and name.split(".")[0] in FRAMEWORKS for name, early in found)
    }
    assert importers == {"ppl_bnn.ppl.numpyro", "ppl_bnn.ppl.pyro", "ppl_bnn.ppl.pyro_session"}


def globals_of_all_threads(source: str) -> list[str]:
    """Calls that change something for all threads of a process."""
    refused = {"catch_warnings", "simplefilter", "filterwarnings", "set_default_dtype", "set_default_device"}
    refused |= {"clear_param_store", "set_rng_seed"}
    calls = (node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = (getattr(call, "attr", getattr(call, "id", "")) for call in calls)
    return sorted(name for name in names if name in refused)


def test_no_module_changes_what_other_threads_see():
    # The command line is a program of its own; the entry that one filter makes is taken out at once.
    allowed = {
        "ppl_bnn.cli.console": ["catch_warnings"],
        "ppl_bnn.quiet": ["simplefilter"],
    }
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
        roots = {name.split(".")[0] for name, _ in IMPORTS[f"ppl_bnn.ppl.{module}"]}
        assert roots & foreign == set()


def test_only_export_imports_arviz_base():
    importers = {
        module
        for module, found in IMPORTS.items()
        if any(name.split(".")[0] in ("arviz_base", "arviz") for name, _ in found)
    }
    assert importers == {"ppl_bnn.export"}


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
            if _own(name) or root in sys.stdlib_module_names:
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
        for name, module in {**ppl_bnn._CONTENTS, **ppl_bnn._MODULES}.items()
        if module.startswith("ppl_bnn.language.")
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


def test_type_checkers_see_the_same_table_of_contents():
    tree = ast.parse(TREE["ppl_bnn"].read_text(encoding="utf-8"))
    block = next(
        node for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
    )
    seen = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            whole = f"{node.module}.{alias.name}"
            seen[alias.asname or alias.name] = whole if whole in TREE else node.module
    assert seen == {**ppl_bnn._CONTENTS, **ppl_bnn._MODULES}


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
    # What was expected, what came, what to try.
    assert f"for ppl='{other}'" in told
    assert f"try ppl='{half}' or installing {packages}" in told
