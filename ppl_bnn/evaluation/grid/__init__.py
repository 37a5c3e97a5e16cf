"""Models on data sets by methods, over splits and seeds."""
