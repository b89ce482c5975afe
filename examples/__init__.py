"""Programs that show Skipper at work; each is run as ``python -m examples.NAME``."""
