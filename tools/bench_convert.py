"""Benchmarks checkpoint conversion: speed and memory, compared with `cp` of the same bytes in one run.

    python tools/bench_convert.py --size-gb 2
    python tools/bench_convert.py --size-gb 2 --moe --folder /scratch

Creates a random checkpoint in several shards and converts it, Hugging Face -> Megatron -> TensorRT-LLM, each conversion
in its own process and --repeats times; before each one it copies the source with cp. Medians are compared. The source
is in the page cache for both. Prints one JSON line per conversion:

    ratio            bytes written per second over cp's, where cp's copy is synced to the disk, like the conversion's
    ratio_cpu        the same per second of CPU time, which is less sensitive to other load
    ratio_plain_cp   the same for cp alone, which leaves its bytes in the page cache
    peak_rss_frac    peak resident memory of the converting process, its interpreter included, over the checkpoint
    peak_own_frac    the same without mapped files and without the memory of the process before the conversion

and one for mbridge's conversion of the same model into a live Megatron model, if it is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mrl.checkpoint.formats.base import OutFile, Target
from mrl.checkpoint.formats.detect import open_source
from mrl.checkpoint.formats.hf import HfTarget
from mrl.checkpoint.formats.megatron import MegatronTarget
from mrl.checkpoint.formats.trtllm import TrtllmTarget
from mrl.checkpoint.io.hashed_writer import xxh3_file
from mrl.commands.convert.convert import convert, plan_conversion
from mrl.models.base import ArchSpec
from mrl.models.presets import arch_from_preset
from mrl.parallel_layout import ParallelLayout
from mrl.resharding.trtllm import TrtllmMapping

_SHAPE = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "tie_word_embeddings": True,
}
_EXPERTS = {"num_experts": 16, "moe_intermediate_size": 512}
_SAMPLE_S = 0.002


def model(size_gb: float, moe: bool) -> ArchSpec:
    """Returns a model of about that many bytes in bfloat16, with an even number of layers."""
    preset, shape = ("qwen3_moe_tiny", {**_SHAPE, **_EXPERTS}) if moe else ("qwen3_tiny", _SHAPE)
    sizes = []
    for layers in (2, 4):
        target = HfTarget(arch_from_preset(preset, {**shape, "num_hidden_layers": layers}, None), "bfloat16")
        sizes.append(sum(2 * torch.Size(stored.shape).numel() for stored in target.layout.values()))
    pairs = max(1, round((size_gb * 1e9 - sizes[0]) / (sizes[1] - sizes[0])) + 1)
    return arch_from_preset(preset, {**shape, "num_hidden_layers": 2 * pairs}, None)


def write_random(folder: Path, arch: ArchSpec, max_file_bytes: int) -> int:
    """Writes a Hugging Face folder with random weights; returns the bytes of its shards."""
    folder.mkdir()
    target = HfTarget(arch, "bfloat16", max_file_bytes=max_file_bytes)

    def tensors(file: OutFile) -> Iterator[tuple[str, Tensor]]:
        for name, stored in file.layout.items():
            yield name, torch.randn(stored.shape, dtype=torch.float32).to(torch.bfloat16)

    records = {file.name: target.write(folder / file.name, file, tensors(file)) for file in target.files}
    target.finish(folder, records)
    return sum(int(record["num_bytes"]) for record in records.values())


def make_target(kind: str, arch: ArchSpec, moe: bool) -> Target:
    """Returns the measured layout of a format."""
    if kind == "megatron":
        return MegatronTarget(
            arch, ParallelLayout(4, tp=2, pp=2, ep=2 if moe else 1, etp=1 if moe else None), "bfloat16"
        )
    return TrtllmTarget(arch, TrtllmMapping(4, 1, moe_ep_size=2 if moe else 0), "bfloat16")


class Memory:
    """Context manager that samples this process's memory.

    Attributes:
        peak: Peak resident bytes, and peak without mapped files.
    """

    def __enter__(self) -> Memory:
        self.peak = (0, 0)
        self._running = True
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._running = False
        self._thread.join()

    @staticmethod
    def now() -> tuple[int, int]:
        """Returns the resident bytes, and those without mapped files."""
        resident, shared = (int(word) for word in Path("/proc/self/statm").read_text().split()[1:3])
        page = os.sysconf("SC_PAGE_SIZE")
        return resident * page, (resident - shared) * page

    def _watch(self) -> None:
        while self._running:
            now = self.now()
            self.peak = (max(self.peak[0], now[0]), max(self.peak[1], now[1]))
            time.sleep(_SAMPLE_S)


def run_stage(args: argparse.Namespace) -> dict[str, Any]:
    """Runs one conversion in this process and returns its time and memory."""
    torch.set_num_threads(1)
    before = Memory.now()[1]
    start, cpu = time.perf_counter(), time.process_time()
    with Memory() as memory, closing(open_source(args.source)) as source:
        target = make_target(args.stage, source.arch, args.moe)
        plan = plan_conversion(source, target)
        convert(source, target, args.target, plan=plan, num_workers=args.num_workers)
    return {
        "s": time.perf_counter() - start,
        "cpu_s": time.process_time() - cpu,
        "target_bytes": plan.num_bytes,
        "peak_rss": memory.peak[0],
        "peak_own": memory.peak[1] - before,
    }


def copy(files: Iterable[Path], folder: Path) -> dict[str, float]:
    """Copies files with cp and returns the seconds without and with fsync, and the CPU seconds with it."""
    folder.mkdir()
    start, cpu = time.perf_counter(), _cpu_s()
    subprocess.run(["cp", *map(str, files), str(folder)], check=True)
    plain = time.perf_counter() - start
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    found = {"cp_s": plain, "cp_synced_s": time.perf_counter() - start, "cp_cpu_s": _cpu_s() - cpu}
    shutil.rmtree(folder)
    return found


def _cpu_s() -> float:
    """Returns the CPU seconds of this process and of its children that have ended."""
    return sum(os.times()[:4])


def measure(args: argparse.Namespace, stage: str, source: Path, target: Path, own: list[str]) -> dict[str, Any]:
    """Returns the medians over the repeats; keeps the last target."""
    found: list[dict[str, Any]] = []
    with closing(open_source(source)) as opened:
        files = [opened.folder / name for name in opened.files]
    for _ in range(args.repeats):
        shutil.rmtree(target, ignore_errors=True)
        for path in files:
            xxh3_file(path)  # it may have been written past the page cache
        copied = copy(files, target.with_name("copy"))
        command = [sys.executable, __file__, "--stage", stage, "--source", str(source), "--target", str(target), *own]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        found.append({**json.loads(done.stdout), **copied})
    middle = {key: statistics.median(item[key] for item in found) for key in found[0]}
    size = sum(path.stat().st_size for path in files)
    return {
        "conversion": f"{source.name} -> {target.name}",
        "source_bytes": size,
        "target_bytes": int(middle["target_bytes"]),
        "s": round(middle["s"], 3),
        "gb_per_s": round(middle["target_bytes"] / middle["s"] / 1e9, 3),
        "cp_s": round(middle["cp_s"], 3),
        "cp_synced_s": round(middle["cp_synced_s"], 3),
        "ratio": round(middle["target_bytes"] / middle["s"] / (size / middle["cp_synced_s"]), 3),
        "ratio_plain_cp": round(middle["target_bytes"] / middle["s"] / (size / middle["cp_s"]), 3),
        "ratio_cpu": round(middle["target_bytes"] / middle["cpu_s"] / (size / middle["cp_cpu_s"]), 3),
        "peak_rss_frac": round(middle["peak_rss"] / size, 3),
        "peak_own_frac": round(middle["peak_own"] / size, 3),
        "num_workers": args.num_workers,
        "repeats": args.repeats,
    }


def mbridge(folder: Path) -> dict[str, Any]:
    """Returns the time and memory of mbridge loading the folder into a Megatron model and exporting it."""
    if importlib.util.find_spec("mbridge") is None:
        return {"conversion": "mbridge", "skipped": "mbridge is not installed: pip install -e '.[bench]'"}
    script = f"""
import json, os, resource, time
os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
import torch
torch.distributed.init_process_group("gloo")
from megatron.core import parallel_state
parallel_state.initialize_model_parallel()
from mbridge import AutoBridge
start = time.perf_counter()
bridge = AutoBridge.from_pretrained({str(folder)!r})
model = bridge.get_model()
bridge.load_weights(model, {str(folder)!r})
bridge.save_weights(model, {str(folder.with_name("mbridge"))!r})
rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({{"s": time.perf_counter() - start, "peak_rss": rss}}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1:] or ["no message"]
        return {"conversion": "mbridge", "skipped": f"it failed: {reason[0]}"}
    found = json.loads(done.stdout.splitlines()[-1])
    return {"conversion": "mbridge", "s": round(found["s"], 3), "peak_rss_bytes": found["peak_rss"]}


def main() -> None:
    """Runs all conversions, or one stage in a subprocess."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-gb", type=float, default=2.0, help="size of the random checkpoint, GB")
    parser.add_argument("--moe", action="store_true", help="an MoE model instead of a dense one")
    parser.add_argument("--folder", help="working directory; a temporary folder in it is removed at the end")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--num-workers", type=int, default=1)
    for name in ("--stage", "--source", "--target"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.stage:
        print(json.dumps(run_stage(args)))
        return
    own = [*(["--moe"] if args.moe else []), "--num-workers", str(args.num_workers)]
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        arch = model(args.size_gb, args.moe)
        size = write_random(folder / "huggingface", arch, max(1, int(args.size_gb * 1e9 / 4)))
        print(json.dumps({"checkpoint_bytes": size, "num_layers": arch.num_layers, "cpu": platform.processor()}))
        for stage, source in (("megatron", "huggingface"), ("trtllm", "megatron")):
            print(json.dumps(measure(args, stage, folder / source, folder / stage, own)), flush=True)
        print(json.dumps(mbridge(folder / "huggingface")))


if __name__ == "__main__":
    main()
