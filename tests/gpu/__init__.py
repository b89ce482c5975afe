"""A day with a GPU in one command: on a machine without a network, from the checkout and a folder of wheels.

    make gpu-wheels     where there is a network: the wheels that such a machine may lack
    make test-gpu       there: an environment, what was found, the tests that need no GPU, those that do
    make bench-gpu      there: transfers and syncs of GPU memory beside their ceilings

The way through: `__main__` → `wheels` | `environment` → `testing` | `benching`, whose parts `parts` runs, each in a
group of processes of its own and within its time. These run with nothing but Python itself; `facts`, `record` and
`ceilings` run in the environment. `gates` is what the tests themselves use.
"""
