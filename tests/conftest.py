"""Makes `tests` importable, here and in worker processes, whichever way pytest was started."""

import sys
from pathlib import Path

ROOT = str(Path(__file__).parents[1])
if ROOT not in sys.path:
    sys.path.insert(0, ROOT)
