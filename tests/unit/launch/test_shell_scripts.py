"""The commands of shell scripts, read without running them."""

import subprocess

import pytest

from hybridflow.errors import ConfigError
from hybridflow.launch.compose.other_systems.shell import commands

SCRIPT = r"""#!/usr/bin/env bash
# It's a comment
set -xeuo pipefail
export VLLM_USE_V1=1   # another comment
NNODES=${NNODES:-16}
HOME_OF_DATA=${DATA_HOME:-"${HOME}/data"}
prompt=$((1024 * 2))
both=$(((prompt + 1024) * 2))
files="['$HOME_OF_DATA/a.parquet', '$HOME_OF_DATA/b.parquet']"
device=$(detect)
if [ "$device" = npu ]; then
    tensor=4
fi
case "${device}" in
    gpu | npu) ;;
    *)
        echo "unknown device: ${device}" >&2
        exit 1
        ;;
esac
DATA=(
    data.train_files="$files"  # two files
    # data.val_files=none
    'data.x=one two'
)
EXTRA=()
EXTRA+=(more=1)

FIRST=1 python3 -m first.program --config='a b' n=$NNODES p=$prompt b=${both} \
    l=['console','wandb'] \
    t=$tensor d=$(date +%Y) k=${NAME##*/} \
    "${DATA[@]}" ${EXTRA[@]} "$@" 2>&1 | tee log.txt
"""


def test_a_script_is_read_as_a_shell_would_run_it():
    found = commands(SCRIPT, {"HOME": "/data/mine"})
    (program,) = [words for words in found if words[0] == "python3"]
    assert program == [
        *["python3", "-m", "first.program", "--config=a b", "n=16", "p=2048", "b=6144", "l=[console,wandb]"],
        *["t=$tensor", "d=$(date +%Y)", "k=${NAME##*/}"],  # known only to a running shell
        "data.train_files=['/data/mine/data/a.parquet', '/data/mine/data/b.parquet']",
        *["data.x=one two", "more=1"],
    ]
    assert ["tee", "log.txt"] in found


def test_the_environment_is_used_for_variables():
    assert commands("N=${N:-1}\nrun n=$N m=${M-2} e=${E:-3}", {"N": "7", "E": ""}) == [["run", "n=7", "m=2", "e=3"]]


def test_a_here_document_that_is_read_into_a_variable_is_its_text():
    script = "read -r -d '' words <<EOF\nprogram \\\n   --a 1 \\\n   --b\nEOF\nif [ 1 ]; then\n  launch $words\nfi\n"
    assert ["launch", "program", "--a", "1", "--b"] in commands(script, {})


@pytest.mark.parametrize("script", ["run 'a", 'run "a', "run ${a", "run $((1 + 2)", "A=(1 2", "cat <<EOF\ntext\n"])
def test_what_is_not_closed_is_an_error(script):
    with pytest.raises(ConfigError, match="is not closed") as raised:
        commands(script, {})
    assert raised.value.remedy


@pytest.mark.parametrize("arithmetic", ["1 / 0", "2 ** 99999999", "__import__('os')", "a b", "1.5", ""])
def test_only_whole_numbers_are_computed(arithmetic):
    assert commands(f"run $(({arithmetic}))", {})[0][1:] != ["0"]


def test_any_part_of_a_script_is_read_or_rejected():
    for length in range(len(SCRIPT)):
        for part in (SCRIPT[:length], SCRIPT[length:]):
            try:
                commands(part, {})
            except ConfigError as error:
                assert "is not closed" in error.message


@pytest.mark.parametrize(
    ("script", "word"),
    [
        ("(N=9; echo $N)", "4"),
        ("N=9 true", "4"),
        ("export N=9 M", "9"),
        ("export M N=9", "9"),
        ("((N++))", "$N"),
        ("if ((N == 4)); then true; fi", "4"),
        ("if ((N++)); then true; fi", "$N"),
        ("for ((N=0; N<3; N++)); do true; done", "$N"),
        ("let N=5", "$N"),
        ("read -r N <<< 9", "$N"),
        ("printf -v N 9", "$N"),
        ("printf N", "4"),
        ("unset N", "$N"),
        ("f() { N=9; }", "$N"),
        ("f() { M=9; }", "4"),
        ("function f { N=9; }", "$N"),
        ("if true; then (N=9); fi", "4"),
        ("true && N=9", "$N"),
        ("true ||\n  N=9", "$N"),
        ("true && M=1\nN=9", "9"),
        ("N=9 && true", "9"),
        ("M=7; N=$M N=$((N+1))", "8"),
        ("N=1 M=$N N=$((M + 1))", "2"),
        ("M=7; export N=$M M=$N; N=$M", "4"),
        ("N=1 N=$N$N true", "4"),
        ("if true; then N=1 N=$N; fi", "$N"),
        ("N=1 M=$((N++)) N=$N", "$N"),
        ("N=9 &", "4"),
        ("{ N=9; } &", "$N"),
        ("true && N=9 &", "4"),
        ("N=9 &> /dev/null", "9"),
        ("N=9 | true", "4"),
        ("N=9 |& true", "4"),
        ("M=1 N=9 & N=8", "8"),
        ("case $x in\n  a) N=9 ;;\nesac", "$N"),
        ("(case $x in a) true;; esac; N=9)", "4"),
        ("echo $((N++))", "$N"),
        ("N=$((-7 / 2 + -7 % 2))", "-4"),
        ("N=1+2; N=$((N * 2))", "6"),
        ("N=$'a\\tb\\'c'", "a\tb'c"),
        ("N=$'\\x41'", "$'\\x41'"),
        ('N=$"a b"', "a b"),
        ("set -- 5 6; N=$1", "$1"),
        ("set -euo pipefail; N=${1:-7}", "$1"),
        ("N=${1:-7}", "7"),
        ("N=${#N}", "${#N}"),
        ("N=$?", "$?"),
        ("M=$(echo ')'); N=9", "9"),
        ('M=$(echo ")\\")"); N=9', "9"),
        ("bash <<EOF\nN=9\nEOF", "4"),
    ],
)
def test_a_variable_has_the_value_that_bash_gives_it_or_none(script, word):
    (*_, found) = commands(f'N=4\n{script}\nrun "$N"', {})
    assert found == ["run", word]
    ran = subprocess.run(["bash"], input=f'N=4\n{script}\nprintf %s "$N"', capture_output=True, text=True, check=False)
    assert "$" in word or ran.stdout.endswith(word)


@pytest.mark.parametrize(
    "script",
    [
        "# a comment \\\nrun a=1",
        "# a comment \\\nN=4\nrun a=$N",
        "run a=b/\\\nc d",
        'run "a\\\nb" c',
        "run 'a\\\nb' c",
        "run a \\\n  b \\\n  c",
        ': ${N:=5}\n: "${M:=x/y}" ${K=}\nrun $N $M [$K]',
        "M=1\nrun ${N:=5} $N ${M:=2} $M",
        "run a &> log b",
        "run a &>> log b 2>&1",
        "run a > >(cat > log) b",
        "A=(x y)\nrun $A ${A[@]}",
        "cat <<EOF\n\tEOF\nrun no\nEOF\nrun yes",
        "cat <<-EOF\n\ta\n\tEOF\nrun yes",
        "bash <<EOF\n# about it\nrun a \\\n  b\nEOF\ntrue",
    ],
)
def test_a_command_has_the_words_that_bash_gives_it(tmp_path, script):
    program = tmp_path / "run"
    program.write_text('#!/bin/sh\nprintf "%s\\0" "$@" > words\n')
    program.chmod(0o755)
    subprocess.run(["bash", "-c", script], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, cwd=tmp_path, check=True)
    *words, _ = (tmp_path / "words").read_text().split("\0")
    assert [found for found in commands(script, {}) if found[0] == "run"] == [["run", *words]]


def test_what_a_block_sets_is_known_in_the_block():
    script = "f() {\n  local N=9\n  run $N $1 ${2:-x}\n}\ncd x && export N=8 && run $N\nrun $N"
    found = [words for words in commands(script, {}) if words[0] == "run"]
    assert found == [["run", "9", "$1", "$2"], ["run", "8"], ["run", "$N"]]


@pytest.mark.parametrize("doubled", ["A=$A$A", 'A="$A$A"', 'A=("${A[@]}" "${A[@]}")', "A+=$A"])
def test_a_variable_that_doubles_is_an_error(doubled):
    with pytest.raises(ConfigError, match="grows beyond"):
        commands("A=x\n" + f"{doubled}\n" * 40, {})
