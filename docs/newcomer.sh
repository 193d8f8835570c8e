#!/usr/bin/env bash
# A newcomer's way, from an installation to its removal, as the README and --help have it: install, serve, connect a client, see a warm
# turn, find why another was cold, keep the server as a service, purge one conversation, uninstall.  Each step says what it does and how
# long it took, and ends the script where it doesn't come to what it should.
#
#     SOURCE=dist/warmline-0.1.0-py3-none-any.whl MODEL=~/models/my-model docs/newcomer.sh
#
# SOURCE is a wheel, a checkout or a git+URL; `make newcomer` gives the wheel of this checkout.  MODEL, PORT and BACKEND_PORT are as in
# `make run`, and UV is uv's command.  Programs, settings and the home are in a new folder, which is removed at the end: what is installed
# and stored already is left alone.  Without a service manager or Chromium, their steps say so and do the same in another way.
set -euo pipefail

SOURCE=${SOURCE:?a wheel, a checkout or a git+URL}
MODEL=${MODEL:-demo}
FOLDER=$(mktemp -d)
PORT=${PORT:-8026} BACKEND_PORT=${BACKEND_PORT:-8025}
UV=${UV:-uv}
NAME=newcomer # of the services, so that others stay what they are
URL=http://127.0.0.1:$PORT
SYSTEM="You are a terse guide. $(printf 'Answer in one short sentence. %.0s' {1..40})"
export WARMLINE_HOME=$FOLDER/home WARMLINE_PORT=$PORT WARMLINE_BACKEND_PORT=$BACKEND_PORT
export UV_TOOL_DIR=$FOLDER/tools UV_TOOL_BIN_DIR=$FOLDER/bin PATH=$FOLDER/bin:$PATH
[[ $SOURCE != *://* ]] && SOURCE=file://$(cd "$(dirname "$SOURCE")" && pwd)/$(basename "$SOURCE")

KEEPER=service
[[ $(uname) == Darwin ]] && KEEPER=launchd

STEP="" STEP_BEGAN=0
step() { # TITLE: ends the step before
    [[ -z $STEP ]] || printf -- '-- %s: %d s\n' "$STEP" $((SECONDS - STEP_BEGAN))
    STEP=$1 STEP_BEGAN=$SECONDS
    printf '\n== %s\n' "$1"
}
fail() {
    printf 'newcomer: %s\n' "$*" >&2
    exit 1
}

take_turn() { # MINIMUM ARGUMENTS: ask the client, show what was reused and how long the first token took; sets COUNT, and SHOWN
    local answer report minimum=$1
    shift
    warmline launch llm -- --option max_tokens 8 "$@"
    answer=$(LLM_USER_PATH=$WARMLINE_HOME/launch/llm llm logs --count 1 --json | sed -n 's/.*"id": "\(chatcmpl-[^"]*\)".*/\1/p')
    report=$(cachectl explain "$answer")
    grep -E '^(reused|first token) ' <<<"$report"
    SHOWN=$(sed -n 's/^reused \([0-9,]*\) of .*/\1/p' <<<"$report")
    COUNT=${SHOWN//,/}
    ((COUNT >= minimum)) || fail "expected at least $minimum tokens to be reused, not $COUNT"
}

page() { # the dashboard as a browser shows it
    local browser
    browser=$(command -v chromium || command -v chromium-browser || command -v google-chrome) || return 1
    timeout 60 "$browser" --headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking \
        --user-data-dir="$(mktemp -d "$FOLDER/browser.XXXX")" --virtual-time-budget=8000 --dump-dom "$URL/admin" 2>/dev/null
}

serve() { # sets SERVING, and waits until it is ready
    local log=$FOLDER/serve.log
    warmline serve --model "$MODEL" >"$log" 2>&1 &
    SERVING=$!
    until grep -q '^ready ' "$log"; do
        kill -0 "$SERVING" 2>/dev/null || fail "it does not start: $(tail -n 5 "$log")"
        sleep 0.2
    done
    cat "$log"
}

stop() {
    kill "$SERVING"
    wait "$SERVING" || true
}

has_service_manager() {
    [[ $KEEPER == launchd ]] || systemctl --user daemon-reload 2>/dev/null
}

clean_up() {
    kill "$SERVING" 2>/dev/null || true
    ! command -v warmline >/dev/null || warmline "$KEEPER" uninstall --name "$NAME" >/dev/null 2>&1 || true
    rm -rf "$FOLDER"
}
SERVING=""
trap clean_up EXIT

step "Install"
"$UV" tool install --quiet "warmline[demo] @ $SOURCE"
[[ $(command -v warmline) == "$FOLDER/bin/warmline" ]] || fail "uv did not install the command warmline"
warmline --version
cd "$FOLDER" # nothing is read from a checkout

step "Serve"
serve
warmline doctor "$MODEL"

step "Connect a client: the second turn computes its own tokens alone"
"$UV" tool install --quiet llm
take_turn 0 --system "$SYSTEM" "What is a lighthouse?"
take_turn 200 --continue "And what is a ferry?"

step "See it warm in the dashboard"
if dashboard=$(page); then
    grep -q "$SHOWN of [0-9,]* reused" <<<"$dashboard" || fail "the dashboard does not show that $SHOWN tokens were reused"
    echo "$URL/admin shows it"
else
    echo "no Chromium here to look at $URL/admin; the same from the command line:"
    cachectl stats
fi

step "Find why a turn was cold: its system text has a clock"
take_turn 0 --system "It is 10:02. $SYSTEM" "What is a lighthouse?"
((COUNT < 100)) || fail "expected a cold turn, and $COUNT tokens were reused"
explanation=$(cachectl explain)
printf '%s\n' "$explanation"
grep -q 'It is 10:02' <<<"$explanation" || fail "the explanation does not show the text that differs"

step "Keep it as a service: it starts from what is on disk"
stop
if has_service_manager; then
    warmline "$KEEPER" install --name "$NAME" --model "$MODEL"
    warmline "$KEEPER" status --name "$NAME"
else
    echo "no systemd of this user answers here; started again without a service:"
    serve
fi
take_turn 200 --system "$SYSTEM" "What is a lighthouse?"
cachectl doctor || true # it may have something to say of this machine

step "Purge one conversation: that with the clock"
session=$(sed -n 's/.* in session \([0-9a-f]*\).*/\1/p' <<<"$explanation")
cachectl ls
cachectl purge --session "$session" --yes
left=$(cachectl ls)
grep -q '[0-9a-f]\{12\}' <<<"$left" || fail "the other conversations are gone as well"
! grep -q "$session" <<<"$left" || fail "the conversation $session is still listed"

step "Uninstall"
if has_service_manager; then
    warmline "$KEEPER" uninstall --name "$NAME"
else
    stop
fi
"$UV" tool uninstall --quiet warmline
! [[ -e $FOLDER/bin/warmline ]] || fail "the command warmline is still there"
rm -r "$WARMLINE_HOME"

step "Done in $SECONDS s"
