"""The command ``skipper``: one word says which tool, the tool reads the rest."""
