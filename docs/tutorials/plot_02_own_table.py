"""
Your own table, from CSV to report
==================================

Read a CSV file, fit it by two methods, and write a page that says which one to use.
"""

# %%
# Any CSV file with a header line will do. This one is written here, so that the tutorial runs anywhere.
import csv
import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

folder = Path(tempfile.mkdtemp())
rng = np.random.default_rng(0)
with (folder / "patients.csv").open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["age", "group", "dose", "response"])
    for _ in range(120):
        age, dose, group = rng.uniform(20, 80), rng.uniform(0, 2), rng.choice(["a", "b"])
        response = 10 + 3 * np.tanh(2 * dose - 2) * (1.5 if group == "b" else 0.5) - 0.05 * age + rng.normal()
        writer.writerow([f"{age:.1f}", group, f"{dose:.2f}", f"{response:.2f}"])

# %%
# ``read_csv`` says how it read each column. Words become one column for each value. A missing value is refused by name.
table = bnn.data.read_csv(folder / "patients.csv", target="response")
print(table)
print(table.reading)

# %%
# A fifth of the rows is held out. ``standardise=True`` fits in units in which the prior scales of the zoo make sense;
# predictions come back in the units of the file.
train, test = table.split(seed=0)
result = bnn.compare(
    bnn.zoo.load("regression_mlp", width=5),
    (table.x[train], table.y[train]),
    (table.x[test], table.y[test]),
    {"nuts": bnn.NUTS(chains=2, warmup=300, draws=600), "svi": bnn.SVI(steps=3000, learning_rate=0.02)},
    reference="nuts",
    standardise=True,
    feature_names=table.feature_names,
    target_name=table.target_name,
)
result.table[["log_score", "rmse", "coverage_90", "width_90", "converged"]].round(3)

# %%
# What the network found: the mean response over the dose and over age, averaged over the other columns.
figure, axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for ax, feature in zip(axes, ("dose", "age"), strict=True):
    bnn.plot.predictive(result.posteriors["nuts"], feature=feature, ax=ax)
plt.show()

# %%
# The report is one file for a browser: a verdict in words, the table, pictures, settings.
page = bnn.report(result, folder / "report.html")
print(f"{page.stat().st_size / 1e6:.1f} MB")

# %%
# The command line does all of this:
#
# .. code-block:: bash
#
#    ppl-bnn compare --data patients.csv --target response --report
