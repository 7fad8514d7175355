"""From a checkpoint or a config to a server (`mrl serve`).

Owns what can be served, where it listens, and that it ends in order. The engine is the config's, filled as in a run:
the weights are read by Megatron at the config's layout and refitted.
"""

from __future__ import annotations

import ipaddress
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mrl.checkpoint.run_dir.run_dir import RunDir
from mrl.commands.serve.batching import PART, Desk, work
from mrl.config.config import Config, load
from mrl.distributed.collectives import together
from mrl.environments.formats import base as formats
from mrl.errors import UserError, to_install
from mrl.models.hf_config import read_json
from mrl.trainer.resolve import prepare
from mrl.trainer.startup import open_job
from mrl.trainer.trainer import Job
from mrl.trainer.validation.roles import refuse_roles

PROMPT_LENGTH, RESPONSE_LENGTH = 3072, 1024
"""Of a served Hugging Face folder, tokens, where its positions reach so far; a config has its own."""

INITIAL = "initial"
"""In place of a checkpoint: the weights that the config names."""

WHOLE_ANSWERS = ("trtllm_engine",)
"""Engines whose longest prompt was fixed when they were built: an answer cannot be read again as part of one."""

START_S = 30.0
"""Longest wait until the server listens."""


@dataclass(frozen=True)
class Listen:
    """Where the server listens.

    Attributes:
        host: Address or name.
        port: 0: any that is free.
        model_name: As requests say it; "": from what is served.
        key: Bearer token of clients; "": none is asked for.
        tool_format: How the model writes that it calls a tool: a file of `mrl/environments/formats`.
    """

    host: str
    port: int
    model_name: str
    key: str
    tool_format: str = "hermes"

    @property
    def is_local(self) -> bool:
        """Whether only this machine can reach it."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def source(given: str, overrides: Sequence[str], checkpoint: str | None) -> tuple[Config, str | None]:
    """The config to serve, and its checkpoint as `Commits.load_for_evaluation` takes it, or INITIAL.

    Args:
        given: A config file, a run folder, a checkpoint folder of one, or a Hugging Face folder.
        overrides: Of the config.
        checkpoint: A step or folder beside a config file or run folder.

    Raises:
        UserError: It is none of these.
    """
    path = Path(given)
    if not path.is_dir():
        return load(given, overrides), checkpoint
    if (path / "config.json").is_file():
        if checkpoint is not None:
            raise UserError(f"--checkpoint={checkpoint} is of a run, and '{given}' is a Hugging Face folder.")
        return _of_model(path, overrides), INITIAL
    for root, step in ((path, checkpoint), (path.parent.parent, str(path))):
        if RunDir(root).config.is_file():
            return load(RunDir(root).config, [f"run.output_dir={root}", *overrides]), step
    raise UserError(
        f"'{given}' is neither a config file, nor a run folder (with config.yaml), nor one of its checkpoints, nor a "
        "Hugging Face folder (with config.json)."
    )


def _of_model(folder: Path, overrides: Sequence[str]) -> Config:
    longest = read_json(folder / "config.json").get("max_position_embeddings")
    room = longest if isinstance(longest, int) and longest > 1 else PROMPT_LENGTH + RESPONSE_LENGTH
    response = min(RESPONSE_LENGTH, room // 2)
    fields: dict[str, dict[str, Any]] = {
        "model": {"path": str(folder)},
        "rollout": {"prompt_length": min(PROMPT_LENGTH, room - response), "response_length": response},
        "data": {"task": "addition"},  # a config names prompts; none of them is served
    }
    return load(fields, overrides)


def check(listen: Listen) -> None:
    """Looks at what needs no job.

    Raises:
        UserError: Others could reach the server and no key is set, or packages are missing.
    """
    if not listen.is_local and not listen.key:
        raise UserError(
            f"--host {listen.host} lets other machines ask, and no key is set. Set the environment variable "
            "MRL_API_KEY to what clients must send, or serve on 127.0.0.1."
        )
    formats.find(listen.tool_format)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"`mrl serve` needs {error.name}, which is not installed: {to_install('serve')}") from error


def serve(config: Config, checkpoint: str | None, listen: Listen, say: Callable[[str], None]) -> None:
    """Collective over the job: serves until an exception ends it, such as Ctrl-C's.

    Args:
        config: Of the run.
        checkpoint: As `source` gives it.
        listen: Where.
        say: Told on rank 0 what is served, and where.

    Raises:
        UserError: A mistake in the config, no such checkpoint, or the port is taken.
    """
    check(listen)
    refuse_roles(
        config, "rank 0 answers, and would hold no engine", "Serve with rollout.num_ranks=0 and rollout.nnodes=0."
    )
    with open_job(prepare(config, resumes=False), log=False, trains=False) as job:
        if checkpoint == INITIAL:
            job.weights.load_initial()
            loaded = str(config.model.path)
        else:
            loaded = job.commits.load_for_evaluation(checkpoint)
        job.refit_if_stale()
        with job.sampler.awake() as engine, _listening(job, listen, loaded, say) as desk:
            work(engine, job.groups, desk)


@contextmanager
def _listening(job: Job, listen: Listen, loaded: str, say: Callable[[str], None]) -> Iterator[Desk | None]:
    """Collective over the job: inside, rank 0 takes requests; the others have no desk."""
    desk: Desk | None = None
    opened: list[socket.socket] = []
    with together():
        if job.groups.rank == 0:
            opened.append(_bind(listen))
    if not opened:
        yield desk
        return
    from mrl.commands.serve.app import Served, make_app
    from mrl.commands.serve.http_server import make_server

    rollout = job.config.rollout
    name = listen.model_name or Path(job.config.model.path or str(job.config.model.preset)).name
    served = Served(name, rollout.longest, job.tokenizer, int(time.time()), formats.find(listen.tool_format))
    part = rollout.response_length if rollout.name in WHOLE_ANSWERS else min(PART, rollout.response_length)
    most = rollout.max_num_seqs * job.groups.grid.num_replicas
    desk = Desk(served.longest, part, most, job.tokenizer.eos_ids)
    app = make_app(served, desk, listen.key, local=listen.is_local and not listen.key)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": opened}, name="serve", daemon=True)
    thread.start()
    began = time.monotonic()
    while not server.started and thread.is_alive() and time.monotonic() - began < START_S:
        time.sleep(0.02)
    if not server.started:
        raise RuntimeError("the HTTP server did not start; its own message is above")
    host, port = opened[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"serving {loaded} as '{name}' at http://{shown}:{port}/v1")
    try:
        yield desk
    finally:
        desk.close("the server ends.")
        server.should_exit = True
        thread.join(5)
        opened[0].close()


def _bind(listen: Listen) -> socket.socket:
    """A listening socket.

    Raises:
        UserError: The address cannot be had.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(listen.host, listen.port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        raise UserError(
            f"cannot listen at {listen.host}:{listen.port}: {error.strerror or error}. Choose another --port "
            "(0: any that is free) or --host."
        ) from error
    return made
