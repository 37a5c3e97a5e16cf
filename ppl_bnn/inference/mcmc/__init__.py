"""Markov chain and sequential Monte Carlo samplers."""
