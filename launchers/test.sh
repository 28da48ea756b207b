#!/usr/bin/env bash
# Lint, types, import layers and tests, in .venv (made if it is missing). Arguments go to pytest, e.g. -m slow.
set -euo pipefail
cd "$(dirname "$0")/.."
. launchers/environment.sh dev,plot,bpe,hf,tensorboard,deepspeed

ruff check .
ruff format --check .
mypy
lint-imports --no-logo
pytest "$@"
