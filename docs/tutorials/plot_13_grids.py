"""
Many tables, splits and a cluster
=================================

A grid is models by data by methods by splits by seeds. Each cell is computed once, and an interrupted grid goes on.
"""

# %%
# One model, one table, two methods, two splits. ``"local"``, the default engine, uses processes;
# ``"dask://HOST:PORT"`` and ``"ray://HOST:PORT"`` a cluster.
import tempfile
from pathlib import Path

import ppl_bnn as bnn

folder = Path(tempfile.mkdtemp()) / "grid"
grid = bnn.Grid(
    models=["linear_regression"],
    data=["diabetes"],
    methods={"laplace": bnn.Laplace(), "map": bnn.MAP()},
    splits="random:2@0.9",
    reference="laplace",
)
print(grid)
result = grid.run(folder, engine="sequential")

# %%
# Scores are means over splits. Differences are paired over splits, and their standard errors corrected for the
# training rows that splits share.
result.table()[["log_score", "log_score_se", "rmse", "run_seconds"]].round(3)

# %%
# A second run finds every cell on disk and computes nothing.
again = grid.run(folder, engine="sequential")
print(len(again.cells), "cells")

# %%
# The same grid as a file, for ``ppl-bnn compare --grid uci.toml --jobs 4``:
#
# .. code-block:: toml
#
#    models = ["linear_regression"]
#    data = ["diabetes"]
#    splits = "random:2@0.9"
#    reference = "laplace"
#
#    [methods.laplace]
#    [methods.map]
