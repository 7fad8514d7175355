"""The operations between products from `kernels.c`: one pass over memory each, attention over each row's own slots.

Owns how that and `drafts.c` are compiled, once for each processor, compiler and dtype into the user's cache folder, and
how they are called. They run on the threads of PyTorch's own OpenMP: two pools would fight for the cores.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from mrl.engines.native import machine
from mrl.engines.native.history import History
from mrl.engines.native.kv_cache import KVCache
from mrl.engines.native.operations import Attention, HeadNorms, Heads, Operations, Rotation
from mrl.errors import UserError

SOURCES = tuple(Path(__file__).with_name(name) for name in ("kernels.c", "drafts.c"))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = ("-std=gnu11", "-O3", "-march=native", "-fPIC", "-fopenmp", "-fno-math-errno", "-fno-trapping-math")
DTYPES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("-DBF16",)}
PATIENCE_S = 120.0
PLAIN = "plain"

_P, _N, _F, _B = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_ARGUMENTS = {
    "norm": [*[_P] * 4, *[_N] * 2, _F],
    "rotate": [*[_P] * 6, *[_N] * 4, _F],
    "gate": [*[_P] * 2, *[_N] * 2],
    "attend": [*[_P] * 3, _N, *[_P] * 5, *[_N] * 6, _F],
    "sample": [_P, _N, *[_P] * 4, *[_N] * 2, _F, _B],
    "draft": [_P, _N, *[_P] * 5, *[_N] * 4, *[_P] * 3],
}


class Compiled(Operations):
    """For activations of one dtype on a CPU; what it is given is contiguous where that is not said otherwise."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._call: dict[str, Callable[..., None]] = {}
        for name, arguments in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, None
            self._call[name] = function

    def norm(self, x_PH: Tensor, weight_H: Tensor, eps: float, delta_PH: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """See `Operations`; the delta is added in place."""
        out_PH = torch.empty_like(x_PH)
        delta = None if delta_PH is None else delta_PH.data_ptr()
        self._call["norm"](x_PH.data_ptr(), delta, weight_H.data_ptr(), out_PH.data_ptr(), *x_PH.shape, eps)
        return x_PH, out_PH

    def rotation(self, heads: Heads, positions_P: Tensor) -> Rotation:
        """See `Operations`; queries and keys are turned in place."""
        positions_P = positions_P.contiguous()
        tables = (heads.cos.data_ptr(), heads.sin.data_ptr())
        count, kv_count = heads.num_heads, heads.num_kv_heads

        def rotate(qkv: Tensor, norms: HeadNorms | None) -> tuple[Tensor, Tensor, Tensor]:
            weights = (None, None) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr())
            num, _, dim = qkv.shape
            self._call["rotate"](
                qkv.data_ptr(), positions_P.data_ptr(), *tables, *weights, num, count, kv_count, dim, heads.eps
            )
            return qkv[:, :count], qkv[:, count : count + kv_count], qkv[:, count + kv_count :]

        return rotate

    def gate(self, gate_up: Tensor) -> Tensor:
        """See `Operations`."""
        num, columns = gate_up.shape
        out_PI = gate_up.new_empty(num, columns // 2)
        self._call["gate"](gate_up.data_ptr(), out_PI.data_ptr(), num, columns // 2)
        return out_PI

    def decode_attention(self, cache: KVCache, positions_B: Tensor, length: int, num_heads: int) -> Attention:
        """See `Operations`; each row's own slots are read."""
        del length
        return self.verify_attention(cache, positions_B, None, num_heads)

    def verify_attention(
        self, cache: KVCache, positions_P: Tensor, firsts_B: Tensor | None, num_heads: int
    ) -> Attention:
        """Of several new tokens in each of the first B rows: each with the bits that it would have alone.

        Args:
            cache: Holds everything before the new tokens.
            positions_P: Position of each, one after the other in a row.
            firsts_B: Index of each row's first token, and P at the end, int64; None: one token a row.
            num_heads: N.
        """
        rows = positions_P.numel() if firsts_B is None else firsts_B.numel() - 1
        kv_heads = cache.num_kv_heads
        positions_P = positions_P.contiguous()
        firsts = None if firsts_B is None else firsts_B.data_ptr()

        def attend(layer: int, q_PND: Tensor, k_PKD: Tensor, v_PKD: Tensor) -> Tensor:
            keys, values = cache.keys[layer], cache.values[layer]
            num, _, dim = q_PND.shape
            out_PND = q_PND.new_empty(num, num_heads, dim)
            self._call["attend"](
                *(q_PND.data_ptr(), k_PKD.data_ptr(), v_PKD.data_ptr(), q_PND.stride(0)),
                *(positions_P.data_ptr(), firsts, keys.data_ptr(), values.data_ptr(), out_PND.data_ptr()),
                *(rows, num_heads, kv_heads, dim, keys.stride(0), keys.stride(1), dim**-0.5),
            )
            return out_PND

        return attend

    def sample(
        self, logits_NV: Tensor, keys_N: Tensor, counts_N: Tensor, temperature: float, *, greedy: bool
    ) -> tuple[Tensor, Tensor]:
        """See `Operations`; logits stay as they are."""
        if logits_NV.stride(1) != 1:
            logits_NV = logits_NV.contiguous()
        keys_N, counts_N = keys_N.contiguous(), counts_N.contiguous()
        num, size = logits_NV.shape
        tokens_N = torch.empty(num, dtype=torch.int64)
        logprobs_N = torch.empty(num, dtype=torch.float32)
        self._call["sample"](
            *(logits_NV.data_ptr(), logits_NV.stride(0), keys_N.data_ptr(), counts_N.data_ptr()),
            *(tokens_N.data_ptr(), logprobs_N.data_ptr(), num, size, temperature, int(greedy)),
        )
        return tokens_N, logprobs_N

    def draft(
        self, history: History, slots_B: Tensor, limits_B: Tensor, lookup: range, drafts_BK: Tensor
    ) -> tuple[Tensor, Tensor]:
        """What each row's sequence may say next.

        Args:
            history: What was said.
            slots_B: The sequence of each row, int64.
            limits_B: Tokens to draft at most, int64.
            lookup: Lengths of its end that are looked for; the longest that is found counts.
            drafts_BK: Receives the drafted tokens, int64.

        Returns:
            Of each row how many were drafted, and the length that was found, 0: none; int64.
        """
        counts_B, matched_B = torch.empty_like(slots_B), torch.empty_like(slots_B)
        self._call["draft"](
            *(history.tokens_HW.data_ptr(), history.tokens_HW.size(1), history.lengths_H.data_ptr()),
            *(history.begins_H.data_ptr(), history.next_H.data_ptr(), slots_B.data_ptr(), limits_B.data_ptr()),
            *(slots_B.numel(), lookup.start, lookup.stop - 1, drafts_BK.size(1)),
            *(drafts_BK.data_ptr(), counts_B.data_ptr(), matched_B.data_ptr()),
        )
        return counts_B, matched_B


def operations(dtype: torch.dtype, device: torch.device, *, eager: bool) -> tuple[Operations, str | None]:
    """The fastest operations that this job has, and why they are not compiled ones where that is no choice.

    All engines of a job have the same: forms differ in the last bits, and tokens do not depend on where they are drawn.

    Args:
        dtype: Of activations.
        device: Where they are.
        eager: PyTorch's operators are wanted.

    Raises:
        UserError: Another rank has compiled ones and here they cannot be.
    """
    if device.type != "cpu" or eager:
        return Operations(), None
    library, problem = _library(dtype)
    if machine.agreed(f"operations/{dtype}", PLAIN if library is None else "compiled") == PLAIN:
        return Operations(), problem or "another rank of this job cannot compile"
    if library is None:
        raise UserError(
            f"another rank compiles what the native engine does between products; this one cannot: {problem}. Tokens "
            f"would depend on the rank: install a C compiler ({', '.join(COMPILERS)}) there, or set "
            "rollout.enforce_eager=true."
        )
    return Compiled(library), None


@cache
def _library(dtype: torch.dtype) -> tuple[ctypes.CDLL | None, str | None]:
    """The compiled file, or why there is none."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    openmp = _openmp()
    if dtype not in DTYPES:
        return None, f"there are none for {dtype}"
    if compiler is None:
        return None, f"there is no C compiler ({', '.join(COMPILERS)})"
    if openmp is None:
        return None, "PyTorch's OpenMP library was not found"
    try:
        version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
        flags = (*FLAGS, *DTYPES[dtype])
        sources = [source.read_text(encoding="utf-8") for source in SOURCES]
        key = machine.key(*sources, *flags, version, str(openmp), machine.processor())
        name = f"kernels/{key}.so"
        made = machine.kept(name, lambda: _compile(compiler, flags, openmp))
        return _load(machine.place(name), made), None
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", "") or str(error)
        return None, f"{compiler} fails: {said.strip().splitlines()[-1]}"
    except OSError as error:
        return None, str(error)


def _compile(compiler: str, flags: tuple[str, ...], openmp: Path) -> bytes:
    with tempfile.TemporaryDirectory() as name:
        parts, whole = [str(Path(name, source.stem + ".o")) for source in SOURCES], Path(name, "kernels.so")
        for command in (
            *([compiler, *flags, "-c", str(source), "-o", part] for source, part in zip(SOURCES, parts, strict=True)),
            [compiler, "-shared", *parts, str(openmp), "-lm", "-o", str(whole)],
        ):
            subprocess.run(command, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
        return whole.read_bytes()


def _load(place: Path | None, data: bytes) -> ctypes.CDLL:
    """From where it is kept; otherwise from a file that is gone once it is loaded."""
    if place is not None and place.exists():
        return ctypes.CDLL(str(place))
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(data)
        file.flush()
        return ctypes.CDLL(file.name)


def _openmp() -> Path | None:
    """The OpenMP library that PyTorch has loaded."""
    maps = Path("/proc/self/maps")
    if not maps.exists():
        return None
    found = re.search(r"(/\S*/lib(?:gomp|iomp5|omp)[^/\s]*)$", maps.read_text(encoding="utf-8"), re.MULTILINE)
    return None if found is None else Path(found[1])
