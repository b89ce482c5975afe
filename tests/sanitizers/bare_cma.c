/* Copies between processes as the kernel does them, without the sanitizers' look at the memory of this one.
 *
 * UCX finds out whether the kernel permits such copies by one between addresses that may have no shadow: the sanitizers'
 * own versions of these functions would die of that, and so would ThreadSanitizer's. Preloaded before the sanitizers' libraries, these are found first.
 */
#define _GNU_SOURCE
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

ssize_t process_vm_readv(pid_t pid, const struct iovec *local, unsigned long local_count, const struct iovec *remote,
                         unsigned long remote_count, unsigned long flags)
{
    return syscall(SYS_process_vm_readv, pid, local, local_count, remote, remote_count, flags);
}

ssize_t process_vm_writev(pid_t pid, const struct iovec *local, unsigned long local_count, const struct iovec *remote,
                          unsigned long remote_count, unsigned long flags)
{
    return syscall(SYS_process_vm_writev, pid, local, local_count, remote, remote_count, flags);
}
