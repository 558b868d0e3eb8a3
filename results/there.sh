# What a machine without a network runs between loads of `python -m results.travel`. Source it: `. there.sh /root/there /root/rows`.
#   receive LOAD…                                   unpack loads; call it after each of them
#   start NAME PLAN PATTERN WORKERS MINUTES …        a study that goes on after the shell ends; rows lie in ROWS/NAME
#   home FILE                                        pack all rows and logs into FILE: after every call, since the machine may go
# Rows belong outside any folder that is emptied between calls. Three runs of Qwen 0.5B with vLLM fill a card of 139 GiB.
there=$1 rows=$2
mkdir -p "$there" "$rows"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 HF_DATASETS_OFFLINE=1 TOKENIZERS_PARALLELISM=false VLLM_NO_USAGE_STATS=1
export PYTHONPATH=$there/code/src:$there/code:$there/packages
pgrep -f nvidia-cuda-mps-control > /dev/null || nvidia-cuda-mps-control -d # small runs share the card

receive() { for load; do python3 "$load/receive.py" "$load" "$there"; done; }

start() {
  local name=$1 plan=$2 pattern=$3 workers=$4 minutes=$5
  shift 5
  (cd "$there/code" && setsid nohup python3 -W ignore -m results.study --plan "$plan" --only "$pattern" --device cuda \
    --workers "$workers" --minutes "$minutes" --out "$rows/$name" --done "$rows" --commit "$(cat "$there/COMMIT")" "$@" \
    > "$rows/$name.log" 2>&1 < /dev/null &)
}

home() {
  tar czf "$1" -C "$(dirname "$rows")" "$(basename "$rows")"
  tail -n 2 "$rows"/*.log
  nvidia-smi --query-gpu=utilization.gpu,memory.used --format=csv,noheader
}
