"""The frameworks whose networks can be layers: one file for each. No file imports a framework at its top."""
