/* Threads and queues of an engine, and completion of batches.

   Threads: one mutex guards everything that is not atomic; it is held only for list operations,
   never during file system calls, copies or hashing. The owner calls engine_*; each thread runs
   `work`. Threads block all signals and do not use Python, so that neither a signal handler nor
   the GIL delays them.

   Ownership: parts belong to their batch. A batch is in no list while its parts are queued or
   running; after the last has ended it is in `ended` until the owner takes it. The owner frees a
   worker after joining its thread; a worker hanging at `close` is kept, with its engine and batch,
   until it has ended and `close` is called again, or forever. */

#include "block_io.h"

#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <time.h>
#include <unistd.h>

enum {
    STACK_BYTES = 1 << 20, /* address space; untouched pages are not allocated */
    LOOK_AHEAD = 16,       /* parts searched for one whose file has no writer */
    MAX_WRITERS = 2,       /* per file */
};

static const int64_t second_ns = 1000000000;

int64_t monotonic_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * second_ns + now.tv_nsec;
}

void count_up(struct engine *engine, enum counter counter, uint64_t more)
{
    atomic_fetch_add_explicit(&engine->counters[counter], more, memory_order_relaxed);
}

static void tell_owner(struct engine *engine)
{
    uint64_t one = 1;
    /* Fails only after 2^64 writes without a read. */
    ssize_t ignored = write(engine->event_fd, &one, sizeof one);
    (void)ignored;
}

/* -- queues; under the mutex -------------------------------------------------------------------- */

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

static int num_writers(const struct engine *engine, int64_t file)
{
    int num = 0;
    for (const struct worker *worker = engine->workers; worker != NULL; worker = worker->next)
        num += file != -1 && worker->file == file && !worker->is_replaced;
    return num;
}

/* Queues the parts of a batch; lookups of names precede parts with payload. */
static void append_parts(struct queue *queue, struct batch *batch)
{
    struct part **link = batch->kind == BATCH_HAS_FILES ? &queue->first : queue->last;
    struct part *behind = *link;
    for (size_t i = 0; i < batch->num_parts; i++) {
        *link = &batch->parts[i];
        link = &batch->parts[i].next;
    }
    *link = behind;
    if (behind == NULL)
        queue->last = link;
}

/* Takes, among the first parts, the one whose file has the fewest writers. The kernel serialises
   writes to a file: a second thread can hash its piece meanwhile, a third would only wait. */
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

/* Counts a part as done; returns whether to notify the owner, once per list of ended batches. */
static bool end_part(struct engine *engine, struct batch *batch)
{
    if (--batch->num_unfinished != 0)
        return false;
    bool is_first = engine->ended == NULL;
    batch->next = engine->ended;
    engine->ended = batch;
    return is_first;
}

/* Withdraws queued parts, of one batch or (0) of all. */
static void cancel_waiting(struct engine *engine, uint64_t ticket)
{
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
            if (end_part(engine, part->batch))
                tell_owner(engine);
        }
    }
}

/* -- threads ------------------------------------------------------------------------------------ */

static void *work(void *argument)
{
    struct worker *self = argument;
    struct engine *engine = self->engine;
    pthread_setname_np(pthread_self(), engine->name);
    pthread_mutex_lock(&engine->mutex);
    while (!self->is_replaced) {
        struct part *part = take_part(engine, self->direction);
        if (part == NULL) {
            if (engine->is_closing)
                break;
            pthread_cond_wait(&engine->work_waits, &engine->mutex);
            continue;
        }
        self->file = part->file;
        pthread_mutex_unlock(&engine->mutex);
        do_part(self, part);
        pthread_mutex_lock(&engine->mutex);
        self->file = -1;
        if (end_part(engine, part->batch)) { /* the part may be freed from here on */
            pthread_mutex_unlock(&engine->mutex);
            tell_owner(engine);
            pthread_mutex_lock(&engine->mutex);
        }
    }
    engine->counters[SPARES] -= self->is_replaced;
    engine->counters[THREADS]--;
    self->has_ended = true;
    pthread_cond_signal(&engine->thread_ended);
    pthread_mutex_unlock(&engine->mutex);
    return NULL;
}

static void free_worker(struct worker *worker)
{
    if (worker->hash_state != NULL)
        worker->engine->hashes.free_state(worker->hash_state);
    if (worker->cipher != NULL)
        worker->engine->sealing.ciphers.free_context(worker->cipher);
    free(worker->sealed);
    free(worker);
}

/* Returns 0 or an errno; under the mutex. */
static int start_thread(struct engine *engine, int direction)
{
    struct worker *worker = calloc(1, sizeof *worker);
    if (worker == NULL)
        return ENOMEM;
    worker->engine = engine;
    worker->hash_state = engine->hashes.create_state();
    if (engine->sealing.num_keys > 0) {
        worker->cipher = engine->sealing.ciphers.new_context();
        worker->sealed = malloc(engine->limits.piece_bytes);
    }
    for (int i = 0; i < KEPT_FOLDERS; i++)
        worker->folders.kept[i].fd = -1;
    worker->direction = direction;
    worker->file = -1;

    pthread_attr_t attributes;
    sigset_t all, before;
    bool is_complete = worker->hash_state != NULL &&
                       (engine->sealing.num_keys == 0 || (worker->cipher && worker->sealed));
    int error = is_complete ? pthread_attr_init(&attributes) : ENOMEM;
    if (error == 0) {
        pthread_attr_setstacksize(&attributes, STACK_BYTES);
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        error = pthread_create(&worker->thread, &attributes, work, worker);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        pthread_attr_destroy(&attributes);
    }
    if (error != 0) {
        free_worker(worker);
        return error;
    }
    worker->next = engine->workers;
    engine->workers = worker;
    engine->counters[THREADS]++;
    return 0;
}

/* Joins ended threads, under the mutex, which they no longer take; returns the number of running
   threads. */
static int join_ended(struct engine *engine)
{
    int num_left = 0;
    struct worker **link = &engine->workers;
    while (*link != NULL) {
        struct worker *worker = *link;
        if (worker->has_ended) {
            *link = worker->next;
            pthread_join(worker->thread, NULL);
            free_worker(worker);
        } else {
            link = &worker->next;
            num_left++;
        }
    }
    return num_left;
}

/* -- the owner's side --------------------------------------------------------------------------- */

struct engine *engine_open(const char *name, const struct limits *limits, file_caller *call,
                           const struct hashes *hashes, const struct sealing *sealing)
{
    pthread_condattr_t monotonic;
    struct engine *engine = calloc(1, sizeof *engine);
    if (engine == NULL)
        return NULL;
    engine->limits = *limits;
    engine->hashes = *hashes;
    engine->sealing = *sealing;
    engine->call = call;
    snprintf(engine->name, sizeof engine->name, "%s", name);
    pthread_mutex_init(&engine->mutex, NULL); /* cannot fail on Linux, like the next ones */
    pthread_condattr_init(&monotonic);
    pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    pthread_cond_init(&engine->work_waits, &monotonic);
    pthread_cond_init(&engine->thread_ended, &monotonic);
    pthread_condattr_destroy(&monotonic);
    engine->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    int error = engine->event_fd == -1 ? errno : 0;
    pthread_mutex_lock(&engine->mutex);
    for (int direction = 0; direction < NUM_DIRECTIONS; direction++) {
        engine->queues[direction].last = &engine->queues[direction].first;
        for (int i = 0; i < limits->threads[direction] && error == 0; i++)
            error = start_thread(engine, direction);
    }
    pthread_mutex_unlock(&engine->mutex);
    if (error == 0)
        return engine;
    engine_close(engine, INT64_MAX); /* idle threads end at once */
    engine_free(engine);
    errno = error;
    return NULL;
}

int engine_submit(struct engine *engine, struct batch *batch)
{
    struct queue *queue = &engine->queues[batch->is_store ? STORES : LOADS];
    cut_batch(batch, engine->limits.part_bytes);
    pthread_mutex_lock(&engine->mutex);
    int error = engine->is_closing ? ESHUTDOWN : 0;
    if (error == 0 && queue->num_batches >= engine->limits.queued)
        error = EAGAIN;
    if (error == 0) {
        batch->ticket = ++engine->last_ticket;
        batch->num_waiting = batch->num_unfinished = batch->num_parts;
        queue->num_batches++;
        append_parts(queue, batch);
        count_up(engine, BATCHES, 1);
        count_up(engine, PARTS, batch->num_parts);
    }
    pthread_mutex_unlock(&engine->mutex);
    for (size_t i = 0; i < batch->num_parts && error == 0; i++)
        pthread_cond_signal(&engine->work_waits); /* cheap without waiters */
    return error;
}

struct batch *engine_take(struct engine *engine)
{
    /* Cleared before the list is taken: a batch ending in between causes a spurious wake-up. */
    uint64_t count;
    if (read(engine->event_fd, &count, sizeof count) == sizeof count)
        count_up(engine, WAKE_UPS, 1);
    pthread_mutex_lock(&engine->mutex);
    struct batch *ended = engine->ended;
    engine->ended = NULL;
    pthread_mutex_unlock(&engine->mutex);
    return ended;
}

void engine_put_back(struct engine *engine, struct batch *batches)
{
    struct batch *last = batches;
    while (last->next != NULL)
        last = last->next;
    pthread_mutex_lock(&engine->mutex);
    last->next = engine->ended;
    engine->ended = batches;
    pthread_mutex_unlock(&engine->mutex);
    tell_owner(engine);
}

void engine_withdraw(struct engine *engine, uint64_t ticket)
{
    pthread_mutex_lock(&engine->mutex);
    cancel_waiting(engine, ticket);
    pthread_mutex_unlock(&engine->mutex);
}

int engine_replace_hung(struct engine *engine, int64_t hung_after_ns)
{
    int num_hung = 0;
    pthread_mutex_lock(&engine->mutex);
    join_ended(engine);
    int64_t now = monotonic_ns();
    for (struct worker *worker = engine->workers; worker != NULL; worker = worker->next) {
        int64_t since = atomic_load(&worker->in_call_since_ns);
        if (since == 0 || now - since < hung_after_ns)
            continue;
        num_hung++;
        if (!worker->is_replaced && !engine->is_closing &&
            engine->counters[SPARES] < (uint64_t)engine->limits.spare_threads &&
            start_thread(engine, worker->direction) == 0) { /* otherwise the next call retries */
            worker->is_replaced = true;
            engine->counters[SPARES]++;
        }
    }
    pthread_mutex_unlock(&engine->mutex);
    return num_hung;
}

int engine_close(struct engine *engine, int64_t timeout_ns)
{
    int64_t now = monotonic_ns();
    int64_t end = timeout_ns < INT64_MAX - now ? now + timeout_ns : INT64_MAX;
    struct timespec deadline = {(time_t)(end / second_ns), (long)(end % second_ns)};
    pthread_mutex_lock(&engine->mutex);
    engine->is_closing = true;
    cancel_waiting(engine, 0);
    pthread_cond_broadcast(&engine->work_waits);
    while (engine->counters[THREADS] > 0) {
        if (pthread_cond_timedwait(&engine->thread_ended, &engine->mutex, &deadline) == ETIMEDOUT)
            break;
    }
    int num_left = join_ended(engine);
    pthread_mutex_unlock(&engine->mutex);
    return num_left;
}

void engine_free(struct engine *engine)
{
    if (engine->event_fd != -1)
        close(engine->event_fd);
    pthread_cond_destroy(&engine->thread_ended);
    pthread_cond_destroy(&engine->work_waits);
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}
