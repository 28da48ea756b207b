#!/usr/bin/env bash
# Prints the Kubernetes objects that train a configuration: an Indexed Job, a pod a node, and the service they meet at.
# Usage: launchers/k8s.sh [--max-restarts N] CONFIG [key=value ...] | kubectl apply -f -
#        launchers/k8s.sh --dry-run CONFIG [key=value ...]     says in a line what would run where
#   IMAGE           container image with this repository at /workspace (needed)
#   NAME=eco-dist   name of the job
#   NNODES=1        pods
#   NPROC_PER_NODE  ranks and GPUs a pod (8 unless set)
set -euo pipefail
cd "$(dirname "$0")/.."
NPROC_PER_NODE=${NPROC_PER_NODE:-8}
. launchers/arguments.sh

name=${NAME:-eco-dist} nnodes=${NNODES:-1} image=${IMAGE:?expected IMAGE, a container image with this repository at /workspace}
arguments=""
for word in --config "$config" "${overrides[@]}"; do
    arguments+=", \"${word//\"/\\\"}\""
done
if [ "$dry_run" = 1 ]; then
    echo "$nnodes pods $name-0 to $name-$((nnodes - 1)) of $image, $ranks_per_node ranks each, meeting at $name-0.$name:29500:"
    printf '  %q' torchrun --nnodes="$nnodes" --nproc-per-node="$ranks_per_node" --max-restarts="$max_restarts" -m eco_dist train --config "$config" "${overrides[@]}"
    echo
    exit 0
fi
cat <<YAML
apiVersion: v1
kind: Service
metadata:
  name: $name
spec:
  clusterIP: None
  publishNotReadyAddresses: true
  selector:
    job-name: $name
---
apiVersion: batch/v1
kind: Job
metadata:
  name: $name
spec:
  completionMode: Indexed
  completions: $nnodes
  parallelism: $nnodes
  backoffLimit: 0
  template:
    spec:
      subdomain: $name
      restartPolicy: Never
      containers:
        - name: train
          image: $image
          workingDir: /workspace
          command: ["torchrun"]
          args: ["--nnodes=$nnodes", "--nproc-per-node=$ranks_per_node", "--node-rank=\$(NODE_RANK)",
                 "--master-addr=$name-0.$name", "--master-port=29500", "--max-restarts=$max_restarts", "-m", "eco_dist", "train"$arguments]
          env:
            - name: NODE_RANK
              valueFrom:
                fieldRef:
                  fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
          resources:
            limits:
              nvidia.com/gpu: $ranks_per_node
          volumeMounts:
            - name: shm
              mountPath: /dev/shm
      volumes:
        - name: shm
          emptyDir:
            medium: Memory
YAML
