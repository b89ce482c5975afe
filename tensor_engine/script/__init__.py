"""The script's side of the engine: what it knows of tensors, and how operations become instructions."""
