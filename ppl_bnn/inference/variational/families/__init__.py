"""Families of distributions over blocks of sites."""
