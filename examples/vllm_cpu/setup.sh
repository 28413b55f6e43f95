#!/bin/sh
# Creates a virtual environment with vLLM for CPUs, this package, and a small model.
#
#     ./setup.sh [FOLDER]        folder of the environment; by default .venv beside this file
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-$here/.venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "Python 3.11 to 3.13 is required, but $python is another version; set PYTHON" >&2
    exit 1
}
[ "$(uname -sm)" = "Linux x86_64" ] || {
    echo "Linux on x86_64 is required by the pinned wheels" >&2
    exit 1
}
"$python" -m venv "$venv"
# The list pins every package, so pip has nothing to resolve.
"$venv/bin/python" -m pip install --quiet --no-deps -r "$here/requirements.txt"
"$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || {
    echo "pip found no build of torch without CUDA; give it access to one and try again:" >&2
    echo "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu $0" >&2
    exit 1
}
"$venv/bin/python" -m pip install --quiet --no-deps "$here/../.."
"$venv/bin/python" "$here/model.py" "$venv/smollm2"
echo "Now run: $venv/bin/python $here/serve.py"
