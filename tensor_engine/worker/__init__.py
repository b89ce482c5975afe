"""The workers' side of the engine: memory, and torch itself."""
