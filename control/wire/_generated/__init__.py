"""Generated from the files of `proto/` by `python -m skipper.control.wire.regenerate`; do not edit."""
