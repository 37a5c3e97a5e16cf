"""The study of adapters: its passages, what is made of its rows, and a tiny run."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from comparisons.claims import REFUTED, REPRODUCED, UNDECIDED

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).parents[2] / "comparisons"


@pytest.fixture(scope="module")
def script() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(FOLDER))
        yield importlib.import_module("adapters")


def rows(script: Any, gain: float, distance: float, missing: int = 0) -> list[dict[str, Any]]:
    """Methods that are better than LoRA by a gain in each score; heads at a distance, on some tasks without NUTS."""
    found = []
    for seed in range(10):
        small = 1e-4 * (seed % 3)
        for name in (script.LORA, *script.KEYS):
            own = 0.0 if name == script.LORA else gain + small
            row = {"seed": seed, "part": "adapters", "method": name}
            found.append(row | {"log_score": -1.0 + own, "ece": 0.1 - own, "auroc": 0.7 + own})
        for name in (script.NUTS, *script.HEADS):
            row = {"seed": seed, "part": "head", "method": name, "converged": seed >= missing}
            found.append(row | {"distance": distance + small})
    return found


def outcomes(script: Any, found: list[dict[str, Any]]) -> dict[str, str]:
    study = script.Study(script.FULL, Path("."), {"scores": found})
    return {each.key: each.verdict for each in script.judge(study)}


def test_each_claim_is_decided_on_both_sides_of_its_bound(script: Any) -> None:
    assert set(outcomes(script, rows(script, 0.001, 0.019)).values()) == {REPRODUCED}
    assert set(outcomes(script, rows(script, -0.001, 0.021)).values()) == {REFUTED}


def test_tasks_without_a_reference_decide_nothing(script: Any) -> None:
    found = outcomes(script, rows(script, 0.001, 0.019, missing=2))
    assert {found[f"distance-{key}"] for key in script.HEADS.values()} == {UNDECIDED}
    assert found["log-score-ivon"] == REPRODUCED


def test_no_module_is_in_two_tasks_and_no_passage_is_used_twice(script: Any) -> None:
    modules = [name for task in (script.BODY, *script.TASKS, script.PILOT) for name in task]
    assert len(set(modules)) == len(modules)
    sizes = script.FULL
    for task in script.TASKS:
        x, y = script.passages(task, sizes.train + sizes.test, sizes)
        assert np.bincount(y).tolist() == [sizes.train + sizes.test] * script.CLASSES
        assert x.shape[1] == sizes.words
        assert set(np.unique(x)) <= set(range(1, sizes.vocabulary))
        assert len(np.unique(x, axis=0)) > 0.97 * len(x)


def test_a_tiny_run_writes_everything(script: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    study = script.main(tiny=True, out=tmp_path, checkpoint=tmp_path / "kept")
    names = {"scores.csv", "gains.png", "results.json", "verdicts.txt"}
    assert names <= {path.name for path in tmp_path.iterdir()}
    methods = [*script.methods(script.TINY), *script.heads(script.TINY)]
    assert [row["method"] for row in study.tables["scores"]] == 2 * methods
    # The same features, so that the distance of half the draws to the other half is that of one posterior.
    distances = [row["distance"] for row in study.tables["scores"] if "distance" in row]
    assert all(0.0 <= each <= 1.0 for each in distances)
    again = script.main(tiny=True, out=tmp_path / "again", checkpoint=tmp_path / "kept")
    assert again.tables == study.tables
    stored = json.loads((tmp_path / "results.json").read_text())
    assert len(stored["verdicts"]) == 15


def test_the_features_are_what_the_head_sees(script: Any) -> None:
    """The logits of a network are its head on them."""
    pytest.importorskip("peft")
    import torch

    import ppl_bnn as bnn

    sizes = script.TINY
    own = script.adapted(script.body(sizes), sizes, 0)
    x, y = script.passages(script.PILOT, 4, sizes)
    posterior = bnn.fit(script.model_of(script.layer_of(own)), x, y, script.methods(sizes)[script.LORA])
    (h,) = script.features(own, posterior, x)
    site = "net.network.base_model.model.classifier.modules_to_save.default."
    weight, bias = (posterior.draws[site + name][0, 0] for name in ("weight", "bias"))
    logits = h @ weight.T + bias
    expected = np.exp(logits - logits.max(1, keepdims=True))
    np.testing.assert_allclose(
        posterior.predict(x).probabilities, expected / expected.sum(1, keepdims=True), rtol=1e-4
    )
    assert isinstance(own, torch.nn.Module)
