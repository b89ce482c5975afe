"""A cluster in one thread: the runtimes of all processes of a job under a virtual clock and a virtual network.

    python -m tests.simulation --seconds 120
    python -m tests.simulation --seed 4711 --trace

What runs is the product's: `build_process` makes each process, with its links, frames, handshakes, heartbeats, trees,
replies, actors, owners and launches. Only what the operating system does is simulated: time (`world`), streams
(`network`), the birth and death of processes (`processes`). A seed decides everything that may vary, so that a schedule
which breaks an invariant of `job` can be played again.

What is not looked for here: races between threads within a process. One thread plays them all, a callback, a message or
a turn of an actor at a time; in which order those of one process and of all others take place, the seed says.
"""
