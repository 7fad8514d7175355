#!/usr/bin/env bash
# One node:       NPROC=8 launch/mpirun.sh train CONFIG [key=value ...]
# Several nodes:  once, with the hosts in MPIRUN_ARGS (OpenMPI: "--host a:8,b:8"; MPICH: "-hosts a:8,b:8"); inside an
#                 allocation of SLURM mpirun knows them.
# Needs mpi4py over the library of this mpirun (pip install -e ".[mpi]").
# First on a new cluster: `doctor [CONFIG]` in the place of `train CONFIG`; it says what is wrong between the ranks.
# SIGUSR1 and SIGTERM let the ranks write a checkpoint; a second SIGTERM ends them at once.
# --dry-run as the first argument prints the command and starts nothing.
set -euo pipefail

# Read by MPI_Init; TensorRT-LLM sets it itself, too late.
export OMPI_MCA_coll_ucc_enable="${OMPI_MCA_coll_ucc_enable:-0}"

# What was typed: the message of a run that ends early repeats it.
typed=
for name in PYTHON MPIRUN NPROC MPIRUN_ARGS; do
  [ -z "${!name:-}" ] || typed+="$name=$(printf %q "${!name}") "
done
MRL_STARTED_BY="$typed$(printf '%q ' "$0" "$@")" && export MRL_STARTED_BY

: "${PYTHON:=python}"
: "${MPIRUN:=mpirun}"
: "${NPROC:=1}"
: "${MPIRUN_ARGS:=}" # more arguments, split at spaces

run() { printf '%q ' "$@" && echo; }
start() {
  (printf '+ ' && printf '%q ' "$@" && echo) >&2
  "$@" <&0 &
  mpirun=$!
  # Every mpirun hands SIGUSR1 on; of SIGTERM OpenMPI kills the ranks within 2 s.
  trap 'kill -USR1 "$mpirun"' USR1
  trap 'kill -USR1 "$mpirun"; trap "kill -TERM $mpirun" TERM' TERM
  while kill -0 "$mpirun" 2>/dev/null; do wait "$mpirun" || true; done # a signal ends `wait` early
  wait "$mpirun"
}
if [ "${1:-}" = --dry-run ]; then shift; else run() { start "$@"; }; fi

# A rank has threads: mpirun would bind it to one core.
# shellcheck disable=SC2086
run "$MPIRUN" -n "$NPROC" --bind-to none $MPIRUN_ARGS "$PYTHON" -m mrl "$@"
