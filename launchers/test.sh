#!/usr/bin/env bash
# Lint, types, import layers and tests, in .venv (made if it is missing). Arguments go to pytest, e.g. -m slow.
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/environment.sh dev,plot,bpe,hf,tensorboard,deepspeed

ruff check .
ruff format --check .
mypy
lint-imports --no-logo
if [ $# -gt 0 ]; then
    pytest "$@"
    exit
fi
# Two at a time; those that start launchers, kill ranks and wait for what the others say have the cores to themselves.
status=0
pytest --numprocesses 2 --dist loadfile tests/unit tests/distributed || status=1
pytest --ignore tests/unit --ignore tests/distributed || status=1
exit $status
