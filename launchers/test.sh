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
# Unit tests are one process each and share the cores; tests that start ranks have them to themselves.
status=0
pytest --numprocesses 2 --dist loadfile tests/unit || status=1
pytest --ignore tests/unit || status=1
exit $status
