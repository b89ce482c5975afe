"""The backend on RDMA verbs, by pyverbs.

    backend        what the process knows of it
    peer, staging  an owner: copies, batches, atomic operations; GPU memory through host memory
    run            one operation from its submission to its end
    connector      makes the connection to one owner, and makes it again
    engine         posts, waits for completions, keeps deadlines (lock: its mutex)
    connection     the ports of this process (rails), connections over them, send queues and their credits
    handshake      how two processes tell each other their queue pairs
    chain          transfers as chains of work requests
    card           what a handle says for verbs
    memory, rdma_cm, device, port    one thing of RDMA each

Each imports only those below it.
"""
