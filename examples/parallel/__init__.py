"""The parts of `examples.parallel_weight_sync`: the model, the pipeline's stages, the tensor-parallel generators."""
