#!/usr/bin/env bash
# Every benchmark and every recipe once on a machine with one GPU and 16 cores, within 8 minutes: one JSON line each, on stdout.
#
#   benchmarks/gpu_check.sh            on a GPU where there is one, else on the CPU
#   benchmarks/gpu_check.sh --cpu      on the CPU in any case: a rehearsal, as long as it takes there
#
# Benchmarks with a GPU form (bench_ares, bench_replay, bench_step) run on it, one after another, the others beside them in their short
# CPU form; then all recipes at once, three steps each, in bf16 with fp8 rollouts. With two GPUs and vLLM also a push of weights through
# NCCL. With fewer than 8 cores everything takes its turn. A missed bar is printed, not a failure. The exit status is 1 if
# anything did not reach its last line, and its log is named.
#
# PYTHON           an environment to use as it is (default: this python where it has all imports, else a new environment)
# GPU_CHECK_DIR    logs and the environment       (a new folder under /tmp)
# GPU_CHECK_S      seconds in all                 (460; --cpu: 3600)
set -uo pipefail
cd "$(dirname "$0")/.."
cpu=
[ "${1:-}" = --cpu ] && cpu=1
command -v nvidia-smi > /dev/null && nvidia-smi -L 2> /dev/null | grep -q GPU || cpu=1
work=${GPU_CHECK_DIR:-$(mktemp -d /tmp/gpu_check.XXXXXX)}
mkdir -p "$work"
deadline=$((SECONDS + ${GPU_CHECK_S:-$([ "$cpu" ] && echo 3600 || echo 460)}))
gpus=$([ "$cpu" ] && echo 0 || nvidia-smi -L | wc -l)
export CUDA_VISIBLE_DEVICES=$([ "$cpu" ] || echo 0)  # one process on two GPUs would be wrapped in DataParallel
export HF_HUB_OFFLINE=1 TRACKIO_DIR="$work/trackio" PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 CUBLAS_WORKSPACE_CONFIG=:4096:8
export OMP_NUM_THREADS=2

say() { echo "gpu_check: $*" >&2; }
has() { "$1" -c "$2" 2> /dev/null; }
imports="import torch, transformers, trl, accelerate, datasets, peft, math_verify, matplotlib, pytorch_optimizer, pytest"

python=${PYTHON:-python3}
if ! has "$python" "$imports"; then
    python3 -m venv --system-site-packages "$work/venv" || { say "no virtual environment in $work: install python3-venv"; exit 1; }
    python="$work/venv/bin/python"
    cp requirements.txt "$work/requirements.txt"
    if has "$python" "import torch; assert torch.version.cuda"; then
        sed -i '/^torch==/d' "$work/requirements.txt"  # the machine's own CUDA build stays, also where its version is another one
        "$python" -c "import torch; print('torch==' + torch.__version__)" > "$work/constraints.txt"
        say "keeps $(cat "$work/constraints.txt") of this machine"
    fi
    touch "$work/constraints.txt"
    "$python" -m pip install -q -r "$work/requirements.txt" -c "$work/constraints.txt" > "$work/install.log" 2>&1 ||
        say "pip did not install everything, see $work/install.log; going on with what is there"
    has "$python" "$imports" || { say "missing: $("$python" -c "$imports" 2>&1 | tail -n 1)"; exit 1; }
fi
python=$("$python" -c "import sys; print(sys.executable)")
export python
gpu=$([ "$cpu" ] || "$python" -c "import torch; assert torch.cuda.is_available(); print(torch.cuda.get_device_name())" 2> /dev/null)
device=$([ "$gpu" ] && echo cuda || echo cpu)
[ "$cpu" ] || [ "$gpu" ] || say "this python's torch sees no GPU: everything runs on the CPU"
say "on ${gpu:-the CPU}, $(nproc) cores, torch $("$python" -c 'import torch; print(torch.__version__)'); logs in $work"

# check NAME SECONDS COMMAND...: prints the command's last line, which is JSON, or a line that says why there is none
check() {
    local name=$1 limit=$2 left=$((deadline - SECONDS)) code last
    shift 2
    [ "$limit" -le "$left" ] || limit=$left
    if [ "$limit" -le 0 ]; then
        code="no time left"
    else
        timeout -k 5 "$limit" "$@" > "$work/$name.log" 2>&1
        code=$?
        last=$(tail -n 1 "$work/$name.log")
        # 0: the bars hold; 1 with a last line: one does not
        case "$code:$last" in [01]:'{"name"'*) echo "$last"; return ;; esac
        [ $code -ge 124 ] && code="$code, stopped after $limit s"
    fi
    echo "{\"name\": \"$name\", \"ok\": false, \"error\": \"did not finish: $code; logs: $work\"}"
    touch "$work/failed"
}

# smoke NAME RECIPE OPTIONS...: a recipe, and its last step as JSON
summary='
import json, math, sys
name, folder = sys.argv[1:]
from rlvr_report import read_metrics
steps = [r for r in read_metrics(folder + "/metrics.jsonl") if "grad_norm" in r]
keys = ("loss", "grad_norm", "reward", "entropy", "mismatch/k3", "step_time")
figures = {"steps": len(steps)} | {k: steps[-1][k] for k in keys if k in steps[-1]}
print(json.dumps({"name": name, "figures": figures, "ok": all(math.isfinite(v) for v in figures.values())}))'
smoke() {
    local name=smoke_$1 recipe=$2
    shift 2
    check "$name" "$smoke_s" bash -c '
        name=$1 folder=$2 recipe=$3 summary=$4; shift 4
        "$python" "recipes/$recipe.py" --output_dir "$folder" "$@" && PYTHONPATH=. "$python" -c "$summary" "$name" "$folder"' \
        - "$name" "$work/$name" "$recipe" "$summary" "$@"
}
plain() {  # a recipe without metrics.jsonl
    local name=smoke_$1
    shift
    check "$name" "$smoke_s" bash -c 'name=$1; shift; "$@" && echo "{\"name\": \"$name\", \"figures\": {}, \"ok\": true}"' - "$name" "$@"
}

rm -rf "$work"/failed "$work"/smoke_* "$work"/cold "$work"/evaluate  # a run never writes into the folder of another
bench_s=$([ "$cpu" ] && echo 900 || echo 150) smoke_s=$([ "$cpu" ] && echo 600 || echo 100)
on_gpu=(bench_ares bench_step bench_replay)
beside() { if [ "$(nproc)" -ge 8 ]; then "$@" & else "$@"; fi; }  # each takes two cores at most
for path in benchmarks/bench_*.py; do
    name=$(basename "$path" .py)
    [[ " ${on_gpu[*]} " == *" $name "* ]] || CUDA_VISIBLE_DEVICES= beside check "$name" "$bench_s" "$python" "$path" --quick
done
for name in "${on_gpu[@]}"; do
    check "$name" "$bench_s" "$python" "benchmarks/$name.py" --quick --device "$device"
done

few=(--max_steps 3 --eval_problems 8 --eval_samples 1 --save_strategy no --report_to none --rollout_dtype fp8)
[ "$device" = cuda ] && few+=(--bf16 true)
beside smoke grpo_tokenclip grpo_tokenclip "${few[@]}" --gradloc_every 2
beside smoke minirl_sync minirl_sync "${few[@]}" --num_minibatches 2 --routing_replay r3
beside smoke minirl_async_r3 minirl_async_r3 "${few[@]}"
beside smoke dsv32_stable dsv32_stable "${few[@]}"
beside smoke ares_dapo ares_dapo "${few[@]}" --max_sampling_rounds 1
beside plain cold_start "$python" recipes/cold_start.py --output_dir "$work/cold" --rows 480 --copies 1 --max_steps 3 --lazy_steps 1 --heldout_rows 24
beside plain evaluate "$python" recipes/evaluate.py --output_dir "$work/evaluate" --limit 8

server=${SERVER_PYTHON:-$python}
if [ "$gpus" -ge 2 ] && has "$server" "import vllm" && has "$python" "import vllm"; then  # NCCL needs vLLM on both sides
    CUDA_VISIBLE_DEVICES=1 PYTHON=$server PORT=8731 recipes/serve_vllm.sh tiny/qwen3 --dtype float32 --max-model-len 256 \
        --gpu-memory-utilization 0.3 --weight-transfer-config '{"backend": "nccl"}' > "$work/server.log" 2>&1 &
    pid=$!
    timeout 120 bash -c 'until curl -sf http://127.0.0.1:8731/health; do sleep 1; done'
    wait $(jobs -p | grep -vx $pid)
    smoke nccl_push grpo_tokenclip "${few[@]}" --rollout_dtype float32 --engine vllm --vllm_transfer nccl \
        --vllm_server_port 8731
    kill $pid
else
    say "no push through NCCL: it needs two GPUs, and vLLM on both sides"
fi
wait
say "took $SECONDS s"
[ ! -e "$work/failed" ]
