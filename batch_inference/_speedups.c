/* The steps that every request takes, in C.

   What each of these functions and types does is said, and done as well, in Python: see `in_c` in speedups.py. Only common
   cases are here, numpy arrays that lie in memory as they travel; all else is handed to the Python side, which is also
   asked, once, for what is remembered of each layout.

   The interpreter lock is held throughout, but for copies of large arrays. */

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
#include <numpy/arrayobject.h>

#include "_speedups.h"
#include "_awaited.h"
#include "_awake.h"

#define UNIT 64
#define HEADER_SIZE 64
#define TICK 10000      /* nanoseconds in a unit of started_after: wire.TICK */
#define BUCKETS 128     /* of a histogram: board.BUCKETS */
#define MAX_WORKERS 64  /* board.MAX_WORKERS */
#define MAX_PENDING 259 /* board.MAX_PENDING */
#define CLIENT_ROWS 256 /* board.CLIENT_ROWS */
#define ROW 512         /* board.ROW */
#define FIRST_CLIENT 33792      /* board.client_row(0) */
#define TRANSPORT 64    /* board.TRANSPORT; these are too: */
enum { REQUESTS = 0, FAILED = 1, BATCHES = 2, SIZE = 3, RUNNING = 144 };

#define TRANSPORT_SAMPLE 15     /* gate.TRANSPORT_SAMPLE */
#define FIRST_SAMPLES 512       /* gate.FIRST_SAMPLES */
#define MAX_DIMS 8      /* of arrays that are known here */
#define REMEMBERED 16   /* layouts of each kind */
#define SMALL 16384     /* bytes of values that are put together before they are written: codec._SMALL */
#define LARGE 32768     /* bytes that are copied without the interpreter lock */
#define WORTH_POOLING 65536     /* bytes of batches whose memory is used again: buffers.WORTH_POOLING */
#define READ_SIZE 65536 /* bytes that a pipe holds, as a rule */

enum { OK = 1, ERROR = 2, DROPPED = 3, RUNS_ALONE = 4 };

typedef struct {        /* at the start of each slot; see wire.py */
    uint32_t gen, given_up;
    uint64_t length, tries, reply_room;
    uint64_t reply_size, done_at;
    uint32_t status, done_gen, started_after, started_gen;
} Header;

typedef struct {        /* on a request pipe; see wire.py */
    uint32_t client;
    uint16_t channel, segment;
    uint32_t unit, gen;
    int64_t arrived, deadline;
} Descriptor;

_Static_assert(sizeof(Header) == HEADER_SIZE && sizeof(Descriptor) == 32, "as in wire.py");

static PyObject *transport_error;       /* errors.TransportError */
static PyObject *deque;                 /* collections.deque */

static PyObject *name_answers, *name_append, *name_args, *name_arrived, *name_cells, *name_channels, *name_claim,
    *name_deadline, *name_drop, *name_eventfd, *name_gone, *name_index, *name_keys, *name_memory, *name_number,
    *name_popleft, *name_posted, *name_reply, *name_row, *name_runs, *name_segments, *name_size, *name_tell;

/* Calls a function of a Python module, which may itself import this one. */
PyObject *
call_python(const char *module, const char *function, const char *format, ...)
{
    PyObject *result = NULL, *args = NULL, *imported = PyImport_ImportModule(module);
    PyObject *callable = imported == NULL ? NULL : PyObject_GetAttrString(imported, function);
    va_list values;
    va_start(values, format);
    if (callable != NULL && (args = Py_VaBuildValue(format, values)) != NULL)
        result = PyObject_CallObject(callable, args);
    va_end(values);
    Py_XDECREF(args);
    Py_XDECREF(callable);
    Py_XDECREF(imported);
    return result;
}

#define CODEC "batch_inference.transport.codec"

static Py_ssize_t align(Py_ssize_t n) { return (n + UNIT - 1) & -UNIT; }

static void
copy(char *to, const char *from, Py_ssize_t size)
{
    if (size < LARGE) {
        memcpy(to, from, size);
    }
    else {
        Py_BEGIN_ALLOW_THREADS
        memcpy(to, from, size);
        Py_END_ALLOW_THREADS
    }
}

/* The address of a writable buffer, which its owner must keep where it is. */
static char *
address_of(PyObject *memory, Py_ssize_t *size)
{
    Py_buffer view;
    if (PyObject_GetBuffer(memory, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    char *address = view.buf;
    *size = view.len;
    PyBuffer_Release(&view);
    return address;
}

/* counting.bucket */
static int
bucket_of(int64_t ns)
{
    int64_t units = ns >> 10, index = units > 0 ? units : 0;
    if (units >= 4) {
        int exponent = 61 - __builtin_clzll(units);
        index = 4 * exponent + 4 + ((units >> exponent) & 3);
    }
    return index < BUCKETS ? (int)index : BUCKETS - 1;
}

/* An attribute that is a whole number; -1 with an exception if it is none. */
static long long
number_of(PyObject *object, PyObject *name)
{
    PyObject *number = PyObject_GetAttr(object, name);
    long long value = number == NULL ? -1 : PyLong_AsLongLong(number);
    Py_XDECREF(number);
    return value;
}

/* --- codec: encoding ----------------------------------------------------------------------------------------------- */

typedef struct {        /* the bytes before the data of arrays of one dtype and shape */
    PyArray_Descr *descr;
    int nd;
    npy_intp dims[MAX_DIMS];
    PyObject *prefix;
} Prefix;

typedef struct { Prefix known[REMEMBERED]; int count, next, latest; } Prefixes;

static Prefixes of_arrays, of_calls;

static PyObject *
find_prefix(Prefixes *prefixes, PyArrayObject *array)
{
    int nd = PyArray_NDIM(array);
    size_t size = nd * sizeof(npy_intp);
    for (int i = 0; i < prefixes->count; i++) {
        int at = prefixes->latest + i;
        Prefix *prefix = &prefixes->known[at < prefixes->count ? at : at - prefixes->count];
        if (prefix->descr == PyArray_DESCR(array) && prefix->nd == nd &&
            (nd == 0 || !memcmp(prefix->dims, PyArray_DIMS(array), size))) {
            prefixes->latest = (int)(prefix - prefixes->known);
            return prefix->prefix;
        }
    }
    return NULL;
}

static PyObject *
learn_prefix(Prefixes *prefixes, PyArrayObject *array, PyObject *value)
{
    PyObject *bytes = call_python(CODEC, "prefix_of", "(O)", value);
    if (bytes == NULL || !PyBytes_CheckExact(bytes) || PyArray_NDIM(array) > MAX_DIMS) {
        Py_XDECREF(bytes);
        return NULL;
    }
    Prefix *prefix = &prefixes->known[prefixes->next], last = *prefix;
    if (prefixes->count < REMEMBERED)
        prefixes->count++;
    prefixes->latest = prefixes->next;
    prefixes->next = (prefixes->next + 1) % REMEMBERED;
    Py_INCREF(PyArray_DESCR(array));
    prefix->descr = PyArray_DESCR(array);
    prefix->nd = PyArray_NDIM(array);
    if (prefix->nd > 0)
        memcpy(prefix->dims, PyArray_DIMS(array), prefix->nd * sizeof(npy_intp));
    prefix->prefix = bytes;
    Py_XDECREF(last.descr);
    Py_XDECREF(last.prefix);
    return bytes;
}

/* What comes before the bytes of `value`, an array or a request of one, borrowed; NULL, with an exception or without, where
   Python must do it. */
static PyObject *
prefix_for(Prefixes *prefixes, PyArrayObject *array, PyObject *value)
{
    if (!PyArray_IS_C_CONTIGUOUS(array))
        return NULL;
    PyObject *prefix = find_prefix(prefixes, array);
    return prefix != NULL ? prefix : learn_prefix(prefixes, array, value);
}

typedef struct { PyObject_HEAD PyObject *prefix, *array; } Large;

static void
Large_dealloc(Large *self)
{
    Py_XDECREF(self->prefix);
    Py_XDECREF(self->array);
    PyObject_Free(self);
}

static Py_ssize_t
Large_length(Large *self)
{
    return PyBytes_GET_SIZE(self->prefix) + PyArray_NBYTES((PyArrayObject *)self->array);
}

static void
Large_put(Large *self, char *to)
{
    Py_ssize_t size = PyBytes_GET_SIZE(self->prefix);
    memcpy(to, PyBytes_AS_STRING(self->prefix), size);
    copy(to + size, PyArray_BYTES((PyArrayObject *)self->array), PyArray_NBYTES((PyArrayObject *)self->array));
}

static PyObject *
Large_write(Large *self, PyObject *args)
{
    PyObject *memory;
    Py_ssize_t offset, size;
    if (!PyArg_ParseTuple(args, "On", &memory, &offset))
        return NULL;
    char *address = address_of(memory, &size);
    if (address == NULL)
        return NULL;
    if (offset < 0 || Large_length(self) > size - offset) {
        PyErr_SetString(PyExc_ValueError, "the value does not fit");
        return NULL;
    }
    Large_put(self, address + offset);
    Py_RETURN_NONE;
}

static PyMethodDef Large_methods[] = {
    {"write", (PyCFunction)Large_write, METH_VARARGS, NULL},
    {NULL},
};

static PySequenceMethods Large_sequence = {.sq_length = (lenfunc)Large_length};

static PyTypeObject Large_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batch_inference._speedups.Large",
    .tp_doc = "A value with one large array; see codec._Large.",
    .tp_basicsize = sizeof(Large),
    .tp_flags = Py_TPFLAGS_DEFAULT,
    .tp_dealloc = (destructor)Large_dealloc,
    .tp_as_sequence = &Large_sequence,
    .tp_methods = Large_methods,
};

/* codec.write, to an address that is `memory` at `offset`; -1 with an exception. */
static int
put(PyObject *encoded, char *address, PyObject *memory, Py_ssize_t offset)
{
    if (PyBytes_CheckExact(encoded)) {
        memcpy(address, PyBytes_AS_STRING(encoded), PyBytes_GET_SIZE(encoded));
    }
    else if (Py_IS_TYPE(encoded, &Large_type)) {
        Large_put((Large *)encoded, address);
    }
    else {
        PyObject *written = PyObject_CallMethod(encoded, "write", "On", memory, offset);
        if (written == NULL)
            return -1;
        Py_DECREF(written);
    }
    return 0;
}

/* The bytes of `value`, an array or a request of one; NULL, with an exception or without, where Python must do it. */
static PyObject *
encode_array(Prefixes *prefixes, PyArrayObject *array, PyObject *value)
{
    PyObject *prefix = prefix_for(prefixes, array, value);
    if (prefix == NULL)
        return NULL;
    Py_ssize_t before = PyBytes_GET_SIZE(prefix), size = PyArray_NBYTES(array);
    if (before + size > SMALL) {
        Large *large = PyObject_New(Large, &Large_type);
        if (large != NULL) {
            large->prefix = Py_NewRef(prefix);
            large->array = Py_NewRef(array);
        }
        return (PyObject *)large;
    }
    PyObject *encoded = PyBytes_FromStringAndSize(NULL, before + size);
    if (encoded != NULL) {
        char *to = PyBytes_AS_STRING(encoded);
        memcpy(to, PyBytes_AS_STRING(prefix), before);
        memcpy(to + before, PyArray_BYTES(array), size);
    }
    return encoded;
}

static PyObject *
encode(PyObject *module, PyObject *value)
{
    PyObject *encoded = NULL;
    if (PyArray_CheckExact(value))
        encoded = encode_array(&of_arrays, (PyArrayObject *)value, value);
    if (encoded == NULL && !PyErr_Occurred())
        encoded = call_python(CODEC, "encode_any", "(O)", value);
    return encoded;
}

static PyObject *
encode_request(PyObject *module, PyObject *args)
{
    PyObject *encoded = NULL;
    if (PyTuple_CheckExact(args) && PyTuple_GET_SIZE(args) == 1 && PyArray_CheckExact(PyTuple_GET_ITEM(args, 0)))
        encoded = encode_array(&of_calls, (PyArrayObject *)PyTuple_GET_ITEM(args, 0), args);
    if (encoded == NULL && !PyErr_Occurred())
        encoded = call_python(CODEC, "encode_any_request", "(O)", args);
    return encoded;
}

/* --- codec: decoding ----------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject *layout, *head;
    Py_ssize_t size;            /* of the value, head included */
    int in_tuple;               /* an array in a tuple, or an array */
    PyArray_Descr *descr;       /* of the only array; or NULL: layout.view and layout.copy are asked */
    int nd;
    npy_intp dims[MAX_DIMS];
    Py_ssize_t at, nbytes;      /* of its data */
} Known;

static Known layouts[REMEMBERED];
static int layout_count, layout_next, layout_latest;

/* NULL with an exception. `layout` has head, size, and only: (dtype, shape, at, in_tuple) of its only array or None. */
static Known *
learn_layout(PyObject *layout)
{
    Known new = {0}, *result = NULL;
    PyObject *size = NULL, *only = NULL, *shape;
    if ((new.head = PyObject_GetAttrString(layout, "head")) == NULL ||
        (size = PyObject_GetAttrString(layout, "size")) == NULL ||
        (only = PyObject_GetAttrString(layout, "only")) == NULL)
        goto end;
    new.size = PyLong_AsSsize_t(size);
    if (only != Py_None) {
        if (!PyArg_ParseTuple(only, "O!O!np", &PyArrayDescr_Type, &new.descr, &PyTuple_Type, &shape, &new.at,
                              &new.in_tuple))
            goto end;
        new.nd = (int)PyTuple_GET_SIZE(shape);
        if (new.nd > MAX_DIMS) {
            new.descr = NULL;
        }
        else {
            new.nbytes = PyDataType_ELSIZE(new.descr);
            for (int i = 0; i < new.nd; i++) {
                new.dims[i] = PyLong_AsSsize_t(PyTuple_GET_ITEM(shape, i));
                new.nbytes *= new.dims[i];
            }
        }
    }
    if (PyErr_Occurred())
        goto end;
    result = &layouts[layout_next];
    if (layout_count < REMEMBERED)
        layout_count++;
    layout_latest = layout_next;
    layout_next = (layout_next + 1) % REMEMBERED;
    Known last = *result;
    Py_INCREF(layout);
    Py_XINCREF(new.descr);
    Py_INCREF(new.head);
    new.layout = layout;
    *result = new;
    Py_XDECREF(last.layout);
    Py_XDECREF(last.head);
    Py_XDECREF(last.descr);
end:
    Py_XDECREF(new.head);
    Py_XDECREF(size);
    Py_XDECREF(only);
    return result;
}

/* The layout of the plain value in the `length` bytes of `memory` at `offset`; NULL with an exception, or without one if
   the value was pickled. */
static Known *
layout_of(const char *address, PyObject *memory, Py_ssize_t offset, Py_ssize_t length)
{
    uint32_t head;
    if (length >= 4) {
        memcpy(&head, address, 4);
        for (int i = 0; i < layout_count; i++) {
            int at = layout_latest + i;
            Known *known = &layouts[at < layout_count ? at : at - layout_count];
            Py_ssize_t size = PyBytes_GET_SIZE(known->head);
            if (head + INT64_C(4) == size && known->size <= length && !memcmp(address, PyBytes_AS_STRING(known->head), size)) {
                layout_latest = (int)(known - layouts);
                return known;
            }
        }
    }
    PyObject *layout = call_python(CODEC, "layout_at", "(Onn)", memory, offset, length);
    if (layout == NULL)
        return NULL;
    Known *known = layout == Py_None ? NULL : learn_layout(layout);
    Py_DECREF(layout);
    return known;
}

static PyObject *
build(Known *known, char *address, PyObject *memory, Py_ssize_t offset, int lend)
{
    if (known->descr == NULL)
        return PyObject_CallMethod(known->layout, lend ? "view" : "copy", "On", memory, offset);
    Py_INCREF(known->descr);
    char *data = address + known->at;
    int in_tuple = known->in_tuple;
    Py_ssize_t nbytes = known->nbytes;  /* `known` may be another's when the lock was given up */
    PyObject *array = PyArray_NewFromDescr(
        &PyArray_Type, known->descr, known->nd, known->dims, NULL, lend ? data : NULL, lend ? NPY_ARRAY_CARRAY : 0, NULL);
    if (array == NULL)
        return NULL;
    if (!lend) {
        copy(PyArray_BYTES((PyArrayObject *)array), data, nbytes);
    }
    else {
        Py_INCREF(memory);
        if (PyArray_SetBaseObject((PyArrayObject *)array, memory) < 0) {
            Py_DECREF(array);
            return NULL;
        }
    }
    if (!in_tuple)
        return array;
    PyObject *request = PyTuple_Pack(1, array);
    Py_DECREF(array);
    return request;
}

static PyObject *
decode_at(char *address, PyObject *memory, Py_ssize_t offset, Py_ssize_t length, int lend)
{
    Known *known = layout_of(address, memory, offset, length);
    if (known != NULL)
        return build(known, address, memory, offset, lend);
    if (PyErr_Occurred())
        return NULL;
    return call_python(CODEC, "unpickle", "(Onn)", memory, offset, length);
}

/* --- Slot: see slot.py --------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *segment, *memory, *channel, *worker, *deaths, *error, *elsewhere;
    Header *header;
    Py_ssize_t number, offset, order, unit, word, quad, key, length, reply_at, room;
    unsigned int gen;
    long long arrived, deadline;
    char abandoned;
} Slot;

static void
fit(Slot *self, Py_ssize_t length)
{
    self->length = length;
    self->reply_at = HEADER_SIZE + align(length);
    self->room = ((Py_ssize_t)1 << self->order) - self->reply_at;
}

static int
Slot_init(Slot *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"segment", "number", "offset", "order", NULL};
    PyObject *segment;
    Py_ssize_t size;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onnn", names, &segment, &self->number, &self->offset, &self->order))
        return -1;
    PyObject *memory = PyObject_GetAttrString(segment, "memory");
    if (memory == NULL)
        return -1;
    Py_XSETREF(self->memory, memory);
    char *address = address_of(memory, &size);
    if (address == NULL)
        return -1;
    if (self->order < 6 || self->order > 62 || self->offset < 0 || self->offset % UNIT ||
        self->offset > size - ((Py_ssize_t)1 << self->order)) {
        PyErr_SetString(PyExc_ValueError, "a slot must lie within its segment");
        return -1;
    }
    Py_XSETREF(self->segment, Py_NewRef(segment));
    self->header = (Header *)(address + self->offset);
    self->unit = self->offset / UNIT;
    self->word = self->unit * (UNIT / 4);
    self->quad = self->unit * (UNIT / 8);
    self->key = self->number | self->unit << 32;
    fit(self, 0);
    Py_XSETREF(self->deaths, PyTuple_New(0));
    return self->deaths == NULL ? -1 : 0;
}

static int
Slot_traverse(Slot *self, visitproc visit, void *arg)
{
    Py_VISIT(self->segment);
    Py_VISIT(self->memory);
    Py_VISIT(self->channel);
    Py_VISIT(self->worker);
    Py_VISIT(self->deaths);
    Py_VISIT(self->error);
    Py_VISIT(self->elsewhere);
    return 0;
}

static int
Slot_clear(Slot *self)
{
    Py_CLEAR(self->channel);
    Py_CLEAR(self->worker);
    Py_CLEAR(self->deaths);
    Py_CLEAR(self->error);
    Py_CLEAR(self->elsewhere);
    return 0;   /* segment and memory refer to no slot */
}

static void
Slot_dealloc(Slot *self)
{
    PyObject_GC_UnTrack(self);
    Slot_clear(self);
    Py_CLEAR(self->segment);
    Py_CLEAR(self->memory);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int has(PyObject *member) { return member != NULL && member != Py_None; }

/* Writes the client's half of the header, for a request of `size` bytes; -1 if that does not fit. */
static int
begin(Slot *self, Py_ssize_t size)
{
    if (size != self->length)
        fit(self, size);
    if (self->room < 0)
        return -1;
    Header *header = self->header;
    header->gen = self->gen;
    header->given_up = 0;
    header->length = size;
    header->tries = 0;
    header->reply_room = self->room;
    return 0;
}

static PyObject *
Slot_write(Slot *self, PyObject *encoded)
{
    Py_ssize_t size = PyObject_Size(encoded);
    if (size < 0)
        return NULL;
    if (begin(self, size) < 0)
        return PyErr_Format(PyExc_ValueError, "a request of %zd bytes does not fit %R", size, self);
    Header *header = self->header;
    if (put(encoded, (char *)header + HEADER_SIZE, self->memory, self->offset + HEADER_SIZE) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
Slot_descriptor(Slot *self, PyObject *client)
{
    Descriptor descriptor = {
        .client = (uint32_t)PyLong_AsLong(client),
        .segment = (uint16_t)self->number,
        .unit = (uint32_t)self->unit,
        .gen = self->gen,
        .arrived = self->arrived,
        .deadline = self->deadline,
    };
    Py_ssize_t channel = number_of(self->channel ? self->channel : Py_None, name_number);
    if (PyErr_Occurred())
        return NULL;
    if (channel != (descriptor.channel = (uint16_t)channel) || self->number != descriptor.segment) {
        PyErr_SetString(PyExc_OverflowError, "a descriptor holds no number above 65535");
        return NULL;
    }
    return PyBytes_FromStringAndSize((char *)&descriptor, sizeof(descriptor));
}

static int
is_done(Slot *self)
{
    return __atomic_load_n(&self->header->done_gen, __ATOMIC_ACQUIRE) == self->gen || has(self->error);
}

static PyObject *
Slot_done(Slot *self, void *closure)
{
    return PyBool_FromLong(is_done(self));
}

static int
replies_within(Slot *self, unsigned long long most)
{
    return has(self->error) || (!has(self->elsewhere) && self->header->reply_size <= most);
}

static PyObject *
Slot_replies_within(Slot *self, PyObject *most)
{
    unsigned long long bytes = PyLong_AsUnsignedLongLong(most);
    if (PyErr_Occurred())
        return NULL;
    return PyBool_FromLong(replies_within(self, bytes));
}

static PyObject *
Slot_forget(Slot *self, PyObject *ignored)
{
    self->abandoned = 0;
    Py_CLEAR(self->error);
    Py_CLEAR(self->elsewhere);
    if (self->deaths == NULL || !PyTuple_CheckExact(self->deaths) || PyTuple_GET_SIZE(self->deaths) > 0) {
        PyObject *none = PyTuple_New(0);
        if (none == NULL)
            return NULL;
        Py_XSETREF(self->deaths, none);
    }
    Py_RETURN_NONE;
}

static PyObject *
Slot_size(Slot *self, void *closure)
{
    return PyLong_FromSsize_t((Py_ssize_t)1 << self->order);
}

static PyObject *
Slot_reply_size(Slot *self, void *closure)
{
    return PyLong_FromUnsignedLongLong(self->header->reply_size);
}

/* The reply of a request that is done, if it is a result in the slot; `rare(slot)` for all else. */
static PyObject *
Slot_reply(Slot *self, PyObject *rare)
{
    Header *header = self->header;
    if (header->status != OK || has(self->error) || has(self->elsewhere) || header->reply_size > (uint64_t)self->room)
        return PyObject_CallOneArg(rare, (PyObject *)self);
    char *address = (char *)header + self->reply_at;
    return decode_at(address, self->memory, self->offset + self->reply_at, header->reply_size, 0);
}

static PyObject *
Slot_repr(Slot *self)
{
    return PyUnicode_FromFormat("<Slot %zd:%zd of %zd bytes, gen %u>", self->number, self->offset,
                                (Py_ssize_t)1 << self->order, self->gen);
}

static PyMemberDef Slot_members[] = {
    {"segment", T_OBJECT, offsetof(Slot, segment), READONLY, NULL},
    {"channel", T_OBJECT, offsetof(Slot, channel), 0, NULL},
    {"worker", T_OBJECT, offsetof(Slot, worker), 0, NULL},
    {"deaths", T_OBJECT, offsetof(Slot, deaths), 0, NULL},
    {"error", T_OBJECT, offsetof(Slot, error), 0, NULL},
    {"elsewhere", T_OBJECT, offsetof(Slot, elsewhere), 0, NULL},
    {"number", T_PYSSIZET, offsetof(Slot, number), READONLY, NULL},
    {"offset", T_PYSSIZET, offsetof(Slot, offset), READONLY, NULL},
    {"order", T_PYSSIZET, offsetof(Slot, order), READONLY, NULL},
    {"unit", T_PYSSIZET, offsetof(Slot, unit), READONLY, NULL},
    {"word", T_PYSSIZET, offsetof(Slot, word), READONLY, NULL},
    {"quad", T_PYSSIZET, offsetof(Slot, quad), READONLY, NULL},
    {"key", T_PYSSIZET, offsetof(Slot, key), READONLY, NULL},
    {"length", T_PYSSIZET, offsetof(Slot, length), READONLY, NULL},
    {"reply_at", T_PYSSIZET, offsetof(Slot, reply_at), READONLY, NULL},
    {"room", T_PYSSIZET, offsetof(Slot, room), READONLY, NULL},
    {"gen", T_UINT, offsetof(Slot, gen), 0, NULL},
    {"arrived", T_LONGLONG, offsetof(Slot, arrived), 0, NULL},
    {"deadline", T_LONGLONG, offsetof(Slot, deadline), 0, NULL},
    {"abandoned", T_BOOL, offsetof(Slot, abandoned), 0, NULL},
    {NULL},
};

static PyMethodDef Slot_methods[] = {
    {"write", (PyCFunction)Slot_write, METH_O, NULL},
    {"descriptor", (PyCFunction)Slot_descriptor, METH_O, NULL},
    {"reply", (PyCFunction)Slot_reply, METH_O, NULL},
    {"replies_within", (PyCFunction)Slot_replies_within, METH_O, NULL},
    {"forget", (PyCFunction)Slot_forget, METH_NOARGS, NULL},
    {NULL},
};

static PyGetSetDef Slot_getset[] = {
    {"done", (getter)Slot_done, NULL, NULL, NULL},
    {"reply_size", (getter)Slot_reply_size, NULL, NULL, NULL},
    {"size", (getter)Slot_size, NULL, NULL, NULL},
    {NULL},
};

static PyTypeObject Slot_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batch_inference._speedups.Slot",
    .tp_doc = "See slot.py.",
    .tp_basicsize = sizeof(Slot),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Slot_init,
    .tp_traverse = (traverseproc)Slot_traverse,
    .tp_clear = (inquiry)Slot_clear,
    .tp_dealloc = (destructor)Slot_dealloc,
    .tp_repr = (reprfunc)Slot_repr,
    .tp_members = Slot_members,
    .tp_methods = Slot_methods,
    .tp_getset = Slot_getset,
};

static Slot *
checked_slot(PyObject *argument)
{
    if (Py_IS_TYPE(argument, &Slot_type))
        return (Slot *)argument;
    PyErr_Format(PyExc_TypeError, "that takes a slot, not a %s", Py_TYPE(argument)->tp_name);
    return NULL;
}

/* --- Incoming: see incoming.py ------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *inbox, *peer, *memory, *channel, *args, *kind;
    Header *header;
    Py_ssize_t start, space, length, room, size;    /* space: bytes from the slot's start to the segment's end */
    unsigned int number, unit, gen;
    long long arrived, deadline;
    int eventfd;                                    /* of the channel, or -1 */
    char alone;
} Incoming;

static PyTypeObject Incoming_type;

/* The request that a descriptor names, if its slot holds it; NULL without an exception if not. */
static PyObject *
open_request(PyObject *inbox, PyObject *peer, PyObject *segment, PyObject *channel, const Descriptor *descriptor)
{
    Py_ssize_t size;
    PyObject *result = NULL, *fd = NULL, *memory = PyObject_GetAttr(segment, name_memory);
    if (memory == NULL)
        return NULL;
    char *address = address_of(memory, &size);
    Py_ssize_t start = (Py_ssize_t)descriptor->unit * UNIT;
    if (address == NULL || start > size - HEADER_SIZE)
        goto end;
    Header *header = (Header *)(address + start);
    if (header->gen != descriptor->gen)
        goto end;
    uint64_t length = header->length, room = header->reply_room;
    if ((fd = PyObject_GetAttr(channel, name_eventfd)) == NULL)
        goto end;
    Incoming *self = PyObject_New(Incoming, &Incoming_type);
    if (self == NULL)
        goto end;
    memset((char *)self + sizeof(PyObject), 0, sizeof(Incoming) - sizeof(PyObject));
    self->inbox = Py_NewRef(inbox);
    self->peer = Py_NewRef(peer);
    self->memory = Py_NewRef(memory);
    self->channel = Py_NewRef(channel);
    self->header = header;
    self->start = start;
    self->space = size - start;
    self->length = length < PY_SSIZE_T_MAX / 2 ? (Py_ssize_t)length : PY_SSIZE_T_MAX / 2;
    self->room = room < PY_SSIZE_T_MAX / 2 ? (Py_ssize_t)room : PY_SSIZE_T_MAX / 2;
    self->number = descriptor->segment;
    self->unit = descriptor->unit;
    self->gen = descriptor->gen;
    self->arrived = descriptor->arrived;
    self->deadline = descriptor->deadline;
    self->eventfd = (int)PyLong_AsLong(fd);
    self->alone = header->tries > 0;
    result = (PyObject *)self;
end:
    Py_DECREF(memory);
    Py_XDECREF(fd);
    return result;
}

static void
Incoming_dealloc(Incoming *self)
{
    PyObject *members[] = {self->inbox, self->peer, self->memory, self->channel, self->args, self->kind};
    PyObject_Free(self);
    for (size_t i = 0; i < sizeof(members) / sizeof(*members); i++)
        Py_XDECREF(members[i]);
}

static void
mark(Incoming *self, uint32_t status, uint32_t after, uint32_t gen)
{
    Header *header = self->header;
    header->status = status;
    header->done_gen = 0;
    header->started_after = after;
    __atomic_store_n(&header->started_gen, gen, __ATOMIC_RELEASE);
}

static PyObject *
Incoming_take(Incoming *self, PyObject *ignored)
{
    mark(self, RUNS_ALONE, 0, self->gen);
    Py_RETURN_NONE;
}

static PyObject *
Incoming_rest(Incoming *self, PyObject *ignored)
{
    mark(self, 0, 0, 0);
    Py_RETURN_NONE;
}

static PyObject *
fault(const char *message)
{
    PyErr_SetString(transport_error, message);
    return NULL;
}

static PyObject *
decode_request(Incoming *self, int lend, int takes)
{
    if (self->length > self->space - HEADER_SIZE)
        return fault("a request claims to reach beyond its segment: the slot was overwritten");
    char *address = (char *)self->header + HEADER_SIZE;
    PyObject *value, *layout;
    Known *known = layout_of(address, self->memory, self->start + HEADER_SIZE, self->length);
    if (known != NULL) {
        layout = Py_NewRef(known->layout);
        value = build(known, address, self->memory, self->start + HEADER_SIZE, lend);
    }
    else {
        if (PyErr_Occurred())
            return NULL;
        layout = Py_NewRef(Py_None);
        if (takes)
            mark(self, RUNS_ALONE, 0, self->gen);
        value = call_python(CODEC, "unpickle", "(Onn)", self->memory, self->start + HEADER_SIZE, self->length);
    }
    if (value != NULL && !PyTuple_CheckExact(value)) {
        Py_DECREF(value);
        value = fault("a request is not a tuple of arguments: the slot was overwritten");
    }
    if (value == NULL) {
        Py_DECREF(layout);
        return NULL;
    }
    PyObject *both = PyTuple_Pack(2, value, layout);
    Py_DECREF(value);
    Py_DECREF(layout);
    return both;
}

static PyObject *
Incoming_decode(Incoming *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"lend", "takes", NULL};
    int lend, takes = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "p|p", names, &lend, &takes))
        return NULL;
    return decode_request(self, lend, takes);
}

static PyObject *
Incoming_fresh_args(Incoming *self, PyObject *lend)
{
    int lends = PyObject_IsTrue(lend);
    PyObject *both = lends < 0 ? NULL : decode_request(self, lends, 0);
    if (both == NULL)
        return NULL;
    PyObject *value = Py_NewRef(PyTuple_GET_ITEM(both, 0));
    Py_DECREF(both);
    return value;
}

/* These two: 1 or 0; -1 with an exception. */
static int
is_gone(Incoming *self)
{
    PyObject *gone = PyObject_GetAttr(self->peer, name_gone);
    int result = gone == NULL ? -1 : PyObject_IsTrue(gone);
    Py_XDECREF(gone);
    return result;
}

static int
is_unwanted(Incoming *self, long long now)
{
    int given_up = self->header->given_up == self->gen || (0 < self->deadline && self->deadline < now);
    return given_up ? 1 : is_gone(self);
}

static PyObject *
Incoming_unwanted(Incoming *self, PyObject *now)
{
    long long ns = PyLong_AsLongLong(now);
    int result = ns == -1 && PyErr_Occurred() ? -1 : is_unwanted(self, ns);
    return result < 0 ? NULL : PyBool_FromLong(result);
}

static PyObject *
Incoming_claim(Incoming *self, PyObject *const *args, Py_ssize_t count)
{
    if (count != 2) {
        PyErr_SetString(PyExc_TypeError, "claim takes now and alone");
        return NULL;
    }
    long long now = PyLong_AsLongLong(args[0]);
    int alone = PyObject_IsTrue(args[1]);
    int unwanted = PyErr_Occurred() ? -1 : is_unwanted(self, now);
    if (unwanted < 0)
        return NULL;
    if (unwanted)
        Py_RETURN_FALSE;
    mark(self, alone ? RUNS_ALONE : 0, (uint32_t)((now - self->arrived) / TICK), self->gen);
    Py_RETURN_TRUE;
}

static PyObject *
Incoming_runs(Incoming *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"alone", NULL};
    int alone;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "p", names, &alone))
        return NULL;
    self->header->status = alone ? RUNS_ALONE : 0;
    Py_RETURN_NONE;
}

/* Where a reply of `size` bytes goes; NULL if it does not fit. */
static char *
room_for(Incoming *self, Py_ssize_t size)
{
    Py_ssize_t at = HEADER_SIZE + align(self->length);
    if (self->length > self->space || size > self->room || at + size > self->space)
        return NULL;
    return (char *)self->header + at;
}

/* These two: 0, or -1 with an exception. */
static int
post(Incoming *self)
{
    PyObject *keys = PyObject_GetAttr(self->channel, name_keys), *posted = NULL, *flush;
    int must = -1;
    if (keys != NULL && PyList_CheckExact(keys)) {
        PyObject *key = PyLong_FromUnsignedLongLong(self->number | (uint64_t)self->unit << 32);
        must = key == NULL || PyList_Append(keys, key) < 0 ? -1 : 1;
        Py_XDECREF(key);
    }
    else if (keys != NULL && (flush = PyObject_CallMethod(self->channel, "post", "II", self->number, self->unit)) != NULL) {
        must = PyObject_IsTrue(flush);
        Py_DECREF(flush);
    }
    if (must > 0 && ((posted = PyObject_GetAttr(self->inbox, name_posted)) == NULL || PySet_Add(posted, self->channel) < 0))
        must = -1;
    Py_XDECREF(keys);
    Py_XDECREF(posted);
    return must < 0 ? -1 : 0;
}

/* Says that a reply of `size` bytes is there, and wakes the caller. */
static int
finish(Incoming *self, Py_ssize_t size, uint32_t status)
{
    Header *header = self->header;
    header->reply_size = size;
    header->done_at = monotonic_ns();
    header->status = status;
    __atomic_store_n(&header->done_gen, self->gen, __ATOMIC_RELEASE);   /* from here on the slot is the client's again */
    if (self->eventfd < 0)
        return post(self);
    uint64_t one = 1;
    while (write(self->eventfd, &one, sizeof(one)) < 0) {
        if (errno == EINTR && PyErr_CheckSignals() == 0)
            continue;
        if (PyErr_Occurred())
            return -1;
        if (errno == EAGAIN)
            break;      /* it is full: then its reader is woken anyway */
        PyErr_SetFromErrno(PyExc_OSError);
        return -1;
    }
    return 0;
}

static PyObject *
reply(Incoming *self, PyObject *encoded, uint32_t status)
{
    int gone = is_gone(self);
    if (gone < 0)
        return NULL;
    if (gone)
        Py_RETURN_NONE;
    Py_ssize_t size = PyObject_Size(encoded);
    if (size < 0)
        return NULL;
    char *to = room_for(self, size);
    if (to == NULL)
        return PyObject_CallMethod(self->inbox, "reply_elsewhere", "O(IIII)O", self->peer, self->number, self->unit,
                                   self->gen, status, encoded);
    if (put(encoded, to, self->memory, self->start + (to - (char *)self->header)) < 0 || finish(self, size, status) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* Replies with an array, without encoding it first: 1. 0 if it takes more than copying bytes; -1 with an exception. */
static int
reply_array(Incoming *self, PyArrayObject *array)
{
    int gone = is_gone(self);
    if (gone != 0)
        return gone;
    PyObject *prefix = prefix_for(&of_arrays, array, (PyObject *)array);
    if (prefix == NULL)
        return PyErr_Occurred() ? -1 : 0;
    Py_ssize_t before = PyBytes_GET_SIZE(prefix), size = PyArray_NBYTES(array);
    char *to = room_for(self, before + size);
    if (to == NULL)
        return 0;
    memcpy(to, PyBytes_AS_STRING(prefix), before);
    copy(to + before, PyArray_BYTES(array), size);
    return finish(self, before + size, OK) < 0 ? -1 : 1;
}

static PyObject *
Incoming_reply(Incoming *self, PyObject *const *args, Py_ssize_t count)
{
    long status = count > 1 ? PyLong_AsLong(args[1]) : OK;
    if (count < 1 || count > 2 || (status == -1 && PyErr_Occurred())) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "reply takes an encoded value and a status");
        return NULL;
    }
    return reply(self, args[0], (uint32_t)status);
}

static PyObject *
Incoming_fail(Incoming *self, PyObject *error)
{
    PyObject *encoded = call_python(CODEC, "encode_error", "(O)", error);
    if (encoded == NULL)
        return NULL;
    PyObject *result = reply(self, encoded, ERROR);
    Py_DECREF(encoded);
    return result;
}

static PyObject *
Incoming_drop(Incoming *self, PyObject *ignored)
{
    PyObject *nothing = PyBytes_FromStringAndSize(NULL, 0);
    if (nothing == NULL)
        return NULL;
    PyObject *result = reply(self, nothing, DROPPED);
    Py_DECREF(nothing);
    return result;
}

static PyMemberDef Incoming_members[] = {
    {"peer", T_OBJECT, offsetof(Incoming, peer), READONLY, NULL},
    {"arrived", T_LONGLONG, offsetof(Incoming, arrived), READONLY, NULL},
    {"deadline", T_LONGLONG, offsetof(Incoming, deadline), READONLY, NULL},
    {"alone", T_BOOL, offsetof(Incoming, alone), READONLY, NULL},
    {"args", T_OBJECT, offsetof(Incoming, args), 0, NULL},
    {"kind", T_OBJECT, offsetof(Incoming, kind), 0, NULL},
    {"size", T_PYSSIZET, offsetof(Incoming, size), 0, NULL},
    {NULL},
};

static PyMethodDef Incoming_methods[] = {
    {"decode", (PyCFunction)(void (*)(void))Incoming_decode, METH_VARARGS | METH_KEYWORDS, NULL},
    {"fresh_args", (PyCFunction)Incoming_fresh_args, METH_O, NULL},
    {"unwanted", (PyCFunction)Incoming_unwanted, METH_O, NULL},
    {"take", (PyCFunction)Incoming_take, METH_NOARGS, NULL},
    {"rest", (PyCFunction)Incoming_rest, METH_NOARGS, NULL},
    {"claim", (PyCFunction)(void (*)(void))Incoming_claim, METH_FASTCALL, NULL},
    {"runs", (PyCFunction)(void (*)(void))Incoming_runs, METH_VARARGS | METH_KEYWORDS, NULL},
    {"reply", (PyCFunction)(void (*)(void))Incoming_reply, METH_FASTCALL, NULL},
    {"fail", (PyCFunction)Incoming_fail, METH_O, NULL},
    {"drop", (PyCFunction)Incoming_drop, METH_NOARGS, NULL},
    {NULL},
};

static PyTypeObject Incoming_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batch_inference._speedups.Incoming",
    .tp_doc = "See incoming.py.",
    .tp_basicsize = sizeof(Incoming),
    .tp_flags = Py_TPFLAGS_DEFAULT,     /* nothing that it refers to refers to it */
    .tp_dealloc = (destructor)Incoming_dealloc,
    .tp_members = Incoming_members,
    .tp_methods = Incoming_methods,
};

/* A borrowed item of the dict that is an attribute of `object`; NULL with or without an exception. */
static PyObject *
item_of(PyObject *object, PyObject *name, unsigned long number)
{
    PyObject *dict = PyObject_GetAttr(object, name), *key, *item = NULL;
    if (dict != NULL && (key = PyLong_FromUnsignedLong(number)) != NULL) {
        item = PyDict_GetItemWithError(dict, key);
        Py_DECREF(key);
    }
    Py_XDECREF(dict);
    return item;
}

/* open_requests(inbox, peers, descriptors, opened) -> bytes: appends the requests in slots that are here to `opened`, and
   returns the descriptors of those whose client, memory or channel is not. */
static PyObject *
open_requests(PyObject *module, PyObject *args)
{
    PyObject *inbox, *peers, *opened;
    const char *data;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "OO!y#O!", &inbox, &PyDict_Type, &peers, &data, &size, &PyList_Type, &opened))
        return NULL;
    PyObject *unknown = PyBytes_FromStringAndSize(NULL, 0);
    int64_t now = monotonic_ns();
    for (Py_ssize_t at = 0; unknown != NULL && at + (Py_ssize_t)sizeof(Descriptor) <= size; at += sizeof(Descriptor)) {
        Descriptor descriptor;
        memcpy(&descriptor, data + at, sizeof(descriptor));
        if (descriptor.arrived <= 0 || descriptor.arrived > now)
            continue;
        PyObject *client = PyLong_FromUnsignedLong(descriptor.client), *segment = NULL, *channel = NULL;
        PyObject *peer = client == NULL ? NULL : PyDict_GetItemWithError(peers, client);
        Py_XDECREF(client);
        if (peer != NULL && (segment = item_of(peer, name_segments, descriptor.segment)) != NULL)
            channel = item_of(peer, name_channels, descriptor.channel);
        if (channel != NULL) {
            PyObject *request = open_request(inbox, peer, segment, channel, &descriptor);
            if (request != NULL) {
                PyList_Append(opened, request);
                Py_DECREF(request);
            }
        }
        else if (!PyErr_Occurred()) {
            PyBytes_ConcatAndDel(&unknown, PyBytes_FromStringAndSize(data + at, sizeof(Descriptor)));
        }
        if (PyErr_Occurred())
            Py_CLEAR(unknown);
    }
    return unknown;
}

/* --- Ledger: see ledger.py ----------------------------------------------------------------------------------------- */

typedef struct {        /* of a board, when it was last looked at */
    PyObject *object;
    uint64_t *at;
    Py_ssize_t count;
} Cells;

/* 0, or -1 with an exception. A client's board is another one after its supervisor died. What goes with the old one may run
   Python, and so let other threads in here: that comes last. */
static int
look_at(Cells *cells, PyObject *board)
{
    Cells now = {.object = PyObject_GetAttr(board, name_cells)}, last = *cells;
    if (now.object == NULL)
        return -1;
    if (now.object == last.object) {
        Py_DECREF(now.object);
        return 0;
    }
    if ((now.at = (uint64_t *)address_of(now.object, &now.count)) == NULL) {
        Py_DECREF(now.object);
        return -1;
    }
    now.count /= sizeof(uint64_t);
    *cells = now;
    Py_XDECREF(last.object);
    return 0;
}

/* The cell of that index in the board's own row, or NULL with an exception. */
static uint64_t *
own_cell(Cells *cells, PyObject *board, Py_ssize_t index, Py_ssize_t most)
{
    Py_ssize_t row = number_of(board, name_row);
    if (PyErr_Occurred() || look_at(cells, board) < 0)
        return NULL;
    if (index < 0 || index >= most || row < 0 || row + index >= cells->count) {
        PyErr_SetString(PyExc_IndexError, "there is no such cell on the board");
        return NULL;
    }
    return cells->at + row + index;
}

typedef struct {
    PyObject_HEAD
    PyObject *requests, *ready, *board;
    Cells cells;
    long long counts[MAX_WORKERS];
} Ledger;

static int
Ledger_init(Ledger *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"board", NULL};
    PyObject *board;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O", names, &board))
        return -1;
    Py_XSETREF(self->board, Py_NewRef(board));
    Py_XSETREF(self->requests, PyDict_New());
    Py_XSETREF(self->ready, PyList_New(0));
    return self->requests == NULL || self->ready == NULL ? -1 : 0;
}

static int
Ledger_traverse(Ledger *self, visitproc visit, void *arg)
{
    Py_VISIT(self->requests);
    Py_VISIT(self->ready);
    Py_VISIT(self->board);
    Py_VISIT(self->cells.object);
    return 0;
}

static int
Ledger_clear(Ledger *self)
{
    Py_CLEAR(self->requests);
    Py_CLEAR(self->ready);
    Py_CLEAR(self->board);
    Py_CLEAR(self->cells.object);
    return 0;
}

static void
Ledger_dealloc(Ledger *self)
{
    PyObject_GC_UnTrack(self);
    Ledger_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static int
count(Ledger *self, PyObject *peer, Py_ssize_t change)
{
    Py_ssize_t index = number_of(peer, name_index);
    uint64_t *cell = PyErr_Occurred() ? NULL : own_cell(&self->cells, self->board, index, MAX_WORKERS);
    if (cell == NULL)
        return -1;
    *cell = self->counts[index] += change;
    return 0;
}

static PyObject *
Ledger_count(Ledger *self, PyObject *args)
{
    PyObject *peer;
    Py_ssize_t change;
    if (!PyArg_ParseTuple(args, "On", &peer, &change) || count(self, peer, change) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* The requests that a worker has, of all clients. */
static uint64_t
outstanding(Cells *cells, Py_ssize_t index)
{
    uint64_t sum = 0, rows = cells->count > CLIENT_ROWS ? cells->at[CLIENT_ROWS] : 0;
    for (Py_ssize_t at = FIRST_CLIENT + index; rows > 0 && at < cells->count; at += ROW, rows--)
        sum += cells->at[at];
    return sum;
}

/* Of several that are ready; NULL with an exception. */
static PyObject *
least_loaded(Ledger *self)
{
    Py_ssize_t best = -1;
    uint64_t least = UINT64_MAX;
    if (look_at(&self->cells, self->board) < 0)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->ready); i++) {
        Py_ssize_t index = number_of(PyList_GET_ITEM(self->ready, i), name_index);
        if (index < 0 || index >= MAX_WORKERS) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_IndexError, "there is no such worker");
            return NULL;
        }
        uint64_t has = outstanding(&self->cells, index);
        if (has < least) {
            least = has;
            best = i;
        }
    }
    if (best < 0) {
        PyErr_SetString(PyExc_IndexError, "no worker is ready");
        return NULL;
    }
    PyObject *peer = Py_NewRef(PyList_GET_ITEM(self->ready, best));     /* among equals each in turn: it is the last now */
    if (PyList_SetSlice(self->ready, best, best + 1, NULL) < 0 || PyList_Append(self->ready, peer) < 0)
        Py_CLEAR(peer);
    return peer;
}

static PyObject *
assign(Ledger *self, Slot *slot)
{
    PyObject *peer;
    if (PyList_GET_SIZE(self->ready) == 0)
        peer = Py_NewRef(Py_None);
    else if (PyList_GET_SIZE(self->ready) == 1)
        peer = Py_NewRef(PyList_GET_ITEM(self->ready, 0));
    else if ((peer = least_loaded(self)) == NULL)
        return NULL;
    Py_XSETREF(slot->worker, Py_NewRef(peer));
    if (peer != Py_None && count(self, peer, 1) < 0)
        Py_CLEAR(peer);
    return peer;
}

static PyObject *
Ledger_assign(Ledger *self, PyObject *argument)
{
    Slot *slot = checked_slot(argument);
    return slot == NULL ? NULL : assign(self, slot);
}

/* Assigns a slot, and adds its descriptor to the list of its worker's; -1 with an exception. */
static int
share(Ledger *self, PyObject *shares, PyObject *argument, PyObject *client)
{
    Slot *slot = checked_slot(argument);
    PyObject *peer = slot == NULL ? NULL : assign(self, slot), *descriptor = NULL, *list = NULL;
    int result = peer == Py_None ? 0 : -1;
    if (peer != NULL && peer != Py_None && (descriptor = Slot_descriptor(slot, client)) != NULL) {
        list = Py_XNewRef(PyDict_GetItemWithError(shares, peer));
        if (list == NULL && !PyErr_Occurred() && (list = PyList_New(0)) != NULL && PyDict_SetItem(shares, peer, list) < 0)
            Py_CLEAR(list);
        result = list == NULL ? -1 : PyList_Append(list, descriptor);
    }
    Py_XDECREF(peer);
    Py_XDECREF(descriptor);
    Py_XDECREF(list);
    return result;
}

static PyObject *
Ledger_assign_all(Ledger *self, PyObject *args)
{
    PyObject *slots, *client, *shares;
    if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &slots, &client) || (shares = PyDict_New()) == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(slots); i++) {
        if (share(self, shares, PyList_GET_ITEM(slots, i), client) < 0) {
            Py_DECREF(shares);
            return NULL;
        }
    }
    return shares;
}

/* 0, or -1 with an exception. */
static int
note(Ledger *self, PyObject *argument, PyObject *channel, PyObject *deadline)
{
    Slot *slot = checked_slot(argument);
    if (slot == NULL)
        return -1;
    Py_XSETREF(slot->channel, Py_NewRef(channel));
    slot->arrived = monotonic_ns();
    slot->deadline = 0;
    if (deadline != Py_None) {
        double seconds = PyFloat_AsDouble(deadline);
        if (seconds == -1.0 && PyErr_Occurred())
            return -1;
        slot->deadline = seconds < 9e9 ? (long long)(seconds * 1e9) : LLONG_MAX;
    }
    PyObject *key = PyLong_FromSsize_t(slot->key);
    int result = key == NULL ? -1 : PyDict_SetItem(self->requests, key, argument);
    Py_XDECREF(key);
    return result;
}

static PyObject *
Ledger_enter(Ledger *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3) {
        PyErr_SetString(PyExc_TypeError, "enter takes a slot, a channel and a deadline");
        return NULL;
    }
    return note(self, args[0], args[1], args[2]) < 0 ? NULL : assign(self, (Slot *)args[0]);
}

static PyObject *
Ledger_enter_all(Ledger *self, PyObject *args)
{
    PyObject *entries, *channel, *client, *slot, *deadline, *shares;
    if (!PyArg_ParseTuple(args, "O!OO", &PyList_Type, &entries, &channel, &client) || (shares = PyDict_New()) == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        if (!PyArg_ParseTuple(PyList_GET_ITEM(entries, i), "OO", &slot, &deadline) || note(self, slot, channel, deadline) < 0)
            Py_CLEAR(shares);
        if (shares == NULL)
            return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(entries); i++) {
        if (share(self, shares, PyTuple_GET_ITEM(PyList_GET_ITEM(entries, i), 0), client) < 0) {
            Py_DECREF(shares);
            return NULL;
        }
    }
    return shares;
}

static int
leave(Ledger *self, PyObject *argument)
{
    Slot *slot = checked_slot(argument);
    PyObject *key = slot == NULL ? NULL : PyLong_FromSsize_t(slot->key);
    if (key == NULL)
        return -1;
    PyObject *there = PyDict_GetItemWithError(self->requests, key);
    int failed = 0;
    if (there != NULL)
        failed = PyDict_DelItem(self->requests, key) < 0 || (has(slot->worker) && count(self, slot->worker, -1) < 0);
    Py_DECREF(key);
    return failed || PyErr_Occurred() ? -1 : 0;
}

static PyObject *
Ledger_leave(Ledger *self, PyObject *argument)
{
    if (leave(self, argument) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
Ledger_leave_all(Ledger *self, PyObject *slots)
{
    if (!PyList_CheckExact(slots)) {
        PyErr_SetString(PyExc_TypeError, "leave_all takes a list of slots");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(slots); i++) {
        if (leave(self, PyList_GET_ITEM(slots, i)) < 0)
            return NULL;
    }
    Py_RETURN_NONE;
}

static PyMemberDef Ledger_members[] = {
    {"requests", T_OBJECT, offsetof(Ledger, requests), READONLY, NULL},
    {"ready", T_OBJECT, offsetof(Ledger, ready), READONLY, NULL},
    {NULL},
};

static PyMethodDef Ledger_methods[] = {
    {"enter", (PyCFunction)(void (*)(void))Ledger_enter, METH_FASTCALL, NULL},
    {"enter_all", (PyCFunction)Ledger_enter_all, METH_VARARGS, NULL},
    {"assign", (PyCFunction)Ledger_assign, METH_O, NULL},
    {"assign_all", (PyCFunction)Ledger_assign_all, METH_VARARGS, NULL},
    {"leave", (PyCFunction)Ledger_leave, METH_O, NULL},
    {"leave_all", (PyCFunction)Ledger_leave_all, METH_O, NULL},
    {"count", (PyCFunction)Ledger_count, METH_VARARGS, NULL},
    {NULL},
};

static PyTypeObject Ledger_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batch_inference._speedups.Ledger",
    .tp_doc = "See ledger.py.",
    .tp_basicsize = sizeof(Ledger),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Ledger_init,
    .tp_traverse = (traverseproc)Ledger_traverse,
    .tp_clear = (inquiry)Ledger_clear,
    .tp_dealloc = (destructor)Ledger_dealloc,
    .tp_members = Ledger_members,
    .tp_methods = Ledger_methods,
};

/* --- Gate: see gate.py --------------------------------------------------------------------------------------------- */

typedef struct {
    PyObject_HEAD
    PyObject *waiting, *admitted, *orders, *board, *collect_rare;
    PyObject *free, *generations;       /* the arena's; free: lists of slots, by order */
    Cells cells;
    long long until_count, most;
} Gate;

static int
Gate_init(Gate *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"board", "arena", "collect_rare", NULL};
    PyObject *board, *arena, *collect_rare, *free;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOO", names, &board, &arena, &collect_rare) ||
        (free = PyObject_GetAttrString(arena, "free_slots")) == NULL)
        return -1;
    if (!PyList_CheckExact(free)) {
        Py_DECREF(free);
        PyErr_SetString(PyExc_TypeError, "an arena has a list of lists of slots");
        return -1;
    }
    Py_XSETREF(self->free, free);
    Py_XSETREF(self->generations, PyObject_GetAttrString(arena, "generations"));
    Py_XSETREF(self->collect_rare, Py_NewRef(collect_rare));
    Py_XSETREF(self->board, Py_NewRef(board));
    Py_XSETREF(self->waiting, PyObject_CallNoArgs(deque));
    Py_XSETREF(self->admitted, PySet_New(NULL));
    Py_XSETREF(self->orders, PyDict_New());
    return self->generations && self->waiting && self->admitted && self->orders ? 0 : -1;
}

static int
Gate_traverse(Gate *self, visitproc visit, void *arg)
{
    Py_VISIT(self->waiting);
    Py_VISIT(self->admitted);
    Py_VISIT(self->orders);
    Py_VISIT(self->board);
    Py_VISIT(self->collect_rare);
    Py_VISIT(self->free);
    Py_VISIT(self->generations);
    Py_VISIT(self->cells.object);
    return 0;
}

static int
Gate_clear(Gate *self)
{
    Py_CLEAR(self->waiting);
    Py_CLEAR(self->admitted);
    Py_CLEAR(self->orders);
    Py_CLEAR(self->board);
    Py_CLEAR(self->collect_rare);
    Py_CLEAR(self->free);
    Py_CLEAR(self->generations);
    Py_CLEAR(self->cells.object);
    return 0;
}

static void
Gate_dealloc(Gate *self)
{
    PyObject_GC_UnTrack(self);
    Gate_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* The list of free slots of that order, borrowed; NULL with an exception if there is none. */
static PyObject *
free_of(Gate *self, Py_ssize_t order)
{
    PyObject *list = order < 0 || order >= PyList_GET_SIZE(self->free) ? NULL : PyList_GET_ITEM(self->free, order);
    if (list != NULL && PyList_CheckExact(list))
        return list;
    PyErr_Format(PyExc_IndexError, "there are no slots of order %zd", order);
    return NULL;
}

/* A slot for a request of `size` bytes, if it takes no more than to pop one; NULL with an exception or without. */
static Slot *
taken(Gate *self, Py_ssize_t size)
{
    Py_ssize_t waiting = PyObject_Size(self->waiting);
    if (waiting != 0 || self->until_count <= 1 || look_at(&self->cells, self->board) < 0 ||
        self->cells.count <= MAX_PENDING || (long long)self->cells.at[MAX_PENDING] != self->most)
        return NULL;
    PyObject *key = PyLong_FromSsize_t(size);
    PyObject *order = key == NULL ? NULL : PyDict_GetItemWithError(self->orders, key);
    Py_XDECREF(key);
    PyObject *list = order == NULL ? NULL : free_of(self, PyLong_AsSsize_t(order));
    Py_ssize_t free = list == NULL ? 0 : PyList_GET_SIZE(list);
    if (free == 0)
        return NULL;
    PyObject *generation = PyIter_Next(self->generations);
    if (generation == NULL)
        return NULL;
    PyObject *slot = Py_NewRef(PyList_GET_ITEM(list, free - 1));
    if (checked_slot(slot) == NULL || PyList_SetSlice(list, free - 1, free, NULL) < 0) {
        Py_DECREF(generation);
        Py_DECREF(slot);
        return NULL;
    }
    ((Slot *)slot)->gen = (uint32_t)PyLong_AsUnsignedLongMask(generation);
    Py_DECREF(generation);
    self->until_count--;
    return (Slot *)slot;
}

static PyObject *
Gate_fill(Gate *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs < 1 || nargs > 2) {
        PyErr_SetString(PyExc_TypeError, "fill takes a request and a number of bytes");
        return NULL;
    }
    Py_ssize_t most = nargs == 2 && args[1] != Py_None ? PyLong_AsSsize_t(args[1]) : PY_SSIZE_T_MAX;
    if (most == -1 && PyErr_Occurred())
        return NULL;
    if (!PyTuple_CheckExact(args[0]) || PyTuple_GET_SIZE(args[0]) != 1 || !PyArray_CheckExact(PyTuple_GET_ITEM(args[0], 0)))
        Py_RETURN_NONE;
    PyArrayObject *array = (PyArrayObject *)PyTuple_GET_ITEM(args[0], 0);
    PyObject *prefix = PyArray_IS_C_CONTIGUOUS(array) ? find_prefix(&of_calls, array) : NULL;
    if (prefix == NULL)
        Py_RETURN_NONE;
    Py_ssize_t before = PyBytes_GET_SIZE(prefix), size = before + PyArray_NBYTES(array);
    Slot *slot = size > most ? NULL : taken(self, size);
    if (slot == NULL) {
        if (PyErr_Occurred())
            return NULL;
        Py_RETURN_NONE;
    }
    if (begin(slot, size) < 0) {
        PyErr_Format(PyExc_ValueError, "a request of %zd bytes does not fit %R", size, slot);
        Py_DECREF(slot);
        return NULL;
    }
    char *to = (char *)slot->header + HEADER_SIZE;
    memcpy(to, PyBytes_AS_STRING(prefix), before);
    copy(to + before, PyArray_BYTES(array), size - before);
    return (PyObject *)slot;
}

static PyObject *
Gate_release(Gate *self, PyObject *argument)
{
    Slot *slot = checked_slot(argument);
    PyObject *list = slot == NULL ? NULL : free_of(self, slot->order), *result;
    if (list == NULL)
        return NULL;
    if (PySet_GET_SIZE(self->admitted) > 0) {
        PyObject *key = PyLong_FromSsize_t(slot->key);
        int failed = key == NULL || PySet_Discard(self->admitted, key) < 0;
        Py_XDECREF(key);
        if (failed)
            return NULL;
    }
    if ((result = Slot_forget(slot, NULL)) == NULL)
        return NULL;
    Py_DECREF(result);
    if (PyList_Append(list, argument) < 0)
        return NULL;
    Py_ssize_t waiting = PyObject_Size(self->waiting);
    if (waiting < 0)
        return NULL;
    if (waiting > 0)
        return PyObject_CallMethodNoArgs((PyObject *)self, name_tell);
    Py_RETURN_NONE;
}

static int
time_reply(Gate *self, Slot *slot)
{
    int64_t took = monotonic_ns() - (int64_t)slot->header->done_at;
    uint64_t *cell = has(slot->error) ? NULL : own_cell(&self->cells, self->board, TRANSPORT + bucket_of(took), TRANSPORT + BUCKETS);
    if (cell != NULL)
        ++*cell;
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
Gate_collect(Gate *self, PyObject *argument)
{
    Slot *slot = checked_slot(argument);
    if (slot == NULL)
        return NULL;
    int timed = (slot->gen & TRANSPORT_SAMPLE) == 1 || slot->gen < FIRST_SAMPLES;
    PyObject *reply = timed && time_reply(self, slot) < 0 ? NULL : Slot_reply(slot, self->collect_rare);
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    PyObject *released = Gate_release(self, argument);
    if (released == NULL)
        Py_CLEAR(reply);
    if (type != NULL)
        PyErr_Restore(type, value, traceback);
    Py_XDECREF(released);
    return reply;
}

static PyMemberDef Gate_members[] = {
    {"waiting", T_OBJECT, offsetof(Gate, waiting), READONLY, NULL},
    {"admitted", T_OBJECT, offsetof(Gate, admitted), READONLY, NULL},
    {"orders", T_OBJECT, offsetof(Gate, orders), READONLY, NULL},
    {"until_count", T_LONGLONG, offsetof(Gate, until_count), 0, NULL},
    {"most", T_LONGLONG, offsetof(Gate, most), 0, NULL},
    {NULL},
};

static PyMethodDef Gate_methods[] = {
    {"fill", (PyCFunction)(void (*)(void))Gate_fill, METH_FASTCALL, NULL},
    {"collect", (PyCFunction)Gate_collect, METH_O, NULL},
    {"release", (PyCFunction)Gate_release, METH_O, NULL},
    {NULL},
};

static PyTypeObject Gate_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batch_inference._speedups.Gate",
    .tp_doc = "See gate.py.",
    .tp_basicsize = sizeof(Gate),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)Gate_init,
    .tp_traverse = (traverseproc)Gate_traverse,
    .tp_clear = (inquiry)Gate_clear,
    .tp_dealloc = (destructor)Gate_dealloc,
    .tp_members = Gate_members,
    .tp_methods = Gate_methods,
};

/* --- event loops: see loops.py ------------------------------------------------------------------------------------- */

/* Of an Awaited: 1 if its reply is to be collected, 0 if not; -1 with an exception. */
static int
is_answered(PyObject *argument, unsigned long long most, PyObject *large)
{
    if (!Py_IS_TYPE(argument, &Awaited_type)) {
        PyErr_Format(PyExc_TypeError, "what waits is an Awaited, not a %s", Py_TYPE(argument)->tp_name);
        return -1;
    }
    Awaited *awaited = (Awaited *)argument;
    Slot *slot = checked_slot(awaited->slot);
    if (slot == NULL)
        return -1;
    if (awaited->settled || !is_done(slot))
        return 0;
    return replies_within(slot, most) ? 1 : Awaited_finish(awaited, large, NULL);
}

static PyObject *
take_answered(PyObject *module, PyObject *args)
{
    PyObject *waiting, *keys, *large, *ready;
    unsigned long long most;
    if (!PyArg_ParseTuple(args, "O!O!KO", &PyDict_Type, &waiting, &PyList_Type, &keys, &most, &large) ||
        (ready = PyList_New(0)) == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(keys); i++) {
        PyObject *key = PyList_GET_ITEM(keys, i), *awaited = Py_XNewRef(PyDict_GetItemWithError(waiting, key));
        int answered = awaited == NULL ? (PyErr_Occurred() ? -1 : 0) : is_answered(awaited, most, large);
        if (answered > 0 && (PyDict_DelItem(waiting, key) < 0 || PyList_Append(ready, awaited) < 0))
            answered = -1;
        Py_XDECREF(awaited);
        if (answered < 0) {
            Py_DECREF(ready);
            return NULL;
        }
    }
    return ready;
}

/* --- a worker's pipe: see inbox.py --------------------------------------------------------------------------------- */

static PyObject *
read_or_hear(PyObject *module, PyObject *args)
{
    int pipe, control, ready;
    PyObject *timeout;
    if (!PyArg_ParseTuple(args, "iiO", &pipe, &control, &timeout))
        return NULL;
    double seconds = timeout == Py_None ? 0 : PyFloat_AsDouble(timeout);
    if (PyErr_Occurred())
        return NULL;
    int64_t end = timeout == Py_None ? INT64_MAX : monotonic_ns() + (int64_t)(seconds * 1e9);
    struct pollfd fds[] = {{.fd = pipe, .events = POLLIN}, {.fd = control, .events = POLLIN}};
    for (;;) {
        int64_t left = end == INT64_MAX ? 0 : end - monotonic_ns();
        left = left > 0 ? left : 0;
        struct timespec wait = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
        Py_BEGIN_ALLOW_THREADS
        ready = ppoll(fds, 2, end == INT64_MAX ? NULL : &wait, NULL);
        Py_END_ALLOW_THREADS
        if (ready >= 0)
            break;
        if (errno != EINTR)
            return PyErr_SetFromErrno(PyExc_OSError);
        if (PyErr_CheckSignals() < 0)
            return NULL;
    }
    PyObject *data = PyBytes_FromStringAndSize(NULL, 0);
    ssize_t got = fds[0].revents ? READ_SIZE : 0;
    while (data != NULL && got == READ_SIZE) {
        char buffer[READ_SIZE];
        got = read(pipe, buffer, READ_SIZE);
        if (got < 0 && errno != EAGAIN) {
            Py_DECREF(data);
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        if (got > 0)
            PyBytes_ConcatAndDel(&data, PyBytes_FromStringAndSize(buffer, got));
    }
    if (data == NULL)
        return NULL;
    return Py_BuildValue("NO", data, fds[1].revents ? Py_True : Py_False);
}

/* --- a worker's queues: see waiting.py ----------------------------------------------------------------------------- */

static PyObject *
sort_known(PyObject *module, PyObject *args)
{
    PyObject *arrived, *known, *queues, *alone;
    Py_ssize_t start, limit;
    int lend;
    if (!PyArg_ParseTuple(args, "O!nnO!O!pO", &PyList_Type, &arrived, &start, &limit, &PyDict_Type, &queues,
                          &PyDict_Type, &known, &lend, &alone))
        return NULL;
    for (; start < PyList_GET_SIZE(arrived); start++) {
        Incoming *self = (Incoming *)PyList_GET_ITEM(arrived, start);
        if (!Py_IS_TYPE((PyObject *)self, &Incoming_type) || self->length > self->space - HEADER_SIZE)
            break;
        Py_ssize_t offset = self->start + HEADER_SIZE;
        char *address = (char *)self->header + HEADER_SIZE;
        Known *layout = layout_of(address, self->memory, offset, self->length);
        PyObject *asked = layout == NULL ? NULL : PyDict_GetItemWithError(known, layout->layout);
        Py_ssize_t size = asked == NULL ? -1 : PyLong_AsSsize_t(PyTuple_GET_ITEM(asked, 0));
        if (size < 0 || size > limit)
            break;
        PyObject *kind = self->alone ? alone : PyTuple_GET_ITEM(asked, 1);
        Py_INCREF(kind);
        PyObject *value = build(layout, address, self->memory, offset, lend);
        if (value == NULL || !PyTuple_CheckExact(value)) {
            Py_XDECREF(value);
            Py_DECREF(kind);
            break;
        }
        Py_XSETREF(self->args, value);
        Py_XSETREF(self->kind, kind);
        self->size = size;
        PyObject *queue = PyDict_GetItemWithError(queues, kind), *done = NULL;
        if (queue != NULL)
            Py_INCREF(queue);
        else if (!PyErr_Occurred() && (queue = PyObject_CallNoArgs(deque)) != NULL && PyDict_SetItem(queues, kind, queue) < 0)
            Py_CLEAR(queue);
        if (queue != NULL)
            done = PyObject_CallMethodOneArg(queue, name_append, (PyObject *)self);
        Py_XDECREF(queue);
        if (done == NULL)
            break;
        Py_DECREF(done);
    }
    /* An error that has to do with one request comes again where that is dealt with alone. */
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_Exception))
        return NULL;
    PyErr_Clear();
    return PyLong_FromSsize_t(start);
}

static PyObject *
cut(PyObject *module, PyObject *args)
{
    PyObject *queue, *now;
    Py_ssize_t limit, left, size = 0;
    if (!PyArg_ParseTuple(args, "OnO", &queue, &limit, &now) || (left = PyObject_Size(queue)) < 0)
        return NULL;
    PyObject *alone = left == 1 ? Py_True : Py_False, *batch = PyList_New(0);
    while (batch != NULL && left > 0) {
        PyObject *first = PySequence_GetItem(queue, 0), *claimed = NULL;
        if (first == NULL)
            goto failed;
        int incoming = Py_IS_TYPE(first, &Incoming_type);
        Py_ssize_t its_size = incoming ? ((Incoming *)first)->size : number_of(first, name_size);
        if (its_size < 0 && PyErr_Occurred()) {
            Py_DECREF(first);
            goto failed;
        }
        if (PyList_GET_SIZE(batch) > 0 && size + its_size > limit) {
            Py_DECREF(first);
            break;
        }
        PyObject *popped = PyObject_CallMethodNoArgs(queue, name_popleft);
        if (popped != NULL) {
            PyObject *both[] = {first, now, alone};
            claimed = incoming ? Incoming_claim((Incoming *)first, both + 1, 2)
                               : PyObject_VectorcallMethod(name_claim, both, 3, NULL);
        }
        Py_XDECREF(popped);
        int failed = 1;
        if (claimed == Py_True) {
            size += its_size;
            failed = PyList_Append(batch, first) < 0;
        }
        else if (claimed != NULL) {
            PyObject *dropped = PyObject_CallMethodNoArgs(first, name_drop);
            failed = dropped == NULL;
            Py_XDECREF(dropped);
        }
        Py_XDECREF(claimed);
        Py_DECREF(first);
        if (failed)
            goto failed;
        left--;
    }
    if (batch != NULL && alone == Py_False && PyList_GET_SIZE(batch) == 1) {
        PyObject *first = PyList_GET_ITEM(batch, 0), *none;
        if (Py_IS_TYPE(first, &Incoming_type))
            ((Incoming *)first)->header->status = RUNS_ALONE;
        else if ((none = PyObject_CallMethodOneArg(first, name_runs, Py_True)) == NULL)
            goto failed;
        else
            Py_DECREF(none);
    }
    return Py_BuildValue("Nn", batch, size);
failed:
    Py_XDECREF(batch);
    return NULL;
}

typedef struct { long long size, arrived, deadline; } Times;    /* of a request */

/* 0, or -1 with an exception. */
static int
look_up(PyObject *request, Times *times)
{
    if (Py_IS_TYPE(request, &Incoming_type)) {
        Incoming *self = (Incoming *)request;
        *times = (Times){self->size, self->arrived, self->deadline};
        return 0;
    }
    times->size = number_of(request, name_size);
    times->arrived = PyErr_Occurred() ? -1 : number_of(request, name_arrived);
    times->deadline = PyErr_Occurred() ? -1 : number_of(request, name_deadline);
    return PyErr_Occurred() ? -1 : 0;
}

static PyObject *
summed(PyObject *module, PyObject *args)
{
    PyObject *queue, *request = NULL;
    Py_ssize_t limit, count = 0;
    long long size = 0, oldest = 0, deadline = 0;
    if (!PyArg_ParseTuple(args, "On", &queue, &limit))
        return NULL;
    PyObject *requests = PyObject_GetIter(queue);
    for (; requests != NULL && size < limit && (request = PyIter_Next(requests)) != NULL; count++) {
        Times times;
        int failed = look_up(request, &times);
        Py_DECREF(request);
        if (failed)
            break;
        size += times.size;
        if (count == 0)
            oldest = times.arrived;
        if (times.deadline > 0 && (deadline == 0 || times.deadline < deadline))
            deadline = times.deadline;
    }
    Py_XDECREF(requests);
    if (PyErr_Occurred())
        return NULL;
    if (size >= limit)
        Py_RETURN_NONE;
    PyObject *until = deadline == 0 ? Py_NewRef(Py_None) : PyFloat_FromDouble((double)deadline / 1e9);
    return until == NULL ? NULL : Py_BuildValue("nLdN", count, size, (double)oldest / 1e9, until);
}

static PyObject *
arrivals(PyObject *module, PyObject *requests)
{
    PyObject *items = PySequence_Fast(requests, "requests are a sequence");
    Py_ssize_t count = items == NULL ? 0 : PySequence_Fast_GET_SIZE(items);
    PyObject *times = PyList_New(count), *sizes = PyList_New(count);
    for (Py_ssize_t i = 0; i < count && times != NULL && sizes != NULL; i++) {
        Times its;
        if (look_up(PySequence_Fast_GET_ITEM(items, i), &its) < 0)
            break;
        PyList_SET_ITEM(times, i, PyFloat_FromDouble((double)its.arrived / 1e9));
        PyList_SET_ITEM(sizes, i, PyLong_FromLongLong(its.size));
    }
    Py_XDECREF(items);
    if (!PyErr_Occurred())
        return Py_BuildValue("NN", times, sizes);
    Py_XDECREF(times);
    Py_XDECREF(sizes);
    return NULL;
}

static PyObject *
args_of(PyObject *module, PyObject *requests)
{
    PyObject *items = PySequence_Fast(requests, "requests are a sequence");
    Py_ssize_t count = items == NULL ? 0 : PySequence_Fast_GET_SIZE(items);
    PyObject *all = items == NULL ? NULL : PyList_New(count);
    for (Py_ssize_t i = 0; i < count && all != NULL; i++) {
        PyObject *args = PyObject_GetAttr(PySequence_Fast_GET_ITEM(items, i), name_args);
        if (args == NULL)
            Py_CLEAR(all);
        else
            PyList_SET_ITEM(all, i, args);
    }
    Py_XDECREF(items);
    return all;
}

/* --- replies: see running.py --------------------------------------------------------------------------------------- */

/* 0, or -1 with an exception. */
static int
reply_with(PyObject *request, PyObject *response)
{
    int incoming = Py_IS_TYPE(request, &Incoming_type), done = 0;
    if (incoming && PyArray_CheckExact(response))
        done = reply_array((Incoming *)request, (PyArrayObject *)response);
    if (done != 0)
        return done < 0 ? -1 : 0;
    PyObject *encoded = encode(NULL, response), *none = NULL;
    if (encoded != NULL && incoming)
        none = reply((Incoming *)request, encoded, OK);
    else if (encoded != NULL)
        none = PyObject_CallMethodOneArg(request, name_reply, encoded);
    Py_XDECREF(encoded);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

/* Replies with the exception that is set, unless it ends the worker: 0, or -1 with an exception. */
static int
reply_with_error(PyObject *request, PyObject *cells, Py_ssize_t row)
{
    PyObject *type, *error, *traceback, *encoded, *none = NULL;
    Py_ssize_t count;
    if (PyErr_ExceptionMatches(PyExc_SystemExit) || PyErr_ExceptionMatches(PyExc_KeyboardInterrupt))
        return -1;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    char *address = address_of(cells, &count);
    if (address != NULL && (row < 0 || row + FAILED >= count / 8))
        PyErr_SetString(PyExc_IndexError, "no such cell");
    else if (address != NULL)
        ((uint64_t *)address)[row + FAILED] += 1;
    encoded = PyErr_Occurred() ? NULL : call_python(CODEC, "encode_error", "(O)", error);
    if (encoded != NULL)
        none = PyObject_CallMethod(request, "reply", "Oi", encoded, ERROR);
    Py_XDECREF(encoded);
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(traceback);
    Py_XDECREF(none);
    return none == NULL ? -1 : 0;
}

static PyObject *
reply_all(PyObject *module, PyObject *args)
{
    PyObject *batch, *responses, *cells;
    Py_ssize_t row;
    if (!PyArg_ParseTuple(args, "O!OOn", &PyList_Type, &batch, &responses, &cells, &row))
        return NULL;
    PyObject *items = PySequence_Fast(responses, "responses are a sequence");
    int failed = items == NULL;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(batch) && i < PySequence_Fast_GET_SIZE(items); i++) {
        PyObject *request = Py_NewRef(PyList_GET_ITEM(batch, i)), *response = Py_NewRef(PySequence_Fast_GET_ITEM(items, i));
        failed = reply_with(request, response) < 0 && reply_with_error(request, cells, row) < 0;
        Py_DECREF(request);
        Py_DECREF(response);
    }
    Py_XDECREF(items);
    if (failed)
        return NULL;
    Py_RETURN_NONE;
}

/* --- the board: see counting.py ------------------------------------------------------------------------------------ */

static PyObject *
bucket(PyObject *module, PyObject *nanoseconds)
{
    long long ns = PyLong_AsLongLong(nanoseconds);
    if (ns == -1 && PyErr_Occurred())
        return NULL;
    return PyLong_FromLong(bucket_of(ns));
}

static PyObject *
add(PyObject *module, PyObject *const *args, Py_ssize_t count)
{
    Py_ssize_t size;
    char *address = count > 0 ? address_of(args[0], &size) : NULL;
    if (address == NULL)
        return NULL;
    for (Py_ssize_t i = 1; i + 1 < count; i += 2) {
        Py_ssize_t index = PyLong_AsSsize_t(args[i]), number = PyLong_AsSsize_t(args[i + 1]);
        if (PyErr_Occurred())
            return NULL;
        if (index < 0 || index >= size / 8) {
            PyErr_SetString(PyExc_IndexError, "no such cell");
            return NULL;
        }
        ((uint64_t *)address)[index] += number;
    }
    Py_RETURN_NONE;
}

/* count_batch(cells, row, batch, nanoseconds): see running.py */
static PyObject *
count_batch(PyObject *module, PyObject *args)
{
    PyObject *memory, *batch;
    Py_ssize_t row, count, answers = 0, size = 0;
    long long nanoseconds;
    if (!PyArg_ParseTuple(args, "OnO!L", &memory, &row, &PyList_Type, &batch, &nanoseconds))
        return NULL;
    uint64_t *cells = (uint64_t *)address_of(memory, &count);
    if (cells == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(batch); i++) {
        PyObject *request = PyList_GET_ITEM(batch, i);
        int incoming = Py_IS_TYPE(request, &Incoming_type);
        answers += incoming ? 1 : number_of(request, name_answers);
        size += incoming ? ((Incoming *)request)->size : number_of(request, name_size);
        if (PyErr_Occurred())
            return NULL;
    }
    if (row < 0 || row + RUNNING + BUCKETS > count / 8) {
        PyErr_SetString(PyExc_IndexError, "no such cell");
        return NULL;
    }
    cells[row + BATCHES] += 1;
    cells[row + REQUESTS] += answers;
    cells[row + SIZE] += size;
    cells[row + RUNNING + bucket_of(nanoseconds)] += PyList_GET_SIZE(batch);
    Py_RETURN_NONE;
}

/* --- small arrays: see tensors.py ---------------------------------------------------------------------------------- */

static PyObject *
item_at(PyObject *requests, Py_ssize_t i, Py_ssize_t column)
{
    return PyTuple_GET_ITEM(PyList_GET_ITEM(requests, i), column);
}

static int
alike(PyArrayObject *first, PyObject *other)
{
    PyArrayObject *array = (PyArrayObject *)other;
    return PyArray_CheckExact(other) && PyArray_DESCR(array) == PyArray_DESCR(first) &&
           PyArray_NDIM(array) == PyArray_NDIM(first) && PyArray_IS_C_CONTIGUOUS(array) &&
           !memcmp(PyArray_DIMS(array) + 1, PyArray_DIMS(first) + 1, (PyArray_NDIM(first) - 1) * sizeof(npy_intp));
}

/* An array for a batch: small ones are numpy's own, the memory of large ones is used again (buffers.array). */
static PyObject *
array_for(PyArray_Descr *descr, int nd, npy_intp *dims, npy_intp size)
{
    if (size < WORTH_POOLING)
        return PyArray_NewFromDescr(&PyArray_Type, (PyArray_Descr *)Py_NewRef(descr), nd, dims, NULL, NULL, 0, NULL);
    PyObject *shape = PyArray_IntTupleFromIntp(nd, dims);
    PyObject *array = NULL;
    if (shape != NULL)
        array = call_python("batch_inference.buffers", "array", "(NOn)", shape, descr, (Py_ssize_t)size);
    if (array != NULL && !(PyArray_CheckExact(array) && PyArray_NBYTES((PyArrayObject *)array) == size)) {
        PyErr_SetString(PyExc_TypeError, "buffers.array gave no array of that size");
        Py_CLEAR(array);
    }
    return array;
}

/* The arrays in one column of a list of tuples, one below the other; NULL with an exception, or without if it takes more than
   copying bytes. */
static PyObject *
join(PyObject *requests, Py_ssize_t column)
{
    Py_ssize_t count = PyList_GET_SIZE(requests);
    PyArrayObject *first = (PyArrayObject *)item_at(requests, 0, column);
    if (!PyArray_CheckExact((PyObject *)first) || PyArray_NDIM(first) < 1 ||
        PyArray_NDIM(first) > MAX_DIMS || PyDataType_REFCHK(PyArray_DESCR(first)))
        return NULL;
    npy_intp dims[MAX_DIMS], size = 0;
    memcpy(dims, PyArray_DIMS(first), PyArray_NDIM(first) * sizeof(npy_intp));
    dims[0] = 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *array = item_at(requests, i, column);
        if (!alike(first, array))
            return NULL;
        dims[0] += PyArray_DIM((PyArrayObject *)array, 0);
        size += PyArray_NBYTES((PyArrayObject *)array);
    }
    PyObject *joined = array_for(PyArray_DESCR(first), PyArray_NDIM(first), dims, size);
    char *to = joined == NULL ? NULL : PyArray_BYTES((PyArrayObject *)joined);
    for (Py_ssize_t i = 0; joined != NULL && i < count; i++) {
        PyArrayObject *array = (PyArrayObject *)item_at(requests, i, column);
        copy(to, PyArray_BYTES(array), PyArray_NBYTES(array));
        to += PyArray_NBYTES(array);
    }
    return joined;
}

static PyObject *
joined_columns(PyObject *module, PyObject *requests)
{
    Py_ssize_t count = PyList_CheckExact(requests) ? PyList_GET_SIZE(requests) : 0, rows = 0, width = -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *request = PyList_GET_ITEM(requests, i);
        if (!PyTuple_CheckExact(request) || (width >= 0 && PyTuple_GET_SIZE(request) != width))
            Py_RETURN_NONE;
        width = PyTuple_GET_SIZE(request);
    }
    if (width <= 0)
        Py_RETURN_NONE;
    PyObject *columns = PyTuple_New(width), *counts = PyList_New(count);
    for (Py_ssize_t column = 0; columns != NULL && counts != NULL && column < width; column++) {
        PyObject *joined = join(requests, column);
        if (joined == NULL)
            goto failed;
        PyTuple_SET_ITEM(columns, column, joined);
    }
    for (Py_ssize_t i = 0; columns != NULL && counts != NULL && i < count; i++) {
        npy_intp length = PyArray_DIM((PyArrayObject *)item_at(requests, i, 0), 0);
        PyObject *number = PyLong_FromSsize_t(length);
        if (number == NULL)
            goto failed;
        PyList_SET_ITEM(counts, i, number);
        rows += length;
    }
    if (columns != NULL && counts != NULL)
        return Py_BuildValue("NNn", columns, counts, rows);
failed:
    Py_XDECREF(columns);
    Py_XDECREF(counts);
    if (PyErr_Occurred())
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
parts(PyObject *module, PyObject *args)
{
    PyObject *value, *counts, *list;
    Py_ssize_t rows, start = 0;
    if (!PyArg_ParseTuple(args, "OO!n", &value, &PyList_Type, &counts, &rows))
        return NULL;
    PyArrayObject *array = (PyArrayObject *)value;
    if (!PyArray_CheckExact(value) || PyArray_NDIM(array) < 1 || PyArray_DIM(array, 0) != rows)
        Py_RETURN_NONE;
    npy_intp dims[NPY_MAXDIMS], stride = PyArray_STRIDE(array, 0);
    memcpy(dims, PyArray_DIMS(array), PyArray_NDIM(array) * sizeof(npy_intp));
    if ((list = PyList_New(PyList_GET_SIZE(counts))) == NULL)
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(counts); i++) {
        Py_ssize_t count = PyLong_AsSsize_t(PyList_GET_ITEM(counts, i));
        if (count < 0 || count > rows - start) {
            Py_DECREF(list);
            if (PyErr_Occurred())
                return NULL;
            Py_RETURN_NONE;
        }
        dims[0] = count;
        PyObject *part = PyArray_NewFromDescr(
            &PyArray_Type, (PyArray_Descr *)Py_NewRef(PyArray_DESCR(array)), PyArray_NDIM(array), dims,
            PyArray_STRIDES(array), PyArray_BYTES(array) + start * stride, PyArray_FLAGS(array) & NPY_ARRAY_WRITEABLE, NULL);
        if (part == NULL || PyArray_SetBaseObject((PyArrayObject *)part, Py_NewRef(value)) < 0) {
            Py_XDECREF(part);
            Py_DECREF(list);
            return NULL;
        }
        PyList_SET_ITEM(list, i, part);
        start += count;
    }
    return list;
}

/* --- module -------------------------------------------------------------------------------------------------------- */

static PyObject *
decode(PyObject *module, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"memory", "offset", "length", "lend", NULL};
    PyObject *memory;
    Py_ssize_t offset, length, size;
    int lend = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "Onn|$p", names, &memory, &offset, &length, &lend))
        return NULL;
    char *address = address_of(memory, &size);
    if (address == NULL)
        return NULL;
    if (offset < 0 || length < 0 || length > size - offset)
        return fault("an encoded value reaches beyond its memory: the slot was overwritten");
    return decode_at(address + offset, memory, offset, length, lend);
}

static PyObject *
awaken(PyObject *module, PyObject *nanoseconds)
{
    long long ns = PyLong_AsLongLong(nanoseconds);
    if (ns == -1 && PyErr_Occurred())
        return NULL;
    keep_awake(ns);
    Py_RETURN_NONE;
}

static PyMethodDef functions[] = {
    {"keep_awake", awaken, METH_O, NULL},
    {"encode", encode, METH_O, NULL},
    {"encode_request", encode_request, METH_O, NULL},
    {"decode", (PyCFunction)(void (*)(void))decode, METH_VARARGS | METH_KEYWORDS, NULL},
    {"open_requests", open_requests, METH_VARARGS, NULL},
    {"sort_known", sort_known, METH_VARARGS, NULL},
    {"take_answered", take_answered, METH_VARARGS, NULL},
    {"cut", cut, METH_VARARGS, NULL},
    {"summed", summed, METH_VARARGS, NULL},
    {"arrivals", arrivals, METH_O, NULL},
    {"args_of", args_of, METH_O, NULL},
    {"reply_all", reply_all, METH_VARARGS, NULL},
    {"bucket", bucket, METH_O, NULL},
    {"add", (PyCFunction)(void (*)(void))add, METH_FASTCALL, NULL},
    {"count_batch", count_batch, METH_VARARGS, NULL},
    {"joined_columns", joined_columns, METH_O, NULL},
    {"parts", parts, METH_VARARGS, NULL},
    {"read_or_hear", read_or_hear, METH_VARARGS, NULL},
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_speedups",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC
PyInit__speedups(void)
{
    import_array();
    struct { PyObject **name; const char *is; } names[] = {
        {&name_answers, "answers"}, {&name_append, "append"}, {&name_args, "args"}, {&name_arrived, "arrived"},
        {&name_cells, "cells"}, {&name_channels, "channels"}, {&name_claim, "claim"}, {&name_deadline, "deadline"},
        {&name_drop, "drop"}, {&name_eventfd, "eventfd"},
        {&name_gone, "gone"}, {&name_index, "index"}, {&name_keys, "keys"}, {&name_memory, "memory"},
        {&name_number, "number"}, {&name_popleft, "popleft"}, {&name_posted, "posted"}, {&name_reply, "reply"},
        {&name_row, "row"}, {&name_runs, "runs"}, {&name_segments, "segments"}, {&name_size, "size"},
        {&name_tell, "tell"},
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        if ((*names[i].name = PyUnicode_InternFromString(names[i].is)) == NULL)
            return NULL;
    }
    PyObject *errors = PyImport_ImportModule("batch_inference.errors");
    if (errors == NULL || (transport_error = PyObject_GetAttrString(errors, "TransportError")) == NULL)
        return NULL;
    PyObject *collections = PyImport_ImportModule("collections");
    if (collections == NULL || (deque = PyObject_GetAttrString(collections, "deque")) == NULL)
        return NULL;
    Py_DECREF(errors);
    Py_DECREF(collections);
    if (PyType_Ready(&Large_type) < 0 || PyType_Ready(&Slot_type) < 0 || PyType_Ready(&Incoming_type) < 0 ||
        PyType_Ready(&Ledger_type) < 0 || PyType_Ready(&Gate_type) < 0 || prepare_awaited() < 0)
        return NULL;
    if (prepare_to_keep_awake() != 0)
        return PyErr_NoMemory();
    PyObject *one = PyLong_FromLong(1);
    if (one == NULL || PyDict_SetItemString(Incoming_type.tp_dict, "answers", one) < 0)
        return NULL;
    Py_DECREF(one);
    PyObject *module = PyModule_Create(&definition);
    if (module == NULL)
        return NULL;
    if (PyModule_AddObjectRef(module, "Slot", (PyObject *)&Slot_type) < 0 ||
        PyModule_AddObjectRef(module, "Incoming", (PyObject *)&Incoming_type) < 0 ||
        PyModule_AddObjectRef(module, "Ledger", (PyObject *)&Ledger_type) < 0 ||
        PyModule_AddObjectRef(module, "Gate", (PyObject *)&Gate_type) < 0 ||
        PyModule_AddObjectRef(module, "Awaited", (PyObject *)&Awaited_type) < 0)
        return NULL;
    return module;
}
