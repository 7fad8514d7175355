#!/usr/bin/env bash
# One node:       NPROC=8 launch/mpirun.sh train CONFIG [key=value ...]
# Several nodes:  once, with the hosts in MPIRUN_ARGS (OpenMPI: "--host a:8,b:8"; MPICH: "-hosts a:8,b:8"); inside an
#                 allocation of SLURM mpirun knows them.
# Needs mpi4py over the library of this mpirun (pip install "mrl[mpi]").
# First on a new cluster: `doctor [CONFIG]` in the place of `train CONFIG`; it says what is wrong between the ranks.
# --dry-run as the first argument prints the command and starts nothing.
set -euo pipefail

: "${PYTHON:=python}"
: "${MPIRUN:=mpirun}"
: "${NPROC:=1}"
: "${MPIRUN_ARGS:=}" # more arguments, split at spaces

run() { printf '%q ' "$@" && echo; }
if [ "${1:-}" = --dry-run ]; then shift; else run() { (printf '+ ' && printf '%q ' "$@" && echo) >&2; exec "$@"; }; fi

# A rank has threads: mpirun would bind it to one core.
# shellcheck disable=SC2086
run "$MPIRUN" -n "$NPROC" --bind-to none $MPIRUN_ARGS "$PYTHON" -m mrl "$@"
