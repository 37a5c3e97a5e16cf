"""Variational inference and related methods."""
