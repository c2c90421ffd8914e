/* Keeps the core of whoever waits for a moment from falling asleep: see awake.py.

   A thread without a word of Python wakes up every 150 us on the core that keep_awake was called from, as long as it asked
   for that. Its policy is SCHED_IDLE: it does not run while anybody else wants the core, and gives way at once to whoever
   wakes up. It takes no lock, allocates nothing, and handles no signal, so that neither a fork nor a kill finds anything
   half done. */

#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "_awake.h"

#define PAUSE 150000            /* ns that a core is left asleep; KVM gives one away after 200 us */
#define USELESS 8               /* looks in a row at which nobody had waited for a PAUSE, until they become rarer, */
#define LONGEST_PAUSE 4000000   /* up to so many ns apart */
#define LONGEST_REST 320000000  /* ns between attempts while waits do not end within KEEP_AWAKE_LONG */
#define STEADY 50               /* looks, some 8 ms, after which calls from the same core, or waits that end, are the rule */
#define STACK (256 << 10)       /* bytes, of which thread-local variables of large libraries take their part */

enum { NONE, RUNS, SLEEPS };    /* the thread */

static atomic_int state;
static _Atomic int64_t called, until;   /* CLOCK_MONOTONIC in ns: the last call, and the end of what it asked for */
static atomic_int core;                 /* where it came from */

int64_t
monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

static void
pause_for(int64_t ns)
{
    struct timespec sleep = {.tv_nsec = ns};
    nanosleep(&sleep, NULL);
}

static int64_t
doubled(int64_t ns, int64_t most)
{
    return ns < most / 2 ? 2 * ns : most;
}

/* Moves this thread to the core that calls come from, unless that is another one again and again: then it would push the
   others from core to core. */
static void
follow(void)
{
    static _Thread_local int on = -1, next = -1, stays;
    int from = atomic_load_explicit(&core, memory_order_relaxed);
    if (from != next) {
        next = from;
        stays = 0;
    }
    if (from == on || ++stays < STEADY || from < 0 || from >= CPU_SETSIZE)
        return;
    cpu_set_t cores;
    CPU_ZERO(&cores);
    CPU_SET(from, &cores);
    sched_setaffinity(0, sizeof(cores), &cores);    /* where that is not allowed it runs where it may */
    on = from;
}

static void *
tick(void *ignored)
{
    int useless = 0, steady = 0;
    int64_t pause = PAUSE, rest = PAUSE;
    struct sched_param none = {0};
    sched_setscheduler(0, SCHED_IDLE, &none);
    prctl(PR_SET_NAME, "batch-awake");
    prctl(PR_SET_TIMERSLACK, 1000);
    for (;;) {
        int64_t now = monotonic_ns(), begin = atomic_load(&called), end = atomic_load(&until);
        if (now < end) {
            follow();
            if (++steady >= STEADY)
                rest = PAUSE;
            if (now - begin >= PAUSE) {
                useless = 0;
                pause = PAUSE;
            }
            else if (++useless < USELESS) {
                pause = PAUSE - (now - begin);
            }
            else {
                pause = doubled(pause, LONGEST_PAUSE);
            }
            pause_for(pause);
        }
        else if (end - begin >= KEEP_AWAKE_LONG) {
            steady = 0;
            rest = doubled(rest, LONGEST_REST);
            pause_for(rest);
            atomic_compare_exchange_strong(&until, &end, 0);
        }
        else {
            atomic_store(&state, SLEEPS);
            while (atomic_load(&state) == SLEEPS)
                syscall(SYS_futex, &state, FUTEX_WAIT_PRIVATE, SLEEPS, NULL, NULL, 0);
        }
    }
    return NULL;
}

static void
start(void)
{
    pthread_t thread;
    pthread_attr_t attributes;
    sigset_t all, before;
    if (pthread_attr_init(&attributes) != 0)
        return;
    pthread_attr_setstacksize(&attributes, STACK);
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_create(&thread, &attributes, tick, NULL);   /* if there can be no more threads, it goes without */
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
}

void
keep_awake(int64_t ns)
{
    int none = NONE, sleeps = SLEEPS;
    int64_t now = monotonic_ns();
    atomic_store(&called, now);
    atomic_store(&until, now + ns);
    if (ns == 0)
        return;
    atomic_store_explicit(&core, sched_getcpu(), memory_order_relaxed);
    if (atomic_compare_exchange_strong(&state, &sleeps, RUNS))
        syscall(SYS_futex, &state, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    else if (atomic_compare_exchange_strong(&state, &none, RUNS))
        start();
}

static void
forget(void)
{
    atomic_store(&state, NONE);     /* a forked child has no such thread */
}

int
prepare_to_keep_awake(void)
{
    return pthread_atfork(NULL, NULL, forget);
}
