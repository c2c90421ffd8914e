/* See _awaited.c. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

typedef struct {
    PyObject_HEAD
    PyObject *slot, *loop, *wake, *context, *reply, *error, *message;   /* message: of the CancelledError, or NULL */
    char blocking, settled, cancelled;
} Awaited;

extern PyTypeObject Awaited_type;

int prepare_awaited(void);
int Awaited_finish(Awaited *self, PyObject *reply, PyObject *error);    /* set_result, set_exception */
