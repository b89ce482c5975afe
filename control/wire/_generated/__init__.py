"""Generated from the files of `proto/` by `python -m control.wire.regenerate`; do not edit."""
