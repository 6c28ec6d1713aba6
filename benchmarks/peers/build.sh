#!/usr/bin/env bash
# Builds the virtual environment .peers/NAME of one peer from benchmarks/peers/NAME.txt, with plain pip, once.
#
#   benchmarks/peers/build.sh trl | trl_ppo | verl | adapters
#
# PYTHON names the interpreter (3.11 or newer) and PIP_FLAGS is handed to pip, as in the Makefile:
# PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu" where the default index has no CPU build of torch.
#
# `adapters` is layered over the environment of PYTHON, in which hybridflow is installed: what is there is not installed
# again, and the versions that pyproject.toml allows are kept.
set -euo pipefail
cd "$(dirname "$0")/../.."

name=${1:?"usage: benchmarks/peers/build.sh trl | trl_ppo | verl | adapters"}
requirements=benchmarks/peers/$name.txt
alone=benchmarks/peers/${name}_alone.txt
environment=.peers/$name
stamp=$environment/.built

if [ -e "$stamp" ] && [ ! "$requirements" -nt "$stamp" ] && [ ! "$alone" -nt "$stamp" ]; then
  exit 0
fi
echo "Building $environment (once; a minute or two) ..."
install=("$environment/bin/python" -m pip --disable-pip-version-check install --quiet)
if [ "$name" = adapters ]; then
  "${PYTHON:-python3}" -m venv --clear --without-pip "$environment"
  below=$("${PYTHON:-python3}" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  packages=$("$environment/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "import site; site.addsitedir('$below')" > "$packages/below.pth"
  "$environment/bin/python" - > "$environment/constraints.txt" <<'EOF'
from importlib.metadata import requires
print(*(each for each in requires("hybridflow") if "extra ==" not in each), sep="\n")
EOF
  install+=(--constraint "$environment/constraints.txt")
else
  "${PYTHON:-python3}" -m venv "$environment"
fi
# shellcheck disable=SC2086
"${install[@]}" ${PIP_FLAGS:-} -r "$requirements"
if [ -e "$alone" ]; then  # without dependencies, whose pins conflict with ours
  # shellcheck disable=SC2086
  "${install[@]}" ${PIP_FLAGS:-} --no-deps -r "$alone"
fi
if [ "$name" != adapters ]; then
  # A gigabyte that nothing on a CPU uses: only an optional part of vLLM asks for it.
  "$environment/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes triton 2>/dev/null || true
fi
touch "$stamp"
