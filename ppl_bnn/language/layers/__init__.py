"""Layers and networks of them."""
