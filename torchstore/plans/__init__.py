"""Plans of what an engine's own `load_weights` does, recorded once and replayed by the store."""
