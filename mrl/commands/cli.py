"""The command line: `mrl train|evaluate|serve|plan|rehearse|launch|report|from-verl`, the same as `python -m mrl ...`.

Owns arguments, exit statuses and the one message of a run that ended early: 0 done, 2 a mistake that the user can mend
(no traceback), 70 a rank failed, hung or was lost (`distributed/watchdog/watchdog.py`, which tells it), 75 a training
run that stopped in order and goes on when it is started again, 130 interrupted, 143 ended by SIGTERM. What needs torch
is imported inside the commands, so that `mrl --help` and a mistake in a config answer at once.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from mrl import __version__
from mrl.checkpoint.run_dir.resume_hint import to_go_on
from mrl.commands.launch import SCRIPTS, Start, line
from mrl.config.config import Config, load
from mrl.config.paths import expanded
from mrl.distributed.launch import become, environment, variables
from mrl.distributed.watchdog import signals
from mrl.distributed.watchdog.abort import is_mine_to_say
from mrl.distributed.watchdog.gc_control import frozen_imports, quick_imports
from mrl.distributed.watchdog.graceful_stop import END_TIME, Stop, limits
from mrl.distributed.watchdog.signals import REQUEUE, Terminated
from mrl.distributed.watchdog.stdio import outlive_readers
from mrl.errors import ClusterError, UserError, printable
from mrl.trainer.validation.off_policy import told_correction

RANKS = "ranks of the real run; default: NxG of the config's name, else the fewest of its layout"

MAX_TOLD = 8000
"""Characters of a message: the longest real ones, with commands that build engines, have half of it."""

SILENT_RANK_WAIT_S = 10.0
"""A launcher ends all ranks when the first one ends: one that is silent lets the one that speaks end first."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns the exit status; `argv` is without the program's name.

    Without `argv` the process ends with this: no signal changes anything after it. With it the signals' handlers are
    those of before.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    before = signals.begin(is_training=words[:1] == ["train"])
    try:
        return _run(words)
    finally:
        if argv is not None:
            signals.give_back(before)


def _run(words: Sequence[str]) -> int:
    arguments = _parse(words)
    arguments.words = words
    arguments.to_go_on = ""
    arguments.if_ended = str
    outlive_readers()
    try:
        with signals.raising(_is_first, lambda: str(arguments.if_ended())):
            status: int | None = arguments.command(arguments)
    except UserError as error:
        if _speaks(error):
            print(f"mrl: error: {_short(str(error))}{arguments.to_go_on}", file=sys.stderr, flush=True)
        else:
            time.sleep(SILENT_RANK_WAIT_S)
        return 2
    except ClusterError as error:
        if is_mine_to_say(f"cluster {os.getppid()}"):  # a host's ranks find the same trouble
            print(f"mrl: error: {error}", file=sys.stderr, flush=True)
        return signals.FAILED
    except KeyboardInterrupt:
        signals.say(signal.SIGINT)
        return signals.INTERRUPTED
    except Terminated as stop:
        signals.say(stop.number)
        return stop.status
    return status or 0


def _short(text: str) -> str:
    """A message that quotes a book has its middle left out."""
    return text if len(text) <= MAX_TOLD else f"{text[: MAX_TOLD // 2]} [...] {text[-MAX_TOLD // 4 :]}"


def _is_first() -> bool:
    """Whether this process speaks for its job; read in a signal's handler, where nothing may raise."""
    try:
        return environment().rank == 0
    except UserError:
        return True


def _speaks(error: UserError) -> bool:
    """Whether this rank prints an error: one rank of the job what all ranks raised together, else one of each host.

    Before ranks know each other, those of a host read the same files and raise the same error.
    """
    try:
        here = environment()
    except UserError:
        return True  # the launcher's variables are the mistake
    return here.rank == 0 if error.everywhere else here.local_rank == 0


def _train(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    if arguments.dry_run:
        from mrl.commands.plan.dryrun import describe
        from mrl.trainer.validation.world_size import world_size

        started = environment().world_size
        size = world_size(config, arguments.config, arguments.world_size, started=started)
        described = describe(config, size, launcher=environment().launcher if started > 1 else None)
        if environment().rank == 0:
            print(described, flush=True)
        return 0

    def say(what: str) -> None:
        if environment().rank == 0:
            print(f"mrl: {what}.{to_go_on(config, arguments.words)}", file=sys.stderr, flush=True)

    arguments.if_ended = lambda: to_go_on(config, arguments.words)
    if environment().rank == 0 and config.observe.console != "off":
        print(_beginning(config), flush=True)
    with quick_imports():
        from mrl.train import train  # before SIGTERM is a request: imports lose exceptions
    stop = Stop(config.run, ends=limits(config.run, variables(END_TIME)), keeps_time=environment().rank == 0, say=say)
    try:
        with frozen_imports(), stop.listening():
            train(config, stop)
            if stop.why:
                _report_early(config)
    except KeyboardInterrupt:
        _report_early(config)
        raise
    except UserError as error:
        if error.at:
            arguments.to_go_on = to_go_on(config, arguments.words, error.at)
        raise
    return REQUEUE if stop.why else 0


def _report_early(config: Config) -> None:
    """On rank 0: the report of a run that ends before its end, if there is anything to report. It says nothing."""
    if environment().rank == 0 and config.observe.report:
        from mrl.observability.report import write_report

        with suppress(UserError):
            write_report(Path(config.run.output_dir))


def _beginning(config: Config) -> str:
    """The first line of a run, before torch is imported: on a busy machine nothing else is shown for a while."""
    model, ranks = config.model.path or config.model.preset, environment().world_size
    how = " asynchronously" if config.train.mode == "async" else ""
    what = f"{config.algorithm.name}{how} on {model}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    return printable(f"mrl {__version__}: starting {what}, in {config.run.output_dir}{told_correction(config)}")


def _evaluate(arguments: argparse.Namespace) -> None:
    with quick_imports():
        from mrl.train import evaluate

    with frozen_imports():
        metrics = evaluate(load(arguments.config, arguments.overrides), arguments.checkpoint)
    if environment().rank == 0:
        print(json.dumps(metrics, indent=1), flush=True)


def _serve(arguments: argparse.Namespace) -> None:
    with quick_imports():
        from mrl.commands.serve.serve import Listen, check, serve, source

    config, checkpoint = source(arguments.source, arguments.overrides, arguments.checkpoint)
    key = variables("MRL_API_KEY").get("MRL_API_KEY", "")
    listen = Listen(arguments.host, arguments.port, arguments.model_name, key, arguments.tool_format)
    check(listen)
    serve(config, checkpoint, listen, lambda text: print(f"mrl: {text}", flush=True))


def _plan(arguments: argparse.Namespace) -> None:
    from mrl.commands.plan.plan import describe
    from mrl.observability.hardware import load_hardware
    from mrl.trainer.validation.world_size import world_size

    hardware = load_hardware(arguments.hardware)
    if arguments.gpus_per_node is not None:
        hardware = replace(hardware, gpus_per_node=arguments.gpus_per_node)
    config = load(arguments.config, arguments.overrides)
    print(describe(config, world_size(config, arguments.config, arguments.world_size).ranks, hardware), flush=True)


def _rehearse(arguments: argparse.Namespace) -> None:
    print(f"mrl: rehearse: {arguments.config}, loading mrl", file=sys.stderr, flush=True)
    from rich.console import Console

    from mrl.commands.rehearse.rehearse import Options, rehearse
    from mrl.observability.hardware import load_hardware

    options = Options(
        load_hardware(arguments.hardware), arguments.world_size, arguments.max_ranks, arguments.output_dir,
        arguments.stand_ins, arguments.timeout_s, arguments.dry_run,
    )  # fmt: skip
    console = Console()
    rehearse(arguments.config, arguments.overrides, options, console if console.is_terminal else Console(width=120))


def _launch(arguments: argparse.Namespace) -> None:
    from mrl.trainer.resolve import check_run

    config = load(arguments.config, arguments.overrides)
    start = Start(
        via=arguments.via, nodes=arguments.nodes, ranks_per_node=arguments.gpus_per_node,
        gpus=config.run.device != "cpu", mode=arguments.mode, container_image=arguments.container_image,
        container_mounts=arguments.container_mounts, node_rank=arguments.node_rank,
        master_addr=arguments.master_addr, arguments=_split(arguments.launcher_args),
    )  # fmt: skip
    words = ["train", arguments.config, *arguments.overrides]
    job = line(start, words)
    # a mistake is told here, not by the cluster
    check_run(config, arguments.nodes * arguments.gpus_per_node, launcher=start.launcher)
    print(job, flush=True)
    if arguments.dry_run:
        job = line(start, words, dry_run=True)
    become(job.variables, job.words)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"--launcher-args {text!r}: {error}. Write it as a shell would read it.") from error


def _doctor(arguments: argparse.Namespace) -> int:
    if _is_first():
        print("mrl: doctor: loading mrl", file=sys.stderr, flush=True)
    with quick_imports():
        from mrl.commands.doctor.doctor import Doctor

    with frozen_imports():
        return Doctor(arguments.config, arguments.overrides, json=arguments.json, timeout_s=arguments.timeout_s).run()


def _from_verl(arguments: argparse.Namespace) -> None:
    from mrl.commands.from_verl.line import read
    from mrl.commands.from_verl.translate import translate

    folders = [f"--config-dir={folder}" for folder in arguments.config_dir]
    words, output = [*folders, *arguments.words_of_verl], arguments.output
    if "-o" in words[:-1]:  # behind the file
        at = words.index("-o")
        output = words[at + 1]
        del words[at : at + 2]
    found = translate(read(words))
    told = {"needs no counterpart here": found.moot, "IS NOT THE SAME HERE": found.differs}
    for title, lines in (told | {"HAS NO PLACE HERE": found.missing}).items():
        for one in lines:
            print(f"mrl: {title}: {one}", file=sys.stderr)
    if output is None:
        print(found.text.rstrip(), flush=True)
    else:
        try:
            Path(output).write_text(found.text, encoding="utf-8")
        except OSError as error:
            raise UserError(f"'{output}' cannot be written: {error.strerror}.") from error
    size = f"{found.num_nodes} host(s) of {found.gpus_per_node} GPU(s)"
    start = found.command("CONFIG" if output is None else shlex.quote(output))
    where = f" (on every host, with K from 0 to {found.num_nodes - 1})" if "--node-rank" in start else ""
    print(f"mrl: for {size}: {start}{where}", file=sys.stderr)


def _report(arguments: argparse.Namespace) -> None:
    from mrl.observability.report import write_report

    print(write_report(Path(arguments.run)))


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Overrides may stand before and after options, which argparse alone does not accept."""
    parser = _parser()
    if not argv:
        parser.print_help(sys.stderr)
        parser.exit(2)
    arguments, rest = parser.parse_known_args(argv)
    if rest and ("overrides" not in arguments or any(item.startswith("-") for item in rest)):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if rest:
        arguments.overrides = [*arguments.overrides, *rest]
    return arguments


def _path(text: str) -> str:
    try:
        return expanded(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return number


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mrl", description="Reinforcement learning of language models at scale.")
    parser.add_argument("--version", action="version", version=f"mrl {__version__}")
    add = parser.add_subparsers(metavar="COMMAND", required=True).add_parser
    _train_words(add("train", help="train; continue where the run folder's last checkpoint is"))
    _evaluate_words(add("evaluate", help="score a checkpoint, or the initial model, on held-out prompts"))
    _serve_words(
        add("serve", help="answer OpenAI's HTTP requests from a checkpoint, a Hugging Face folder or a config")
    )
    _plan_words(add("plan", help="print memory, times and the refit's bytes on a cluster of any size, start nothing"))
    _rehearse_words(add("rehearse", help="run a small copy of the config end to end on this machine's CPU, and report"))
    _launch_words(add("launch", help="start `mrl train` on several ranks or hosts, by a script of launch/"))
    _doctor_words(add("doctor", help="look for what is wrong on this machine, or between a job's ranks"))
    _from_verl_words(add("from-verl", help="write the config of a verl run, and list what has no place in it"))
    _report_words(add("report", help="write report.html of a run folder"))
    return parser


def _train_words(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print config, ranks and the refit's cost, start nothing"
    )
    parser.add_argument("--world-size", type=_positive, metavar="N", help=f"with --dry-run: {RANKS}")
    parser.set_defaults(command=_train)


def _evaluate_words(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--checkpoint", type=_path, metavar="STEP|PATH", help="which one; default: the run folder's newest"
    )
    parser.set_defaults(command=_evaluate)


def _serve_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=_path, metavar="CHECKPOINT|CONFIG",
        help="a run folder or a checkpoint in it, a Hugging Face folder, or a YAML file",
    )  # fmt: skip
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="section.key=value, after the file's")
    parser.add_argument(
        "--checkpoint", type=_path, metavar="STEP|PATH", help="which one; default: the run folder's newest"
    )
    parser.add_argument("--host", default="127.0.0.1", help="default: 127.0.0.1; any other wants MRL_API_KEY set")
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any that is free")
    parser.add_argument(
        "--model-name", metavar="NAME", default="", help="as clients say it; default: the folder's name"
    )
    parser.add_argument(
        "--tool-format", default="hermes", help="how the model calls tools: hermes, qwen3_coder or llama3_json"
    )
    parser.set_defaults(command=_serve)


def _plan_words(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--world-size", type=_positive, metavar="N", help=RANKS)
    parser.add_argument(
        "--hardware",
        type=_path,
        metavar="NAME|FILE",
        default="h100",
        help="a row of mrl/observability/hardware.py, or YAML",
    )
    parser.add_argument("--gpus-per-node", type=_positive, metavar="N", help="default: what the hardware says")
    parser.set_defaults(command=_plan)


def _rehearse_words(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--world-size", type=_positive, metavar="N", help=RANKS)
    parser.add_argument("--max-ranks", type=_positive, metavar="N", help="ranks here; default: up to 8, by free memory")
    parser.add_argument("--stand-ins", action="store_true", help="let presets and sums stand in for files not here")
    parser.add_argument("--output-dir", type=_path, metavar="FOLDER", help="default: runs/rehearse-CONFIG")
    parser.add_argument(
        "--hardware", type=_path, metavar="NAME|FILE", default="h100", help="of the real run, as for mrl plan"
    )
    parser.add_argument("--timeout-s", type=_positive, metavar="S", default=600, help="for everything; default: 600")
    parser.add_argument("--dry-run", action="store_true", help="check and shrink, start nothing")
    parser.set_defaults(command=_rehearse)


def _launch_words(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--via", choices=list(SCRIPTS), required=True, help="who starts the ranks")
    parser.add_argument("--nodes", type=_positive, metavar="N", default=1, help="hosts; default: 1")
    parser.add_argument("--gpus-per-node", type=_positive, metavar="G", default=1, help="ranks of a host; default: 1")
    parser.add_argument("--node-rank", type=int, metavar="K", help="torchrun, several hosts: which one this is")
    parser.add_argument("--master-addr", metavar="HOST", default="", help="torchrun, several hosts: the first one")
    parser.add_argument("--mode", choices=["torchrun", "srun"], default="torchrun", help="sbatch: who starts ranks")
    parser.add_argument("--container-image", metavar="IMAGE", default="", help="sbatch: run in it, by pyxis")
    parser.add_argument("--container-mounts", metavar="FROM:TO", default="", help="sbatch: folders it shares")
    parser.add_argument("--launcher-args", metavar="TEXT", default="", help="more arguments of mpirun or sbatch")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    parser.set_defaults(command=_launch)


def _doctor_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=_path, metavar="CONFIG", nargs="?", help="also look at the files that it names")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="section.key=value, after the file's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--timeout-s", type=_positive, metavar="S", default=60, help="wait for a rank; default: 60")
    parser.set_defaults(command=_doctor)


def _from_verl_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="where the config goes; default: the terminal")
    parser.add_argument(
        "--config-dir", metavar="FOLDER", action="append", default=[], help="where Hydra's config files of the run are"
    )
    parser.add_argument(
        "words_of_verl", metavar="FILE|WORD", nargs=argparse.REMAINDER,
        help="verl's config file, a script that starts it, or its command line",
    )  # fmt: skip
    parser.set_defaults(command=_from_verl)


def _report_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=_path, metavar="RUN", help="run folder")
    parser.set_defaults(command=_report)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=_path, metavar="CONFIG", help="YAML file, for example configs/quickstart.yaml")
    parser.add_argument("overrides", metavar="KEY=VALUE", nargs="*", help="section.key=value, after the file's")
