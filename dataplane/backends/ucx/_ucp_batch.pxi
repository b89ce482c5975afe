"""Part of `_ucp.pyx`: batches as objects, and the short way of a contiguous copy that one thread begins."""

cdef enum:
    STREAM_BYTES = 16 << 20  # from here on a copy goes past the cache, as in `dataplane.copying`


@cython.final
@cython.no_gc
cdef class UcpShare:
    """Rows that one batch carries, or several together. Whoever makes it keeps the local memory alive."""

    cdef share_t state
    cdef skipper_row row
    cdef object rows
    cdef int64_t nbytes

    def __cinit__(self):
        pthread_mutex_init(&self.state.lock, NULL)

    @staticmethod
    def single(uintptr_t local, uint64_t remote, int64_t nbytes):
        """One contiguous copy; the remote memory is that of key 0."""
        cdef UcpShare share = UcpShare()
        share.only(local, remote, nbytes)
        return share

    cdef void only(self, uintptr_t local, uint64_t remote, int64_t nbytes) noexcept:
        self.row.local = <int64_t>local
        self.row.remote = <int64_t>remote
        self.row.run = nbytes
        self.state.cursor.rows = &self.row
        self.state.cursor.end = 1
        self.nbytes = nbytes
        self.rewind()

    cdef void rewind(self) noexcept:
        """Be as if nobody had taken anything."""
        cdef const skipper_row *rows = self.state.cursor.rows
        cdef int64_t end = self.state.cursor.end
        memset(&self.state.cursor, 0, sizeof(skipper_cursor))
        self.state.cursor.rows = rows
        self.state.cursor.end = end
        self.state.left = self.nbytes
        self.state.stopped = 0

    @staticmethod
    def many(const int64_t[:, ::1] rows, int64_t nbytes):
        """All runs of `rows` (see rows.h), which have `nbytes` together. Their keys are indices into a batch's keys."""
        cdef UcpShare share = UcpShare()
        if rows.shape[0] == 0 or rows.shape[1] != SKIPPER_ROW_WORDS:
            raise ValueError("a batch needs rows of the right width")
        share.rows = rows
        share.state.cursor.rows = <const skipper_row *>&rows[0, 0]
        share.state.cursor.end = rows.shape[0]
        share.nbytes = share.state.left = nbytes
        return share

    def __dealloc__(self):
        pthread_mutex_destroy(&self.state.lock)


@cython.final
@cython.no_gc
cdef class Batch:
    """What one connection carries of a share, with the epoch words that guard it.

    The words are looked at before the data as well as after. Within a host the caller has mapped them (`words_here`);
    else they are fetched like the data. `by_message` the owner looks at them: then they are named by their addresses
    over there, and the keys of the rows are indices of words.

    Whoever creates a batch runs it by one thread at a time, to its end.
    """

    cdef batch_t state
    cdef readonly UcpEndpoint endpoint
    cdef UcpShare share
    cdef tuple keys
    cdef object arrays
    cdef ucp_rkey_h few_keys[2]
    cdef ucp_rkey_h *many_keys
    cdef uint64_t word_at
    cdef uint64_t word_expected
    cdef uint64_t word_found
    cdef int64_t word_key
    cdef uint64_t *many_found
    cdef waiting_t waiting

    def __cinit__(self, UcpEndpoint endpoint, tuple keys, UcpShare share, bint to_remote, int memory_type, bint words_here,
                  bint by_message):
        cdef Py_ssize_t count = len(keys)
        cdef Py_ssize_t i
        self.endpoint = endpoint
        self.keys = keys
        self.share = share
        self.state.keys = self.few_keys
        if count > 2:
            self.many_keys = self.state.keys = <ucp_rkey_h *>calloc(count, sizeof(ucp_rkey_h))
            if self.many_keys == NULL:
                raise MemoryError
        for i in range(count):
            self.state.keys[i] = (<RemoteKey?>keys[i]).handle
        self.state.endpoint = endpoint.state
        self.state.to_remote = to_remote
        self.state.memory_type = <ucs_memory_type_t>memory_type
        self.state.words_here = words_here
        self.state.result = RUNNING_
        if share is not None:
            self.state.share = &share.state
            share.state.batches += 1
        if by_message:
            self.state.waiting = &self.waiting
            self.state.desk = endpoint.worker.desk
            self.waiting.past_cache = share is not None and share.state.left >= STREAM_BYTES

    @staticmethod
    def single(UcpEndpoint endpoint, tuple keys, bint to_remote, int memory_type, uintptr_t local, uint64_t remote,
               int64_t nbytes, uint64_t word_at, uint64_t expected, bint words_here, bint by_message):
        """All of one contiguous copy, guarded by one word: what most operations are, in one call."""
        cdef Batch batch = Batch(endpoint, keys, UcpShare.single(local, remote, nbytes), to_remote, memory_type,
                                 words_here, by_message)
        batch.guard(word_at, expected)
        return batch

    @staticmethod
    def atomic(UcpEndpoint endpoint, bint swap, uint64_t at, uint64_t operand, uint64_t compare, uint64_t word_at,
               uint64_t expected):
        """An atomic operation on the peer's word `at`."""
        cdef Batch batch = Batch(endpoint, (), None, True, UCS_MEMORY_TYPE_HOST, False, True)
        batch.waiting.asks = 1
        batch.waiting.question.swap = swap
        batch.waiting.question.operand = operand
        batch.waiting.question.compare = compare
        batch.waiting.question.word.at = at
        batch.waiting.question.word.word_at = word_at
        batch.waiting.question.word.word_expected = expected
        return batch

    def guard(self, uint64_t word_at, uint64_t expected):
        """Be guarded by one word, in the memory of key 1."""
        self.word_at = word_at
        self.word_expected = expected
        self.word_key = 1
        self.state.nwords = 1
        self.state.word_at = &self.word_at
        self.state.word_key = &self.word_key
        self.state.word_expected = &self.word_expected
        self.state.word_found = &self.word_found

    cdef void again(self, bint to_remote, uintptr_t local, uint64_t remote, int64_t nbytes) noexcept:
        """Make a batch from `single` that has finished, and was no message, one for another copy of its memory."""
        self.share.only(local, remote, nbytes)
        self.state.to_remote = to_remote
        self.restart()

    def rewind(self):
        """Make a batch that has finished, was no message and shares with no other, ready to be run once more."""
        self.share.rewind()
        self.restart()

    cdef void restart(self) noexcept:
        self.state.phase = WORDS_BEFORE
        self.state.posted = 0
        self.state.resume_at = 0
        self.state.next_word = 0
        self.state.result = RUNNING_

    def guard_many(self, const uint64_t[::1] word_at, const int64_t[::1] word_key, const uint64_t[::1] expected):
        """Be guarded by these words; their keys are indices."""
        if not word_at.shape[0] or word_key.shape[0] != word_at.shape[0] or expected.shape[0] != word_at.shape[0]:
            raise ValueError("a batch needs words, each with its key and what is expected of it")
        self.many_found = <uint64_t *>calloc(word_at.shape[0], sizeof(uint64_t))
        if self.many_found == NULL:
            raise MemoryError
        self.arrays = (word_at, word_key, expected)
        self.state.nwords = word_at.shape[0]
        self.state.word_at = &word_at[0]
        self.state.word_key = &word_key[0]
        self.state.word_expected = &expected[0]
        self.state.word_found = self.many_found

    def advance(self, double spin_s, double deadline):
        """Run in the calling thread until over, or nothing has happened for `spin_s`, or `deadline` is reached.

        Returns:
            FINISHED, RUNNING, CHANGED, NOT_ALLOWED, or a negative ucs_status_t.
        """
        return self.run(spin_s, deadline)

    cdef int run(self, double spin_s, double deadline) noexcept:
        cdef UcpWorker worker = self.endpoint.worker
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
                if ucp_worker_progress(worker.handle) != 0 or has_more(&self.state) or self.state.phase != last:
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
    def sent(self):
        """Whether an atomic operation was given to UCX: it may then have taken place, also where it failed."""
        return self.waiting.sent != 0

    @property
    def previous(self):
        """What the word held before an atomic operation that is over."""
        return self.waiting.previous

    def changed(self):
        """The indices of the words that were not as expected when last looked at."""
        if self.state.waiting != NULL:
            return [self.waiting.refused_word]
        return [i for i in range(self.state.nwords) if self.state.word_found[i] != self.state.word_expected[i]]

    def __dealloc__(self):
        cdef UcpWorker worker = self.endpoint.worker
        cdef int i
        # Whoever drives a batch brings it to its end before letting go of it; an exception out of nowhere, such as
        # KeyboardInterrupt, may have prevented that. UCX must not write into what is about to be freed.
        if skipper_get(&self.state.pending) > 0 and worker.handle != NULL and worker.context.pid == getpid():
            close_endpoint(self.state.endpoint, worker.handle)
            while skipper_get(&self.state.pending) > 0:
                ucp_worker_progress(worker.handle)
        if self.waiting.ticket != 0:
            leave(&self.state)
        for i in range(CREDITS):
            free(self.waiting.parcels[i])
        free(self.many_keys)
        free(self.many_found)


@cython.final
@cython.no_gc
cdef class Way:
    """To one registration of a peer over one connection, for as long as that is usable. Thread-safe.

    What a copy needs is made once and used again: of the microsecond that a copy within the host costs beyond its
    system call, most is memory that the copy itself has driven out of the caches.
    """

    cdef readonly UcpEndpoint endpoint
    cdef tuple keys
    cdef uint64_t word_at
    cdef uint64_t expected
    cdef bint words_here
    cdef bint by_message
    cdef Batch spare  # over and done with, for the next copy

    def __cinit__(self, UcpEndpoint endpoint, tuple keys, uint64_t word_at, uint64_t expected, bint words_here,
                  bint by_message):
        self.endpoint = endpoint
        self.keys = keys
        self.word_at = word_at
        self.expected = expected
        self.words_here = words_here
        self.by_message = by_message

    @property
    def usable(self):
        """Whether nothing has failed on its connection and it is not closed."""
        return self.endpoint.state.handle != NULL and skipper_get(&self.endpoint.state.failed) == 0

    def copy(self, bint to_remote, uintptr_t local, uint64_t remote, int64_t nbytes, double spin_s, double deadline):
        """Copy host memory as `Batch.advance` does; give the batch if it did not succeed at once."""
        cdef Batch batch = self.spare
        self.spare = None  # with the GIL, so that no other thread gets the same
        if batch is None:
            batch = Batch.single(self.endpoint, self.keys, to_remote, UCS_MEMORY_TYPE_HOST, local, remote, nbytes,
                                 self.word_at, self.expected, self.words_here, self.by_message)
        else:
            batch.again(to_remote, local, remote, nbytes)
        if batch.run(spin_s, deadline) != FINISHED_:
            return batch
        if not self.by_message:
            self.spare = batch
        return None
