"""Part of `_ucp.pyx`: the owner's side of `_ucp_messages.pxi`, run by whoever progresses the worker that answers.

Whatever a message says is checked here, and only what was exported is touched. What is not in the form of a message is
not answered.
"""

# The answer to a ASK_READ. It holds no bytes: they are looked up and packed when UCX has room for them.
cdef struct reply_t:
    exports_t *exports
    head_t head
    verdict_t verdict
    uint64_t nbytes
    item_t items[MOST_ITEMS]


cdef uint64_t understood(const void *header, size_t header_length, const ucp_am_recv_param_t *info,
                         request_t *request) noexcept nogil:
    """Take a request out of its message: how many bytes it is about, or 0 where it is none."""
    cdef uint64_t nbytes = 0
    cdef uint64_t i
    if header_length < sizeof(head_t) or not info.recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP:
        return 0
    memcpy(&request.head, header, sizeof(head_t))
    if request.head.count > MOST_ITEMS or header_length != sizeof(head_t) + request.head.count * sizeof(item_t):
        return 0
    memcpy(request.items, <const char *>header + sizeof(head_t), request.head.count * sizeof(item_t))
    for i in range(request.head.count):
        if request.items[i].nbytes > MESSAGE_BYTES - nbytes:
            return 0
        nbytes += request.items[i].nbytes
    return nbytes


cdef ucs_status_t on_forget(void *arg, const void *header, size_t header_length, void *data, size_t length,
                            const ucp_am_recv_param_t *info) noexcept nogil:
    cdef desk_t *desk = <desk_t *>arg
    cdef uint64_t number
    cdef size_t i
    for i in range(header_length // 8):
        memcpy(&number, <const char *>header + 8 * i, 8)
        if not is_forgotten(desk, number):
            desk.forgotten[desk.forgotten_ever % FORGOTTEN] = number
            desk.forgotten_ever += 1
    return UCS_OK


cdef int is_forgotten(desk_t *desk, uint64_t connection) noexcept nogil:
    """Whether what comes from a connection is to be ignored. Only what the one UCX thread of the owner calls."""
    cdef uint64_t i
    for i in range(min(desk.forgotten_ever, <uint64_t>FORGOTTEN)):
        if desk.forgotten[i] == connection:
            return 1
    return 0


cdef ucs_status_t on_read(void *arg, const void *header, size_t header_length, void *data, size_t length,
                          const ucp_am_recv_param_t *info) noexcept nogil:
    cdef desk_t *desk = <desk_t *>arg
    cdef request_t request
    cdef reply_t *reply
    cdef ucp_request_param_t param
    cdef uint64_t nbytes = understood(header, header_length, info, &request)
    cdef size_t items = request.head.count * sizeof(item_t) if nbytes != 0 else 0
    if nbytes == 0:
        return UCS_OK
    reply = <reply_t *>malloc(sizeof(reply_t) - sizeof(request.items) + items)
    if reply == NULL:
        return UCS_OK
    reply.exports = desk.exports
    reply.head = request.head
    reply.verdict.status = GRANTED
    reply.verdict.item = 0
    reply.nbytes = nbytes
    memcpy(reply.items, request.items, items)
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = (UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS
                          | UCP_OP_ATTR_FIELD_DATATYPE)
    param.flags = UCP_AM_SEND_FLAG_EAGER
    param.datatype = desk.reply
    send_back(info.reply_ep, BYTES, reply, &reply.head, sizeof(head_t), reply, 1, &param)
    return UCS_OK


cdef ucs_status_t on_write(void *arg, const void *header, size_t header_length, void *data, size_t length,
                           const ucp_am_recv_param_t *info) noexcept nogil:
    cdef exports_t *exports = (<desk_t *>arg).exports
    cdef const char *at = <const char *>data
    cdef request_t request
    cdef answer_t answer
    cdef uint64_t nbytes = understood(header, header_length, info, &request)
    cdef uint64_t i
    if nbytes == 0 or nbytes != length or info.recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV:
        return UCS_OK
    if is_forgotten(<desk_t *>arg, request.head.connection):
        return UCS_OK
    memset(&answer, 0, sizeof(answer_t))
    answer.head = request.head
    for i in range(request.head.count):
        pthread_mutex_lock(&exports.lock)
        answer.verdict.status = asked_for(exports, &request.items[i], 1)
        if answer.verdict.status == GRANTED:
            move(<void *>request.items[i].at, at, request.items[i].nbytes, request.head.past_cache != 0)
        pthread_mutex_unlock(&exports.lock)
        if answer.verdict.status != GRANTED:
            answer.verdict.item = i
            break
        at += request.items[i].nbytes
    send_answer(info.reply_ep, &answer)
    return UCS_OK


cdef ucs_status_t on_atomic(void *arg, const void *header, size_t header_length, void *data, size_t length,
                            const ucp_am_recv_param_t *info) noexcept nogil:
    cdef exports_t *exports = (<desk_t *>arg).exports
    cdef question_t question
    cdef answer_t answer
    if header_length != sizeof(question_t) or not info.recv_attr & UCP_AM_RECV_ATTR_FIELD_REPLY_EP:
        return UCS_OK
    memcpy(&question, header, sizeof(question_t))
    if is_forgotten(<desk_t *>arg, question.head.connection):
        return UCS_OK
    memset(&answer, 0, sizeof(answer_t))
    answer.head = question.head
    question.word.nbytes = 8
    pthread_mutex_lock(&exports.lock)
    answer.verdict.status = asked_for(exports, &question.word, 1)
    if answer.verdict.status == GRANTED and question.word.at % 8:
        answer.verdict.status = REFUSED_
    if answer.verdict.status == GRANTED and question.swap:
        answer.previous = skipper_compare_and_swap(question.word.at, question.compare, question.operand)
    elif answer.verdict.status == GRANTED:
        answer.previous = skipper_fetch_add(question.word.at, question.operand)
    pthread_mutex_unlock(&exports.lock)
    send_answer(info.reply_ep, &answer)
    return UCS_OK


cdef void send_answer(ucp_ep_h ep, const answer_t *answer) noexcept nogil:
    cdef ucp_request_param_t param
    cdef answer_t *kept = <answer_t *>malloc(sizeof(answer_t))
    if kept == NULL:
        return
    kept[0] = answer[0]
    memset(&param, 0, sizeof(param))
    param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA
    send_back(ep, ANSWER, kept, kept, sizeof(answer_t), NULL, 0, &param)


cdef void send_back(ucp_ep_h ep, unsigned message, void *kept, const void *header, size_t header_length,
                    const void *content, size_t count, ucp_request_param_t *param) noexcept nogil:
    """Send a message and free `kept` when UCX has sent it, or will never."""
    cdef ucs_status_ptr_t request
    param.cb.send = on_sent_back
    param.user_data = kept
    request = ucp_am_send_nbx(ep, message, header, header_length, content, count, param)
    if request == NULL or UCS_PTR_IS_ERR(request):
        free(kept)


cdef void on_sent_back(void *request, ucs_status_t status, void *arg) noexcept nogil:
    ucp_request_free(request)
    free(arg)


cdef size_t reply_nbytes(void *state) noexcept nogil:
    return (<reply_t *>state).nbytes + sizeof(verdict_t)


cdef size_t pack_reply(void *state, size_t offset, void *into, size_t room) noexcept nogil:
    """Copy what was asked for, each stretch while it is there; zeros, and a verdict at the end, for what is not."""
    cdef reply_t *reply = <reply_t *>state
    cdef size_t done = 0
    cdef size_t part
    cdef uint64_t i
    cdef int status
    for i in range(reply.head.count):
        if done == room:
            return done
        if offset >= reply.items[i].nbytes:
            offset -= reply.items[i].nbytes
            continue
        part = min(reply.items[i].nbytes - offset, room - done)
        pthread_mutex_lock(&reply.exports.lock)
        status = asked_for(reply.exports, &reply.items[i], 0)
        if status == GRANTED:
            memcpy(<char *>into + done, <const char *>reply.items[i].at + offset, part)
        pthread_mutex_unlock(&reply.exports.lock)
        if status != GRANTED:
            memset(<char *>into + done, 0, part)
            if reply.verdict.status == GRANTED:
                reply.verdict.status = status
                reply.verdict.item = i
        done += part
        offset = 0
    part = min(sizeof(verdict_t) - offset, room - done)
    memcpy(<char *>into + done, <const char *>&reply.verdict + offset, part)
    return done + part


ctypedef size_t (*nbytes_of_t)(void *state) noexcept nogil
ctypedef size_t (*pack_t)(void *state, size_t offset, void *into, size_t room) noexcept nogil


cdef ucp_datatype_t datatype(nbytes_of_t nbytes, pack_t pack) except? 0:
    """A datatype of UCX that is sent only, by such functions."""
    cdef ucp_generic_dt_ops_t ops
    cdef ucp_datatype_t made
    memset(&ops, 0, sizeof(ops))
    ops.start_pack = same_state
    ops.packed_size = nbytes
    ops.pack = pack
    ops.finish = nothing_to_finish
    check("ucp_dt_create_generic", ucp_dt_create_generic(&ops, NULL, &made))
    return made
