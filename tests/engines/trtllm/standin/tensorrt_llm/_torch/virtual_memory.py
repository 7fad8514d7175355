"""Memory that is released and materialized by tag; one engine a process, as the real manager is one a process."""

from tensorrt_llm.faults import StandInError
from tests.engines.trtllm.signature import enum_of, flavour, signed

HOME = "tensorrt_llm._torch.virtual_memory."
if flavour() == "1.2":
    ExecutorMemoryType = Tags = enum_of(HOME + "ExecutorMemoryType")
else:
    from tensorrt_llm.llmapi.llm_args import ExecutorMemoryType as Tags

executor = None
released: set[str] = set()
sizes: dict[str, int] = {}
"""Bytes of a tag's memory on a GPU that a test plays."""


def attach(new):
    global executor  # noqa: PLW0603
    executor = new
    released.clear()
    sizes.clear()


def held():
    """Bytes on the GPU."""
    return sum(size for tag, size in sizes.items() if tag not in released)


def _check(tags):
    for tag in tags:
        if tag not in [item.value for item in Tags] or tag.startswith("_no_capture"):
            raise ValueError(f"'{tag}' is no tag that may be released")
    if not executor.sleeps:
        raise ValueError("Sleep feature is not enabled, please set enable_sleep=True")
    if not executor.paused:
        raise StandInError("memory changes under a running event loop: use control_action")


@signed(HOME + "release_with_tag")
def release_with_tag(*tags):
    _check(tags)
    for tag in tags:
        if tag in released:
            raise StandInError(f"'{tag}' is released already")
        released.add(tag)
        executor.forget(tag)


@signed(HOME + "materialize_with_tag")
def materialize_with_tag(*tags):
    _check(tags)
    for tag in tags:
        if tag not in released:
            raise StandInError(f"'{tag}' is not released")
        if tag == "kv_cache" and released & {"model", "model_weights"}:
            raise StandInError("the KV cache wakes before the weights")
        released.remove(tag)
