#!/bin/bash
# Builds a User-Mode Linux with Soft-RoCE from Debian's kernel source: a kernel running as a
# process, for guest.py --uml. The build takes some minutes, once.
#
#   build_uml.sh FILE
set -euo pipefail

kernel=$(realpath -m "$1")
source=linux-source-6.12
options=(
    # user space
    64BIT PRINTK BUG MULTIUSER POSIX_TIMERS HIGH_RES_TIMERS FUTEX EPOLL EVENTFD SIGNALFD TIMERFD AIO
    FILE_LOCKING ADVISE_SYSCALLS MEMBARRIER SYSVIPC SHMEM INOTIFY_USER BINFMT_ELF BINFMT_SCRIPT BLOCK
    # terminal and files
    TTY UNIX98_PTYS STDERR_CONSOLE NULL_CHAN PROC_FS PROC_SYSCTL SYSFS TMPFS
    TMPFS_XATTR DEVTMPFS HOSTFS OVERLAY_FS
    # network
    NAMESPACES NET_NS NET UNIX PACKET INET IPV6 IP_ADVANCED_ROUTER IP_MULTIPLE_TABLES NETDEVICES
    NET_CORE VETH BRIDGE NET_SCHED NET_SCH_TBF
    # InfiniBand; its menu requires memory-mapped devices
    VIRTIO_MENU VIRTIO_UML UML_PCI_OVER_VIRTIO INFINIBAND INFINIBAND_USER_ACCESS
    INFINIBAND_ADDR_TRANS RDMA_RXE
)

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
apt-get install -qq -y --no-install-recommends gcc make flex bison bc libc6-dev xz-utils > /dev/null
(cd "$work" && apt-get -q -o APT::Sandbox::User=root download "$source")
dpkg-deb --fsys-tarfile "$work/$source"*.deb | tar -xO "./usr/src/$source.tar.xz" | tar -xJ -C "$work"
cd "$work/$source"
make -s ARCH=um allnoconfig
for option in "${options[@]}"; do scripts/config --enable "$option"; done
scripts/config --set-val UML_PCI_OVER_VIRTIO_DEVICE_ID 1234
# Room for the registers of processors with AMX, unknown to this source: the host passes either all
# registers or none. The kernel also keeps these registers on its stack, so the stack is enlarged.
sed -i 's/(HOST_FP_SIZE, 2696)/(HOST_FP_SIZE, 12288)/' arch/x86/um/user-offsets.c
grep -q '(HOST_FP_SIZE, 12288)' arch/x86/um/user-offsets.c
scripts/config --set-val KERNEL_STACK_ORDER 3
make -s ARCH=um olddefconfig
missing=()
for option in "${options[@]}"; do
    grep -qx "CONFIG_$option=y" .config || missing+=("$option")
done
[ ${#missing[@]} -eq 0 ] || { echo "the kernel source has no option ${missing[*]}" >&2 && exit 1; }
make -s ARCH=um -j"$(nproc)" linux > build.log 2>&1 || { tail -n 40 build.log >&2 && exit 1; }
mkdir -p "$(dirname "$kernel")"
mv linux "$kernel"
