/* Memfds whose size is sealed, made and opened in one step each: a buffer's first use takes two of both, and as calls of
 * Python's `os` they would cost as much again. Both return -1 and errno where the system refuses.
 */
#ifndef SKIPPER_SEALED_H
#define SKIPPER_SEALED_H

#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    SKIPPER_SEALS = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL,
    SKIPPER_LONGEST_LINK = 64,
};

static inline int skipper_closed(int fd, int why)
{
    close(fd);
    errno = why;
    return -1;
}

/* Makes a memfd of `nbytes` bytes, the last `page` of which begin with `header`; its descriptor. By numbers of system
 * calls: glibc's functions of these names are newer than all else of it that is used here. */
static inline int skipper_make_sealed(const char *name, int64_t nbytes, int64_t page, const void *header, size_t length)
{
    int fd = (int)syscall(SYS_memfd_create, name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0)
        return -1;
    /* It has no name that others could open, and no mode for them either. */
    if (fchmod(fd, 0600) || ftruncate(fd, nbytes) || pwrite(fd, header, length, nbytes - page) != (ssize_t)length ||
        syscall(SYS_fcntl, fd, F_ADD_SEALS, SKIPPER_SEALS))
        return skipper_closed(fd, errno);
    return fd;
}

/* Opens `path` if it leads to `link`, and puts its size and what its last page begins with where the arguments say: a
 * descriptor, or -1 with errno, which is EMEDIUMTYPE for what is no sealed memfd of whole pages. */
static inline int skipper_open_sealed(const char *path, const char *link, int64_t page, int64_t *nbytes, void *header,
                                      size_t length)
{
    char target[SKIPPER_LONGEST_LINK];
    /* The link first: to open anything else under that number (a pipe, a terminal) could have effects. */
    ssize_t target_nbytes = readlink(path, target, sizeof target);
    if (target_nbytes < 0)
        return -1;
    if ((size_t)target_nbytes != strlen(link) || memcmp(target, link, target_nbytes)) {
        errno = EMEDIUMTYPE;
        return -1;
    }
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return -1;
    int seals = (int)syscall(SYS_fcntl, fd, F_GET_SEALS);
    *nbytes = lseek(fd, 0, SEEK_END);
    if (seals < 0 || (seals & SKIPPER_SEALS) != SKIPPER_SEALS || *nbytes <= page || *nbytes % page ||
        pread(fd, header, length, *nbytes - page) != (ssize_t)length)
        return skipper_closed(fd, EMEDIUMTYPE);
    return fd;
}

#endif
