"""Single-controller distributed tensors on process meshes.

This floor is laid but not furnished: the package exists so that its name and its place in the house
(above `control` and `dataplane`, beside `torchstore`) are fixed. `docs/architecture.md` says what it will hold.
"""

__all__: list[str] = []
