/* The Python binding: checks every argument once, and keeps what a batch points to.

   Threads: the methods run with the interpreter's lock, which also guards the counts here. The
   engine's threads never take it, but for the table of calls that goes through a Python object,
   which is for tests: with one, each call takes the lock for as long as it lasts.

   Ownership: a `Submission` is a batch with the arrays and objects that it points into; it lives
   from its call until `take`, and counts as a user of its memories for as long. A memory's buffer is
   released when it has no users and `release` was called. What a thread that hangs may still touch
   when an engine is closed is kept for ever. A child of fork has no threads: it frees nothing. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "block_io.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ARRAYS = 10, MAX_THREADS = 64 };

typedef struct {
    PyObject_HEAD
    struct memory rows;
    Py_buffer buffer;
    Py_ssize_t num_users;
    bool is_mapped; /* the buffer is held */
    bool is_released;
} Memory;

typedef struct {
    PyObject_HEAD
    struct engine *engine;
    PyObject *adapter; /* NULL: the system's own calls */
    pid_t pid;
    bool is_closed;
    int num_left; /* threads that were left behind */
} Engine;

typedef struct {
    struct batch batch; /* first: a batch that was taken is its submission */
    Memory *memories[2];
    PyObject *held; /* a list of what the arrays point into */
    void *arrays[MAX_ARRAYS];
    int num_arrays;
} Submission;

typedef struct {
    PyTypeObject *engine_type;
    PyTypeObject *memory_type;
} State;

/* -- memories ----------------------------------------------------------------------------------- */

static void unmap_unused(Memory *memory)
{
    if (memory->is_mapped && memory->is_released && memory->num_users == 0) {
        memory->is_mapped = false;
        PyBuffer_Release(&memory->buffer);
    }
}

static PyObject *memory_release(Memory *self, PyObject *Py_UNUSED(ignored))
{
    self->is_released = true;
    unmap_unused(self);
    Py_RETURN_NONE;
}

static void memory_dealloc(Memory *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    self->is_released = true; /* a user holds a reference, so that there is none */
    unmap_unused(self);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static PyMethodDef memory_methods[] = {
    {"release", (PyCFunction)memory_release, METH_NOARGS,
     "Let go of the buffer as soon as nothing of it is in flight."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot memory_slots[] = {
    {Py_tp_dealloc, (void *)memory_dealloc},
    {Py_tp_methods, memory_methods},
    {Py_tp_doc, "Rows of a buffer, held until `release` and until nothing is in flight."},
    {0, NULL},
};

static PyType_Spec memory_spec = {
    .name = "kvoffload_async.block_io._native.Memory",
    .basicsize = sizeof(Memory),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = memory_slots,
};

static Memory *new_memory(PyTypeObject *type, PyObject *buffer, Py_ssize_t row_bytes,
                          Py_ssize_t slot_bytes)
{
    if (row_bytes <= 0)
        return (Memory *)PyErr_Format(PyExc_ValueError, "row_bytes: %zd is not positive", row_bytes);
    if (slot_bytes < row_bytes || slot_bytes - row_bytes > MAX_PAD_BYTES)
        return (Memory *)PyErr_Format(PyExc_ValueError,
                                      "slot_bytes: %zd is not between row_bytes, %zd, and %d more",
                                      slot_bytes, row_bytes, MAX_PAD_BYTES);
    Memory *self = (Memory *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    if (PyObject_GetBuffer(buffer, &self->buffer, PyBUF_WRITABLE) != 0) {
        PyErr_Clear();
        if (PyObject_GetBuffer(buffer, &self->buffer, PyBUF_SIMPLE) != 0) {
            Py_DECREF(self);
            return NULL;
        }
    }
    self->is_mapped = true;
    if (self->buffer.len % row_bytes != 0) {
        PyErr_Format(PyExc_ValueError, "buffer: its %zd bytes are no multiple of row_bytes, %zd",
                     self->buffer.len, row_bytes);
        Py_DECREF(self);
        return NULL;
    }
    self->rows = (struct memory){self->buffer.buf, (size_t)(self->buffer.len / row_bytes),
                                 (size_t)row_bytes, (size_t)slot_bytes};
    return self;
}

/* -- calls through Python ------------------------------------------------------------------------ */

static PyObject *views_of(const struct iovec *buffers, int num_buffers, int access)
{
    PyObject *views = PyList_New(num_buffers);
    for (int i = 0; i < num_buffers && views != NULL; i++) {
        PyObject *view = PyMemoryView_FromMemory(buffers[i].iov_base,
                                                 (Py_ssize_t)buffers[i].iov_len, access);
        if (view == NULL || PyList_SetItem(views, i, view) != 0)
            Py_CLEAR(views);
    }
    return views;
}

/* Makes a call by the adapter in file_calls.py, which turns exceptions into numbers. */
static int64_t make_python_call(void *adapter, const struct file_call *call)
{
    struct iovec value = {call->value, call->value_bytes};
    bool has_value = call->value != NULL;
    bool is_written = call->kind == CALL_WRITE || call->kind == CALL_SET_ATTRIBUTE;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *views = views_of(has_value ? &value : call->buffers,
                               has_value ? 1 : call->num_buffers,
                               is_written ? PyBUF_READ : PyBUF_WRITE);
    PyObject *result = NULL;
    if (views != NULL)
        result = PyObject_CallFunction(adapter, "iiiLyyyO", (int)call->kind, call->fd, call->flags,
                                       (long long)call->offset,
                                       call->root == NULL ? NULL : call->root->path, call->name,
                                       call->target, views);
    int64_t outcome = result == NULL ? -EIO : PyLong_AsLongLong(result);
    if (PyErr_Occurred()) { /* a defect there */
        PyErr_WriteUnraisable(adapter);
        outcome = -EIO;
    }
    Py_XDECREF(result);
    Py_XDECREF(views);
    PyGILState_Release(state);
    return outcome;
}

static PyObject *new_adapter(PyObject *ops)
{
    PyObject *module = PyImport_ImportModule("kvoffload_async.block_io.file_calls");
    PyObject *adapter = module == NULL ? NULL : PyObject_CallMethod(module, "adapter", "O", ops);
    Py_XDECREF(module);
    return adapter;
}

/* -- submissions -------------------------------------------------------------------------------- */

static bool check_process(Engine *self)
{
    if (self->pid == getpid())
        return true;
    PyErr_Format(PyExc_RuntimeError,
                 "the engine was opened by process %ld, and does not work in a child of it: open "
                 "another",
                 (long)self->pid);
    return false;
}

static void free_submission(Submission *submission)
{
    for (int i = 0; i < submission->num_arrays; i++)
        free(submission->arrays[i]);
    free(submission->batch.parts);
    for (int i = 0; i < 2; i++) {
        Memory *memory = submission->memories[i];
        if (memory != NULL) {
            memory->num_users--;
            unmap_unused(memory);
            Py_DECREF(memory);
        }
    }
    Py_XDECREF(submission->held);
    free(submission);
}

/* Returns an array that lives as long as the submission, or NULL with an exception. */
static void *new_array(Submission *submission, size_t num, size_t item_bytes)
{
    void *array = calloc(num + 1, item_bytes);
    if (array == NULL)
        return PyErr_NoMemory();
    submission->arrays[submission->num_arrays++] = array;
    return array;
}

static bool use_memory(Submission *submission, int index, PyTypeObject *type, PyObject *object,
                       bool must_write, const char *name)
{
    Memory *memory = (Memory *)object;
    if (!Py_IS_TYPE(object, type)) {
        PyErr_Format(PyExc_TypeError, "%s: not what Engine.map returns", name);
        return false;
    }
    if (memory->is_released) {
        PyErr_Format(PyExc_ValueError, "%s: it is released", name);
        return false;
    }
    if (must_write && memory->buffer.readonly) {
        PyErr_Format(PyExc_ValueError, "%s: its buffer is read-only", name);
        return false;
    }
    memory->num_users++;
    submission->memories[index] = (Memory *)Py_NewRef(object);
    *(index == 0 ? &submission->batch.memory : &submission->batch.source) = memory->rows;
    return true;
}

static Submission *new_submission(Engine *self, enum batch_kind kind, bool is_store)
{
    if (!check_process(self))
        return NULL;
    Submission *submission = calloc(1, sizeof *submission);
    if (submission == NULL)
        return (Submission *)PyErr_NoMemory();
    submission->batch.kind = kind;
    submission->batch.is_store = is_store;
    submission->held = PyList_New(0);
    if (submission->held == NULL) {
        free_submission(submission);
        return NULL;
    }
    return submission;
}

/* Hands a submission to the engine, if it is complete; returns its ticket. */
static PyObject *submit(Engine *self, Submission *submission, bool is_complete)
{
    if (is_complete && self->is_closed) {
        PyErr_SetString(PyExc_RuntimeError, "the engine is closed");
        is_complete = false;
    }
    if (is_complete) {
        errno = engine_submit(self->engine, &submission->batch);
        if (errno == 0)
            return PyLong_FromUnsignedLongLong(submission->batch.ticket);
        PyErr_SetFromErrno(PyExc_OSError); /* EAGAIN is BlockingIOError */
    }
    if (submission != NULL)
        free_submission(submission);
    return NULL;
}

/* Returns a tuple of the items that lives as long as the submission; it has `count` items if that
   is not negative. */
static PyObject *hold_items(Submission *submission, PyObject *items, Py_ssize_t count,
                            const char *name)
{
    PyObject *tuple = PySequence_Tuple(items);
    if (tuple == NULL)
        return NULL;
    if (count >= 0 && PyTuple_Size(tuple) != count) {
        PyErr_Format(PyExc_ValueError, "%s: %zd items instead of %zd", name, PyTuple_Size(tuple),
                     count);
        Py_DECREF(tuple);
        return NULL;
    }
    int error = PyList_Append(submission->held, tuple);
    Py_DECREF(tuple); /* the list has it */
    return error == 0 ? tuple : NULL;
}

static bool take_rows(Submission *submission, PyObject *rows)
{
    PyObject *items = hold_items(submission, rows, -1, "rows");
    if (items == NULL)
        return false;
    Py_ssize_t num = PyTuple_Size(items);
    int64_t *numbers = new_array(submission, (size_t)num, sizeof *numbers);
    if (numbers == NULL)
        return false;
    for (Py_ssize_t i = 0; i < num; i++) {
        numbers[i] = PyLong_AsLongLong(PyTuple_GetItem(items, i));
        if (PyErr_Occurred())
            return false;
        if (numbers[i] < 0 || (size_t)numbers[i] >= submission->batch.memory.num_rows) {
            PyErr_Format(PyExc_ValueError, "rows: %lld is no row of a memory of %zu",
                         (long long)numbers[i], submission->batch.memory.num_rows);
            return false;
        }
    }
    submission->batch.rows = numbers;
    submission->batch.count = (size_t)num;
    return true;
}

/* Computes the seeds of the blocks' digests, unless `keys` is None. */
static bool take_keys(Engine *self, Submission *submission, PyObject *keys, const char *prefix,
                      Py_ssize_t prefix_bytes)
{
    struct batch *batch = &submission->batch;
    if (keys == Py_None)
        return true;
    PyObject *items = hold_items(submission, keys, (Py_ssize_t)batch->count, "keys");
    uint64_t *seeds = items == NULL ? NULL : new_array(submission, batch->count, sizeof *seeds);
    if (seeds == NULL)
        return false;
    batch->digests = new_array(submission, batch->count, DIGEST_BYTES);
    if (batch->digests == NULL)
        return false;
    for (size_t i = 0; i < batch->count; i++) {
        char *key;
        Py_ssize_t key_bytes;
        if (PyBytes_AsStringAndSize(PyTuple_GetItem(items, (Py_ssize_t)i), &key, &key_bytes) != 0)
            return false;
        char *whole = malloc((size_t)(prefix_bytes + key_bytes) + 1);
        if (whole == NULL)
            return PyErr_NoMemory() != NULL;
        memcpy(whole, prefix, (size_t)prefix_bytes);
        memcpy(whole + prefix_bytes, key, (size_t)key_bytes);
        seeds[i] = engine_hash64(self->engine, whole, (size_t)(prefix_bytes + key_bytes));
        free(whole);
    }
    batch->seeds = seeds;
    return true;
}

static bool is_name(const char *name)
{
    for (;;) {
        size_t bytes = strcspn(name, "/");
        if (bytes == 0 || (name[0] == '.' && (bytes == 1 || (bytes == 2 && name[1] == '.'))))
            return false;
        if (name[bytes] == '\0')
            return true;
        name += bytes + 1;
    }
}

static const char *const *take_names(Submission *submission, PyObject *names, Py_ssize_t count,
                                     const char *argument)
{
    PyObject *items = hold_items(submission, names, count, argument);
    if (items == NULL)
        return NULL;
    Py_ssize_t num = PyTuple_Size(items);
    const char **array = new_array(submission, (size_t)num, sizeof *array);
    for (Py_ssize_t i = 0; array != NULL && i < num; i++) {
        PyObject *item = PyTuple_GetItem(items, i), *encoded;
        char *name;
        if (!PyUnicode_FSConverter(item, &encoded)) /* which refuses NUL */
            return NULL;
        int error = PyList_Append(submission->held, encoded);
        Py_DECREF(encoded); /* the list has it */
        if (error != 0 || PyBytes_AsStringAndSize(encoded, &name, NULL) != 0)
            return NULL;
        if (!is_name(name)) {
            PyErr_Format(PyExc_ValueError, "%s: %R does not lead to a file beneath the root",
                         argument, item);
            return NULL;
        }
        array[i] = name;
    }
    submission->batch.count = (size_t)num;
    return array;
}

static bool take_root(Submission *submission, PyObject *root)
{
    PyObject *path;
    int fd;
    if (!PyArg_ParseTuple(root, "iO&:root", &fd, PyUnicode_FSConverter, &path))
        return false;
    int error = PyList_Append(submission->held, path);
    submission->batch.root = (struct root){fd, PyBytes_AsString(path)};
    Py_DECREF(path); /* the list has it */
    if (error != 0)
        return false;
    if (fd < 0) {
        PyErr_Format(PyExc_ValueError, "root: %d is no descriptor", fd);
        return false;
    }
    return true;
}

/* -- the engine's batches ----------------------------------------------------------------------- */

static State *state_of(Engine *self)
{
    return PyType_GetModuleState(Py_TYPE((PyObject *)self));
}

static bool take_runs(Submission *submission, PyObject *runs)
{
    struct batch *batch = &submission->batch;
    PyObject *items = hold_items(submission, runs, -1, "runs");
    struct place *places =
        items == NULL ? NULL : new_array(submission, batch->count, sizeof *places);
    if (places == NULL)
        return false;
    size_t covered = 0;
    for (Py_ssize_t run = 0; run < PyTuple_Size(items); run++) {
        PyObject *item = PyTuple_GetItem(items, run);
        int fd;
        long long offset, num;
        if (!PyTuple_Check(item)) {
            PyErr_Format(PyExc_TypeError, "runs: %R is no tuple", item);
            return false;
        }
        if (!PyArg_ParseTuple(item, "iLL:runs", &fd, &offset, &num))
            return false;
        if (fd < 0 || offset < 0 || num <= 0 || (size_t)num > batch->count - covered ||
            offset > INT64_MAX - (num + 1) * (long long)batch->memory.slot_bytes) {
            PyErr_Format(PyExc_ValueError, "runs: %R is no extent for the %zu rows that are left",
                         item, batch->count - covered);
            return false;
        }
        for (long long i = 0; i < num; i++)
            places[covered++] = (struct place){
                offset + i * (long long)batch->memory.slot_bytes, fd, (int)run};
    }
    if (covered != batch->count) {
        PyErr_Format(PyExc_ValueError, "runs: they cover %zu of %zu rows", covered, batch->count);
        return false;
    }
    batch->places = places;
    return true;
}

static PyObject *engine_extents(Engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "is_store", "rows", "runs", "keys", "prefix", NULL};
    PyObject *memory, *rows, *runs, *keys;
    int is_store;
    const char *prefix;
    Py_ssize_t prefix_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OpOOOy#:extents", names, &memory, &is_store,
                                     &rows, &runs, &keys, &prefix, &prefix_bytes))
        return NULL;
    Submission *submission = new_submission(self, BATCH_EXTENTS, is_store);
    bool is_complete =
        submission != NULL &&
        use_memory(submission, 0, state_of(self)->memory_type, memory, !is_store, "memory") &&
        take_rows(submission, rows) && take_runs(submission, runs) &&
        take_keys(self, submission, keys, prefix, prefix_bytes) &&
        (submission->batch.errors = new_array(submission, submission->batch.count, sizeof(int)));
    return submit(self, submission, is_complete);
}

/* What load_files and store_files have in common. */
struct file_arguments {
    PyObject *memory, *root, *names, *rows, *keys;
    const char *prefix, *attribute, *value_prefix;
    Py_ssize_t prefix_bytes, value_prefix_bytes;
    int direct;
};

static bool take_files(Engine *self, Submission *submission, const struct file_arguments *arguments,
                       bool is_load)
{
    struct batch *batch = &submission->batch;
    if (arguments->value_prefix_bytes > MAX_VALUE_BYTES - DIGEST_BYTES) {
        PyErr_Format(PyExc_ValueError, "value_prefix: %zd bytes are more than %d",
                     arguments->value_prefix_bytes, MAX_VALUE_BYTES - DIGEST_BYTES);
        return false;
    }
    if (!use_memory(submission, 0, state_of(self)->memory_type, arguments->memory, is_load,
                    "memory") ||
        !take_rows(submission, arguments->rows) || !take_root(submission, arguments->root))
        return false;
    batch->names = take_names(submission, arguments->names, (Py_ssize_t)batch->count, "names");
    if (batch->names == NULL || !take_keys(self, submission, arguments->keys, arguments->prefix,
                                           arguments->prefix_bytes))
        return false;
    char *attribute = new_array(submission, strlen(arguments->attribute) + 1, 1);
    char *value_prefix = new_array(submission, MAX_VALUE_BYTES, 1);
    batch->statuses = new_array(submission, batch->count, 1);
    if (attribute == NULL || value_prefix == NULL || batch->statuses == NULL)
        return false;
    batch->attribute = strcpy(attribute, arguments->attribute);
    batch->value_prefix =
        memcpy(value_prefix, arguments->value_prefix, (size_t)arguments->value_prefix_bytes);
    batch->value_prefix_bytes = (size_t)arguments->value_prefix_bytes;
    batch->open_flags = arguments->direct ? O_DIRECT : 0;
    return true;
}

static bool take_expected(Submission *submission, PyObject *expected)
{
    struct batch *batch = &submission->batch;
    PyObject *items = hold_items(submission, expected, (Py_ssize_t)batch->count, "expected");
    struct known_value *values =
        items == NULL ? NULL : new_array(submission, batch->count, sizeof *values);
    if (values == NULL)
        return false;
    for (size_t i = 0; i < batch->count; i++) {
        PyObject *item = PyTuple_GetItem(items, (Py_ssize_t)i);
        char *data = NULL;
        Py_ssize_t bytes = 0;
        if (item != Py_None && PyBytes_AsStringAndSize(item, &data, &bytes) != 0)
            return false;
        values[i] = (struct known_value){data, (size_t)bytes};
    }
    batch->expected = values;
    return true;
}

static PyObject *engine_load_files(Engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "root",         "names",    "rows",   "keys",   "prefix",
                            "attribute", "value_prefix", "expected", "verify", "direct", NULL};
    struct file_arguments files;
    PyObject *expected;
    int verify;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO!OOOy#sy#Opp:load_files", names, &files.memory, &PyTuple_Type,
            &files.root, &files.names, &files.rows, &files.keys, &files.prefix, &files.prefix_bytes,
            &files.attribute, &files.value_prefix, &files.value_prefix_bytes, &expected, &verify,
            &files.direct))
        return NULL;
    if (!verify)
        files.keys = Py_None;
    Submission *submission = new_submission(self, BATCH_LOAD_FILES, false);
    bool is_complete = submission != NULL && take_files(self, submission, &files, true) &&
                       take_expected(submission, expected);
    return submit(self, submission, is_complete);
}

static bool take_temps(Submission *submission, PyObject *temps, const char *recycled,
                       Py_ssize_t num_recycled)
{
    struct batch *batch = &submission->batch;
    batch->temps = take_names(submission, temps, (Py_ssize_t)batch->count, "temps");
    if (batch->temps == NULL)
        return false;
    for (size_t i = 0; i < batch->count; i++) {
        const char *temp = batch->temps[i], *name = batch->names[i];
        const char *slash = strrchr(temp, '/'), *name_slash = strrchr(name, '/');
        ptrdiff_t bytes = slash == NULL ? -1 : slash - temp;
        if (bytes != (name_slash == NULL ? -1 : name_slash - name) ||
            (bytes > 0 && memcmp(temp, name, (size_t)bytes) != 0)) {
            PyErr_Format(PyExc_ValueError, "temps: %s is not in the folder of %s", temp, name);
            return false;
        }
    }
    if ((size_t)num_recycled != batch->count) {
        PyErr_Format(PyExc_ValueError, "recycled: %zd bytes instead of %zu", num_recycled,
                     batch->count);
        return false;
    }
    char *flags = new_array(submission, batch->count, 1);
    batch->disk_bytes = new_array(submission, batch->count, sizeof *batch->disk_bytes);
    if (flags == NULL || batch->disk_bytes == NULL)
        return false;
    batch->recycled = memcpy(flags, recycled, batch->count);
    return true;
}

static PyObject *engine_store_files(Engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory",    "root",         "temps",    "names",     "rows",
                            "keys",      "prefix",       "attribute", "value_prefix", "recycled",
                            "file_mode", "direct",       "fsync",    "wants_disk_bytes",
                            "has_digest", NULL};
    struct file_arguments files;
    PyObject *temps;
    const char *recycled;
    Py_ssize_t num_recycled;
    int file_mode, fsync, wants_disk_bytes, has_digest;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "OO!OOOOy#sy#y#ipppp:store_files", names, &files.memory, &PyTuple_Type,
            &files.root, &temps, &files.names, &files.rows, &files.keys, &files.prefix,
            &files.prefix_bytes, &files.attribute, &files.value_prefix, &files.value_prefix_bytes,
            &recycled, &num_recycled, &file_mode, &files.direct, &fsync, &wants_disk_bytes,
            &has_digest))
        return NULL;
    if (file_mode < -1 || file_mode > 0777)
        return PyErr_Format(PyExc_ValueError, "file_mode: %d is neither permissions nor -1",
                            file_mode);
    if (!has_digest)
        files.keys = Py_None;
    Submission *submission = new_submission(self, BATCH_STORE_FILES, true);
    bool is_complete = submission != NULL && take_files(self, submission, &files, false) &&
                       take_temps(submission, temps, recycled, num_recycled);
    if (is_complete) {
        submission->batch.file_mode = file_mode;
        submission->batch.fsync = fsync;
        submission->batch.wants_disk_bytes = wants_disk_bytes;
    }
    return submit(self, submission, is_complete);
}

static PyObject *engine_has_files(Engine *self, PyObject *args, PyObject *kwargs)
{
    static char *arguments[] = {"root", "names", NULL};
    PyObject *root, *names;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O!O:has_files", arguments, &PyTuple_Type, &root,
                                     &names))
        return NULL;
    Submission *submission = new_submission(self, BATCH_HAS_FILES, false);
    bool is_complete =
        submission != NULL && take_root(submission, root) &&
        (submission->batch.names = take_names(submission, names, -1, "names")) &&
        (submission->batch.statuses = new_array(submission, submission->batch.count, 1));
    return submit(self, submission, is_complete);
}

static bool take_copies(Submission *submission, const Py_buffer *packed, size_t most_bytes)
{
    struct batch *batch = &submission->batch;
    int64_t target_bytes = submission->memories[0]->buffer.len;
    int64_t source_bytes = submission->memories[1]->buffer.len;
    const struct copy *copies = packed->buf;
    size_t num = (size_t)packed->len / sizeof *copies, num_cut = 0;
    if ((size_t)packed->len % sizeof *copies != 0) {
        PyErr_Format(PyExc_ValueError, "parts: %zd bytes are no triples of int64", packed->len);
        return false;
    }
    for (size_t i = 0; i < num; i++) {
        struct copy copy;
        memcpy(&copy, copies + i, sizeof copy);
        if (copy.bytes < 0 || copy.target < 0 || copy.source < 0 ||
            copy.target > target_bytes - copy.bytes || copy.source > source_bytes - copy.bytes) {
            PyErr_Format(PyExc_ValueError, "parts: (%lld, %lld, %lld) is not within the memories",
                         (long long)copy.target, (long long)copy.source, (long long)copy.bytes);
            return false;
        }
        num_cut += ((size_t)copy.bytes + most_bytes - 1) / most_bytes;
    }
    struct copy *cut = new_array(submission, num_cut, sizeof *cut);
    if (cut == NULL)
        return false;
    batch->copies = cut;
    batch->count = num_cut;
    for (size_t i = 0; i < num; i++) {
        struct copy copy;
        memcpy(&copy, copies + i, sizeof copy);
        while (copy.bytes > 0) {
            int64_t bytes = copy.bytes < (int64_t)most_bytes ? copy.bytes : (int64_t)most_bytes;
            *cut++ = (struct copy){copy.target, copy.source, bytes};
            copy = (struct copy){copy.target + bytes, copy.source + bytes, copy.bytes - bytes};
        }
    }
    return true;
}

static PyObject *engine_copies(Engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"target", "source", "parts", NULL};
    PyObject *target, *source;
    Py_buffer packed;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOy*:copies", names, &target, &source, &packed))
        return NULL;
    PyTypeObject *type = state_of(self)->memory_type;
    Submission *submission = new_submission(self, BATCH_COPIES, false);
    bool is_complete = submission != NULL &&
                       use_memory(submission, 0, type, target, true, "target") &&
                       use_memory(submission, 1, type, source, false, "source") &&
                       take_copies(submission, &packed, engine_part_bytes(self->engine));
    PyBuffer_Release(&packed);
    return submit(self, submission, is_complete);
}

/* -- outcomes ----------------------------------------------------------------------------------- */

static PyObject *digests_of(const struct batch *batch)
{
    if (batch->seeds == NULL)
        return PyBytes_FromStringAndSize("", 0);
    return PyBytes_FromStringAndSize((const char *)batch->digests,
                                     (Py_ssize_t)batch->count * DIGEST_BYTES);
}

static PyObject *errors_of(const struct batch *batch)
{
    PyObject *errors = PyDict_New();
    for (size_t i = 0; i < batch->count && errors != NULL; i++) {
        if (batch->errors[i] == 0)
            continue;
        PyObject *index = PyLong_FromSize_t(i), *code = PyLong_FromLong(batch->errors[i]);
        if (index == NULL || code == NULL || PyDict_SetItem(errors, index, code) != 0)
            Py_CLEAR(errors);
        Py_XDECREF(index);
        Py_XDECREF(code);
    }
    return errors;
}

static PyObject *disk_bytes_of(const struct batch *batch)
{
    PyObject *numbers = PyList_New((Py_ssize_t)batch->count);
    for (size_t i = 0; i < batch->count && numbers != NULL; i++) {
        PyObject *number = PyLong_FromLongLong(batch->disk_bytes[i]);
        if (number == NULL || PyList_SetItem(numbers, (Py_ssize_t)i, number) != 0)
            Py_CLEAR(numbers);
    }
    return numbers;
}

static PyObject *outcome_of(const struct batch *batch)
{
    if (batch->kind == BATCH_COPIES)
        return batch->is_cancelled ? PyLong_FromLong(ECANCELED) : Py_NewRef(Py_None);
    if (batch->kind == BATCH_EXTENTS)
        return Py_BuildValue("(NN)", errors_of(batch), digests_of(batch));
    PyObject *statuses =
        PyBytes_FromStringAndSize((const char *)batch->statuses, (Py_ssize_t)batch->count);
    if (batch->kind == BATCH_HAS_FILES)
        return statuses;
    if (batch->kind == BATCH_LOAD_FILES)
        return Py_BuildValue("(NN)", statuses, digests_of(batch));
    return Py_BuildValue("(NNN)", statuses, digests_of(batch), disk_bytes_of(batch));
}

static PyObject *engine_take_ended(Engine *self, PyObject *Py_UNUSED(ignored))
{
    if (!check_process(self))
        return NULL;
    PyObject *ended = PyList_New(0);
    if (ended == NULL)
        return NULL;
    for (struct batch *batch = engine_take(self->engine), *next; batch != NULL; batch = next) {
        next = batch->next;
        if (ended != NULL) { /* short of memory, the outcomes are lost, and nothing else */
            PyObject *item = Py_BuildValue("(KN)", (unsigned long long)batch->ticket,
                                           outcome_of(batch));
            if (item == NULL || PyList_Append(ended, item) != 0)
                Py_CLEAR(ended);
            Py_XDECREF(item);
        }
        free_submission((Submission *)batch);
    }
    return ended;
}

/* -- the engine --------------------------------------------------------------------------------- */

static PyObject *engine_withdraw_ticket(Engine *self, PyObject *ticket)
{
    unsigned long long number = PyLong_AsUnsignedLongLong(ticket);
    if (PyErr_Occurred() || !check_process(self))
        return NULL;
    if (number == 0)
        return PyErr_Format(PyExc_ValueError, "ticket: 0 is none");
    engine_withdraw(self->engine, number);
    Py_RETURN_NONE;
}

/* Converts seconds; a bound keeps the nanoseconds within their type. */
static bool take_seconds(PyObject *value, const char *name, int64_t *ns)
{
    double seconds = PyFloat_AsDouble(value);
    if (PyErr_Occurred())
        return false;
    if (!(seconds >= 0)) {
        PyErr_Format(PyExc_ValueError, "%s: %R is no duration", name, value);
        return false;
    }
    *ns = (int64_t)((seconds < 1e9 ? seconds : 1e9) * 1e9);
    return true;
}

static PyObject *engine_tend_threads(Engine *self, PyObject *hung_after_s)
{
    int64_t ns;
    if (!take_seconds(hung_after_s, "hung_after_s", &ns) || !check_process(self))
        return NULL;
    return PyLong_FromLong(engine_tend(self->engine, ns));
}

static PyObject *engine_close_threads(Engine *self, PyObject *timeout_s)
{
    int64_t ns;
    if (!take_seconds(timeout_s, "timeout_s", &ns) || !check_process(self))
        return NULL;
    self->is_closed = true;
    Py_BEGIN_ALLOW_THREADS
    self->num_left = engine_close(self->engine, ns);
    Py_END_ALLOW_THREADS
    return PyLong_FromLong(self->num_left);
}

static PyObject *engine_map(Engine *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"buffer", "row_bytes", "slot_bytes", NULL};
    PyObject *buffer;
    Py_ssize_t row_bytes, slot_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onn:map", names, &buffer, &row_bytes,
                                     &slot_bytes))
        return NULL;
    return (PyObject *)new_memory(state_of(self)->memory_type, buffer, row_bytes, slot_bytes);
}

static PyObject *engine_counts(Engine *self, PyObject *Py_UNUSED(ignored))
{
    if (!check_process(self))
        return NULL;
    const struct counters *counters = engine_counters(self->engine);
    int alive, spares;
    engine_threads(self->engine, &alive, &spares);
    return Py_BuildValue(
        "{sKsKsKsKsKsKsKsisi}", "system_calls", (unsigned long long)counters->system_calls,
        "pieces", (unsigned long long)counters->pieces, "bytes", (unsigned long long)counters->bytes,
        "hashed_bytes", (unsigned long long)counters->hashed_bytes, "batches",
        (unsigned long long)counters->batches, "parts", (unsigned long long)counters->parts,
        "wake_ups", (unsigned long long)counters->wake_ups, "threads", alive, "spares", spares);
}

static PyObject *engine_get_fd(Engine *self, void *Py_UNUSED(closure))
{
    return PyLong_FromLong(engine_event_fd(self->engine));
}

static void engine_dealloc(Engine *self)
{
    PyTypeObject *type = Py_TYPE((PyObject *)self);
    if (self->engine != NULL && self->pid == getpid()) {
        if (!self->is_closed) {
            self->is_closed = true;
            Py_BEGIN_ALLOW_THREADS
            self->num_left = engine_close(self->engine, 1000000000);
            Py_END_ALLOW_THREADS
        }
        if (self->num_left == 0) {
            for (struct batch *batch = engine_take(self->engine), *next; batch != NULL;
                 batch = next) {
                next = batch->next;
                free_submission((Submission *)batch);
            }
            engine_free(self->engine);
            Py_CLEAR(self->adapter);
        }
    }
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(self);
    Py_DECREF(type);
}

static bool take_hashes(PyObject *addresses, struct hashes *hashes)
{
    unsigned long long numbers[7];
    if (!PyArg_ParseTuple(addresses, "KKKKKKK:hashes", &numbers[0], &numbers[1], &numbers[2],
                          &numbers[3], &numbers[4], &numbers[5], &numbers[6]))
        return false;
    for (int i = 0; i < 7; i++) {
        if (numbers[i] == 0) {
            PyErr_Format(PyExc_ValueError, "hashes: address %d is zero", i);
            return false;
        }
    }
    *hashes = (struct hashes){
        (uint64_t (*)(const void *, size_t))(uintptr_t)numbers[0],
        (struct hash128 (*)(const void *, size_t, uint64_t))(uintptr_t)numbers[1],
        (void *(*)(void))(uintptr_t)numbers[2],
        (int (*)(void *, uint64_t))(uintptr_t)numbers[3],
        (int (*)(void *, const void *, size_t))(uintptr_t)numbers[4],
        (struct hash128 (*)(const void *))(uintptr_t)numbers[5],
        (int (*)(void *))(uintptr_t)numbers[6],
    };
    if (!hashes_are_right(hashes)) {
        PyErr_SetString(PyExc_RuntimeError, "hashes: they do not compute XXH3");
        return false;
    }
    return true;
}

static bool is_between(long long number, long long least, long long most, const char *name)
{
    if (number >= least && number <= most)
        return true;
    PyErr_Format(PyExc_ValueError, "%s: %lld is not between %lld and %lld", name, number, least,
                 most);
    return false;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"load_threads", "store_threads", "spare_threads", "queued", "hashes",
                            "ops",          "name",          "piece_bytes",   "part_bytes", NULL};
    int load_threads, store_threads, spare_threads, queued;
    Py_ssize_t piece_bytes = PIECE_BYTES, part_bytes = PART_BYTES;
    PyObject *addresses, *ops = Py_None;
    const char *name = "kvoffload";
    struct hashes hashes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "iiiiO!|Osnn:Engine", names, &load_threads,
                                     &store_threads, &spare_threads, &queued, &PyTuple_Type,
                                     &addresses, &ops, &name, &piece_bytes, &part_bytes) ||
        !is_between(load_threads, 1, MAX_THREADS, "load_threads") ||
        !is_between(store_threads, 1, MAX_THREADS, "store_threads") ||
        !is_between(spare_threads, 0, MAX_THREADS, "spare_threads") ||
        !is_between(queued, 1, INT32_MAX, "queued") ||
        !is_between(piece_bytes, 1, INT32_MAX, "piece_bytes") ||
        !is_between(part_bytes, 1, INT32_MAX, "part_bytes") || !take_hashes(addresses, &hashes))
        return NULL;
    Engine *self = (Engine *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);
    if (self == NULL)
        return NULL;
    self->pid = getpid();
    if (ops != Py_None && (self->adapter = new_adapter(ops)) == NULL) {
        Py_DECREF(self);
        return NULL;
    }
    struct file_calls files = {ops == Py_None ? make_system_call : make_python_call, self->adapter};
    struct limits limits = {{load_threads, store_threads}, spare_threads, queued,
                            (size_t)piece_bytes, (size_t)part_bytes};
    self->engine = engine_open(name, &limits, &files, &hashes);
    if (self->engine == NULL) {
        PyErr_SetFromErrno(PyExc_OSError);
        Py_CLEAR(self->adapter);
        Py_DECREF(self);
        return NULL;
    }
    return (PyObject *)self;
}

static PyMethodDef engine_methods[] = {
    {"map", (PyCFunction)(void (*)(void))engine_map, METH_VARARGS | METH_KEYWORDS, NULL},
    {"extents", (PyCFunction)(void (*)(void))engine_extents, METH_VARARGS | METH_KEYWORDS, NULL},
    {"load_files", (PyCFunction)(void (*)(void))engine_load_files, METH_VARARGS | METH_KEYWORDS,
     NULL},
    {"store_files", (PyCFunction)(void (*)(void))engine_store_files, METH_VARARGS | METH_KEYWORDS,
     NULL},
    {"has_files", (PyCFunction)(void (*)(void))engine_has_files, METH_VARARGS | METH_KEYWORDS,
     NULL},
    {"copies", (PyCFunction)(void (*)(void))engine_copies, METH_VARARGS | METH_KEYWORDS, NULL},
    {"take", (PyCFunction)engine_take_ended, METH_NOARGS, NULL},
    {"withdraw", (PyCFunction)engine_withdraw_ticket, METH_O, NULL},
    {"tend", (PyCFunction)engine_tend_threads, METH_O, NULL},
    {"close", (PyCFunction)engine_close_threads, METH_O, NULL},
    {"counters", (PyCFunction)engine_counts, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef engine_getset[] = {
    {"fd", (getter)engine_get_fd, NULL, "An eventfd, readable when a batch has ended.", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot engine_slots[] = {
    {Py_tp_new, (void *)engine_new},
    {Py_tp_dealloc, (void *)engine_dealloc},
    {Py_tp_methods, engine_methods},
    {Py_tp_getset, engine_getset},
    {Py_tp_doc, "Moves and hashes batches of blocks in threads of its own; see `_native.pyi`."},
    {0, NULL},
};

static PyType_Spec engine_spec = {
    .name = "kvoffload_async.block_io._native.Engine",
    .basicsize = sizeof(Engine),
    .flags = Py_TPFLAGS_DEFAULT,
    .slots = engine_slots,
};

/* -- the module --------------------------------------------------------------------------------- */

static PyTypeObject *add_type(PyObject *module, PyType_Spec *spec)
{
    PyTypeObject *type = (PyTypeObject *)PyType_FromModuleAndSpec(module, spec, NULL);
    if (type != NULL && PyModule_AddType(module, type) != 0)
        Py_CLEAR(type);
    return type;
}

static int module_exec(PyObject *module)
{
    State *state = PyModule_GetState(module);
    state->memory_type = add_type(module, &memory_spec);
    state->engine_type = add_type(module, &engine_spec);
    if (state->memory_type == NULL || state->engine_type == NULL)
        return -1;
    return PyModule_AddIntConstant(module, "PIECE_BYTES", PIECE_BYTES);
}

static int module_clear(PyObject *module)
{
    State *state = PyModule_GetState(module);
    Py_CLEAR(state->memory_type);
    Py_CLEAR(state->engine_type);
    return 0;
}

static int module_traverse(PyObject *module, visitproc visit, void *arg)
{
    State *state = PyModule_GetState(module);
    Py_VISIT(state->memory_type);
    Py_VISIT(state->engine_type);
    return 0;
}

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
    {0, NULL},
};

static struct PyModuleDef module_def = {
    .m_base = PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "Moves and hashes blocks without the interpreter's lock.",
    .m_size = sizeof(State),
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
};

PyMODINIT_FUNC PyInit__native(void); /* which Python.h does not declare */

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&module_def);
}
