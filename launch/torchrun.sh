#!/usr/bin/env bash
# One node:       NPROC_PER_NODE=8 launch/torchrun.sh train CONFIG [key=value ...]
# Several nodes:  the same line on each of them, with NNODES, NODE_RANK and MASTER_ADDR set, and one secret text in
#                 MRL_JOB_TOKEN (`openssl rand -hex 16`), by which the job's processes authenticate each other.
# First on a new cluster: `doctor [CONFIG]` instead of `train CONFIG`; it reports problems between the ranks.
# MAX_RESTARTS=3: after a failure all ranks restart, at most three times, and resume from the last checkpoint. The host of
# MASTER_ADDR must stay up. Any other host may be lost if the same line is started there again.
# --dry-run as the first argument prints the command and starts nothing.
set -euo pipefail

# The command as typed, which the message of a run that ends early repeats.
typed=
for name in PYTHON NPROC_PER_NODE NNODES NODE_RANK MASTER_ADDR MASTER_PORT MAX_RESTARTS; do
  [ -z "${!name:-}" ] || typed+="$name=$(printf %q "${!name}") "
done
MRL_STARTED_BY="$typed$(printf '%q ' "$0" "$@")" && export MRL_STARTED_BY

: "${PYTHON:=python}"
: "${NPROC_PER_NODE:=1}"
: "${NNODES:=1}"
: "${NODE_RANK:=0}"
: "${MASTER_ADDR:=127.0.0.1}"
: "${MASTER_PORT:=29500}"
: "${MAX_RESTARTS:=0}"

run() { printf '%q ' "$@" && echo; }
if [ "${1:-}" = --dry-run ]; then shift; else run() { (printf '+ ' && printf '%q ' "$@" && echo) >&2; exec "$@"; }; fi

if [ "$NNODES" != 1 ] && [ "$NODE_RANK" = 0 ] && [ -z "${MRL_JOB_TOKEN:-}" ]; then
  echo "torchrun.sh: warning: several hosts without MRL_JOB_TOKEN: who reaches port $MASTER_PORT is believed" >&2
fi
place=(--node-rank "$NODE_RANK" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT")
if [ "$MAX_RESTARTS" -gt 0 ]; then
  # After a restart, hosts need a rendezvous that supports rejoining, and a new store instead of that of the last attempt.
  place=(--max-restarts "$MAX_RESTARTS" --rdzv-backend c10d --rdzv-id mrl --rdzv-endpoint "$MASTER_ADDR:$MASTER_PORT"
    --rdzv-conf "is_host=$((NODE_RANK == 0))")
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
fi
run "$PYTHON" -m mrl.distributed.watchdog.torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" "${place[@]}" -m mrl "$@"
