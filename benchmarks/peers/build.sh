#!/usr/bin/env bash
# Builds the virtual environment .peers/NAME of one peer from benchmarks/peers/NAME.txt, with plain pip, once.
#
#   benchmarks/peers/build.sh trl | trl_ppo | verl
#
# PYTHON names the interpreter (3.11 or newer) and PIP_FLAGS is handed to pip, as in the Makefile:
# PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" where the default index has no CPU build of torch.
set -euo pipefail
cd "$(dirname "$0")/../.."

name=${1:?"usage: benchmarks/peers/build.sh trl | trl_ppo | verl"}
requirements=benchmarks/peers/$name.txt
environment=.peers/$name
stamp=$environment/.built

if [ -e "$stamp" ] && [ ! "$requirements" -nt "$stamp" ]; then
  exit 0
fi
echo "Building $environment (once; a minute or two) ..."
"${PYTHON:-python3}" -m venv "$environment"
# shellcheck disable=SC2086
"$environment/bin/python" -m pip --disable-pip-version-check install --quiet ${PIP_FLAGS:-} -r "$requirements"
# A gigabyte that nothing on a CPU uses: only an optional part of vLLM asks for it.
"$environment/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes triton 2>/dev/null || true
touch "$stamp"
