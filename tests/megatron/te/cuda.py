"""What `torch.cuda` is inside TransformerEngine's modules: one device, the CPU, which does everything in order.

It says that it is a Hopper: TE chooses by that. `CAPABILITY` may be set to another.
"""

import contextlib
import types

import torch

CPU = torch.device("cpu")
CAPABILITY = (9, 0)


class Stream:
    """A stream, or an event: whatever it is asked for has happened already."""

    def __init__(self, *args, **kwargs):
        self.cuda_stream = 0

    def record_event(self, *args):
        return self

    def query(self):
        return True

    def _nothing(self, *args, **kwargs):
        pass

    wait_stream = wait_event = wait = record = synchronize = _nothing


class _Once:
    """A request of torch.distributed; after the first wait the others return at once."""

    def __init__(self, request):
        self._request = request

    def wait(self, *args):
        request, self._request = self._request, None
        return True if request is None else request.wait(*args)


def once(requests):
    return [_Once(request) for request in requests] if isinstance(requests, list) else _Once(requests)


def missing(owner):
    """A module's `__getattr__`: what is not there can be named and imported; called, it says so."""

    def attribute(name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **kwargs):
            raise NotImplementedError(f"{owner}.{name} has no stand-in on a CPU")

        return call

    return attribute


Event = Stream
_STREAM = Stream()
default_generators = {CPU: torch.default_generator}
manual_seed = torch.manual_seed
nvtx = types.SimpleNamespace(
    range_push=lambda *args: None, range_pop=lambda *args: None, range=lambda *args: contextlib.nullcontext()
)


def _lazy_init():
    pass


def _lazy_call(callback, **kwargs):
    callback()


def is_available():
    return True


def is_current_stream_capturing():
    return False


def current_device():
    return CPU  # used as `device=` and as a key of default_generators


def device_count():
    return 1


def current_stream(*args):
    return _STREAM


default_stream = current_stream


def stream(wanted):
    return contextlib.nullcontext()


def get_device_properties(device=None):
    major, minor = CAPABILITY
    return types.SimpleNamespace(major=major, minor=minor, multi_processor_count=132, name=f"cpu as sm{major}{minor}")


def get_device_capability(device=None):
    return CAPABILITY


def get_rng_state(device=None):
    return torch.get_rng_state()


def set_rng_state(state, device=None):
    torch.set_rng_state(state)


def synchronize(*args):
    pass


empty_cache = synchronize


def __getattr__(name):  # types in annotations, and what nobody calls here
    return getattr(torch.cuda, name)
