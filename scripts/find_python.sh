#!/bin/sh
# Print the path of a Python of one version that runs and can make virtual environments: find_python.sh [3.12]
# `python3.12` on the PATH may be a version manager's shim that fails, so each candidate is tried.
set -u
version="${1:-3.12}"
works() {
    "$1" -c 'import sys, ensurepip, venv; sys.exit("%d.%d" % sys.version_info[:2] != sys.argv[1])' "$version" \
        >/dev/null 2>&1
}
for candidate in "${PYTHON:-}" "python$version" python3 python \
    "${PYENV_ROOT:-$HOME/.pyenv}/versions/$version"*/bin/"python$version" \
    "$HOME/.local/share/uv/python/cpython-$version"*/bin/"python$version" \
    "/usr/local/bin/python$version" "/opt/python/$version"*/bin/"python$version"; do
    [ -n "$candidate" ] || continue
    if works "$candidate"; then
        command -v "$candidate"
        exit 0
    fi
done
echo "No working Python $version with venv found. Install one, or name it: make ... PYTHON=/path/to/python$version" >&2
exit 1
