"""
Laplace and the evidence
========================

A Gaussian at a mode gives a posterior in seconds, and an estimate of the evidence that chooses prior scales without a
validation set.
"""

# %%
# The default is a Gaussian over all weights with the full Gauss-Newton matrix.
import matplotlib.pyplot as plt
import numpy as np

import ppl_bnn as bnn

table = bnn.data.load("diabetes")
train, test = table.split(seed=0)
x, y, x_new, y_new = table.x[train], table.y[train], table.x[test], table.y[test]
model = bnn.zoo.load("regression_mlp", width=10)
posterior = bnn.fit(model, x, y, bnn.Laplace(), standardise=True)
print(f"log evidence {posterior.log_evidence:.1f} nats")

# %%
# Structures trade memory for accuracy. All start from the mode that was found above.
scores = {}
for structure in ("full", "kron", "diag"):
    method = bnn.Laplace(structure=structure, start=posterior, optimise=False)
    fitted = bnn.fit(model, x, y, method, standardise=True)
    prediction = fitted.predict(x_new)
    scores[structure] = prediction.log_prob(y_new).mean()
    print(
        f"{structure:5} log score {scores[structure]:.3f}, mean sd of f {np.sqrt(prediction.epistemic).mean():.1f}"
    )

# %%
# The log score of the mode alone, for comparison.
mode = bnn.fit(model, x, y, bnn.MAP(start=posterior), standardise=True)
print(f"mode  log score {mode.predict(x_new).log_prob(y_new).mean():.3f}")

# %%
# The evidence as a function of the prior scale, and the scale that ``tune="global"`` finds.
sigmas = [0.2, 1.0, 3.0]
models = [bnn.zoo.load("regression_mlp", width=10, sigma=sigma) for sigma in sigmas]
method = bnn.Laplace(start=posterior)
evidence = [bnn.fit(each, x, y, method, standardise=True).log_evidence for each in models]
tuned = bnn.fit(model, x, y, bnn.Laplace(tune="global", start=posterior), standardise=True)
figure, ax = plt.subplots(figsize=(5, 3), layout="constrained")
ax.semilogx(sigmas, evidence, "o-")
ax.set_xticks(sigmas, ["0.2", "1", "3"])
ax.minorticks_off()
ax.axhline(tuned.log_evidence, color="grey", linestyle=":", label="tuned, one precision for all")
ax.set(xlabel="prior scale sigma", ylabel="log evidence (nats)")
ax.legend()
plt.show()
print(f"effective parameters: {tuned.info.figures['effective_parameters']:.1f} of 122")
