#!/usr/bin/env bash
# One node:       NPROC=8 launch/mpirun.sh train CONFIG [key=value ...]
# Several nodes:  once, with the hosts in MPIRUN_ARGS (OpenMPI: "--host a:8,b:8"; MPICH: "-hosts a:8,b:8"); in a SLURM
#                 allocation, mpirun knows the hosts.
# Needs mpi4py, built against the MPI library of this mpirun (pip install -e ".[mpi]").
# First on a new cluster: `doctor [CONFIG]` instead of `train CONFIG`; it reports problems between the ranks.
# On SIGUSR1 or SIGTERM the ranks write a checkpoint. A second SIGTERM ends them at once.
# --dry-run as the first argument prints the command and starts nothing.
set -euo pipefail

# MPI_Init reads this variable. TensorRT-LLM sets it too, but too late.
export OMPI_MCA_coll_ucc_enable="${OMPI_MCA_coll_ucc_enable:-0}"

# The command as typed, which the message of a run that ends early repeats.
typed=
for name in PYTHON MPIRUN NPROC MPIRUN_ARGS; do
  [ -z "${!name:-}" ] || typed+="$name=$(printf %q "${!name}") "
done
MRL_STARTED_BY="$typed$(printf '%q ' "$0" "$@")" && export MRL_STARTED_BY

: "${PYTHON:=python}"
: "${MPIRUN:=mpirun}"
: "${NPROC:=1}"
: "${MPIRUN_ARGS:=}" # more arguments, separated by spaces

run() { printf '%q ' "$@" && echo; }
start() {
  (printf '+ ' && printf '%q ' "$@" && echo) >&2
  "$@" <&0 &
  mpirun=$!
  # Every mpirun forwards SIGUSR1. On SIGTERM, OpenMPI kills the ranks within 2 s.
  trap 'kill -USR1 "$mpirun"' USR1
  trap 'kill -USR1 "$mpirun"; trap "kill -TERM $mpirun" TERM' TERM
  while kill -0 "$mpirun" 2>/dev/null; do wait "$mpirun" || true; done # a signal interrupts `wait`
  wait "$mpirun"
}
if [ "${1:-}" = --dry-run ]; then shift; else run() { start "$@"; }; fi

# A rank has several threads, which mpirun would otherwise bind to one core.
# shellcheck disable=SC2086
run "$MPIRUN" -n "$NPROC" --bind-to none $MPIRUN_ARGS "$PYTHON" -m mrl "$@"
