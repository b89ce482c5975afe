"""A job whose path a stranger has taken: what it says of that, and whether its actors still answer."""

from collections.abc import Callable

from skipper.control import Actor, UnsafeFileError, endpoint, serve_job, this_host
from skipper.control.model.errors import ControlError
from skipper.control.rpc import ActorServer


class Echo(Actor):
    @endpoint
    def echo(self, value: int) -> int:
        return value


acts: tuple[Callable[[], object], ...] = (lambda: serve_job("squatted"), lambda: ActorServer("127.0.0.1", 0))
echo = this_host().spawn_procs().spawn("echo", Echo)
for act in acts:
    try:
        act()
    except (UnsafeFileError, ControlError) as error:
        print(type(error).__name__)
    else:
        print("went on")
print(echo.echo.call_one(3).get(60))
