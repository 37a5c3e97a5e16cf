"""Code that all Markov chain samplers share."""
