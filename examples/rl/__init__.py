"""The parts of ``examples.rl_weight_sync``: the model, the task, the two kinds of actor, the report."""
