"""The model of this tutorial, a decoder that continues a text, and what its callers send.

`CompletionModel` runs in the worker process. The callers tokenise and send numpy arrays; they do not need torch.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

import numpy as np

from batch_inference import ModelHost, batching
from batch_inference.batcher import SeqBatcher
from tutorials.common import load_tokenizer


@dataclass(frozen=True)
class Wish:
    """How one caller wants its prompt to be continued. ValueError for what cannot be."""

    max_new_tokens: int = 32
    temperature: float = 0.0  # 0: the most likely token each time
    stop: int = -1  # the token that ends the answer; -1: none does
    seed: int = 0  # the same seed samples the same tokens

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be a number of at least 0, got {self.temperature}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")


class Tokenizer:
    """Text to tokens and back, in the caller's process."""

    def __init__(self, source: str) -> None:
        self._tokenizer = load_tokenizer(source)

    def __call__(self, text: str) -> np.ndarray:
        """[tokens]; ValueError for a text without any."""
        ids = np.array(self._tokenizer.encode(text).ids, "i8")
        if not len(ids):
            raise ValueError("an empty prompt cannot be continued")
        return ids

    def text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens))  # without special tokens

    def token(self, text: str) -> int:
        """The token that `text` is; ValueError if it takes several."""
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1:
            raise ValueError(f"{text!r} is {len(ids)} tokens, not one")
        return int(ids[0])


def complete(host: ModelHost, prompt: np.ndarray, wish: Wish) -> list[int]:
    """The tokens that continue the tokens `prompt`: one request of one row. Called from any number of threads."""
    return list(host.predict(prompt[None], *astuple(wish))[0])


# The prompts are padded on the left, so that each row's next token follows its last; the numbers of a Wish become
# one-dimensional arrays with an entry for each row. Token 0 stands for padding: the mask says that it means nothing.
BATCHER = SeqBatcher(padding_tokens=[0, None, None, None, None], padding_side="left", mask=True)


@batching(batcher=BATCHER, max_batch_size=32)
class CompletionModel:
    def __init__(self, source: str) -> None:  # runs in the worker process
        import torch
        import transformers

        transformers.utils.logging.disable_progress_bar()
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        # float32: in bfloat16 the last digits are so coarse that they often decide between two likely tokens.
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self.model = model.eval().to(self.device)

    def predict_batch(
        self, ids: Any, max_new_tokens: Any, temperature: Any, stop: Any, seed: Any, mask: Any
    ) -> list[list[int]]:
        """`ids` and `mask`: [batch, tokens]; the others, the fields of a Wish: [batch]. A list of tokens for each."""
        import torch

        from tutorials.gpt_completion import generation

        def on_device(array: np.ndarray) -> Any:
            return torch.from_numpy(array).to(self.device)

        chances = on_device(generation.dice(seed, int(max_new_tokens.max())))
        settings = generation.Settings(on_device(max_new_tokens), on_device(temperature), on_device(stop), chances)
        return generation.generate(self.model, *on_device(np.stack([ids, mask])), settings)
