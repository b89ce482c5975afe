"""Descriptions of values, without a store and without torch: boxes, layouts, manifests, keys, copies. No I/O."""
