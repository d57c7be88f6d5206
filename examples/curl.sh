#!/usr/bin/env bash
# The gateway by hand: make serve GATEWAY_PORT=9000
set -euo pipefail
url="${OPENAI_BASE_URL:-http://localhost:9000/v1}"
key="${OPENAI_API_KEY:-none}"

curl -sS "$url/models" -H "Authorization: Bearer $key"
echo

curl -sS "$url/chat/completions" -H "Authorization: Bearer $key" -H "Content-Type: application/json" -d '{
  "model": "ddtree",
  "messages": [{"role": "user", "content": "Name three colours."}],
  "max_tokens": 16, "temperature": 0
}'
echo

# -N shows every event as it comes.
curl -sS -N "$url/completions" -H "Authorization: Bearer $key" -H "Content-Type: application/json" -d '{
  "model": "ddtree", "prompt": "The sky is", "max_tokens": 8, "temperature": 0, "stream": true
}'
