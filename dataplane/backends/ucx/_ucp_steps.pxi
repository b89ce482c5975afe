"""Part of `_ucp.pyx`: the state machine of a batch, that whoever drives it brings forward.

A batch goes through the phases below. `post` starts requests, `on_complete` counts them off, `step` moves on; `drive`
does that for many batches until something has ended.
"""

cdef enum:
    FINISHED_ = 0  # every byte and every word is as it should be
    RUNNING_ = 1
    CHANGED_ = 2  # an epoch word is not as expected; negative results are ucs_status_t
    NOT_ALLOWED_ = 3  # the owner says that this is no part of the buffer

    WORDS_BEFORE = 0
    DATA = 1
    FLUSH = 2
    WORDS_AFTER = 3
    NO_MORE = 4

    # Enough requests in flight to fill a wire, and few enough that their memory does not matter.
    WINDOW = 256
    # A CMA copy keeps the worker to itself: pieces bound how long a deadline or another thread waits.
    PIECE_BYTES = 2 << 20
    # What a batch takes from the rows that it shares at a time: so much that taking costs nothing, ever less towards
    # the end, so that none still has much to do when the others are through.
    LEAST_TURN = 4 << 20
    MOST_TURN = 64 << 20
    TAKEN_AT_ONCE = 64
    # Polling longer than this without an event costs more than a sleep; sleeps are cut for safety's sake.
    IDLE_SPINS = 200
    SLEEP_MS = 200

# The data of one operation, as the batches that carry it share it.
cdef struct share_t:
    pthread_mutex_t lock
    skipper_cursor cursor
    int64_t left  # bytes that nobody has taken
    int batches
    int stopped  # one of them has failed: what the others still move is of no use

cdef struct piece_t:
    int64_t local
    int64_t remote
    int64_t nbytes
    int64_t key

cdef struct batch_t:
    share_t *share
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
    waiting_t *waiting  # where the work is done by messages: then word_at are addresses of the owner's
    desk_t *desk
    ucs_memory_type_t memory_type
    int phase
    int posted  # everything of this phase is posted
    int pending  # requests in flight
    int resume_at  # post more only when no more than this many are
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


cdef inline int may_post(batch_t *batch) noexcept nogil:
    return not batch.posted and skipper_get(&batch.pending) <= batch.resume_at


cdef int take(share_t *share, piece_t *pieces, int64_t *turn, int room) noexcept nogil:
    """Take at most `room` pieces, and no more once `turn` bytes are used up; 0 when there is nothing left."""
    cdef int taken = 0
    pthread_mutex_lock(&share.lock)
    if turn[0] == 0:
        turn[0] = min(max(share.left // (2 * share.batches), <int64_t>LEAST_TURN), <int64_t>MOST_TURN)
    while taken < room and turn[0] > 0 and not skipper_get(&share.stopped):
        if not skipper_cursor_next(&share.cursor, PIECE_BYTES, &pieces[taken].local, &pieces[taken].remote,
                                   &pieces[taken].nbytes, &pieces[taken].key):
            break
        turn[0] -= pieces[taken].nbytes
        share.left -= pieces[taken].nbytes
        taken += 1
    pthread_mutex_unlock(&share.lock)
    return taken


cdef void post_data(batch_t *batch, ucp_ep_h ep, ucp_request_param_t *param) noexcept nogil:
    """Post a turn, or what the window has room for."""
    cdef piece_t pieces[TAKEN_AT_ONCE]
    cdef piece_t *piece
    cdef ucs_status_ptr_t request
    cdef int64_t turn = 0
    cdef int taken, i
    while True:
        taken = take(batch.share, pieces, &turn, min(<int>TAKEN_AT_ONCE, WINDOW - skipper_get(&batch.pending)))
        for i in range(taken):
            piece = &pieces[i]
            skipper_add(&batch.pending, 1)
            if batch.to_remote:
                request = ucp_put_nbx(ep, <const void *>piece.local, piece.nbytes, piece.remote,
                                      batch.keys[piece.key], param)
            else:
                request = ucp_get_nbx(ep, <void *>piece.local, piece.nbytes, piece.remote, batch.keys[piece.key],
                                      param)
            if not posted(batch, request):
                return
        if taken == 0:
            batch.posted = 1
            return
        if turn <= 0 or skipper_get(&batch.pending) >= WINDOW:
            batch.resume_at = skipper_get(&batch.pending) // 2
            return


cdef void post_words(batch_t *batch, ucp_ep_h ep, ucp_request_param_t *param) noexcept nogil:
    """Fetch as many of the words as the window has room for."""
    while skipper_get(&batch.pending) < WINDOW:
        if batch.next_word == batch.nwords:
            batch.posted = 1
            return
        skipper_add(&batch.pending, 1)
        batch.next_word += 1
        if not posted(batch, ucp_get_nbx(ep, &batch.word_found[batch.next_word - 1], 8,
                                         batch.word_at[batch.next_word - 1],
                                         batch.keys[batch.word_key[batch.next_word - 1]], param)):
            return


cdef void post(batch_t *batch) noexcept nogil:
    """Post more of the current phase."""
    cdef ucp_request_param_t param
    cdef ucp_ep_h ep
    cdef int64_t i
    if batch.words_here and (batch.phase == WORDS_BEFORE or batch.phase == WORDS_AFTER):
        for i in range(batch.nwords):
            batch.word_found[i] = skipper_load(batch.word_at[i])
        batch.posted = 1
        return
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
    param.cb.send = on_complete
    param.user_data = batch
    pthread_mutex_lock(&batch.endpoint.lock)
    ep = batch.endpoint.handle
    if unusable(batch.endpoint) != 0:
        skipper_first_error(&batch.status, unusable(batch.endpoint))
    elif batch.phase == FLUSH:
        batch.posted = 1
        skipper_add(&batch.pending, 1)
        posted(batch, ucp_ep_flush_nbx(ep, &param))
    else:
        param.op_attr_mask |= UCP_OP_ATTR_FIELD_MEMORY_TYPE
        param.memory_type = batch.memory_type if batch.phase == DATA else UCS_MEMORY_TYPE_HOST
        if batch.phase != DATA:
            post_words(batch, ep, &param)
        else:
            post_data(batch, ep, &param)
    pthread_mutex_unlock(&batch.endpoint.lock)


cdef int step(batch_t *batch) noexcept nogil:
    """Bring a batch as far as it goes without waiting: RUNNING, FINISHED, CHANGED, NOT_ALLOWED, or the first error."""
    cdef int result = advanced(batch) if batch.waiting == NULL else step_messages(batch)
    if result != RUNNING_ and result != FINISHED_ and batch.share != NULL:
        skipper_set(&batch.share.stopped, 1)
    return result


cdef int advanced(batch_t *batch) noexcept nogil:
    cdef int64_t i
    while True:
        if may_post(batch) and skipper_get(&batch.status) == 0:
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
        batch.resume_at = WINDOW - 1


cdef inline int has_more(batch_t *batch) noexcept nogil:
    """Whether there is more to post now."""
    return may_post(batch) if batch.waiting == NULL else may_send(batch)


cdef void drive(UcpWorker worker, batch_t **running, Py_ssize_t count, double deadline) noexcept nogil:
    cdef Py_ssize_t i
    cdef int over = 0
    cdef int more
    cdef int idle = 0
    cdef double left
    while True:
        more = 0
        for i in range(count):
            running[i].result = step(running[i])
            if running[i].result != RUNNING_:
                over = 1
            elif has_more(running[i]):
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
            await_event(worker.efd, <int>min(<double>SLEEP_MS, left * 1e3 + 1))
        skipper_set(&worker.asleep, 0)
    skipper_set(&worker.woken, 0)


cdef void await_event(int fd, int milliseconds) noexcept nogil:
    cdef pollfd watched
    watched.fd = fd
    watched.events = POLLIN
    watched.revents = 0
    poll(&watched, 1, milliseconds)


cdef int finished_behind(batch_t **running, Py_ssize_t count) noexcept nogil:
    """Whether another thread's progress has completed what one of the batches waits for."""
    cdef Py_ssize_t i
    for i in range(count):
        if running[i].waiting != NULL:
            if answered(running[i]):
                return 1
        elif skipper_get(&running[i].pending) == 0 or may_post(running[i]):
            return 1
    return 0
