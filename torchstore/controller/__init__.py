"""The code in the actor that knows all versions of a store."""
