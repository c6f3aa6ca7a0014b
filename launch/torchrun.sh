#!/usr/bin/env bash
# launch/train.py under torchrun, on one host or several.
#
#   launch/torchrun.sh --ds_config ds_configs/zero3.json ...                      every GPU of this host
#   RANKS=2 launch/torchrun.sh ...                                                two ranks (also: two CPU processes)
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=host-a launch/torchrun.sh ...                on host-a
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=host-a launch/torchrun.sh ...                on host-b, same arguments
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

if [ -z "${RANKS:-}" ]; then
    RANKS=$({ nvidia-smi -L 2>/dev/null || true; } | grep -c '^GPU' || true)
    [ "$RANKS" -gt 0 ] || RANKS=1
fi

if [ "${NNODES:-1}" -gt 1 ]; then
    meet=(--nnodes "$NNODES" --node_rank "${NODE_RANK:?which host this is, from 0}"
          --master_addr "${MASTER_ADDR:?name of host 0}" --master_port "${MASTER_PORT:-29500}")
else
    meet=(--standalone) # finds a free port by itself
fi
exec torchrun "${meet[@]}" --nproc_per_node "$RANKS" "$here/train.py" "$@"
