"""A shell of a host, or of this one, in the script's terminal: ``shell_script.py [ADDRESS SECRET_FILE]``."""

import fcntl
import sys
import termios

from skipper.control import this_host
from skipper.control.cluster.hosts import attach_to_hosts, shell

fcntl.ioctl(0, termios.TIOCSCTTY, 0)
host = attach_to_hosts(sys.argv[1], secret_file=sys.argv[2]) if sys.argv[1:] else this_host()
status = shell(host, env={"PS1": "ready> ", "SHELL": "/bin/sh"}, command=("/bin/sh", "-i"))
print("\nended with", status, flush=True)
