"""Checks of a GPU that run mrl's own commands: device, attention, checkpoint and resume, quickstart, benchmarks."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from bench.measure import device_name, matrix_rate, memory_bandwidth, seconds

from acceptance.gpu_table import CHECKS
from acceptance.result import CheckError, Facts, NotHereError, Spec
from acceptance.sessions import last_words
from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.config.config import load
from mrl.distributed import launch
from mrl.engines.native.attention import DecodeAttention
from mrl.engines.native.kv_cache import KVCache
from mrl.errors import first_line
from mrl.models import transformer_engine
from mrl.models.kernels.sdpa import attend
from mrl.observability.hardware import HARDWARE

REACHED = 0.4
"""Fraction of the vendor's figures that a copy and a GEMM must reach; healthy GPUs reach 0.6 to 0.9."""

RERUN = 1e-3
"""Largest relative difference of a metric between two runs on a GPU, whose kernels sum in varying order; 0 on a CPU."""

LEARNED = 0.8
"""Minimum held-out accuracy; README reports 0.94 to 0.98."""

HOPPER, BLACKWELL = (9, 0), (10, 0)
"""Compute capability of the first GPUs with TransformerEngine's blockwise recipe, and of those with mxfp8."""

FP8_APART = 0.5
"""Largest KL divergence of actor and engine, k3 estimate. On a CPU the check's random model, which amplifies rounding,
has 0.27 at most, with an unquantized actor too; a trained model has 0.001 (`bench_fp8_training`)."""

SLOWEST_ROLLOUT = 0.9
"""Minimum speed relative to transformers."""

SLOWEST_REFIT = 0.1
"""Minimum speed of a weight sync relative to a copy; 0.18 to 0.47 on CPUs."""


ATTENTION_LENGTH, ATTENTION_HEADS = {"cpu": 64, "cuda": 4096}, 16
NEW_SHAPES, NEW_SHAPE_S = 3, 0.25
"""Number of new shapes, and allowed extra seconds of a new one; a cuDNN plan takes about 0.5 s per direction."""


class Commands:
    """Fixture of checks that run commands.

    Attributes:
        config: Config of the session.
        words: Arguments of `mrl train`, without `run.output_dir`: config file and overrides.
        folder: Output folder.
        tools: Folder of the repository's tools.
        num_ranks: Number of ranks of the check.
        device: "cuda" or "cpu".
    """

    def __init__(self, spec: Spec) -> None:
        """Reads the session's config."""
        self.config = load(spec.config, spec.overrides)
        self.words = (spec.config, *(word for word in spec.overrides if not word.startswith("run.output_dir=")))
        self.folder, self.tools = Path(spec.folder), Path(spec.tools)
        self.num_ranks = CHECKS[spec.checks[0]].num_ranks
        self.device = launch.choose_device(self.config.run.device)

    def run(self, name: str, *words: str) -> list[str]:
        """Runs Python with these arguments; returns the lines of its output, which also go to `folder`/`name`.log.

        Raises:
            CheckError: The command failed.
        """
        log = self.folder / f"{name}.log"
        with log.open("a", encoding="utf-8") as output:
            done = subprocess.run([sys.executable, *words], stdout=output, stderr=subprocess.STDOUT, check=False)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        if done.returncode != 0:
            raise CheckError(f"{name} ended with status {done.returncode}: {last_words(log)} (full output in {log})")
        return lines

    def train(self, run: RunDir, *words: str) -> dict[str, float]:
        """Runs `mrl train` in a run folder; returns the last value of each metric.

        Raises:
            CheckError: The command failed.
        """
        self.run(run.root.name, "-m", "mrl", "train", *words, f"run.output_dir={run.root}", "observe.console=plain")
        return last_metrics(run.metrics)

    def bench(self, tool: str, *words: str) -> Facts:
        """Runs a benchmark on the check's number of ranks; returns its JSON result."""
        ranks = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(self.num_ranks)]
        launcher = ranks if tool == "bench_refit" else []
        name = f"{tool}-{self.num_ranks}"
        lines = self.run(name, *launcher, str(self.tools / f"{tool}.py"), "--device", self.device, *words)
        found: Facts = json.loads([line for line in lines if line.startswith("{")][-1])
        return found


def last_metrics(file: Path) -> dict[str, float]:
    """Returns the last value of each metric in a run's log file."""
    found: dict[str, float] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        found |= {name: value for name, value in json.loads(line).items() if isinstance(value, (int, float))}
    return found


def device(bench: Commands) -> Facts:
    """Checks copy and GEMM rates against the vendor's figures, and that installed packages can be imported."""
    own = torch.device(bench.device)
    unusable = transformer_engine.why_unusable(bench.device)
    facts: Facts = {"device": device_name(bench.device), "TransformerEngine": unusable or "it can be used"}
    facts["flash_attn"] = _import("flash_attn")
    rates = {
        "copy, GB/s": memory_bandwidth(own) / 1e9,
        "bf16 product, TFLOP/s": matrix_rate(torch.bfloat16, own) / 1e12,
    }
    facts |= rates
    if own.type == "cpu":
        return facts
    facts |= {"GPUs": torch.cuda.device_count(), "capability": torch.cuda.get_device_capability()}
    facts["cuDNN"] = str(torch.backends.cudnn.version())  # type: ignore[no-untyped-call]
    known = [each for each in HARDWARE.values() if facts["device"] in each.device_names]
    if known:
        peaks = (known[0].memory_bytes_per_s / 1e9, known[0].bf16_flops / 1e12)
        for (name, rate), peak in zip(rates.items(), peaks, strict=True):
            facts[f"{name}, of the vendor's"] = rate / peak
            if rate < REACHED * peak:
                raise CheckError(f"{name} is {rate:.4g}, but the vendor's figure is {peak:.4g}", facts)
    if unusable is not None and importlib.util.find_spec(transformer_engine.NAME) is not None:
        raise CheckError(f"TransformerEngine cannot be used: {unusable}", facts)
    return facts


def attention(bench: Commands) -> Facts:
    """Checks the cost of a new shape in torch's attention as used by actor and engine, and that scores are not kept."""
    device = torch.device(bench.device)
    launch.disable_cudnn_attention()
    length = ATTENTION_LENGTH[device.type]
    facts: Facts = {}
    for name, make in ATTENTIONS.items():
        make(device, length)()  # warm-up that loads libraries
        new, again = [], []
        for number in range(1, NEW_SHAPES + 1):
            call = make(device, length - 8 * number - number % 2)
            new.append(seconds(call, device))
            again.append(min(seconds(call, device) for _ in range(2)))
        costs = statistics.median(new) - statistics.median(again)
        facts[name] = found = {"s of a known shape": statistics.median(again), "s more of a new one": costs}
        if costs > NEW_SHAPE_S:
            raise CheckError(f"{name}: a new shape costs {costs:.3g} s more than a known one", facts)
        if device.type == "cpu" or make is _decoding:
            continue
        call, scores = make(device, length), ATTENTION_HEADS * length**2 * 2
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        peak = torch.cuda.max_memory_allocated(device) - before
        found["bytes at the peak, of those of all scores"] = peak / scores
        if peak > scores:
            raise CheckError(f"{name}: peak of {peak / 2**20:.0f} MiB; all scores take {scores / 2**20:.0f}", facts)
    return facts


def _causal(dtype: torch.dtype, *, masked: bool) -> Callable[[torch.device, int], Callable[[], object]]:
    """Returns a factory of forward and backward passes of grouped-query attention, as in the actor's local layers."""

    def make(device: torch.device, length: int) -> Callable[[], object]:
        heads = (ATTENTION_HEADS, ATTENTION_HEADS // 4, ATTENTION_HEADS // 4)
        q, k, v = (torch.randn(1, n, length, 128, device=device, dtype=dtype, requires_grad=True) for n in heads)
        mask = torch.full((1, 1, length, length), -torch.inf, device=device, dtype=dtype).triu_(1) if masked else None
        return lambda: torch.autograd.grad(attend(q, k, v, mask).sum(), (q, k, v))

    return make


def _decoding(device: torch.device, length: int) -> Callable[[], object]:
    """Returns a decode step's attention over `length` cached tokens, as in the native engine."""
    rows = 8
    cache = KVCache(
        windows=[None], num_kv_heads=2, head_dim=64, dtype=torch.bfloat16, device=device, budget_bytes=1 << 30
    )  # fmt: skip
    cache.reserve(rows, length)
    positions = torch.full((rows,), length - 1, device=device)
    q, k = (torch.randn(rows, heads, 64, device=device, dtype=torch.bfloat16) for heads in (14, 2))
    return lambda: DecodeAttention(cache, positions, length, 14)(0, q, k, k)


ATTENTIONS = {
    "bfloat16": _causal(torch.bfloat16, masked=False),
    "bfloat16 under a mask": _causal(torch.bfloat16, masked=True),
    "float32": _causal(torch.float32, masked=False),
    "decoding": _decoding,
}


def _import(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 -- a broken extension may raise anything
        return first_line(error)
    return "there"


def commit(bench: Commands) -> Facts:
    """Repeats the last step from the checkpoint before it and compares the metrics."""
    run = RunDir(bench.folder / ("committed_async" if bench.config.checkpoint.async_save else "committed"))
    first = bench.train(run, *bench.words)
    waited = {name: value for name, value in last_metrics(run.timings).items() if "checkpoint" in name}
    steps = run.committed_steps()
    sizes = {step: _size(run.checkpoints / f"step-{step:08d}") for step in steps}
    shutil.rmtree(run.checkpoints / f"step-{steps[-1]:08d}")
    again = bench.train(run, *bench.words)
    facts: Facts = {"commits": steps, "bytes of a commit": sizes[steps[-1]], "metrics compared": len(first), **waited}
    apart = difference(first, again)
    facts["largest relative difference"] = apart[1]
    if apart[1] > (0.0 if bench.device == "cpu" else RERUN):
        raise CheckError(f"{apart[0]} was {first.get(apart[0])}, but {again.get(apart[0])} after the resume", facts)
    return facts


def difference(first: Mapping[str, float], again: Mapping[str, float]) -> tuple[str, float]:
    """Returns the metric with the largest relative difference, and that difference; inf if only one side has it."""
    apart = dict.fromkeys(first.keys() ^ again.keys(), math.inf)
    for name in first.keys() & again.keys():
        one, other = first[name], again[name]
        same = one == other or (math.isnan(one) and math.isnan(other))
        apart[name] = 0.0 if same else abs(one - other) / max(abs(one), abs(other), 1e-3)
    return max(apart.items(), key=lambda item: math.inf if math.isnan(item[1]) else item[1])


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


def fp8_training(bench: Commands) -> Facts:
    """Trains two steps with FP8, blockwise or on Blackwell mxfp8; emulated on a CPU."""
    words = bench.words
    if bench.device != "cpu":
        unusable, capability = transformer_engine.why_unusable(bench.device), torch.cuda.get_device_capability()
        if unusable:
            raise NotHereError(f"FP8 training needs TransformerEngine: {unusable}")
        if capability < HOPPER:
            raise NotHereError(f"the GPU has capability {capability}: its FP8 has one scale per tensor at most")
        if capability >= BLACKWELL:
            words = (*words, "megatron.transformer.fp8_recipe=mxfp8")
    found = bench.train(RunDir(bench.folder / "fp8_training"), *words)
    facts: Facts = {name: found[name] for name in ("actor/grad_norm", "rollout_corr/k3_kl")}
    bad = [name for name in ("actor/pg_loss", *facts) if not math.isfinite(found[name])]
    if bad:
        raise CheckError(f"{', '.join(bad)} is not finite", facts)
    if not found["actor/grad_norm"]:
        raise CheckError("the gradient is 0", facts)
    if found["rollout_corr/k3_kl"] > FP8_APART:
        raise CheckError(f"engine and actor differ by {found['rollout_corr/k3_kl']:.3g}, at most {FP8_APART}", facts)
    return facts


def quickstart(bench: Commands) -> Facts:
    """Runs `configs/quickstart.yaml` unchanged."""
    config = bench.tools.parent / "configs" / "quickstart.yaml"
    found = bench.train(RunDir(bench.folder / "quickstart"), str(config))
    facts: Facts = {"val/accuracy": found["val/accuracy"]}
    if found["val/accuracy"] < LEARNED:
        raise CheckError(f"held-out accuracy is {found['val/accuracy']:.3f}, expected at least {LEARNED}", facts)
    return facts


def rollout(bench: Commands) -> Facts:
    """Compares the engine's speed with transformers and the memory-bandwidth limit, with and without CUDA graphs."""
    case = ("small", "float32") if bench.device == "cpu" else ("large", "bfloat16")
    engines = ("native",) if bench.device == "cpu" else ("native", "native_eager")
    words = ("--model", case[0], "--dtype", case[1], "--repeats", "3", "--engines", *engines)
    facts = bench.bench("bench_rollout", *words)
    if not float(str(facts["ratio"])) >= SLOWEST_ROLLOUT:
        raise CheckError(f"the engine reaches {facts['ratio']} of the speed of transformers' generate", facts)
    return facts


def transport(bench: Commands) -> Facts:
    """Compares a weight sync with a copy; on two ranks every tensor is sharded on one side and full on the other."""
    layout = ("--tp", "1") if bench.num_ranks == 1 else ("--tp", "2", "--rollout-tp", "1")
    facts = bench.bench("bench_refit", *layout, "--repeats", "5")
    if not float(str(facts["ratio_transport"])) >= SLOWEST_REFIT:
        raise CheckError(f"a weight sync reaches {facts['ratio_transport']} of the speed of a copy", facts)
    return facts


FUNCTIONS: dict[str, Callable[[Commands], Facts]] = {
    "device": device,
    "attention": attention,
    "commit": commit,
    "commit_async": commit,
    "fp8_training": fp8_training,
    "quickstart": quickstart,
    "rollout": rollout,
    "transport": transport,
    "transport_2": transport,
}
