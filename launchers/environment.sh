# Sourced by the other launchers: makes and activates .venv with the pinned versions, once.
# Usage: . launchers/environment.sh EXTRAS        e.g. "plot,bpe" or "dev,plot,bpe,hf"
# A stamp in the environment remembers what is installed, so a second start costs nothing.

python=${PYTHON:-python3}
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
    echo "expected Python 3.11 or newer, got $("$python" --version 2>&1); set PYTHON to a newer interpreter" >&2
    exit 2
fi
if [ ! -x .venv/bin/python ]; then
    "$python" -m venv .venv || {
        echo "expected the venv module, got an error; install it (Debian: apt-get install python3-venv)" >&2
        exit 2
    }
fi
. .venv/bin/activate
stamp="$(cat constraints.txt pyproject.toml | sha256sum)${ECO_DIST_TEST_DEEPSPEED:-}"
if [ "$(cat ".venv/installed-$1" 2>/dev/null)" != "$stamp" ]; then
    # torch first and by its exact version: a later package's looser range must not bring another build.
    pip install --quiet "$(grep '^torch==' constraints.txt)"
    # DeepSpeed is to compile nothing while it is installed; its operations are built when they are used.
    DS_BUILD_OPS=0 pip install --quiet --constraint constraints.txt --editable ".[$1]"
    # megablocks asks for an older torch, and what it compiles is replaced by plain torch (docs/moe.md).
    case ",$1," in *,dev,*) pip install --quiet --no-deps --no-build-isolation --constraint constraints.txt megablocks stanford-stk ;; esac
    if [ -n "${ECO_DIST_TEST_DEEPSPEED:-}" ]; then
        # Another version than the pinned one, to see whether the engine still fits it; torch stays as it is.
        DS_BUILD_OPS=0 pip install --quiet "$(grep '^torch==' constraints.txt)" "deepspeed==$ECO_DIST_TEST_DEEPSPEED"
    fi
    echo "$stamp" >".venv/installed-$1"
fi
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
