"""The tests import the batchers as a script in this folder would."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
