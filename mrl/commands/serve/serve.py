"""Loads a checkpoint, Hugging Face folder or config and serves it over HTTP (`mrl serve`).

The engine is the config's, filled as in a training run: Megatron reads the weights at the config's layout and syncs
them to the engine.
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
from mrl.commands.serve.batching import ROUND_TOKENS, RequestQueue, serve_rounds
from mrl.config.config import Config, load
from mrl.config.json_file import read_json
from mrl.distributed.collectives import raise_on_all_ranks
from mrl.engines._capabilities import engine_capabilities
from mrl.environments.formats import base as formats
from mrl.errors import UserError, to_install
from mrl.trainer.run_plan import build_run_plan
from mrl.trainer.startup import open_trainer
from mrl.trainer.trainer import Trainer
from mrl.trainer.validation.rollout_ranks import refuse_roles

PROMPT_LENGTH, RESPONSE_LENGTH = 3072, 1024
"""Limits for a Hugging Face folder, tokens, reduced to its number of positions; a config has its own."""

INITIAL = "initial"
"""Value of `checkpoint` for the weights that the config names."""

START_S = 30.0
"""Longest wait for the HTTP server to start, s."""


@dataclass(frozen=True)
class ListenOptions:
    """Address and options of the server.

    Attributes:
        host: Address or hostname.
        port: Port; 0: any free one.
        model_name: Model name in requests; "": the name of the run's folder, or of the model where no run trained it.
        key: Bearer token of clients; "": none required.
        tool_format: Format of the model's tool calls, a file of `mrl/environments/formats`.
    """

    host: str
    port: int
    model_name: str
    key: str
    tool_format: str = "hermes"

    @property
    def is_local(self) -> bool:
        """True if only this machine can reach the server."""
        try:
            return self.host == "localhost" or ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return False


def resolve_model(given: str, overrides: Sequence[str], checkpoint: str | None) -> tuple[Config, str | None]:
    """Returns the config to serve, and its checkpoint for `Commits.load_for_evaluation`, or INITIAL.

    Args:
        given: Path of a config file, run folder, checkpoint folder or Hugging Face folder.
        overrides: Overrides of the config.
        checkpoint: Step or folder of a checkpoint, for a config file or run folder.

    Raises:
        UserError: `given` is none of these.
    """
    path = Path(given)
    if not path.is_dir():
        return load(given, overrides), checkpoint
    if (path / "config.json").is_file():
        if checkpoint is not None:
            raise UserError(
                f"--checkpoint={checkpoint} applies to a run, but '{given}' is a Hugging Face folder. Omit the option."
            )
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
        "data": {"task": "addition"},  # unused, but a config must name its data
    }
    return load(fields, overrides)


def check(listen: ListenOptions) -> None:
    """Checks options and packages before the job starts.

    Raises:
        UserError: Other machines could reach the server and no key is set, or packages are missing.
    """
    if not listen.is_local and not listen.key:
        raise UserError(
            f"--host {listen.host} is reachable from other machines, and no key is set. Set the environment variable "
            "MRL_API_KEY to a key that clients must send, or serve on 127.0.0.1."
        )
    formats.find_format(listen.tool_format)
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UserError(f"`mrl serve` needs {error.name}, which is not installed: {to_install('serve')}") from error


def serve(config: Config, checkpoint: str | None, listen: ListenOptions, say: Callable[[str], None]) -> None:
    """Collective over all ranks: serves until an exception, such as KeyboardInterrupt, ends it.

    Raises:
        UserError: The config or checkpoint is invalid, or the port is taken.
    """
    check(listen)
    refuse_roles(config, "rank 0 would have no engine to serve", "Serve with rollout.num_ranks=0 and rollout.nnodes=0.")
    with open_trainer(build_run_plan(config, resumes=False), log=False, trains=False) as trainer:
        if checkpoint == INITIAL:
            trainer.weights.load_initial()
            loaded = str(config.model.path)
        else:
            loaded = trainer.checkpointing.load_for_evaluation(checkpoint)
        trainer.sync_weights_if_stale()
        with (
            trainer.rollout_worker.awake() as engine,
            _listening(trainer, listen, loaded, say, of_run=checkpoint != INITIAL) as request_queue,
        ):
            serve_rounds(engine, trainer.groups, request_queue)


@contextmanager
def _listening(
    trainer: Trainer, listen: ListenOptions, loaded: str, say: Callable[[str], None], *, of_run: bool
) -> Iterator[RequestQueue | None]:
    """Collective over all ranks: runs the HTTP server on rank 0 inside the block; yields its queue (others: None)."""
    request_queue: RequestQueue | None = None
    opened: list[socket.socket] = []
    with raise_on_all_ranks():
        if trainer.groups.rank == 0:
            opened.append(_bind(listen))
    if not opened:
        yield request_queue
        return
    from mrl.commands.serve.app import ServedModel, make_app
    from mrl.commands.serve.http_server import make_server

    rollout = trainer.config.rollout
    name = listen.model_name or _model_name(trainer.config, of_run=of_run)
    served = ServedModel(
        name, rollout.max_sequence_length, trainer.tokenizer, int(time.time()), formats.find_format(listen.tool_format)
    )
    part = rollout.response_length
    if not engine_capabilities(rollout.name).has_fixed_prompt_length:  # a part of an answer can join the next prompt
        part = min(ROUND_TOKENS, part)
    most = rollout.max_num_seqs * trainer.groups.grid.num_replicas
    request_queue = RequestQueue(served.longest, part, most, trainer.tokenizer.eos_ids)
    app = make_app(served, request_queue, listen.key, local=listen.is_local and not listen.key)
    server = make_server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": opened}, name="serve", daemon=True)
    thread.start()
    began = time.monotonic()
    while not server.started and thread.is_alive() and time.monotonic() - began < START_S:
        time.sleep(0.02)
    if not server.started:
        raise RuntimeError("the HTTP server did not start; see uvicorn's message above")
    host, port = opened[0].getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    say(f"serving {loaded} as '{name}' at http://{shown}:{port}/v1")
    try:
        yield request_queue
    finally:
        request_queue.fail_all("the server is shutting down.")
        server.should_exit = True
        thread.join(5)
        opened[0].close()


def _model_name(config: Config, *, of_run: bool) -> str:
    """Returns the name of the run's folder, or that of the model; of_run: the weights are those of a run."""
    if of_run:
        return Path(config.run.output_dir).resolve().name
    return Path(config.model.path or str(config.model.preset)).name


def _bind(listen: ListenOptions) -> socket.socket:
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
