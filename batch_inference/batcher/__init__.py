"""How requests become one model call and back. docs/batchers.md says which batcher to use."""

from .batcher import Batcher
from .concat_batcher import ConcatBatcher
from .list_batcher import ListBatcher

__all__ = ["Batcher", "ConcatBatcher", "ListBatcher"]
