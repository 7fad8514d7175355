"""The command line: `mrl train|evaluate|serve|plan|rehearse|launch|...`, the same as `python -m mrl ...`.

Exit statuses: 0 success; 2 a `UserError`, printed without a traceback; 70 a rank failed, hung or was lost (printed by
`distributed/watchdog/watchdog.py`); 75 a training run that stopped early in an orderly way and resumes when it is
started again; 130 interrupted; 143 SIGTERM. Modules that need torch are imported inside the commands, so that
`mrl --help` and an error in a config take no time.
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
from mrl.checkpoint.run_dir.resume_hint import resume_hint
from mrl.commands.launch import SCRIPTS, LaunchOptions, launch_command
from mrl.config.config import Config, load
from mrl.config.packaged import find_config
from mrl.config.paths import IsPath, expand_path
from mrl.distributed.launch import exec_program, get_env, get_launcher_env
from mrl.distributed.watchdog import signals
from mrl.distributed.watchdog.abort import claim_message
from mrl.distributed.watchdog.gc_control import gc_disabled, gc_frozen
from mrl.distributed.watchdog.graceful_stop import END_TIME, Stop, limits
from mrl.distributed.watchdog.signals import REQUEUE, Terminated
from mrl.distributed.watchdog.stdio import tolerate_closed_pipes
from mrl.errors import ClusterError, UserError, printable
from mrl.trainer.validation.off_policy import describe_correction

WORLD_SIZE_HELP = (
    "number of ranks of the real run; default: nodes x GPUs as in the config's file name (4x8), else the fewest ranks "
    "that the config's parallel layout allows"
)

CONVERTER_NAMES = (
    "hf-to-megatron", "hf-to-trtllm", "hf-to-hf", "megatron-to-hf", "megatron-to-trtllm", "megatron-to-peft",
    "trtllm-to-hf", "inspect", "verify",
)  # fmt: skip
"""Keys of CONVERTERS in `convert/converters.py`, which imports torch."""

MAX_MESSAGE_LENGTH = 8000
"""Longest error message that is printed in full, characters: twice the longest message of mrl's own."""

SILENT_RANK_WAIT_S = 10.0
"""Delay before the exit of a rank that prints nothing: launchers kill all ranks when the first one exits, and the rank
that prints the error must exit first.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status.

    Args:
        argv: Arguments without the program's name; None: those of this process, which is about to exit, so the signal
            handlers stay installed. Otherwise the previous handlers are restored.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    handlers = signals.install_handlers(is_training=given[:1] == ["train"])
    try:
        return _run(given)
    finally:
        if argv is not None:
            signals.restore_handlers(handlers)


def _run(argv: Sequence[str]) -> int:
    arguments = _parse(argv)
    arguments.argv = argv
    arguments.resume_hint = ""
    arguments.signal_hint = str  # a function; commands that can be resumed replace it
    tolerate_closed_pipes()
    try:
        with signals.raise_on_signals(_is_rank_0, lambda: str(arguments.signal_hint())):
            status: int | None = arguments.command(arguments)
    except UserError as error:
        if _should_print(error):
            print(f"mrl: error: {_shortened(str(error))}{arguments.resume_hint}", file=sys.stderr, flush=True)
        else:
            time.sleep(SILENT_RANK_WAIT_S)
        return 2
    except ClusterError as error:
        if claim_message(f"cluster {os.getppid()}"):  # all ranks of a host raise the same error
            print(f"mrl: error: {error}", file=sys.stderr, flush=True)
        return signals.FAILED
    except KeyboardInterrupt:
        signals.print_signal_message(signal.SIGINT)
        return signals.INTERRUPTED
    except Terminated as stop:
        signals.print_signal_message(stop.number)
        return stop.status
    return status or 0


def _shortened(text: str) -> str:
    """Returns the message, its middle cut out if it is longer than `MAX_MESSAGE_LENGTH`."""
    return (
        text
        if len(text) <= MAX_MESSAGE_LENGTH
        else f"{text[: MAX_MESSAGE_LENGTH // 2]} [...] {text[-MAX_MESSAGE_LENGTH // 4 :]}"
    )


def _is_rank_0() -> bool:
    """Returns whether this is rank 0; runs inside signal handlers, where nothing may raise."""
    try:
        return get_launcher_env().rank == 0
    except UserError:
        return True


def _should_print(error: UserError) -> bool:
    """Returns whether this rank prints the error.

    Rank 0 prints an error that all ranks raise together. Before the ranks are connected, local rank 0 of each host
    prints: the ranks of a host read the same files and raise the same error.
    """
    try:
        here = get_launcher_env()
    except UserError:
        return True  # the error is in the launcher's variables
    return here.rank == 0 if error.on_all_ranks else here.local_rank == 0


def _train(arguments: argparse.Namespace) -> int:
    config = load(arguments.config, arguments.overrides)
    if arguments.dry_run:
        from mrl.commands.plan.dryrun import describe
        from mrl.trainer.validation.world_size import world_size

        started = get_launcher_env().world_size
        size = world_size(config, arguments.config, arguments.world_size, started=started)
        launcher = get_launcher_env().launcher if started > 1 else None
        described = describe(config, size, launcher=launcher, placeholders=arguments.stand_ins)
        if get_launcher_env().rank == 0:
            print(described, flush=True)
        return 0

    if arguments.stand_ins:
        raise UserError(
            "--stand-ins without --dry-run: a training needs its model and data. Add --dry-run, or drop it."
        )

    def log(what: str) -> None:
        if get_launcher_env().rank == 0:
            print(f"mrl: {what}.{resume_hint(config, arguments.argv)}", file=sys.stderr, flush=True)

    arguments.signal_hint = lambda: resume_hint(config, arguments.argv)
    if get_launcher_env().rank == 0 and config.observe.console != "off":
        print(_start_line(config), flush=True)
    with gc_disabled():
        # imported before `Stop` handles SIGTERM: an exception that a signal handler raises in an import gets lost
        from mrl.train import train
    stop = Stop(
        config.run, ends=limits(config.run, get_env(END_TIME)), keeps_time=get_launcher_env().rank == 0, say=log
    )
    try:
        with gc_frozen(), stop.handle_signals():
            train(config, stop)
            if stop.why:
                _write_early_report(config)
    except KeyboardInterrupt:
        _write_early_report(config)
        raise
    except UserError as error:
        if error.at:
            arguments.resume_hint = resume_hint(config, arguments.argv, error.at)
        raise
    return REQUEUE if stop.why else 0


def _write_early_report(config: Config) -> None:
    """Writes the HTML report of a run that ends early, on rank 0; errors are ignored."""
    if get_launcher_env().rank == 0 and config.observe.report:
        from mrl.observability.report import write_report

        with suppress(UserError):
            write_report(Path(config.run.output_dir))


def _start_line(config: Config) -> str:
    """Returns the first line of a run's output, printed before torch is imported, which can take a while."""
    model, ranks = config.model.path or config.model.preset, get_launcher_env().world_size
    how = " asynchronously" if config.train.mode == "async" else ""
    what = f"{config.algorithm.name}{how} on {model}, {ranks} {'rank' if ranks == 1 else 'ranks'}"
    return printable(f"mrl {__version__}: starting {what}, in {config.run.output_dir}{describe_correction(config)}")


def _evaluate(arguments: argparse.Namespace) -> None:
    with gc_disabled():
        from mrl.train import evaluate

    with gc_frozen():
        metrics = evaluate(load(arguments.config, arguments.overrides), arguments.checkpoint)
    if get_launcher_env().rank == 0:
        print(json.dumps(metrics, indent=1), flush=True)


def _serve(arguments: argparse.Namespace) -> None:
    with gc_disabled():
        from mrl.commands.serve.serve import ListenOptions, check, resolve_model, serve

    config, checkpoint = resolve_model(arguments.source, arguments.overrides, arguments.checkpoint)
    key = get_env("MRL_API_KEY").get("MRL_API_KEY", "")
    listen = ListenOptions(arguments.host, arguments.port, arguments.model_name, key, arguments.tool_format)
    check(listen)
    serve(config, checkpoint, listen, lambda text: print(f"mrl: {text}", flush=True))


def _plan(arguments: argparse.Namespace) -> None:
    from mrl.commands.plan.plan import as_json, describe, predict
    from mrl.observability.hardware import load_hardware
    from mrl.trainer.validation.world_size import world_size

    hardware = load_hardware(arguments.hardware)
    if arguments.gpus_per_node is not None:
        hardware = replace(hardware, gpus_per_node=arguments.gpus_per_node)
    config = load(arguments.config, arguments.overrides)
    ranks = world_size(config, arguments.config, arguments.world_size).ranks
    metrics = None if arguments.metrics is None else Path(arguments.metrics)
    length = arguments.expected_response_length
    found = predict(config, ranks, hardware, mean_length=length, metrics=metrics, placeholders=arguments.stand_ins)
    print(json.dumps(as_json(found), indent=1) if arguments.json else describe(found), flush=True)


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
    from mrl.trainer.run_plan import check_run

    config = load(arguments.config, arguments.overrides)
    start = LaunchOptions(
        via=arguments.via, nodes=arguments.nodes, ranks_per_node=arguments.gpus_per_node,
        gpus=config.run.device != "cpu", mode=arguments.mode, container_image=arguments.container_image,
        container_mounts=arguments.container_mounts, container_runtime=arguments.container_runtime,
        node_rank=arguments.node_rank,
        master_addr=arguments.master_addr, arguments=_split(arguments.launcher_args),
    )  # fmt: skip
    words = ["train", arguments.config, *arguments.overrides]
    job = launch_command(start, words)
    # checked here, so that an invalid config fails before the job is queued
    check_run(config, arguments.nodes * arguments.gpus_per_node, launcher=start.launcher)
    print(job, flush=True)
    if arguments.dry_run:
        job = launch_command(start, words, dry_run=True)
    exec_program(job.variables, job.argv)


def _split(text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"--launcher-args {text!r}: {error}. Quote it as for a shell.") from error


def _doctor(arguments: argparse.Namespace) -> int:
    if _is_rank_0():
        print("mrl: doctor: loading mrl", file=sys.stderr, flush=True)
    with gc_disabled():
        from mrl.commands.doctor.doctor import Doctor

    with gc_frozen():
        return Doctor(arguments.config, arguments.overrides, json=arguments.json, timeout_s=arguments.timeout_s).run()


def _from_verl(arguments: argparse.Namespace) -> int:
    from mrl.commands.from_verl.command_line import read_settings
    from mrl.commands.from_verl.translate import translate

    folders = [f"--config-dir={folder}" for folder in arguments.config_dir]
    argv, output = [*folders, *arguments.verl_arguments], arguments.output
    if "-o" in argv[:-1]:  # argparse.REMAINDER swallows options after verl's file
        at = argv.index("-o")
        output = argv[at + 1]
        del argv[at : at + 2]
    lossy = arguments.lossy or "--lossy" in argv
    found = translate(read_settings([word for word in argv if word != "--lossy"]))
    others = [line for line in found.missing if line not in found.lost]
    notes = {
        "not needed in mrl": found.moot, "DIFFERENT IN MRL": found.differs, "NOT SUPPORTED": others,
        "LOST": found.lost,
    }  # fmt: skip
    for title, lines in notes.items():
        for text in lines:
            print(f"mrl: {title}: {text}", file=sys.stderr)
    name = "CONFIG" if output is None else shlex.quote(output)
    if output is None:
        print(found.document(name).rstrip(), flush=True)
    else:
        try:
            Path(output).write_text(found.document(name), encoding="utf-8")
        except OSError as error:
            raise UserError(f"'{output}' cannot be written: {error.strerror}.") from error
    if found.lost:
        accepted = "accepted with --lossy" if lossy else "status 2; --lossy accepts this"
        print(
            f"mrl: {len(found.lost)} setting(s) that change the training are lost ({accepted}). They are listed above "
            "as LOST, and in comments of the config.", file=sys.stderr,
        )  # fmt: skip
    print(f"mrl: to check it: mrl train {name} --dry-run --world-size {found.world_size}", file=sys.stderr)
    start = found.command(name)
    where = f" (on every host, with K from 0 to {found.num_nodes - 1})" if "--node-rank" in start else ""
    print(f"mrl: for {found.num_nodes} host(s) of {found.gpus_per_node} GPU(s): {start}{where}", file=sys.stderr)
    return 2 if found.lost and not lossy else 0


def _data(arguments: argparse.Namespace) -> None:
    from mrl.commands.data.prepare import DataOptions, describe_sets, prepare

    if arguments.name is None:
        print(describe_sets(), flush=True)
        return
    options = DataOptions(
        arguments.name,
        arguments.output,
        arguments.train,
        arguments.val,
        arguments.max_train,
        arguments.max_val,
        arguments.force,
        arguments.folder,
        arguments.split,
    )
    written, lines = prepare(options)
    for one in written.values():
        print(f"mrl: {printable(str(one))}", file=sys.stderr)
    if missing := {"train", "val"} - written.keys():
        print(f"mrl: no {'held-out' if 'val' in missing else 'training'} rows were written", file=sys.stderr)
    print("mrl: add these lines to your config:", file=sys.stderr, flush=True)
    print(lines.rstrip(), flush=True)


def _report(arguments: argparse.Namespace) -> None:
    from mrl.observability.report import write_report

    print(write_report(Path(arguments.run)))


def _convert(arguments: argparse.Namespace) -> int:
    arguments.signal_hint = lambda: " Repeat the command to continue."
    with gc_disabled():
        from mrl.commands.convert.converters import CONVERTERS

    with gc_frozen():
        name = arguments.converter
        return CONVERTERS[name].run(name, arguments.converter_arguments, f"mrl convert {name}")


def _configs(arguments: argparse.Namespace) -> None:
    from mrl.commands.packaged import show_configs

    show_configs(arguments.name, arguments.output)


def _docs(arguments: argparse.Namespace) -> None:
    from mrl.commands.packaged import show_docs

    show_docs(arguments.page)


def _schema(arguments: argparse.Namespace) -> None:
    from mrl.trainer.validation.json_schema import json_schema

    print(json.dumps(json_schema(), indent=1), flush=True)


def _completion(arguments: argparse.Namespace) -> None:
    from mrl.commands.completion import SCRIPTS as SHELLS
    from mrl.commands.completion import candidates

    if arguments.shell in SHELLS:
        print(SHELLS[arguments.shell], end="", flush=True)
    for word in candidates(command_parsers(), arguments.words) if arguments.shell == "candidates" else ():
        print(word)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Returns the parsed arguments; overrides may be before and after options, which argparse alone does not accept."""
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
        return expand_path(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _output_path(text: str) -> str:
    try:
        return expand_path(text, IsPath(is_written=True))
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _config_path(text: str) -> str:
    return find_config(_path(text))


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} came, expected a number above 0")
    return number


def command_parsers() -> dict[str, argparse.ArgumentParser]:
    """Returns the parser of each command by its name, in the order of `mrl --help`."""
    return next(dict(action.choices) for action in _parser()._actions if isinstance(action.choices, dict))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mrl", description="Reinforcement learning of language models at scale.")
    parser.add_argument("--version", action="version", version=f"mrl {__version__}")
    add = parser.add_subparsers(metavar="COMMAND", required=True).add_parser
    _train_options(add("train", help="train a model; resumes from the newest checkpoint in the run folder"))
    _evaluate_options(add("evaluate", help="score a checkpoint, or the initial model, on the validation prompts"))
    _serve_options(
        add("serve", help="serve a checkpoint, a Hugging Face folder or a config over an OpenAI-style HTTP API")
    )
    _plan_options(add("plan", help="estimate memory, step time and weight-sync traffic on any cluster; starts nothing"))
    _rehearse_options(add("rehearse", help="run a shrunken copy of the config end to end on this machine's CPU"))
    _launch_options(add("launch", help="start `mrl train` on several ranks or hosts with torchrun, mpirun or sbatch"))
    _doctor_options(add("doctor", help="diagnose this machine, or the network between a job's ranks"))
    _from_verl_options(add("from-verl", help="translate a verl run into a config and list what is not supported"))
    _data_options(add("data", help="write a public data set as training and held-out files, and its config lines"))
    _report_options(add("report", help="write report.html for a run folder"))
    _convert_options(add("convert", help="convert, compare or describe checkpoints"))
    _configs_options(add("configs", help="list the configs that come with mrl, or print one"))
    _docs_options(add("docs", help="list the pages of the documentation, or print one"))
    _schema_options(add("schema", help="print the JSON Schema of a config, with which editors complete and check YAML"))
    _completion_options(add("completion", help="print the script that completes commands and keys in a shell"))
    return parser


def _train_options(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument(
        "--dry-run", action="store_true", help="print the resolved config, the rank layout and the weight-sync traffic"
    )
    parser.add_argument("--world-size", type=_positive, metavar="N", help=f"with --dry-run: {WORLD_SIZE_HELP}")
    _add_stand_ins(parser, "with --dry-run: ")
    parser.set_defaults(command=_train)


def _evaluate_options(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    _add_checkpoint(parser)
    parser.set_defaults(command=_evaluate)


def _serve_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "source", type=_config_path, metavar="CHECKPOINT|CONFIG",
        help="a run folder or a checkpoint in it, a Hugging Face folder, or a config (YAML)",
    )  # fmt: skip
    _add_overrides(parser)
    _add_checkpoint(parser)
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1; others require MRL_API_KEY"
    )
    parser.add_argument("--port", type=int, default=8000, help="default: 8000; 0: any free port")
    parser.add_argument(
        "--model-name",
        metavar="NAME",
        default="",
        help="model name in the API; default: the name of the run's folder or of the Hugging Face folder",
    )
    parser.add_argument(
        "--tool-format", default="hermes", help="format of the model's tool calls: hermes, qwen3_coder or llama3_json"
    )
    parser.set_defaults(command=_serve)


def _plan_options(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--world-size", type=_positive, metavar="N", help=WORLD_SIZE_HELP)
    _add_hardware(parser)
    parser.add_argument("--gpus-per-node", type=_positive, metavar="N", help="default: that of --hardware")
    _add_stand_ins(parser)
    lengths = parser.add_mutually_exclusive_group()
    lengths.add_argument(
        "--expected-response-length", type=_positive, metavar="N",
        help="mean response length, tokens, for the times; default: every response has its full length",
    )  # fmt: skip
    lengths.add_argument(
        "--metrics", type=_path, metavar="METRICS.JSONL",
        help="metrics of a run, or its folder: mean and longest response of its last steps are expected",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(command=_plan)


def _rehearse_options(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--world-size", type=_positive, metavar="N", help=WORLD_SIZE_HELP)
    parser.add_argument(
        "--max-ranks", type=_positive, metavar="N", help="most ranks on this machine; default: up to 8, by free memory"
    )
    _add_stand_ins(parser)
    parser.add_argument("--output-dir", type=_output_path, metavar="FOLDER", help="default: runs/rehearse-CONFIG")
    _add_hardware(parser)
    parser.add_argument(
        "--timeout-s", type=_positive, metavar="S", default=600, help="limit for the rehearsal in seconds; default: 600"
    )
    parser.add_argument("--dry-run", action="store_true", help="check and shrink the config, start nothing")
    parser.set_defaults(command=_rehearse)


def _launch_options(parser: argparse.ArgumentParser) -> None:
    _add_config(parser)
    parser.add_argument("--via", choices=list(SCRIPTS), required=True, help="launcher that starts the ranks")
    parser.add_argument("--nodes", type=_positive, metavar="N", default=1, help="number of hosts; default: 1")
    parser.add_argument("--gpus-per-node", type=_positive, metavar="G", default=1, help="ranks per host; default: 1")
    parser.add_argument("--node-rank", type=int, metavar="K", help="torchrun on several hosts: index of this host")
    parser.add_argument("--master-addr", metavar="HOST", default="", help="torchrun on several hosts: the first host")
    parser.add_argument(
        "--mode", choices=["torchrun", "srun"], default="torchrun", help="sbatch: program that starts a node's ranks"
    )
    parser.add_argument("--container-image", metavar="IMAGE", default="", help="sbatch: container image")
    parser.add_argument("--container-mounts", metavar="FROM:TO", default="", help="sbatch: container mounts")
    parser.add_argument(
        "--container-runtime", choices=["pyxis", "apptainer"], default="pyxis",
        help="sbatch: program that opens the image; default: pyxis",
    )  # fmt: skip
    parser.add_argument("--launcher-args", metavar="TEXT", default="", help="extra arguments for mpirun or sbatch")
    parser.add_argument("--dry-run", action="store_true", help="print the commands, start nothing")
    parser.set_defaults(command=_launch)


def _doctor_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=_config_path, metavar="CONFIG", nargs="?", help="also check the files of this config"
    )
    _add_overrides(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument(
        "--timeout-s", type=_positive, metavar="S", default=60, help="seconds to wait for another rank; default: 60"
    )
    parser.set_defaults(command=_doctor)


def _from_verl_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write the config to; default: standard output")
    parser.add_argument(
        "--config-dir", metavar="FOLDER", action="append", default=[], help="folder with the run's Hydra config files"
    )
    parser.add_argument(
        "--lossy", action="store_true", help="exit with status 0 even if settings that change the training are lost"
    )
    parser.add_argument(
        "verl_arguments", metavar="FILE|WORD", nargs=argparse.REMAINDER,
        help="verl's config file, a shell script that starts verl, or verl's command line",
    )  # fmt: skip
    parser.set_defaults(command=_from_verl)


def _data_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="data set; without it they are listed")
    parser.add_argument(
        "-o", "--out", "--output", dest="output", type=_path, metavar="FOLDER",
        help="folder to write to; default: data/NAME",
    )  # fmt: skip
    parser.add_argument("--force", action="store_true", help="replace existing files with other content")
    parser.add_argument(
        "--from", dest="folder", type=_path, metavar="FOLDER",
        help="folder with the files of the data set, named as on the hub or after their splits; nothing is downloaded",
    )  # fmt: skip
    parser.add_argument(
        "--split", choices=("validation", "val", "dev", "test"),
        help="split of --from that is held out; default: the data set's own, else the first of these that exists",
    )  # fmt: skip
    for side, what in (("train", "training"), ("val", "held-out")):
        parser.add_argument(
            f"--{side}", metavar="FILE", nargs="+", default=[],
            help=f"raw {what} files instead of those on the hub: JSONL or parquet, or hf://datasets/OWNER/NAME/PATH",
        )  # fmt: skip
        parser.add_argument(f"--max-{side}", type=_positive, metavar="N", help=f"most {what} rows; default: all")
    parser.set_defaults(command=_data)


def _report_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", type=_path, metavar="RUN", help="run folder")
    parser.set_defaults(command=_report)


def _convert_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "converter", choices=CONVERTER_NAMES, metavar="NAME",
        help=f"{', '.join(CONVERTER_NAMES)}; `mrl convert NAME --help` lists its options",
    )  # fmt: skip
    parser.add_argument("converter_arguments", metavar="OPTIONS", nargs=argparse.REMAINDER)
    parser.set_defaults(command=_convert)


def _configs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", nargs="?", help="config to print; default: list their names")
    parser.add_argument("-o", "--output", metavar="FILE", help="new file to write it to; default: standard output")
    parser.set_defaults(command=_configs)


def _docs_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("page", metavar="PAGE", nargs="?", help="page to print; default: list their names")
    parser.set_defaults(command=_docs)


def _schema_options(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(command=_schema)


def _completion_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "shell", choices=["bash", "zsh", "fish", "candidates"], metavar="SHELL",
        help="bash, zsh or fish; `candidates WORD ...` prints what the last word can become",
    )  # fmt: skip
    parser.add_argument("words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(command=_completion)


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "config", type=_config_path, metavar="CONFIG",
        help="YAML file, or the name of a config that comes with mrl, for example quickstart",
    )  # fmt: skip
    _add_overrides(parser)


def _add_overrides(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "overrides", metavar="KEY=VALUE", nargs="*", help="settings that replace the file's, for example run.seed=1"
    )


def _add_checkpoint(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint", type=_path, metavar="STEP|PATH",
        help="step number or folder of the checkpoint; default: the newest in the run folder",
    )  # fmt: skip


def _add_stand_ins(parser: argparse.ArgumentParser, when: str = "") -> None:
    text = f"{when}use placeholders (presets, addition tasks) for files that are missing"
    parser.add_argument("--stand-ins", action="store_true", help=text)


def _add_hardware(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--hardware", type=_path, metavar="NAME|FILE", default="h100",
        help="GPU type of the real run: a name from mrl/observability/hardware.py or a YAML file; default: h100",
    )  # fmt: skip
