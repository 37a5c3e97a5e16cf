"""What y is given the network's output: one file for each kind of target. `language.likelihoods` lists them."""
