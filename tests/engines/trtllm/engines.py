"""Built engines of the stand-in, made as a user makes them: checkpoint files, then tools/build_trtllm_engine.py."""

import os
import runpy

from tests.checkpoint.formats.trtllm_cases import written
from tests.source import ROOT

LIMITS = {
    "kv_cache_type": "continuous",
    "max_batch_size": 64,
    "max_input_len": 16,
    "max_seq_len": 32,
    "max_num_tokens": 8192,
}
MPI_VARIABLES = ("OMPI_", "PMI_", "PMIX_", "MV2_")


def build_engines(folder, arch, mapping, dtype="float32", hf=None, **limits):
    """The folder of the engines of a checkpoint of random weights, or of `hf`."""
    assert not [name for name in os.environ if name.startswith(MPI_VARIABLES)]
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = written(folder / "checkpoint", arch, mapping, dtype, hf)
    flags = [word for name, value in (LIMITS | limits).items() for word in (f"--{name}", str(value))]
    main = runpy.run_path(str(ROOT / "tools" / "build_trtllm_engine.py"))["main"]
    assert main(["--checkpoint_dir", str(checkpoint), "--output_dir", str(folder / "engines"), *flags]) == 0
    return folder / "engines"
