"""Variational inference and its relatives."""
