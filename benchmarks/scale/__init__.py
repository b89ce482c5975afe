"""Casting to many: real processes as far as memory allows, a model beyond; ``skipper scale``."""
