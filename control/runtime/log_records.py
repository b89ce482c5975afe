"""Which actor a log record is from: `Actor.logger`, and fields of every record made in a process that has actors."""

from __future__ import annotations

import logging
import threading
from typing import Any

from skipper.control.runtime.context import current_context

_lock = threading.Lock()
_is_installed = False


def name_actors_in_records() -> None:
    """Have records of `logging` say which actor they are from; from any thread; the second time changes nothing.

    The runtime calls it where the first actor of a process starts. It wraps the factory of records, and leaves loggers,
    levels, handlers and formats as they are. Records get the fields

    * ``actor_name``: name of the actor's mesh, as given to ``spawn``; empty outside of actors;
    * ``actor_rank``: its position there, a `Point`; None outside of actors;
    * ``actor_prefix``: both for people, such as ``"[actor=trainer{'gpus': 1}] "``; empty outside of actors.

    They can be used in formats and filters: ``logging.basicConfig(format="%(actor_prefix)s%(message)s")``.
    """
    global _is_installed
    with _lock:
        if _is_installed:
            return
        _is_installed = True
        make = logging.getLogRecordFactory()

        def make_with_actor(*args: Any, **kwargs: Any) -> logging.LogRecord:
            record = make(*args, **kwargs)
            here = current_context.get()
            if here is None:
                record.actor_name, record.actor_rank, record.actor_prefix = "", None, ""
                return record
            actor = here.actor_instance
            record.actor_name, record.actor_rank = actor.name, actor.rank
            record.actor_prefix = f"[actor={actor.name}{actor.rank!r}] " if actor.rank else f"[actor={actor.name}] "
            return record

        logging.setLogRecordFactory(make_with_actor)
