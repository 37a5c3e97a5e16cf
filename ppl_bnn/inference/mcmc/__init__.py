"""Markov chain and sequential Monte Carlo samplers.

Each method uses BlackJAX in small pieces (an integrator step, a proposal, an adaptation update). Its whole loops cannot
be interrupted, watched or resumed, and its interfaces change.
"""
