"""Checkpoints in memory by `torch.distributed.checkpoint`: its planner decides, the store holds the bytes.

```python
import torch.distributed.checkpoint as dcp
from skipper.torchstore.dcp import StoreReader, StoreWriter

dcp.save(state, storage_writer=StoreWriter("checkpoint", copies=2))  # on every rank
dcp.load(state, storage_reader=StoreReader("checkpoint"))            # on every rank, of any mesh
```
"""

from skipper.torchstore.dcp.directory import load_from_directory, save_to_directory
from skipper.torchstore.dcp.reader import StoreReader
from skipper.torchstore.dcp.writer import StoreWriter

__all__ = ["StoreReader", "StoreWriter", "load_from_directory", "save_to_directory"]
