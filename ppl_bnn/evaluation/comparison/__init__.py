"""Several methods on one model and one data set."""
