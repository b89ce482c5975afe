"""The script's side of the engine: what it knows about tensors, and how operations become instructions."""
