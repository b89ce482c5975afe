"""Weight sync of a trillion parameters: planned by the store's code, and its transfers modelled.

The way through: `moe` (a model's tensors) and `placement` (who holds what of them) → `reads` (each reader's plan,
from shapes alone) → `fabric` (cards, buses, switches) and `simulation` (bytes on their way), with `fan_out` where
readers feed readers. `controller` measures what the store's controller has to do, `check` compares the simulation
with syncs that run here. `jobs` puts the model's parts together, `rows` makes rows of all, `page` the page.
"""
