"""Actors in Python, called from JavaScript over the plain protobuf service of an actor server."""
