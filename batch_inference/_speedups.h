/* See _speedups.c. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>

PyObject *call_python(const char *module, const char *function, const char *format, ...);
