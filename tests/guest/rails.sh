#!/bin/bash
# Soft-RoCE rails of the guest, and their faults.
#
#   rails.sh create NODES RAILS
#   rails.sh down DEV | up DEV           the NIC goes down; its RDMA device reports an event
#   rails.sh unplug DEV | plug DEV       the NIC's cable is pulled
#   rails.sh mute DEV | unmute DEV       the NIC's switch port drops all frames, without an event
#   rails.sh deafen DEV | undeafen DEV   the NIC's switch port drops only the frames to the NIC
#   rails.sh narrow DEV | widen DEV      the NIC's switch port drops frames above 1500 bytes
#   rails.sh move DEV HOST               the NIC's address becomes 10.R.0.HOST
#   rails.sh mtu DEV BYTES
#   rails.sh limit DEV KBIT | unlimit DEV  the NIC and its switch port send at most KBIT kbit/s
#
# The NIC of node N on rail R is nNrR with address 10.R.0.(N+1), its RDMA device rxe_nNrR. Each
# rail has a bridge as its switch, and the switch port of nNrR is pnNrR. Each node also has a NIC
# without RDMA, nNt with address 10.200.0.(N+1). Soft-RoCE of these kernels exists in a single
# network namespace, so all nodes share it; routing rules send the frames of a NIC over its wire.
set -eu

load() { # MODULE...: loads the modules, if this kernel has any
    [ ! -d "/lib/modules/$(uname -r)" ] || modprobe -a "$@"
}

# Process starts are kept to a minimum, because each takes a quarter of a second in the guest.

parse() { # NIC: sets node, rail and mac
    [[ $1 =~ ^n([0-9]+)r([0-9]+)$ ]] || { echo "rails.sh: $1 is not the name of a NIC" >&2 && exit 2; }
    node=${BASH_REMATCH[1]} rail=${BASH_REMATCH[2]}
    printf -v mac '02:00:00:00:%02x:%02x' "$node" "$rail"
}

say() { batch+="$*"$'\n'; } # adds a line to the input of `ip -batch`

do_it() {
    ip -batch - <<< "$batch"
    batch=
}

# Adds permanent neighbour entries; a NIC loses its entries when it goes down. Without an entry, the
# ARP answer may come before the RDMA core listens, and connecting then takes 1 s.
meet_neighbours() { # NIC NODES
    local nic=$1 own others=$2 other node rail mac
    parse "$nic"
    own=$node
    for ((other = 0; other < others; other++)); do
        ((other != own)) || continue
        parse "n${other}r$rail"
        say neigh replace "10.$rail.0.$((other + 1))" lladdr "$mac" dev "$nic" nud permanent
    done
}

attach() { # NIC BRIDGE ADDRESS [OPTION...]
    say link add "$1" up mtu 4200 "${@:4}" type veth peer name "p$1" mtu 4200
    say link set "p$1" master "$2" up
    say rule add pref 10 oif "$1" lookup main
    say addr add "$3/24" dev "$1"
}

create() { # NODES RAILS
    local nodes=$1 rails=$2 at nic nics=() node rail mac devices=
    load veth bridge rdma_rxe ib_uverbs
    for at in all default; do
        echo 0 > /proc/sys/net/ipv4/conf/$at/rp_filter
        echo 1 > /proc/sys/net/ipv4/conf/$at/accept_local # packets of this machine's other NICs
        echo 1 > /proc/sys/net/ipv4/conf/$at/arp_ignore   # a NIC answers only for its own address
    done
    # Placed before the table of local addresses, because this table keeps all packets inside.
    say rule add pref 100 lookup local
    say rule del pref 0
    for ((at = 0; at < rails; at++)); do say link add "rail$at" up type bridge; done
    for ((at = 0; at < nodes * rails; at++)); do
        nic=n$((at / rails))r$((at % rails))
        parse "$nic"
        attach "$nic" "rail$rail" "10.$rail.0.$((node + 1))" address "$mac"
        nics+=("$nic")
        devices+="link add rxe_$nic type rxe netdev $nic"$'\n'
    done
    say link add plain up type bridge
    for ((at = 0; at < nodes; at++)); do attach "n${at}t" plain "10.200.0.$((at + 1))"; done
    for nic in "${nics[@]}"; do meet_neighbours "$nic" "$nodes"; done
    do_it
    rdma -b - <<< "$devices"
}

batch=
case ${1:-} in
    create) create "$2" "$3" ;;
    down) ip link set "$2" down ;;
    up)
        parse "$2"
        nodes=(/sys/class/net/n*r"$rail")
        say link set "$2" up
        meet_neighbours "$2" "${#nodes[@]}"
        do_it
        ;;
    unplug) ip link set "p$2" down ;;
    plug) ip link set "p$2" up ;;
    mute) bridge link set dev "p$2" state 0 ;;
    unmute) bridge link set dev "p$2" state 3 ;;
    deafen)
        # The switch forgets the port of the NIC and does not flood to this port. (No tc filter: the
        # first filter patches kernel code, and this may crash an emulated second processor.)
        parse "$2"
        bridge link set dev "p$2" learning off flood off
        bridge fdb del "$mac" dev "p$2" master
        ;;
    undeafen) bridge link set dev "p$2" learning on flood on ;;
    narrow) ip link set "p$2" mtu 1500 ;;
    widen) ip link set "p$2" mtu 4200 ;;
    move)
        parse "$2"
        say addr flush dev "$2" scope global
        say addr add "10.$rail.0.$3/24" dev "$2"
        for other in /sys/class/net/n*r"$rail"; do
            [ "${other##*/}" = "$2" ] ||
                say neigh replace "10.$rail.0.$3" lladdr "$mac" dev "${other##*/}" nud permanent
        done
        do_it
        ;;
    mtu) ip link set "$2" mtu "$3" ;;
    limit)
        load sch_tbf
        # Deep enough for all frames in flight of a queue pair: slow, but lossless.
        for dev in "$2" "p$2"; do
            tc qdisc replace dev "$dev" root tbf rate "$3kbit" burst 16kb limit 16mb
        done
        ;;
    unlimit) for dev in "$2" "p$2"; do tc qdisc del dev "$dev" root; done ;;
    *) sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2 && exit 2 ;;
esac
