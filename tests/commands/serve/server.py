"""`mrl serve` in a process of its own."""

import os
import signal
import sys
import time

import openai

from mrl.distributed.local_ranks import fork_server_context
from tests.e2e.runs import REPOSITORY
from tests.ranks import PRELOAD

START_S = 300
FIELDS = ["model.dtype=float32", "rollout.prompt_length=64", "rollout.response_length=96", "run.num_threads=1"]


class Server:
    """`mrl serve` in a process of its own."""

    def __init__(self, folder, words, **variables):
        self._output = folder / "serve.txt"
        self.process = fork_server_context(PRELOAD).Process(target=_main, args=(str(self._output), words, variables))
        self.process.start()
        ends = time.monotonic() + START_S
        while "serving " not in self.output:
            assert self.process.is_alive() and time.monotonic() < ends, self.output
            time.sleep(0.05)
        self.url = self.output.rsplit(" at ", 1)[1].strip()

    @property
    def output(self):
        return self._output.read_text() if self._output.exists() else ""

    def client(self, key="none"):
        return openai.OpenAI(base_url=self.url, api_key=key, max_retries=0)

    def stop(self):
        if self.process.is_alive():
            os.kill(self.process.pid, signal.SIGINT)
        self.process.join(60)
        return self.process.exitcode


def _main(output, words, variables):
    os.environ.update(variables)
    os.setsid()
    os.chdir(REPOSITORY)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with open(output, "ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.argv = ["mrl", *words]
    from mrl.__main__ import main

    sys.exit(main())
