"""PRELUDE: bash commands that run before a script that is only expanded, not executed.

Restricted bash cannot write files or start programs by path; a read-only PATH with a few harmless programs prevents it
from starting others. Each command that the script would start, and each query about the machine, becomes a record on a
file descriptor:

    process NUL word NUL word of the record NUL ... process NUL kind NUL NUL

Records are written in pieces short enough to be atomic: `part` is a piece of a word, and line ends are written as byte
1. Kinds: `run` is a command line; `text`, `file` and `source` request shell text or scripts that must be rewritten
first.
"""

PROGRAMS = ("basename", "cat", "cut", "dirname", "expr", "grep", "head", "nproc", "seq", "tr", "uname", "wc", "whoami")
"""Programs that a script may start; they only print."""

RENAMED = {"PATH": "MRL_PATH", "BASH_SOURCE": "MRL_SOURCE"}
"""Variables that are renamed in scripts: PATH is read-only, and BASH_SOURCE is empty in `bash -c`."""

PRELUDE = r"""
unset MRL_CODE
MRL_PATH=$PATH
readonly PATH=@programs@
export TMPDIR=@folder@ LC_ALL=C.UTF-8 @unset@
MRL_SOURCE=(@source@) MRL_DEPTH=0 MRL_SLEEPS=0
MRL_KEYS=(@keys@) MRL_TEXTS=(@texts@)
trap '' PIPE
exec {BASH_XTRACEFD}>/dev/null @nowhere@>/dev/null @held@>&1
mrl_say() {
  local kind=$1 word; shift
  for word in "$@"; do
    word=${word//$'\n'/$'\1'}
    while (( ${#word} > 900 )); do printf '%s\0' "$BASHPID" part "${word:0:900}" >&@fd@; word=${word:900}; done
    printf '%s\0' "$BASHPID" word "$word" >&@fd@
  done
  printf '%s\0' "$BASHPID" "$kind" '' >&@fd@
}
mrl_whole() {
  local part parts whole= IFS=/
  case $1 in /*) set -f; parts=($1);; *) set -f; parts=($PWD/$1);; esac
  set +f
  for part in "${parts[@]}"; do
    case $part in ''|.) ;; ..) whole=${whole%/*};; *) whole+=/$part;; esac
  done
  printf '%s\n' "${whole:-/}"
}
mrl_text() {
  local index
  for index in "${!MRL_KEYS[@]}"; do
    [[ ${MRL_KEYS[index]} == "$2" ]] && { MRL_FOUND=${MRL_TEXTS[index]}; return 0; }
  done
  mrl_say "$1" "$2"; return 1
}
mrl_shell() {
  local name=$1; shift
  while (( $# )); do
    case $1 in
      -o|+o|-O|--rcfile|--init-file) shift;;
      --*) ;;
      -*c) (( $# > 1 )) && mrl_text text "$2" && { shift 2; [[ $# -gt 0 ]] && shift; mrl_inner "$0" "$@"; }; return 0;;
      -*|+*) ;;
      *) local file; file=$(mrl_whole "$1"); shift; mrl_text file "$file" && mrl_inner "$file" "$@"; return 0;;
    esac
    shift
  done
  mrl_stdin
}
mrl_stdin() {
  local text
  text=$(cat)
  [[ $text =~ @trainers@ ]] && mrl_text text "$text" && mrl_inner "$0"
  return 0
}
mrl_inner() {
  (( MRL_DEPTH < 8 )) || return 0
  ( MRL_DEPTH=$((MRL_DEPTH + 1)); set +eux; MRL_SOURCE=("$1"); BASH_ARGV0=$1; shift; eval -- "$MRL_FOUND" )
  return 0
}
command_not_found_handle() {
  local index word words=("$@")
  for (( index = 0; index < $#; index++ )); do
    word=${words[index]}
    case $word in
      bash|sh|zsh|*/bash|*/sh|*/zsh) mrl_shell "${words[@]:index}"; return 0;;
      *.sh|*.slurm|*.sbatch)
        case $index:${words[0]##*/} in 0:*|*:srun|*:sbatch|*:nohup|*:env|*:setsid|*:time|*:timeout|*:qsub)
          mrl_shell sh "${words[@]:index}"; return 0;;
        esac;;
      *[[:space:]]*) [[ $word =~ @trainers@ ]] && { mrl_text text "${word#--wrap=}" && mrl_inner "$0"; return 0; };;
      *) [[ $word =~ @trainers@ ]] && break;;
    esac
  done
  case ${1##*/} in ssh|sbatch|srun|sudo|su|docker) (( index < $# )) || { mrl_stdin; return 0; };; esac
  case " $* " in *" -c "*) [[ $1 == *python* ]] && return 1;; esac
  mrl_say run "$@"
}
cd() {
  while [[ ${1-} == -?* ]]; do shift; done
  local to=${1-$HOME}
  [[ $to == - ]] && to=${OLDPWD-$PWD}
  OLDPWD=$PWD PWD=$(mrl_whole "$to")
}
pwd() { printf '%s\n' "$PWD"; }
pushd() { MRL_STACK=("$PWD" "${MRL_STACK[@]-}"); cd "$@"; }
popd() { cd "${MRL_STACK[0]-.}"; MRL_STACK=("${MRL_STACK[@]:1}"); }
realpath() { mrl_whole "${!#}"; }
readlink() { mrl_whole "${!#}"; }
date() {
  local form=%c word
  for word in "$@"; do [[ $word == +* ]] && form=${word#+}; done
  printf "%($form)T\n" -1
}
hostname() { printf '%s\n' "${HOSTNAME-localhost}"; }
sleep() { (( ++MRL_SLEEPS < 1000 )) || exit 0; }
source() {
  local file
  file=$(mrl_whole "$1"); shift
  mrl_text source "$file" || return 0
  MRL_SOURCE=("$file" "${MRL_SOURCE[@]}")
  eval -- "$MRL_FOUND"
  MRL_SOURCE=("${MRL_SOURCE[@]:1}")
}
.() { source "$@"; }
scontrol() {
  local node count=1
  [[ ${SLURM_NNODES-} =~ ^[1-9][0-9]{0,3}$ ]] && count=$SLURM_NNODES
  [[ " $* " == *" hostnames "* ]] && for (( node = 0; node < count; node++ )); do hostname; done
  return 0
}
exec() { (( $# == 0 )) || { while [[ $1 == -* ]]; do shift; done; "$@"; exit $?; }; }
ulimit() { return 0; }
umask() { return 0; }
kill() { return 0; }
@slashes@
enable -n kill enable ulimit umask
set -r
"""
"""Bash code with placeholders `@name@` for values that are known when a script is expanded."""
