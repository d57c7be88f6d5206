#!/bin/sh
# Starts tritonserver with the arguments given, after two things that only the running container can do.
set -eu

# /dev/shm outlives a container that was killed: what its predecessor left would fill it up.
rm -rf /dev/shm/ddtree_server_*

# Everything but inference and health is behind a key. Without one it is random and kept nowhere: closed to all.
if [ -s /etc/ddtree-admin/key ]; then
    key="$(cat /etc/ddtree-admin/key)"
else
    key="$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')"
fi
closed="shared-memory,model-repository,model-config,statistics,trace,logging"

exec tritonserver "$@" \
    --grpc-restricted-protocol="${closed}:admin-key=${key}" \
    --http-restricted-api="${closed}:admin-key=${key}"
