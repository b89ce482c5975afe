"""A coroutine that is never awaited says which function was called, where, and what to write in its place."""

import asyncio
import gc
import inspect
import pickle
import warnings

import pytest

from skipper import torchstore as ts
from skipper.torchstore.support.coroutines import is_public

FUNCTIONS = [name for name in ts.__all__ if is_public(getattr(ts, name))]


def line_of_the_call() -> int:
    """The line on which something is called and its coroutine dropped."""
    ts.put("k", 1)  # type: ignore[unused-coroutine]
    return inspect.currentframe().f_lineno - 1  # type: ignore[union-attr]


def test_the_warning_names_the_function_the_line_and_what_to_write() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        line = line_of_the_call()
        gc.collect()
    (warning,) = caught
    assert warning.category is RuntimeWarning
    assert (warning.filename, warning.lineno) == (__file__, line)
    text = str(warning.message)
    assert "coroutine 'torchstore.put' was never awaited" in text
    assert "`await torchstore.put(...)`" in text
    assert "`torchstore.sync.put(...)`" in text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_function_is_named(name: str) -> None:
    function = getattr(ts, name)
    required = [
        parameter
        for parameter in inspect.signature(function).parameters.values()
        if parameter.default is parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
    ]
    with pytest.warns(RuntimeWarning, match=f"coroutine 'torchstore.{name}' was never awaited"):
        function(*["x"] * len(required))


def test_functions_keep_their_signatures_and_can_be_sent() -> None:
    assert list(inspect.signature(ts.put).parameters)[:2] == ["key", "value"]
    for name in FUNCTIONS:
        assert pickle.loads(pickle.dumps(getattr(ts, name))) is getattr(ts, name)


async def test_coroutines_are_awaited_closed_and_made_into_tasks_without_a_word(store: None) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        await ts.put("a", 1)
        assert await asyncio.gather(ts.get("a"), asyncio.wait_for(ts.get("a"), 60)) == [1, 1]
        task = asyncio.create_task(ts.get("a"))
        assert "get" in repr(task)
        assert await task == 1
        coroutine = ts.get("a")
        assert asyncio.iscoroutine(coroutine)
        coroutine.close()
        del coroutine
        gc.collect()


async def test_a_task_that_waits_can_be_cancelled(store: None) -> None:
    task = asyncio.create_task(ts.get_state_dict("never", version=("newer_than", 0)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_coroutine_cannot_be_awaited_twice(store: None) -> None:
    coroutine = ts.exists("a")
    await coroutine
    with pytest.raises(RuntimeError, match="already awaited"):
        await coroutine


def test_asyncio_run_takes_them() -> None:
    asyncio.run(ts.initialize(store_name="run"))
    asyncio.run(ts.shutdown("run"))
