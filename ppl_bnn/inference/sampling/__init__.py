"""What all Markov chain samplers share."""
