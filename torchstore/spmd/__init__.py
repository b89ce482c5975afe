"""A store for the ranks of a launcher, which all make the same calls. The names are those of Meta's module."""

from skipper.torchstore.spmd.rank_store import initialize, initialize_spmd
from skipper.torchstore.spmd.ranks import SPMDEnv

__all__ = ["SPMDEnv", "initialize", "initialize_spmd"]
