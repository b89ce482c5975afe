"""Part of `_ucp.pyx`: the batch, as a state machine that whoever drives it brings forward.

A batch goes through the phases below. `post` starts requests, `on_complete` counts them off, `step` moves on; `drive`
does that for many batches until something has ended.
"""

cdef enum:
    FINISHED_ = 0  # every byte and every word is as it should be
    RUNNING_ = 1
    CHANGED_ = 2  # an epoch word is not as expected; negative results are ucs_status_t

    WORDS_BEFORE = 0
    DATA = 1
    FLUSH = 2
    WORDS_AFTER = 3
    NO_MORE = 4

    # Enough requests in flight to fill a wire, and few enough that their memory does not matter.
    WINDOW = 256
    # A CMA copy happens inside the call that posts it: pieces bound how long a deadline or another thread waits.
    PIECE_BYTES = 16 << 20
    TURN_BYTES = 64 << 20
    # Polling longer than this without an event costs more than a sleep; sleeps are cut for safety's sake.
    IDLE_SPINS = 200
    SLEEP_MS = 200

cdef struct batch_t:
    skipper_cursor cursor
    endpoint_t *endpoint
    ucp_rkey_h *keys
    const uint64_t *word_at
    const int64_t *word_key
    const uint64_t *word_expected
    uint64_t *word_found
    int64_t nwords
    int64_t next_word
    int words_here  # word_at are addresses of this process: the owner's page is mapped
    int to_remote
    ucs_memory_type_t memory_type
    int phase
    int posted  # everything of this phase is posted
    int pending  # requests in flight
    int status  # first error
    int result


cdef void on_complete(void *request, ucs_status_t status, void *arg) noexcept nogil:
    cdef batch_t *batch = <batch_t *>arg
    if status != UCS_OK:
        skipper_first_error(&batch.status, status)
    ucp_request_free(request)
    skipper_add(&batch.pending, -1)  # last: from here on the batch may be freed


cdef inline int posted(batch_t *batch, ucs_status_ptr_t request) noexcept nogil:
    """Account for a request that was just posted; whether it went well. Its `pending` was counted before."""
    if request == NULL:
        skipper_add(&batch.pending, -1)
        return 1
    if UCS_PTR_IS_ERR(request):
        skipper_first_error(&batch.status, UCS_PTR_RAW_STATUS(request))
        skipper_add(&batch.pending, -1)
        return 0
    return 1


cdef void post(batch_t *batch) noexcept nogil:
    """Post what the window takes of the current phase."""
    cdef ucp_request_param_t param
    cdef ucs_status_ptr_t request
    cdef ucp_ep_h ep
    cdef int64_t local, remote, nbytes, key
    cdef int64_t turn = 0
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_MEMORY_TYPE
    param.cb.send = on_complete
    param.user_data = batch
    param.memory_type = UCS_MEMORY_TYPE_HOST
    if batch.words_here and (batch.phase == WORDS_BEFORE or batch.phase == WORDS_AFTER):
        for key in range(batch.nwords):
            batch.word_found[key] = skipper_load(batch.word_at[key])
        batch.posted = 1
        return
    pthread_mutex_lock(&batch.endpoint.lock)
    ep = batch.endpoint.handle
    if ep == NULL or skipper_get(&batch.endpoint.failed) != 0:
        skipper_first_error(&batch.status,
                            UCS_ERR_CANCELED if ep == NULL else skipper_get(&batch.endpoint.failed))
    elif batch.phase == FLUSH:
        batch.posted = 1
        skipper_add(&batch.pending, 1)
        param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
        posted(batch, ucp_ep_flush_nbx(ep, &param))
    elif batch.phase == DATA:
        param.memory_type = batch.memory_type
        while turn < TURN_BYTES and skipper_get(&batch.pending) < WINDOW:
            if not skipper_cursor_next(&batch.cursor, PIECE_BYTES, &local, &remote, &nbytes, &key):
                batch.posted = 1
                break
            skipper_add(&batch.pending, 1)
            if batch.to_remote:
                request = ucp_put_nbx(ep, <const void *>local, nbytes, remote, batch.keys[key], &param)
            else:
                request = ucp_get_nbx(ep, <void *>local, nbytes, remote, batch.keys[key], &param)
            if not posted(batch, request):
                break
            turn += nbytes
    else:
        while skipper_get(&batch.pending) < WINDOW:
            if batch.next_word == batch.nwords:
                batch.posted = 1
                break
            skipper_add(&batch.pending, 1)
            request = ucp_get_nbx(ep, &batch.word_found[batch.next_word], 8, batch.word_at[batch.next_word],
                                  batch.keys[batch.word_key[batch.next_word]], &param)
            batch.next_word += 1
            if not posted(batch, request):
                break
    pthread_mutex_unlock(&batch.endpoint.lock)


cdef int step(batch_t *batch) noexcept nogil:
    """Bring a batch as far as it goes without waiting: RUNNING, FINISHED, CHANGED, or the first error."""
    cdef int64_t i
    while True:
        if not batch.posted and skipper_get(&batch.status) == 0:
            post(batch)
        if skipper_get(&batch.pending) > 0:
            return RUNNING_
        if skipper_get(&batch.status) != 0:
            return batch.status
        if not batch.posted:
            return RUNNING_
        if batch.phase == WORDS_BEFORE or batch.phase == WORDS_AFTER:
            for i in range(batch.nwords):
                if batch.word_found[i] != batch.word_expected[i]:
                    return CHANGED_
        batch.phase += 1
        if batch.phase == FLUSH and not batch.to_remote:
            batch.phase += 1
        if batch.phase == NO_MORE:
            return FINISHED_
        batch.posted = 0
        batch.next_word = 0


cdef void drive(Worker worker, batch_t **running, Py_ssize_t count, double deadline) noexcept nogil:
    cdef Py_ssize_t i
    cdef int over = 0
    cdef int more
    cdef int idle = 0
    cdef double left
    cdef pollfd watched
    watched.fd = worker.efd
    watched.events = POLLIN
    while True:
        more = 0
        for i in range(count):
            running[i].result = step(running[i])
            if running[i].result != RUNNING_:
                over = 1
            elif not running[i].posted and skipper_get(&running[i].pending) < WINDOW:
                more = 1
        if over or skipper_get(&worker.woken):
            break
        left = deadline - now()
        if left <= 0:
            break
        if ucp_worker_progress(worker.handle) != 0 or more:
            idle = 0
            continue
        idle += 1
        if idle < IDLE_SPINS:
            continue
        skipper_set(&worker.asleep, 1)
        # Arming fails while events are pending; then there is something to progress.
        if ucp_worker_arm(worker.handle) == UCS_OK and not finished_behind(running, count):
            watched.revents = 0
            poll(&watched, 1, <int>min(<double>SLEEP_MS, left * 1e3 + 1))
        skipper_set(&worker.asleep, 0)
    skipper_set(&worker.woken, 0)


cdef int finished_behind(batch_t **running, Py_ssize_t count) noexcept nogil:
    """Whether another thread's progress has completed what one of the batches waits for."""
    cdef Py_ssize_t i
    for i in range(count):
        if skipper_get(&running[i].pending) == 0:
            return 1
    return 0


@cython.final
@cython.no_gc
cdef class Batch:
    """Copies between local memory and one peer, with the epoch words that guard them.

    The words are looked at before the data as well as after: over TCP it is the owner's process that touches the
    memory, and a handle of memory that is long gone must not make it fault. Within a host the caller has mapped the
    words (`words_here`); else they are fetched like the data.

    Whoever creates a batch keeps the local memory alive until the batch is over, and runs it by one thread at a time.
    """

    cdef batch_t state
    cdef skipper_row row
    cdef uint64_t word_at
    cdef uint64_t word_expected
    cdef int64_t word_key
    cdef readonly Endpoint endpoint
    cdef tuple keys
    cdef object arrays
    cdef ucp_rkey_h own_keys[2]
    cdef uint64_t word_found
    cdef ucp_rkey_h *many_keys
    cdef uint64_t *many_found

    def __cinit__(self, Endpoint endpoint, tuple keys, bint to_remote, int memory_type):
        self.endpoint = endpoint
        self.keys = keys
        self.state.endpoint = endpoint.state
        self.state.to_remote = to_remote
        self.state.memory_type = <ucs_memory_type_t>memory_type
        self.state.result = RUNNING_

    @staticmethod
    def single(Endpoint endpoint, RemoteKey key, RemoteKey word_key, bint to_remote, int memory_type,
               uintptr_t local, uint64_t remote, int64_t nbytes, uint64_t word_at, uint64_t expected, bint words_here):
        """One contiguous copy, guarded by one word."""
        cdef Batch batch = Batch(endpoint, (key, word_key), to_remote, memory_type)
        batch.row.local = <int64_t>local
        batch.row.remote = <int64_t>remote
        batch.row.run = nbytes
        batch.word_at = word_at
        batch.word_expected = expected
        batch.word_key = 1
        batch.state.words_here = words_here
        batch.own_keys[0] = key.handle
        batch.own_keys[1] = word_key.handle
        batch.state.cursor.rows = &batch.row
        batch.state.cursor.end = 1
        batch.state.keys = batch.own_keys
        batch.state.nwords = 1
        batch.state.word_found = &batch.word_found
        batch.state.word_at = &batch.word_at
        batch.state.word_key = &batch.word_key
        batch.state.word_expected = &batch.word_expected
        return batch

    @staticmethod
    def many(Endpoint endpoint, tuple keys, bint to_remote, int memory_type, const int64_t[:, ::1] rows,
             const uint64_t[::1] word_at, const int64_t[::1] word_key, const uint64_t[::1] expected, bint words_here):
        """All runs of `rows` (see rows.h), guarded by as many words as `word_at` has. Keys are indices into `keys`."""
        cdef Batch batch = Batch(endpoint, keys, to_remote, memory_type)
        cdef Py_ssize_t i
        cdef RemoteKey key
        if rows.shape[0] == 0 or rows.shape[1] != SKIPPER_ROW_WORDS or word_at.shape[0] == 0:
            raise ValueError("a batch needs rows of the right width, and a word")
        batch.arrays = (rows, word_at, word_key, expected)
        batch.many_keys = <ucp_rkey_h *>calloc(max(len(keys), 1), sizeof(ucp_rkey_h))
        batch.many_found = <uint64_t *>calloc(word_at.shape[0], sizeof(uint64_t))
        if batch.many_keys == NULL or batch.many_found == NULL:
            raise MemoryError
        for i in range(len(keys)):
            key = keys[i]
            batch.many_keys[i] = key.handle
        batch.state.keys = batch.many_keys
        batch.state.words_here = words_here
        batch.state.nwords = word_at.shape[0]
        batch.state.word_found = batch.many_found
        batch.state.cursor.rows = <const skipper_row *>&rows[0, 0]
        batch.state.cursor.end = rows.shape[0]
        batch.state.word_at = &word_at[0]
        batch.state.word_key = &word_key[0]
        batch.state.word_expected = &expected[0]
        return batch

    def advance(self, double spin_s, double deadline):
        """Run in the calling thread until over, or nothing has happened for `spin_s`, or `deadline` is reached.

        Returns:
            FINISHED, RUNNING, CHANGED, or a negative ucs_status_t.
        """
        cdef Worker worker = self.endpoint.worker
        cdef int result
        cdef int last = -1
        cdef double quiet, at
        with nogil:
            quiet = now()
            while True:
                result = step(&self.state)
                if result != RUNNING_:
                    break
                at = now()
                if at >= deadline:
                    break
                if ucp_worker_progress(worker.handle) != 0 or not self.state.posted or self.state.phase != last:
                    last = self.state.phase
                    quiet = at
                elif at - quiet > spin_s:
                    break
            # Our progress may have completed what a sleeping driver waits for.
            if skipper_get(&worker.asleep):
                ucp_worker_signal(worker.handle)
        self.state.result = result
        return result

    @property
    def result(self):
        """As `advance` returns it."""
        return self.state.result

    @property
    def in_flight(self):
        """Whether UCX may still touch the memory."""
        return skipper_get(&self.state.pending) > 0

    def changed(self):
        """The indices of the words that were not as expected when last fetched."""
        return [i for i in range(self.state.nwords) if self.state.word_found[i] != self.state.word_expected[i]]

    def __dealloc__(self):
        cdef Worker worker = self.endpoint.worker
        # Whoever drives a batch brings it to its end before letting go of it; an exception out of nowhere, such as
        # KeyboardInterrupt, may have prevented that. UCX must not write into what is about to be freed.
        if skipper_get(&self.state.pending) > 0 and worker.handle != NULL and worker.context.pid == getpid():
            close_endpoint(self.state.endpoint, worker.handle)
            while skipper_get(&self.state.pending) > 0:
                ucp_worker_progress(worker.handle)
        free(self.many_keys)
        free(self.many_found)
