import queue
from dataclasses import dataclass

from tests.engines.trtllm.signature import Fields, flavour, signed

HOME = "tensorrt_llm.executor.result."


class Logprob(Fields):
    entry = HOME + "Logprob"


class CompletionOutput(Fields):
    entry = HOME + "CompletionOutput"

    if flavour() == "1.3":

        @property
        def routed_experts(self):
            found = (self.additional_generation_outputs or {}).get("routed_experts")
            return found[0] if found else None


@dataclass
class GenerationRequest:
    prompt_token_ids: list
    sampling_params: object


class GenerationResult:
    def __init__(self, request):
        self.request, self.queue, self.outputs = request, queue.Queue(), []
        self.aborted = False

    @signed(HOME + "GenerationResult.result")
    def result(self, timeout=None):
        while not self.outputs:
            answer = self.queue.get()  # as some versions do it: the timeout is not passed on
            if isinstance(answer, Exception):
                raise answer
            self.outputs = [answer]
        return self

    @signed(HOME + "GenerationResult.abort")
    def abort(self):
        self.aborted = True
