"""The backend on RDMA verbs, by pyverbs.

    backend        what the process knows of it
    peer, staging  an owner: copies, batches, atomic operations; GPU memory by way of host memory
    run            one operation from its submission to its end
    connector      makes the connection to one owner, and makes it anew
    engine         posts, waits for completions, keeps deadlines (posting, poll_interval, lock: its parts)
    rails          the ports of this process and what is registered with them
    handshake      how two processes tell each other their queue pairs (handshake_server: the owner's side)
    connection     rails, send queues and their credits
    chain          transfers as chains of work requests
    card           what a handle says for verbs
    memory, dmabuf, completions, rdma_cm, device, port, sysfs    one thing of RDMA each

Each imports only those below it.
"""
