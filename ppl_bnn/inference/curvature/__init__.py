"""Curvature of the posterior and Gaussians that are made of it."""
