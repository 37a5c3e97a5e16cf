"""The frameworks whose networks can be layers: one file for each. Nobody here imports a framework at its top."""
