"""What the commands of ``skipper`` have in common: their parser, the flags that several have, how they end.

It is below the packages whose commands use it, and imports only the standard library.
"""

from skipper.commandline.description import Described, Option, described, walk
from skipper.commandline.exit_codes import DONE, EXIT_CODES, FAILED, INTERRUPTED, USAGE
from skipper.commandline.flags import (
    LOOPBACK,
    add_certs,
    add_csv,
    add_host,
    add_insecure,
    add_job,
    add_json,
    add_port,
    add_quick,
    add_secret_file,
    add_timeout,
)
from skipper.commandline.json_output import STDOUT, write_json
from skipper.commandline.parser import BadArgumentsError, CommandParser, add_command, did_you_mean
from skipper.commandline.running import reader_is_gone, run, say_more, tell_origin
from skipper.commandline.values import number, output_path, port_number, seconds, whole

__all__ = [
    # a command
    "CommandParser",
    "add_command",
    "run",
    "say_more",
    "tell_origin",
    "reader_is_gone",
    "BadArgumentsError",
    "did_you_mean",
    # exit codes
    "EXIT_CODES",
    "DONE",
    "FAILED",
    "USAGE",
    "INTERRUPTED",
    # flags that mean the same everywhere
    "add_json",
    "add_csv",
    "add_quick",
    "add_job",
    "add_timeout",
    "add_host",
    "add_port",
    "add_secret_file",
    "add_certs",
    "add_insecure",
    "LOOPBACK",
    # their values
    "whole",
    "number",
    "seconds",
    "port_number",
    "output_path",
    "write_json",
    "STDOUT",
    # what a parser has
    "Described",
    "Option",
    "described",
    "walk",
]
