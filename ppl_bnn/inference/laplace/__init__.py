"""Laplace approximations."""
