"""Several fits as one posterior."""
