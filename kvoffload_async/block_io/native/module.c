/* The Python binding: validates arguments for memory safety, and keeps a batch's objects alive.

   engine.py is its only user, and validates everything else.

   Threads: the methods run with the GIL. The engine's threads never take it, except for calls
   implemented in Python (engine.py), for tests.

   Ownership: a `Submission` is a batch with the memory and objects that it points to: buffers and
   immutable arguments. It lives from the call until `take`. Memory that a hanging thread may still
   access when its engine is deallocated is leaked. A forked child has no threads, frees nothing. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>

#include "block_io.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    MAX_SEED_BYTES = 4096, /* of prefix and key */
    ALIGNMENT = 16,
};

typedef struct {
    PyObject_HEAD
    struct engine *engine;
    PyObject *callable; /* keeps `engine->call` alive, if it is Python's */
    PyObject *sealing;  /* keeps the keys alive that `engine->sealing` points to */
    pid_t pid;
    int fd;
} Engine;

typedef struct {
    struct batch batch; /* first, so that a batch can be cast to its submission */
    PyObject *arguments;
    Py_buffer buffers[2];
    char *free_space;
} Submission;

static bool check_process(const Engine *self)
{
    if (self->pid == getpid())
        return true;
    PyErr_Format(PyExc_RuntimeError,
                 "the engine was opened by process %ld, and does not work in a child of it: open "
                 "another",
                 (long)self->pid);
    return false;
}

/* -- submissions -------------------------------------------------------------------------------- */

static void free_submission(Submission *submission)
{
    PyBuffer_Release(&submission->buffers[0]);
    PyBuffer_Release(&submission->buffers[1]);
    Py_DECREF(submission->arguments);
    free(submission);
}

static void *take_space(Submission *submission, size_t bytes)
{
    void *space = submission->free_space;
    submission->free_space += (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    return space;
}

/* Allocates a submission with its per-block arrays; NULL with an exception. */
static Submission *new_submission(PyObject *arguments, int kind, bool is_store, Py_ssize_t count,
                                  bool is_sealing)
{
    enum { COLUMNS = 10 };
    const size_t block_bytes = sizeof(struct part) + sizeof(struct run) + SEAL_BYTES + 1 +
                               3 * sizeof(int64_t) + sizeof(struct bound) + 3 * sizeof(char *);
    size_t digest_bytes = is_sealing ? SEAL_BYTES : DIGEST_BYTES;
    if (count < 0 || count > INT32_MAX || kind < 0 || kind > BATCH_COPIES)
        return (Submission *)PyErr_Format(PyExc_ValueError, "no batch: kind %d, %zd blocks", kind,
                                          count);
    size_t num = (size_t)count + 1; /* an empty batch has a part, too */
    size_t head_bytes = (sizeof(Submission) + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    Submission *self = calloc(1, head_bytes + num * block_bytes + COLUMNS * ALIGNMENT);
    if (self == NULL)
        return (Submission *)PyErr_NoMemory();
    self->arguments = Py_NewRef(arguments);
    self->free_space = (char *)self + head_bytes;
    self->batch = (struct batch){
        .kind = (enum batch_kind)kind,
        .is_store = is_store,
        .count = (size_t)count,
        .parts = take_space(self, num * sizeof(struct part)),
        .runs = take_space(self, num * sizeof(struct run)),
        .digest_bytes = digest_bytes,
        .digests = take_space(self, num * digest_bytes),
        .statuses = take_space(self, num),
        .disk_bytes = take_space(self, 2 * num * sizeof(int64_t)),
        .rows = take_space(self, num * sizeof(int64_t)),
        .names = take_space(self, num * sizeof(char *)),
        .victims = take_space(self, num * sizeof(char *)),
        .expected = take_space(self, num * sizeof(char *)),
    };
    self->batch.freed_bytes = self->batch.disk_bytes + count;
    for (Py_ssize_t i = 0; i < count; i++)
        self->batch.freed_bytes[i] = -1;
    return self;
}

static bool take_memory(Submission *submission, PyObject *buffer, Py_ssize_t row_bytes,
                        Py_ssize_t slot_bytes, Py_ssize_t tail_bytes)
{
    struct batch *batch = &submission->batch;
    Py_buffer *view = &submission->buffers[0];
    if (row_bytes <= 0 || slot_bytes < row_bytes || slot_bytes - row_bytes < tail_bytes ||
        slot_bytes - row_bytes > MAX_PAD_BYTES) {
        PyErr_Format(PyExc_ValueError, "memory: rows of %zd bytes do not fit slots of %zd",
                     row_bytes, slot_bytes);
        return false;
    }
    if (PyObject_GetBuffer(buffer, view, batch->is_store ? PyBUF_SIMPLE : PyBUF_WRITABLE) != 0)
        return false;
    batch->memory = (struct memory){view->buf, (size_t)row_bytes, (size_t)slot_bytes};
    return true;
}

/* Returns whether an argument has an item per block. */
static bool has_items(Py_ssize_t num, size_t expected, const char *name)
{
    if (num == (Py_ssize_t)expected)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: %zd items instead of %zu", name, num, expected);
    return false;
}

static bool is_tuple_of(PyObject *object, size_t num, const char *name)
{
    if (PyTuple_Check(object))
        return has_items(PyTuple_Size(object), num, name);
    PyErr_Format(PyExc_TypeError, "%s: %R is no tuple", name, object);
    return false;
}

static bool take_numbers(PyObject *tuple, int64_t *numbers, size_t num, const char *name)
{
    if (!is_tuple_of(tuple, num, name))
        return false;
    for (size_t i = 0; i < num; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(tuple, (Py_ssize_t)i));
        if (numbers[i] == -1 && PyErr_Occurred())
            return false;
    }
    return true;
}

static bool take_rows(Submission *submission, PyObject *rows)
{
    struct batch *batch = &submission->batch;
    int64_t num_rows = submission->buffers[0].len / (Py_ssize_t)batch->memory.row_bytes;
    if (!take_numbers(rows, batch->rows, batch->count, "rows"))
        return false;
    for (size_t i = 0; i < batch->count; i++) {
        if (batch->rows[i] < 0 || batch->rows[i] >= num_rows) {
            PyErr_Format(PyExc_ValueError, "rows: %lld is no row of a memory of %lld",
                         (long long)batch->rows[i], (long long)num_rows);
            return false;
        }
    }
    return true;
}

/* Takes the begins of seals, without their tags, of an encrypted store. */
static bool take_seals(struct batch *batch, const char *seals, Py_ssize_t bytes)
{
    if (!has_items(bytes, batch->is_store ? batch->count * TAG_AT : 0, "seals"))
        return false;
    for (size_t i = 0; i < batch->count && batch->is_store; i++)
        memcpy(digest_of(batch, i), seals + i * TAG_AT, TAG_AT);
    return true;
}

/* Computes the seeds of the blocks' digests, or takes what is authenticated with encrypted blocks,
   unless `keys` is None. */
static bool take_keys(Engine *self, Submission *submission, PyObject *keys, const char *prefix,
                      Py_ssize_t prefix_bytes)
{
    struct batch *batch = &submission->batch;
    char seed[MAX_SEED_BYTES], *key;
    Py_ssize_t key_bytes;
    bool is_sealing = self->engine->sealing.num_keys > 0;
    if (keys == Py_None && !is_sealing)
        return true;
    if (!is_tuple_of(keys, batch->count, "keys"))
        return false;
    batch->has_digests = true;
    if (is_sealing)
        batch->bound = take_space(submission, batch->count * sizeof *batch->bound);
    else
        batch->seeds = take_space(submission, batch->count * sizeof *batch->seeds);
    batch->bound_prefix = (const unsigned char *)prefix;
    batch->bound_prefix_bytes = (size_t)prefix_bytes;
    for (size_t i = 0; i < batch->count; i++) {
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(keys, (Py_ssize_t)i), &key, &key_bytes) != 0)
            return false;
        if (prefix_bytes + key_bytes > MAX_SEED_BYTES) {
            PyErr_Format(PyExc_ValueError, "keys: one has %zd bytes, more than %d with the prefix",
                         key_bytes, MAX_SEED_BYTES);
            return false;
        }
        if (is_sealing) {
            batch->bound[i] = (struct bound){(const unsigned char *)key, (size_t)key_bytes};
            continue;
        }
        memcpy(seed, prefix, (size_t)prefix_bytes);
        memcpy(seed + prefix_bytes, key, (size_t)key_bytes);
        batch->seeds[i] =
            self->engine->hashes.hash64(seed, (size_t)(prefix_bytes + key_bytes));
    }
    return true;
}

static bool take_runs(Submission *submission, PyObject *runs)
{
    struct batch *batch = &submission->batch;
    size_t left = batch->count;
    Py_ssize_t num_runs = PyTuple_Check(runs) ? PyTuple_Size(runs) : 0;
    int64_t numbers[3], most = INT64_MAX / (int64_t)batch->memory.slot_bytes; /* of slots */
    for (Py_ssize_t i = 0; i < num_runs; i++) {
        PyObject *item = PyTuple_GetItem(runs, i);
        if (!take_numbers(item, numbers, 3, "runs"))
            return false;
        struct run run = {numbers[0], numbers[1], numbers[2]};
        if (run.fd < 0 || run.fd > INT32_MAX || run.offset < 0 || run.length <= 0 ||
            run.length > (int64_t)left ||
            run.offset / (int64_t)batch->memory.slot_bytes > most - run.length - 2) {
            PyErr_Format(PyExc_ValueError, "runs: %R is no extent for the %zu rows that are left",
                         item, left);
            return false;
        }
        batch->runs[i] = run; /* at most as many as rows, since none is empty */
        left -= (size_t)run.length;
    }
    if (left == 0)
        return true;
    PyErr_Format(PyExc_ValueError, "runs: %zu of %zu rows are in none", left, batch->count);
    return false;
}

/* Whether all fragments are within a memory, and do not overlap each other. */
static bool is_within(const struct copy *copy, int64_t begin, int64_t stride, int64_t size)
{
    int64_t left = size - copy->bytes;
    if (begin < 0 || begin > left)
        return false;
    return copy->count <= 1 || (stride > 0 && stride >= copy->bytes &&
                                copy->count - 1 <= (left - begin) / stride);
}

static bool take_copies(Submission *submission, PyObject *source, PyObject *copies)
{
    struct batch *batch = &submission->batch;
    Py_ssize_t bytes;
    char *packed;
    if (PyObject_GetBuffer(source, &submission->buffers[1], PyBUF_SIMPLE) != 0 ||
        PyBytes_AsStringAndSize(copies, &packed, &bytes) != 0 ||
        !has_items(bytes, batch->count * sizeof(struct copy), "parts"))
        return false;
    batch->source = submission->buffers[1].buf;
    batch->copies = (const struct copy *)packed;
    for (size_t i = 0; i < batch->count; i++) {
        const struct copy *copy = &batch->copies[i];
        if (copy->bytes < 0 || copy->count < 0 ||
            !is_within(copy, copy->target, copy->target_stride, submission->buffers[0].len) ||
            !is_within(copy, copy->source, copy->source_stride, submission->buffers[1].len)) {
            PyErr_Format(PyExc_ValueError,
                         "parts: (%lld, %lld, %lld, %lld, %lld, %lld) is not within the memories",
                         (long long)copy->target, (long long)copy->source, (long long)copy->bytes,
                         (long long)copy->count, (long long)copy->target_stride,
                         (long long)copy->source_stride);
            return false;
        }
    }
    return true;
}

static bool is_name(const char *name)
{
    if (strlen(name) >= MAX_NAME_BYTES)
        return false;
    for (;;) {
        size_t bytes = strcspn(name, "/");
        if (bytes == 0 || (name[0] == '.' && (bytes == 1 || (bytes == 2 && name[1] == '.'))))
            return false;
        if (name[bytes] == '\0')
            return true;
        name += bytes + 1;
    }
}

/* Checks the marker's name, or "", and the stem of temporary names, which stay in their folders. */
static bool are_names(const char *marker, const char *temp_stem)
{
    if ((marker[0] == '\0' || is_name(marker)) && strchr(temp_stem, '/') == NULL)
        return true;
    PyErr_Format(PyExc_ValueError, "marker, temp_stem: '%s' or '%s' leads elsewhere", marker,
                 temp_stem);
    return false;
}

/* Parses names joined by NUL: one per block, each below the root; NULL for an empty one. */
static bool take_names(PyObject *joined, const char **names, size_t num, const char *argument,
                       bool may_be_empty)
{
    char *name;
    Py_ssize_t bytes;
    if (PyBytes_AsStringAndSize(joined, &name, &bytes) != 0)
        return false;
    const char *end = name + bytes + (num > 0); /* the last name ends with NUL, too */
    size_t i = 0;
    for (; i < num && name != end; i++) {
        bool is_empty = may_be_empty && name[0] == '\0';
        if (!is_empty && !is_name(name)) {
            PyErr_Format(PyExc_ValueError, "%s: '%s' does not lead to a file beneath the root",
                         argument, name);
            return false;
        }
        names[i] = is_empty ? NULL : name;
        name += strlen(name) + 1;
    }
    if (name == end && i == num)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: they are not %zu, or there is a NUL in one", argument, num);
    return false;
}

static bool take_expected(struct batch *batch, PyObject *expected)
{
    if (!is_tuple_of(expected, batch->count, "expected"))
        return false;
    for (size_t i = 0; i < batch->count; i++) {
        char *value;
        Py_ssize_t bytes;
        PyObject *item = PyTuple_GetItem(expected, (Py_ssize_t)i);
        if (item == Py_None)
            continue;
        if (PyBytes_AsStringAndSize(item, &value, &bytes) != 0)
            return false;
        if ((size_t)bytes == batch->value_prefix_bytes + batch->digest_bytes)
            batch->expected[i] = value; /* other lengths cannot match: read the attribute */
    }
    return true;
}

static bool take_files(Submission *submission, PyObject *files)
{
    struct batch *batch = &submission->batch;
    PyObject *names, *victims, *expected;
    Py_ssize_t num_may_write, value_prefix_bytes;
    const char *value_prefix;
    unsigned long long first_serial;
    int fsync, wants_disk_bytes;
    if (!PyArg_ParseTuple(files, "iyOsy#OOyy#sKipp:files", &batch->root.fd, &batch->root.path,
                          &names, &batch->attribute, &value_prefix, &value_prefix_bytes, &expected,
                          &victims, &batch->marker, &batch->may_write, &num_may_write,
                          &batch->temp_stem, &first_serial, &batch->file_mode, &fsync,
                          &wants_disk_bytes) ||
        !take_names(names, batch->names, batch->count, "names", false))
        return false;
    if (value_prefix_bytes > MAX_VALUE_BYTES - (Py_ssize_t)batch->digest_bytes) {
        PyErr_Format(PyExc_ValueError, "value_prefix: %zd bytes are more than %zd",
                     value_prefix_bytes, MAX_VALUE_BYTES - (Py_ssize_t)batch->digest_bytes);
        return false;
    }
    batch->value_prefix = value_prefix;
    batch->value_prefix_bytes = (size_t)value_prefix_bytes;
    batch->first_serial = first_serial;
    batch->fsync = fsync;
    batch->wants_disk_bytes = wants_disk_bytes;
    if (batch->kind == BATCH_LOAD_FILES)
        return take_expected(batch, expected);
    return batch->kind == BATCH_HAS_FILES ||
           (take_names(victims, batch->victims, batch->count, "victims", true) &&
            are_names(batch->marker, batch->temp_stem) &&
            has_items(num_may_write, batch->count, "may_write"));
}

/* Parses the arguments of a batch of its kind; ignores the others. */
static PyObject *engine_submit_batch(Engine *self, PyObject *args)
{
    PyObject *buffer, *rows, *keys, *places, *other;
    Py_ssize_t count, row_bytes, slot_bytes, prefix_bytes, seals_bytes;
    const char *prefix, *seals;
    int kind, is_store;
    if (!check_process(self) ||
        !PyArg_ParseTuple(args, "ipn(Onn)O!Oy#OOy#:submit", &kind, &is_store, &count, &buffer,
                          &row_bytes, &slot_bytes, &PyTuple_Type, &rows, &keys, &prefix,
                          &prefix_bytes, &places, &other, &seals, &seals_bytes))
        return NULL;
    bool is_sealing = self->engine->sealing.num_keys > 0;
    Submission *submission = new_submission(args, kind, is_store, count, is_sealing);
    if (submission == NULL)
        return NULL;
    bool has_rows = kind != BATCH_HAS_FILES && kind != BATCH_COPIES;
    Py_ssize_t tail_bytes = is_sealing && kind == BATCH_EXTENTS ? SEAL_BYTES : 0;
    bool is_complete =
        (kind == BATCH_HAS_FILES ||
         take_memory(submission, buffer, row_bytes, slot_bytes, tail_bytes)) &&
        (!has_rows || ((!is_sealing || take_seals(&submission->batch, seals, seals_bytes)) &&
                       take_rows(submission, rows) &&
                       take_keys(self, submission, keys, prefix, prefix_bytes))) &&
        (kind == BATCH_EXTENTS  ? take_runs(submission, places)
         : kind == BATCH_COPIES ? take_copies(submission, other, places)
                                : take_files(submission, other));
    /* Made before the batch is submitted: a caller that gets no ticket has no batch under way. */
    PyObject *ticket = NULL;
    if (is_complete)
        ticket = PyLong_FromUnsignedLongLong(self->engine->last_ticket + 1);
    int error = ticket != NULL ? engine_submit(self->engine, &submission->batch) : 0;
    if (ticket != NULL && error == 0)
        return ticket;
    Py_XDECREF(ticket);
    if (error == ESHUTDOWN) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed");
    } else if (error != 0) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError); /* EAGAIN is BlockingIOError */
    }
    free_submission(submission);
    return NULL;
}

static PyObject *errors_of(const struct batch *batch)
{
    PyObject *errors = PyDict_New();
    for (size_t i = 0; i < batch->count && errors != NULL; i++) {
        if (batch->statuses[i] == 0)
            continue;
        long code = batch->statuses[i];
        if (code >= STATUS_NOT_DECRYPTED)
            code -= 1 + STATUS_ENDED_EARLY;
        PyObject *item = Py_BuildValue("(nl)", (Py_ssize_t)i, code);
        if (item == NULL || PyDict_SetItem(errors, PyTuple_GetItem(item, 0),
                                           PyTuple_GetItem(item, 1)) != 0)
            Py_CLEAR(errors);
        Py_XDECREF(item);
    }
    return errors;
}

static PyObject *outcome_of(const struct batch *batch)
{
    Py_ssize_t num = (Py_ssize_t)batch->count;
    Py_ssize_t digest_bytes = batch->has_digests ? num * (Py_ssize_t)batch->digest_bytes : 0;
    switch (batch->kind) {
    case BATCH_EXTENTS:
        return Py_BuildValue("(Ny#)", errors_of(batch), batch->digests, digest_bytes);
    case BATCH_LOAD_FILES:
        return Py_BuildValue("(y#y#)", batch->statuses, num, batch->digests, digest_bytes);
    case BATCH_STORE_FILES:
        return Py_BuildValue("(y#y#y#)", batch->statuses, num, batch->digests, digest_bytes,
                             batch->disk_bytes, 2 * num * (Py_ssize_t)sizeof(int64_t));
    case BATCH_HAS_FILES:
        return Py_BuildValue("y#", batch->statuses, num);
    default:
        return memchr(batch->statuses, ECANCELED, batch->count) == NULL
                   ? Py_NewRef(Py_None)
                   : PyLong_FromLong(ECANCELED);
    }
}

/* Frees the ended batches whose outcomes are in the list; out of memory, the others stay ended,
   for a later call. Returns whether there is an outcome or no batch left. */
static bool take_ended(Engine *self, PyObject *outcomes)
{
    struct batch *batch = engine_take(self->engine);
    while (batch != NULL) {
        struct batch *next = batch->next;
        PyObject *outcome =
            Py_BuildValue("(KN)", (unsigned long long)batch->ticket, outcome_of(batch));
        bool is_taken = outcome != NULL && PyList_Append(outcomes, outcome) == 0;
        Py_XDECREF(outcome);
        if (!is_taken) {
            engine_put_back(self->engine, batch);
            if (PyList_Size(outcomes) == 0)
                return false;
            PyErr_Clear();
            return true;
        }
        free_submission((Submission *)batch);
        batch = next;
    }
    return true;
}

/* -- the engine --------------------------------------------------------------------------------- */

static PyObject *engine_take_ended(Engine *self, PyObject *Py_UNUSED(ignored))
{
    PyObject *outcomes = check_process(self) ? PyList_New(0) : NULL;
    if (outcomes != NULL && !take_ended(self, outcomes))
        Py_CLEAR(outcomes);
    return outcomes;
}

static bool take_number(Engine *self, PyObject *object, int64_t *number)
{
    *number = check_process(self) ? PyLong_AsLongLong(object) : 0;
    return !PyErr_Occurred();
}

static PyObject *engine_withdraw_ticket(Engine *self, PyObject *object)
{
    int64_t ticket;
    if (!take_number(self, object, &ticket))
        return NULL;
    engine_withdraw(self->engine, (uint64_t)ticket);
    Py_RETURN_NONE;
}

static PyObject *engine_replace_hung_threads(Engine *self, PyObject *hung_after_ns)
{
    int64_t ns;
    return take_number(self, hung_after_ns, &ns) ? PyLong_FromLong(engine_replace_hung(self->engine, ns))
                                                 : NULL;
}

static PyObject *engine_close_threads(Engine *self, PyObject *timeout_ns)
{
    int num_left;
    int64_t ns;
    if (!take_number(self, timeout_ns, &ns))
        return NULL;
    Py_BEGIN_ALLOW_THREADS
    num_left = engine_close(self->engine, ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(num_left);
}

static PyObject *engine_counts(Engine *self, PyObject *Py_UNUSED(ignored))
{
    if (!check_process(self))
        return NULL;
    PyObject *counts = PyTuple_New(NUM_COUNTERS);
    for (int i = 0; i < NUM_COUNTERS && counts != NULL; i++) {
        PyObject *count = PyLong_FromUnsignedLongLong(self->engine->counters[i]);
        if (count == NULL || PyTuple_SetItem(counts, i, count) != 0)
            Py_CLEAR(counts);
    }
    return counts;
}

static void engine_dealloc(Engine *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->engine != NULL && self->pid == getpid()) {
        int num_left;
        Py_BEGIN_ALLOW_THREADS
        num_left = engine_close(self->engine, self->engine->is_closing ? 0 : 1000000000);
        Py_END_ALLOW_THREADS
        if (num_left == 0) {
            for (struct batch *batch = engine_take(self->engine), *next; batch; batch = next) {
                next = batch->next;
                free_submission((Submission *)batch);
            }
            engine_free(self->engine);
            Py_DECREF(self->callable);
            Py_DECREF(self->sealing);
        }
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

/* Parses how to encrypt: None, or addresses, keys and the info of HKDF. */
static bool take_sealing(PyObject *object, struct sealing *sealing)
{
    const char *ciphers, *keys, *info;
    Py_ssize_t ciphers_bytes, keys_bytes, info_bytes;
    if (object == Py_None)
        return true;
    if (!PyArg_ParseTuple(object, "y#y#y#:sealing", &ciphers, &ciphers_bytes, &keys, &keys_bytes,
                          &info, &info_bytes) ||
        !has_items(ciphers_bytes, sizeof sealing->ciphers, "ciphers"))
        return false;
    memcpy(&sealing->ciphers, ciphers, sizeof sealing->ciphers);
    sealing->keys = (const struct secret *)keys; /* bytes objects are aligned */
    sealing->num_keys = (size_t)keys_bytes / sizeof *sealing->keys;
    sealing->info = (const unsigned char *)info;
    sealing->info_bytes = (size_t)info_bytes;
    if (sealing->num_keys == 0 || (size_t)keys_bytes % sizeof *sealing->keys != 0) {
        PyErr_Format(PyExc_ValueError, "sealing: %zd bytes are no keys", keys_bytes);
        return false;
    }
    for (size_t i = 0; i < sealing->num_keys; i++) {
        if (sealing->keys[i].num_bytes > MAX_SECRET_BYTES) {
            PyErr_Format(PyExc_ValueError, "sealing: key %zu is too long", i);
            return false;
        }
    }
    return true;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    struct limits limits;
    struct hashes hashes;
    struct sealing sealing = {.num_keys = 0};
    const char *name, *addresses;
    Py_ssize_t num_bytes;
    unsigned long long call;
    PyObject *callable, *sealing_tuple;
    if (kwargs != NULL || !PyArg_ParseTuple(args, "iiiinny#KOsO:Engine", &limits.threads[LOADS],
                                            &limits.threads[STORES], &limits.spare_threads,
                                            &limits.queued, &limits.piece_bytes, &limits.part_bytes,
                                            &addresses, &num_bytes, &call, &callable, &name,
                                            &sealing_tuple))
        return NULL;
    if (limits.piece_bytes == 0 || limits.piece_bytes > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "piece_bytes: %zu is not between 1 and %d",
                            limits.piece_bytes, INT32_MAX);
    if (!has_items(num_bytes, sizeof hashes, "hashes") || !take_sealing(sealing_tuple, &sealing))
        return NULL;
    memcpy(&hashes, addresses, sizeof hashes);
    Engine *self = (Engine *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->pid = getpid();
    self->engine = engine_open(
        name, &limits, call == 0 ? make_system_call : (file_caller *)(uintptr_t)call, &hashes,
        &sealing);
    if (self->engine == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_DECREF(self);
        return NULL;
    }
    self->callable = Py_NewRef(callable);
    self->sealing = Py_NewRef(sealing_tuple);
    self->fd = self->engine->event_fd;
    return (PyObject *)self;
}

static PyMethodDef engine_methods[] = {
    {"submit", (PyCFunction)engine_submit_batch, METH_VARARGS, NULL},
    {"take", (PyCFunction)engine_take_ended, METH_NOARGS, NULL},
    {"withdraw", (PyCFunction)engine_withdraw_ticket, METH_O, NULL},
    {"replace_hung", (PyCFunction)engine_replace_hung_threads, METH_O, NULL},
    {"close", (PyCFunction)engine_close_threads, METH_O, NULL},
    {"counters", (PyCFunction)engine_counts, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyMemberDef engine_members[] = {
    {"fd", T_INT, offsetof(Engine, fd), READONLY, "An eventfd: readable if a batch has ended."},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, (void *)engine_new},
    {Py_tp_dealloc, (void *)engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_members, engine_members},
    {Py_tp_doc, "Moves and hashes batches of blocks in threads of its own; see `_native.pyi`."},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "kvoffload_async.block_io._native.Engine",
    .basicsize = sizeof(Engine),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};

static int module_exec(PyObject *module)
{
    PyObject *type = PyType_FromModuleAndSpec(module, &engine_spec, NULL);
    int error = type == NULL ? -1 : PyModule_AddType(module, (PyTypeObject *)type);
    Py_XDECREF(type);
    return error ? error : PyModule_AddStringConstant(module, "SOURCES", SOURCES);
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Moves and hashes blocks without the interpreter's lock.",
    .m_slots = module_slots,
};

PyMODINIT_FUNC PyInit__native(void); /* not declared by Python.h */

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module_def);
}
