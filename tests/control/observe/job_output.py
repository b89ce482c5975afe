"""What processes of a job have written, as `LogFiles` keeps it."""

from pathlib import Path

from skipper.control.observe.log_files import LogFiles
from skipper.control.observe.log_reader import LogSource


def source(rank: int, stream: int = 1) -> LogSource:
    """A stream of a process, in which the only actor is a trainer."""
    return LogSource(-1, stream, f"procs{{'gpus': {rank}}}", 100 + rank, actors=("trainers",))


def folder_of(files: LogFiles) -> Path:
    """The folder of the job."""
    assert files.folder is not None
    return files.folder
