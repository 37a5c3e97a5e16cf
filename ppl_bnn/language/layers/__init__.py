"""Layers and networks."""
