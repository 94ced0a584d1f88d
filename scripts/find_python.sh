#!/bin/sh
# Print the path of a Python 3.12 that runs and can make virtual environments.
# `python3.12` on the PATH may be a version manager's shim that fails, so each candidate is tried.
set -u
works() { "$1" -c 'import sys, ensurepip, venv; sys.exit(sys.version_info[:2] != (3, 12))' >/dev/null 2>&1; }
for candidate in "${PYTHON:-}" python3.12 python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python3.12 \
    "$HOME"/.local/share/uv/python/cpython-3.12*/bin/python3.12 \
    /usr/local/bin/python3.12 /opt/python/3.12*/bin/python3.12; do
    [ -n "$candidate" ] || continue
    if works "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
echo "No working Python 3.12 with venv found. Install one, or name it: make ... PYTHON=/path/to/python3.12" >&2
exit 1
