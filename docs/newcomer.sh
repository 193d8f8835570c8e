#!/usr/bin/env bash
# A newcomer's way, from a checkout to a conversation that survives whatever happens: install, serve a model of your own, point a client
# at it, see it warm in the dashboard, keep it as a service, remove what was stored.  Each step says what it does, and ends the script
# where it doesn't come to what it should.
#
#     MODEL=~/models/my-model docs/newcomer.sh
#
# MODEL, HOME_DIR, PORT and BACKEND_PORT are as in `make run`, but the home is a new one by default, that of a real start is left alone.
# Without a service manager or Chromium, their steps say so and do the same in another way.
set -euo pipefail
cd "$(dirname "$0")/.."

MODEL=${MODEL:-demo}
HOME_DIR=${HOME_DIR:-$(mktemp -d)/warmline}
PORT=${PORT:-8026} BACKEND_PORT=${BACKEND_PORT:-8025}
BIN=${BIN:-.venv/bin}
NAME=newcomer # of the services, so that others stay what they are
URL=http://127.0.0.1:$PORT
export WARMLINE_HOME=$HOME_DIR WARMLINE_PORT=$PORT WARMLINE_BACKEND_PORT=$BACKEND_PORT

KEEPER=service
[[ $(uname) == Darwin ]] && KEEPER=launchd

step() { printf '\n== %s\n' "$*"; }
fail() {
    printf 'newcomer: %s\n' "$*" >&2
    exit 1
}

ask() { # QUESTION: the answer, then on a line of its own how many tokens of the prompt were reused
    "$BIN/python" - "$URL/v1" "$1" <<'PYTHON'
import sys

from openai import OpenAI

url, question = sys.argv[1:]
client = OpenAI(base_url=url, api_key="unused")
messages = [{"role": "system", "content": "You are a terse guide. " * 20}, {"role": "user", "content": question}]
answer = client.chat.completions.create(model="any-name", messages=messages, max_tokens=16)
print(answer.choices[0].message.content)
print(answer.usage.prompt_tokens_details.cached_tokens)
PYTHON
}

reused() { # MINIMUM QUESTION: sets COUNT
    local answer
    answer=$(ask "$2")
    printf '%s\n' "$answer"
    COUNT=${answer##*$'\n'}
    ((COUNT >= $1)) || fail "expected at least $1 tokens to be reused, not $COUNT"
}

page() { # the dashboard as a browser shows it, once the text that is asked for stands in it
    local browser
    browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || return 1
    timeout 60 "$browser" --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
        --user-data-dir="$(mktemp -d)" --virtual-time-budget=8000 --dump-dom "$URL/admin" 2>/dev/null
}

serve() { # sets SERVING, and waits until it is ready
    local log
    log=$(mktemp)
    "$BIN/warmline" serve --model "$MODEL" >"$log" 2>&1 &
    SERVING=$!
    until grep -q '^ready ' "$log"; do
        kill -0 "$SERVING" 2>/dev/null || fail "it does not start: $(tail -n 5 "$log")"
        sleep 0.2
    done
    grep '^ready ' "$log"
}

stop() {
    kill "$SERVING"
    wait "$SERVING" || true
}

has_service_manager() {
    [[ $KEEPER == launchd ]] || systemctl --user daemon-reload 2>/dev/null
}

step "Install"
[[ $BIN != .venv/bin ]] || make --no-print-directory setup
"$BIN/warmline" --version

step "Serve a model of your own"
"$BIN/warmline" doctor "$MODEL"
SERVING=""
trap 'kill "$SERVING" 2>/dev/null || true; "$BIN/warmline" "$KEEPER" uninstall --name "$NAME" >/dev/null 2>&1 || true' EXIT
serve

step "Point a client at it: the second time all but the last token is there"
ask "What is a lighthouse?"
reused 64 "What is a lighthouse?"

step "See it warm in the dashboard"
if dashboard=$(page); then
    grep -q "$COUNT of [0-9,]* reused" <<<"$dashboard" || fail "the dashboard does not show that $COUNT tokens were reused"
    echo "$URL/admin shows it"
else
    echo "no Chromium here to look at $URL/admin; the same from the command line:"
    "$BIN/cachectl" stats
fi
"$BIN/cachectl" explain

step "Keep it as a service: it starts from what is on disk"
stop
if has_service_manager; then
    "$BIN/warmline" "$KEEPER" install --name "$NAME" --model "$MODEL"
    "$BIN/warmline" "$KEEPER" status --name "$NAME"
else
    echo "no systemd of this user answers here; started again without a service:"
    serve
fi
reused 64 "What is a lighthouse?"
"$BIN/cachectl" doctor || true # it may have something to say of this machine
"$BIN/cachectl" ls

step "Remove what was stored, and the service"
"$BIN/cachectl" purge --all --yes
[[ $("$BIN/cachectl" ls --json | "$BIN/python" -c 'import json, sys; print(len(json.load(sys.stdin)["sessions"]))') == 0 ]] ||
    fail "something is left"
if has_service_manager; then
    "$BIN/warmline" "$KEEPER" uninstall --name "$NAME"
else
    stop
fi
echo "done; the home $HOME_DIR can be deleted"
