/* The threads of an engine, the queues, and the end of a batch.

   Threads: one mutex guards all that is not atomic; it is held for list operations alone, never
   during a system call on a file, a copy or a hash. The owner calls engine_*; each thread runs
   `work`. They block every signal and know no Python, so that neither a handler nor the
   interpreter's lock ever holds one up.

   Ownership: parts belong to their batch. A batch is in nobody's list while its parts wait or move;
   when the last has ended it goes to `ended`, until the owner takes it. A worker is freed by the
   owner, who joins its thread first; one that hangs at `close` is detached, and it, its engine and
   its batch are kept for ever. */

#include "block_io.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum {
    STACK_BYTES = 1 << 20, /* address space; what is not touched costs nothing */
    LOOK_AHEAD = 16,       /* parts passed over to find one whose file nobody writes to */
    MAX_WRITERS = 2,       /* into one file */
    NAME_BYTES = 16,       /* what the kernel keeps of a thread's name */
};

struct thread {
    struct worker worker;
    struct thread *next;
    pthread_t id;
    int direction; /* which it prefers */
    int file;      /* the descriptor it writes to; -1: none */
    bool is_replaced;
    bool has_ended;
    bool is_detached;
};

struct queue {
    struct part *first;
    struct part **last; /* where the next part is linked */
    int num_batches;    /* of which something waits */
};

struct engine {
    pthread_mutex_t mutex;
    pthread_cond_t wake[NUM_DIRECTIONS];
    pthread_cond_t thread_ended;
    struct queue queues[NUM_DIRECTIONS];
    int idle[NUM_DIRECTIONS];  /* threads that wait, and that nobody has woken yet */
    int wakes[NUM_DIRECTIONS]; /* threads that were woken, and have not noticed yet */
    struct thread *threads;
    int num_alive;
    int num_spares; /* threads that stand for one that hangs */
    struct batch *ended;
    struct batch **last_ended;
    bool is_told; /* the owner, by the eventfd, of what is in `ended` */
    bool is_closing;
    uint64_t last_ticket;

    int event_fd;
    char name[NAME_BYTES];
    struct limits limits;
    struct file_calls files;
    struct hashes hashes;
    struct counters counters;
};

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void tell_owner(struct engine *engine)
{
    uint64_t one = 1;
    /* It can fail only when nobody has read for 2^64 writes. */
    ssize_t ignored = write(engine->event_fd, &one, sizeof one);
    (void)ignored;
}

/* -- queues; under the mutex -------------------------------------------------------------------- */

static int direction_of(const struct batch *batch)
{
    return batch->is_store ? STORES : LOADS;
}

static struct part *unlink_part(struct queue *queue, struct part **link)
{
    struct part *part = *link;
    *link = part->next;
    if (queue->last == &part->next)
        queue->last = link;
    if (--part->batch->num_waiting == 0)
        queue->num_batches--;
    return part;
}

static int num_writers(const struct engine *engine, int file)
{
    int num = 0;
    for (const struct thread *thread = engine->threads; thread != NULL; thread = thread->next)
        num += file != -1 && thread->file == file && !thread->is_replaced;
    return num;
}

/* Takes the part, among the first, whose file the fewest write to. The kernel lets one write at a
   time into a file: a second thread has its piece hashed by then, a third would only wait. */
static struct part *take_part(struct engine *engine, int preferred)
{
    for (int turn = 0; turn < NUM_DIRECTIONS; turn++) {
        struct queue *queue = &engine->queues[turn == 0 ? preferred : !preferred];
        struct part **link = &queue->first, **best = NULL;
        int fewest = MAX_WRITERS;
        for (int seen = 0; *link != NULL && seen < LOOK_AHEAD && fewest > 0; seen++) {
            int num = num_writers(engine, (*link)->file);
            if (num < fewest) {
                fewest = num;
                best = link;
            }
            link = &(*link)->next;
        }
        if (best != NULL)
            return unlink_part(queue, best);
    }
    return NULL;
}

/* Counts parts of a batch as done; tells whether the owner must be told. */
static bool end_parts(struct engine *engine, struct batch *batch, size_t num_parts)
{
    batch->num_unfinished -= num_parts;
    if (batch->num_unfinished != 0)
        return false;
    batch->next = NULL;
    *engine->last_ended = batch;
    engine->last_ended = &batch->next;
    bool must_tell = !engine->is_told;
    engine->is_told = true;
    return must_tell;
}

/* Takes back what waits, of one batch or (0) of all; tells whether the owner must be told. */
static bool cancel_waiting(struct engine *engine, uint64_t ticket)
{
    bool must_tell = false;
    for (int direction = 0; direction < NUM_DIRECTIONS; direction++) {
        struct queue *queue = &engine->queues[direction];
        struct part **link = &queue->first;
        while (*link != NULL) {
            if (ticket != 0 && (*link)->batch->ticket != ticket) {
                link = &(*link)->next;
                continue;
            }
            struct part *part = unlink_part(queue, link);
            cancel_part(part);
            must_tell |= end_parts(engine, part->batch, 1);
        }
    }
    return must_tell;
}

/* -- threads ------------------------------------------------------------------------------------ */

static void wait_for_work(struct engine *engine, int direction)
{
    engine->idle[direction]++;
    while (engine->wakes[direction] == 0)
        pthread_cond_wait(&engine->wake[direction], &engine->mutex);
    engine->wakes[direction]--;
}

/* Chooses idle threads to wake for some parts, those first that prefer this direction. */
static void choose_idle(struct engine *engine, int direction, size_t num_parts, int chosen[])
{
    for (int turn = 0; turn < NUM_DIRECTIONS; turn++, direction = !direction) {
        int num = engine->idle[direction];
        if ((size_t)num > num_parts)
            num = (int)num_parts;
        engine->idle[direction] -= num;
        engine->wakes[direction] += num;
        chosen[direction] = num;
        num_parts -= (size_t)num;
    }
}

static void *work(void *argument)
{
    struct thread *self = argument;
    struct engine *engine = self->worker.engine;
    pthread_setname_np(pthread_self(), engine->name);
    pthread_mutex_lock(&engine->mutex);
    for (;;) {
        if (self->is_replaced)
            break;
        struct part *part = take_part(engine, self->direction);
        if (part == NULL) {
            if (engine->is_closing)
                break;
            wait_for_work(engine, self->direction);
            continue;
        }
        self->file = part->file;
        pthread_mutex_unlock(&engine->mutex);
        do_part(&self->worker, part);
        pthread_mutex_lock(&engine->mutex);
        self->file = -1;
        if (end_parts(engine, part->batch, 1)) { /* from here on the part may be gone */
            pthread_mutex_unlock(&engine->mutex);
            tell_owner(engine);
            pthread_mutex_lock(&engine->mutex);
        }
    }
    if (self->is_replaced)
        engine->num_spares--;
    self->has_ended = true;
    engine->num_alive--;
    pthread_cond_signal(&engine->thread_ended);
    pthread_mutex_unlock(&engine->mutex);
    return NULL;
}

static void free_thread(struct thread *thread)
{
    if (thread->worker.hash_state != NULL)
        thread->worker.hashes->free_state(thread->worker.hash_state);
    free(thread);
}

/* Returns 0 or an errno. Under the mutex, or before anybody else knows the engine. */
static int start_thread(struct engine *engine, int direction)
{
    struct thread *thread = calloc(1, sizeof *thread);
    if (thread == NULL)
        return ENOMEM;
    thread->worker.engine = engine;
    thread->worker.files = &engine->files;
    thread->worker.hashes = &engine->hashes;
    thread->worker.limits = &engine->limits;
    thread->worker.counters = &engine->counters;
    thread->worker.folder.fd = -1;
    thread->direction = direction;
    thread->file = -1;
    thread->worker.hash_state = engine->hashes.create_state();
    int error = thread->worker.hash_state == NULL ? ENOMEM : 0;

    pthread_attr_t attributes;
    sigset_t all, before;
    sigfillset(&all);
    if (error == 0 && (error = pthread_attr_init(&attributes)) == 0) {
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(&thread->id, &attributes, work, thread);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
    }
    if (error != 0) {
        free_thread(thread);
        return error;
    }
    thread->next = engine->threads;
    engine->threads = thread;
    engine->num_alive++;
    return 0;
}

/* Joins threads that have ended; under the mutex, which they have released for good. */
static void join_ended(struct engine *engine)
{
    struct thread **link = &engine->threads;
    while (*link != NULL) {
        struct thread *thread = *link;
        if (thread->has_ended && !thread->is_detached) {
            *link = thread->next;
            pthread_join(thread->id, NULL);
            free_thread(thread);
        } else {
            link = &thread->next;
        }
    }
}

/* -- the owner's side --------------------------------------------------------------------------- */

static bool init_conditions(struct engine *engine)
{
    pthread_condattr_t monotonic;
    if (pthread_condattr_init(&monotonic) != 0)
        return false;
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    bool is_done = pthread_mutex_init(&engine->mutex, NULL) == 0 &&
                   pthread_cond_init(&engine->wake[LOADS], &monotonic) == 0 &&
                   pthread_cond_init(&engine->wake[STORES], &monotonic) == 0 &&
                   pthread_cond_init(&engine->thread_ended, &monotonic) == 0;
    pthread_condattr_destroy(&monotonic);
    return is_done;
}

struct engine *engine_open(const char *name, const struct limits *limits,
                           const struct file_calls *files, const struct hashes *hashes)
{
    struct engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return NULL;
    engine->limits = *limits;
    engine->files = *files;
    engine->hashes = *hashes;
    engine->last_ended = &engine->ended;
    snprintf(engine->name, sizeof engine->name, "%s", name);
    engine->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (engine->event_fd == -1 || !init_conditions(engine)) {
        int error = errno;
        if (engine->event_fd != -1)
            close(engine->event_fd);
        free(engine);
        errno = error;
        return NULL;
    }
    int error = 0;
    pthread_mutex_lock(&engine->mutex);
    for (int direction = 0; direction < NUM_DIRECTIONS; direction++) {
        engine->queues[direction].last = &engine->queues[direction].first;
        for (int i = 0; i < limits->threads[direction] && error == 0; i++)
            error = start_thread(engine, direction);
    }
    pthread_mutex_unlock(&engine->mutex);
    if (error != 0) {
        engine_close(engine, INT64_MAX); /* threads without work end at once */
        engine_free(engine);
        errno = error;
        return NULL;
    }
    return engine;
}

int engine_event_fd(const struct engine *engine)
{
    return engine->event_fd;
}

int engine_submit(struct engine *engine, struct batch *batch)
{
    if (!cut_batch(batch, &engine->limits))
        return ENOMEM;
    int direction = direction_of(batch), chosen[NUM_DIRECTIONS] = {0};
    struct queue *queue = &engine->queues[direction];
    bool must_tell = false;
    pthread_mutex_lock(&engine->mutex);
    int error = engine->is_closing ? ESHUTDOWN
                : queue->num_batches >= engine->limits.queued ? EAGAIN
                                                              : 0;
    if (error == 0) {
        batch->ticket = ++engine->last_ticket;
        batch->num_waiting = batch->num_unfinished = batch->num_parts;
        if (batch->num_parts == 0) {
            must_tell = end_parts(engine, batch, 0);
        } else {
            queue->num_batches++;
            for (size_t i = 0; i < batch->num_parts; i++) {
                batch->parts[i].next = NULL;
                *queue->last = &batch->parts[i];
                queue->last = &batch->parts[i].next;
            }
            choose_idle(engine, direction, batch->num_parts, chosen);
        }
        atomic_fetch_add_explicit(&engine->counters.batches, 1, memory_order_relaxed);
        atomic_fetch_add_explicit(&engine->counters.parts, batch->num_parts, memory_order_relaxed);
    }
    pthread_mutex_unlock(&engine->mutex);
    for (direction = 0; direction < NUM_DIRECTIONS; direction++) {
        for (int i = 0; i < chosen[direction]; i++)
            pthread_cond_signal(&engine->wake[direction]);
    }
    if (must_tell)
        tell_owner(engine);
    return error;
}

struct batch *engine_take(struct engine *engine)
{
    /* Cleared before the list is taken: what ends in between is told again, for nothing. */
    uint64_t count;
    if (read(engine->event_fd, &count, sizeof count) == sizeof count)
        atomic_fetch_add_explicit(&engine->counters.wake_ups, 1, memory_order_relaxed);
    pthread_mutex_lock(&engine->mutex);
    struct batch *ended = engine->ended;
    engine->ended = NULL;
    engine->last_ended = &engine->ended;
    engine->is_told = false;
    pthread_mutex_unlock(&engine->mutex);
    return ended;
}

void engine_withdraw(struct engine *engine, uint64_t ticket)
{
    pthread_mutex_lock(&engine->mutex);
    bool must_tell = cancel_waiting(engine, ticket);
    pthread_mutex_unlock(&engine->mutex);
    if (must_tell)
        tell_owner(engine);
}

int engine_tend(struct engine *engine, int64_t hung_after_ns)
{
    int num_hung = 0;
    pthread_mutex_lock(&engine->mutex);
    join_ended(engine);
    int64_t now = monotonic_ns();
    for (struct thread *thread = engine->threads; thread != NULL; thread = thread->next) {
        int64_t since = atomic_load(&thread->worker.in_call_since_ns);
        if (since == 0 || now - since < hung_after_ns)
            continue;
        num_hung++;
        if (!thread->is_replaced && !engine->is_closing &&
            engine->num_spares < engine->limits.spare_threads &&
            start_thread(engine, thread->direction) == 0) { /* else the next call tries again */
            thread->is_replaced = true;
            engine->num_spares++;
        }
    }
    pthread_mutex_unlock(&engine->mutex);
    return num_hung;
}

int engine_close(struct engine *engine, int64_t timeout_ns)
{
    int64_t now = monotonic_ns();
    int64_t deadline_ns = timeout_ns < INT64_MAX - now ? now + timeout_ns : INT64_MAX;
    struct timespec deadline = {.tv_sec = (time_t)(deadline_ns / 1000000000),
                                .tv_nsec = (long)(deadline_ns % 1000000000)};
    pthread_mutex_lock(&engine->mutex);
    engine->is_closing = true;
    bool must_tell = cancel_waiting(engine, 0);
    for (int direction = 0; direction < NUM_DIRECTIONS; direction++) {
        engine->wakes[direction] += engine->idle[direction];
        engine->idle[direction] = 0;
        pthread_cond_broadcast(&engine->wake[direction]);
    }
    while (engine->num_alive > 0) {
        if (pthread_cond_timedwait(&engine->thread_ended, &engine->mutex, &deadline) == ETIMEDOUT)
            break;
    }
    join_ended(engine);
    int num_left = 0;
    for (struct thread *thread = engine->threads; thread != NULL; thread = thread->next) {
        num_left++;
        if (!thread->is_detached)
            pthread_detach(thread->id);
        thread->is_detached = true;
    }
    pthread_mutex_unlock(&engine->mutex);
    if (must_tell)
        tell_owner(engine);
    return num_left;
}

void engine_free(struct engine *engine)
{
    close(engine->event_fd);
    pthread_cond_destroy(&engine->thread_ended);
    pthread_cond_destroy(&engine->wake[LOADS]);
    pthread_cond_destroy(&engine->wake[STORES]);
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}

size_t engine_part_bytes(const struct engine *engine)
{
    return engine->limits.part_bytes;
}

uint64_t engine_hash64(const struct engine *engine, const void *data, size_t bytes)
{
    return engine->hashes.hash64(data, bytes);
}

const struct counters *engine_counters(const struct engine *engine)
{
    return &engine->counters;
}

void engine_threads(struct engine *engine, int *alive, int *spares)
{
    pthread_mutex_lock(&engine->mutex);
    *alive = engine->num_alive;
    *spares = engine->num_spares;
    pthread_mutex_unlock(&engine->mutex);
}
