#!/usr/bin/env bash
# The rollout server that --engine vllm talks to, from the virtual environment of requirements-vllm.txt (or of `pip install vllm`).
#
#   recipes/serve_vllm.sh MODEL [vLLM options]       for example  recipes/serve_vllm.sh tiny/qwen3 --dtype bfloat16
#
# PYTHON      the environment's python          (.venv-vllm/bin/python)
# PORT        of the server, on loopback        (8000)
# VLLM_API_KEY    a key, if any; the trainer reads the same variable
#
# On a GPU:  add --enable-return-routed-experts for --routing_replay r3, --return-sampling-mask for --keep_sampling_mask,
# --quantization fp8 for FP8 rollouts, and --weight-transfer-config '{"backend": "nccl"}' for --vllm_transfer nccl.
set -euo pipefail
[ $# -ge 1 ] || { sed -n '2,11p' "$0"; exit 2; }
model=$1
shift
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-$here/../.venv-vllm/bin/python}

export VLLM_SERVER_DEV_MODE=1 VLLM_NO_USAGE_STATS=1 # dev mode opens the endpoints that take weights: keep it on loopback
on_cpu=()
if ! command -v nvidia-smi > /dev/null; then
    # linear layers that a push can reach, see vllm_plugin/loadable_linear.py
    export PYTHONPATH="$here/vllm_plugin${PYTHONPATH:+:$PYTHONPATH}"
    export VLLM_CPU_KVCACHE_SPACE=${VLLM_CPU_KVCACHE_SPACE:-1} VLLM_CPU_OMP_THREADS_BIND=${VLLM_CPU_OMP_THREADS_BIND:-nobind}
    on_cpu=(--enforce-eager) # compiling takes minutes
fi
# the module and not `vllm serve`, which does not know the CPU package; no request logs; log-probs of what was sampled from
exec "$python" -m vllm.entrypoints.openai.api_server --model "$model" --host 127.0.0.1 --port "${PORT:-8000}" \
    --enable-scale-out --logprobs-mode processed_logprobs "${on_cpu[@]}" "$@"
