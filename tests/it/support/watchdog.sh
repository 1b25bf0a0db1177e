# Ends a throw-away PostgreSQL once nobody uses it, however its users ended.
#
# Every user holds a shared lock on DIRECTORY/users for as long as it lives. Whoever comes while the
# server is being ended waits for that lock, finds the directory gone, and starts anew.
directory=$1
grace=$2
while [ -d "$directory" ]; do
    flock --exclusive "$directory/users" true
    sleep "$grace"
    flock --exclusive --nonblock "$directory/users" sh -c '
        for file in "$1"/*/postmaster.pid; do
            [ -f "$file" ] || continue
            pid=$(head -n 1 "$file")
            kill -INT "$pid"
            tries=0
            while kill -0 "$pid" 2>/dev/null; do
                tries=$((tries + 1))
                [ "$tries" -eq 100 ] && kill -QUIT "$pid"
                sleep 0.1
            done
        done
        rm -rf "$1"
    ' sh "$directory"
done
