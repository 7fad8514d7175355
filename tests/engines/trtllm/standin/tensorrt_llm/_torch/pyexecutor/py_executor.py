"""The executor: an event loop in a thread of each rank, which mrl's native engine computes for on the first one.

A pause is `py_executor.py`'s: two events, which the loop and the caller set and clear in its order. The loop waits in
it under the hang detector's eyes, as in 1.2; 1.3 pauses the detector there.
"""

import queue
import threading
import time
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace

import torch

from mrl.engines.native.packed_linear import compute_dtype
from mrl.models.hf_config import arch_from_config, read_config
from mrl.resharding.hf import hf_layout
from tensorrt_llm import _utils
from tensorrt_llm._torch import virtual_memory
from tensorrt_llm._torch.modules.linear import Mapping, modules_of
from tensorrt_llm._torch.pyexecutor import answers, route_capture
from tensorrt_llm._torch.pyexecutor.hang_detector import HangDetector
from tensorrt_llm._torch.pyexecutor.model_loader import Model, ModelLoader
from tensorrt_llm._torch.pyexecutor.sampler import instantiate_sampler
from tensorrt_llm.bindings import MpiComm
from tensorrt_llm.faults import StandInError, fault
from tests.engines.trtllm.native_model import NativeModel
from tests.engines.trtllm.signature import flavour

IDLE_S = 0.02
"""Requests that come within it are one batch."""
POLL_S = 0.005
PAUSE, END = "pause", "end"


@dataclass
class _Distribution:
    """The ranks of the engine."""

    comm: object

    @property
    def rank(self):
        return self.comm.Get_rank()

    @property
    def size(self):
        return self.comm.Get_size()

    def tell(self, what):
        for rank in range(1, self.size):
            self.comm.send(what, dest=rank, tag=1)

    def hear(self, source, tag):
        while not self.comm.iprobe(source=source, tag=tag):
            time.sleep(POLL_S)  # a real broadcast would burn a core here
        return self.comm.recv(source=source, tag=tag)


class PyExecutor:
    def __init__(self, args, folder):
        self.args = args
        self.dist = _Distribution(_utils.mpi_comm())
        if self.dist.size != args.tensor_parallel_size:
            raise StandInError(f"MPI's world has {self.dist.size} ranks, the model {args.tensor_parallel_size}")
        if MpiComm.size() != self.dist.size:
            raise StandInError("the C++ side still has MPI's whole world")
        self.arch, self.quantized = _read(folder)
        if self.quantized and args.dtype != "bfloat16":
            raise AssertionError(f"FP8 blocks are multiplied with bfloat16, not with {args.dtype}")
        self.sleeps = bool(getattr(args, "enable_sleep", False) or getattr(args, "sleep_config", None))
        self.discards = {str(tag) for tag, mode in _restore_modes(args).items() if mode == "NONE"}
        self.model_engine = SimpleNamespace(
            model=Model(self.arch, args, quantized=self.quantized), model_loader=ModelLoader()
        )
        # in FP8 the native engine multiplies with what values and scales stand for, in the dtype that it computes in
        dtype = str(compute_dtype(torch.bfloat16, torch.device("cpu")))[6:] if self.quantized else args.dtype
        self._native = NativeModel(self.arch, dtype, args.max_seq_len + 1) if self.dist.rank == 0 else None
        self.sampler = instantiate_sampler(args)
        route_capture.create(args)
        self._requests = queue.Queue()
        self._waiting = None
        self.control_request_barrier, self.control_action_done = threading.Event(), threading.Event()
        self.hang_detector = HangDetector(on_detected=self._on_detected)
        self._filled = None
        self._parts, self._stale = [{}] * self.dist.size, True
        self._batches = 0
        self.is_shutdown = False
        virtual_memory.attach(self)
        self.worker_thread = threading.Thread(target=self._event_loop_wrapper, daemon=True)

    def start_worker(self):
        self.worker_thread.start()

    # control

    @property
    def paused(self):
        return self.control_request_barrier.is_set()

    @contextmanager
    def control_action(self):
        if self.dist.rank == 0:
            self._requests.put(PAUSE)
        self.control_request_barrier.wait()
        try:
            yield self
        finally:
            self.control_action_done.set()
            if self.dist.rank != 0:
                time.sleep(float(fault("slow_exit") or 0))  # as the scheduler of threads may have it
            self.control_request_barrier.clear()

    def reset_prefix_cache(self):
        if not self.paused:
            raise StandInError("reset_prefix_cache under a running event loop")
        model = self.model_engine.model
        if model.step == "loaded, prefixes of old weights":
            model.step = "loaded"

    def forget(self, tag):
        """What happens to released memory that is not restored."""
        if tag in self.discards and tag == "model_weights":
            self.model_engine.model.lose()

    def enqueue(self, result):
        if self.dist.rank != 0:
            raise StandInError("requests go to the first rank")
        if self.is_shutdown:
            raise RuntimeError("LLM is shutting down")
        self._requests.put(result)

    def shutdown(self):
        if self.dist.rank == 0 and self.worker_thread.is_alive():
            self._requests.put(END)
        self.worker_thread.join()  # for ever, where the loop waits for a rank that died

    # the loop

    def _event_loop_wrapper(self):
        try:
            self._event_loop()
        finally:
            self.is_shutdown = True

    def _on_detected(self):
        self.is_shutdown = True

    def _event_loop(self):
        with self.hang_detector:
            self._loop()

    def _handle_control_request(self):
        self.control_request_barrier.set()
        with self.hang_detector.pause() if flavour() == "1.3" else nullcontext():
            self.control_action_done.wait()
            self.control_action_done.clear()

    def _loop(self):
        while True:
            self.hang_detector.checkpoint()
            with self.hang_detector.pause():  # where requests are waited for
                work = self._fetch()
            if work is END or self.is_shutdown:
                return
            if work is PAUSE:
                self._handle_control_request()
                continue
            self._batches += 1
            number = fault("die" if self.dist.rank == 0 else "die_on_rank1")
            if number and int(number) == self._batches:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if self.dist.rank == 0:
                self._run(work)
            else:
                self.dist.comm.send(self._news(), dest=0, tag=2)

    def _fetch(self):
        if self.dist.rank != 0:
            return {PAUSE: PAUSE, END: END}.get(heard := self.dist.hear(0, 1), heard)
        first = self._waiting if self._waiting is not None else self._requests.get()
        self._waiting = None
        if first in (PAUSE, END):
            self.dist.tell(first)
            return first
        batch = [first]
        while True:
            try:
                more = self._requests.get(timeout=IDLE_S)
            except queue.Empty:
                break
            if more in (PAUSE, END):
                self._waiting = more
                break
            batch.append(more)
        self.dist.tell("batch")
        return batch

    def _news(self):
        """This rank's parts of the weights, where they are not those of the last batch."""
        model = self.model_engine.model
        held = model.tensors
        if self._filled is held or model.step != "loaded" or not held:
            return None
        self._filled = held
        return model.meant()

    def _whole(self):
        """The ranks' parts put together; what several of them hold must be equal."""
        layout = hf_layout(self.arch, self.args.dtype)
        found = {name: torch.full(stored.shape, torch.nan) for name, stored in layout.items()}
        for rank, shards in enumerate(self._parts):
            for module in modules_of(self.arch, layout, Mapping(self.args, rank)).values():
                for name in module.wanted:
                    full = found[name].view(-1)
                    places = module.shard(name, torch.arange(full.numel()).view(found[name].shape)).reshape(-1)
                    values, known = shards[name].reshape(-1).float(), full[places]
                    if bool((~known.isnan() & (known != values)).any()):
                        raise StandInError(f"rank {rank} has other values of {name}")
                    full[places] = values
        return found

    def _run(self, batch):
        own = self._news()
        news = [own, *(self.dist.hear(rank, 2) for rank in range(1, self.dist.size))]
        self._parts = [part if new is None else new for part, new in zip(self._parts, news, strict=True)]
        self._stale |= any(new is not None for new in news)
        if fault("silent"):
            return
        try:
            self._check()
            if self._stale:
                self._native.fill(self._whole())
                self._stale = False
            for result, answer in answers.of(batch, self._native, self.sampler, self.args, self.arch):
                result.queue.put(answer)
        except (StandInError, ValueError) as error:
            for result in batch:
                result.queue.put(error)

    def _check(self):
        if virtual_memory.released:
            raise StandInError(f"requests while {sorted(virtual_memory.released)} sleeps")
        if self.quantized and self.args.kv_cache_config.dtype == "fp8" and not self.model_engine.model.unit_scales:
            raise StandInError("attention's output in FP8 is scaled by the dummy weights' random numbers")
        if self.model_engine.model.step != "loaded" or not self.model_engine.model.tensors:
            raise StandInError(f"requests with weights that are '{self.model_engine.model.step}'")


def _read(folder):
    """(structure, whether linear layers are FP8 blocks) of config.json, as `_torch/model_config.py` reads it."""
    config = read_config(folder)
    found = config.pop("quantization_config", None)
    if found is None or found["quant_method"] != "fp8" or not found.get("weight_block_size"):
        return arch_from_config(config), False  # 1.3 takes FP8 without blocks and without static scales for no FP8
    if tuple(found["weight_block_size"]) != (128, 128):
        raise AssertionError("FP8_BLOCK_SCALES only supports block_size=(128,128)")
    return arch_from_config(config), True


def _restore_modes(args):
    config = getattr(args, "sleep_config", None)
    return {} if config is None else {tag.value: mode for tag, mode in config.restore_modes.items()}


torch.set_num_threads(1)
