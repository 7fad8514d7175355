#!/usr/bin/env bash
# One node:       NPROC_PER_NODE=8 launch/torchrun.sh train CONFIG [key=value ...]
# Several nodes:  the same line on each of them, with NNODES, NODE_RANK and MASTER_ADDR set.
# First on a new cluster: `doctor [CONFIG]` in the place of `train CONFIG`; it says what is wrong between the ranks.
# --dry-run as the first argument prints the command and starts nothing.
set -euo pipefail

: "${PYTHON:=python}"
: "${NPROC_PER_NODE:=1}"
: "${NNODES:=1}"
: "${NODE_RANK:=0}"
: "${MASTER_ADDR:=127.0.0.1}"
: "${MASTER_PORT:=29500}"

run() { printf '%q ' "$@" && echo; }
if [ "${1:-}" = --dry-run ]; then shift; else run() { (printf '+ ' && printf '%q ' "$@" && echo) >&2; exec "$@"; }; fi

run "$PYTHON" -m mrl.distributed.torchrun --nnodes "$NNODES" --node-rank "$NODE_RANK" \
  --nproc-per-node "$NPROC_PER_NODE" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" -m mrl "$@"
