#!/usr/bin/env bash
# Two hosts on one machine, for trying and testing runs over several hosts. Needs root, Linux, iproute2, openssh-server.
#
#   launch/two_hosts.sh up DIR                   host-a (10.77.ID.1) and host-b (10.77.ID.2), an sshd in each
#   launch/two_hosts.sh exec DIR a COMMAND...    run a command on host-a
#   launch/two_hosts.sh cut DIR b                pull host-b's network cable;   heal DIR b   plugs it in again
#   launch/two_hosts.sh crash DIR b              end every process of host-b at once; its network still answers for them
#   launch/two_hosts.sh off DIR b                pull the cable and end every process of host-b at once: a power failure
#   launch/two_hosts.sh down DIR                 end all processes of both hosts and remove everything but DIR
#
# Each host is a network, host name, process and mount namespace of its own; a third network namespace is the switch between
# them. The files of the machine are shared, except for DIR/a and DIR/b, which each host sees as DIR/disk, and what is listed
# as `HOST PATH OF THIS MACHINE PATH ON THE HOST` in DIR/mounts before `up`. SSH from one host to the other needs no password.
# DIR/hostfile names both. DIR/env (NAME=value lines; {host} stands for a or b) is the environment of every process there.
set -Eeuo pipefail

die() { echo "two_hosts.sh: $*" >&2; exit 1; }

[ $# -ge 2 ] || { sed -n '2,17s/^# \{0,1\}//p' "$0"; exit 2; }
verb=$1; dir=$2; shift 2
[ "$(id -u)" = 0 ] || die "namespaces need root"
for tool in ip unshare nsenter ssh ssh-keygen; do command -v $tool >/dev/null || die "$tool is not installed"; done
sshd=$(command -v sshd || echo /usr/sbin/sshd)

up() {
    [ -x "$sshd" ] || die "sshd is not installed (Debian: apt-get install openssh-server)"
    [ ! -e "$dir/id" ] || die "$dir already holds two hosts: launch/two_hosts.sh down $dir"
    mkdir -p "$dir"/{a,b,disk} /run/sshd
    local id=1
    while ! ip netns add "bt$id-switch" 2>/dev/null; do
        id=$((id + 1)); [ $id -lt 250 ] || die "cannot make a network namespace"
    done
    echo $id >"$dir/id"
    printf 'host-a slots=1\nhost-b slots=1\n' >"$dir/hostfile"
    trap down ERR
    ip -n "bt$id-switch" link add br0 type bridge
    ip -n "bt$id-switch" link set br0 up
    keys
    # As installers of Debian and Ubuntu write it: a host's own name leads to its loopback address.
    printf '127.0.0.1 localhost\n127.0.1.1 host-a\n10.77.%d.2 host-b\n' "$id" >"$dir/hosts.a"
    printf '127.0.0.1 localhost\n127.0.1.1 host-b\n10.77.%d.1 host-a\n' "$id" >"$dir/hosts.b"
    start a 1
    start b 2
    reachable a b; reachable b a
}

keys() {
    rm -f "$dir"/{key,hostkey}{,.pub}
    ssh-keygen -q -t ed25519 -N '' -f "$dir/key" </dev/null
    ssh-keygen -q -t ed25519 -N '' -f "$dir/hostkey" </dev/null
    cat >"$dir/ssh_config" <<END
Host *
    IdentityFile $dir/key
    IdentitiesOnly yes
    StrictHostKeyChecking no
    UserKnownHostsFile /dev/null
    LogLevel ERROR
    ServerAliveInterval 5
    ServerAliveCountMax 6
END
    local name
    for name in a b; do
        cat >"$dir/sshd_config.$name" <<END
HostKey $dir/hostkey
AuthorizedKeysFile $dir/key.pub
PermitRootLogin yes
PasswordAuthentication no
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
END
        { echo "BIGTRAIN_HOST=$name"; [ ! -f "$dir/env" ] || sed "s/{host}/$name/g" "$dir/env"; } >"$dir/env.$name"
        sed 's/\\/\\\\/g; s/"/\\"/g; s/^\([^=]*\)=\(.*\)$/"\1=\2"/' "$dir/env.$name" | tr '\n' ' ' |
            sed 's/^/SetEnv /' >>"$dir/sshd_config.$name"
    done
}

start() { # NAME NUMBER
    local id name=$1 ns
    id=$(cat "$dir/id"); ns=bt$id-$name
    ip netns add "$ns"
    ip -n "bt$id-switch" link add "port-$name" type veth peer name eth0 netns "$ns"
    ip -n "bt$id-switch" link set "port-$name" master br0 up
    ip -n "$ns" addr add "10.77.$id.$2/24" dev eth0
    ip -n "$ns" link set eth0 up
    ip -n "$ns" link set lo up
    # Process 1 of the new process namespace is sshd: when it ends, the kernel ends every other process of the host.
    setsid ip netns exec "$ns" unshare --uts --mount --pid --fork --kill-child bash -euc '
        dir=$1; name=$2; sshd=$3
        hostname "host-$name"
        mount --make-rprivate /
        mount -t proc proc /proc
        mount --bind "$dir/$name" "$dir/disk"
        mount --bind "$dir/hosts.$name" /etc/hosts
        mount --bind "$dir/ssh_config" /etc/ssh/ssh_config
        if [ -f "$dir/mounts" ]; then
            while read -r host from to; do [ "$host" != "$name" ] || mount --bind "$from" "$to"; done <"$dir/mounts"
        fi
        exec "$sshd" -D -e -f "$dir/sshd_config.$name"' bash "$dir" "$name" "$sshd" </dev/null >"$dir/sshd.$name.log" 2>&1 &
    local outer=$! _
    for _ in $(seq 100); do # the child of `unshare` is process 1 of the host
        local inner
        inner=$(cat "/proc/$outer/task/$outer/children" 2>/dev/null | tr -d ' ') || true
        if [ -n "$inner" ] && grep -q sshd "/proc/$inner/comm" 2>/dev/null; then
            echo "$inner" >"$dir/pid.$name"
            return
        fi
        kill -0 $outer 2>/dev/null || break
        sleep 0.05
    done
    die "host-$name did not start: $(tail -3 "$dir/sshd.$name.log")"
}

reachable() { # FROM TO
    local _
    for _ in $(seq 40); do
        ! inside "$1" ssh -o ConnectTimeout=1 "host-$2" true 2>/dev/null || return 0
        sleep 0.1
    done
    die "host-$1 does not reach host-$2 by ssh: $(tail -3 "$dir/sshd.$2.log")"
}

inside() { # NAME COMMAND...
    local name=$1; shift
    mapfile -t values <"$dir/env.$name"
    nsenter -t "$(cat "$dir/pid.$name")" -n -u -m -p -- env -C "$PWD" "${values[@]}" "$@"
}

down() {
    [ -f "$dir/id" ] || return 0
    local id name
    id=$(cat "$dir/id")
    for name in a b; do
        [ ! -f "$dir/pid.$name" ] || kill -9 "$(cat "$dir/pid.$name")" 2>/dev/null || true
        ip netns del "bt$id-$name" 2>/dev/null || true
        rm -f "$dir/pid.$name"
    done
    ip netns del "bt$id-switch" 2>/dev/null || true
    rm -f "$dir/id"
}

port() { ip -n "bt$(cat "$dir/id")-switch" link set "port-$1" "$2"; }

dir=$(mkdir -p "$dir" && cd "$dir" && pwd)
case $verb in
up) up ;;
exec) inside "$@" ;;
cut) port "$1" down ;;
heal) port "$1" up ;;
crash) kill -9 "$(cat "$dir/pid.$1")" ;;
off) port "$1" down; kill -9 "$(cat "$dir/pid.$1")" ;;
down) down ;;
*) die "unknown verb $verb" ;;
esac
