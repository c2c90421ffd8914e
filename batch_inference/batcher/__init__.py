"""How requests become one model call and back. docs/batchers.md says which batcher to use."""

from .batcher import Batcher, model_arguments
from .bucket_seq_batcher import BucketSeqBatcher
from .concat_batcher import ConcatBatcher
from .list_batcher import ListBatcher
from .multi_batcher import MultiBatcher
from .seq_batcher import SeqBatcher

__all__ = [
    "Batcher",
    "BucketSeqBatcher",
    "ConcatBatcher",
    "ListBatcher",
    "MultiBatcher",
    "SeqBatcher",
    "model_arguments",
]
