"""The parts of ``examples.sync_checkpoint``: the files, the layouts, the two kinds of actor."""
