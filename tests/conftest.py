"""Makes `tests` importable, here and in worker processes, whichever way pytest was started."""

import signal
import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)

# What a script starts with `&` ignores Ctrl-C, and so would the applications that tests start to send them one.
signal.signal(signal.SIGINT, signal.default_int_handler)
