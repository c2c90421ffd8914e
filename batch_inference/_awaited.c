/* What a task awaits: awaited.py, which says what each of these does, in C. */

#include "_awaited.h"
#include "_speedups.h"

#include <structmember.h>

static PyObject *call_soon, *keyword_context;   /* "call_soon", ("context",) */

static void
raise_error(PyObject *error)
{
    PyErr_SetObject((PyObject *)Py_TYPE(error), error);
}

/* Raises asyncio.NAME(message), or without a message. */
static void
raise_new(const char *name, PyObject *message)
{
    PyObject *error = call_python("asyncio", name, message == NULL ? "()" : "(O)", message);
    if (error != NULL)
        raise_error(error);
    Py_XDECREF(error);
}

/* The exception that is set, which is not any more. */
static PyObject *
caught(void)
{
    PyObject *type, *error, *traceback;
    PyErr_Fetch(&type, &error, &traceback);
    PyErr_NormalizeException(&type, &error, &traceback);
    if (traceback != NULL)
        PyException_SetTraceback(error, traceback);
    Py_XDECREF(type);
    Py_XDECREF(traceback);
    return error;
}

static PyObject *
Awaited_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"loop", "slot", NULL};
    PyObject *loop, *slot;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO", names, &loop, &slot))
        return NULL;
    Awaited *self = (Awaited *)type->tp_alloc(type, 0);
    if (self != NULL) {
        self->loop = Py_NewRef(loop);
        self->slot = Py_NewRef(slot);
    }
    return (PyObject *)self;
}

static int
Awaited_traverse(Awaited *self, visitproc visit, void *arg)
{
    Py_VISIT(self->slot);
    Py_VISIT(self->loop);
    Py_VISIT(self->wake);
    Py_VISIT(self->context);
    Py_VISIT(self->reply);
    Py_VISIT(self->error);
    Py_VISIT(self->message);
    return 0;
}

static int
Awaited_clear(Awaited *self)
{
    Py_CLEAR(self->slot);
    Py_CLEAR(self->loop);
    Py_CLEAR(self->wake);
    Py_CLEAR(self->context);
    Py_CLEAR(self->reply);
    Py_CLEAR(self->error);
    Py_CLEAR(self->message);
    return 0;
}

static void
Awaited_dealloc(Awaited *self)
{
    PyObject_GC_UnTrack(self);
    Awaited_clear(self);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* What goes on with the task, and its context, which are the caller's from here on; NULL if there is none. */
static PyObject *
take_wake(Awaited *self, PyObject **context)
{
    PyObject *wake = self->wake;
    *context = self->context;
    self->wake = self->context = NULL;
    return wake;
}

static int
resume_soon(Awaited *self)
{
    PyObject *context, *wake = take_wake(self, &context);
    if (wake == NULL)
        return 0;
    PyObject *loop = Py_NewRef(self->loop), *args[] = {loop, wake, (PyObject *)self, context};
    PyObject *handle = PyObject_VectorcallMethod(call_soon, args, 3, keyword_context);
    Py_DECREF(loop);
    Py_DECREF(wake);
    Py_DECREF(context);
    Py_XDECREF(handle);
    return handle == NULL ? -1 : 0;
}

/* Takes the references to the outcome: a reply, or an error. */
static void
settle(Awaited *self, PyObject *reply, PyObject *error)
{
    self->settled = 1;
    Py_XSETREF(self->reply, reply);
    Py_XSETREF(self->error, error);
}

int
Awaited_finish(Awaited *self, PyObject *reply, PyObject *error)
{
    settle(self, Py_XNewRef(reply), Py_XNewRef(error));
    return resume_soon(self);
}

static PyObject *
Awaited_settle(Awaited *self, PyObject *collect)
{
    PyObject *error = NULL, *reply = PyObject_CallOneArg(collect, self->slot);
    if (reply == NULL) {
        PyObject *raised = caught();
        error = call_python("batch_inference.awaited", "for_future", "(O)", raised);
        if (error == NULL)
            error = caught();
        Py_DECREF(raised);
    }
    if (self->settled) {
        Py_XDECREF(reply);
        Py_XDECREF(error);
    }
    else {
        settle(self, reply, error);
    }
    Py_RETURN_NONE;
}

static PyObject *
Awaited_resume(Awaited *self, PyObject *ignored)
{
    PyObject *context, *wake = take_wake(self, &context), *result = NULL;
    if (wake == NULL)
        Py_RETURN_NONE;
    if (PyContext_Enter(context) == 0) {
        result = PyObject_CallOneArg(wake, (PyObject *)self);
        PyObject *error = result == NULL ? caught() : NULL;
        if (PyContext_Exit(context) < 0)
            Py_CLEAR(result);
        if (error != NULL) {
            raise_error(error);
            Py_DECREF(error);
        }
    }
    Py_DECREF(wake);
    Py_DECREF(context);
    if (result == NULL)
        return NULL;
    Py_DECREF(result);
    Py_RETURN_NONE;
}

static PyObject *
Awaited_resume_soon(Awaited *self, PyObject *ignored)
{
    if (resume_soon(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
Awaited_set_result(Awaited *self, PyObject *reply)
{
    if (Awaited_finish(self, reply, NULL) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
Awaited_set_exception(Awaited *self, PyObject *error)
{
    if (!PyExceptionInstance_Check(error))
        return PyErr_Format(PyExc_TypeError, "that takes an exception, not a %s", Py_TYPE(error)->tp_name);
    if (Awaited_finish(self, NULL, error) < 0)
        return NULL;
    Py_RETURN_NONE;
}

/* --- what tasks use ------------------------------------------------------------------------------------------------ */

static PyObject *
Awaited_result(Awaited *self, PyObject *ignored)
{
    if (self->cancelled) {
        raise_new("CancelledError", self->message);     /* anew each time: one that we kept would keep its traceback */
    }
    else if (self->error != NULL) {
        raise_error(self->error);
    }
    else if (self->reply != NULL) {
        return Py_NewRef(self->reply);
    }
    else {
        PyObject *message = PyUnicode_FromString("the request has no outcome yet");
        if (message != NULL)
            raise_new("InvalidStateError", message);
        Py_XDECREF(message);
    }
    return NULL;
}

static PySendResult
Awaited_send(Awaited *self, PyObject *ignored, PyObject **result)
{
    if (!self->settled && self->wake != NULL) {
        PyErr_SetString(PyExc_RuntimeError, "one task awaits a request, and no more");
        *result = NULL;
        return PYGEN_ERROR;
    }
    if (!self->settled) {
        self->blocking = 1;
        *result = Py_NewRef(self);
        return PYGEN_NEXT;
    }
    *result = Awaited_result(self, NULL);
    return *result != NULL ? PYGEN_RETURN : PYGEN_ERROR;
}

static PyObject *
Awaited_next(Awaited *self)
{
    PyObject *result;
    PySendResult sent = Awaited_send(self, NULL, &result);
    if (sent == PYGEN_RETURN) {
        PyObject *stop = PyObject_CallOneArg(PyExc_StopIteration, result);
        Py_SETREF(result, NULL);
        if (stop != NULL)
            raise_error(stop);
        Py_XDECREF(stop);
    }
    return result;
}

static PyObject *
Awaited_add_done_callback(Awaited *self, PyObject *const *args, Py_ssize_t nargs, PyObject *keywords)
{
    Py_ssize_t named = keywords == NULL ? 0 : PyTuple_GET_SIZE(keywords);
    if (nargs != 1 || named > 1 ||
        (named == 1 && PyUnicode_CompareWithASCIIString(PyTuple_GET_ITEM(keywords, 0), "context") != 0)) {
        PyErr_SetString(PyExc_TypeError, "add_done_callback takes a function and, by name, a context");
        return NULL;
    }
    PyObject *given = named == 1 && args[1] != Py_None ? args[1] : NULL;
    PyObject *context = given == NULL ? PyContext_CopyCurrent() : Py_NewRef(given);
    if (context == NULL)
        return NULL;
    Py_XSETREF(self->wake, Py_NewRef(args[0]));
    Py_XSETREF(self->context, context);
    if (self->settled && resume_soon(self) < 0)
        return NULL;
    Py_RETURN_NONE;
}

static PyObject *
Awaited_get_loop(Awaited *self, PyObject *ignored)
{
    return Py_NewRef(self->loop);
}

static PyObject *
Awaited_done(Awaited *self, PyObject *ignored)
{
    return PyBool_FromLong(self->settled);
}

static PyObject *
Awaited_cancel(Awaited *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"msg", NULL};
    PyObject *message = Py_None;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|O", names, &message))
        return NULL;
    if (self->settled)
        Py_RETURN_FALSE;
    self->settled = self->cancelled = 1;
    Py_XSETREF(self->message, message == Py_None ? NULL : Py_NewRef(message));
    if (resume_soon(self) < 0)
        return NULL;
    Py_RETURN_TRUE;
}

static PyMemberDef Awaited_members[] = {
    {"slot", T_OBJECT_EX, offsetof(Awaited, slot), READONLY, NULL},
    {"_asyncio_future_blocking", T_BOOL, offsetof(Awaited, blocking), 0, NULL},
    {NULL},
};

static PyMethodDef Awaited_methods[] = {
    {"settle", (PyCFunction)Awaited_settle, METH_O, NULL},
    {"resume", (PyCFunction)Awaited_resume, METH_NOARGS, NULL},
    {"resume_soon", (PyCFunction)Awaited_resume_soon, METH_NOARGS, NULL},
    {"set_result", (PyCFunction)Awaited_set_result, METH_O, NULL},
    {"set_exception", (PyCFunction)Awaited_set_exception, METH_O, NULL},
    {"add_done_callback", (PyCFunction)(void (*)(void))Awaited_add_done_callback, METH_FASTCALL | METH_KEYWORDS, NULL},
    {"get_loop", (PyCFunction)Awaited_get_loop, METH_NOARGS, NULL},
    {"done", (PyCFunction)Awaited_done, METH_NOARGS, NULL},
    {"result", (PyCFunction)Awaited_result, METH_NOARGS, NULL},
    {"cancel", (PyCFunction)(void (*)(void))Awaited_cancel, METH_VARARGS | METH_KEYWORDS, NULL},
    {NULL},
};

static PyAsyncMethods Awaited_async = {.am_await = PyObject_SelfIter, .am_send = (sendfunc)Awaited_send};

PyTypeObject Awaited_type = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "batch_inference._speedups.Awaited",
    .tp_doc = "See awaited.py.",
    .tp_basicsize = sizeof(Awaited),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = Awaited_new,
    .tp_traverse = (traverseproc)Awaited_traverse,
    .tp_clear = (inquiry)Awaited_clear,
    .tp_dealloc = (destructor)Awaited_dealloc,
    .tp_as_async = &Awaited_async,
    .tp_iternext = (iternextfunc)Awaited_next,
    .tp_members = Awaited_members,
    .tp_methods = Awaited_methods,
};

int
prepare_awaited(void)
{
    call_soon = PyUnicode_InternFromString("call_soon");
    keyword_context = Py_BuildValue("(s)", "context");
    return call_soon == NULL || keyword_context == NULL ? -1 : PyType_Ready(&Awaited_type);
}
