"""Part of `_ucp.pyx`: atomic operations, as messages that the owner's UCX thread carries out.

UCX has atomic operations of its own, but not on connections with peer error handling, without which a dead owner would
go unnoticed. As messages they are also atomic with whatever the owner's CPU does, and the owner looks at the epoch word
itself, right before it touches the memory.
"""

cdef extern from *:
    """
    static inline uint64_t skipper_fetch_add(uint64_t at, uint64_t value)
    {
        return __atomic_fetch_add((uint64_t *)at, value, __ATOMIC_SEQ_CST);
    }
    static inline uint64_t skipper_swap(uint64_t at, uint64_t expected, uint64_t desired)
    {
        __atomic_compare_exchange_n((uint64_t *)at, &expected, desired, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
        return expected;
    }
    """
    uint64_t skipper_fetch_add(uint64_t at, uint64_t value) nogil
    uint64_t skipper_swap(uint64_t at, uint64_t expected, uint64_t desired) nogil

cdef enum:
    ASK = 1  # identities of the two messages
    ANSWER = 2

# All in the byte order of one kind of machine, as are the words themselves.
cdef struct question_t:
    uint64_t ticket
    uint64_t word_at
    uint64_t word_expected
    uint64_t at
    uint64_t swap  # 0: add the operand; 1: set to it what is equal to `compare`
    uint64_t operand
    uint64_t compare

cdef struct answer_t:
    uint64_t ticket
    uint64_t changed
    uint64_t previous

# Somebody who waits for an answer.
cdef struct waiting_t:
    question_t question
    answer_t answer
    int answered
    int sent
    waiting_t *next

# Those who wait at one worker. Answers that come too late find nobody.
cdef struct desk_t:
    pthread_mutex_t lock
    uint64_t tickets
    waiting_t *first


cdef ucs_status_t on_question(void *arg, const void *header, size_t header_length, void *data, size_t length,
                              const ucp_am_recv_param_t *info) noexcept nogil:
    cdef question_t question
    cdef answer_t *answer
    cdef ucp_request_param_t param
    cdef ucs_status_ptr_t request
    if header_length != sizeof(question_t) or not info.recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP:
        return UCS_OK
    memcpy(&question, header, sizeof(question_t))
    answer = <answer_t *>calloc(1, sizeof(answer_t))
    if answer == NULL or question.at % 8 or question.word_at % 8:
        free(answer)
        return UCS_OK
    answer.ticket = question.ticket
    if skipper_load(question.word_at) != question.word_expected:
        answer.changed = 1
    elif question.swap:
        answer.previous = skipper_swap(question.at, question.compare, question.operand)
    else:
        answer.previous = skipper_fetch_add(question.at, question.operand)
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
    param.cb.send = on_answer_sent
    param.user_data = answer
    request = ucp_am_send_nbx(info.reply_ep, ANSWER, answer, sizeof(answer_t), NULL, 0, &param)
    if request == NULL or UCS_PTR_IS_ERR(request):
        free(answer)
    return UCS_OK


cdef void on_answer_sent(void *request, ucs_status_t status, void *arg) noexcept nogil:
    ucp_request_free(request)
    free(arg)


cdef ucs_status_t on_answer(void *arg, const void *header, size_t header_length, void *data, size_t length,
                            const ucp_am_recv_param_t *info) noexcept nogil:
    cdef desk_t *desk = <desk_t *>arg
    cdef waiting_t *waiting
    cdef answer_t answer
    if header_length != sizeof(answer_t):
        return UCS_OK
    memcpy(&answer, header, sizeof(answer_t))
    pthread_mutex_lock(&desk.lock)
    waiting = desk.first
    while waiting != NULL and waiting.question.ticket != answer.ticket:
        waiting = waiting.next
    if waiting != NULL:
        waiting.answer = answer
        skipper_set(&waiting.answered, 1)
    pthread_mutex_unlock(&desk.lock)
    return UCS_OK


cdef int ask(batch_t *batch) noexcept nogil:
    """Send the question. Returns as `step` does."""
    cdef waiting_t *waiting = batch.waiting
    cdef ucp_request_param_t param
    pthread_mutex_lock(&batch.desk.lock)
    batch.desk.tickets += 1
    waiting.question.ticket = batch.desk.tickets
    waiting.next = batch.desk.first
    batch.desk.first = waiting
    pthread_mutex_unlock(&batch.desk.lock)
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS
    param.flags = UCP_AM_SEND_FLAG_REPLY
    param.cb.send = on_complete
    param.user_data = batch
    pthread_mutex_lock(&batch.endpoint.lock)
    if unusable(batch.endpoint) == 0:
        waiting.sent = 1
        skipper_add(&batch.pending, 1)
        posted(batch, ucp_am_send_nbx(batch.endpoint.handle, ASK, &waiting.question, sizeof(question_t), NULL, 0,
                                      &param))
    pthread_mutex_unlock(&batch.endpoint.lock)
    batch.posted = 1
    return RUNNING_


cdef int step_atomic(batch_t *batch) noexcept nogil:
    """`step` for a batch that is one atomic operation."""
    cdef int status
    if not batch.posted:
        ask(batch)
    if skipper_get(&batch.pending) > 0:
        return RUNNING_
    status = skipper_get(&batch.status)
    if skipper_get(&batch.waiting.answered):
        status = CHANGED_ if batch.waiting.answer.changed else FINISHED_
    elif status == 0:
        pthread_mutex_lock(&batch.endpoint.lock)
        status = unusable(batch.endpoint)
        pthread_mutex_unlock(&batch.endpoint.lock)
        if status == 0:
            return RUNNING_
    leave(batch)
    return status


cdef void leave(batch_t *batch) noexcept nogil:
    """Wait for the answer no longer."""
    cdef waiting_t **at
    pthread_mutex_lock(&batch.desk.lock)
    at = &batch.desk.first
    while at[0] != NULL and at[0] != batch.waiting:
        at = &at[0].next
    if at[0] != NULL:
        at[0] = batch.waiting.next
    pthread_mutex_unlock(&batch.desk.lock)
