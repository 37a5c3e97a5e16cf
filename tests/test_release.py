"""What a release has in it: wheel and sdist, and a citation, a recipe and workflows that agree with pyproject.toml."""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

import ppl_bnn as bnn
from ppl_bnn import zoo

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MEGABYTE = 10**6
# A recipe's name of a package, where it has another one than the requirement.
RENAMED = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    # The files of git alone, so that nothing else in the checkout is packed.
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listed.returncode:
        pytest.skip("a checkout by git is needed to tell its files from others")
    source = tmp_path_factory.mktemp("source")
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return folder


@pytest.mark.slow
def test_the_wheel_has_the_package_the_zoo_and_the_studies(built: Path):
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert wheel.stat().st_size < 2 * MEGABYTE
    assert {"ppl_bnn/py.typed", "ppl_bnn/__init__.py", "ppl_bnn/_studies/study.py"} <= names
    assert {f"ppl_bnn/_zoo/{name}.py" for name in zoo.models()} <= names
    assert any(name.endswith("dist-info/licenses/LICENSE") for name in names)
    outside = [
        name for name in names if not name.startswith(("ppl_bnn/", f"ppl_bnn-{bnn.__version__}.dist-info/"))
    ]
    assert outside == []
    assert not [
        name
        for name in names
        if "/results/" in name or "/gallery/" in name or "/references/regression" in name
    ]


@pytest.mark.slow
def test_the_sdist_has_what_the_tests_and_the_site_need(built: Path):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as content:
        names = {name.split("/", 1)[1] for name in content.getnames() if "/" in name}
    assert sdist.stat().st_size < 15 * MEGABYTE
    wanted = [
        "README.md",
        "CITATION.cff",
        "docs/conf.py",
        "tests/problems.py",
        "models/methods.toml",
        ".ci/run",
    ]
    assert set(wanted) <= names
    assert not [name for name in names if name.startswith((".venv", "site/", "docs/made"))]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert citation["version"] == bnn.__version__
    assert citation["license"] == PROJECT["license"]
    assert {"message", "title", "authors"} <= set(citation)


def test_the_recipe_has_the_dependencies_and_their_bounds():
    text = (ROOT / ".conda" / "meta.yaml").read_text(encoding="utf-8")
    assert f'version = "{bnn.__version__}"' in text
    run = text.split("  run:\n", 1)[1].split("\n\n", 1)[0]
    shown = {line.strip("- ").split(" ")[0]: line.strip("- ").partition(" ")[2] for line in run.splitlines()}
    for requirement in PROJECT["dependencies"]:
        match = re.match(r"([\w.-]+)(?:\[\w+\])?(.*)", requirement.split(";")[0].strip())
        assert match is not None
        name = RENAMED.get(match[1], match[1])
        assert shown.pop(name).replace(" ", "") == match[2].replace(" ", ""), requirement
    assert set(shown) == {"python", "h5py"}


def test_the_guide_names_every_extra():
    text = (ROOT / "docs" / "guide" / "install.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    assert sorted(re.findall(r"`([\w-]+)`", " ".join(rows))) == sorted(PROJECT["optional-dependencies"])


def test_workflows_and_forms_are_valid_and_test_each_python_that_is_declared():
    files = [*(ROOT / ".github").rglob("*.yml"), ROOT / ".pre-commit-config.yaml"]
    assert len(files) >= 7
    read = {file.name: yaml.safe_load(file.read_text(encoding="utf-8")) for file in files}
    tests = read["tests.yml"]["jobs"]
    setup = next(step for step in tests["checks"]["steps"] if "setup-python" in step.get("uses", ""))
    tested = {setup["with"]["python-version"], *tests["python"]["strategy"]["matrix"]["python"]}
    declared = {each.rpartition(" ")[2] for each in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", each)}
    assert tested == declared
    for name in ("tests.yml", "docs.yml", "release.yml"):
        for job in read[name]["jobs"].values():
            commands = [step["run"] for step in job["steps"] if "run" in step]
            for command in commands:
                script = command.split()[0]
                assert not script.startswith(".ci/") or (ROOT / script).is_file()
