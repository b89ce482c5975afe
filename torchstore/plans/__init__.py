"""Plans that record once what an engine's own `load_weights` does, and that the store replays."""
