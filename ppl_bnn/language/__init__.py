"""What a model is written in. Nothing here imports a framework."""
