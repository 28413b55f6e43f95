#!/bin/sh
# Makes a virtual environment with vLLM for CPUs, this package, and a small model.
#
#     ./setup.sh [FOLDER]        the environment's folder; .venv beside this file by default
set -eu
here=$(cd "$(dirname "$0")" && pwd)
venv=${1:-$here/.venv}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || {
    echo "Python 3.11 to 3.13 is needed, and $python is another; set PYTHON" >&2
    exit 1
}
[ "$(uname -sm)" = "Linux x86_64" ] || {
    echo "Linux on x86_64 is needed: the wheels pinned here are built for it" >&2
    exit 1
}
"$python" -m venv "$venv"
# Every package is in the list, in the version it was tried with, so nothing is left to resolve.
"$venv/bin/python" -m pip install --quiet --no-deps -r "$here/requirements.txt"
"$venv/bin/python" -c 'import sys, torch; sys.exit(torch.version.cuda is not None)' || {
    echo "pip found no build of torch without CUDA; let it see one and start again:" >&2
    echo "PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu $0" >&2
    exit 1
}
"$venv/bin/python" -m pip install --quiet --no-deps "$here/../.."
"$venv/bin/python" "$here/model.py" "$venv/smollm2"
echo "Now run: $venv/bin/python $here/serve.py"
