"""What an editor knows of the public calls: pyright over a file of a user's code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

USER = """
import numpy as np
import ppl_bnn as bnn
from ppl_bnn import dist, likelihoods, priors
from ppl_bnn.estimators import BNNRegressor

def model(x, y=None):
    noise = bnn.sample("noise", dist.HalfNormal(1.0))
    bnn.observe(y, bnn.mlp(x, [10, 1], prior=priors.Normal(0.0, "fan_in")), likelihoods.Gaussian(noise))

table = bnn.data.load("diabetes")
x, y = table.x, table.y
posterior = bnn.fit(model, x, y, bnn.NUTS(draws=10), seed=0)
prediction = posterior.predict(x)
result = bnn.compare(model, (x, y), (x, y), {"map": bnn.MAP()})
grid = bnn.Grid(models=["linear_regression"], data=["diabetes"], methods=["map"])
"""
ARRAY = "ndarray[tuple[Any, ...], dtype[Any]]"
REVEALED = {
    "table": "Table",
    "table.split(seed=0)": "tuple[array, array]",
    "bnn.NUTS()": "NUTS",
    "posterior": "Posterior",
    "posterior.info": "FitInfo",
    "posterior.draws": "dict[str, array]",
    "prediction": "Prediction",
    "prediction.mean": "array",
    "prediction.std": "array",
    "prediction.interval(0.9)": "tuple[array, array]",
    "prediction.log_prob(y)": "array",
    "posterior.save('kept')": "Path",
    "bnn.load('kept', model)": "Posterior",
    "bnn.extend(posterior, 10)": "Posterior",
    "bnn.diagnose(posterior)": "Diagnosis",
    "bnn.plot.trace(posterior)": "Axes",
    "result": "Comparison",
    "result.summary()": "str",
    "result.table": "DataFrame",
    "grid": "Grid",
    "grid.run('folder')": "GridResult",
    "bnn.zoo.load('regression_mlp')": "(...) -> Any",
    "BNNRegressor('linear_regression')": "BNNRegressor",
}


@pytest.mark.slow
def test_an_editor_knows_what_the_public_calls_return(tmp_path: Path) -> None:
    pytest.importorskip("pyright", reason="pyright comes with the extra 'dev'")
    file = tmp_path / "user.py"
    file.write_text(USER + "".join(f"reveal_type({call})\n" for call in REVEALED))
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "standard"}))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, str(file)]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    said = json.loads(ended.stdout)["generalDiagnostics"]
    assert [each["message"] for each in said if each["severity"] == "error"] == []
    types = [each["message"].partition(' is "')[2] for each in said if each["severity"] == "information"]
    revealed = [each.removesuffix('"').replace(ARRAY, "array") for each in types]
    assert dict(zip(REVEALED, revealed, strict=True)) == REVEALED
