"""The only place that connects the parts of the script's side that cannot import each other."""

from __future__ import annotations

from skipper.tensor_engine.script import methods
from skipper.tensor_engine.script.activation import activate_stream
from skipper.tensor_engine.script.borrow import borrow
from skipper.tensor_engine.script.communicate import all_gather, all_to_all, reduce, reduce_, slice_mesh, to_mesh
from skipper.tensor_engine.script.fetch import fetch_first
from skipper.tensor_engine.script.issue import dispatch


def wire() -> None:
    """Register the functions behind the methods of `Tensor` and `Stream`. The package calls it once, at its import."""
    methods.wired = methods.Methods(
        dispatch=dispatch,
        fetch_first=fetch_first,
        reduce=reduce,
        reduce_=reduce_,
        all_gather=all_gather,
        all_to_all=all_to_all,
        to_mesh=to_mesh,
        slice_mesh=slice_mesh,
        activate_stream=activate_stream,
        borrow=borrow,
    )
