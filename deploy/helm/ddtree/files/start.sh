#!/bin/sh
# Starts tritonserver with the arguments given, after things that only the running container can do.
set -eu

# /dev/shm outlives a container that was killed: what its predecessor left would fill it up.
rm -rf /dev/shm/ddtree_server_*
# So does /tmp: a gate that was shut for the last container's end would keep this one from serving.
rm -f "${DDTREE_DRAIN_FILE:-}"

# Everything but inference and health is behind a key. Without one it is random and kept nowhere: closed to all.
if [ -s /etc/ddtree-admin/key ]; then
    key="$(cat /etc/ddtree-admin/key)"
else
    key="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
fi
closed="shared-memory,model-repository,model-config,statistics,trace,logging"

# Loads a stage again whose process died, with the key that nobody else knows. It ends with the server, whose
# process id will be this shell's.
if [ -n "${DDTREE_WATCHED:-}" ]; then
    # shellcheck disable=SC2086 # several models
    DDTREE_ADMIN_KEY="$key" ddtree watchdog --server-pid=$$ --http="${DDTREE_WATCHED_HTTP:-127.0.0.1:8000}" \
        ${DDTREE_WATCHED} &
fi

exec tritonserver "$@" \
    --grpc-restricted-protocol="${closed}:admin-key=${key}" \
    --http-restricted-api="${closed}:admin-key=${key}"
