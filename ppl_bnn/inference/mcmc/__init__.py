"""Markov chain and sequential Monte Carlo samplers.

BlackJAX is used in small pieces (a step of an integrator, a proposal, an update of an adaptation), inside the file of
the method that uses them. Its whole loops cannot be interrupted, watched or resumed, and its interfaces change.
"""
