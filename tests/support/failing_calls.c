/* Calls on files below one directory, counted; the chosen one fails. Loaded with LD_PRELOAD.

   failing_arm(directory, number, code, lasting): the call `number` fails with errno `code`, and with `lasting`
   every later one, too; 0: none, they are counted alone. ENOSPC and EROFS count the calls alone that write,
   EINVAL and ENOSYS fsync of directories alone.
   failing_count(): so many calls were made since. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static char below[PATH_MAX];
static long at, made;
static int code, lasting;

void failing_arm(const char *directory, long number, int error, int goes_on) {
    strncpy(below, directory, sizeof below - 1);
    at = number, made = 0, code = error, lasting = goes_on;
}

long failing_count(void) { return made; }

/* Armed from the beginning by FAILING_CALLS="number code lasting directory". */
__attribute__((constructor)) static void failing_begin(void) {
    const char *how = getenv("FAILING_CALLS");
    long number;
    int error, goes_on, read_so_far = 0;
    if (how && sscanf(how, "%ld %d %d %n", &number, &error, &goes_on, &read_so_far) == 3)
        failing_arm(how + read_so_far, number, error, goes_on);
}

#define OF_DIRECTORY 2

static int fails(int is_ours, int writes) {
    if (!is_ours || (!writes && (code == ENOSPC || code == EROFS))) return 0;
    if (writes < OF_DIRECTORY && (code == EINVAL || code == ENOSYS)) return 0;
    long number = __atomic_add_fetch(&made, 1, __ATOMIC_SEQ_CST);
    if (at == 0 || (lasting ? number < at : number != at)) return 0;
    errno = code;
    return 1;
}

static int is_below(const char *path) {
    size_t length = strlen(below);
    return length && path && strncmp(path, below, length) == 0 && (path[length] == '/' || path[length] == 0);
}

static int descriptor_below(int descriptor) {
    char link[64], path[PATH_MAX];
    if (!below[0] || descriptor < 0) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    long length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}

static int name_below(int directory, const char *path) {
    if (path && path[0] == '/') return is_below(path);
    return directory != AT_FDCWD && descriptor_below(directory);
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define WRAP(type, name, takes, gives, is_ours, writes, failed)                                                \
    type name takes {                                                                                          \
        static __typeof__(&name) real;                                                                         \
        if (!real) real = REAL(name);                                                                          \
        if (fails(is_ours, writes)) return failed;                                                             \
        return real gives;                                                                                     \
    }
#define OPENS(flags) (((flags) & (O_CREAT | O_WRONLY | O_RDWR | O_TRUNC)) != 0)
#define WRAP_OPEN(name, takes, is_ours, ...)                                                                   \
    int name takes {                                                                                           \
        static __typeof__(&name) real;                                                                         \
        mode_t mode = 0;                                                                                       \
        if (flags & (O_CREAT | O_TMPFILE)) {                                                                   \
            va_list more;                                                                                      \
            va_start(more, flags);                                                                             \
            mode = va_arg(more, mode_t);                                                                       \
            va_end(more);                                                                                      \
        }                                                                                                      \
        if (!real) real = REAL(name);                                                                          \
        if (fails(is_ours, OPENS(flags))) return -1;                                                           \
        return real(__VA_ARGS__, flags, mode);                                                                 \
    }

WRAP_OPEN(open, (const char *path, int flags, ...), is_below(path), path)
WRAP_OPEN(open64, (const char *path, int flags, ...), is_below(path), path)
WRAP_OPEN(openat, (int in, const char *path, int flags, ...), name_below(in, path), in, path)
WRAP_OPEN(openat64, (int in, const char *path, int flags, ...), name_below(in, path), in, path)

WRAP(int, stat, (const char *path, struct stat *found), (path, found), is_below(path), 0, -1)
WRAP(int, stat64, (const char *path, struct stat64 *found), (path, found), is_below(path), 0, -1)
WRAP(int, lstat, (const char *path, struct stat *found), (path, found), is_below(path), 0, -1)
WRAP(int, lstat64, (const char *path, struct stat64 *found), (path, found), is_below(path), 0, -1)
WRAP(int, fstat, (int fd, struct stat *found), (fd, found), descriptor_below(fd), 0, -1)
WRAP(int, fstat64, (int fd, struct stat64 *found), (fd, found), descriptor_below(fd), 0, -1)
WRAP(int, fstatat, (int in, const char *path, struct stat *found, int how), (in, path, found, how),
     name_below(in, path), 0, -1)
WRAP(int, fstatat64, (int in, const char *path, struct stat64 *found, int how), (in, path, found, how),
     name_below(in, path), 0, -1)
WRAP(int, access, (const char *path, int mode), (path, mode), is_below(path), 0, -1)
WRAP(ssize_t, readlink, (const char *path, char *to, size_t size), (path, to, size), is_below(path), 0, -1)
WRAP(DIR *, opendir, (const char *path), (path), is_below(path), 0, NULL)
WRAP(DIR *, fdopendir, (int fd), (fd), descriptor_below(fd), 0, NULL)
WRAP(int, mkdir, (const char *path, mode_t mode), (path, mode), is_below(path), 1, -1)
WRAP(int, rmdir, (const char *path), (path), is_below(path), 1, -1)
WRAP(int, unlink, (const char *path), (path), is_below(path), 1, -1)
WRAP(int, unlinkat, (int in, const char *path, int how), (in, path, how), name_below(in, path), 1, -1)
WRAP(int, rename, (const char *from, const char *to), (from, to), is_below(to), 1, -1)
WRAP(int, link, (const char *from, const char *to), (from, to), is_below(to), 1, -1)
WRAP(int, linkat, (int in, const char *from, int at_, const char *to, int how), (in, from, at_, to, how),
     name_below(at_, to), 1, -1)
WRAP(int, symlink, (const char *to, const char *path), (to, path), is_below(path), 1, -1)
WRAP(int, chmod, (const char *path, mode_t mode), (path, mode), is_below(path), 1, -1)
WRAP(int, fchmodat, (int in, const char *path, mode_t mode, int how), (in, path, mode, how),
     name_below(in, path), 1, -1)
WRAP(int, fchmod, (int fd, mode_t mode), (fd, mode), descriptor_below(fd), 1, -1)
WRAP(ssize_t, read, (int fd, void *to, size_t size), (fd, to, size), descriptor_below(fd), 0, -1)
WRAP(ssize_t, pread, (int fd, void *to, size_t size, off_t from), (fd, to, size, from), descriptor_below(fd), 0,
     -1)
WRAP(ssize_t, pread64, (int fd, void *to, size_t size, off64_t from), (fd, to, size, from),
     descriptor_below(fd), 0, -1)
WRAP(ssize_t, write, (int fd, const void *from, size_t size), (fd, from, size), descriptor_below(fd), 1, -1)
WRAP(ssize_t, pwrite, (int fd, const void *from, size_t size, off_t to), (fd, from, size, to),
     descriptor_below(fd), 1, -1)
WRAP(ssize_t, pwrite64, (int fd, const void *from, size_t size, off64_t to), (fd, from, size, to),
     descriptor_below(fd), 1, -1)
WRAP(int, ftruncate, (int fd, off_t size), (fd, size), descriptor_below(fd), 1, -1)
WRAP(int, ftruncate64, (int fd, off64_t size), (fd, size), descriptor_below(fd), 1, -1)
static int syncs(int fd) {
    struct stat found;
    return fstatat(fd, "", &found, AT_EMPTY_PATH) == 0 && S_ISDIR(found.st_mode) ? OF_DIRECTORY : 1;
}

WRAP(int, fsync, (int fd), (fd), descriptor_below(fd), syncs(fd), -1)
WRAP(int, fdatasync, (int fd), (fd), descriptor_below(fd), 1, -1)

int flock(int fd, int how) {
    static int (*real)(int, int);
    if (!real) real = (int (*)(int, int))dlsym(RTLD_NEXT, "flock");
    if (fails(descriptor_below(fd), 0)) return -1;
    return real(fd, how);
}

/* The descriptor is closed, whatever is reported, as network file systems do it. */
int close(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "close");
    int failed = fails(descriptor_below(fd), 1), why = errno, done = real(fd);
    if (!failed) return done;
    errno = why;
    return -1;
}
