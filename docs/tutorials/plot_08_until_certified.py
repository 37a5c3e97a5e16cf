"""
Sample until certified
======================

How many draws are enough? Say what has to hold, and how long it may take.
"""

# %%
# ``until`` is a rule over R-hat and the effective sample size in function space; ``budget`` the seconds after which the
# run ends in any case. ``draws`` is how often the rule is checked.
import ppl_bnn as bnn

table = bnn.data.load("diabetes")
train, test = table.split(seed=0)
x, y, x_new = table.x[train], table.y[train], table.x[test]
model = bnn.zoo.load("linear_regression")
method = bnn.NUTS(warmup=300, draws=100, until="rhat<1.01, ess>800", budget=60)
posterior = bnn.fit(model, x, y, method, standardise=True)
print(posterior.info.figures)

# %%
# What the rule saw at each check:
for name, values in posterior.info.history.items():
    if name.startswith("look"):
        print(name.removeprefix("look_"), values.round(3))

# %%
# The rule looks at training rows. The test rows are judged by ``diagnose``, and more draws need no second warm-up.
print(bnn.diagnose(posterior, x=x_new))
longer = bnn.extend(posterior, draws=200)
print(longer.shape, "chains and draws")
