"""Spark forks its Python workers from daemons, which import here, once, what each worker else imports for itself.

Python runs a module of this name at its start. The folder is on the path of Spark's processes alone.
"""

import sys
from importlib import import_module

if "pyspark.daemon" in sys.orig_argv:
    for name in ("pandas", "pyarrow.compute", "pyspark.worker", "outbox_spark"):
        import_module(name)
