# ruff: noqa: E501
"""Shell scripts in the shapes that verl, its recipes and other projects have: heads, arguments and ways to start.

Each script starts one run of EXPECTED, whatever its shape. Programs in it that would change the machine must not run.
"""

from collections.abc import Iterator

EXPECTED = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 64,
    "data.max_response_length": 4096,
    "trainer.experiment_name": "exp-1",
    "actor_rollout_ref.model.path": "models/tiny",
}

PAIRS = (
    "algorithm.adv_estimator=grpo", "data.train_batch_size=$BATCH", "data.max_response_length=$((LENGTH))",
    'trainer.experiment_name="${NAME}"', "actor_rollout_ref.model.path=$MODEL",
)  # fmt: skip

VARIABLES = 'BATCH=64\nLENGTH=$((1024 * 4))\nNAME=exp-1\nMODEL="${MODEL_OF_TEST:-models/tiny}"\n'

HEADS = {
    "verl": (
        "set -x\n",
        "set -xeuo pipefail\nulimit -n 65535\n",
        'set -euo pipefail\nDIR="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"\nROOT=$(realpath "$DIR/../..")\ncd "$ROOT"\n',
        'PROJECT_DIR="$(pwd)"\nCONFIG_PATH="$PROJECT_DIR/examples/config"\nset -x\nENGINE=${1:-vllm}\n',
        "export CUDA_DEVICE_MAX_CONNECTIONS=1 # for megatron\nexport VLLM_USE_V1=1\nset -eux\n",
        "KIND=$(python3 -c 'import torch_npu' 2>/dev/null && echo npu || echo gpu)\n"
        'case "$KIND" in npu) GPUS=16 ;; *) GPUS=8 ;; esac\n',
        "set -u\nHERE=${BASH_SOURCE%/*}\nsource_it() { echo > /dev/null; }\nsource_it\n",
    ),
    "recipe": (
        "#!/usr/bin/env bash\nset -xeuo pipefail\nproject_name='DAPO'\nmax_prompt_length=$((1024 * 2))\n",
        'RAY_ADDRESS=${RAY_ADDRESS:-"http://localhost:8265"}\nWORKING_DIR=${WORKING_DIR:-"${PWD}"}\n'
        'RUNTIME_ENV=${RUNTIME_ENV:-"${WORKING_DIR}/verl/trainer/runtime_env.yaml"}\nNNODES=${NNODES:-16}\n',
        'set -euxo pipefail\nRAY_DATA_HOME=${RAY_DATA_HOME:-"${HOME}/verl"}\nTRAIN="${RAY_DATA_HOME}/data/train.parquet"\n',
        "enable_overlong_buffer=True\noverlong_buffer_len=$((1024 * 4))\nif [ $((2 > 1)) -eq 1 ]; then x=1; fi\n",
        'rollout_mode="async"\nif [ "$rollout_mode" = "async" ]; then\n  export VLLM_USE_V1=1\n  return_raw_chat="True"\nfi\n',
        'set -e\ntouch made_by_a_script; rm -rf kept; mkdir -p made_too > made_by_it 2>&1\necho "a > b" >> made_by_it\n',
        'for a in 1 2 3; do n=$a; done\n[[ $n > 2 ]] && (( n > 2 )) && f() { local x=$1; echo "$x"; }\n',
    ),
    "others": (
        "export PATH=/usr/local/cuda/bin:/usr/bin:/bin:$PATH\nrm -rf kept\n",
        "source ~/.bashrc\nsource venv_of_test/bin/activate\nconda activate verl || true\npip install -e . > pip.log\n",
        "#SBATCH --nodes=2\nset -e\nmodule load cuda\nexec > >(tee run.log) 2>&1\n",
        "ray stop --force 2>/dev/null\nray start --head --port=6379\nwhile ! ray status; do sleep 5; done\n",
        "trap 'kill $(jobs -p)' EXIT\n/usr/bin/python3 -m server --port 1 > server.log 2>&1 &\nPID=$!\nkill -0 $PID\n",
        "cat > made.json <<'EOF'\n{\"a\": \"b > c\"}\nEOF\nnvidia-smi --query | head -1\n",
        'log() { echo "[$(date +%H)] $*" >&2; }\nlog "start $(hostname)"\nexport WANDB_API_KEY=${WANDB_API_KEY:-none}\n',
    ),
}  # fmt: skip

ARGUMENTS = (
    "{words}",
    "\\\n    {lines}",
    '"${{ARGS[@]}}"',
    "$PARAMS",
    '{words} "$@"',
)

STARTS = {
    "verl": (
        "python3 -m verl.trainer.main_ppo {arguments}",
        "python3 -m verl.trainer.main_ppo --config-path=config \\\n  --config-name='ppo_megatron_trainer.yaml' {arguments}",
        "python3 -m verl.trainer.main_ppo --config-path=./config --config-name ppo_trainer {arguments} 2>&1 | tee run.log",
        'LAUNCH=(uv run --frozen python3)\n"${{LAUNCH[@]}}" -m verl.trainer.main_ppo {arguments}',
        "PYTHONUNBUFFERED=1 HYDRA_FULL_ERROR=1 python -u -m verl.trainer.main_ppo_sync {arguments} > run.log 2>&1",
        "python3 examples/split_placement/main_ppo_split.py {arguments}",
        "nohup python3 -m verl.trainer.main_ppo {arguments} > run.log 2>&1 &\nwait",
        "python3 -m verl.experimental.transfer_queue.main_ppo {arguments} $@",
    ),
    "recipe": (
        "python3 -m recipe.dapo.main_dapo {arguments}",
        'ray job submit --no-wait --runtime-env="r.yaml" --working-dir "${{PWD}}" -- python3 -m recipe.dapo.main_dapo {arguments}',
        "python3 -m recipe.entropy.main_entropy {arguments}",
        "python3 -m verl.trainer.main_ppo {arguments} | tee log-$(date +%Y).txt",
        "HYDRA_FULL_ERROR=1 python -m recipe.dapo.src.main_dapo {arguments}",
        "bash -x -c 'exec python3 recipe/dapo/main_dapo.py \"$@\"' main {arguments}",
        "if true; then\n  python3 -m recipe.r1_ascend.main_ppo {arguments}\nelse\n  exit 1\nfi",
        "main() {{ python3 -m recipe.dapo.main_dapo {arguments}; }}\nmain \"$@\"",
    ),
    "others": (
        "/opt/conda/envs/v/bin/python3 -m verl.trainer.main_ppo {arguments}",
        'CMD="python3 -m verl.trainer.main_ppo {words}"\neval "$CMD"',
        'srun --nodes=1 bash -c "python3 -m verl.trainer.main_ppo {plain} > run.log 2>&1"',
        "timeout 9h env A=1 python -m agent_system.trainer.main_ppo {arguments}",
        "for SEED in 1; do\n  python -m search.trainer.main_ppo {arguments} >> run.log\ndone",
        "ssh node1 \"cd /x && python3 -m verl.trainer.main_ppo {plain}\"",
        "bash <<EOF\npython3 -m verl.trainer.main_ppo {plain}\nEOF",
        "./inner.sh --flag && bash inner.sh {arguments}",
    ),
}  # fmt: skip

INNER = (
    '#!/bin/bash\nif [ "$1" != --flag ]; then set -u; cd "$(dirname "$0")"; python3 -m verl.trainer.main_ppo "$@"; fi\n'
)
"""A script that others start: `inner.sh`."""

COUNT = 60


def scripts(kind: str) -> Iterator[tuple[int, str]]:
    """Yields COUNT scripts of a kind with their numbers."""
    plain = " ".join(f"{key}={value}" for key, value in EXPECTED.items())
    for number in range(COUNT):
        head = HEADS[kind][number % len(HEADS[kind])]
        start = STARTS[kind][number % len(STARTS[kind])]
        words, lines = " ".join(PAIRS), " \\\n    ".join(PAIRS)
        form = ARGUMENTS[number % len(ARGUMENTS)].format(words=words, lines=lines)
        arrays = (
            f'ARGS=({PAIRS[0]})\nARGS+=(\n    {chr(10).join(PAIRS[1:])}\n)\nPARAMS="{words.replace(chr(34), "")}"\n'
        )
        yield (
            number,
            head + VARIABLES + arrays + start.format(arguments=form, words=words.replace('"', ""), plain=plain) + "\n",
        )
