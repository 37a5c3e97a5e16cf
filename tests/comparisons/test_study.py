"""What the studies share: their command line, and parts of a run that are kept."""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).parents[2] / "comparisons"


@dataclass(frozen=True)
class Sizes:
    rows: int = 3
    seeds: int = 2
    widths: tuple[int, ...] = (4, 5)


@pytest.fixture
def study(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("study")


def test_a_command_line_has_the_options_that_were_named_and_no_others(
    study: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    parser = study.command_line("What it is.\n\nMore of it.", "seeds", "shared", tiny="two rows")
    assert vars(parser.parse_args([])) == {"tiny": False, "out": None, "seeds": None, "shared": False}
    given = parser.parse_args(["--tiny", "--out", "there", "--seeds", "4", "--shared"])
    assert vars(given) == {"tiny": True, "out": "there", "seeds": 4, "shared": True}
    for wrong in (["--checkpoint", "here"], ["--seeds", "many"]):
        with pytest.raises(SystemExit):
            parser.parse_args(wrong)
    text = parser.format_help()
    assert "What it is." in text
    assert "More of it." not in text
    assert "two rows" in text
    capsys.readouterr()


def test_numbers_that_are_asked_for_take_the_place_of_those_of_the_sizes(study: Any, tmp_path: Path) -> None:
    assert study.Study.begin(Sizes(), "any", True, tmp_path, seeds=None).sizes == Sizes()
    assert study.Study.begin(Sizes(), "any", True, tmp_path, seeds=7).sizes == Sizes(seeds=7)
    with pytest.raises(TypeError, match="splits"):
        study.Study.begin(Sizes(), "any", True, tmp_path, splits=7)


def test_what_is_written_says_when_where_and_with_which_versions(study: Any, tmp_path: Path) -> None:
    found = study.Study(Sizes(), tmp_path)
    found.judge(study.Verdict("claim", "corrected", "numbers"))
    found.write()
    content = json.loads((tmp_path / "results.json").read_text())
    assert content["stamp"]["versions"]["numpy"] == np.__version__
    assert {"date", "cores", "commit", "seconds"} <= set(content["stamp"])
    assert (tmp_path / "verdicts.txt").read_text() == "CORRECTED: claim: numbers\n"


def test_a_study_judges_what_stands_in_its_files(study: Any, tmp_path: Path) -> None:
    """Six digits, an empty cell that is absent, types by column, and lists that are tuples again."""
    seen: list[Any] = []

    def judge(stored: Any) -> list[Any]:
        seen.append(stored)
        return [study.Verdict("claim", "refuted", f"{stored.tables['rows'][0]['value']}")]

    run = study.Study(Sizes(rows=9), tmp_path, numbers={"left": [1, 2]})
    run.tables["rows"] = [
        {"name": "5", "value": 1.0 / 3.0, "good": True, "count": 3, "mixed": 1},
        {"name": "5-5", "value": None, "good": False, "count": 4, "mixed": "x"},
    ]
    run.conclude(judge)
    (stored,) = seen
    assert stored.sizes == Sizes(rows=9)
    assert stored.numbers == {"left": [1, 2]}
    assert stored.tables["rows"] == [
        {"name": "5", "value": 0.333333, "good": True, "count": 3, "mixed": "1"},
        {"name": "5-5", "good": False, "count": 4, "mixed": "x"},
    ]
    content = json.loads((tmp_path / "results.json").read_text())
    assert [each["verdict"] for each in content["verdicts"]] == ["refuted"]
    assert (tmp_path / "verdicts.txt").read_text() == "REFUTED: claim: 0.333333\n"


@pytest.mark.parametrize(
    ("rhat", "ess", "expected"), [(1.009, 401.0, True), (1.011, 1e4, False), (1.0, 399.0, False)]
)
def test_convergence_has_one_limit(study: Any, rhat: float, ess: float, expected: bool) -> None:
    assert study.converged(rhat, ess) == expected


def test_there_is_one_mark_of_what_has_not_converged(study: Any) -> None:
    _, ((axes,),) = study.panels(4.0, 3.0)
    mark = study.mark_unconverged(axes, [0.2, 0.8], [0.5, 0.5])
    handle = study.unconverged_handle()
    assert mark.get_marker() == handle.get_marker() == "x"
    assert f"{study.RHAT}" in handle.get_label()
    assert f"{study.ESS:.0f}" in handle.get_label()
    # It is in no legend unless it is asked for.
    assert axes.get_legend_handles_labels()[1] == []


def test_figures_alone_run_nothing(study: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = study.Study(Sizes(rows=9), tmp_path)
    run.tables["rows"] = [{"value": 1}]
    run.write()
    seen: list[Any] = []
    parser = study.command_line("A study.", "figures", "seeds")
    monkeypatch.setattr("sys.argv", ["study", "--figures", "--out", str(tmp_path)])
    study.run(parser, None, "any", Sizes(), seen.append)
    assert [(each.sizes, each.tables, each.out) for each in seen] == [
        (Sizes(rows=9), {"rows": [{"value": 1}]}, tmp_path)
    ]
    given: list[Any] = []
    monkeypatch.setattr("sys.argv", ["study", "--seeds", "3"])
    study.run(parser, lambda **options: given.append(options), "any", Sizes(), seen.append)
    assert given == [{"tiny": False, "out": None, "seeds": 3}]
    assert len(seen) == 1


def test_a_part_is_computed_once_and_comes_back_bit_by_bit(study: Any, tmp_path: Path) -> None:
    computed: list[int] = []
    part = {
        "rows": [{"seed": 0, "score": 0.1 + 0.2, "name": "one"}],
        "probabilities": np.random.default_rng(0).normal(size=(2, 3)),
        "hidden.weight": np.arange(4, dtype=np.float32),
    }

    def compute() -> dict[str, Any]:
        computed.append(1)
        return dict(part)

    for folder in (str(tmp_path / "kept"), tmp_path / "kept"):
        found = study.kept(folder, "T_0.03", Sizes(), compute)
        assert set(found) == set(part)
        assert found["rows"] == part["rows"]
        for name in ("probabilities", "hidden.weight"):
            np.testing.assert_array_equal(found[name], part[name])
            assert found[name].dtype == part[name].dtype
    assert len(computed) == 1
    study.kept(None, "T_0.03", Sizes(), compute)
    assert len(computed) == 2


def test_more_seeds_go_on_and_another_size_is_refused(study: Any, tmp_path: Path) -> None:
    def compute() -> dict[str, Any]:
        return {"value": 1}

    def never() -> dict[str, Any]:
        raise AssertionError("computed again")

    study.kept(tmp_path, "one", Sizes(), compute)
    assert study.kept(tmp_path, "one", Sizes(seeds=9), never) == {"value": 1}
    with pytest.raises(ValueError, match="another size"):
        study.kept(tmp_path, "one", Sizes(widths=(4, 6)), never)
    # As an earlier version left it: seeds among the sizes, and no word of arrays.
    old = {"sizes": {"rows": 3, "seeds": 1, "widths": [4, 5]}, "part": {"value": 2}}
    (tmp_path / "two.json").write_text(json.dumps(old))
    assert study.kept(tmp_path, "two", Sizes(), never) == {"value": 2}


def test_of_a_part_that_failed_nothing_is_left(study: Any, tmp_path: Path) -> None:
    def fails() -> dict[str, Any]:
        raise RuntimeError("half way")

    with pytest.raises(RuntimeError, match="half way"):
        study.kept(tmp_path, "one", Sizes(), fails)
    # Nor of one that has what JSON cannot hold.
    with pytest.raises(TypeError):
        study.kept(tmp_path, "one", Sizes(), lambda: {"rows": [np.zeros(2)]})
    assert study.kept(tmp_path, "one", Sizes(), lambda: {"value": 3}) == {"value": 3}
