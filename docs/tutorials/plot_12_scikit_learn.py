"""
In a scikit-learn pipeline
==========================

``BNNRegressor`` and ``BNNClassifier`` are estimators like any other: pipelines, cross-validation and search work.
"""

# %%
import numpy as np
from sklearn.compose import make_column_transformer
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ppl_bnn as bnn
from ppl_bnn.estimators import BNNClassifier, BNNRegressor

table = bnn.data.load("diabetes")
scale = make_column_transformer((StandardScaler(), list(range(table.x.shape[1]))))
pipeline = make_pipeline(scale, BNNRegressor("linear_regression", method="laplace"))
print(cross_val_score(pipeline, table.x, table.y, cv=2).round(3))

# %%
# The method is a hyper-parameter like any other.
search = GridSearchCV(BNNRegressor("linear_regression"), {"method": ["map", bnn.Laplace()]}, cv=2)
search.fit(table.x, table.y)
print(search.best_params_)

# %%
# What scikit-learn has no word for: standard deviations, intervals, draws, and the posterior itself.
best = search.best_estimator_
mean, sd = best.predict(table.x[:3], return_std=True)
print(np.round(mean, 1), np.round(sd, 1))
print(best.predict_interval(table.x[:3]))
print(best.posterior_)

# %%
# Classes:
iris = bnn.data.load("iris")
classifier = BNNClassifier("classification_mlp", method=bnn.Laplace())
print(classifier.fit(iris.x, iris.y).predict_proba(iris.x[:2]).round(3))

# %%
# ``partial_fit`` takes rows that arrive in parts: the posterior becomes the prior of the next fit. It needs
# ``standardise=False``, because rows to come do not change the units.
