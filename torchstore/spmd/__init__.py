"""A store for the ranks of a launcher, which all make the same calls."""
