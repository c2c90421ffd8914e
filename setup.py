"""The extension, which needs numpy's headers; all else is in pyproject.toml.

It is optional: without a C compiler, or with BATCH_INFERENCE_NO_EXTENSIONS=1, the library is installed without it. It
relies on the global interpreter lock, so there is none for an interpreter that has no such lock.
"""

import os
import sysconfig

import numpy
from setuptools import Extension, setup

speedups = Extension(
    "batch_inference._speedups",
    sources=["batch_inference/_speedups.c", "batch_inference/_awaited.c", "batch_inference/_awake.c"],
    depends=["batch_inference/_speedups.h", "batch_inference/_awaited.h", "batch_inference/_awake.h"],
    include_dirs=[numpy.get_include()],
    optional=True,
)
without = os.environ.get("BATCH_INFERENCE_NO_EXTENSIONS") or sysconfig.get_config_var("Py_GIL_DISABLED")
setup(ext_modules=[] if without else [speedups])
