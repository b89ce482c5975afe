"""A mutex that a thread may take again while it holds it, for `threading.Condition` too.

Those of Python 3.11 look at the clock whenever they are taken, whether they have to wait or not. Where the clock is a
system call, as in a guest kernel, that costs as much as handing a transfer to the device.
"""

cimport cython

cdef extern from "pthread.h" nogil:
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef unsigned long pthread_t
    int pthread_mutex_init(pthread_mutex_t *mutex, void *attributes)
    int pthread_mutex_lock(pthread_mutex_t *mutex)
    int pthread_mutex_unlock(pthread_mutex_t *mutex)
    int pthread_mutex_destroy(pthread_mutex_t *mutex)
    pthread_t pthread_self()


@cython.final
cdef class Mutex:
    """Held by one thread, any number of times. Waits without the GIL."""

    cdef pthread_mutex_t mutex
    # All of these change under the GIL. Who has waited holds the mutex a moment before it has the GIL to say so: the
    # mutex is free when nobody holds it and nobody waits. (pthread_mutex_trylock would tell, and would tie the wheel to
    # glibc 2.34, where it got a new version.)
    cdef pthread_t holder  # 0: nobody
    cdef int waiting
    cdef int depth

    def __cinit__(self):
        pthread_mutex_init(&self.mutex, NULL)

    def acquire(self, blocking=True):
        """Take it. Returns whether that was done."""
        if self.holder == pthread_self():
            self.depth += 1
            return True
        if self.holder == 0 and self.waiting == 0:
            pthread_mutex_lock(&self.mutex)
        elif blocking:
            self.waiting += 1
            with nogil:
                pthread_mutex_lock(&self.mutex)
            self.waiting -= 1
        else:
            return False
        self.holder = pthread_self()
        self.depth = 1
        return True

    def release(self):
        """Give it back, as often as it was taken."""
        if self.holder != pthread_self():
            raise RuntimeError("this thread does not hold the mutex")
        self.depth -= 1
        if self.depth == 0:
            self.holder = 0
            pthread_mutex_unlock(&self.mutex)

    def __enter__(self):
        return self.acquire()

    def __exit__(self, *error):
        self.release()

    # What a condition asks for: that there is a `locked` from 3.14 on, the others while it waits.

    def locked(self):
        """Whether a thread holds it."""
        return self.holder != 0

    def _is_owned(self):
        return self.holder == pthread_self()

    def _release_save(self):
        cdef int depth = self.depth
        self.depth = 1
        self.release()
        return depth

    def _acquire_restore(self, int depth):
        self.acquire()
        self.depth = depth

    def __dealloc__(self):
        pthread_mutex_destroy(&self.mutex)
