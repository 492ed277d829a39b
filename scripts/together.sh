#!/bin/bash
# Runs commands at the same time and waits for all of them; fails if one of them fails.
#
#   together.sh 'make this' 'make that'
set -u

pids=()
for command in "$@"; do
    bash -euo pipefail -c "$command" &
    pids+=($!)
done
status=0
for pid in "${pids[@]}"; do
    wait "$pid" || status=$?
done
exit "$status"
