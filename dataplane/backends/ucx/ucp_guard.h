/* Keeps an owner alive when a reader is gone before its request to connect is answered: a fault of UCX 1.22.

   A worker that receives such a request makes an endpoint for it (ucp_wireup_process_request) and selects its lanes
   (ucp_wireup_init_lanes). Where the other process has ended meanwhile, no transport reaches it, and the endpoint is
   left without a configuration: its cfg_index stays UCP_WORKER_CFG_INDEX_NULL, which is 0xffff. It is then scheduled to
   fail (ucp_ep_set_lanes_failed_schedule), and what runs for that takes worker->ep_config[cfg_index] without a look at
   the index, 273 MB behind an array of a few entries: SIGSEGV. Two functions do so. Others that meet such an endpoint
   (ucp_ep_destroy_base, ucp_worker_keepalive_remove_ep, ucp_worker_do_keepalive_progress) compare with 0xffff.

       ucp_ep_set_lanes_failed(ep, lanes, status)   reads how errors are handled and which lanes to discard. Of an
                                                    endpoint that no user holds, such as this one, it makes an end by
                                                    ucp_ep_disconnected(ep, 1).
       ucp_ep_cleanup_lanes(ep)                     reads how many lanes there are to destroy. ucp_ep_disconnected
                                                    calls it, and so does ucp_wireup_send_ep_removed, which tells a
                                                    peer that its endpoint here is gone, where that peer is gone, too.

   Neither has anything to do for an endpoint that has no lanes. Inside of libucp both are called through its procedure
   linkage table, since they are global and the library is not linked with -Bsymbolic. So their two jump slots are made
   to point to what is below, which looks at the index first.

   And keeps every process alive whose bell is rung by a stranger: a fault of all versions so far. Shared memory of UCX
   has a Unix datagram socket for each worker, under an abstract name that all users of the host can see. Who has put
   something there sends a byte to it, and before a worker sleeps it reads one (uct_mm_iface_event_fd_arm). A datagram
   without a byte reads as the end of a connection, and what is made of that ends the process, even while the worker is
   being made (ucp_worker_iface_check_events). So the slot by which libuct calls recvfrom, which it does there alone, is
   made to point to what is below, for which such a datagram is one with a byte, and which counts them: who rings all the
   time would else have an owner sleep with a transport that is not watched (see UcpWorker.serve).

   What is relied on beyond UCX's public headers was read off the debug information of the library in libucx-cu12 1.22.0
   (ptype struct ucp_ep, disassemble): the first members of an endpoint, and the three signatures. So nothing is done
   for a library of another version, or where the slots are not found. 1.22 without them dies as it did before. For the
   bells it is the one slot, in any version. */

#ifndef SKIPPER_UCP_GUARD_H
#define SKIPPER_UCP_GUARD_H

#include <elf.h>
#include <link.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#include <ucp/api/ucp.h>

#define SKIPPER_GUARD_IN_PLACE 1
#define SKIPPER_GUARD_NOT_NEEDED 0
#define SKIPPER_GUARD_NOT_POSSIBLE (-1)

#if defined(__x86_64__)
#define SKIPPER_JUMP_SLOT R_X86_64_JUMP_SLOT
#elif defined(__aarch64__)
#define SKIPPER_JUMP_SLOT R_AARCH64_JUMP_SLOT
#endif

#ifdef SKIPPER_JUMP_SLOT

#define SKIPPER_NO_CONFIG UINT16_MAX

/* How struct ucp_ep of 1.22 begins. */
typedef struct {
    void *worker;
    uint16_t cfg_index;
} skipper_ep;

static void (*skipper_set_lanes_failed)(skipper_ep *ep, uint64_t lanes, ucs_status_t status);
static void (*skipper_cleanup_lanes)(skipper_ep *ep);
static void (*skipper_disconnected)(skipper_ep *ep, int force);

static void skipper_guard_set_lanes_failed(skipper_ep *ep, uint64_t lanes, ucs_status_t status)
{
    if (ep->cfg_index == SKIPPER_NO_CONFIG)
        skipper_disconnected(ep, 1);
    else
        skipper_set_lanes_failed(ep, lanes, status);
}

static void skipper_guard_cleanup_lanes(skipper_ep *ep)
{
    if (ep->cfg_index != SKIPPER_NO_CONFIG)
        skipper_cleanup_lanes(ep);
}

typedef struct {
    uintptr_t within; /* an address in the library that is looked for; or else */
    const char *name; /* how the name of its file begins */
    uintptr_t base;
    const ElfW(Dyn) *dynamic;
    uintptr_t relro_begin, relro_end;
} skipper_library;

static int skipper_find_library(struct dl_phdr_info *info, size_t size, void *arg)
{
    skipper_library *library = arg;
    const ElfW(Phdr) *part;
    const char *file = strrchr(info->dlpi_name, '/');
    uintptr_t begin;
    int found = library->name != NULL && file != NULL && strncmp(file + 1, library->name, strlen(library->name)) == 0;
    (void)size;
    for (part = info->dlpi_phdr; part < info->dlpi_phdr + info->dlpi_phnum; part++) {
        begin = info->dlpi_addr + part->p_vaddr;
        found |= library->name == NULL && part->p_type == PT_LOAD && library->within - begin < part->p_memsz;
    }
    if (!found)
        return 0;
    library->base = info->dlpi_addr;
    for (part = info->dlpi_phdr; part < info->dlpi_phdr + info->dlpi_phnum; part++) {
        begin = info->dlpi_addr + part->p_vaddr;
        if (part->p_type == PT_DYNAMIC)
            library->dynamic = (const ElfW(Dyn) *)begin;
        if (part->p_type == PT_GNU_RELRO) {
            library->relro_begin = begin;
            library->relro_end = begin + part->p_memsz;
        }
    }
    return 1;
}

/* A value of the dynamic section that is an address: glibc has added the base to it, musl has not. */
static uintptr_t skipper_dynamic(const skipper_library *library, ElfW(Sxword) tag)
{
    const ElfW(Dyn) *entry;
    for (entry = library->dynamic; entry != NULL && entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == tag)
            return entry->d_un.d_ptr < library->base ? library->base + entry->d_un.d_ptr : entry->d_un.d_ptr;
    return 0;
}

/* The size of a table in the dynamic section, or another number of it. */
static size_t skipper_number(const skipper_library *library, ElfW(Sxword) tag)
{
    const ElfW(Dyn) *entry;
    for (entry = library->dynamic; entry != NULL && entry->d_tag != DT_NULL; entry++)
        if (entry->d_tag == tag)
            return entry->d_un.d_val;
    return 0;
}

/* The slot by which the library calls a function, and where that is, if it is one of its own. NULL: it has none. */
static uintptr_t *skipper_slot(const skipper_library *library, const char *name, uintptr_t *function)
{
    const ElfW(Rela) *entry = (const ElfW(Rela) *)skipper_dynamic(library, DT_JMPREL);
    const ElfW(Rela) *end = entry + skipper_number(library, DT_PLTRELSZ) / sizeof(*entry);
    const ElfW(Sym) *symbols = (const ElfW(Sym) *)skipper_dynamic(library, DT_SYMTAB);
    const char *names = (const char *)skipper_dynamic(library, DT_STRTAB);
    if (entry == NULL || symbols == NULL || names == NULL || skipper_number(library, DT_PLTREL) != DT_RELA)
        return NULL;
    for (; entry < end; entry++) {
        const ElfW(Sym) *symbol = symbols + ELF64_R_SYM(entry->r_info);
        if (ELF64_R_TYPE(entry->r_info) != SKIPPER_JUMP_SLOT || (symbol->st_shndx == SHN_UNDEF) != (function == NULL))
            continue;
        if (strcmp(names + symbol->st_name, name) == 0) {
            if (function != NULL)
                *function = library->base + symbol->st_value;
            return (uintptr_t *)(library->base + entry->r_offset);
        }
    }
    return NULL;
}

/* Point a slot elsewhere, which is made writable for that where the loader has closed it after relocation. */
static int skipper_point(const skipper_library *library, uintptr_t *slot, uintptr_t to)
{
    uintptr_t at = (uintptr_t)slot, nbytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    void *page = (void *)(at & -nbytes);
    int closed = at >= library->relro_begin && at < (library->relro_end & -nbytes);
    if (closed && mprotect(page, nbytes, PROT_READ | PROT_WRITE) != 0)
        return 0;
    __atomic_store_n(slot, to, __ATOMIC_RELEASE);
    if (closed)
        mprotect(page, nbytes, PROT_READ);
    return 1;
}

static int skipper_guard_library(void)
{
    skipper_library library = {.within = (uintptr_t)&ucp_get_version};
    uintptr_t set_lanes_failed, cleanup_lanes, disconnected;
    uintptr_t *first, *second;
    if (!dl_iterate_phdr(skipper_find_library, &library))
        return SKIPPER_GUARD_NOT_POSSIBLE;
    first = skipper_slot(&library, "ucp_ep_set_lanes_failed", &set_lanes_failed);
    second = skipper_slot(&library, "ucp_ep_cleanup_lanes", &cleanup_lanes);
    if (first == NULL || second == NULL || skipper_slot(&library, "ucp_ep_disconnected", &disconnected) == NULL)
        return SKIPPER_GUARD_NOT_POSSIBLE;
    skipper_set_lanes_failed = (void (*)(skipper_ep *, uint64_t, ucs_status_t))set_lanes_failed;
    skipper_cleanup_lanes = (void (*)(skipper_ep *))cleanup_lanes;
    skipper_disconnected = (void (*)(skipper_ep *, int))disconnected;
    if (!skipper_point(&library, second, (uintptr_t)&skipper_guard_cleanup_lanes)
        || !skipper_point(&library, first, (uintptr_t)&skipper_guard_set_lanes_failed))
        return SKIPPER_GUARD_NOT_POSSIBLE;
    return SKIPPER_GUARD_IN_PLACE;
}

static unsigned skipper_rings; /* how often a bell of this process has been heard */

static ssize_t skipper_guard_recvfrom(
    int fd, void *into, size_t nbytes, int flags, struct sockaddr *from, socklen_t *length)
{
    ssize_t got = recvfrom(fd, into, nbytes, flags, from, length);
    if (got >= 0)
        __atomic_add_fetch(&skipper_rings, 1, __ATOMIC_RELAXED);
    return got == 0 && nbytes > 0 ? 1 : got;
}

static unsigned skipper_rings_heard(void)
{
    return __atomic_load_n(&skipper_rings, __ATOMIC_RELAXED);
}

/* Guard the bells of all workers to come. To be called before there is one; again is harmless. */
static int skipper_guard_bells(void)
{
    skipper_library library = {.name = "libuct.so"}; /* libucp, which is loaded, has loaded it */
    uintptr_t *slot;
    if (!dl_iterate_phdr(skipper_find_library, &library))
        return SKIPPER_GUARD_NOT_POSSIBLE;
    slot = skipper_slot(&library, "recvfrom", NULL);
    if (slot == NULL || !skipper_point(&library, slot, (uintptr_t)&skipper_guard_recvfrom))
        return SKIPPER_GUARD_NOT_POSSIBLE;
    return SKIPPER_GUARD_IN_PLACE;
}

#else

static int skipper_guard_library(void)
{
    return SKIPPER_GUARD_NOT_POSSIBLE;
}

static unsigned skipper_rings_heard(void)
{
    return 0;
}

static int skipper_guard_bells(void)
{
    return SKIPPER_GUARD_NOT_POSSIBLE;
}

#endif

/* Guard the library that is loaded. To be called before it is used; again it does nothing. Holds the GIL. */
static int skipper_guard(void)
{
    static int known, state;
    unsigned major, minor, release;
    if (!known) {
        ucp_get_version(&major, &minor, &release);
        state = major == 1 && minor == 22 ? skipper_guard_library() : SKIPPER_GUARD_NOT_NEEDED;
        known = 1;
    }
    return state;
}

#endif
