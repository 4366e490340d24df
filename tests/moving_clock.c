/* The time of day of a process, off by as many seconds as the file $MOVING_CLOCK says; loaded before all else.

   As when somebody sets a machine's clock: clocks that nobody sets go on as they are. libfaketime 0.9.10 cannot: there
   time.sleep of Python 3.11 fails (https://github.com/wolfcw/libfaketime/issues/426). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long offset_seconds(void) {
    const char *path = getenv("MOVING_CLOCK");
    char text[32] = {0};
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0) : -1;
    if (file < 0) return 0;
    syscall(SYS_read, file, text, sizeof text - 1);
    syscall(SYS_close, file);
    return atol(text);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += offset_seconds();
    return failed;
}

int gettimeofday(struct timeval *now, void *zone) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *now) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (now) *now = found.tv_sec;
    return found.tv_sec;
}

/* Who waits until a time of day means ours; the kernel knows its own. */
static struct timespec kernels(const struct timespec *ours) {
    struct timespec found = *ours;
    found.tv_sec -= offset_seconds();
    if (found.tv_sec < 0) found.tv_sec = 0;
    return found;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    struct timespec found = kernels(until);
    return sem_clockwait(semaphore, CLOCK_REALTIME, &found);
}

int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *until) {
    static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    if (!next) *(void **)&next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
    struct timespec now, found = *until;
    syscall(SYS_clock_gettime, CLOCK_MONOTONIC, &now); /* a condition of the monotonic clock: days, not decades */
    if (until->tv_sec > now.tv_sec + 10L * 365 * 86400) found = kernels(until);
    return next(condition, mutex, &found);
}
