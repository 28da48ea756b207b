#!/usr/bin/env bash
# Runs a command, and again as often as MAX_RESTARTS while it fails; what a user has to mend (exit code 2) ends it.
# Usage: launchers/restart.sh MAX_RESTARTS COMMAND ...
set -uo pipefail

max_restarts=$1
shift
stopped=0 child=
# Whoever ends this script wants no restart. The command runs beside it, or bash would hear of a signal only afterwards.
trap 'stopped=1; [ -z "$child" ] || kill -TERM "$child" 2>/dev/null' TERM INT
for ((left = max_restarts; ; left--)); do
    "$@" &
    child=$!
    code=0
    wait "$child" || code=$?
    if [ "$stopped" = 1 ]; then
        wait "$child" # until it has ended its ranks
        exit "$code"
    fi
    if [ "$code" = 0 ] || [ "$code" = 2 ]; then
        exit "$code"
    fi
    if [ "$left" = 0 ]; then
        echo "restart.sh: expected the run to end well, got exit code $code after $max_restarts restarts, and none is left; look for the first error above" >&2
        exit "$code"
    fi
    echo "restart.sh: the run ended with exit code $code and starts again; $((left - 1)) of $max_restarts restarts are left" >&2
done
