"""The parts that all Markov chain samplers share."""
