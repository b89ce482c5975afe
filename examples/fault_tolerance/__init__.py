"""Parts of the fault-tolerant training example."""
