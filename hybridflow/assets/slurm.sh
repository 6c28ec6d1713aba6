mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
declare -A ray=()  # the process of each node's Ray
driver='' stopping='' watching='' lost=''

say() { printf '%s  %s\n' "$(date '+%F %T')" "$*"; }

on() {  # NODE SCRIPT WORDS...: runs a script on a node, after the setup
  local node=$1 script=$2
  shift 2
  # Since 22.05, srun does not inherit --cpus-per-task. Each step uses all cores of the job on its node.
  exec srun --overlap --nodes=1 --ntasks=1 --nodelist="$node" --cpu-bind=none \
    ${SLURM_CPUS_PER_TASK:+--cpus-per-task="$SLURM_CPUS_PER_TASK"} "${container[@]}" \
    "${inside[@]}" bash -c "$setup"$'\n'"$script" launch "$@"
}

gone() {  # the nodes whose Ray has ended
  local node
  for node in "${!ray[@]}"; do kill -0 "${ray[$node]}" 2>/dev/null || echo "$node"; done
}

watch() { until [[ -n $(gone) ]]; do sleep 2; done; kill -USR2 $$; }

insist() {  # ends a run that does not stop in time
  local second
  for ((second = 0; second < stop_seconds + 25; second++)); do
    sleep 1
    kill -0 "$driver" 2>/dev/null || return
    ((second != stop_seconds + 5)) || kill -TERM "$driver"
  done
  kill -KILL "$driver"
}

stop() {  # lets the run save a checkpoint and end
  [[ -n $driver && -z $stopping ]] || return 0
  kill -USR1 "$driver" 2>/dev/null
  insist & stopping=$!
}

requeue() {
  local state
  state=$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)
  if [[ $state != RUNNING ]]; then
    say "The job is in state ${state:-unknown}: Slurm decides whether it starts again."
  elif ((${SLURM_RESTART_COUNT:-0} >= most_requeues)); then
    say "The job is not requeued again (requeues: $most_requeues). To continue, submit it again."
  elif scontrol requeue "$SLURM_JOB_ID"; then
    say "The job is requeued, and then resumes from its last checkpoint."
  else
    say "The job could not be requeued. To continue, submit it again."
  fi
}

if [[ -n $run_file ]]; then
  file=$(mktemp /tmp/hybridflow-XXXXXX.yaml)
  printf '%s\n' "$run_file" > "$file"
  run="hybridflow run $file"
fi
run="exec $run"  # a shell that waits for it would be ended by a notice

# A notice of Slurm (time limit, preemption), and the loss of a node.
trap 'say "Notice: the run saves a checkpoint and ends."; stop' USR1 TERM
trap 'lost=$(gone | paste -sd " "); say "Ray has ended on $lost: the run is stopped."; stop' USR2

if ((${#nodes[@]} > 1)); then
  # Slurm may send its notice to all processes, but the run needs Ray until it has saved a checkpoint.
  keep_ray='trap : USR1 TERM
    trap "ended=1; kill \${ray:-\$\$}" USR2
    if [[ $1 != --head ]]; then until ray health-check "$1" &>/dev/null; do sleep 2; done; fi
    ray start --block --disable-usage-stats --log-style=record "$@" \
      > >(sed -uE "/[[:space:]](INFO|SUCC)[[:space:]]/d; /^ *\$/d; s/^/$SLURMD_NODENAME: /") 2>&1 & ray=$!
    while kill -0 $ray 2>/dev/null; do wait $ray; done
    [[ -z $ended ]] || rm -rf "$RAY_TMPDIR"'
  export RAY_AUTH_MODE=token RAY_TMPDIR=/tmp/ray-$SLURM_JOB_ID
  RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
  export RAY_AUTH_TOKEN
  port=$((20000 + SLURM_JOB_ID % 10000))
  for node in "${nodes[@]}"; do
    role=(--address="$head:$port")
    [[ $node != "$head" ]] || role=(--head --port="$port" --include-dashboard=false)
    # The address by which the nodes reach one another; of several networks, Ray might choose another.
    ip=$(getent ahostsv4 "$node" | awk '$1 !~ /^127\.0\.[01]\.1$/ { print $1; exit }')
    on "$node" "$keep_ray" "${role[@]}" --node-name="$node" ${ip:+--node-ip-address="$ip"} "${devices[@]}" &
    ray[$node]=$!
  done
  watch & watching=$!
  run="export RAY_ADDRESS=$head:$port
    python -m hybridflow.launch.nodes ${wait_for[*]} ${nodes[*]} || exit
    $run"
fi

say "Start ${SLURM_RESTART_COUNT:-0} on ${nodes[*]}"
on "$head" "$run" &
driver=$!
while wait "$driver"; status=$?; kill -0 "$driver" 2>/dev/null; do :; done  # a notice interrupts wait

trap '' USR1 TERM USR2
for process in $watching $stopping; do kill "$process" 2>/dev/null; done
say "The run has ended with exit status $status."
case $status in
  0) ;;
  75 | 138 | 143) requeue ;;  # a notice; 138 and 143 if the run had not begun
  *) [[ -z $lost ]] || requeue ;;
esac
for node in "${!ray[@]}"; do kill -USR2 "${ray[$node]}" 2>/dev/null; done
wait
[[ -z $run_file ]] || rm -f "$file"
exit "$status"
