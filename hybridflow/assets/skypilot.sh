mapfile -t nodes <<< "$SKYPILOT_NODE_IPS"
head=${nodes[0]} node=${nodes[$SKYPILOT_NODE_RANK]} port=6399  # SkyPilot itself uses 6380
export RAY_AUTH_MODE=token RAY_TMPDIR=/tmp/hybridflow

has_head() { (: < "/dev/tcp/$head/$port") 2>/dev/null; }

role=(--head --port="$port" --include-dashboard=false)
if ((SKYPILOT_NODE_RANK)); then
  role=(--address="$head:$port")
  until has_head; do sleep 2; done
fi
ray start --block --disable-usage-stats --log-style=record --node-ip-address="$node" --node-name="$node" \
  "${role[@]}" "${devices[@]}" > >(sed -uE "/[[:space:]](INFO|SUCC)[[:space:]]/d; /^ *$/d; s/^/$node: /") 2>&1 &
ray=$!
status=0
if ((SKYPILOT_NODE_RANK)); then
  while has_head || { sleep 5; has_head; }; do sleep 5; done
else
  export RAY_ADDRESS=$head:$port
  python -m hybridflow.launch.nodes "${wait_for[@]}" "${nodes[@]}" && eval "$run"
  status=$?
fi
kill $ray
wait $ray
exit $status
