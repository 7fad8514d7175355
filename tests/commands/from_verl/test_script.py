"""A script is expanded as bash would run it, and nothing in it takes effect."""

import contextlib
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from mrl.commands.from_verl.command_line import read_settings
from mrl.commands.from_verl.redirections import without_redirections
from mrl.commands.from_verl.script import LIMIT_S, expand
from mrl.commands.from_verl.translate import translate
from mrl.errors import UserError
from tests.commands.from_verl import shapes

TRAINER = "python3 -m verl.trainer.main_ppo"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working folder, with a file that scripts try to remove."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kept").write_text("as it was")
    (tmp_path / "inner.sh").write_text(shapes.INNER)
    return tmp_path


def words_of(script, *arguments, name="run.sh"):
    """The words of the one trainer that a script starts, without the program."""
    (words,) = expand(script, name, arguments).trainers
    return words[words.index("verl.trainer.main_ppo") + 1 :]


def check_kind(kind, folder):
    def missing(case):
        number, text = case
        file = folder / f"{kind}_{number}.sh"
        file.write_text(text)
        try:
            given = read_settings([str(file)])
        except UserError as error:
            return number, str(error)
        return number, {key: given.get(key) for key, value in shapes.EXPECTED.items() if given.get(key) != value}

    before = sorted(path.name for path in folder.iterdir())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(missing, shapes.scripts(kind)))
    assert [one for one in found if one[1]] == []
    made = [path.name for path in folder.iterdir() if not path.name.startswith(kind)]
    assert sorted(made) == before and (folder / "kept").read_text() == "as it was"


@pytest.mark.slow
@pytest.mark.parametrize("kind", shapes.HEADS)
def test_sixty_scripts_of_each_kind_are_translated_and_nothing_is_changed(kind, folder):
    check_kind(kind, folder)


ATTACKS = """
export PATH=/usr/bin:/bin
declare -x PATH=/usr/bin:/bin
unset PATH; PATH=/usr/bin:/bin
f() { local PATH=/usr/bin:/bin; rm kept; touch made; }; f
rm kept
/bin/rm kept
/usr/bin/touch made
command -p rm kept
builtin exec /bin/rm kept
exec /bin/rm kept
hash -p /bin/rm zap; zap kept
BASH_CMDS[zap]=/bin/rm; zap kept
set +r; set +o restricted; shopt -u restricted_shell; rm kept
eval 'set +r; /bin/rm kept'
bash -c '/bin/rm kept; > made'
sh -c 'rm kept'
env PATH=/bin rm kept
for PATH in /bin; do rm kept; done
printf -v PATH /bin; rm kept
echo x > kept
echo x >| kept
echo x >> kept
cat <> kept
: &> kept
eval 'echo x > kept'
{ echo x; } 3> made 1>&3
echo x | tee kept
cat > made <<EOF
x
EOF
mapfile -t PATH <<< /bin; rm kept
coproc rm kept
cat <(rm kept; echo > made)
echo x | tee >(rm kept)
history -w made
python3 - <<EOF
open("made", "w")
EOF
trap 'rm kept; echo > made' EXIT DEBUG
kill -9 @victim@
builtin kill -9 @victim@
command kill -9 @victim@
enable kill; kill -9 @victim@
/bin/kill -9 @victim@
"""


def attacks(victim):
    """Lines of ATTACKS, here-documents with their bodies."""
    parts, body = [], False
    for line in ATTACKS.strip().replace("@victim@", str(victim)).splitlines():
        if body:
            parts[-1] += f"\n{line}"
        else:
            parts.append(line)
        body = line != "EOF" and (body or "<<EOF" in line)
    return parts


@pytest.mark.slow
def test_no_way_around_the_confinement_of_a_script_has_an_effect(folder):
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as victim:
        try:
            found = attacks(victim.pid)
            with ThreadPoolExecutor(4) as pool:
                expansions = list(pool.map(lambda text: expand(text, "run.sh"), found))
            assert len(expansions) == len(found) > 35
            assert victim.poll() is None
        finally:
            victim.kill()
    assert sorted(path.name for path in folder.iterdir()) == ["inner.sh", "kept"]
    assert (folder / "kept").read_text() == "as it was"


def test_a_script_that_sets_its_path_starts_no_program_of_it(folder):
    """The commonest of them: bash does not make PATH read-only for `set -r` in `bash -c`."""
    script = f"export PATH=/usr/bin:/bin:$PATH\ntouch made; rm kept\n{TRAINER} a=$(touch made && echo 1) path=$PATH"
    assert words_of(script) == ["a=1", f"path=/usr/bin:/bin:{os.environ['PATH']}"]
    assert sorted(path.name for path in folder.iterdir()) == ["inner.sh", "kept"]


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ('set -u; cd "$(dirname "${BASH_SOURCE[0]}")/.."; @ a=$PWD b=$(pwd)', ["a=@folder@", "b=@folder@"]),
        ("set -u; @ a=$(basename $0 .sh) b=${BASH_SOURCE} c=${#BASH_SOURCE[@]}", ["a=run", "b=sub/run.sh", "c=1"]),
        ("cd /nowhere/at/all && @ a=$PWD; cd -", ["a=/nowhere/at/all"]),
        ("pushd sub; popd; cd ..; cd - ; @ a=$(pwd)", ["a=@folder@"]),
        ("ulimit -n 99999999 && ulimit -c unlimited && @ a=1", ["a=1"]),
        ("A=(x=1 'y=b c'); A+=(z=3); @ \"${A[@]}\"", ["x=1", "y=b c", "z=3"]),
        ('f() { @ "$@"; }; f a=1 "b=2 3"', ["a=1", "b=2 3"]),
        ("i=0; while (( i < 3 )); do i=$((i + 1)); done; @ a=$i", ["a=3"]),
        ("if [ 2 -gt 1 ] && [[ b > a ]]; then x=y; else x=n; fi; @ a=$x", ["a=y"]),
        ("x=$(cat <<EOF\none > two\nEOF\n); @ \"a=$x\"", ["a=one > two"]),
        ("x=$(cat <<'EOF' | tr a-z A-Z\nabc\nEOF\n); @ a=$x", ["a=ABC"]),
        ("source lib.sh; . ./lib.sh; @ a=$FROM_LIB b=$(helper)", ["a=lib", "b=helped"]),
        ("bash -c \"@ a=1 > log 2>&1\"", ["a=1"]),
        ("bash -lc '@ a=1 \"$@\"' name b=2", ["a=1", "b=2"]),
        ("X=1; export X; nohup bash -c 'cd sub && @ a=$X' > log 2>&1 &", ["a=1"]),
        ("/opt/x/bin/@ a=1", ["a=1"]),
        ("PYTHON=/opt/x/bin/python3; $PYTHON -u -m verl.trainer.main_ppo a=1 > log", ["a=1"]),
        ("set -e; ./setup.sh; /usr/bin/env ray stop; @ a=1", ["a=1"]),
        ("ray job submit --address=x -- @ a=1 'b={c: d}'", ["a=1", "b={c: d}"]),
        ("torchrun --nproc_per_node=8 -m verl.trainer.main_ppo a=1", ["a=1"]),
        ("exec > >(tee log) 2>&1; exec @ a=1", ["a=1"]),
        ("@ a=1 2>&1 | tee >(grep x) | grep -v y", ["a=1"]),
        ("a=`basename /x/y.z .z`; @ a=$a", ["a=y"]),
        ("sbatch --wrap=\"@ a=1\"", ["a=1"]),
        ("tmux send-keys -t x \"@ a=1\" C-m", ["a=1"]),
        ("@ a=1 # b=2", ["a=1"]),
        ("@ a='1 # 2' b=\"x > y\"", ["a=1 # 2", "b=x > y"]),
        ("bash other.sh a=1", ["a=1", "from=other"]),
        ("python prepare.py || exit 1; command -v foo || true; @ a=$(seq -s, 1 3)", ["a=1,2,3"]),
        ("trap 'rm -f x' EXIT; set -o pipefail; yes | @ a=1", ["a=1"]),
        ("export PYTHONPATH=$PWD:${PYTHONPATH:-}; SHELL=/bin/sh ENV=webshop; @ a=$ENV", ["a=webshop"]),
        ("declare -A M=([k]=v); @ a=${M[k]} b=${M[@]:0:1} c=${X:-d} e=${Y:=f}", ["a=v", "b=v", "c=d", "e=f"]),
        ("until false; do break; done; select x in a; do :; done; @ a=1", ["a=1"]),
        ("NAME=$(date +%Y)-x; [ ${#NAME} -eq 6 ] && @ a=1", ["a=1"]),
        ("wait; @ a=1 & wait $!", ["a=1"]),
        ("LONG=$(printf 'x%.0s' {1..70000}); @ a=${#LONG} b=$LONG", ["a=70000", f"b={'x' * 70000}"]),
    ],
)  # fmt: skip
def test_a_construct_of_bash_gives_the_words_that_bash_would_pass(script, words, folder):
    (folder / "sub").mkdir()
    (folder / "lib.sh").write_text("FROM_LIB=lib\nhelper() { echo helped > /dev/stderr; echo helped; } 2> /dev/null\n")
    (folder / "other.sh").write_text(f'{TRAINER} "$@" from=$(basename "$0" .sh)\n')
    expected = [word.replace("@folder@", str(folder)) for word in words]
    assert words_of(script.replace("@", TRAINER) if "[@]" not in script and '"$@"' not in script else
                    script.replace("@ ", f"{TRAINER} "), name="sub/run.sh") == expected  # fmt: skip


@pytest.mark.slow
def test_a_script_is_expanded_however_many_files_are_open(folder):
    with contextlib.ExitStack() as held:
        for _ in range(30):
            for _ in range(4):
                held.enter_context(open(os.devnull))
            assert words_of(f"{TRAINER} a=1 > log\n") == ["a=1"]


def test_the_arguments_of_a_script_go_where_it_puts_them(folder):
    (folder / "run.sh").write_text(
        f'ENGINE=$1; shift; {TRAINER} algorithm.adv_estimator=grpo rollout=$ENGINE "$@" z=1\n'
    )
    given = read_settings(["run.sh", "sglang", "z=2", "y=3"])
    assert (given["rollout"], given["z"], given["y"]) == ("sglang", 2, 3)
    (folder / "run.sh").write_text(f"{TRAINER} a=1\n")
    with pytest.raises(UserError, match="'sglang' is not a setting"):
        read_settings(["run.sh", "sglang"])


def test_a_variable_that_nothing_sets_is_named_and_the_rest_is_translated(folder, monkeypatch):
    monkeypatch.delenv("MODEL_OF_TEST", raising=False)
    script = f"set -u\n{TRAINER} algorithm.adv_estimator=grpo actor_rollout_ref.model.path=$MODEL_OF_TEST/x"
    (folder / "run.sh").write_text(
        script + " trainer.nnodes=${NODES_OF_TEST} data.train_batch_size=${SIZE_OF_TEST:?}\n"
    )
    found = translate(read_settings(["run.sh"]))
    said = "\n".join(found.missing)
    assert all(f"${name}_OF_TEST" in said for name in ("MODEL", "NODES", "SIZE")) and found.num_nodes == 1
    assert "path: MODEL_OF_TEST_IS_NOT_SET/x" in found.text
    monkeypatch.setenv("MODEL_OF_TEST", "models")
    found = translate(read_settings(["run.sh"]))
    assert "path: models/x" in found.text and "$MODEL_OF_TEST" not in "\n".join(found.missing)


def test_a_variable_that_reaches_no_setting_is_named_and_nothing_is_lost(folder, monkeypatch):
    monkeypatch.delenv("KEY_OF_TEST", raising=False)
    (folder / "run.sh").write_text(f"set -u\nexport API_KEY=$KEY_OF_TEST\n{TRAINER} algorithm.adv_estimator=grpo\n")
    found = translate(read_settings(["run.sh"]))
    assert [line for line in found.missing if line.startswith("$KEY_OF_TEST: ")] and found.lost == []
    (folder / "run.sh").write_text(f"set -u\n{TRAINER} algorithm.adv_estimator=grpo data.train_files=$KEY_OF_TEST/a\n")
    assert [line for line in translate(read_settings(["run.sh"])).lost if line.startswith("$KEY_OF_TEST: ")]


def test_an_error_that_an_unset_argument_causes_names_the_argument(folder):
    (folder / "run.sh").write_text(f"set -u\n{TRAINER} --config-name=$1 algorithm.adv_estimator=grpo\n")
    with pytest.raises(UserError, match="Give argument 1 of the script"):
        read_settings(["run.sh"])
    (folder / "own.yaml").write_text("data: {seed: 3}\n")
    assert read_settings(["run.sh", "own", "--config-dir", "."])["data.seed"] == 3


def test_a_variable_that_is_empty_without_set_u_is_named_by_its_key(folder, monkeypatch):
    monkeypatch.delenv("TP_OF_TEST", raising=False)
    key = "actor_rollout_ref.rollout.tensor_model_parallel_size"
    (folder / "run.sh").write_text(f"{TRAINER} algorithm.adv_estimator=grpo {key}=$TP_OF_TEST\n")
    assert [one for one in translate(read_settings(["run.sh"])).missing if one.startswith(f"{key}=: no value")]


def test_several_runs_of_a_script_are_counted_and_the_first_is_translated(folder):
    (folder / "run.sh").write_text(f"for n in 4 8; do {TRAINER} algorithm.adv_estimator=grpo trainer.nnodes=$n; done\n")
    given = read_settings(["run.sh"])
    assert given["trainer.nnodes"] == 4 and any("starts 2 different runs" in note for note in given.notes)


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo 'give me a file' >&2; exit 3", "give me a file"),
        ("python train.py --x 1", "python train.py"),
        ("while true; do sleep 60; done", "does not reach verl.trainer.main_ppo"),
        ("if", "syntax error"),
        ("", "does not reach verl.trainer.main_ppo"),
    ],
)
def test_a_script_without_a_run_is_refused_with_what_it_says(script, said, folder):
    (folder / "run.sh").write_text(script)
    with pytest.raises(UserError) as caught:
        read_settings(["run.sh"])
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_script_is_read_from_stdin_and_from_a_quoted_line(monkeypatch):
    import io

    monkeypatch.setattr("sys.stdin", io.StringIO(f'set -u; {TRAINER} a=1 b=$(basename "${{BASH_SOURCE[0]}}")'))
    assert read_settings(["-"])["a"] == 1
    assert read_settings([f"PYTHONUNBUFFERED=1 {TRAINER} a=1 'b=[x, y]' 2>&1 | tee log"])["b"] == ["x", "y"]
    assert read_settings(["bash", "-x", "inner.sh", "a=5"])["a"] == 5


@pytest.mark.parametrize(
    ("script", "without"),
    [
        ("a > b 2>&1", "a >&57 2>&1"),
        ("a 2>/dev/null|b &>c", "a 2>&57|b >&57 2>&57"),
        ("a >>b >|c 3> d >& e", "a >&57 >&57 3>&57 >&57 2>&57"),
        ("a > /dev/stderr 2>/dev/stdout", "a >&2 2>&1"),
        ("echo 'a > b' \"c > d\" e\\>f", "echo 'a > b' \"c > d\" e\\>f"),
        ("(( a > b )) && [[ c > d ]] && x=$((1 > 0))", "(( a > b )) && [[ c > d ]] && x=$((1 > 0))"),
        ('x="$(a 2> "$(b > c)")"', 'x="$(a 2>&57)"'),
        ("cat <<E > f\na > b\nE\nc > d", "cat <<E >&57\na > b\nE\nc >&57"),
        ("cat <<-'E F'\n\ta > b\n\tE F\nc>d", "cat <<-'E F'\n\ta > b\n\tE F\nc>&57"),
        ("exec > >(tee -a $(x)) 2> >(b > c)", "exec    "),
        ("a | tee >(b > c)", "a | tee >(b >&57)"),
        ("# a > b\na#b >c", "# a > b\na#b >&57"),
        ("x=$(case $y in a) b > c;; esac) > d", "x=$(case $y in a) b >&57;; esac) >&57"),
        ("a <b <<<c <(d > e) 2>&-", "a <b <<<c <(d >&57) 2>&-"),
        ("${a:-'>'} $'it\\'s >' `b > c`", "${a:-'>'} $'it\\'s >' `b >&57`"),
        ("a <<< 'x", "a <<< 'x"),
    ],
)
def test_only_redirections_of_output_are_taken_from_a_script(script, without):
    assert without_redirections(script) == without


def test_a_script_that_is_nested_too_deeply_is_refused():
    with pytest.raises(UserError, match="too deeply"):
        without_redirections("$(" * 5000)


@pytest.mark.parametrize("size", [127 << 10, 129 << 10, (1 << 20) - 1000])
@pytest.mark.parametrize("sourced", [False, True], ids=["itself", "sourced"])
def test_a_script_may_have_a_mebibyte(size, sourced, folder):
    script = "#" * 99 + "\n"
    script = script * (size // len(script)) + f"K=1\n{TRAINER} a=$K b=$0"
    if sourced:
        (folder / "long.sh").write_text(script)
    assert words_of("source long.sh" if sourced else script) == ["a=1", "b=run.sh"]


def test_a_long_argument_of_a_run_is_translated():
    files = ",".join(f"/data/part_{number}.parquet" for number in range(9000))
    assert words_of(f"{TRAINER} \\\n data.train_files=[{files}]") == [f"data.train_files=[{files}]"]


def test_a_script_above_a_mebibyte_is_refused():
    with pytest.raises(UserError, match=r"run\.sh.*1 MiB"):
        expand("#\n" * (1 << 19) + TRAINER, "run.sh")


def test_a_script_with_a_nul_is_refused():
    with pytest.raises(UserError, match=r"run\.sh.*NUL"):
        expand(f"{TRAINER} a=\0", "run.sh")


@pytest.mark.parametrize("script", [
    f"{TRAINER}\nwhile true; do echo yes; done", "while true; do echo yes >&2; done",
    "printf -v LONG '%1000000s' x; for i in {1..9}; do echo \"$LONG\"; done",
    "f() { while true; do echo yes; done; }; f | cat & f; wait",
])  # fmt: skip
def test_a_script_that_prints_without_bound_is_refused_at_once(script):
    start = time.monotonic()
    with pytest.raises(UserError, match=r"run\.sh.*prints more than"):
        expand(script, "run.sh")
    assert time.monotonic() - start < LIMIT_S / 2


@pytest.mark.slow
def test_a_script_that_starts_programs_without_bound_is_refused():
    with pytest.raises(UserError, match=r"run\.sh.*too many programs"):
        expand(f"while true; do {TRAINER} {'a=1 ' * 2000}; done", "run.sh")


def test_a_script_may_print_much():
    assert words_of(f"for i in {{1..20000}}; do echo a line of some length; done\n{TRAINER} a=1") == ["a=1"]
